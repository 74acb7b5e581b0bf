// The recurrence, token by token, in double precision: what linattn/ops/reference defines, for one head and small sizes.

export function zeros(rows, cols) {
  return Array.from({ length: rows }, () => new Array(cols).fill(0));
}

export function dot(a, b) {
  return a.reduce((sum, value, i) => sum + value * b[i], 0);
}

// The row vector x S.
export function through(x, s) {
  return s[0].map((_, j) => x.reduce((sum, value, i) => sum + value * s[i][j], 0));
}

export function outerProduct(k, v) {
  return k.map((a) => v.map((b) => a * b));
}

export function sumOf(a, b) {
  return a.map((row, i) => row.map((value, j) => value + b[i][j]));
}

// One token on the state `s`: { q, k, v } and, where the rule has them, decay (the log of α, for every channel), beta, read and write.
// Returns the state after it.
export function updated(s, { k, v, decay, beta, read, write }) {
  const faded = decay ? s.map((row, i) => row.map((value) => Math.exp(decay[i]) * value)) : s;
  const held = beta === undefined ? null : through(k, faded);
  let written = outerProduct(k, held ? v.map((value, j) => beta * (value - held[j])) : v);
  if (read) written = sumOf(written, outerProduct(write, through(read, s)));
  return sumOf(faded, written);
}

// All tokens: { outputs, states }. With `normalize`, an epsilon, z is one more column that every token writes 1 into.
export function recurred(tokens, keys, values, normalize = null) {
  let s = zeros(keys, values + (normalize === null ? 0 : 1));
  const outputs = [];
  const states = [];
  for (const token of tokens) {
    s = updated(s, normalize === null ? token : { ...token, v: [...token.v, 1] });
    const read = through(token.q, s);
    outputs.push(normalize === null ? read : read.slice(0, values).map((value) => value / (read[values] + normalize)));
    states.push(normalize === null ? s : s.map((row) => row.slice(0, values)));
  }
  return { outputs, states };
}
