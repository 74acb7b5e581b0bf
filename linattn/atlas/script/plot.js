// Lines over two axes. `update` draws anew: cheap, since a plot has few points.
import { drawn, drawnWords, element, named } from "./words.js";

const HEIGHT = 430;
const WIDE = { width: 760, left: 78, right: 590, top: 30, bottom: 386 };
const NARROW = { width: 420, left: 58, right: 406, top: 30, bottom: 386 }; // on a phone: without the names at the ends of lines
const MARKS = ["m-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0-7.2 0z", "m-3.2-3.2h6.4v6.4h-6.4z", "m0-4.3l4.1 7.2h-8.2z", "m0-4.6l4.6 4.6l-4.6 4.6l-4.6-4.6z"];

const STYLES = 10; // colours and dashes in the style sheet
const WEIGHTS = 3; // and for those after them other widths
const NAMED = 20; // lines at whose ends there is room for names

// The class of the series with this number.
function look(style) {
  return `s${style % STYLES} w${Math.floor(style / STYLES) % WEIGHTS}`;
}

// A logarithmic axis over [low, high]: { at(value) in [0, 1], ticks }, ticks at powers of `base`.
export function logarithmic(low, high, base = 10) {
  const [first, last] = [Math.floor(Math.log(low) / Math.log(base) + 1e-9), Math.ceil(Math.log(high) / Math.log(base) - 1e-9)];
  const end = Math.max(last, first + 1);
  const step = Math.ceil((end - first) / 8);
  const ticks = [];
  for (let power = first; power <= end; power += step) ticks.push(base ** power);
  const [from, to] = [Math.log(base ** first), Math.log(base ** end)];
  return { at: (value) => (Math.log(value) - from) / (to - from), ticks };
}

export function linear(low, high) {
  const rough = (high - low) / 5 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * (1 - 1e-9));
  const ticks = [];
  for (let i = Math.floor(low / step + 1e-9); i * step < high + step * (1 - 1e-9); i++) ticks.push(Number((i * step).toPrecision(12)));
  const [from, to] = [ticks[0], ticks.at(-1)];
  return { at: (value) => (value - from) / (to - from), ticks };
}

// `update({ x, y, series, points, rules })`: axes { axis, label, write }; series [{ name, style, values: [[x, y]] }]; points
// [{ style, x, y, told }]; rules [{ y, words }] are horizontal lines.
export function plot(place, label) {
  const svg = drawn("svg", { class: "plot", "aria-hidden": true });
  const frame = named(element("div", { role: "img" }, svg), label);
  place.append(frame);
  let box = WIDE;
  let last = null;
  const px = (axis, value) => box.left + (box.right - box.left) * axis.at(value);
  const py = (axis, value) => box.bottom - (box.bottom - box.top) * axis.at(value);
  addEventListener("resize", () => {
    if (last && box !== fitting(frame)) shown.update(last);
  });
  const shown = {
    update(given) {
      const { x, y, series, points = [], rules = [] } = given;
      [last, box] = [given, fitting(frame)];
      svg.setAttribute("viewBox", `0 0 ${box.width} ${HEIGHT}`);
      svg.replaceChildren(...rulers(x, y, px, py, box));
      for (const rule of rules) {
        const at = py(y.axis, rule.y);
        if (at < box.top - 1 || at > box.bottom + 1) continue;
        svg.append(drawn("path", { class: "limit", d: `M${box.left} ${at}H${box.right}` }));
        svg.append(...drawnWords(rule.words, { x: box.left + 6, y: at - 5, class: "tick" }));
      }
      for (const { name, style, values } of series) {
        const path = values.map(([a, b]) => `${px(x.axis, a).toFixed(1)} ${py(y.axis, b).toFixed(1)}`).join("L");
        svg.append(drawn("g", { class: look(style), "data-series": name }, drawn("path", { class: "line", d: `M${path}` })));
      }
      for (const point of points) {
        const d = `M${px(x.axis, point.x).toFixed(1)} ${py(y.axis, point.y).toFixed(1)}${MARKS[point.style % MARKS.length]}`;
        const node = drawn("path", { class: "mark-point", d, "data-value": point.y }, drawn("title", {}, point.told));
        svg.append(drawn("g", { class: look(point.style) }, node));
      }
      if (box === WIDE && series.length <= NAMED) svg.append(...ends(series, x, y, px, py));
    },
  };
  return shown;
}

function fitting(frame) {
  return frame.clientWidth < 560 ? NARROW : WIDE;
}

// A piece of a series's line, for tables and their heads.
export function lineKey(style) {
  const line = drawn("path", { class: "line", d: "M1 6H33" });
  return drawn("svg", { viewBox: "0 0 34 12", class: `line-key ${look(style)}`, "aria-hidden": true }, line);
}

function rulers(x, y, px, py, box) {
  const parts = [...drawnWords(y.label, { x: 2, y: 14, class: "axis" }), ...drawnWords(x.label, { x: box.right, y: HEIGHT - 6, "text-anchor": "end", class: "axis" })];
  for (const tick of y.axis.ticks) {
    const at = py(y.axis, tick);
    parts.push(drawn("path", { class: "rule", d: `M${box.left} ${at}H${box.right}` }));
    parts.push(drawn("text", { x: box.left - 8, y: at + 4, "text-anchor": "end", class: "tick" }, y.write(tick)));
  }
  const every = box === NARROW && x.axis.ticks.length > 6 ? 2 : 1;
  for (const [i, tick] of x.axis.ticks.entries()) {
    if (i % every) continue;
    const at = px(x.axis, tick);
    parts.push(drawn("path", { class: "rule", d: `M${at} ${box.top}V${box.bottom + 4}` }));
    parts.push(drawn("text", { x: at, y: box.bottom + 18, "text-anchor": "middle", class: "tick" }, x.write(tick)));
  }
  return parts;
}

// Names at the right ends of their lines, moved apart.
function ends(series, x, y, px, py) {
  const labels = series.map((s) => ({ ...s, at: py(y.axis, s.values.at(-1)[1]), from: px(x.axis, s.values.at(-1)[0]) }));
  labels.sort((a, b) => a.at - b.at);
  let last = WIDE.top - 16;
  for (const l of labels) last = l.y = Math.max(l.at, last + 16);
  let next = WIDE.bottom + 16;
  for (const l of labels.toReversed()) next = l.y = Math.min(l.y, next - 16);
  return labels.flatMap((l) => [
    drawn("path", { class: `lead ${look(l.style)}`, d: `M${l.from + 4} ${l.at}L${WIDE.right + 12} ${l.y}` }),
    drawn("text", { class: `name ${look(l.style)}`, x: WIDE.right + 16, y: l.y + 4 }, l.name),
  ]);
}
