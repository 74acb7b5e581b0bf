// From a typed sentence to the next word, by a model that runs in the page.
import { button, controls, slider } from "./controls.js";
import { figure } from "./figures.js";
import { grid, largest } from "./grid.js";
import { parsed } from "./lab.js";
import { chances, network } from "./model.js";
import { bars, counted } from "./memory.js";
import { power } from "./sheets.js";
import { element, language, named, spoken, words } from "./words.js";

const LONGEST = 60; // tokens of a text

// A step of the page: its title, and a place for its drawing.
function stage(place, title) {
  const node = element("div", { class: "stage" }, element("p", { class: "panel" }, words(title)));
  place.append(node);
  return node;
}

function strip(place, label, size) {
  return grid(place, { rows: label.length, cols: size, cell: 16, rowNames: label, label: { en: label.filter(Boolean).join(", "), zh: label.filter(Boolean).join("、") } });
}

// A long vector as rows of `size` numbers.
function folded(vector, size) {
  return Array.from({ length: Math.ceil(vector.length / size) }, (_, i) => vector.slice(i * size, (i + 1) * size));
}

function begin(place, data) {
  const run = network(data);
  const known = data.words;
  const unknown = known[0];
  const now = { ids: data.prompt, steps: null, token: data.prompt.length, temperature: 0.7 };
  const top = controls(place);
  top.classList.add("broad");
  const input = named(element("input", { type: "text", "data-input": "text", autocomplete: "off", spellcheck: "false" }), { en: "sentence", zh: "句子" });
  top.append(element("label", { class: "control" }, element("span", { class: "control-name" }, words({ en: "sentence", zh: "句子" })), input));
  const row = controls(place);
  const chips = stage(place, { en: "1 · tokens", zh: "1 · token" });
  const list = element("ol", { class: "chips" });
  chips.append(list);
  const width = data.weights["model.embedding.weight"].shape[1];
  const size = width / data.heads;
  const rows = (name) => [name, ...new Array(data.heads - 1).fill("")];
  const embedding = strip(stage(place, { en: "2 · embedding", zh: "2 · 嵌入" }), rows("x"), size);
  const layers = Array.from({ length: data.layers }, (_, l) => {
    const part = stage(place, { en: `3 · layer ${l + 1}: q, k, v, o of head 1, its state, feed-forward`, zh: `3 · 第 ${l + 1} 层：第 1 个头的 q、k、v、o 与状态，以及前馈层` });
    const beside = element("div", { class: "beside" });
    part.append(beside);
    const [left, right] = [element("div", {}), element("div", { "data-layer": l })];
    beside.append(left, right);
    const beta = element("p", { class: "readout" });
    left.append(beta);
    right.append(element("p", { class: "readout" }, words({ en: `state [${size}, ${size}]`, zh: `状态 [${size}, ${size}]` })));
    const label = { en: "state", zh: "状态" };
    return { vectors: strip(left, ["q", "k", "v", "o"], size), ffn: strip(left, rows("FFN"), size), beta, state: grid(right, { rows: size, cols: size, cell: 14, label }) };
  });
  const last = stage(place, { en: "4 · probabilities of the next word, %", zh: "4 · 下一个词的概率（%）" });
  const shown = bars(last, known, { en: "Probability of each word", zh: "每个词的概率" }, true);
  const check = element("output", { class: "readout", "data-name": "distance", "aria-live": "polite" });
  last.append(check);

  const text = (ids) => {
    const english = language() === "en";
    const joined = ids.map((id) => known[id][language()]).join(english ? " " : "");
    return english ? joined.replace(/ ([,.])/g, "$1") : joined;
  };

  function paint() {
    if (!now.steps) return;
    const step = now.steps[now.token - 1];
    embedding.paint(folded(step.embedded, size));
    step.layers.forEach((layer, l) => {
      const { q, k, v, o, beta, state } = layer.heads[0];
      layers[l].vectors.paint([q, k, v, o]);
      layers[l].ffn.paint(folded(layer.ffn, size));
      layers[l].beta.textContent = `β = ${beta.toFixed(2)}`;
      layers[l].state.paint(state, Math.max(...now.steps.map((s) => largest(s.layers[l].heads[0].state))));
    });
    shown.update(chances(step.logits, now.temperature).map((p) => Number((100 * p).toFixed(1))), 100);
    for (const [i, chip] of [...list.children].entries()) chip.toggleAttribute("data-now", i === now.token - 1);
  }

  function read(ids) {
    now.ids = ids.slice(-LONGEST);
    now.steps = run(now.ids);
    list.replaceChildren(...now.ids.map((id) => element("li", {}, ...words(known[id]), element("small", {}, String(id)))));
    const given = ids === data.prompt;
    const apart = given ? largest(now.steps.map((s, t) => s.logits.map((x, i) => x - data.logits[t][i]))) : null;
    check.setAttribute("data-value", apart ?? "");
    const digits = apart === null ? "" : power(Number(apart.toPrecision(2)));
    check.replaceChildren(...words(given ? { en: `largest distance to the library’s logits: ${digits}`, zh: `与库算出的 logits 的最大差距：${digits}` } : { en: "your own sentence: computed here only", zh: "你自己的句子：只在这里计算" }));
    const range = row.querySelector("[data-slider=token]");
    if (!range) return paint();
    range.max = now.ids.length;
    tokens.set(now.ids.length);
  }

  function next() {
    const odds = chances(now.steps.at(-1).logits, now.temperature);
    let left = Math.random();
    const drawn = odds.findIndex((p) => (left -= p) < 0);
    read([...now.ids, drawn < 0 ? odds.indexOf(Math.max(...odds)) : drawn]);
    input.value = text(now.ids);
  }

  read(data.prompt);
  const tokens = slider(row, { name: "token", label: { en: "look at token", zh: "查看 token" }, min: 1, max: now.ids.length, value: now.ids.length, show: (t) => counted(now.ids.map((id) => known[id]))(Math.min(t, now.ids.length)) }, (t) => {
    now.token = t;
    paint();
  });
  slider(row, { name: "temperature", label: { en: "temperature", zh: "温度" }, min: 0, max: 2, step: 0.1, value: now.temperature, show: (v) => v.toFixed(1) }, (v) => {
    now.temperature = v;
    paint();
  });
  button(row, { name: "next", label: { en: "write a word", zh: "写一个词" } }, next);
  button(row, { name: "write", label: { en: "write to the full stop", zh: "写到句号" } }, () => {
    do next();
    while (now.ids.at(-1) !== data.stop && now.ids.length < LONGEST);
  });
  spoken(() => (input.value = text(now.ids)));
  input.addEventListener("input", () => {
    const ids = parsed(input.value, known.slice(1)).map((word) => Math.max(known.findIndex((w) => w.en === word.en), known.indexOf(unknown)));
    if (ids.length) read(ids);
  });
}

figure("begin", begin);
