// Mixers in the order of the needs that are chosen, by measured numbers.
import { figure } from "./figures.js";
import { element, named, words } from "./words.js";

// Ranks from 1 of the systems that have a value; equal values share one.
export function ranks(systems, need) {
  const known = systems.filter((s) => s.name in need.values);
  const better = (a, b) => (need.more ? a > b : a < b);
  return Object.fromEntries(known.map((s) => [s.name, 1 + known.filter((o) => better(need.values[o.name], need.values[s.name])).length]));
}

// Systems in order: first those with most of the chosen numbers, among them by mean rank.
export function ordered(systems, chosen) {
  const each = chosen.map((need) => ranks(systems, need));
  const rated = systems.map((system) => {
    const own = each.map((r) => r[system.name]).filter((r) => r !== undefined);
    return { system, known: own.length, mean: own.length ? own.reduce((a, b) => a + b, 0) / own.length : Infinity };
  });
  return rated.sort((a, b) => b.known - a.known || a.mean - b.mean || a.system.name.localeCompare(b.system.name));
}

function choose(place, data) {
  const filters = named(element("div", { class: "filters", role: "group" }), { en: "What you need", zh: "你需要什么" });
  const table = element("table", {});
  const region = named(element("div", { class: "scroll", tabindex: 0, role: "region" }, table), { en: "Mixers in order", zh: "混合层排序" });
  const answer = element("output", { class: "readout", "aria-live": "polite", "data-name": "answer" });
  place.append(filters, answer, region);
  const chosen = new Set([data.needs[0]]);

  function paint() {
    const needs = data.needs.filter((need) => chosen.has(need));
    const rows = ordered(data.systems, needs).filter((row) => row.known > 0);
    const head = [{ en: "mixer", zh: "混合层" }, ...needs.map((n) => n.unit)];
    table.replaceChildren(
      element("thead", {}, element("tr", {}, head.map((h) => element("th", { scope: "col" }, words(h))))),
      element("tbody", {}, rows.map(({ system }) => element("tr", { "data-system": system.name },
        element("td", {}, element("a", { href: `systems/${system.name}.html` }, words(system.title))),
        needs.map((need) => element("td", { "data-value": need.values[system.name] }, need.shown[system.name] ?? "–"))))),
    );
    const whole = rows.filter((row) => row.known === needs.length);
    const first = (l) => whole.slice(0, 3).map((row) => row.system.title[l]).join(l === "en" ? ", " : "、");
    answer.replaceChildren(...words(whole.length ? { en: `First by these measurements: ${first("en")}`, zh: `按这些实测，居前的是：${first("zh")}` } : { en: "Nothing was measured in all of these; choose fewer.", zh: "没有哪一种在这些方面都有实测，请少选几项。" }));
  }

  for (const need of data.needs) {
    const toggle = element("button", { type: "button", "aria-pressed": String(chosen.has(need)), "data-need": need.key }, words(need.name));
    toggle.addEventListener("click", () => {
      const off = chosen.delete(need);
      if (!off) chosen.add(need);
      toggle.setAttribute("aria-pressed", String(!off));
      paint();
    });
    filters.append(toggle);
  }
  paint();
}

figure("choose", choose);
