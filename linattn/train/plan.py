"""Estimate of a training on many cards, without any card: memory and traffic of each card, and the time of a step."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from linattn.mixers import Mixer, Recurrence, cost
from linattn.models import LMConfig
from linattn.models.block import Block
from linattn.models.loss import chunk_of
from linattn.parallel import heads
from linattn.train.plan_options import DEVICES, PlanOptions
from linattn.train.setup import check_sharing, model_config
from linattn.train.speed import token_flops

FLOAT = 4
_SHORT, _LONG = 128, 256  # tokens from which the growth of activations is extrapolated linearly


@dataclass(frozen=True)
class Parts:
    """Numbers of values on one card of tensor parallelism.

    Args:
        whole: all parameters, without parallelism.
        own: its parameters.
        largest: those of its largest block.
        held: this card's, after sharding.
        kept: those of ``held`` that are replicated, since they stay float32.
        matrices: those of ``held`` that Muon orthogonalises.
    """

    whole: int
    own: int
    largest: int
    held: int
    kept: int
    matrices: int


@dataclass(frozen=True)
class Plan:
    """A plan; memory in bytes of one card, traffic in bytes that it sends in a step, times in seconds of a step.

    Args:
        parameters: of the whole model.
        cards: their number.
        tokens: of a step, on all cards.
        memory: weights, gradients, optimizer, gathered (whole weights and gradients of the blocks at work, or their copies in bfloat16),
            activations, logits and states (the recurrent ones of the sequences of a pass, as in decoding).
        traffic: of fsdp (or dp), cp and tp.
        seconds: compute, fsdp (or dp), cp, tp, and the whole step, in which sharding hides behind computation.
        capacity: bytes that a card has.
    """

    parameters: int
    cards: int
    tokens: int
    memory: dict[str, int]
    traffic: dict[str, int]
    seconds: dict[str, float]
    capacity: int

    @property
    def total(self) -> int:
        """Bytes of a card, without the states of decoding."""
        return sum(n for name, n in self.memory.items() if name != "states")

    def json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "total": self.total, "tokens_per_second": self.tokens / self.seconds["step"]}


def plan(options: PlanOptions) -> Plan:
    """Plan a training, on tensors without storage.

    Parameters, optimizer and states are exact. Activations are the tensors that one block of each kind saves for its backward pass in
    the portable form; GPU kernels save fewer. Time is operations over the share ``mfu`` of the device's peak, and bytes over the links.

    Raises:
        ValueError: for a model that cannot be made, heads or sequences that cannot be shared, and parts of a sequence without tokens.
    """
    if options.context < options.cp:
        raise ValueError(f"context must have a token for each of cp = {options.cp} cards, but came as {options.context}")
    made = model_config(options, options.vocab_size)
    config = LMConfig(**{**_fields(made), "tie_embeddings": options.tie_embeddings})
    check_sharing(config, options.cp, options.tp)
    blocks = list(_blocks(config, options.tp))
    parts = _parts(config, blocks, options)
    memory = _memory(config, blocks, parts, options)
    traffic = _traffic(config, blocks, parts, options)
    tokens = options.dp * options.batch_size * options.context * options.accumulate
    peak, capacity = DEVICES[options.device]
    work = tokens * token_flops(config, options.context) * (4 / 3 if options.checkpoint_activations else 1)
    compute = work / options.cards / (peak * options.mfu * (1 if options.dtype == "bf16" else 0.5))
    seconds = _seconds(traffic, compute, options, len(config.mixer_names))
    return Plan(parts.whole, options.cards, tokens, memory, traffic, seconds, int(capacity))


@dataclass(frozen=True)
class Made:
    """Blocks of equal options: their number, one of them whole, and one card's part of it."""

    count: int
    whole: Block
    own: Block
    layer: int


def _fields(config: LMConfig) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(LMConfig)}


def _blocks(config: LMConfig, tp: int) -> Iterator[Made]:
    """Yield one block for each combination of mixer, feed-forward and options in the model."""
    makes = [
        (name, ffn, repr(config.options_of(i))) for i, (name, ffn) in enumerate(zip(config.mixer_names, config.ffn_names, strict=True))
    ]
    for make, count in Counter(makes).items():
        layer = makes.index(make)
        with torch.device("meta"):
            yield Made(count, Block(config, layer), _part(Block(config, layer), config, layer, tp), layer)


def _part(block: Block, config: LMConfig, layer: int, tp: int) -> Block:
    """One card's part of ``block``."""
    for slot, options in (("mixer", config.options_of(layer)), ("ffn", config.ffn_options_of(layer))):
        whole = getattr(block, slot)
        if tp == 1 or whole is None:
            continue
        own, cuts = heads.part(whole, options, tp)
        heads.fill(own, dict(heads.tensors(whole)), cuts, 0, tp)
        setattr(block, slot, own)
    return block


def _parts(config: LMConfig, blocks: list[Made], options: PlanOptions) -> Parts:
    ends = (2 - config.tie_embeddings) * [config.vocab_size * config.dim]
    norm = sum(p.numel() for p in _norms(config))
    own = [_count(made.own) for made in blocks]
    kept = sum(made.count * sum(p.numel() for p in _kept(made.own)) for made in blocks)
    cut = sum(made.count * sum(_shard(p, options.shards) for p in _cut(made.own)) for made in blocks)
    ends_held = len(ends) * -(-config.vocab_size // options.shards) * config.dim
    matrices = sum(made.count * sum(_shard(m.weight, options.shards) for m in _linear(made.own)) for made in blocks)
    whole = sum(made.count * _count(made.whole) for made in blocks) + sum(ends) + norm
    mine = sum(made.count * n for made, n in zip(blocks, own, strict=True)) + sum(ends) + norm
    held = cut + kept + ends_held + sum(_shard(p, options.shards) for p in _norms(config))
    return Parts(whole, mine, max(own), held, kept, matrices)


def _norms(config: LMConfig) -> list[nn.Parameter]:
    """Parameters of the norms around the blocks."""
    from linattn.models.block import norm

    with torch.device("meta"):
        count = int(config.block != "post") + int(bool(config.embedding_norm))
        return [p for _ in range(count) for p in norm(config).parameters()]


def _kept(block: Block) -> list[nn.Parameter]:
    """Parameters that stay float32, and whole."""
    return [p for m in block.modules() if isinstance(m, Mixer) for n in m.keep_float32 if (p := getattr(m, n)) is not None]


def _cut(block: Block) -> list[nn.Parameter]:
    kept = set(_kept(block))
    return [p for p in block.parameters() if p not in kept]


def _linear(block: Block) -> list[nn.Linear]:
    return [m for m in block.modules() if isinstance(m, nn.Linear)]


def _shard(p: Tensor, shards: int) -> int:
    """Number of values in a parameter's largest shard; ``fully_shard`` divides rows."""
    return -(-p.shape[0] // shards) * math.prod(p.shape[1:]) if p.ndim else 1


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _memory(config: LMConfig, blocks: list[Made], parts: Parts, options: PlanOptions) -> dict[str, int]:
    tokens = options.batch_size * -(-options.context // options.cp)
    low = 2 if options.dtype == "bf16" else FLOAT
    ends = (2 - config.tie_embeddings) * config.vocab_size * config.dim
    sharded = options.shards > 1 or options.fsdp
    gathered = (low + FLOAT) * (2 * parts.largest + ends) if sharded else (low if low < FLOAT else 0) * parts.own
    activations = [_activations(made.own, config, tokens, options) for made in blocks]
    if options.checkpoint_activations:
        kept = config.layers * low * tokens * config.dim + max(activations)
    else:
        kept = sum(made.count * n for made, n in zip(blocks, activations, strict=True))
    moments = 2 * parts.held - (parts.matrices if options.optimizer == "muon" else 0)
    chunk = min(tokens, chunk_of(tokens, config.vocab_size))
    return {
        "weights": FLOAT * parts.held,
        "gradients": FLOAT * parts.held,
        "optimizer": FLOAT * moments,
        "gathered": gathered,
        "activations": kept,
        "logits": 2 * FLOAT * chunk * config.vocab_size,
        "states": sum(made.count * _states(config, made, options) for made in blocks),
    }


def _states(config: LMConfig, made: Made, options: PlanOptions) -> int:
    """Bytes of the states of one layer for the sequences of a pass, on one card."""
    name, dtype = config.mixer_names[made.layer], torch.bfloat16 if options.dtype == "bf16" else torch.float32
    known = cost(name, dim=config.dim, tokens=options.context, batch=options.batch_size, dtype=dtype, **config.options_of(made.layer))
    positions = 8 * options.batch_size
    return ((known.state_bytes or 0) - positions) // options.tp + positions


def _activations(block: Block, config: LMConfig, tokens: int, options: PlanOptions) -> int:
    """Bytes that a block saves for its backward pass of ``tokens`` tokens."""
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    short, long = (saved_bytes(block, config.dim, n, dtype) for n in (_SHORT, _LONG))
    return max(0, round(short + (long - short) * (tokens - _SHORT) / (_LONG - _SHORT)))


def saved_bytes(block: nn.Module, dim: int, tokens: int, dtype: torch.dtype) -> int:
    """Bytes that ``block`` saves for the backward pass of one sequence, without its parameters."""
    seen: dict[int, int] = {}
    block = copy.deepcopy(block).to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        block = block.to_empty(device="cpu")
        own = {p.untyped_storage()._cdata for p in block.parameters()}

        def keep(t: Tensor) -> Tensor:
            seen[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
            held.append(t)
            return t

        held: list[Tensor] = []
        x = torch.empty(1, tokens, dim, dtype=dtype, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            block(x)
    return sum(n for key, n in seen.items() if key not in own)


def _link_bytes(config: LMConfig, made: Made) -> int:
    """Bytes of the transition of one layer's state over a part of one sequence: a matrix or decays per head; 0 without decay."""
    mixer = copy.deepcopy(made.own.mixer).to(torch.float32)
    if type(mixer).mix is not Mixer.mix:
        return 0
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        x = torch.empty(1, 8, config.dim)
        r: Recurrence = mixer.to_empty(device="cpu").recurrence(x, mixer.begin(*mixer.arguments(x)))
    size, count = r.k.shape[3], r.v.shape[2]
    if r.beta is not None or r.erase is not None:
        return FLOAT * count * size * size
    return 0 if r.decay is None else FLOAT * count * (size if r.decay.ndim in (2, 4) else 1)


def _exchanged(config: LMConfig, made: Made, options: PlanOptions) -> int:
    """Bytes that one card sends for one layer in one all-gather of context parallelism."""
    if not made.own.mixer.info.recurrent:  # keys and values of its tokens
        return _states(config, made, replace(options, batch_size=options.batch_size)) // options.cp
    one = replace(options, batch_size=1, dtype="fp32")
    return options.batch_size * (_states(config, made, one) + _link_bytes(config, made))


def _traffic(config: LMConfig, blocks: list[Made], parts: Parts, options: PlanOptions) -> dict[str, int]:
    low, passes = 2 if options.dtype == "bf16" else FLOAT, options.accumulate
    others = options.dp * options.cp
    share = (others - 1) / others
    forward = 2 if options.checkpoint_activations else 1
    if options.shards > 1:
        between = passes * share * (parts.own - parts.kept) * (2 * low + FLOAT) + 2 * passes * share * FLOAT * parts.kept
    else:
        between = 2 * share * FLOAT * parts.own
    exchanged = sum(made.count * _exchanged(config, made, options) for made in blocks) if options.cp > 1 else 0
    tokens = options.batch_size * -(-options.context // options.cp)
    sums = sum(made.count * (1 + (made.own.ffn is not None)) for made in blocks) * (forward + 1)
    return {
        "fsdp" if options.shards > 1 else "dp": round(between),
        "cp": passes * (forward + 1) * (options.cp - 1) * exchanged,
        "tp": round(passes * sums * low * tokens * config.dim * 2 * (options.tp - 1) / options.tp),
    }


def _seconds(traffic: dict[str, int], compute: float, options: PlanOptions, layers: int) -> dict[str, float]:
    """Times of a step: the traffic of sharding and gradients overlaps with computation, the rest does not."""

    def sent(nbytes: int, span: int, collectives: int) -> float:
        speed = options.link if span <= options.node else options.network
        return nbytes / (1e9 * speed) + (collectives * options.latency * 1e-6 if nbytes else 0.0)

    forward = 2 if options.checkpoint_activations else 1
    (between, nbytes), *_ = traffic.items()
    passes, inner = options.accumulate, options.cp * options.tp
    found = {
        between: sent(nbytes, options.cards, 3 * passes * (layers + 1) if between == "fsdp" else 1),
        "cp": sent(traffic["cp"], inner, passes * layers * (forward + 1)),
        "tp": sent(traffic["tp"], options.tp, 2 * passes * layers * (forward + 1)),
    }
    return {"compute": compute, **found, "step": max(compute, found[between]) + found["cp"] + found["tp"]}
