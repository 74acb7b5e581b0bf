// Pairs written into a state one by one and read back, live; and the curves that the library computed.
import { choice, controls, slider } from "./controls.js";
import { figure } from "./figures.js";
import { grid, legend, written } from "./grid.js";
import { lineKey, linear, plot } from "./plot.js";
import { dot, through, updated, zeros } from "./recurrence.js";
import { power } from "./sheets.js";
import { element, language, spoken, words } from "./words.js";

const ways = {
  sum: (pair) => pair,
  decayed: (pair, now) => ({ ...pair, decay: pair.k.map(() => Math.log(now.decay)) }),
  delta: (pair, now) => ({ ...pair, beta: now.beta }),
};

// What comes back of the pairs that are still in force: own (how much of its own value, null where rewritten), error, recognised.
export function readBack(state, keys, values, count, period) {
  const first = Math.max(0, count - period);
  const current = values.slice(first, count);
  const read = keys.slice(first, count).map((k) => through(k, state));
  const wrong = read.flatMap((o, i) => o.map((x, j) => x - current[i][j]));
  const nearest = read.map((o) => current.map((v) => dot(o, v))).map((scores) => scores.indexOf(Math.max(...scores)));
  const own = [...new Array(first).fill(null), ...read.map((o, i) => dot(o, current[i]))];
  return { own, error: Math.sqrt(dot(wrong, wrong) / dot(current.flat(), current.flat())), recognised: nearest.filter((at, i) => at === i).length / current.length };
}

function capacity(place, data) {
  const now = { count: data.size, decay: data.decay, beta: data.beta, set: data.keys[0] };
  const top = controls(place);
  const row = controls(place);
  const most = data.values.length;
  const frame = element("div", {});
  place.append(frame);
  let box = null;
  let cut = 0; // pairs in a line: all of them, or where there is no room as many as the state has rows

  function framed() {
    const wanted = frame.clientWidth < 860 ? data.size : most;
    if (wanted === cut) return;
    cut = wanted;
    const lines = Math.ceil(most / cut);
    const at = (r, c) => [data.rules[Math.floor(r / lines)].name, (r % lines) * cut + c + 1];
    frame.replaceChildren();
    box = grid(frame, {
      rows: data.rules.length * lines,
      cols: cut,
      cell: lines > 1 ? 18 : 15,
      rowNames: data.rules.flatMap((rule) => [rule.name, ...new Array(lines - 1).fill("")]),
      label: { en: "How much of each pair’s own value comes back; rows are rules, columns pairs", zh: "每一对读回自己的值的多少；行是规则，列是键值对" },
      told: (r, c, value) => ({ en: `${at(r, c)[0].en}, pair ${at(r, c)[1]}: ${written(value)} of its own value`, zh: `${at(r, c)[0].zh}，第 ${at(r, c)[1]} 对：读回自己的值的 ${written(value)}` }),
    });
  }
  framed();
  legend(place, 1);
  const head = [{ en: "rule", zh: "规则" }, { en: "relative error", zh: "相对误差" }, { en: "recognised", zh: "能认出" }];
  const body = element("tbody", {});
  const table = element("table", {}, element("thead", {}, element("tr", {}, head.map((text) => element("th", { scope: "col" }, words(text))))), body);
  place.append(element("div", { class: "scroll", tabindex: 0 }, table));
  const cells = data.rules.map((rule) => {
    const [error, recognised] = ["error", "recognised"].map((name) => element("output", { "data-name": `${rule.key}-${name}` }));
    body.append(element("tr", {}, element("th", { scope: "row" }, words(rule.name)), element("td", {}, error), element("td", {}, recognised)));
    return { error, recognised };
  });

  function paint() {
    const { count, set } = now;
    const shown = data.rules.map((rule, i) => {
      let state = zeros(data.size, data.size);
      for (let n = 0; n < count; n++) state = updated(state, ways[rule.key]({ k: set.keys[n], v: data.values[n] }, now));
      const found = readBack(state, set.keys, data.values, count, set.period);
      cells[i].error.setAttribute("data-value", found.error);
      cells[i].error.replaceChildren(written(found.error));
      cells[i].recognised.setAttribute("data-value", found.recognised);
      cells[i].recognised.replaceChildren(`${Math.round(found.recognised * 100)} %`);
      return [...found.own, ...new Array(most - count).fill(null)];
    });
    box.paint(shown.flatMap((line) => Array.from({ length: Math.ceil(most / cut) }, (_, i) => line.slice(i * cut, (i + 1) * cut))), 1);
  }

  addEventListener("resize", () => {
    framed();
    paint();
  });
  choice(top, { name: "keys", label: { en: "keys", zh: "键" }, options: data.keys.map((set) => [set.key, set.name]) }, (key) => {
    now.set = data.keys.find((set) => set.key === key);
    paint();
  });
  const show = (value) => value.toFixed(2);
  slider(row, { name: "pairs", label: { en: "pairs written", zh: "写入的对数" }, min: 1, max: most, value: now.count }, (value) => {
    now.count = value;
    paint();
  });
  slider(row, { name: "decay", label: { en: "decay γ", zh: "衰减 γ" }, min: 0.5, max: 1, step: 0.05, value: now.decay, show }, (value) => {
    now.decay = value;
    paint();
  });
  slider(row, { name: "beta", label: { en: "strength β", zh: "强度 β" }, min: 0, max: 2, step: 0.1, value: now.beta, show }, (value) => {
    now.beta = value;
    paint();
  });
}

const measures = [
  [1, "error", { en: "relative error", zh: "相对误差" }],
  [2, "recognised", { en: "recognised", zh: "能认出" }],
];

function curves(place, data) {
  const row = controls(place);
  const chart = plot(place, { en: "Error and recognition against the number of pairs", zh: "误差与认出比例随对数的变化" });
  const values = element("div", { class: "scroll", tabindex: 0 });
  place.append(values);
  const now = { size: null, measure: measures[0] };
  const names = Object.keys(data.names);

  function paint() {
    if (!now.size) return;
    const [at, , label] = now.measure;
    const lines = names.map((key) => now.size.lines[key].map((point) => [point[0], point[at]]));
    const top = at === 1 ? 2 : 1;
    const series = names.map((key, i) => ({ name: data.names[key][language()], style: i, values: lines[i] }));
    chart.update({
      x: { axis: linear(0, 4), label: { en: "pairs written, in multiples of d", zh: "写入的对数（d 的倍数）" }, write: (v) => `${v} d` },
      y: { axis: linear(0, top), label, write: (v) => String(v) },
      series,
    });
    const head = element("tr", {}, element("th", { scope: "col" }, "n / d"), names.map((key, i) => element("th", { scope: "col" }, lineKey(i), words(data.names[key]))));
    const body = lines[0].map(([times], r) =>
      element("tr", {}, element("th", { scope: "row" }, String(times)), lines.map((line, i) => element("td", { "data-value": line[r][1], "data-name": names[i] }, power(line[r][1])))),
    );
    values.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, body)));
  }

  choice(row, { name: "measure", label: { en: "show", zh: "显示" }, options: measures.map(([, key, label]) => [key, label]) }, (key) => {
    now.measure = measures.find((m) => m[1] === key);
    paint();
  });
  slider(row, { name: "size", label: { en: "size d of the state", zh: "状态的大小 d" }, min: 0, max: data.sizes.length - 1, value: data.start, show: (i) => String(data.sizes[i].size) }, (i) => {
    now.size = data.sizes[i];
    paint();
  });
  spoken(paint);
}

figure("capacity", capacity);
figure("curves", curves);
