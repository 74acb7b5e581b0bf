// A matrix as cells: the area's strength is the value's size; positive values are squares, negative ones discs of another colour.
import { drawn, drawnWords, element, named, words } from "./words.js";

const CELL = 26;
const LEFT = 62;
const TOP = 58;

// Significant digits, with a true minus sign.
export function written(value, digits = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e-4 && size < 1e6 ? String(Number(size.toPrecision(digits))) : size.toExponential(digits - 1);
  return (value < 0 ? "−" : "") + text;
}

export function largest(values) {
  return values.flat(Infinity).reduce((most, v) => (v === null ? most : Math.max(most, Math.abs(v))), 0);
}

// Draws `rows` by `cols` cells. `rowNames` and `colNames` are lists of strings or { en, zh }, or null; `label` names the matrix for those
// who cannot see it; `told(row, col, value)` says a cell in words. Returns { paint(values, scale), mark(rows, cols), node }:
// `values[row][col]` may be null for no cell, `scale` is the value of full strength.
export function grid(place, { rows, cols, rowNames = null, colNames = null, label, told = null, cell = CELL }) {
  const left = rowNames ? LEFT : 2;
  const top = colNames ? TOP : 2;
  const width = left + cols * cell + (colNames ? 26 : 2);
  const height = top + rows * cell + 2;
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, class: "cells", style: `max-width:${width * 1.25}px; --names: ${Math.max(13, width / 30)}px`, "aria-hidden": true });
  svg.append(...names(rowNames, colNames, left, top, cell));
  const frame = drawn("g", { transform: `translate(${left} ${top})` });
  const nodes = Array.from({ length: rows }, (_, r) =>
    Array.from({ length: cols }, (_, c) => {
      const node = drawn("rect", { x: c * cell + 1, y: r * cell + 1, width: cell - 2, height: cell - 2, "data-row": r, "data-col": c });
      frame.append(node);
      return node;
    }),
  );
  const cursor = drawn("rect", { class: "cursor", width: cell, height: cell, visibility: "hidden" });
  svg.append(frame, cursor);
  const box = named(element("div", { class: "grid", tabindex: 0, role: "group" }, svg), label);
  const readout = element("p", { class: "readout", "aria-live": "polite" });
  place.append(box, readout);
  let now = null;
  let shown = [];

  function show(row, col) {
    const value = shown[row]?.[col];
    now = value === null || value === undefined ? null : [row, col];
    cursor.setAttribute("visibility", now ? "visible" : "hidden");
    if (!now) return readout.replaceChildren();
    cursor.setAttribute("x", left + col * cell);
    cursor.setAttribute("y", top + row * cell);
    const text = told ? told(row, col, value) : `${row + 1}, ${col + 1}: ${written(value)}`;
    readout.replaceChildren(...words(text));
  }

  frame.addEventListener("pointerover", (event) => {
    const { row, col } = event.target.dataset;
    if (row !== undefined) show(Number(row), Number(col));
  });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [row, col] = now ?? [-step[0], -step[1]];
    const next = [Math.min(Math.max(row + step[0], 0), rows - 1), Math.min(Math.max(col + step[1], 0), cols - 1)];
    if (shown[next[0]]?.[next[1]] !== null) show(...next);
  });

  return {
    node: box,
    paint(values, scale = largest(values)) {
      shown = values;
      for (let r = 0; r < rows; r++) for (let c = 0; c < cols; c++) paintCell(nodes[r][c], values[r]?.[c] ?? null, scale, cell);
      if (now) show(...now);
    },
    // Dims all cells but those of one row and/or one column; null for all.
    mark(row = null, col = null) {
      for (const line of nodes) {
        for (const node of line) {
          const on = (row === null || node.dataset.row === String(row)) && (col === null || node.dataset.col === String(col));
          node.classList.toggle("dim", !on);
        }
      }
    },
  };
}

// One cell: linattn/atlas/svg.py draws the same.
export function paintCell(node, value, scale, cell = CELL) {
  if (value === null) {
    node.setAttribute("class", "none");
    node.removeAttribute("data-value");
    return;
  }
  const strength = scale > 0 ? Math.min(Math.abs(value) / scale, 1) : 0;
  node.setAttribute("class", value < 0 ? "neg" : "pos");
  node.setAttribute("rx", value < 0 ? (cell - 2) / 2 : 2);
  node.setAttribute("fill-opacity", (Math.round(strength * 100) / 100).toString());
  node.setAttribute("data-value", value);
}

function names(rowNames, colNames, left, top, cell) {
  const rows = (rowNames ?? []).map((name, r) =>
    drawnWords(name, { x: left - 7, y: top + (r + 0.5) * cell + 4, "text-anchor": "end", class: "tick" }),
  );
  const cols = (colNames ?? []).map((name, c) => {
    const [x, y] = [left + (c + 0.5) * cell + 4, top - 7];
    return drawnWords(name, { x, y, transform: `rotate(-60 ${x} ${y})`, class: "tick" });
  });
  return [...rows, ...cols].flat();
}

// The legend of a grid's colours.
export function legend(place, scale) {
  const text = { en: `strongest: ±${written(scale)}`, zh: `最强：±${written(scale)}` };
  const mark = (kind, rx) =>
    drawn("svg", { viewBox: "0 0 16 16", class: "swatch", "aria-hidden": true }, drawn("rect", { x: 1, y: 1, width: 14, height: 14, rx, class: kind }));
  const node = element(
    "p",
    { class: "legend" },
    mark("pos", 2), element("span", {}, words({ en: "positive", zh: "正" })),
    mark("neg", 7), element("span", {}, words({ en: "negative", zh: "负" })),
    element("span", { class: "soft" }, words(text)),
  );
  place.append(node);
  return node;
}
