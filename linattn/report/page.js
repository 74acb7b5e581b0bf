(() => {
  const root = document.documentElement, codes = { en: "en", zh: "zh-Hans" };
  const toggle = document.querySelector("[data-switch=language]"), title = document.querySelector("title");
  function stored(value) {
    try {
      if (value) localStorage.setItem("linattn-language", value);
      return localStorage.getItem("linattn-language");
    } catch {
      return null; // pages from disk may have no storage
    }
  }
  function speak(chosen) {
    const other = chosen === "en" ? "zh" : "en", Name = chosen === "en" ? "En" : "Zh";
    root.lang = codes[chosen];
    toggle.dataset.other = other;
    toggle.lang = codes[other];
    toggle.textContent = other === "zh" ? "中文" : "English";
    toggle.setAttribute("aria-label", toggle.textContent);
    document.title = title.dataset[`title${Name}`];
    for (const node of document.querySelectorAll("[data-label-en]")) node.setAttribute("aria-label", node.dataset[`label${Name}`]);
  }
  const asked = new URLSearchParams(location.search).get("lang") ?? stored();
  speak(asked in codes ? asked : navigator.language.startsWith("zh") ? "zh" : "en");
  toggle.addEventListener("click", () => {
    stored(toggle.dataset.other);
    speak(toggle.dataset.other);
  });

  // A table that is wider than its place is folded: each row becomes a block in which every cell has the name of its column.
  function fold(place) {
    const table = place.querySelector("table"), name = (head, code) => (head.querySelector(`span[lang="${code}"]`) ?? head).textContent.trim();
    table.classList.remove("folded");
    const wide = place.scrollWidth > place.clientWidth + 1;
    table.classList.toggle("folded", wide);
    place.tabIndex = wide ? -1 : 0; // nothing to scroll
    for (const [role, nodes] of [["table", [table]], ["rowgroup", table.tBodies], ["row", table.rows], ["cell", table.querySelectorAll("td")]]) {
      for (const node of nodes) wide ? node.setAttribute("role", role) : node.removeAttribute("role");
    }
    const heads = [...table.tHead.rows[0].cells].map((head) => ({ columnEn: name(head, "en"), columnZh: name(head, "zh-Hans") }));
    for (const row of wide ? table.tBodies[0].rows : []) {
      for (const [i, cell] of [...row.cells].entries()) {
        Object.assign(cell.dataset, heads[i]);
        cell.classList.toggle("empty", cell.textContent === "–");
      }
    }
  }
  const tables = [...document.querySelectorAll(".scroll")].filter((place) => place.querySelector("thead"));
  const all = () => tables.forEach(fold);
  all();
  addEventListener("resize", all);
  toggle.addEventListener("click", all);
})();
