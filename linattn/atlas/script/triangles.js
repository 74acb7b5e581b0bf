// All mixing matrices side by side: filtered by family, sorted, two of them compared cell by cell.
import { choice, controls } from "./controls.js";
import { figure } from "./figures.js";
import { grid, largest, legend, paintCell, written } from "./grid.js";
import { seen } from "./mask.js";
import { drawn, element, named, say, spoken, words } from "./words.js";

const SMALL = 10;

function thumbnail(system) {
  const size = system.matrix.length * SMALL;
  const scale = largest(system.matrix);
  const svg = drawn("svg", { viewBox: `0 0 ${size} ${size}`, class: "cells", "aria-hidden": true });
  seen(system.matrix, system.causal).forEach((row, r) =>
    row.forEach((value, c) => {
      if (value === null) return;
      const node = drawn("rect", { x: c * SMALL + 0.5, y: r * SMALL + 0.5, width: SMALL - 1, height: SMALL - 1 });
      paintCell(node, value, scale, SMALL);
      svg.append(node);
    }),
  );
  return svg;
}

const sortings = {
  family: (a, b, rank) => rank(a.family) - rank(b.family) || a.year - b.year || a.name.localeCompare(b.name),
  year: (a, b) => a.year - b.year || a.name.localeCompare(b.name),
  reach: (a, b) => a.reach - b.reach,
  name: (a, b) => a.name.localeCompare(b.name),
};

// Each divided by its strongest cell, so that shapes are compared and not sizes.
export function shapeDifference(a, b) {
  const [most, least] = [largest(a), largest(b)];
  return a.map((row, i) => row.map((value, j) => Number((value / most - b[i][j] / least).toPrecision(3))));
}

function compared(place, data, first, second) {
  place.replaceChildren();
  if (!second) {
    place.append(element("p", { class: "soft" }, words(first ? { en: "Choose a second one.", zh: "再选一个。" } : { en: "Choose two of these; they are compared here.", zh: "从下面选两个，对照就显示在这里。" })));
    return;
  }
  const causal = first.causal && second.causal;
  const row = element("div", { class: "beside" });
  place.append(row);
  const sides = [
    [first.title, first.matrix, `${first.name}`],
    [second.title, second.matrix, `${second.name}`],
    [{ en: "The difference of their shapes", zh: "形状之差" }, shapeDifference(first.matrix, second.matrix), "difference"],
  ];
  for (const [title, matrix, key] of sides) {
    const part = element("div", { "data-side": key }, element("p", { class: "panel" }, words(title)));
    row.append(part);
    const names = { rowNames: data.tokens, colNames: data.tokens };
    const box = grid(part, {
      rows: matrix.length,
      cols: matrix.length,
      ...names,
      label: { en: `${title.en}: matrix; arrow keys walk over its cells`, zh: `${title.zh}：矩阵，用方向键移动` },
      told: (i, j) => {
        const [a, b] = [written(first.matrix[i][j]), written(second.matrix[i][j])];
        const pair = (l) => `${data.tokens[i][l]} ← ${data.tokens[j][l]}`;
        return { en: `${pair("en")}: ${first.name} ${a}, ${second.name} ${b}`, zh: `${pair("zh")}：${first.name} ${a}，${second.name} ${b}` };
      },
    });
    box.paint(seen(matrix, causal));
    legend(part, largest(matrix));
  }
}

function triangles(place, data) {
  const row = controls(place);
  const families = element("div", { class: "filters", role: "group" });
  const list = element("ul", { class: "thumbnails" });
  const comparison = element("div", { class: "comparison", "aria-live": "polite" });
  const hidden = new Set();
  const chosen = [];
  let order = "family";
  const rank = (key) => data.families.findIndex((f) => f.key === key);
  const cards = new Map(data.systems.map((system) => [system, card(system)]));

  function card(system) {
    const node = element(
      "button",
      { type: "button", class: "thumbnail", "aria-pressed": "false", "data-system": system.name },
      thumbnail(system),
      element("span", {}, system.name.replaceAll("_", "_\u200b")),
    );
    spoken(() => node.setAttribute("title", say(system.title)));
    node.addEventListener("click", () => {
      const at = chosen.indexOf(system);
      if (at >= 0) chosen.splice(at, 1);
      else if (chosen.push(system) > 2) chosen.shift();
      for (const [other, button] of cards) button.setAttribute("aria-pressed", String(chosen.includes(other)));
      compared(comparison, data, ...chosen);
      if (chosen.length === 2) comparison.scrollIntoView({ block: "nearest" });
    });
    return node;
  }

  function arrange() {
    const shown = data.systems.filter((s) => !hidden.has(s.family)).sort((a, b) => sortings[order](a, b, rank));
    list.replaceChildren(...shown.map((s) => element("li", {}, cards.get(s))));
  }

  named(families, { en: "Families that are shown", zh: "显示哪些类别" });
  for (const family of data.families) {
    const toggle = element("button", { type: "button", "aria-pressed": "true", "data-family": family.key }, words(family.name));
    toggle.addEventListener("click", () => {
      const off = !hidden.delete(family.key);
      if (off) hidden.add(family.key);
      toggle.setAttribute("aria-pressed", String(!off));
      arrange();
    });
    families.append(toggle);
  }
  const options = [
    ["family", { en: "family", zh: "类别" }],
    ["year", { en: "year", zh: "年份" }],
    ["reach", { en: "how far back it looks", zh: "回看多远" }],
    ["name", { en: "name", zh: "名称" }],
  ];
  choice(row, { name: "order", label: { en: "sort by", zh: "排序" }, options }, (key) => {
    order = key;
    arrange();
  });
  place.append(families, comparison, list);
  compared(comparison, data);
}

figure("triangles", triangles);
