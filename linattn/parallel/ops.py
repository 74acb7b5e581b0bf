"""Operations under context parallelism: the state before this process's tokens is computed first, then the operation runs from it.

Each function takes the layout, the single-process operation, and its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.ops import checks
from linattn.ops.linear_attention import part_of_rows
from linattn.parallel import halo
from linattn.parallel.collectives import Gathering, tie
from linattn.parallel.fold import Carried, Recurrence, added, carry, largest, transformed, whole_parts
from linattn.parallel.layout import Layout
from linattn.parallel.rows import Rows

Op = Callable[..., Any]


def linear_attention(layout: Layout, op: Op, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """:func:`linattn.linear_attention`."""
    options = {"causal": True, "normalize": False, "initial_state": None, "return_state": False, **options}
    tensors = {"q": q, "k": k, "v": v, **{name: options.get(name) for name in ("decay", "beta")}}
    tensors |= dict(zip(("read", "write"), options.get("erase") or (None, None), strict=True))
    _check(layout, options, **tensors)
    if whole_parts(layout) and (layout.cu_seqlens is None or (options["initial_state"] is None and not options["return_state"])):
        joined = layout.local[0].link > 0
        group = Gathering(layout.group, joined, joined and len(layout.local) == 1)
        packed = None if layout.cu_seqlens is None else Rows(layout, tuple(range(len(layout.local))), 1).borders(v.device)
        found = part_of_rows(group, q=q, k=k, v=v, cu_seqlens=packed, **options)
        if found is not None:
            return found
    of = _Attention(op, k, v, options)
    carried = of.carried(layout, q)
    o = of.run(layout, q, carried)
    return (o, of.pair(carried.final)) if options["return_state"] else o


class _Attention:
    """A call of linear attention, whose state has z, the sum of the keys, as its last column if normalised."""

    def __init__(self, op: Op, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
        self.op, self.k, self.v, self.options = op, k, v, options
        self.dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
        self.normalized = checks.normalizer(options["normalize"]) is not None
        self.writes = {name: options[name] for name in ("decay", "beta", "erase", "form", "backend") if options.get(name) is not None}
        self.size = k.shape[-1], v.shape[-1] + self.normalized

    def carried(self, layout: Layout, q: Tensor) -> Carried:
        initial, given = self.options["initial_state"], self.options
        full = (layout.sequences * self.v.shape[0], self.v.shape[2], self.k.shape[3], self.v.shape[3])
        if initial is not None:
            s, z = initial if self.normalized else (initial, None)
            checks.shape("initial_state", checks.tensor("initial_state", s, self.v), "[N, H, K, V]", full)
            if z is not None:
                checks.shape("initial_state[1] (z)", checks.tensor("initial_state[1] (z)", z, self.v), "[N, H, K]", full[:3])
            initial = s if z is None else torch.cat([s, z[..., None]], -1)
        inputs = (self.v, q, self.k, *(given.get(name) for name in ("decay", "beta", "bonus")), *(given.get("erase") or ()))
        final = given["return_state"] or not given["causal"]
        return carry(layout, self.recurrence, inputs, initial, final=final)

    @property
    def recurrence(self) -> Recurrence:
        heads, decay = self.v.shape[2], self.writes.get("decay")
        of = Recurrence((heads, *self.size), self.dtype, self.own)
        if "beta" in self.writes or "erase" in self.writes:
            return replace(of, link=((heads, self.size[0], self.size[0]), self.transition), join=transformed)
        if decay is None:
            return of
        per_channel = decay.ndim in (2, 4)
        return replace(of, link=((heads, self.size[0] if per_channel else 1, 1), self.factor), join=added)

    def taken(self, rows: Rows) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """k, v and the options that update the state, for the tokens of ``rows``."""
        return rows.take(self.k), rows.take(self.v), _taken(rows, self.writes)

    def own(self, rows: Rows) -> Tensor:
        k, v, writes = self.taken(rows)
        options = {"normalize": "return"} if self.normalized else {}
        _, s = self.op(k, k, v, return_state=True, cu_seqlens=rows.cu_seqlens(v.device), **writes, **options)
        return rows.by_segment(torch.cat([s[0], s[1][..., None]], -1) if self.normalized else s)

    def transition(self, rows: Rows) -> Tensor:
        k, v, writes = self.taken(rows)
        size, count = k.shape[-1], len(rows.chosen) * rows.batch
        nothing = v.new_zeros(()).expand(*v.shape[:3], size)
        start = torch.eye(size, dtype=self.dtype, device=v.device).expand(count, v.shape[2], size, size)
        _, s = self.op(k, k, nothing, initial_state=start, return_state=True, cu_seqlens=rows.cu_seqlens(v.device), **writes)
        return rows.by_segment(s)

    def factor(self, rows: Rows) -> Tensor:
        return (
            _constant_or_sum(rows, self.writes["decay"].to(self.dtype), 2).exp().view(len(rows.chosen), rows.batch, self.v.shape[2], -1, 1)
        )

    def run(self, layout: Layout, q: Tensor, carried: Carried) -> Any:
        rows = Rows(layout, tuple(range(len(layout.local))), self.v.shape[0])
        options = {name: t for name, t in self.options.items() if name not in ("initial_state", "return_state", "cu_seqlens")}
        if not self.options["causal"]:
            return self._whole(layout, q, carried, options)
        before = None if carried.before is None else self.pair(rows.states(carried.before))
        k, v, writes = self.taken(rows)
        o = self.op(rows.take(q), k, v, initial_state=before, cu_seqlens=rows.cu_seqlens(v.device), **options | writes)
        others = _unread(layout, q, self.k, self.v, self.options.get("bonus"), *self.writes.values())
        return _each(o, lambda t: tie(rows.put(t), carried.gathered, carried.final, *others))

    def _whole(self, layout: Layout, q: Tensor, carried: Carried, options: dict[str, Any]) -> Any:
        """Compute the non-causal form, in which every query reads the last state of its sequence."""
        assert carried.final is not None
        last, nothing = carried.final.unflatten(0, (layout.sequences, -1)), (self.k[:, :0], self.v[:, :0])
        parts = [self.op(q[:, s.own], *nothing, initial_state=self.pair(last[s.sequence]), **options) for s in layout.local]
        parts = parts or [self.op(q, *nothing, **options)]
        joined = [torch.cat(t, 1) for t in zip(*parts, strict=True)] if isinstance(parts[0], tuple) else torch.cat(parts, 1)
        return _each(joined, lambda t: tie(t, carried.gathered, carried.final))

    def pair(self, s: Tensor | None) -> Any:
        """Split a state into the operation's form: S, or S and z."""
        return (s[..., :-1], s[..., -1]) if self.normalized and s is not None else s


def diagonal_scan(layout: Layout, op: Op, decay: Tensor, b: Tensor, **options: Any) -> Any:
    """:func:`linattn.diagonal_scan`."""
    return _scan(layout, op, (decay, "b", b), options, lambda total: total.exp(), {"join": added})


def running_max(layout: Layout, op: Op, decay: Tensor, gate: Tensor, **options: Any) -> Any:
    """:func:`linattn.running_max`."""
    return _scan(layout, op, (decay, "gate", gate), options, lambda total: total, {"join": largest, "empty": -torch.inf})


def _scan(layout: Layout, op: Op, given: tuple[Tensor, str, Tensor], options: dict[str, Any], link: Op, how: dict[str, Any]) -> Any:
    decay, name, x = given
    _check(layout, options, **{"decay": decay, name: x})
    dtype = torch.promote_types(torch.promote_types(decay.dtype, x.dtype), torch.float32)

    def scanned(rows: Rows, initial: Tensor | None = None) -> Any:
        taken = _taken(rows, {"decay": decay})["decay"]
        return op(taken, rows.take(x), initial_state=initial, return_state=True, cu_seqlens=rows.cu_seqlens(x.device), **_backend(options))

    def factor(rows: Rows) -> Tensor:
        return link(_constant_or_sum(rows, decay.to(dtype), 1))

    of = Recurrence(tuple(x.shape[2:]), dtype, lambda rows: rows.by_segment(scanned(rows)[1]), (tuple(x.shape[2:]), factor), **how)
    return _run(layout, of, scanned, x, (decay,), options)


def selective_scan(
    layout: Layout, op: Op, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, **options: Any
) -> Any:
    """:func:`linattn.selective_scan`."""
    z, bias = options.get("z"), options.get("bias")
    _check(layout, options, x=x, dt=dt, B=B, C=C, z=z)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    step = {name: options[name] for name in ("bias", "softplus", "backend") if name in options}

    def scanned(rows: Rows, initial: Tensor | None = None) -> Any:
        tokens = [rows.take(t) for t in (x, dt, B, C)]
        gate = None if z is None else rows.take(z)
        return op(
            *tokens[:2], A, *tokens[2:], D, z=gate, initial_state=initial, return_state=True, cu_seqlens=rows.cu_seqlens(x.device), **step
        )

    def own(rows: Rows) -> Tensor:
        tokens = [rows.take(t) for t in (x, dt, B)]
        _, h = op(*tokens[:2], A, tokens[2], tokens[2], return_state=True, cu_seqlens=rows.cu_seqlens(x.device), **step)
        return rows.by_segment(h)

    def factor(rows: Rows) -> Tensor:
        steps = dt.to(dtype) if bias is None else dt.to(dtype) + bias.to(dtype)
        return (rows.totals(F.softplus(steps) if options.get("softplus") else steps)[..., None] * A.to(dtype)).exp()

    of = Recurrence(tuple(A.shape), dtype, own, (tuple(A.shape), factor))
    return _run(layout, of, scanned, x, (dt, A, B, C, D, z, bias), options)


def outer_decay(layout: Layout, op: Op, q: Tensor, k: Tensor, v: Tensor, key_decay: Tensor, value_decay: Tensor, **options: Any) -> Any:
    """:func:`linattn.ops.outer_decay.outer_decay`."""
    tensors = {"q": q, "k": k, "v": v, "key_decay": key_decay, "value_decay": value_decay}
    _check(layout, options, **tensors)
    dtype, shape = torch.float64 if v.dtype == torch.float64 else torch.float32, (v.shape[2], k.shape[3], v.shape[3])

    def scanned(rows: Rows, initial: Tensor | None = None) -> Any:
        taken, scale = (rows.take(t) for t in tensors.values()), options.get("scale")
        return op(*taken, scale=scale, initial_state=initial, return_state=True, cu_seqlens=rows.cu_seqlens(v.device))

    def factor(rows: Rows) -> Tensor:
        return (rows.totals(key_decay.to(dtype))[..., :, None] + rows.totals(value_decay.to(dtype))[..., None, :]).exp()

    of = Recurrence(shape, dtype, lambda rows: rows.by_segment(scanned(rows)[1]), (shape, factor))
    return _run(layout, of, scanned, v, (q, k, key_decay, value_decay), options)


def lti(layout: Layout, op: Op, u: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None = None, **options: Any) -> Any:
    """:func:`linattn.lti`."""
    if options.get("lengths") is not None:
        raise ValueError("lengths cannot be given under context_parallel, which splits rows: use the cu_seqlens of the layout")
    _check(layout, options, u=u)
    if u.ndim == 3:  # one signal a channel
        given = None if initial_state is None else initial_state[..., None]
        found = lti(layout, op, u[..., None], A, B, C, given, **options)
        return tuple(t[..., 0] for t in found) if isinstance(found, tuple) else found[..., 0]
    double = any(t.dtype in (torch.float64, torch.complex128) for t in (u, A))
    dtype = torch.promote_types(torch.float64 if double else torch.float32, torch.complex64 if A.is_complex() else torch.float32)
    shape = (u.shape[2], A.shape[1], u.shape[3])

    def scanned(rows: Rows, initial: Tensor | None = None) -> Any:
        return op(rows.take(u), A, B, C, initial, return_state=True, cu_seqlens=rows.cu_seqlens(u.device))

    def link(rows: Rows) -> Tensor:
        powers = [(A.to(dtype) * n).exp()[..., None] if A.ndim == 2 else torch.linalg.matrix_power(A.to(dtype), n) for n in rows.lengths]
        return torch.stack(powers)[:, None].expand(-1, rows.batch, *powers[0].shape)

    size, join = ((*A.shape, 1), added) if A.ndim == 2 else (tuple(A.shape), transformed)
    of = Recurrence(shape, dtype, lambda rows: rows.by_segment(scanned(rows)[1]), (size, link), join)
    return _run(layout, of, scanned, u, (A, B, C), {**options, "initial_state": initial_state})


def short_convolution(layout: Layout, op: Op, x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """:func:`linattn.ops.short_convolution.short_convolution`; ``before``: tokens before the whole sequences, [N B, W - 1, D]."""
    _check(layout, options, x=x)
    before = options.pop("before", None)
    longer, places, _ = halo.halo(layout, x, weight.shape[2] - 1, before, False)
    if places is not None:
        y: Tensor = op(longer, weight, bias, **options)
        return y.index_select(1, places)
    n = weight.shape[2] - 1
    y = op(longer[:, n:], weight, bias, before=longer[:, :n], **options)
    return tie(y, *_unread(layout, longer, before, weight, bias))


def _run(layout: Layout, of: Recurrence, scanned: Op, x: Tensor, others: tuple[Tensor | None, ...], options: dict[str, Any]) -> Any:
    """Run ``scanned`` on all segments of this process from the states before them."""
    initial, final = options.get("initial_state"), checks.flag("return_state", options.get("return_state", False))
    if initial is not None:
        checks.shape("initial_state", checks.tensor("initial_state", initial, x), "[N, ...]", (layout.sequences * x.shape[0], *of.shape))
        checks.dtype("initial_state", initial, of.dtype)
    carried = carry(layout, of, (x, *others), initial, final=final)
    rows = Rows(layout, tuple(range(len(layout.local))), x.shape[0])
    y, _ = scanned(rows, None if carried.before is None else rows.states(carried.before))
    y = tie(rows.put(y), carried.gathered, carried.final, *_unread(layout, x, *others))
    return (y, carried.final) if final else y


def _check(layout: Layout, options: dict[str, Any], **tensors: Tensor | None) -> None:
    """Raise ValueError for ``cu_seqlens``, and for tensors [B, T, ...] without this process's number of tokens."""
    if options.pop("cu_seqlens", None) is not None:
        raise ValueError("cu_seqlens cannot be given under context_parallel: give those of the whole sequence to Layout.of")
    for name, t in tensors.items():
        if t is None or (name == "decay" and t.ndim <= 2):
            continue
        if checks.tensor(name, t).ndim < 2 or t.shape[1] != layout.length:
            raise ValueError(
                f"{name} must have this process's {layout.length} tokens under context_parallel, but came with {list(t.shape)}"
            )
        if layout.cu_seqlens is not None and t.shape[0] != 1:
            raise ValueError(f"{name} must have one row, because the layout packs sequences, but came with {list(t.shape)}")


def _taken(rows: Rows, tensors: dict[str, Any]) -> dict[str, Any]:
    """Select the tokens of ``rows`` in ``tensors``; tensors without a token dimension are unchanged."""

    def taken(t: Any) -> Any:
        if isinstance(t, (tuple, list)):
            return tuple(map(rows.take, t))
        return rows.take(t) if isinstance(t, Tensor) and t.ndim > 2 else t

    return {name: taken(t) for name, t in tensors.items()}


def _constant_or_sum(rows: Rows, decay: Tensor, constant: int) -> Tensor:
    """Total decay of each segment, [segments, B, ...]; a decay with at most ``constant`` dimensions is the same for all tokens."""
    if decay.ndim > constant:
        return rows.totals(decay)
    lengths = torch.tensor(rows.lengths, dtype=decay.real.dtype, device=decay.device)
    total = torch.where(decay == -torch.inf, -torch.inf, decay) if not decay.is_complex() else decay
    return (lengths.view(-1, 1, *[1] * decay.ndim) * total).expand(-1, rows.batch, *decay.shape)


def _unread(layout: Layout, *tensors: Any) -> list[Tensor]:
    """Return ``tensors`` if this process has at most one token: they need zero gradients, which an operation may omit."""
    if layout.length > 1:
        return []
    flat = [t for given in tensors for t in (given if isinstance(given, tuple) else (given,))]
    return [t for t in flat if isinstance(t, Tensor)]


def _backend(options: dict[str, Any]) -> dict[str, Any]:
    return {"backend": options["backend"]} if "backend" in options else {}


def _each(o: Any, function: Op) -> Any:
    return tuple(map(function, o)) if isinstance(o, (tuple, list)) else function(o)


SHARDED: dict[str, Op] = {
    f.__name__: f for f in (linear_attention, diagonal_scan, running_max, selective_scan, outer_decay, lti, short_convolution)
}
