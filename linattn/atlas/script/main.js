// What runs on every page: switches, then the figures.
import "./begin.js";
import "./capacity.js";
import "./choose.js";
import { drawAll } from "./figures.js";
import { drawFinder } from "./finder.js";
import "./lab.js";
import "./mask.js";
import "./memory.js";
import "./orders.js";
import "./cost.js";
import "./sheets.js";
import "./state.js";
import { foldTables } from "./tables.js";
import "./triangles.js";
import { language, say, speak, spoken } from "./words.js";

const root = document.documentElement;

function stored(name, value) {
  try {
    if (value !== undefined) localStorage.setItem(`linattn-${name}`, value);
    return localStorage.getItem(`linattn-${name}`);
  } catch {
    return null; // a browser that keeps nothing for pages from disk
  }
}

function wanted() {
  const asked = new URLSearchParams(location.search).get("lang") ?? stored("language");
  return asked === "zh" || asked === "en" ? asked : navigator.language.startsWith("zh") ? "zh" : "en";
}

function switches() {
  speak(wanted());
  const toggle = document.querySelector("[data-switch=language]");
  spoken(() => {
    const other = language() === "en" ? "zh" : "en";
    toggle.dataset.other = other;
    toggle.lang = other === "zh" ? "zh-Hans" : "en";
    toggle.textContent = other === "zh" ? "中文" : "English";
    toggle.setAttribute("aria-label", toggle.textContent);
    const title = document.querySelector("title");
    document.title = title.dataset[`title${other === "zh" ? "En" : "Zh"}`];
    for (const node of document.querySelectorAll("[data-label-en]")) {
      node.setAttribute("aria-label", say({ en: node.dataset.labelEn, zh: node.dataset.labelZh }));
    }
  });
  toggle.addEventListener("click", () => {
    speak(toggle.dataset.other);
    stored("language", language());
  });
  const theme = stored("theme");
  if (theme) root.style.colorScheme = theme;
  document.querySelector("[data-switch=theme]").addEventListener("click", () => {
    const dark = getComputedStyle(root).colorScheme === "dark" || (root.style.colorScheme === "" && matchMedia("(prefers-color-scheme: dark)").matches);
    root.style.colorScheme = dark ? "light" : "dark";
    stored("theme", root.style.colorScheme);
  });
}

switches();
drawAll();
drawFinder();
foldTables();
