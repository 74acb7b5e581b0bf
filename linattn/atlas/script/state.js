// The state after each token: a matrix under a slider; a vector as one row for each token.
import { choice, controls, slider } from "./controls.js";
import { figure } from "./figures.js";
import { grid, largest, legend, written } from "./grid.js";
import { headOptions } from "./mask.js";

function state(place, data) {
  const { tokens, values, grows } = data;
  const vector = !grows && values[0][0].length === 1;
  const scale = largest(values);
  const row = controls(place);
  const [rows, cols] = vector ? [tokens.length, values[0][0][0].length] : [values.at(-1)[0].length, values.at(-1)[0][0].length];
  const byToken = vector || grows;
  const box = grid(place, {
    rows,
    cols,
    cell: cols > 16 ? 16 : 26,
    rowNames: byToken ? tokens : null,
    label: { en: `State ${data.name}. Arrow keys walk over its cells.`, zh: `状态 ${data.name}。用方向键在单元格间移动。` },
    told: (r, c, value) =>
      byToken
        ? { en: `after “${tokens[r].en}”, channel ${c + 1}: ${written(value)}`, zh: `“${tokens[r].zh}”之后，第 ${c + 1} 通道：${written(value)}` }
        : { en: `row ${r + 1}, column ${c + 1}: ${written(value)}`, zh: `第 ${r + 1} 行，第 ${c + 1} 列：${written(value)}` },
  });
  const now = { token: tokens.length, head: 0 };
  const paint = () => {
    const shown = vector ? values.map((heads, t) => (t < now.token ? heads[now.head][0] : heads[now.head][0].map(() => null))) : values[now.token - 1][now.head];
    box.paint(shown, scale);
  };
  slider(row, { name: "token", label: { en: "after token", zh: "读到" }, min: 1, max: tokens.length, value: tokens.length, show: (t) => ({ en: `${t} ${tokens[t - 1].en}`, zh: `${t} ${tokens[t - 1].zh}` }) }, (t) => {
    now.token = t;
    paint();
  });
  if (values[0].length > 1) {
    choice(row, { name: "state-head", label: { en: "head", zh: "头" }, options: headOptions(values[0].length) }, (h) => {
      now.head = Number(h);
      paint();
    });
  }
  legend(place, scale);
}

figure("state", state);
