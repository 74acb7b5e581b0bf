// The lab: any sentence, any rule, computed here. linattn/atlas/lab.py says what a word is and does the same with the library's op.
import { button, choice, controls, slider } from "./controls.js";
import { figure } from "./figures.js";
import { grid, largest, legend, written } from "./grid.js";
import { bars, counted } from "./memory.js";
import { dot, recurred, zeros } from "./recurrence.js";
import { power } from "./sheets.js";
import { element, language, named, spoken, words } from "./words.js";

const MOST = 40; // tokens of a sentence
// Chinese characters side by side, a word with its marks, or a sign: of a composed emoji all that belongs to it.
const WORD = /\p{Script=Han}+|(?:(?!\p{Script=Han})[\p{L}\p{M}\p{N}'’_-])+|[^\s\p{L}\p{M}\p{N}](?:\p{M}|\p{EMod}|\u200d\S)*/gu;

function mixed(bits) {
  let h = bits;
  h = Math.imul(h ^ (h >>> 16), 0x85ebca6b);
  h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
  return (h ^ (h >>> 16)) >>> 0;
}

// `count` numbers in [-1, 1) that the letters of `word` choose.
export function numbersOf(word, count, salt) {
  let h = 2166136261 ^ salt;
  for (const byte of new TextEncoder().encode(word)) h = Math.imul(h ^ byte, 16777619);
  return Array.from({ length: count }, (_, i) => mixed(h + Math.imul(i + 1, 0x9e3779b9)) / 2 ** 31 - 1);
}

function vectorOf(word, { size, salt }) {
  const raw = numbersOf(word, size, salt);
  const length = Math.sqrt(dot(raw, raw));
  return raw.map((x) => x / length);
}

const chinese = Intl.Segmenter ? new Intl.Segmenter("zh", { granularity: "word" }) : null;

// The first word of `text`, or "": Chinese characters are cut by the browser's dictionary, one by one where it has none.
function firstWord(text) {
  const [found] = text.match(WORD) ?? [""];
  if (!/^\p{Script=Han}/u.test(found)) return found;
  return chinese ? chinese.segment(found)[Symbol.iterator]().next().value.segment : [...found][0];
}

// The words of `text` as { en, zh } tokens; those of the running sentence are known in both languages and are one word.
export function parsed(text, known) {
  const pieces = [];
  let rest = text.trimStart();
  while (rest) {
    const word = known.find((w) => rest.startsWith(w.zh));
    const own = firstWord(rest);
    const piece = word && word.zh.length >= own.length ? word.zh : own;
    if (!piece) break;
    pieces.push(known.find((w) => w.en === piece || w.zh === piece) ?? { en: piece, zh: piece });
    rest = rest.slice(rest.indexOf(piece) + piece.length).trimStart();
  }
  return pieces.slice(0, MOST);
}

// What each token brings under `rule`: the arguments of the recurrence.
function brought(tokens, rule, data, { decay, beta, heads }) {
  const first = (i) => i - (i % (data.size / heads)); // channel of the head of channel i
  const elu = (x) => (x > 0 ? x : Math.expm1(x)) + 1;
  const now = tokens.map((token) => vectorOf(token.en, data));
  return now.map((word, t) => {
    const before = t ? now[t - 1] : word.map(() => 0);
    const drawnFrom = numbersOf(tokens[t].en, 3 * data.size, data.salt);
    const speed = drawnFrom.slice(data.size, 2 * data.size).map((x) => 5 * x ** 4);
    const made = { q: word, k: before, v: word };
    if (rule.normalize) Object.assign(made, { q: word.map(elu), k: t ? before.map(elu) : before });
    const logs = { constant: (i) => 2 ** -(first(i) / (data.size / heads)), head: (i) => speed[first(i)], channel: (i) => speed[i] }[rule.decay];
    if (logs) made.decay = word.map((_, i) => Math.log(decay) * logs(i));
    if (rule.erase === "delta") made.beta = beta;
    if (rule.erase === "pair") {
      const shares = drawnFrom.slice(2 * data.size).map((x) => (1 + x) / 2);
      const write = before.map((x, i) => beta * shares[i] * x);
      Object.assign(made, { k: write, read: before.map((x) => -x), write });
    }
    return made;
  });
}

// The recurrence of each head on its share of the channels: { outputs, states }, where a state has a block for each head and null elsewhere.
function byHead(tokens, size, heads, normalize) {
  const own = size / heads;
  const share = (value, h) => (Array.isArray(value) ? value.slice(h * own, (h + 1) * own) : value);
  const runs = Array.from({ length: heads }, (_, h) => {
    const mine = tokens.map((token) => Object.fromEntries(Object.entries(token).map(([name, value]) => [name, share(value, h)])));
    return recurred(mine, own, own, normalize);
  });
  const row = (line, h) => [...new Array(h * own).fill(null), ...line, ...new Array(size - (h + 1) * own).fill(null)];
  return {
    outputs: tokens.map((_, t) => runs.flatMap((run) => run.outputs[t])),
    states: tokens.map((_, t) => runs.flatMap((run, h) => run.states[t].map((line) => row(line, h)))),
  };
}

function apart(found, wanted) {
  return Math.max(...found.flat().map((value, i) => Math.abs((value ?? 0) - wanted.flat()[i])));
}

// The settings that a link to this page names: sentence, system, heads and token.
function linked(data) {
  const asked = new URLSearchParams(location.hash.slice(1));
  return { text: asked.get("text"), rule: data.rules.find((rule) => rule.key === asked.get("rule")), heads: data.heads.find((count) => count === Number(asked.get("heads"))), token: Number(asked.get("token")) || null };
}

// Keeps the settings in the address, without a new entry in the history.
function keep({ text, rule, heads, token }) {
  const asked = new URLSearchParams({ rule: rule.key, token });
  if (heads > 1) asked.set("heads", heads);
  if (text) asked.set("text", text);
  history.replaceState(null, "", `#${asked}`);
}

function player(place, at, last, go) {
  let timer = null;
  const names = { play: { en: "play", zh: "播放" }, pause: { en: "pause", zh: "暂停" } };
  const stop = () => {
    clearInterval(timer);
    timer = null;
    node.replaceChildren(...words(names.play));
  };
  const node = button(place, { name: "play", label: names.play }, () => {
    if (timer) return stop();
    if (at() >= last()) go(1);
    node.replaceChildren(...words(names.pause));
    timer = setInterval(() => (at() < last() ? go(at() + 1) : stop()), 900);
  });
}

function sentenceInput(place, data, first, react) {
  const input = element("input", { type: "text", "data-input": "sentence", autocomplete: "off", spellcheck: "false" });
  const label = { en: "sentence", zh: "句子" };
  const given = () => data.tokens.map((token) => token[language()]).join(language() === "en" ? " " : "").replaceAll(" ,", ",");
  let own = Boolean(first);
  if (own) input.value = first;
  named(input, label);
  spoken(() => {
    if (!own) input.value = given();
  });
  input.addEventListener("input", () => {
    own = true;
    react(input.value);
  });
  place.append(element("label", { class: "control" }, element("span", { class: "control-name" }, words(label)), input));
}

function lab(place, data) {
  const known = [...new Map(data.tokens.map((token) => [token.en, token])).values()];
  const asked = linked(data);
  const typed = asked.text ? parsed(asked.text, known) : [];
  const start = typed.length ? typed : data.tokens;
  const now = { tokens: start, text: typed.length ? asked.text : null, rule: asked.rule ?? data.rules[0], decay: data.decay, beta: data.beta, heads: asked.heads ?? data.heads[0], token: Math.min(asked.token ?? data.tokens.length - 1, start.length) };
  const top = controls(place);
  const middle = controls(place);
  const row = controls(place);
  const beside = element("div", { class: "beside narrow" });
  const panel = (title, shape, kind) => {
    const node = element("div", { "data-panel": kind }, element("p", { class: "panel" }, element("b", { class: `t${kind}` }, words(title)), " ", element("span", { "data-shape": kind }, shape)));
    beside.append(node);
    return node;
  };
  const n = data.size;
  const cells = { cell: 22 };
  const places = {
    token: panel({ en: "this token", zh: "这个 token" }, `q k v α o [${n}]`, "k"),
    state: panel({ en: "state S", zh: "状态 S" }, `[${n}, ${n}]`, "state"),
    change: panel({ en: "its change", zh: "它的变化" }, `[${n}, ${n}]`, "decay"),
    output: panel({ en: "o, word by word", zh: "o 指向的词" }, "", "output"),
  };
  const lines = ["q", "k", "v", "α", "o"];
  const place8 = (r, c, value) => ({ en: `row ${r + 1}, column ${c + 1}: ${written(value)}`, zh: `第 ${r + 1} 行，第 ${c + 1} 列：${written(value)}` });
  const boxes = {
    token: grid(places.token, { rows: 5, cols: n, ...cells, rowNames: lines, label: { en: "q, k, v, decay, output", zh: "q、k、v、衰减、输出" }, told: (r, c, value) => `${lines[r]}, ${c + 1}: ${written(value)}` }),
    state: grid(places.state, { rows: n, cols: n, ...cells, label: { en: "state", zh: "状态" }, told: place8 }),
    change: grid(places.change, { rows: n, cols: n, ...cells, label: { en: "change of the state", zh: "状态的变化" }, told: place8 }),
  };
  let shown = null;
  let ready = false; // after the first drawing: a page that is only opened keeps its address
  const scaleNote = element("div", {});
  places.state.append(scaleNote);
  const check = element("output", { "data-name": "distance", class: "readout", "aria-live": "polite" });
  place.append(beside, check);
  let run = null;

  function compute() {
    const tokens = brought(now.tokens, now.rule, data, now);
    run = { tokens, ...byHead(tokens, n, now.heads, now.rule.normalize ? data.eps : null) };
    const same = now.tokens === data.tokens && now.decay === data.decay && now.beta === data.beta;
    const distance = same ? Math.max(apart(run.outputs.slice(-now.rule.outputs[now.heads].length), now.rule.outputs[now.heads]), apart(run.states.at(-1), now.rule.states[now.heads])) : null;
    check.setAttribute("data-value", distance ?? "");
    const text = distance === null ? { en: "your own sentence or settings: computed here only", zh: "你自己的句子或设置：只在这里计算" } : { en: `largest distance to the library’s own numbers: ${power(Number(distance.toPrecision(2)))}`, zh: `与库算出的数字的最大差距：${power(Number(distance.toPrecision(2)))}` };
    check.replaceChildren(...words(text));
    paint();
  }

  function paint() {
    if (!run || !shown) return;
    if (ready) keep(now);
    const t = Math.min(now.token, now.tokens.length) - 1;
    const { q, k, v, decay } = run.tokens[t];
    const alpha = decay ? decay.map(Math.exp) : q.map(() => 1);
    const before = t ? run.states[t - 1] : zeros(n, n);
    const size = now.heads > 1 ? `${now.heads} × [${n / now.heads}, ${n / now.heads}]` : `[${n}, ${n}]`;
    for (const kind of ["state", "decay"]) beside.querySelector(`[data-shape=${kind}]`).textContent = size;
    const scale = Math.max(largest(run.states), 1e-9);
    boxes.token.paint([q, k, v, alpha, run.outputs[t]], 1);
    boxes.state.paint(run.states[t], scale);
    boxes.change.paint(run.states[t].map((line, i) => line.map((value, j) => (value === null ? null : value - before[i][j]))), scale);
    scaleNote.replaceChildren();
    legend(scaleNote, scale);
    const values = shown.names.map((word) => dot(run.outputs[t], vectorOf(word.en, data)));
    shown.bars.update(values, Math.max(1, largest([values])));
  }

  function read(tokens) {
    now.tokens = tokens;
    const names = [...new Map(tokens.map((token) => [token.en, token])).values()];
    shown?.bars.node.remove();
    shown = { names, bars: bars(places.output, names, { en: "How strongly the output speaks of each word", zh: "输出与每个词的相近程度" }) };
    run = null;
    const input = row.querySelector("[data-slider=token]");
    if (!input) return;
    input.max = tokens.length;
    step.set(Math.min(now.token, tokens.length));
    compute();
  }

  sentenceInput(top, data, now.text, (text) => {
    now.text = text;
    const tokens = parsed(text, known);
    const given = tokens.length === data.tokens.length && tokens.every((token, i) => token.en === data.tokens[i].en);
    if (tokens.length) read(given ? data.tokens : tokens);
  });
  read(start);
  const step = slider(row, { name: "token", label: { en: "token t", zh: "第 t 个 token" }, min: 1, max: now.tokens.length, value: now.token, show: (t) => counted(now.tokens)(Math.min(t, now.tokens.length)) }, (t) => {
    now.token = t;
    paint();
  });
  const show = (value) => value.toFixed(2);
  slider(row, { name: "decay", label: { en: "decay α", zh: "衰减 α" }, min: 0.5, max: 1, step: 0.05, value: now.decay, show }, (value) => {
    now.decay = value;
    compute();
  });
  slider(row, { name: "beta", label: { en: "strength β", zh: "强度 β" }, min: 0, max: 2, step: 0.1, value: now.beta, show }, (value) => {
    now.beta = value;
    compute();
  });
  choice(middle, { name: "rule", label: { en: "system", zh: "方法" }, options: data.rules.map((rule) => [rule.key, rule.name]), value: now.rule.key }, (key) => {
    now.rule = data.rules.find((rule) => rule.key === key);
    row.querySelector("[data-slider=decay]").disabled = now.rule.decay === "none";
    row.querySelector("[data-slider=beta]").disabled = now.rule.erase === "none";
    compute();
  });
  choice(middle, { name: "heads", label: { en: "heads", zh: "头数" }, options: data.heads.map((count) => [String(count), String(count)]), value: String(now.heads) }, (count) => {
    now.heads = Number(count);
    compute();
  });
  player(row, () => now.token, () => now.tokens.length, (t) => step.set(t));
  ready = true;
}

figure("lab", lab);
