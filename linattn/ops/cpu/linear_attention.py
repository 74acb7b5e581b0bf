"""CPU backend of the recurrence: refusals and calls of the kernels.

One kernel processes the tokens in order, four at a time, for all causal forms and for single steps; one at a time under a rule that
erases a state of at most four keys. On machines with bfloat16
products (AMX, AVX512-BF16, ARM's BF16) the plain rule and the delta rule in bfloat16, with a decay per head or none, use chunks of
64 tokens.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from linattn.ops.cpu import library
from linattn.ops.inputs import Flat, Inputs

BLOCKS, BLOCK = 16, 4  # blocks between states saved for backward, and the tokens of one, as in linear_attention.h
TASKS = 8  # with fewer states their columns are divided, depending on shapes only, for reproducibility
SLAB = 32  # minimum of columns of a task
PLAIN, BONUS, DELTA, ERASE = range(4)  # numbered as in linear_attention.h
Shape = tuple[int, ...]


def refusal(inputs: Inputs, form: str) -> str | None:
    """Reason why the kernels do not run ``inputs``, or None if they do."""
    if inputs.v.dtype == torch.float64:
        return "it computes in float32, and the inputs are float64"
    return inputs.kernel_refusal(form) or library.refusal(*inputs.differentiable, inputs.cu_seqlens)


class _Call:
    """The arguments of one call in the memory layout that the kernels take, and their sizes."""

    _struct = struct.Struct("14q d 35q 4q 5q 4q 5q 3q 25q 5q")  # Call of linear_attention.h

    def __init__(self, given: Flat):
        q, k, v, decay, beta, read, write, bonus, initial, initial_z, cu, scale, normalized = given
        per_channel = decay is not None and decay.ndim in (2, 4)
        self.rank = 0 if decay is None else 1 + per_channel
        self.constant = decay is not None and decay.ndim <= 2
        self.rule = ERASE if read is not None else DELTA if beta is not None else PLAIN if bonus is None else BONUS
        self.scale, self.normalized = scale, normalized
        *in_rows, read, write = map(_in_rows, (q, k, v, read, write))
        self.timed = (*in_rows, _in_rows(decay) if per_channel else _resolved(decay), _resolved(beta), read, write)
        self.others = (library.plain(bonus), *map(_dense, (initial, initial_z)), library.ends(cu))
        self.tokens, self.keys = v.shape[:3], k.shape[3]  # [B, T, H]
        self.batch, self.length, self.heads, self.values = v.shape
        self.group = self.heads // k.shape[2]
        self.sequences = self.batch if cu is None else cu.shape[0] - 1
        shares, states = -(-(self.values + int(normalized)) // SLAB), self.sequences * self.heads
        self.parts = 1 if states >= TASKS else min(shares, -(-TASKS // states))
        # One task sums the gradients of q and k over the heads of a group if enough tasks remain.
        self.together = self.group > 1 and self.parts == 1 and self.sequences * k.shape[2] >= TASKS
        self.state = (self.sequences, self.heads, self.keys, self.values)

    @property
    def kept(self) -> Shape:
        """Shape of the states before every chunk, with keys and columns padded to whole vectors of the widest instruction set.

        A packed sequence has at most one incomplete chunk.
        """
        chunk = BLOCKS * (1 if self.keys <= BLOCK and self.rule in (DELTA, ERASE) else BLOCK)
        slots = self.batch * -(-self.length // chunk) if self.others[-1] is None else self.length // chunk + self.sequences
        return (slots, self.heads, _up(self.values + int(self.normalized)), _up(self.keys))

    def packed(self, outputs: tuple[int, ...], gradients: tuple[int, ...] = (0,) * 38) -> bytes:
        """Pack the call with the outputs of a pass, and the inputs and outputs of the backward pass."""
        sizes = (*self.tokens, self.group, self.keys, self.values, self.parts, self.sequences, 0, self.constant, self.together)
        arguments = (*_strided(*self.timed), *_addresses(*self.others))
        return self._struct.pack(self.rank, self.rule, self.normalized, *sizes, self.scale, *arguments, *outputs, *gradients)

    def run(self, name: str, outputs: tuple[int, ...], gradients: tuple[int, ...] = (0,) * 38) -> None:
        """Call the kernel ``name``; arguments as in :meth:`packed`."""
        packed = self.packed(outputs, gradients)
        buffer = ctypes.create_string_buffer(packed, len(packed))
        library.call(name, ctypes.addressof(buffer), numbers=self.batch * self.length * self.heads * self.values)


def _up(n: int) -> int:
    return -(-n // 16) * 16


def _resolved(x: Tensor | None) -> Tensor | None:
    """Return ``x`` with resolved signs: the imaginary part of a conjugate is a negative view of another tensor."""
    return None if x is None else x.resolve_neg()


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.resolve_neg().contiguous()


def _in_rows(x: Tensor | None) -> Tensor | None:
    """Return ``x`` with a dense last dimension."""
    x = _resolved(x)
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _addresses(*tensors: Tensor | None) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def _strided(*tensors: Tensor | None) -> list[int]:
    """Address, dtype and strides over rows, tokens and heads of each tensor.

    A constant, [H] or [H, K], has strides of 0 over rows and tokens; None gives zeros.
    """
    numbers: list[int] = []
    for t in tensors:
        if t is None:
            numbers += (0, 0, 0, 0, 0)
        else:
            numbers += (t.data_ptr(), library.DTYPES[t.dtype], *((0, 0, t.stride(0)) if t.ndim <= 2 else t.stride()[:3]))
    return numbers


def forward(*arguments: Any, cleared: bool = False) -> tuple[Any, ...]:
    """Output [B, T, H, V], final state [N, H, K, V], denominator [B, T, H] and final z [N, H, K], and the saved states, or None.

    The arguments are those of ``linattn::cpu_linear_attention``; ``cleared``: fill unused slots of saved states with zeros.
    """
    *own, keeps = arguments
    call = _Call(Flat(*own))
    o, final, denominator, final_z, kept = _outputs(call, own[2].dtype, keeps, library.empty)
    if cleared and kept is not None:
        kept.zero_()
    call.run("linear_attention", (*_strided(o), *_addresses(denominator, final, final_z, kept)))
    return o, final, denominator, final_z, kept


def bound_step(*arguments: Any) -> tuple[Tensor, Tensor | None, library.Bound]:
    """Bind a step to its tensors: returns output and denominator, still empty, and a function that computes them when called.

    The arguments are those of :func:`forward` without ``keeps``, contiguous, with initial states, which the final ones overwrite.
    """
    call, (state, z) = _Call(Flat(*arguments)), arguments[8:10]
    o, _, denominator, _, _ = _outputs(call, arguments[2].dtype, False, library.empty)
    packed = call.packed((*_strided(o), *_addresses(denominator, state, z, None)))
    buffer = ctypes.create_string_buffer(packed, len(packed))
    return o, denominator, library.Bound("linear_attention", buffer, (call, arguments, o, denominator))


def _outputs(call: _Call, dtype: torch.dtype, keeps: bool, empty: Callable[..., Tensor]) -> tuple[Any, ...]:
    o = empty((*call.tokens, call.values), torch.float32 if call.normalized else dtype)
    denominator, final_z = (empty(call.tokens), empty(call.state[:3])) if call.normalized else (None, None)
    return o, empty(call.state), denominator, final_z, empty(call.kept) if keeps else None


def backward(do: Tensor, dfinal: Tensor | None, ddenominator: Tensor | None, dfinal_z: Tensor | None, *arguments: Any) -> tuple[Any, ...]:
    """Gradients of q, k, v, decay (None unless ``of_decay``), beta, read, write, bonus, initial state and initial z.

    After the gradients of the outputs come the arguments of :func:`forward`, with the saved states and ``of_decay`` in place of ``keeps``.
    """
    *own, kept, of_decay = arguments
    call = _Call(Flat(*own))
    if call.normalized and ddenominator is None:
        ddenominator = torch.zeros(call.tokens)
    rows, others = _in_rows(do), [_dense(t) for t in (ddenominator, dfinal, dfinal_z)]
    timed, rest = _gradients(call, own, of_decay)
    dq, dk, dv, ddecay, dbeta, dread, dwrite = timed
    per_key = (None if g is None else g[0] for g in (dread, dwrite))
    call.run(
        "linear_attention_backward", (0, 0, 0, 0, 0, *_addresses(None, None, None, kept)),
        (*_strided(rows), *_addresses(*others), *_strided(dq[0], dk[0], dv, *per_key), *_addresses(ddecay, dbeta, *rest)),
    )  # fmt: skip
    dq, dk = (g.unflatten(3, (-1, call.group)).sum(4) if call.group > 1 and not call.together else g for g in (dq, dk))
    timed = (dq, dk, dv[None], ddecay, dbeta, dread, dwrite)
    whole = (None if g is None else _whole(g, t) for g, t in zip(timed, own[:7], strict=True))
    dbonus, dinitial, dinitial_z = rest
    return *whole, None if dbonus is None else dbonus.sum((0, 2)).to(own[7].dtype), dinitial, dinitial_z


def _whole(parts: Tensor, of: Tensor) -> Tensor:
    """Sum ``parts`` [P, B, T, ...], over tokens too for a constant, in the dtype of the argument ``of``."""
    g = parts[0] if parts.shape[0] == 1 else parts.sum(0)
    return (g.sum((0, 1)) if of.ndim <= 2 else g).to(of.dtype)


def _gradients(call: _Call, own: Sequence, of_decay: bool) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Allocate the gradients: with a part for each group of columns, except those of values and initial states."""
    v, _, beta, read, write, bonus, initial, initial_z = own[2:10]
    tokens, alone = (call.parts, *call.tokens), call.parts == 1
    channels = (*tokens, call.keys)
    added = alone and (call.group == 1 or call.together)  # the kernel sums to the final gradients of q and k
    of_keys = (*tokens[:3], call.heads // call.group, call.keys) if call.together else channels
    dq, dk = (library.empty(of_keys, v.dtype if added else torch.float32) for _ in "qk")
    ddecay = library.empty(channels if call.rank == 2 else tokens) if of_decay else None
    dbeta = None if beta is None else library.empty(tokens)
    dread, dwrite = (None if t is None else library.empty(channels, t.dtype if alone else torch.float32) for t in (read, write))
    dbonus = None if bonus is None else library.empty((call.sequences, call.heads, call.parts, call.keys))
    states = (None if t is None else library.empty(t.shape) for t in (initial, initial_z))
    return (dq, dk, library.empty(v.shape, v.dtype), ddecay, dbeta, dread, dwrite), (dbonus, *states)


def forward_whole(*arguments: Any) -> tuple[Any, ...]:
    """Run :func:`forward` deterministically: unused slots of packed sequences are zeros."""
    return forward(*arguments, cleared=arguments[10] is not None)


def outputs(*arguments: Any) -> tuple[Any, ...]:
    """The results of :func:`forward` without memory."""
    *own, keeps = arguments
    return _outputs(_Call(Flat(*own)), own[2].dtype, keeps, library.like(own[2]))


def gradients(*arguments: Any) -> tuple[Tensor | None, ...]:
    """Shapes of the gradients that :func:`backward` returns."""
    *tensors, of_decay = (*arguments[4:14], arguments[-1])
    tensors[3] = tensors[3] if of_decay else None
    return tuple(None if t is None else t.new_empty(t.shape) for t in tensors)
