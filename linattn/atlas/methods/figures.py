"""Data of the pages on computation: feature maps, the delta rule in parallel, chunked forms, and a context cut over cards."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import linattn
from linattn.atlas import lab, sentence
from linattn.atlas.story.chapters import RULES, chunked
from linattn.atlas.story.sheets import WORDS, causal, control, distance, matrix, number, sheet, sheets
from linattn.atlas.text import Both
from linattn.mixers.parts import HeadNorm
from linattn.ops.features import elu1, orthogonal_gaussian, taylor2
from linattn.report.words import memory

NAMES = (sentence.SENTENCE, sentence.SENTENCE, 20)
SHARP = 2.0  # length of queries and keys, large enough for a sharp softmax
RANDOM = 64  # random features of Performer
CHUNK = 4  # tokens of a chunk
GAMMA = 0.9


def _words() -> Tensor:
    """Running sentence as vectors [12, 8] of length :data:`SHARP`."""
    return SHARP * torch.tensor([lab.vector(word) for word in WORDS], dtype=torch.float64)


def relu(x: Tensor) -> Tensor:
    """Features ReLU(x)."""
    return x.relu()


def cosine(x: Tensor) -> Tensor:
    """Features of cosFormer: ReLU(x), weighed by a cosine of the distance, [12, d] -> [12, 2 d]."""
    angle = math.pi / 2 * torch.arange(1, len(x) + 1, dtype=x.dtype)[:, None] / len(x)
    return torch.cat([x.relu() * angle.sin(), x.relu() * angle.cos()], -1)


def random(x: Tensor) -> Tensor:
    """Positive random features of Performer, whose products are exp(q·k) on average."""
    w = orthogonal_gaussian(RANDOM, x.shape[-1], generator=torch.Generator().manual_seed(0)).to(x.dtype)
    return (x @ w.T - x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(RANDOM)


FEATURES: dict[str, tuple[Both, Callable[[Tensor], Tensor]]] = {
    "elu": (Both("elu(x) + 1", "elu(x) + 1"), elu1),
    "relu": (Both("ReLU(x)", "ReLU(x)"), relu),
    "cosine": (Both("ReLU(x), cosine of the distance", "ReLU(x)，乘距离的余弦"), cosine),
    "taylor": (Both("1 + x + x²/2 (Taylor)", "1 + x + x²/2（泰勒）"), taylor2),
    "random": (Both(f"{RANDOM} random features", f"{RANDOM} 个随机特征"), random),
}


def _divided(scores: Tensor) -> Tensor:
    """Rows of ``scores`` [T, T] divided by their sums up to the diagonal."""
    low = scores.tril()
    return low / low.sum(-1, keepdim=True).clamp_min(1e-12)


def kernels() -> dict[str, object]:
    """Weights of each feature map beside those of softmax, with their distance from them."""
    x = _words()
    exact = _divided((x @ x.T).exp())
    products = [phi(x) @ phi(x).T for _, phi in FEATURES.values()]
    weights = [_divided(p) for p in products]
    sums = [p.tril().sum(-1) for p in products]
    return sheets(
        control("phi", Both("φ", "φ"), [name for name, _ in FEATURES.values()]),
        [
            sheet("softmax", Both("softmax: exp(q·k), divided", "softmax：exp(q·k)，归一化"), [causal(exact)], *NAMES),
            sheet("kernel", Both("φ(q)·φ(k), divided", "φ(q)·φ(k)，归一化"), [causal(w) for w in weights], *NAMES),
            sheet("raw", Both("φ(q)·φ(k), its largest set to 1", "φ(q)·φ(k)，以最大者为 1"), [causal(p / p.tril().max()) for p in products], *NAMES),
        ],
        [
            number("error", Both("relative distance to softmax's weights", "与 softmax 权重的相对差距"), [distance(w, exact) for w in weights]),
            number("features", Both("features of a key: rows of the state", "键的特征数，即状态的行数"), [phi(x).shape[-1] for _, phi in FEATURES.values()]),
            number("least", Both("smallest normaliser φ(q)·z", "最小的归一化项 φ(q)·z"), [s.min().item() for s in sums]),
            number("most", Both("largest", "最大"), [s.max().item() for s in sums]),
            number("norm", Both("outputs after an RMS norm: distance with and without the division", "经 RMS norm 之后：除与不除的输出之差"), [_unnoticed(p) for p in products]),
        ],
    )  # fmt: skip


def _unnoticed(products: Tensor) -> float:
    """Distance of RMS-normed outputs with and without division by the normaliser."""
    norm = HeadNorm(lab.SIZE, eps=0.0).double()
    with torch.no_grad():
        whole, divided = (norm((w @ _words())[None, :, None]) for w in (products.tril(), _divided(products)))
    return distance(whole[:, 1:], divided[:, 1:])  # with ReLU the first token may have no weight


def triangular() -> dict[str, object]:
    """The delta rule chunk by chunk: the triangular system, its solution, and the state passed on."""
    made = lab.inputs(WORDS, RULES["delta"])
    q, k, v = (made[name][0, :, 0] for name in ("q", "k", "v"))
    beta = made["beta"][0, :, 0][:, None] if made["beta"].ndim == 3 else made["beta"]
    whole = lab.run(made)
    state = torch.zeros(lab.SIZE, lab.SIZE, dtype=torch.float64)
    systems, solved, states, apart, residual = [], [], [], [], []
    one = torch.eye(CHUNK, dtype=torch.float64)
    for start in range(0, 12, CHUNK):
        part = slice(start, start + CHUNK)
        system = one + (beta[part] * (k[part] @ k[part].T)).tril(-1)
        right = beta[part] * (v[part] - k[part] @ state)
        u = torch.linalg.solve_triangular(system, right, upper=False)  # effective write of each token
        scale = made.get("scale") or 1.0
        o = scale * (q[part] @ state + (q[part] @ k[part].T).tril() @ u)
        state = state + k[part].T @ u
        systems.append(system.masked_fill(torch.ones_like(system, dtype=torch.bool).triu(1), torch.nan))
        solved.append(u)
        states.append(state)
        apart.append(max(distance(o, whole.outputs[part]), distance(state, whole.states[start + CHUNK - 1])))
        residual.append(((system @ u - right).norm() / right.norm()).item())
    shows = [Both(f"tokens {s + 1} to {s + CHUNK}", f"第 {s + 1} 到 {s + CHUNK} 个 token") for s in range(0, 12, CHUNK)]
    return sheets(
        control("chunk", Both("chunk", "块"), shows, 1),
        [
            sheet("system", Both("I + tril(Diag(β) K Kᵀ, −1) [4, 4]", "I + tril(Diag(β) K Kᵀ, −1) [4, 4]"), systems, cell=26),
            sheet("solution", Both("solution U: what is written [4, 8]", "解 U：写入的值 [4, 8]"), solved, cell=26),
            sheet("state", Both("state after the chunk [8, 8]", "块末的状态 [8, 8]"), states),
        ],
        [
            number("residual", Both("residual of the system", "方程组的残差"), residual),
            number("apart", Both("distance to the rule, token by token", "与逐 token 计算之差"), apart),
        ],
    )


def forms() -> dict[str, object]:
    """Parallel, chunked and recurrent forms of RetNet and of GLA: scores, decay, their product, and its split into chunks."""
    kinds = {"constant": Both("RetNet", "RetNet"), "channel": Both("GLA", "GLA")}
    scores, decays, products, inside, between, apart, chunk_apart = [], [], [], [], [], [], []
    block = torch.arange(12)[:, None] // CHUNK == torch.arange(12) // CHUNK
    for key in kinds:
        made = lab.inputs(WORDS, RULES[key], GAMMA)
        plain = matrix({**made, "decay": None})
        square = matrix(made)
        one = torch.ones(1, 12, 1, 1, dtype=torch.float64)
        log = made["decay"][..., :1] if key == "channel" else made["decay"]
        scores.append(causal(plain))
        decays.append(causal(matrix({"q": one, "k": one, "decay": log, "scale": 1.0})))
        products.append(causal(square))
        inside.append(causal(square).masked_fill(~block, torch.nan))
        between.append(causal(square).masked_fill(block, torch.nan))
        exact = linattn.linear_attention(**made, form="recurrent")
        apart.append(distance(linattn.linear_attention(**made, form="parallel"), exact))
        chunk_apart.append(distance(chunked(made, CHUNK), exact))
    return sheets(
        control("system", Both("system", "方法"), list(kinds.values())),
        [
            sheet("scores", Both("Q Kᵀ", "Q Kᵀ"), scores, *NAMES),
            sheet("decay", Both("decay (GLA: of one channel)", "衰减（GLA：一个通道）"), decays, *NAMES),
            sheet("product", Both("parallel: the whole triangle", "并行：整个三角"), products, *NAMES),
            sheet("inside", Both("chunked: inside chunks of 4", "分块：块内（每块 4 个）"), inside, *NAMES),
            sheet("between", Both("chunked: through the state", "分块：经由状态"), between, *NAMES),
        ],
        [
            number("parallel", Both("parallel form: distance to the recurrence", "并行形式与递推之差"), apart),
            number("chunk", Both("chunked form: distance to the recurrence", "分块形式与递推之差"), chunk_apart),
        ],
    )


CARDS = (1, 2, 3, 4, 6)
CONTEXT, WIDTH = 1 << 20, 4096  # tokens, and width of the layer, of the figures in bytes


def cards() -> dict[str, object]:
    """One sentence over several cards: each starts from zero, then the decayed incoming state is added."""
    made = lab.inputs(WORDS, RULES["head"], GAMMA)
    whole = lab.run(made)
    own, came, final, apart = [], [], [], []
    for count in CARDS:
        length = 12 // count
        state = torch.zeros_like(whole.states[0])
        outputs = []
        for start in range(0, 12, length):
            part = {k: x[:, start : start + length] if isinstance(x, Tensor) and x.ndim > 2 else x for k, x in made.items()}
            alone = lab.run(part)
            fade = part["decay"][0, :, 0].cumsum(0).exp()[:, None]
            q = part["q"][0, :, 0]
            outputs.append(alone.outputs + (part.get("scale") or 1.0) * fade * (q @ state))
            arrived, state = state, alone.states[-1] + fade[-1] * state
        own.append(alone.states[-1])
        came.append(arrived)
        final.append(state)
        apart.append(max(distance(torch.cat(outputs), whole.outputs), distance(state, whole.states[-1])))
    cost = linattn.cost("mamba2", dim=WIDTH, tokens=CONTEXT, dtype=torch.bfloat16)
    handed = [Both(memory(cost.state_bytes or 0), memory(cost.state_bytes or 0)) if n > 1 else Both("nothing", "无") for n in CARDS]
    rows = [cost.softmax_cache_bytes * (n - 1) // n for n in CARDS]
    return sheets(
        control("cards", Both("cards", "卡数"), [str(n) for n in CARDS], 2),
        [
            sheet("own", Both("last card alone, from zero", "末卡单独从零算起"), own),
            sheet("came", Both("state that it receives", "传给它的状态"), came),
            sheet("final", Both("the two together: the whole state", "两者合起来：完整的状态"), final),
        ],
        [
            number("apart", Both("distance to one card", "与单卡计算之差"), apart),
            number("handed", Both("sent by each card: one layer's state", "每卡传出：一层的状态"), handed),
            number("rows", Both("softmax: keys and values from other cards", "softmax：来自其他卡的键与值"), [Both(memory(r), memory(r)) for r in rows]),
        ],
    )  # fmt: skip


FIGURES: dict[str, dict[str, Callable[[], dict[str, object]]]] = {
    "kernels": {"kernels": kernels},
    "delta": {"triangular": triangular},
    "chunks": {"forms": forms},
    "hybrids": {},
    "cards": {"cards": cards},
}
