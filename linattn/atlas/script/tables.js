// Tables that are wider than their place are folded: each row becomes a block in which every cell has the name of its column.
import { spoken } from "./words.js";

const LONG = 6; // rows of a table that a phone shows closed

export function foldTables() {
  for (const details of innerWidth > 620 ? [] : document.querySelectorAll("details.measured")) details.open = details.querySelectorAll("tbody tr").length <= LONG;
  const places = [...document.querySelectorAll(".scroll")];
  const all = () => places.forEach(fold);
  for (const place of places) new MutationObserver(() => fold(place)).observe(place, { childList: true, subtree: true });
  addEventListener("resize", all);
  addEventListener("toggle", all, true); // a table in what was closed
  spoken(all);
}

function fold(place) {
  const table = place.querySelector("table");
  if (!table?.tHead) return;
  table.classList.remove("folded");
  const wide = place.scrollWidth > place.clientWidth + 1;
  table.classList.toggle("folded", wide);
  place.tabIndex = wide ? -1 : 0; // nothing to scroll
  const roles = [[table], [...table.tBodies], [...table.rows], [...table.querySelectorAll("td")]];
  for (const [i, name] of ["table", "rowgroup", "row", "cell"].entries()) { // which a block does not have by itself
    for (const node of roles[i]) wide ? node.setAttribute("role", name) : node.removeAttribute("role");
  }
  if (!wide) return;
  const heads = [...table.tHead.rows[0].cells].map(columnName);
  for (const body of table.tBodies) {
    for (const row of body.rows) {
      let column = -1;
      for (const cell of row.cells) {
        if (cell.lang !== "zh-Hans") column++; // the same cell in the other language
        Object.assign(cell.dataset, heads[column]);
        cell.classList.toggle("empty", cell.textContent === "–");
      }
    }
  }
}

function columnName(head) {
  const of = (code) => (head.querySelector(`span[lang="${code}"]`) ?? head).textContent.trim();
  return { columnEn: of("en"), columnZh: of("zh-Hans") };
}
