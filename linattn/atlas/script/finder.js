// Search and filters over the list of systems, and small drawings of their matrices.
import { controls, select, slider } from "./controls.js";
import { paintCell } from "./grid.js";
import { drawn, element, named, say, spoken, words } from "./words.js";

const TINY = 6;

// The magnitude of a character, from -9 to 9: linattn/atlas/index.py writes them.
function levelOf(character) {
  return character >= "a" ? 96 - character.charCodeAt(0) : Number(character);
}

function thumbnailOf(text) {
  const rows = text.split(" ");
  const size = rows.length * TINY;
  const svg = drawn("svg", { viewBox: `0 0 ${size} ${size}`, class: "cells", "aria-hidden": true });
  rows.forEach((row, r) =>
    [...row].forEach((character, c) => {
      const node = drawn("rect", { x: c * TINY + 0.5, y: r * TINY + 0.5, width: TINY - 1, height: TINY - 1 });
      paintCell(node, levelOf(character), 9, TINY);
      svg.append(node);
    }),
  );
  return svg;
}

function textInput(place, label, react) {
  const input = named(element("input", { type: "search", "data-input": "find", autocomplete: "off", spellcheck: "false" }), label);
  input.addEventListener("input", () => react(input.value));
  place.append(element("label", { class: "control" }, element("span", { class: "control-name" }, words(label)), input));
}

// Fills the place that linattn/atlas/index.py leaves, and hides the cards that do not fit.
export function drawFinder() {
  const place = document.querySelector("[data-finder]");
  if (!place) return;
  for (const node of document.querySelectorAll("[data-thumb]")) node.append(thumbnailOf(node.dataset.thumb));
  const cards = [...document.querySelectorAll("li[data-families]")];
  const sections = [...document.querySelectorAll("section[data-family]")];
  const now = { text: "", family: "", named: "", from: 0 };
  const count = element("output", { class: "readout", "aria-live": "polite" });
  const row = controls(place);

  function filter() {
    const asked = now.text.toLowerCase().split(/\s+/).filter(Boolean);
    for (const card of cards) {
      const { families, named: by, year, words: known } = card.dataset;
      const within = (list, one) => !one || list.split(" ").includes(one);
      const fits = asked.every((word) => known.includes(word)) && within(families, now.family) && within(by, now.named);
      card.hidden = !(fits && Number(year) >= now.from);
    }
    for (const section of sections) section.hidden = !section.querySelector("li:not([hidden])");
    const shown = cards.filter((card) => !card.hidden).length;
    count.setAttribute("data-value", shown);
    count.replaceChildren(...words({ en: `${shown} of ${cards.length} systems`, zh: `${cards.length} 种方法中的 ${shown} 种` }));
  }

  textInput(row, { en: "search", zh: "搜索" }, (text) => {
    now.text = text;
    filter();
  });
  // A list of `entries`, [key, text()] pairs, whose texts follow the language of the page.
  function menu(name, label, entries) {
    const input = select(row, { name, label, options: [["", ""], ...entries.map(([key]) => [key, ""])] }, (key) => {
      now[name] = key;
      filter();
    });
    spoken(() => [say({ en: "all", zh: "全部" }), ...entries.map(([, text]) => text())].forEach((text, i) => (input.options[i].textContent = text)));
  }

  const titled = (heading) => heading.querySelector(`[lang="${document.documentElement.lang}"]`)?.textContent ?? heading.textContent;
  menu("family", { en: "family", zh: "类别" }, sections.map((section) => [section.dataset.family, () => titled(section.querySelector("h2"))]));
  const named = JSON.parse(place.dataset.named);
  if (named.length) menu("named", { en: "named in", zh: "出处" }, named.map((one) => [one.key, () => say(one)]));
  const years = { min: Number(place.dataset.from), max: Number(place.dataset.to) };
  slider(row, { name: "year", label: { en: "from the year", zh: "起始年份" }, ...years }, (year) => {
    now.from = year === years.min ? 0 : year; // those without a year, too
    filter();
  });
  place.append(count);
}
