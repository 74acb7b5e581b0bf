// What systems cost against length: formulas that Python made from linattn.cost, for the reader's own model and machine.
import { button, choice, controls, slider } from "./controls.js";
import { figure } from "./figures.js";
import { lineKey, logarithmic, plot } from "./plot.js";
import { element, named, say, spoken, words } from "./words.js";

const LENGTHS = Array.from({ length: 53 }, (_, i) => 2 ** (7 + i / 4)); // 128 to a million tokens
const views = {
  prefill: { label: { en: "reading a prompt, FLOPs", zh: "读入提示，FLOPs" }, unit: { en: "operations", zh: "运算次数" } },
  step: { label: { en: "one more token, FLOPs", zh: "再写一个 token，FLOPs" }, unit: { en: "operations per token", zh: "每个 token 的运算次数" } },
  memory: { label: { en: "memory kept", zh: "保留的内存" }, unit: { en: "bytes", zh: "字节" }, suffix: "B" },
  prefillTime: { label: { en: "reading a prompt, time", zh: "读入提示，时间" }, unit: { en: "time, at least", zh: "时间（下限）" }, suffix: "s" },
  stepTime: { label: { en: "one more token, time", zh: "再写一个 token，时间" }, unit: { en: "time per token, at least", zh: "每个 token 的时间（下限）" }, suffix: "s" },
  alone: { label: { en: "the recurrence alone, time", zh: "仅递推，时间" }, unit: { en: "time, at least; points: measured", zh: "时间（下限）；点为实测" }, suffix: "s" },
};

// linattn/atlas/cost_page.py evaluates formulas in the same way.
export function terms(dim, heads) {
  return [1, dim, dim * dim, heads, dim * heads, dim / heads, (dim * dim) / heads];
}

export function evaluated(formula, dim, heads, tokens) {
  const at = terms(dim, heads);
  return formula.reduce((sum, coefficients, power) => sum + tokens ** power * coefficients.reduce((s, c, i) => s + c * at[i], 0), 0);
}

// One quantity of one system for a model and a machine at a length.
export function quantity(view, system, model, machine, tokens) {
  const { dim, heads, layers, batch } = model;
  const of = (formula) => layers * evaluated(formula, dim, heads, tokens);
  const weights = 2 * of(system.parameters);
  const state = batch * of(system.state);
  const prefill = batch * tokens * of(system.prefill);
  const step = batch * of(system.step);
  const bound = (flops, bytes) => Math.max(flops / (machine.tflops * 1e12), bytes / (machine.bandwidth * 1e9));
  switch (view) {
    case "prefill": return prefill;
    case "step": return step;
    case "memory": return state;
    case "prefillTime": return bound(prefill, weights + state);
    case "stepTime": return bound(step, weights + state);
    case "alone": return bound(...alone(system, model, tokens));
  }
}

// Operations and bytes of the recurrence without its projections: heads of equal key and value size, bfloat16.
function alone(system, { dim, heads, batch }, tokens) {
  const size = dim / heads;
  if (system.kind === "softmax") return [2 * batch * tokens * tokens * dim, 8 * batch * tokens * dim];
  const extra = { none: 0, constant: 1, head: 1, channel: 1, rwkv6: 3, delta: 4, gated_delta: 5, kda: 5, erase: 5 }[system.kind];
  const tensors = { channel: 5, rwkv6: 5, kda: 5, erase: 7 }[system.kind] ?? 4;
  return [batch * tokens * heads * size * size * (4 + extra), 2 * tensors * batch * tokens * dim];
}

export function short(value, suffix = "") {
  for (const [size, unit] of [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"], [1e-6, "µ"]]) {
    if (value >= size * 0.9995) return `${Number((value / size).toPrecision(3))} ${unit}${suffix}`.trim();
  }
  return value === 0 ? "0" : `${Number((value * 1e9).toPrecision(3))} n${suffix}`;
}

const tokensWritten = (n) => (n >= 2 ** 20 ? `${Math.round(n / 2 ** 20)}M` : n >= 1024 ? `${Math.round(n / 1024)}k` : String(Math.round(n)));

// The first length, on the page's grid of lengths, from which the second is cheaper than the first for good.
export function crossing(costly, cheap) {
  let from = null;
  for (let i = LENGTHS.length - 1; i >= 0 && cheap[i] < costly[i]; i--) from = i;
  return from;
}

// The different sizes that were measured: heads, size of a head, sequences.
function sizes(measured) {
  return [...new Set(measured.map((p) => `${p.H} ${p.D} ${p.B}`))].map((text) => text.split(" ").map(Number));
}

function number(place, { name, label, value, min, step }, react) {
  const input = element("input", { type: "number", value, min, step, "data-number": name });
  named(input, label);
  input.addEventListener("input", () => {
    if (input.valueAsNumber > 0) react(input.valueAsNumber);
  });
  place.append(element("label", { class: "control" }, element("span", { class: "control-name" }, words(label)), input));
  react(value);
}

function cost(place, data) {
  const model = {};
  const machine = {};
  const chosen = new Set(data.first);
  let view = "prefill";
  let ready = false;
  const systems = new Map(data.systems.map((s) => [s.name, s]));
  const first = controls(place);
  const second = controls(place);
  const chart = plot(place, { en: "Cost against length, both logarithmic", zh: "开销随长度的变化，两轴均为对数" });
  const shapes = named(element("div", { class: "filters", role: "group" }), { en: "Sizes that were measured", zh: "实测过的尺寸" });
  place.append(shapes);
  const at = controls(place);
  const table = element("tbody");
  const told = element("p", { class: "readout", "aria-live": "polite" });
  let length = 4096;

  function redraw() {
    if (!ready) return;
    shapes.hidden = view !== "alone";
    const shown = [...chosen].map((name) => systems.get(name)).filter((s) => view !== "alone" || s.kind);
    const series = shown.map((system, style) => ({ name: system.name, style, values: LENGTHS.map((n) => [n, quantity(view, system, model, machine, n)]) }));
    const points = view === "alone" ? measured(shown) : [];
    const rules = view === "memory" ? [["card", { en: "GPU memory", zh: "显存" }], ["ram", { en: "host memory", zh: "内存" }], ["disk", { en: "disk", zh: "固态硬盘" }]].map(([key, name]) => ({ y: machine[key] * 1e9, words: name })) : [];
    const all = [...series.flatMap((s) => s.values.map((v) => v[1])), ...points.map((p) => p.y), ...rules.slice(0, 1).map((r) => r.y)].filter((v) => v > 0);
    const y = { axis: logarithmic(Math.min(...all), Math.max(...all)), label: views[view].unit, write: (v) => short(v, views[view].suffix) };
    chart.update({ x: { axis: logarithmic(128, 2 ** 20, 2), label: { en: "tokens", zh: "token 数" }, write: tokensWritten }, y, series, points, rules });
    tell(series);
    tabulate(shown);
  }

  function measured(shown) {
    return shown.flatMap((system, style) =>
      data.measured
        .filter((p) => p.kind === system.kind && p.H * p.D === model.dim && p.H === model.heads && p.B === model.batch)
        .map((p) => ({ style, x: p.T, y: p.ms / 1e3, told: `${system.name}, ${p.card}: ${p.ms.toPrecision(3)} ms` })),
    );
  }

  function tell(series) {
    const softmax = series.find((s) => s.name === "softmax");
    const crossed = softmax ? series.filter((s) => s !== softmax).map((s) => [s.name, crossing(softmax.values.map((v) => v[1]), s.values.map((v) => v[1]))]) : [];
    const en = crossed.map(([name, i]) => (i === null ? `${name}: not within a million tokens` : i === 0 ? `${name}: from the start` : `${name}: from about ${tokensWritten(LENGTHS[i])} tokens`));
    const zh = crossed.map(([name, i]) => (i === null ? `${name} 一百万 token 内都不会` : i === 0 ? `${name} 一开始就是` : `${name} 约从 ${tokensWritten(LENGTHS[i])} 个 token 起`));
    told.replaceChildren(...(crossed.length ? words({ en: `Cheaper than softmax: ${en.join("; ")}.`, zh: `开销低于 softmax：${zh.join("；")}。` }) : []));
  }

  function tabulate(shown) {
    table.replaceChildren(
      ...shown.map((system, style) => {
        const value = quantity(view, system, model, machine, length);
        const off = system.error > 1e-9 ? ` (± ${(100 * system.error).toPrecision(1)} %)` : "";
        return element("tr", {}, element("th", { scope: "row" }, lineKey(style), words(system.title)), element("td", { class: "number", "data-system": system.name, "data-value": value }, short(value, views[view].suffix) + off));
      }),
    );
  }

  choice(first, { name: "view", label: { en: "show", zh: "显示" }, options: Object.entries(views).map(([key, v]) => [key, v.label]) }, (key) => {
    view = key;
    redraw();
  });
  const power = (name, label, min, max, value, key) =>
    slider(second, { name, label, min, max, value, show: (v) => String(2 ** v) }, (v) => {
      model[key] = 2 ** v;
      redraw();
    });
  const sliders = {};
  sliders.dim = power("dim", { en: "width", zh: "宽度" }, 8, 13, 11, "dim");
  sliders.heads = power("heads", { en: "heads", zh: "头数" }, 1, 6, 4, "heads");
  sliders.layers = slider(second, { name: "layers", label: { en: "layers", zh: "层数" }, min: 1, max: 96, value: 1 }, (v) => {
    model.layers = v;
    redraw();
  });
  sliders.batch = power("batch", { en: "sequences at once", zh: "并行序列数" }, 0, 8, 0, "batch");
  for (const [H, D, B] of sizes(data.measured)) {
    const label = { en: `as measured: width ${H * D}, ${H} heads, batch ${B}`, zh: `实测尺寸：宽 ${H * D}，${H} 头，批 ${B}` };
    button(shapes, { name: `size-${H}-${D}-${B}`, label }, () => {
      for (const [name, value] of [["dim", Math.log2(H * D)], ["heads", Math.log2(H)], ["batch", Math.log2(B)], ["layers", 1]]) sliders[name].set(value);
    });
  }
  const details = element("details", { class: "machine" }, element("summary", {}, words({ en: "the machine", zh: "机器" })));
  const third = controls(details);
  for (const [key, label, value] of [
    ["tflops", { en: "peak, TFLOP/s", zh: "峰值算力，TFLOP/s" }, 989],
    ["bandwidth", { en: "bandwidth, GB/s", zh: "带宽，GB/s" }, 4800],
    ["card", { en: "GPU memory, GB", zh: "显存，GB" }, 141],
    ["ram", { en: "host memory, GB", zh: "内存，GB" }, 1000],
    ["disk", { en: "disk, GB", zh: "固态硬盘，GB" }, 15000],
  ]) {
    number(third, { name: key, label, value, min: 0, step: "any" }, (v) => {
      machine[key] = v;
      redraw();
    });
  }
  const picks = element("div", { class: "filters picks", role: "group" });
  named(picks, { en: "Systems that are drawn", zh: "画哪些方法" });
  for (const system of data.systems) {
    const toggle = element("button", { type: "button", "aria-pressed": String(chosen.has(system.name)), "data-pick": system.name }, system.name);
    spoken(() => toggle.setAttribute("title", say(system.title)));
    toggle.addEventListener("click", () => {
      if (!chosen.delete(system.name)) chosen.add(system.name);
      toggle.setAttribute("aria-pressed", String(chosen.has(system.name)));
      redraw();
    });
    picks.append(toggle);
  }
  slider(at, { name: "length", label: { en: "in figures at", zh: "具体数值，长度" }, min: 7, max: 20, value: 12, show: (v) => ({ en: `${tokensWritten(2 ** v)} tokens`, zh: `${tokensWritten(2 ** v)} 个 token` }) }, (v) => {
    length = 2 ** v;
    redraw();
  });
  const scroll = named(element("div", { class: "scroll", tabindex: 0, role: "region" }, element("table", {}, table)), { en: "Costs at this length", zh: "此长度的开销" });
  const all = element("details", { class: "machine" }, element("summary", {}, words({ en: "choose systems", zh: "选择方法" })), picks);
  place.append(told, scroll, details, all);
  ready = true;
  redraw();
}

figure("cost", cost);
