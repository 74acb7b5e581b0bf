// A state that is read: the matrix after each token, and how strongly what is read speaks of each word.
import { controls, slider } from "./controls.js";
import { figure } from "./figures.js";
import { grid, legend, written } from "./grid.js";
import { drawn, drawnWords, element, named, words } from "./words.js";

const BAR = 24;
const MIDDLE = 170;
const REACH = 96;

// Bars to both sides of a zero line, one for each of `names`; `positive` ones to the right alone. `update(values, scale)`.
export function bars(place, names, label, positive = false) {
  const [zero, reach] = positive ? [MIDDLE - REACH, 2 * REACH] : [MIDDLE, REACH];
  const height = names.length * BAR + 6;
  const svg = drawn("svg", { viewBox: `0 0 330 ${height}`, class: "bars", "aria-hidden": true, style: "max-width:430px" });
  const box = named(element("div", { role: "img" }, svg), label);
  const rows = names.map((name, i) => {
    const y = i * BAR + 3;
    const bar = drawn("rect", { y, height: BAR - 6, rx: 2, "data-name": typeof name === "string" ? name : name.en });
    const number = drawn("text", { y: y + 14, class: "tick" });
    svg.append(bar, ...drawnWords(name, { x: 62, y: y + 14, "text-anchor": "end" }), number);
    return { bar, number };
  });
  svg.append(drawn("path", { class: "zero", d: `M${zero} 0V${height}` }));
  place.append(box);
  return {
    node: box,
    update(values, scale) {
      values.forEach((value, i) => {
        const length = Math.min(Math.abs(value) / (scale || 1), 1) * reach;
        const { bar, number } = rows[i];
        bar.setAttribute("x", value < 0 ? zero - length : zero);
        bar.setAttribute("width", length);
        bar.setAttribute("class", value < 0 ? "neg" : "pos");
        bar.setAttribute("data-value", value);
        number.textContent = written(value);
        number.setAttribute("x", value < 0 ? zero - length - 5 : zero + length + 5);
        number.setAttribute("text-anchor", value < 0 ? "end" : "start");
      });
    },
  };
}

export function counted(tokens) {
  return (t) => ({ en: `${t} ${tokens[t - 1].en}`, zh: `${t} ${tokens[t - 1].zh}` });
}

// `data`: tokens, words, variants [{ show, states, recalled }], control (the slider over variants) or null, start.
function memory(place, data) {
  const { tokens, variants, words: names } = data;
  const row = controls(place);
  const beside = element("div", { class: "beside" });
  const [left, right] = [element("div", {}), element("div", {})];
  beside.append(left, right);
  place.append(beside);
  left.append(element("p", { class: "panel tstate" }, element("b", { class: "tstate" }, words({ en: "state S", zh: "状态 S" })), ` [${data.size}, ${data.size}]`));
  right.append(element("p", { class: "panel" }, element("b", { class: "toutput" }, words({ en: "o = q S, word by word", zh: "o = q S 指向的词" })), ` [${data.size}]`));
  const box = grid(left, {
    rows: data.size,
    cols: data.size,
    cell: 22,
    label: { en: "The state; arrow keys walk over its cells.", zh: "状态，用方向键在单元格间移动。" },
    told: (r, c, value) => ({ en: `channel ${r + 1} of k, ${c + 1} of v: ${written(value)}`, zh: `k 的第 ${r + 1} 通道，v 的第 ${c + 1} 通道：${written(value)}` }),
  });
  const shown = bars(right, names, { en: "How strongly the output speaks of each word", zh: "输出与每个词的相近程度" });
  const now = { token: data.start, variant: data.variant ?? 0 };
  const paint = () => {
    const variant = variants[now.variant];
    box.paint(variant.states[now.token - 1], data.scale);
    shown.update(variant.recalled[now.token - 1], data.loudest);
  };
  slider(row, { name: "token", label: { en: "read up to token t", zh: "读到第 t 个 token" }, min: 1, max: tokens.length, value: data.start, show: counted(tokens) }, (t) => {
    now.token = t;
    paint();
  });
  if (data.control) {
    slider(row, { name: data.control.name, label: data.control.label, min: 0, max: variants.length - 1, value: now.variant, show: (i) => variants[i].show }, (i) => {
      now.variant = i;
      paint();
    });
  }
  legend(left, data.scale);
}

figure("memory", memory);
