"""Drawing of the recurrent cell from a specification: decay, erasure, write and read.

All cells share one layout, so that they differ only where the systems do: omitted steps are drawn faintly.
"""

from __future__ import annotations

from linattn.atlas.algebra import Spec
from linattn.atlas.inspection import Inspection
from linattn.atlas.svg import box, drawing, node, symbol, text, wire
from linattn.atlas.text import Both, possessive

LINE, BOXES, BEFORE, FADE, ERASE, WRITE, AFTER, READ = 80, 220, 40, 119, 201, 332, 455, 545  # heights, then places along the line
WIDE = 582  # minimum width, for phones

DECAYS = {
    "none": Both("nothing decays", "不衰减"),
    "constant": Both("decays at a fixed rate per head", "每个头以固定速率衰减"),
    "head": Both("decays per head, at a rate that the token sets", "逐头衰减，速率由 token 决定"),
    "channel": Both("decays per channel, at rates that the token sets", "逐通道衰减，速率由 token 决定"),
}
ERASES = {
    "none": Both("nothing is erased", "不擦除"),
    "delta": Both("what the key held is erased", "擦除键上的旧值"),
    "pair": Both("what one vector reads, another erases", "按一个向量读出，按另一个向量擦除"),
}


def cell(seen: Inspection) -> str:
    """Draw the cell of ``seen`` as an SVG element."""
    if seen.rule == "scores" and seen.info.resumable and seen.matrix is not None:
        return _growing(seen)
    if seen.spec is None:
        return _other(seen)
    return _recurrent(seen.title, seen.spec) if seen.info.causal else _summed(seen.title, seen.spec)


def sentences(spec: Spec) -> list[Both]:
    """Describe the cell in words, one sentence for each operation."""
    written = {
        "delta": Both("what is written is the value less what the key held", "写入值与键上旧值之差"),
    }.get(spec.erase, Both("the outer product of key and value is written", "写入键与值的外积"))
    read = Both("read by the query", "由查询读出")
    if spec.bonus:
        read = Both(
            "read by the query before the token is written; the token itself has a separate weight",
            "由查询在写入之前读出，当前 token 另有一个权重",
        )
    elif spec.normalize:
        read = Both("read by the query and divided by the sum of its weights", "由查询读出，再除以权重之和")
    steps = Both(f"all of it {spec.steps} times per token; the last state is read", f"每个 token 重复 {spec.steps} 次，读最后的状态")
    found = [DECAYS[spec.decay], ERASES[spec.erase], written, *([steps] if spec.steps > 1 else []), read]
    if spec.conv:
        found.insert(0, Both(f"inputs pass a short convolution over {spec.conv} tokens first", f"输入先经过宽 {spec.conv} 的短卷积"))
    if spec.gate:
        found.append(Both("the output is multiplied by a gate that the token sets", "输出再乘以由 token 算出的门"))
    return found


def _recurrent(title: Both, spec: Spec) -> str:
    _, k, v = spec.sizes
    state = f"[{k}, {v}]"
    label = Both(
        f"The cell of {title.en}: " + "; ".join(s.en for s in sentences(spec)) + ".",
        f"{possessive(title.zh)}单元：" + "；".join(s.zh for s in sentences(spec)) + "。",
    )
    parts = [
        wire([(BEFORE + 36, LINE), (AFTER - 37, LINE)]),
        box(BEFORE, LINE, "S_{t−1}", state, "state", 72),
        box(AFTER, LINE, "S_t", state, "state", 72),
        *_fade(spec, k),
        *_erase(spec, k),
        *_write(spec, k, v),
        *_read(spec, k, v),
    ]
    names = (Both("decay", "衰减"), Both("erase", "擦除"), Both("write", "写入"), Both("read", "读出"))
    parts += [text(x, 42, name, "axis") for x, name in zip((FADE, ERASE, WRITE, READ), names, strict=True)]
    return drawing(WIDE, _height(spec), parts, label, "cell")


def _summed(title: Both, spec: Spec) -> str:
    """Draw the cell of a bidirectional system: one sum over all tokens, which every query reads."""
    _, k, v = spec.sizes
    label = Both(f"The cell of {title.en}: the sum over all tokens of key times value is read by every query.",
                 f"{possessive(title.zh)}单元：所有 token 的键值外积之和，供每个查询读出。")  # fmt: skip
    names = ((WRITE, Both("all tokens", "全部 token")), (READ, Both("read", "读出")))
    parts = [
        wire([(WRITE + 16, LINE), (AFTER - 37, LINE)]),
        box(AFTER, LINE, "S", f"[{k}, {v}]", "state", 72),
        *_write(spec, k, v, sign="Σ", index="j"),
        *_read(spec, k, v),
        *(text(x, 42, name, "axis") for x, name in names),
    ]
    middle = f'<g transform="translate({240 - (WRITE - 80 + READ + 33) // 2} 0)">{"".join(parts)}</g>'
    return drawing(480, _height(spec), [middle], label, "cell short")


def _low(spec: Spec) -> int:
    """Height of the output's box: one step lower for each operation before it."""
    return BOXES + 48 * (spec.normalize + spec.skip + spec.gate)


def _height(spec: Spec) -> int:
    return max(_low(spec) + 32, 252 + 34 * bool(spec.conv))


def _convolved(spec: Spec, places: tuple[float, ...]) -> list[str]:
    """Bar below the inputs' boxes for their short convolution."""
    if not spec.conv:
        return []
    y, left, right = BOXES + 46, min(places) - 44, max(places) + 44
    name = Both(f"short convolution ({spec.conv})", f"短卷积（{spec.conv}）")
    frame = f'<g class="t tv"><rect class="box" x="{left:g}" y="{y - 12}" width="{right - left:g}" height="24" rx="5"/></g>'
    return [*(wire([(x, y - 12), (x, BOXES + 22)], "v") for x in places), frame, text((left + right) / 2, y + 6, name, "shape")]


def _fade(spec: Spec, k: int) -> list[str]:
    if spec.decay == "none":
        return [node(FADE, LINE, "", "decay", ghost=True)]
    name, shape = {"constant": ("γ", "[H]"), "head": ("α_t", "[H]"), "channel": ("α_t", f"[{k}]")}[spec.decay]
    return [node(FADE, LINE, "⊙", "decay"), wire([(FADE, BOXES - 22), (FADE, LINE + 16)], "decay"), box(FADE, BOXES, name, shape, "decay")]


def _erase(spec: Spec, k: int) -> list[str]:
    if spec.erase == "none":
        return [node(ERASE, LINE, "", "decay", ghost=True)]
    up = wire([(ERASE, BOXES - 22), (ERASE, LINE + 16)], "decay")
    if spec.erase == "delta":
        return [node(ERASE, LINE, "−", "decay"), up, box(ERASE, BOXES, "β_t k_t^⊤k_t", f"[{k}, {k}]", "decay", 88)]
    return [node(ERASE, LINE, "+", "decay"), up, box(ERASE, BOXES, "w_t r_t^⊤", f"[{k}, {k}]", "decay", 88)]


def _write(spec: Spec, k: int, v: int, sign: str = "+", index: str = "t") -> list[str]:
    gate = "β_t " if spec.erase == "delta" else ""
    return [
        node(WRITE, LINE, sign, "k"),
        wire([(WRITE, 134), (WRITE, LINE + 16)], "k"),
        node(WRITE, 150, "×", "v"),
        wire([(WRITE - 40, BOXES - 22), (WRITE - 12, 161)], "k"),
        wire([(WRITE + 40, BOXES - 22), (WRITE + 12, 161)], "v"),
        box(WRITE - 42, BOXES, f"{gate}k_{index}^⊤", f"[{k}, 1]", "k", 76),
        box(WRITE + 42, BOXES, f"v_{index}", f"[1, {v}]", "v", 76),
    ]


def _read(spec: Spec, k: int, v: int) -> list[str]:
    low = _low(spec)
    parts = [node(READ, 150, "×", "output"), box(READ, low, "o_t", f"[1, {v}]", "output")]
    parts += [wire([(AFTER + 33, BOXES), (READ - 44, BOXES), (READ - 11, 162)], "q", tip=True), box(AFTER, BOXES, "q_t", f"[1, {k}]", "q")]
    parts += _convolved(spec, (WRITE - 42, WRITE + 42, AFTER))
    if spec.bonus:  # read from the state before the write, and from the token by a separate weight
        parts += [wire([(BEFORE, LINE - 22), (BEFORE, 14), (AFTER + 50, 14), (AFTER + 50, 150), (READ - 16, 150)], "state", dashed=True)]
        parts += [text(READ + 34, 126, "+ u⊙kv", "shape", "end")]
    else:
        parts += [wire([(AFTER + 36, LINE), (READ, LINE), (READ, 134)])]
    parts += [wire([(READ, 166), (READ, low - 23)], "output")]
    if spec.normalize:
        parts += [node(READ, BOXES - 10, "÷", "output"), text(READ - 8, BOXES + 18, "q z", "shape", "end")]
    if spec.skip:
        y = BOXES - 10 + 48 * spec.normalize
        parts += [node(READ, y, "+", "v"), text(READ + 22, y + 5, "v", "shape", "start")]
    if spec.gate:
        parts += [node(READ, low - 58, "⊙", "q"), f'<g class="tq">{symbol(READ + 27, low - 53, "g_t")}</g>']
    return parts


def _growing(seen: Inspection) -> str:
    """Draw the cell of a system that keeps every token: a growing list, and a query compared with all of it."""
    label = Both(
        f"The cell of {seen.title.en}: a row is kept for every token; the query is compared with each of them.",
        f"{possessive(seen.title.zh)}单元：每个 token 留下一行，查询与每一行比较。",
    )
    k, v = (seen.shapes[name][-1] if name in seen.shapes else "…" for name in ("k", "v"))
    rows = [(BEFORE + 6, "t−1", 3), (AFTER, "t", 4)]
    lists = [
        f'<g class="t tstate"><rect class="box" x="{x - 40}" y="{LINE - 36 + 18 * i}" width="80" height="16" rx="3"/></g>'
        for x, _, count in rows
        for i in range(count)
    ]
    return drawing(
        WIDE,
        252,
        [
            wire([(BEFORE + 46, LINE), (AFTER - 44, LINE)]),
            *lists,
            *(
                text(x - 40, LINE + 52 + 18 * i, f"{name} [{t}, {size}]", "shape", "start")
                for x, t, _ in rows
                for i, (name, size) in enumerate((("K", k), ("V", v)))
            ),
            text(BEFORE + 6, 34, Both("kept", "保留"), "axis"),
            text(WRITE, 42, Both("a row more", "多一行"), "axis"),
            text(WIDE - 4, 34, Both("reads all rows", "读每一行"), "axis", "end"),
            node(WRITE, LINE, "∪", "k"),
            wire([(WRITE - 40, BOXES - 22), (WRITE - 8, LINE + 14)], "k"),
            wire([(WRITE + 40, BOXES - 22), (WRITE + 8, LINE + 14)], "v"),
            box(WRITE - 42, BOXES, "k_t", f"[1, {k}]", "k", 76),
            box(WRITE + 42, BOXES, "v_t", f"[1, {v}]", "v", 76),
            wire([(AFTER + 40, LINE), (READ, LINE), (READ, 134)]),
            node(READ, 150, "Σ", "output"),
            wire([(AFTER + 33, BOXES), (READ - 44, BOXES), (READ - 11, 162)], "q"),
            box(AFTER, BOXES, "q_t", f"[1, {k}]", "q"),
            wire([(READ, 166), (READ, BOXES - 23)], "output"),
            box(READ, BOXES, "o_t", f"[1, {v}]", "output"),
        ],
        label,
        "cell",
    )


def _other(seen: Inspection) -> str:
    """Draw the cell of any other mixer: tokens in, tokens out, and its states by name and shape."""
    states = list(seen.shapes.items())[:6]
    height = max(150, 66 + 34 * len(states))
    middle = height / 2
    label = Both(f"{seen.title.en}: tokens in, its own rules, tokens out; states: {', '.join(seen.shapes) or 'none'}.",
                 f"{seen.title.zh}：输入 token，按自己的规则，输出 token；状态：{'、'.join(seen.shapes) or '无'}。")  # fmt: skip
    parts = [
        box(44, middle, "x_t", "[D]", "v"), wire([(80, middle), (126, middle)], "v"),
        f'<g class="t tstate"><rect class="box" x="130" y="20" width="220" height="{height - 40}" rx="8"/></g>',
        box(436, middle, "o_t", "[D]", "output"), wire([(350, middle), (400, middle)], "output"),
    ]  # fmt: skip
    if not states:
        parts.append(text(240, middle + 5, Both("its own rule", "自有规则"), "axis"))
    for i, (name, shape) in enumerate(states):
        y = 54 + 34 * i
        parts.append(text(148, y, name, "t tstate name", "start") + text(334, y, str(list(shape)), "shape", "end"))
    if states:
        parts.append(text(240, height - 4, Both("passed from token to token", "逐个 token 传递"), "axis"))
    return drawing(480, height, parts, label, "cell short")
