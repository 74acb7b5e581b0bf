// A small DeltaNet language model in double precision: linattn/atlas/tiny.py trains it and tests compare the two.
import { dot, updated, through, zeros } from "./recurrence.js";

const HEAD_EPS = 1e-5;

function unpacked({ shape, scale, data }) {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const flat = Array.from(new Int16Array(bytes.buffer), (level) => level * scale);
  const width = shape.slice(1).reduce((a, b) => a * b, 1);
  return shape.length === 1 ? flat : Array.from({ length: shape[0] }, (_, i) => flat.slice(i * width, (i + 1) * width));
}

const silu = (x) => x / (1 + Math.exp(-x));
const times = (matrix, x) => matrix.map((row) => dot(row, x));
const plus = (a, b) => a.map((x, i) => x + b[i]);

function normed(x, weight, eps) {
  const size = Math.sqrt(dot(x, x) / x.length + eps);
  return x.map((value, i) => (value / size) * weight[i]);
}

function unitLength(x) {
  const size = Math.sqrt(dot(x, x) + 1e-6);
  return x.map((value) => value / size);
}

// Deltanet over normed inputs: for each token { q, k, v, beta, state, o } by head, and its output.
function deltaNet(inputs, weight, heads) {
  const projected = inputs.map((x) => times(weight("qkv_proj.weight"), x));
  const conv = weight("conv.weight");
  const wide = conv[0].length;
  const size = inputs[0].length / heads;
  let states = Array.from({ length: heads }, () => zeros(size, size));
  return inputs.map((x, t) => {
    const convolved = projected[t].map((_, c) =>
      silu(conv[c].reduce((sum, w, i) => sum + w * (projected[t - wide + 1 + i]?.[c] ?? 0), 0)),
    );
    const cut = (part, h) => convolved.slice((part * heads + h) * size, (part * heads + h + 1) * size);
    const betas = times(weight("b_proj.weight"), x).map((b) => 1 / (1 + Math.exp(-b)));
    const each = betas.map((beta, h) => {
      const [q, k, v] = [unitLength(cut(0, h)), unitLength(cut(1, h)), cut(2, h)];
      const state = updated(states[h], { k, v, beta: Math.min(beta, 2 / Math.max(dot(k, k), 1)) });
      return { q, k, v, beta, state, o: through(q.map((value) => value / Math.sqrt(size)), state) };
    });
    states = each.map((head) => head.state);
    const out = each.flatMap(({ o }) => normed(o, weight("norm.weight"), HEAD_EPS));
    return { heads: each, y: times(weight("o_proj.weight"), out) };
  });
}

// `run(ids)`: for every token { embedded, layers: [{ heads, y, ffn, x }], logits }.
export function network({ weights, layers, heads, eps }) {
  const all = Object.fromEntries(Object.entries(weights).map(([name, entry]) => [name, unpacked(entry)]));
  const get = (name) => {
    const found = Object.keys(all).find((key) => key === name || key.endsWith(`.${name}`));
    if (!found) throw new Error(`the model has no weight ${name}`);
    return all[found];
  };
  return (ids) => {
    const embedded = ids.map((id) => get("embedding.weight")[id]);
    const steps = embedded.map((x) => ({ embedded: x, layers: [] }));
    let xs = embedded;
    for (let l = 0; l < layers; l++) {
      const own = (name) => get(`layers.${l}.${name}`);
      const mixer = deltaNet(xs.map((x) => normed(x, own("mixer_norm.weight"), eps)), (name) => own(`mixer.${name}`), heads);
      xs = xs.map((x, t) => {
        const between = plus(x, mixer[t].y);
        const inner = normed(between, own("ffn_norm.weight"), eps);
        const up = times(own("ffn.up_proj.weight"), inner);
        const ffn = times(own("ffn.down_proj.weight"), times(own("ffn.gate_proj.weight"), inner).map((g, i) => silu(g) * up[i]));
        const after = plus(between, ffn);
        steps[t].layers.push({ ...mixer[t], ffn, x: after });
        return after;
      });
    }
    xs.forEach((x, t) => (steps[t].logits = times(get("lm_head.weight"), normed(x, get("model.norm.weight"), eps))));
    return steps;
  };
}

// Probabilities of `logits` at a temperature; 0 takes the likeliest.
export function chances(logits, temperature) {
  const most = Math.max(...logits);
  if (temperature === 0) return logits.map((x) => (x === most ? 1 : 0));
  const powers = logits.map((x) => Math.exp((x - most) / temperature));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((x) => x / sum);
}
