// Keep a short name or option on one line: a browser would break --text behind its hyphens.
for (const word of document.querySelectorAll("article code.literal .pre")) {
  word.classList.toggle("short", word.textContent.length <= 18);
}

// Give each cell of a wide table its column's title, which site.css shows where a row does not fit: on a phone.
function fold(table, titles) {
  table.classList.add("wide");
  table.setAttribute("role", "table"); // a table to a screen reader, however it is laid out
  for (const row of table.querySelectorAll("tbody tr")) {
    row.setAttribute("role", "row");
    [...row.cells].forEach((cell, i) => {
      cell.setAttribute("role", "cell");
      cell.dataset.title = titles[i] ?? "";
      const words = cell.textContent.trim();
      cell.classList.toggle("empty", words === "");
      cell.classList.toggle("words", words.length > 24);
    });
  }
}

// A table of up to three columns is wide if it does not fit, which depends on the reader's fonts.
const narrow = new Map();
for (const table of document.querySelectorAll("article table.docutils")) {
  const titles = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
  if (titles.length > 3) fold(table, titles);
  else narrow.set(table, titles);
}
function check() {
  for (const [table, titles] of narrow) {
    const box = table.parentElement;
    if (box.scrollWidth > box.clientWidth + 1) {
      fold(table, titles);
      narrow.delete(table);
    }
  }
}
check();
document.fonts.ready.then(check);
window.addEventListener("resize", check);
