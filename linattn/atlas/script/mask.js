// The mixing matrix on the running sentence: how much each token's value reaches each output.
import { choice, controls, slider } from "./controls.js";
import { figure } from "./figures.js";
import { grid, largest, legend, written } from "./grid.js";

export function reached(tokens, query, key, value) {
  return {
    en: `“${tokens[query].en}” (${query + 1}) reads “${tokens[key].en}” (${key + 1}): ${written(value)}`,
    zh: `“${tokens[query].zh}”（${query + 1}）读“${tokens[key].zh}”（${key + 1}）：${written(value)}`,
  };
}

// Python's matrices are whole squares; what causality rules out is no cell.
export function seen(matrix, causal) {
  return causal ? matrix.map((row, i) => row.map((value, j) => (j > i ? null : value))) : matrix;
}

export function headOptions(shown, names = null) {
  return Array.from({ length: shown }, (_, h) => [String(h), names?.[h] ?? String(h + 1)]);
}

function mask(place, data) {
  const row = controls(place);
  const box = grid(place, {
    rows: data.tokens.length,
    cols: data.tokens.length,
    rowNames: data.tokens,
    colNames: data.tokens,
    label: { en: "Mixing matrix: rows are outputs, columns the tokens that they read. Arrow keys walk over its cells.", zh: "混合矩阵：行是输出，列是被读的 token。用方向键在单元格间移动。" },
    told: (i, j, value) => reached(data.tokens, i, j, value),
  });
  const scale = largest(data.matrix);
  let head = 0;
  const paint = () => box.paint(seen(data.matrix[head], data.causal), scale);
  if (data.matrix.length > 1) {
    choice(row, { name: "head", label: { en: "head", zh: "头" }, options: headOptions(data.matrix.length, data.names) }, (h) => {
      head = Number(h);
      paint();
    });
  }
  slider(row, { name: "query", label: { en: "highlight the row of token", zh: "突出某个 token 的行" }, min: 0, max: data.tokens.length, show: (t) => (t === 0 ? { en: "all", zh: "全部" } : { en: `${t} ${data.tokens[t - 1].en}`, zh: `${t} ${data.tokens[t - 1].zh}` }) }, (t) =>
    box.mark(t === 0 ? null : t - 1),
  );
  paint();
  legend(place, scale);
}

figure("mask", mask);
