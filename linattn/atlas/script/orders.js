// Two orders of one product: what stands in the middle, and what it costs.
import { controls, slider } from "./controls.js";
import { figure } from "./figures.js";
import { power } from "./sheets.js";
import { drawn, drawnWords, element, named, words } from "./words.js";

const side = (size) => 16 + 9.5 * Math.log2(size / 8);

// A tensor as a rectangle whose sides grow with the logarithm of its shape, around (x, y).
function block(x, y, name, [rows, cols], tensor, shape) {
  const [width, height] = [side(cols), side(rows)];
  return drawn(
    "g",
    { class: `t t${tensor}` },
    drawn("rect", { class: "box", x: x - width / 2, y: y - height / 2, width, height, rx: 3 }),
    drawn("text", { x, y: y + 5, "text-anchor": "middle", class: "t name" }, name),
    drawn("text", { x, y: y + height / 2 + 16, "text-anchor": "middle", class: "shape" }, `[${shape}]`),
  );
}

function sign(x, y, text) {
  return drawn("text", { x, y: y + 6, "text-anchor": "middle", class: "sign" }, text);
}

// What stands in the product by the name `name`.
function where(x, y, name) {
  return [sign(x, y, `${name}  =`), ...drawnWords({ en: "where", zh: "其中" }, { x, y: y - 18, "text-anchor": "middle", class: "tick" })];
}

// `parts(length, width)` gives two groups: the product, and what its middle is made of, which stands below it on a phone.
function oneOrder(place, key, title, parts) {
  const svg = drawn("svg", { "aria-hidden": true });
  const frame = named(element("div", { role: "img", class: "orders" }, svg), title);
  const cost = element("output", { "data-name": key });
  const note = element("p", { class: "readout" }, element("span", {}, words({ en: "multiply-adds: ", zh: "乘加次数：" })), cost);
  place.append(element("p", { class: "panel" }, words(title)), frame, note);
  return (length, width, count) => {
    const narrow = frame.clientWidth < 560;
    const [product, middle] = parts(length, width);
    svg.setAttribute("viewBox", narrow ? "0 0 330 372" : "0 0 640 186");
    svg.replaceChildren(drawn("g", {}, product), drawn("g", narrow ? { transform: "translate(-310 186)" } : {}, middle));
    cost.setAttribute("data-value", count);
    cost.replaceChildren(power(count));
  };
}

function bothOrders(place, data) {
  const row = controls(place);
  const d = data.width;
  const y = 88;
  const left = oneOrder(place, "left", { en: "Queries meet keys first: (Q Kᵀ) V", zh: "查询先遇见键：(Q Kᵀ) V" }, (n) => [
    [block(90, y, "A", [n, n], "scores", `${n}, ${n}`), sign(190, y, "·"), block(240, y, "V", [n, d], "v", `${n}, ${d}`)],
    [...where(336, y, "A"), block(404, y, "Q", [n, d], "q", `${n}, ${d}`), sign(456, y, "·"), block(546, y, "Kᵀ", [d, n], "k", `${d}, ${n}`)],
  ]);
  const right = oneOrder(place, "right", { en: "Keys meet values first: Q (Kᵀ V)", zh: "键先遇见值：Q (Kᵀ V)" }, (n) => [
    [block(90, y, "Q", [n, d], "q", `${n}, ${d}`), sign(190, y, "·"), block(240, y, "S", [d, d], "state", `${d}, ${d}`)],
    [...where(336, y, "S"), block(456, y, "Kᵀ", [d, n], "k", `${d}, ${n}`), sign(550, y, "·"), block(596, y, "V", [n, d], "v", `${n}, ${d}`)],
  ]);
  const show = (i) => data.stops[i].length.toLocaleString("en");
  const length = slider(row, { name: "length", label: { en: "tokens L", zh: "长度 L" }, min: 0, max: data.stops.length - 1, value: data.start, show }, (i) => {
    const stop = data.stops[i];
    left(stop.length, d, stop.left);
    right(stop.length, d, stop.right);
  });
  addEventListener("resize", () => length.set(length.value));
}

figure("orders", bothOrders);
