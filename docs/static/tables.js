// Keep a short name or option on one line: a browser would break --text behind its hyphens.
for (const word of document.querySelectorAll("article code.literal .pre")) {
  word.classList.toggle("short", word.textContent.length <= 18);
}

// Give each cell of a wide table its column's title, which site.css shows where a row does not fit: on a phone.
for (const table of document.querySelectorAll("article table.docutils")) {
  const titles = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
  if (titles.length > 3) {
    table.classList.add("wide");
    table.setAttribute("role", "table"); // a table to a screen reader, however it is laid out
    for (const row of table.querySelectorAll("tbody tr")) {
      row.setAttribute("role", "row");
      [...row.cells].forEach((cell, i) => {
        cell.setAttribute("role", "cell");
        cell.dataset.title = titles[i];
        const words = cell.textContent.trim();
        cell.classList.toggle("empty", words === "");
        cell.classList.toggle("words", words.length > 24);
      });
    }
  }
}
