"""Calls of the recurrence as data: random, stable arguments of every kind and rank, run in any form, sliced, packed and rounded.

B batch, T time, H heads of v, Hk heads of q and k, K key size, V value size, N states.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial, wraps

import torch
from torch import Tensor

import linattn

KINDS = ("plain", "beta", "erase", "bonus", "normalize")
RANKS = ("none", "H", "HK", "BTH", "BTHK")
FORMS = ("parallel", "chunk", "recurrent")
OVER_TIME = ("q", "k", "v", "beta", "read", "write")  # and decay, if it has a time dimension
ROWS = ("S", "z")  # one row a sequence


@dataclass(frozen=True)
class Call:
    """One call: its tensors by name (q, k, v, decay, beta, read, write, bonus, S, z) and the other options.

    Calling it returns the results by name: o, with ``normalize="return"`` also denominator, and S (and z) if asked for.
    """

    tensors: dict[str, Tensor]
    options: dict = field(default_factory=dict)

    def __call__(self, form: str = "auto", backend: str = "torch") -> dict[str, Tensor]:
        return results(linattn.linear_attention(**self.arguments(), form=form, backend=backend), self.options)

    def arguments(self) -> dict:
        return arguments(self.tensors, self.options)

    @property
    def timed(self) -> list[str]:
        """The names of the arguments that have a time dimension."""
        decay = ["decay"] if "decay" in self.tensors and self.tensors["decay"].ndim > 2 else []
        return [n for n in self.tensors if n in OVER_TIME] + decay

    def with_(self, **changes: Tensor) -> Call:
        return replace(self, tensors={**self.tensors, **changes})

    def without(self, *names: str) -> Call:
        return replace(self, tensors={n: t for n, t in self.tensors.items() if n not in names})

    def set(self, **options: object) -> Call:
        return replace(self, options={**self.options, **options})

    def tokens(self, start: int, stop: int) -> Call:
        """The same call on the tokens ``start`` to ``stop``."""
        return replace(self, tensors={n: t[:, start:stop] if n in self.timed else t for n, t in self.tensors.items()})

    def rows(self, rows: slice) -> Call:
        """The same call on some rows of the batch."""
        batched = (*self.timed, *ROWS)
        return replace(self, tensors={n: t[rows] if n in batched else t for n, t in self.tensors.items()})

    def sequence(self, n: int) -> Call:
        """The n-th of the packed sequences, on its own."""
        ends = self.options["cu_seqlens"].tolist()
        one = self.tokens(ends[n], ends[n + 1])
        own = {name: t[n : n + 1] if name in ROWS else t for name, t in one.tensors.items()}
        return Call(own, {name: x for name, x in self.options.items() if name != "cu_seqlens"})

    def to(self, dtype: torch.dtype, decay: torch.dtype | None = None) -> Call:
        """Round to ``dtype``, except states and, by default, decay."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        dtypes = {"S": wide, "z": wide, "decay": decay or wide}
        return replace(self, tensors={n: t.to(dtypes.get(n, dtype)) for n, t in self.tensors.items()})

    def double(self) -> Call:
        return self.to(torch.float64)


def arguments(tensors: dict[str, Tensor], options: dict) -> dict:
    """The keywords of the op."""
    t, out = dict(tensors), dict(options)
    if "read" in t:
        out["erase"] = (t.pop("read"), t.pop("write"))
    if "S" in t:
        s, z = t.pop("S"), t.pop("z", None)
        out["initial_state"] = s if z is None else (s, z)
    return {**out, **t}


def results(out: object, options: dict) -> dict[str, Tensor]:
    """Results of the op by name."""
    named = {}
    if options.get("return_state"):
        out, state = out
        named = dict(zip(("S", "z"), state, strict=True)) if isinstance(state, tuple) else {"S": state}
    if isinstance(out, tuple):
        return {"o": out[0], "denominator": out[1], **named}
    return {"o": out, **named}


def remembered(function: Callable) -> Callable:
    """Cache ``function(call, ...)`` by the call's numbers: every form and dtype is compared with the same reference."""
    kept: OrderedDict[tuple, object] = OrderedDict()

    @wraps(function)
    def asked(call: Call, *args: object, **how: object) -> object:
        options = tuple((n, x.tolist() if isinstance(x, Tensor) else x) for n, x in call.options.items())
        key = (fingerprint(call.tensors), repr((options, args, sorted(how.items()))))
        if key not in kept:
            kept[key] = function(call, *args, **how)
        kept.move_to_end(key)
        while len(kept) > 16:
            kept.popitem(last=False)
        return kept[key]

    return asked


def fingerprint(tensors: dict[str, Tensor]) -> bytes:
    """A hash of names, devices, dtypes, shapes and numbers."""
    digest = hashlib.blake2b(repr([(n, t.device, t.dtype, t.shape) for n, t in tensors.items()]).encode())
    for t in tensors.values():
        digest.update(t.detach().cpu().resolve_neg().contiguous().view(torch.uint8).numpy() if t.numel() else b"")
    return digest.digest()


@remembered
def reference(call: Call) -> dict[str, Tensor]:
    """The float64 reference on the same rounded inputs."""
    return call.double()(backend="reference")


def gradients(call: Call, outputs: Iterable[str] | None = None, seed: int = 0, **how: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The results, and the gradient of a fixed random sum of them by the name of the argument."""
    if how == {"backend": "reference"}:
        return _reference_gradients(call, outputs if outputs is None else tuple(outputs), seed)
    return _gradients(call, outputs, seed, **how)


@remembered
def _reference_gradients(call: Call, outputs: tuple[str, ...] | None, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return _gradients(call, outputs, seed, backend="reference")


def _gradients(call: Call, outputs: Iterable[str] | None, seed: int, **how: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    leaves = {n: t.detach().clone().requires_grad_() for n, t in call.tensors.items()}
    out = call.with_(**leaves)(**how)
    chosen = [n for n in out if outputs is None or n in outputs]
    weights = [cotangent(out[n], seed) for n in chosen]
    with_graph = [(out[n], w) for n, w in zip(chosen, weights, strict=True) if out[n].requires_grad]
    grads = torch.autograd.grad(
        [o for o, _ in with_graph], list(leaves.values()), [w for _, w in with_graph], allow_unused=True, materialize_grads=True
    )
    return {n: o.detach() for n, o in out.items()}, dict(zip(leaves, grads, strict=True))


def cotangent(like: Tensor, seed: int = 0) -> Tensor:
    """Numbers equal for every dtype (representable in bfloat16), so that only the op differs."""
    generator = torch.Generator().manual_seed(seed + like.ndim)
    return torch.randn(like.shape, generator=generator).bfloat16().to(like)


def make(
    kind: str, rank: str, *, B: int = 2, T: int = 9, H: int = 2, Hk: int | None = None, K: int = 4, V: int = 3,
    lengths: tuple[int, ...] | None = None, initial: bool = True, strength: float | tuple[float, float] = (0.02, 0.6), seed: int = 0,
) -> Call:  # fmt: skip
    """A stable float64 call that returns its state. ``strength``: decays lie between minus these; ``lengths`` packs."""
    random = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=random, dtype=torch.float64)
    uniform = partial(torch.rand, generator=random, dtype=torch.float64)
    options: dict = {"return_state": True}
    if lengths is not None:
        B, T = 1, sum(lengths)
        options["cu_seqlens"] = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
    Hk, N = Hk or H, len(lengths) if lengths is not None else B
    t = {"q": normal(B, T, Hk, K), "k": normal(B, T, Hk, K), "v": normal(B, T, H, V)}
    if rank != "none":
        t["decay"] = decays({"H": (H,), "HK": (H, K), "BTH": (B, T, H), "BTHK": (B, T, H, K)}[rank], strength, uniform)
    t |= _extra(kind, t, normal, uniform)
    if kind == "normalize":
        options["normalize"] = True
    if initial:
        t["S"] = normal(N, H, K, V)
        if kind == "normalize":
            t["z"] = uniform(N, H, K) + 0.1
    return Call(t, options)


def decays(shape: tuple[int, ...], strength: float | tuple[float, float], uniform: partial) -> Tensor:
    """Log-uniform between the two strengths."""
    weak, strong = strength if isinstance(strength, tuple) else (strength, strength)
    weak, strong = torch.tensor([weak, strong], dtype=torch.float64).log()
    return -(weak + (strong - weak) * uniform(shape)).exp()


def _extra(kind: str, t: dict[str, Tensor], normal: partial, uniform: partial) -> dict[str, Tensor]:
    (B, T, H, _), K = t["v"].shape, t["k"].shape[3]
    if kind == "beta":  # β‖k‖² < 2, also after rounding to bfloat16
        return {"k": unit(t["k"]), "beta": uniform(B, T, H) * 1.9}
    if kind == "erase":  # read and write nearly opposite and at most of unit length, for a stable transition
        direction = unit(normal(B, T, H, K))
        return {"read": direction, "write": -uniform(B, T, H, 1) * unit(direction + 0.1 * normal(B, T, H, K))}
    if kind == "bonus":
        return {"bonus": normal(H, K)}
    if kind == "normalize":  # a denominator away from 0
        return {"q": t["q"].abs() + 0.1, "k": t["k"].abs() + 0.1}
    return {}


def turned(t: Tensor) -> Tensor:
    """``t`` as a negative view: negated in memory, with the negative bit set."""
    view = torch.complex(torch.zeros_like(t), -t).conj().imag
    assert view.is_neg()
    return view


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def packed(a: dict[str, Tensor], parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the results of separate calls as those of one packed call ``a``."""
    return {n: torch.cat([p[n] for p in parts], 0 if n in ROWS else 1) for n in a}


def disturbed(call: Call, before: Tensor) -> Call:
    """Copy with equal tokens after the resets; before them all are different and much larger, or more strongly decayed."""
    changed = {}
    for n in call.timed:
        t = call.tensors[n]
        other = t.roll(1, 1) * {"v": 1e4, "decay": 90.0}.get(n, 1.0)
        changed[n] = torch.where(before if t.ndim == 3 else before[..., None], other.nan_to_num(neginf=-3.0), t)
    return call.with_(**changed, **{n: call.tensors[n] * -1e4 for n in ("S", "z") if n in call.tensors})


def same_elsewhere(grads: dict[str, Tensor], clean: dict[str, Tensor], call: Call, tokens: Iterable[int], rows: list[int]) -> None:
    """Assert that gradients equal ``clean`` ones at ``tokens``, those of initial states in ``rows``."""
    tokens = torch.tensor(list(tokens))
    for name in grads:
        if name in call.timed:
            assert torch.equal(grads[name][:, tokens], clean[name][:, tokens]), name
        elif name in ("S", "z"):
            assert torch.equal(grads[name][rows], clean[name][rows]), name
