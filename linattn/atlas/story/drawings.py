"""Drawings of the story: cells from the registry's specifications, and cells of older and wider systems.

All cells have the layout of :mod:`linattn.atlas.cell`: the state runs from left to right, inputs come from below. Shapes are those
of the library's mixers of width :data:`sentence.DIM`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import linattn
from linattn.atlas import sentence
from linattn.atlas.cell import AFTER, BEFORE, BOXES, FADE, LINE, READ, WIDE, WRITE, cell
from linattn.atlas.inspection import inspect_mixer
from linattn.atlas.svg import box, drawing, node, text, wire
from linattn.atlas.text import Both, labelled

BROAD, TALL = 820, 360  # the widths of rows of boxes: on wide screens and on phones
FLOOR, HALF = 318, 59  # position of the gates' inputs, and half the width of a box in a row


def framed(svg: str) -> str:
    """Frame of a drawing that scrolls on narrow screens."""
    return f'<div class="wide" tabindex="0" role="group" {labelled(Both("Drawing", "图"))}>{svg}</div>'


def of(name: str) -> Callable[[], str]:
    """Draw the cell of a registered system from its specification."""
    return lambda: cell(inspect_mixer(name))


def rnn() -> str:
    """Draw a recurrent network: a vector, a matrix and a tanh at every token."""
    d = sentence.DIM
    steps = (("×", FADE, "W", f"[{d}, {d}]", "decay"), ("+", 236, "x_t U", f"[1, {d}]", "v"))
    parts = [wire([(BEFORE + 36, LINE), (AFTER - 36, LINE)]), box(BEFORE, LINE, "h_{t−1}", f"[1, {d}]", "state", 72)]
    for sign, x, name, shape, tensor in steps:
        parts += [node(x, LINE, sign, tensor), wire([(x, BOXES - 22), (x, LINE + 16)], tensor), box(x, BOXES, name, shape, tensor)]
    parts += [box(350, LINE, "tanh", f"[1, {d}]", "output"), box(AFTER, LINE, "h_t", f"[1, {d}]", "state", 72)]
    parts += [wire([(AFTER + 36, LINE), (READ, LINE), (READ, BOXES - 23)], "output"), box(READ, BOXES, "o_t", f"[1, {d}]", "output")]
    names = ((FADE, Both("mix", "混合")), (236, Both("write", "写入")), (350, Both("tanh", "tanh")), (READ, Both("read", "读出")))
    parts += [text(x, 42, name, "axis") for x, name in names]
    label = Both(
        "The cell of an RNN: the state times a matrix, plus the token, through a tanh.", "RNN 的单元：状态乘矩阵，加上 token，再过 tanh。"
    )
    return drawing(WIDE, 252, parts, label, "cell")


def lstm() -> str:
    """Draw an LSTM: the cell state, and three gates that read the last output."""
    d = sentence.DIM
    shape = f"[1, {d}]"
    gates = ((FADE, "f_t", "decay", LINE + 16), (WRITE - 90, "i_t", "k", 161), (WRITE + 10, "c̃_t", "v", 161), (AFTER + 10, "g_t", "q", 0))
    parts = [
        wire([(BEFORE + 36, LINE), (AFTER - 36, LINE)]),
        box(BEFORE, LINE, "c_{t−1}", shape, "state", 72),
        box(AFTER, LINE, "c_t", shape, "state", 72),
    ]
    parts += [node(FADE, LINE, "⊙", "decay"), wire([(FADE, BOXES - 22), (FADE, LINE + 16)], "decay")]
    middle = WRITE - 40
    parts += [node(middle, LINE, "+", "k"), wire([(middle, 134), (middle, LINE + 16)], "k"), node(middle, 150, "⊙", "v")]
    parts += [wire([(WRITE - 90, BOXES - 22), (middle - 12, 161)], "k"), wire([(WRITE + 10, BOXES - 22), (middle + 12, 161)], "v")]
    parts += [
        wire([(AFTER + 36, LINE), (READ, LINE), (READ, 134)]),
        text(AFTER + 76, LINE - 8, "tanh", "shape"),
        node(READ, 150, "⊙", "output"),
    ]
    parts += [
        wire([(AFTER + 43, BOXES - 10), (READ - 40, BOXES - 30), (READ - 13, 160)], "q"),
        wire([(READ, 166), (READ, BOXES - 23)], "output"),
    ]
    parts += [box(READ, BOXES, "h_t", shape, "output"), *_fed(gates), box(BEFORE + 10, FLOOR, "x_t h_{t−1}", f"[1, {2 * d}]", "output", 92)]
    parts += [box(x, BOXES, name, shape, tensor) for x, name, tensor, _ in gates]
    names = ((FADE, Both("decay", "衰减")), (middle, Both("write", "写入")), (READ, Both("read", "读出")))
    parts += [text(x, 42, name, "axis") for x, name in names]
    label = Both(
        "The cell of LSTM: the cell state times a forget gate, plus an input gate times a candidate; the output gate reads it. "
        "All gates look at the token and at the last output.",
        "LSTM 的单元：单元状态乘遗忘门，加上输入门乘候选值，再由输出门读出。所有的门都看当前 token 和上一个输出。",
    )
    return drawing(WIDE, 350, parts, label, "cell")


def _fed(gates: Sequence[tuple[float, str, str, float]]) -> list[str]:
    """Draw dashed lines from one input at the bottom to every gate."""
    return [wire([(BEFORE + 56, FLOOR), (x, FLOOR), (x, BOXES + 24)], "output", dashed=True) for x, *_ in gates]


def system(selective: bool) -> str:
    """Draw a state-space model of one channel; in a selective one, step, input and output are data-dependent."""
    inner, n = inspect_mixer("mamba").shapes["h"]
    fade, b, c = ("e^{ΔₜA}", "Δ_tB_t", "C_t") if selective else ("e^{ΔA}", "B̄", "C")
    state = f"[{n}]"
    parts = [
        wire([(BEFORE + 36, LINE), (AFTER - 36, LINE)]), box(BEFORE, LINE, "h_{t−1}", state, "state", 72), box(AFTER, LINE, "h_t", state, "state", 72),
        node(FADE, LINE, "⊙", "decay"), wire([(FADE, BOXES - 22), (FADE, LINE + 16)], "decay"), box(FADE, BOXES, fade, state, "decay"),
        node(WRITE, LINE, "+", "k"), wire([(WRITE, 134), (WRITE, LINE + 16)], "k"), node(WRITE, 150, "×", "v"),
        wire([(WRITE - 40, BOXES - 22), (WRITE - 12, 161)], "k"), wire([(WRITE + 40, BOXES - 22), (WRITE + 12, 161)], "v"),
        box(WRITE - 42, BOXES, b, state, "k", 76), box(WRITE + 42, BOXES, "x_t", "[1]", "v", 76),
        wire([(AFTER + 36, LINE), (READ, LINE), (READ, 134)]), node(READ, 150, "×", "output"),
        wire([(AFTER + 33, BOXES), (READ - 44, BOXES), (READ - 11, 162)], "q"), box(AFTER, BOXES, c, state, "q"),
        wire([(READ, 166), (READ, BOXES - 23)], "output"), box(READ, BOXES, "y_t", "[1]", "output"), text(WIDE, 186, "+Dx", "shape", "end"),
    ]  # fmt: skip
    for x, name in ((FADE, Both("decay", "衰减")), (WRITE, Both("write", "写入")), (READ, Both("read", "读出"))):
        parts.append(text(x, 42, name, "axis"))
    if selective:
        every = Both(f"all {inner} channels of the token", f"token 的全部 {inner} 个通道")
        parts += [wire([(WRITE + 42, FLOOR - 16), (x, FLOOR - 16), (x, BOXES + 24)], "v", dashed=True) for x in (FADE, WRITE - 42, AFTER)]
        parts += [wire([(WRITE + 42, FLOOR - 12), (WRITE + 42, BOXES + 24)], "v", dashed=True), text(WRITE + 42, FLOOR + 6, every, "axis")]
    label = (
        Both(
            "A selective state-space model: step, input and output come from the token.",
            "选择性状态空间模型：步长、输入与输出都由 token 决定。",
        )
        if selective
        else Both("A state-space model that is the same at every token.", "对每个 token 都一样的状态空间模型。")
    )
    return drawing(WIDE, 336 if selective else 252, parts, label, "cell")


Part = tuple[str | Both, str, str]  # name, shape of the output, colour


def mamba_block() -> str:
    """Draw the Mamba layer around the selective system."""
    d, inner = sentence.DIM, inspect_mixer("mamba").shapes["h"][0]
    taps = inspect_mixer("mamba").shapes["conv"][0] + 1
    conv = Both(f"conv, {taps} wide", f"卷积，宽 {taps}")
    wide = f"[t, {inner}]"
    above: tuple[Part, ...] = (("W_x", wide, "v"), (conv, wide, "v"), ("SiLU", wide, "v"), ("S6", wide, "state"))
    label = Both(
        "A Mamba layer: a projection, a short convolution, a SiLU and the selective system; beside it a gate that multiplies the result.",
        "Mamba 层：投影、短卷积、SiLU、选择性系统；旁边是一个门，与结果逐元素相乘。",
    )
    return _block(above, (("W_z", wide, "q"), ("SiLU", wide, "q")), f"[t, {d}]", label)


def rwkv_block() -> str:
    """Draw RWKV's time mixing around the recurrence."""
    flat = f"[t, {sentence.DIM}]"
    shift, gate = Both("mixed with t − 1", "掺入上一个 token"), "g_t"
    above: tuple[Part, ...] = ((shift, flat, "v"), ("r_t k_t v_t w_t", f"4 × {flat}", "k"), (Both("recurrence", "递推"), flat, "state"))
    label = Both(
        "RWKV's time mixing: each token is mixed with the one before it; from the mixtures come receptance, key, value, decay and gate.",
        "RWKV 的 time mixing：每个 token 先与前一个掺在一起，再由它们得出 receptance、键、值、衰减和门。",
    )
    return _block(above, ((shift, flat, "v"), (gate, flat, "q"), ("SiLU", flat, "q")), flat, label)


def rwkv_channel_block() -> str:
    """Draw RWKV's channel mixing, the feed-forward of its blocks."""
    d, hidden = sentence.DIM, linattn.mixers.create("rwkv_channel", dim=sentence.DIM).k_proj.out_features
    flat, broad, shift = f"[t, {d}]", f"[t, {hidden}]", Both("mixed with t − 1", "掺入上一个 token")
    label = Both(
        "RWKV's channel mixing: each token is mixed with the one before it, widened, squared above zero and narrowed; beside it the "
        "receptance, a gate by which the result is multiplied.",
        "RWKV 的 channel mixing：每个 token 先与前一个掺在一起，投影到更宽，取正部分的平方，再投影回来；旁边的 receptance 是一个门，与结果逐元素相乘。",
    )
    above: tuple[Part, ...] = ((shift, flat, "v"), ("W_k", broad, "k"), ("ReLU²", broad, "k"), ("W_v", flat, "v"))
    return _block(above, ((shift, flat, "v"), ("W_r", flat, "q"), ("σ", flat, "q")), flat, label, "y")


def h3_block() -> str:
    """Draw the H3 layer: two state spaces between the products of linear attention."""
    d, seen = sentence.DIM, inspect_mixer("h3")
    flat, shift = f"[t, {d}]", Both("shift SSM", "移位 SSM")
    diagonal = Both("diagonal SSM", "对角 SSM")
    label = Both(
        f"An H3 layer: the keys pass a state space that shifts and keeps the last {seen.shapes['shift'][0]}; their product with the values passes a "
        "diagonal state space, which remembers; the queries multiply what leaves it.",
        f"H3 层：键先经过移位的状态空间，其中存着最近 {seen.shapes['shift'][0]} 个键；键与值之积再经过负责记忆的对角状态空间；其输出与查询相乘。",
    )
    above: tuple[Part, ...] = (("W_k", flat, "k"), (shift, flat, "k"), ("⊙ x W_v", flat, "v"), (diagonal, flat, "state"))
    return _block(above, (("W_q", flat, "q"),), flat, label)


def _block(above: Sequence[Part], below: Sequence[Part], outside: str, label: Both, output: str = "y W_o") -> str:
    """Draw two paths from x to ``output`` that meet in a product: boxes with the shapes of their outputs, for wide screens and for
    phones.
    """
    return _across(above, below, outside, label, output) + _down(above, below, outside, label, output)


def _across(above: Sequence[Part], below: Sequence[Part], outside: str, label: Both, output: str) -> str:
    """Draw the paths from left to right, one above the other."""
    top, low, start, end = 62, 178, 60, 700
    middle = (top + low) / 2
    parts = [box(start, middle, "x", outside, "v", 72)]
    for y, row in ((top, above), (low, below)):
        step = (end - start - 70) / (len(row) + 0.35)
        x = start + 36.0
        for i, (name, shape, tensor) in enumerate(row):
            at = start + 70 + step * (i + 0.5)
            parts += [wire([(x, middle), (x + 14, middle), (x + 14, y), (at - HALF, y)] if i == 0 else [(x, y), (at - HALF, y)], "v")]
            parts += [_named(at, y, name, shape, tensor)]
            x = at + HALF
        parts.append(wire([(x, y), (end, y), (end, middle - 16 if y < middle else middle + 16)], row[-1][2]))
    parts += [node(end, middle, "⊙", "output"), wire([(end + 16, middle), (BROAD - 92, middle)], "output")]
    return drawing(BROAD, 240, [*parts, box(BROAD - 50, middle, output, outside, "output", 80)], label, "cell broad")


def _down(left: Sequence[Part], right: Sequence[Part], outside: str, label: Both, output: str) -> str:
    """Draw the paths from top to bottom, side by side."""
    top, step, middle = 34, 74, TALL / 2
    end = top + step * (max(len(left), len(right)) + 1)
    parts = [box(middle, top, "x", outside, "v", 72)]
    for side, row in ((-1, left), (1, right)):
        x, y = middle + 88 * side, top
        for i, (name, shape, tensor) in enumerate(row):
            at = top + step * (i + 1)
            parts += [wire([(middle + 36 * side, top), (x, top), (x, at - 22)] if i == 0 else [(x, y), (x, at - 22)], "v")]
            parts += [_named(x, at, name, shape, tensor, 72)]
            y = at + 22
        parts.append(wire([(x, y), (x, end), (middle + 16 * side, end)], row[-1][2]))
    parts += [node(middle, end, "⊙", "output"), wire([(middle, end + 16), (middle, end + step - 23)], "output")]
    return drawing(TALL, end + step + 28, [*parts, box(middle, end + step, output, outside, "output", 80)], label, "cell tall")


def _named(x: float, y: float, name: str | Both, shape: str, tensor: str, half: float = HALF) -> str:
    """Draw a box, ``half`` to each side of ``x``, whose name may be words."""
    if isinstance(name, str):
        return box(x, y, name, shape, tensor, 2 * half)
    frame = f'<rect class="box" x="{x - half:g}" y="{y - 22:g}" width="{2 * half:g}" height="44" rx="6"/>'
    return f'<g class="t t{tensor}">{frame}{text(x, y - 2, name, "t small")}{text(x, y + 15, shape, "shape")}</g>'


def duality() -> str:
    """Draw the overlap of the two families of systems, for wide screens and for phones."""
    across = _overlap((BROAD, 182), ((165, 84), (410, 84), (655, 84)), ((20, 16, 520, 150), (280, 16, 520, 150)), "cell broad")
    return across + _overlap((TALL, 388), ((180, 76), (180, 184), (180, 298)), ((12, 12, 336, 232), (12, 140, 336, 232)), "cell tall")


def _overlap(size: tuple[int, int], places: Sequence[tuple[int, int]], frames: Sequence[tuple[int, int, int, int]], kind: str) -> str:
    """Draw two overlapping ``frames`` (x, y, width, height), and at ``places`` the content of the first, of both and of the second."""
    said = (
        (Both("state-space models", "状态空间模型"), Both("S4, Mamba: any decay", "S4、Mamba：任意的衰减"), "state"),
        (Both("SSD", "SSD"), Both("one decay per head: Mamba-2", "每个头一个衰减：Mamba-2"), "decay"),
        (Both("masked attention", "带掩码的注意力"), Both("scores times any mask", "得分乘任意掩码"), "q"),
    )
    shapes = [
        (f'x="{x}" y="{y}" width="{width}" height="{height}" rx="75"', tensor)
        for (x, y, width, height), tensor in zip(frames, ("state", "q"), strict=True)
    ]
    parts = [f'<g class="t t{tensor}"><rect class="box" {shape} fill-opacity=".55"/></g>' for shape, tensor in shapes]
    parts += [f'<g class="t{tensor}"><rect class="wire" {shape}/></g>' for shape, tensor in shapes]
    for (x, y), (name, more, tensor) in zip(places, said, strict=True):
        parts.append(f'<g class="t t{tensor}">{text(x, y, name, "t name")}</g>{text(x, y + 24, more, "axis")}')
    label = Both(
        "State-space models and masked attention overlap; what lies in both is SSD, with one decay per head.",
        "状态空间模型与带掩码的注意力有交集，同时属于两者的是 SSD：每个头一个衰减。",
    )
    return drawing(*size, parts, label, kind)


DRAWINGS: dict[int, dict[str, Callable[[], str]]] = {
    2: {"softmax": of("softmax"), "linear": of("linear")},
    4: {"rnn": rnn, "lstm": lstm, "linear": of("linear")},
    5: {"retnet": of("retnet"), "gla": of("gla")},
    6: {"s4": lambda: system(selective=False), "s6": lambda: system(selective=True), "block": mamba_block, "h3": h3_block},
    7: {"duality": duality},
    8: {"block": rwkv_block, "channel": rwkv_channel_block, "rwkv6": of("rwkv6"), "kda": of("kda"), "rwkv7": of("rwkv7")},
}
