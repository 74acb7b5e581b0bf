// Two languages: text comes as { en, zh } (or as one string for both), and the style sheet shows one of two elements.

const codes = { en: "en", zh: "zh-Hans" };
const listeners = [];

export function language() {
  return document.documentElement.lang === codes.zh ? "zh" : "en";
}

export function say(words) {
  return typeof words === "string" || typeof words === "number" ? String(words) : words[language()];
}

// Calls `react` now and after every change of the language: for attributes, which cannot hold two languages.
export function spoken(react) {
  listeners.push(react);
  react();
}

export function speak(chosen) {
  document.documentElement.lang = codes[chosen];
  for (const react of listeners) react();
}

// Nodes that show `words` in the language of the page.
export function words(both) {
  if (typeof both === "string" || typeof both === "number" || both.en === both.zh) {
    return [document.createTextNode(typeof both === "object" ? both.en : String(both))];
  }
  return Object.entries(codes).map(([key, code]) => element("span", { lang: code }, both[key]));
}

export function element(tag, attributes = {}, ...children) {
  return made(document.createElement(tag), attributes, children);
}

export function drawn(tag, attributes = {}, ...children) {
  return made(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

// The same `text` element of a drawing for each language.
export function drawnWords(both, attributes) {
  if (typeof both === "string" || both.en === both.zh) return [drawn("text", attributes, both.en ?? both)];
  return Object.entries(codes).map(([key, code]) => drawn("text", { ...attributes, lang: code }, both[key]));
}

export function named(node, both) {
  spoken(() => node.setAttribute("aria-label", say(both)));
  return node;
}

function made(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    node.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : value); // those of ARIA say true; nothing is no value of theirs
  }
  node.append(...children.flat());
  return node;
}
