// Matrices side by side under one slider: what changes when one thing changes.
import { controls, slider } from "./controls.js";
import { figure } from "./figures.js";
import { grid, legend, written } from "./grid.js";
import { element, words } from "./words.js";

// A number for a line of text: whole numbers in full, powers of ten as such.
export function power(value) {
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en");
  const [digits, exponent] = written(value).split("e");
  if (exponent === undefined) return digits;
  const raised = [...String(Number(exponent))].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(c)])).join("");
  return `${digits}\u00a0×\u00a010${raised}`;
}

// `data`: control { name, label, shows, start } and sheets [{ name, rowNames, colNames, values: one matrix for each stop (null: no cell),
// or one for all, scale }], numbers [{ key, name, values: one for each stop }].
function sheets(place, data) {
  const row = controls(place);
  const beside = element("div", { class: data.sheets.length > 4 ? "beside" : "beside narrow" });
  if (data.sheets.length) place.append(beside);
  const boxes = data.sheets.map((sheet) => {
    const part = element("div", { "data-sheet": sheet.key }, element("p", { class: "panel" }, words(sheet.name)));
    beside.append(part);
    const [rows, cols] = [sheet.values[0].length, sheet.values[0][0].length];
    const box = grid(part, {
      rows,
      cols,
      cell: sheet.cell,
      rowNames: sheet.rowNames ?? null,
      colNames: sheet.colNames ?? null,
      label: sheet.name,
      told: (r, c, value) => ({
        en: `${sheet.rowNames?.[r].en ?? sheet.rowNames?.[r] ?? r + 1}, ${sheet.colNames?.[c].en ?? sheet.colNames?.[c] ?? c + 1}: ${written(value)}`,
        zh: `${sheet.rowNames?.[r].zh ?? sheet.rowNames?.[r] ?? r + 1}，${sheet.colNames?.[c].zh ?? sheet.colNames?.[c] ?? c + 1}：${written(value)}`,
      }),
    });
    legend(part, sheet.scale);
    return { sheet, box };
  });
  const list = element("dl", { class: "facts numbers" });
  place.append(list);
  const told = data.numbers.map((number) => {
    const output = element("output", { "data-name": number.key });
    list.append(element("dt", {}, words(number.name)), element("dd", {}, output));
    return { number, output };
  });
  slider(row, { name: data.control.name, label: data.control.label, min: 0, max: data.control.shows.length - 1, value: data.control.start, show: (i) => data.control.shows[i] }, (i) => {
    for (const { sheet, box } of boxes) box.paint(sheet.values[Math.min(i, sheet.values.length - 1)], sheet.scale);
    for (const { number, output } of told) {
      const value = number.values[i];
      output.setAttribute("data-value", value);
      output.replaceChildren(...words(typeof value === "number" ? power(value) : value));
    }
  });
}

figure("sheets", sheets);
