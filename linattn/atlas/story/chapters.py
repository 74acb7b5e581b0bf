"""Data of the eight chapters: figures and the numbers in the prose, all computed here by the library's ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import linattn
from linattn.atlas import lab, sentence
from linattn.atlas.story.sheets import WORDS, causal, control, distance, matrix, memory, number, said, sheet, sheets
from linattn.atlas.text import Both
from linattn.report.words import memory as amount

RULES = {rule.key: rule for rule in lab.RULES}
WIDTH = 64  # width of queries and keys for counts
LENGTHS = tuple(2**n for n in range(4, 18))
TOKENS = [Both(f"{t} {word.en}", f"{t} {word.zh}") for t, word in enumerate(sentence.SENTENCE, 1)]
DECAYS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)
SUBJECT = 11  # the last "loves", whose successor has changed


def orders() -> dict[str, object]:
    """Chapter 1: both orders of the product at every length, multiply-adds counted by running them on tensors without storage."""
    stops = []
    for length in LENGTHS:
        q, k, v = (torch.empty(length, WIDTH, device="meta") for _ in range(3))
        stops.append(
            {
                "length": length,
                "left": _count(lambda q, k, v: (q @ k.T) @ v, q, k, v),
                "right": _count(lambda q, k, v: q @ (k.T @ v), q, k, v),
            }
        )
    made = lab.inputs(WORDS, RULES["none"])
    q, k, v = (made[name][0, :, 0] for name in ("q", "k", "v"))
    whole = linattn.linear_attention(**made, causal=False)[0, :, 0]
    apart = distance((q @ k.T) @ v, whole)
    curved = distance(torch.softmax(q @ k.T, -1) @ v, torch.softmax(q, -1) @ (torch.softmax(k.T, -1) @ v))
    return {"width": WIDTH, "start": 8, "stops": stops, "last": stops[-1], "apart": apart, "softmax": curved}


def _count(product: Callable[[Tensor, Tensor, Tensor], Tensor], *tensors: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        product(*tensors)
    return counter.get_total_flops() // 2


def decoding() -> dict[str, object]:
    """Chapter 2: the cache after every token beside the state after every token."""
    made = lab.inputs(WORDS, RULES["none"])
    found = lab.run(made)
    keys, values = made["k"][0, :, 0], made["v"][0, :, 0]
    caches = [[_first(x, t) for t in range(1, 13)] for x in (keys, values)]
    written_out = matrix(made) @ values
    steps = range(1, 13)
    return sheets(
        control("token", Both("token t", "第 t 个 token"), TOKENS, 5),
        [
            sheet("k", Both("cache: K [t, 8]", "缓存：K [t, 8]"), caches[0], sentence.SENTENCE),
            sheet("v", Both("cache: V [t, 8]", "缓存：V [t, 8]"), caches[1], sentence.SENTENCE),
            sheet("state", Both("state: S [8, 8]", "状态：S [8, 8]"), list(found.states)),
        ],
        [
            number("cache", Both("numbers in the cache", "缓存里的数"), [2 * t * lab.SIZE for t in steps]),
            number("kept", Both("numbers in the state", "状态里的数"), [found.states[0].numel() for _ in steps]),
            number(
                "apart",
                Both("distance between the two outputs", "两种输出之差"),
                [distance(found.outputs[:t], written_out[:t]) if t > 1 else 0.0 for t in steps],
            ),
        ],
    )


def _first(x: Tensor, rows: int) -> Tensor:
    return torch.where(torch.arange(len(x))[:, None] < rows, x, torch.nan)


def lengths() -> dict[str, object]:
    """Chapter 2: cost sheets of one layer at every length."""
    stops = [2**n for n in range(8, 21, 2)]
    costs = [(linattn.cost("softmax", dim=512, heads=4, tokens=n), linattn.cost("linear", dim=512, heads=4, tokens=n)) for n in stops]
    return sheets(
        control("length", Both("tokens so far", "已有 token 数"), [f"{n:,}" for n in stops], 3),
        [],
        [
            number("cache", Both("softmax keeps", "softmax 要保留"), [_amount(a.state_bytes) for a, _ in costs]),
            number("state", Both("linear attention keeps", "线性注意力要保留"), [_amount(b.state_bytes) for _, b in costs]),
            number("softmax", Both("FLOPs of softmax’s next token", "softmax 下一个 token 的 FLOPs"), [a.step_flops for a, _ in costs]),
            number(
                "linear",
                Both("FLOPs of linear attention’s next token", "线性注意力下一个 token 的 FLOPs"),
                [b.step_flops for _, b in costs],
            ),
        ],
    )


def heads() -> dict[str, object]:
    """Chapter 2: the same width in more heads is less state."""
    stops = (1, 2, 4, 8, 16, 32)
    costs = [linattn.cost("linear", dim=512, heads=h, tokens=4096) for h in stops]
    shapes = [f"{h} × [{512 // h}, {512 // h}]" for h in stops]
    return sheets(
        control("heads", Both("number of heads", "头数"), [str(h) for h in stops], 2),
        [],
        [
            number("shape", Both("state", "状态"), [Both(s, s) for s in shapes]),
            number("state", Both("it takes", "占用"), [_amount(c.state_bytes) for c in costs]),
            number("step", Both("FLOPs of a token", "每个 token 的 FLOPs"), [c.step_flops for c in costs]),
        ],
    )


def _amount(size: int | None) -> Both:
    text = amount(size or 0)
    return Both(text, text)


def pot() -> dict[str, object]:
    """Chapter 3: the sum of everything."""
    made = memory([(Both("sum", "求和"), lab.inputs(WORDS, RULES["none"]))], start=SUBJECT)
    return {**made, "tea": said(made, 0, SUBJECT, "tea"), "milk": said(made, 0, SUBJECT, "milk")}


def sharpness() -> dict[str, object]:
    """Chapter 3: longer queries. Softmax concentrates on the best matches; weights of a sum keep their proportions."""
    stops = (1, 2, 4, 8, 16, 32)
    made = lab.inputs(WORDS, RULES["none"])
    plain = matrix(made)
    soft = [torch.softmax(c * plain.masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -torch.inf), -1) for c in stops]
    sums = [plain / plain[SUBJECT - 1].abs().sum() for _ in stops]
    hits = [2, 6]  # what followed "loves" before: tea, milk
    return sheets(
        control("length", Both("queries scaled by", "查询放大"), [f"× {c}" for c in stops]),
        [
            sheet("softmax", Both("softmax’s weights [12, 12]", "softmax 的权重 [12, 12]"), [causal(s) for s in soft], sentence.SENTENCE, sentence.SENTENCE, 20),
            sheet("sum", Both("the sum’s, in proportion [12, 12]", "求和的权重（按比例）[12, 12]"), [causal(s) for s in sums], sentence.SENTENCE, sentence.SENTENCE, 20),
        ],
        [
            number("soft", Both("softmax at token 11: on tea and milk", "softmax 第 11 个 token：落在茶与奶上"), [s[SUBJECT - 1, hits].abs().sum().item() for s in soft]),
            number("share", Both("the sum: on tea and milk", "求和：落在茶与奶上"), [s[SUBJECT - 1, hits].abs().sum().item() for s in sums]),
        ],
    )  # fmt: skip


BIASES = (-2.0, 0.0, 2.0, 4.0)


def reach() -> dict[str, object]:
    """Chapter 4: how strongly each output depends on each earlier token, by the derivatives of untrained cells."""
    plain = _dependence("rnn", None)
    gated = [_dependence("lstm", bias) for bias in BIASES]
    names = (sentence.SENTENCE, sentence.SENTENCE, 20)
    return sheets(
        control("bias", Both("bias of LSTM’s forget gate", "LSTM 遗忘门的偏置"), [f"{b:+.0f}" for b in BIASES], 1),
        [
            sheet("rnn", Both("RNN: ‖∂yₜ / ∂xⱼ‖ [12, 12]", "RNN：‖∂yₜ / ∂xⱼ‖ [12, 12]"), [causal(plain)], *names),
            sheet("lstm", Both("LSTM: the same [12, 12]", "LSTM：同上 [12, 12]"), [causal(g) for g in gated], *names),
        ],
        [
            number("gate", Both("the cell keeps, per token, about", "单元每步大约保留"), [1 / (1 + math.exp(-b)) for b in BIASES]),
            number("rnn", Both("RNN: first token’s share at the last", "RNN：末位处首个 token 的比重"), [_share(plain) for _ in BIASES]),
            number("lstm", Both("LSTM: first token’s share at the last", "LSTM：末位处首个 token 的比重"), [_share(g) for g in gated]),
        ],
    )


def _share(found: Tensor) -> float:
    return (found[-1, 0] / found[-1, -1]).item()


def _dependence(name: str, forget: float | None) -> Tensor:
    """Norm of the derivative of output i by input j [T, T]: all outputs and channels in one batch and one backward pass."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sentence.SEED)
        mixer = linattn.mixers.create(name, dim=sentence.DIM).double()
    if forget is not None:
        gate = slice(sentence.DIM, 2 * sentence.DIM)
        with torch.no_grad():
            mixer.get_parameter("bias_ih_l0")[gate], mixer.get_parameter("bias_hh_l0")[gate] = forget, 0.0
    x = sentence.embedded()
    length, dim = x.shape[1:]
    x = x.expand(length * dim, -1, -1).clone().requires_grad_()
    y = mixer(x).reshape(length, dim, length, dim)
    picked = torch.einsum("icic->", y)
    (grad,) = torch.autograd.grad(picked, x)
    return grad.reshape(length, dim, length, dim).pow(2).sum((1, 3)).sqrt()


def retention() -> dict[str, object]:
    """Chapter 5: the same sentence at several constant decays."""
    variants = [(f"{d:g}", lab.inputs(WORDS, RULES["constant"], d)) for d in DECAYS]
    made = memory(variants, ("decay", Both("decay γ", "衰减 γ")), SUBJECT, 2)
    return {
        **made,
        "tea": [said(made, i, SUBJECT, "tea") for i in range(len(DECAYS))],
        "milk": [said(made, i, SUBJECT, "milk") for i in range(len(DECAYS))],
    }


def gates() -> dict[str, object]:
    """Chapter 5: decay of token j at token i: a power, a data-dependent product per head, and one per channel."""
    one = torch.ones(1, 12, 1, 1, dtype=torch.float64)
    kinds: dict[str, list[Tensor]] = {"constant": [], "head": [], "channel": []}
    for d in DECAYS:
        for key, maps in kinds.items():
            log = lab.inputs(WORDS, RULES[key], d)["decay"]
            log = log[..., -1:] if key == "channel" else log
            maps.append(causal(matrix({"q": one, "k": one, "decay": log, "scale": 1.0})))
    titles = {
        "constant": Both("RetNet: γ [12, 12]", "RetNet：γ [12, 12]"),
        "head": Both("Mamba-2: αₜ [12, 12]", "Mamba-2：αₜ [12, 12]"),
        "channel": Both("GLA: one channel [12, 12]", "GLA：一个通道 [12, 12]"),
    }
    return sheets(
        control("decay", Both("decay", "衰减"), [f"{d:g}" for d in DECAYS], 2),
        [sheet(key, titles[key], kinds[key], sentence.SENTENCE, sentence.SENTENCE, 17) for key in kinds],
        [number(key, Both(f"“tea” that remains at token 11: {en}", f"到第 11 个 token 时“茶”还剩：{zh}"), [m[SUBJECT - 1, 2].item() for m in kinds[key]])
         for key, en, zh in (("constant", "constant", "固定"), ("head", "per head", "逐头"), ("channel", "per channel", "逐通道"))],
    )  # fmt: skip


STEPS = (0.03, 0.1, 0.3, 1.0)


def springs() -> dict[str, object]:
    """Chapter 6: response of each of eight modes to a single impulse at the first token, for several time steps."""
    rates = -torch.arange(1, 9, dtype=torch.float64)
    push = torch.zeros(1, 12, 8, dtype=torch.float64)
    push[:, 0] = 1
    one = torch.ones(1, 12, 1, dtype=torch.float64)
    found = [linattn.selective_scan(push, torch.full_like(push, step), rates[:, None], one, one)[0].T for step in STEPS]
    scaled = [f / f[:, :1] for f in found]
    return sheets(
        control("step", Both("time step Δ", "步长 Δ"), [f"{s:g}" for s in STEPS], 1),
        [sheet("modes", Both("what is left of one push: modes × tokens [8, 12]", "一次推动还剩多少：模态 × token [8, 12]"), scaled,
               [f"a = −{n}" for n in range(1, 9)], sentence.SENTENCE)],
        [number("slow", Both("slowest mode, eleven tokens later", "最慢的模态，十一个 token 之后"), [s[0, -1].item() for s in scaled]),
         number("fast", Both("fastest mode, one token later", "最快的模态，一个 token 之后"), [s[-1, 1].item() for s in scaled])],
    )  # fmt: skip


ORDERS = {"told": tuple(range(12)), "swapped": (4, 5, 6, 3, 0, 1, 2, 7, 8, 9, 10, 11), "backwards": tuple(reversed(range(12)))}


def selection() -> dict[str, object]:
    """Chapter 6: the matrices of a time-invariant and of a selective system while the words change."""
    told = (Both("as told", "原句"), Both("the two facts swapped", "两件事对调"), Both("backwards", "倒着读"))
    found = {name: [_mixed(name, order) for order in ORDERS.values()] for name in ("s4d", "mamba")}
    changes = {name: [distance(m, ms[0]) for m in ms] for name, ms in found.items()}
    places = [str(t) for t in range(1, 13)]
    return sheets(
        control("words", Both("the words", "词序"), told),
        [
            sheet(
                "s4d",
                Both("S4D, first channel [12, 12]", "S4D，第一个通道 [12, 12]"),
                [causal(m) for m in found["s4d"]],
                places,
                places,
                20,
            ),
            sheet(
                "mamba",
                Both("Mamba, first channel [12, 12]", "Mamba，第一个通道 [12, 12]"),
                [causal(m) for m in found["mamba"]],
                places,
                places,
                20,
            ),
        ],
        [
            number(name, Both(f"change of {title}’s matrix", f"{title} 矩阵的变化"), changes[name])
            for name, title in (("s4d", "S4D"), ("mamba", "Mamba"))
        ],
    )


def _mixed(name: str, order: tuple[int, ...]) -> Tensor:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(sentence.SEED)
        mixer = linattn.mixers.create(name, dim=sentence.DIM).double().eval()
        return linattn.mixing_matrix(mixer, sentence.embedded()[:, list(order)])[0, 0]


CHUNKS = (1, 2, 3, 4, 6, 12)
NARROW = 2  # channels of keys, so that a block of six tokens is of low rank


def chunks() -> dict[str, object]:
    """Chapter 7: one masked square cut into chunks, computed quadratically inside and through the state between them."""
    made = _narrow()
    square = matrix(made)
    same = torch.arange(12)
    inside = [same[:, None] // c == same // c for c in CHUNKS]
    outside = [~i for i in inside]
    blocks = [_between(square, c) for c in CHUNKS]
    whole = linattn.linear_attention(**made, form="recurrent")
    d, v = NARROW, lab.SIZE
    work = [12 * c * (d + v) + 2 * 12 * d * v * (c < 12) for c in CHUNKS]
    names = (sentence.SENTENCE, sentence.SENTENCE, 20)
    return sheets(
        control("chunk", Both("chunk size C", "块大小 C"), [str(c) for c in CHUNKS], 3),
        [
            sheet("inside", Both("as a square, inside chunks", "块内：按方阵计算"), [causal(square).masked_fill(~i, torch.nan) for i in inside], *names),
            sheet("between", Both("through the state, between chunks", "块间：经由状态"), [_hidden(causal(square), o) for o in outside], *names),
        ],
        [
            number("states", Both("states passed on", "传递状态的次数"), [12 // c - 1 for c in CHUNKS]),
            number("work", Both("multiply-adds", "乘加次数"), work),
            number("rank", Both("largest rank of a block between chunks", "块间子矩阵的最大秩"), [max((int(torch.linalg.matrix_rank(b)) for b in bs), default=0) for bs in blocks]),
            number("apart", Both("distance to the recurrence", "与递推结果之差"), [distance(chunked(made, c), whole) for c in CHUNKS]),
        ],
    )  # fmt: skip


def _hidden(square: Tensor, shown: Tensor) -> Tensor:
    return square.masked_fill(~shown, torch.nan)


def _narrow() -> dict[str, Any]:
    """Running sentence with keys and queries of :data:`NARROW` channels and a decay per head."""
    made = lab.inputs(WORDS, RULES["head"])
    short = torch.tensor([lab.numbers(word, NARROW) for word in WORDS], dtype=torch.float64)[None, :, None]
    return {**made, "q": short, "k": torch.cat([short[:, :1], short[:, :-1]], 1)}


def _between(square: Tensor, c: int) -> list[Tensor]:
    """Blocks of all rows below and all columns before each border of chunks."""
    return [square[start:, :start] for start in range(c, 12, c)]


def chunked(made: dict[str, Any], c: int) -> Tensor:
    """Compute chunks of ``c`` tokens, each as a square, with the state passed on."""
    outputs, state = [], None
    for start in range(0, 12, c):
        part: dict[str, Any] = {k: x[:, start : start + c] if isinstance(x, Tensor) and x.ndim > 2 else x for k, x in made.items()}
        o, state = linattn.linear_attention(**part, form="parallel", initial_state=state, return_state=True)
        outputs.append(o)
    return torch.cat(outputs, 1)


BONUSES = (0.0, 0.5, 1.0, 2.0)


def bonus() -> dict[str, object]:
    """Chapter 8: RWKV's separate weight for the current token, before it enters the state."""
    made = lab.inputs(WORDS, RULES["channel"])
    now = made["q"]
    squares = [causal(matrix({**made, "k": now, "bonus": torch.full((1, lab.SIZE), u, dtype=torch.float64)})) for u in BONUSES]
    return sheets(
        control("bonus", Both("bonus u", "bonus u"), [f"{u:g}" for u in BONUSES], 2),
        [sheet("matrix", Both("RWKV-6’s form on our sentence [12, 12]", "RWKV-6 的形式用在这句话上 [12, 12]"), squares, sentence.SENTENCE, sentence.SENTENCE)],
        [number("own", Both("weight of the last token on itself", "末位 token 对自己的权重"), [s[-1, -1].item() for s in squares]),
         number("before", Both("of the one before it", "对前一个 token 的权重"), [s[-1, -2].item() for s in squares])],
    )  # fmt: skip


AFTER = ("none", "constant", "head", "channel", "delta", "gated_delta", "kda", "rwkv7")


def after() -> dict[str, object]:
    """Chapter 8: all rules at the last "loves"."""
    made = memory(
        [(RULES[key].name, lab.inputs(WORDS, RULES[key])) for key in AFTER], ("rule", Both("rule", "规则")), SUBJECT, AFTER.index("delta")
    )
    heard = {key: {word: said(made, i, SUBJECT, word) for word in ("tea", "milk")} for i, key in enumerate(AFTER)}
    return {**made, "heard": heard}


BETAS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)


def strength() -> dict[str, object]:
    """Chapter 8: the delta rule at several β."""
    return memory(
        [(f"{b:g}", lab.inputs(WORDS, RULES["delta"], beta=b)) for b in BETAS], ("beta", Both("strength β", "强度 β")), SUBJECT, 4
    )


FIGURES: dict[int, dict[str, Callable[[], dict[str, object]]]] = {
    1: {"orders": orders},
    2: {"decoding": decoding, "lengths": lengths, "heads": heads},
    3: {"pot": pot, "sharpness": sharpness},
    4: {"reach": reach},
    5: {"retention": retention, "gates": gates},
    6: {"springs": springs, "selection": selection},
    7: {"chunks": chunks},
    8: {"bonus": bonus, "after": after, "strength": strength},
}
