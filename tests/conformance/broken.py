"""A correct mixer and defective ones: each class below has one defect that occurs in papers' code or could.

``FAILS`` lists the checks that must catch it: the first is made for the defect, the others see its consequences.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn.mixers import CallContext, Mixer, Recurrence
from linattn.mixers.decay.gla import GLA
from linattn.mixers.parts import HeadNorm, ShortConvolution, to_float32
from linattn.mixers.registry import info

FAILS: dict[type[Mixer], tuple[str, ...]] = {}


def fails(*checks: str):
    """Declare the checks that a class must fail, and give it an unregistered entry."""

    def note(cls: type[Mixer]) -> type[Mixer]:
        FAILS[cls] = checks
        cls.info = replace(cls.info, name=cls.__name__.lower(), cls=cls)
        return cls

    return note


class Sound(Mixer):
    """A correct mixer."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__(dim)
        self.heads = heads
        self.conv = ShortConvolution(dim, name="conv")
        self.qkv_proj = nn.Linear(dim, 3 * dim, bias=False)
        self.decay_proj = nn.Linear(dim, heads)
        self.norm = HeadNorm(dim // heads)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, k, v = self.qkv_proj(self.conv(x, call)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return Recurrence(q, k, v, decay=F.logsigmoid(to_float32(self.decay_proj(x))))

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(self.norm(o).flatten(-2))


Sound.info = replace(info("gla"), name="sound", title="Sound", cls=Sound)


@fails("causality", "resume", "packed", "rows")
class PeeksAhead(Sound):
    """Each token also writes the next one."""

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        return super().project(x + F.pad(x[:, 1:], (0, 0, 0, 1)), call)


@fails("past")
class SeesOnlyTheWindow(Sound):
    """Only the short convolution has memory."""

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        super().attend(r, call)
        return r.v


@fails("rows", "packed", "padding")
class LeaksRows(Sound):
    """Normalised with statistics of the batch."""

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return super().read(o - o.mean(0, keepdim=True) / 10, x)


@fails("rows")
class LeaksNaN(Sound):
    """Packed sequences are separated by a multiplicative mask: 0 · NaN."""

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        r = super().project(x, call)
        return replace(r, v=r.v + 0.0 * r.v.sum((0, 1)))


@fails("resume")
class ForgetsState(Sound):
    """Every call starts anew."""

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        empty = CallContext(r.v, None, lengths=call.lengths, cu_seqlens=call.cu_seqlens, returning=True)
        o = super().attend(r, empty)
        call.keep("S", empty.new["S"])
        return o


@fails("resume")
class ForgetsTheConvolution(Sound):
    """A prefill passes on S, but the short convolution starts with zeros."""

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        r = super().project(x, call)
        if call.returning:
            call.keep("conv", torch.zeros_like(call.new["conv"]))
        return r


@fails("resume")
class CutsTheGradient(Sound):
    """The state is detached."""

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        o = super().attend(r, call)
        call.new = {name: t.detach() for name, t in call.new.items()}
        return o


@fails("untouched")
class WritesIntoTheState(Sound):
    """The step updates the state it was given, in place."""

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        o = super().attend(r, call)
        if not call.fresh and not torch.is_grad_enabled():
            call.get("S").mul_(0.5)
        return o


@fails("state_bytes")
class GrowingState(Sound):
    """Claims to be recurrent but keeps every token."""

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        seen = r.v.new_zeros(call.rows, r.v.shape[1]) if call.fresh else F.pad(call.get("seen"), (0, r.v.shape[1]))
        call.keep("seen", seen)
        return super().attend(r, call)


@fails("growth")
class CountsEveryPair(Sound):
    """Claims linear cost, contrary to its cost sheet."""

    def attend_flops(self, r: Recurrence, past: int) -> int:
        return r.v.numel() * (past + r.v.shape[1])


@fails("state_bytes")
class KeepsAView(Sound):
    """The state is a small window of a large tensor."""

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        o = super().attend(r, call)
        if call.returning:
            call.keep("S", torch.cat([call.new["S"]] * 2, 1)[:, : self.heads])
        return o


@fails("packed", "rows")
class ConvolvesAcrossSequences(Sound):
    """cu_seqlens reaches the recurrence but not the short convolution."""

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        r = super().project(x, call)
        if call.cu_seqlens is None:
            return r
        one = ShortConvolution.forward(self.conv, x, CallContext(x))
        q, k, v = self.qkv_proj(one).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return replace(r, q=q, k=k, v=v)


@fails("padding")
class PaddingFades(Sound):
    """Padding does not write, but decays the state."""

    def recurrence(self, x: Tensor, call: CallContext) -> Recurrence:
        r = super().recurrence(x, call)
        return replace(r, decay=torch.where(r.decay == 0, -0.5, r.decay))


@fails("padding")
class CountsPadding(Sound):
    """The position counts padding."""

    def forward(self, x, state=None, *, return_state=False, mask=None, cu_seqlens=None):
        y = super().forward(x, state, return_state=return_state, mask=mask, cu_seqlens=cu_seqlens)
        if return_state and mask is not None:
            y[1]["position"] = (0 if state is None else state["position"]) + torch.full((x.shape[0],), x.shape[1])
        return y


@fails("shape")
class WrongDtype(Sound):
    """The norm's float32 is the output's dtype."""

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return to_float32(super().read(o, x))


@fails("shape", "empty", "resume", "packed", "padding")
class RefusesNoTokens(Sound):
    """The last token is indexed, which fails without tokens."""

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        assert x[:, -1].ndim == 2
        return super().read(o, x)


@fails("widths")
class WantsPowersOfTwo(Sound):
    """Heads have 64 channels or the width, whichever is smaller."""

    def __init__(self, dim: int) -> None:
        size = min(dim, 64)
        super().__init__(dim, heads=dim // size)
        assert self.heads * size == dim, "not divisible"


@fails("options")
class SwallowsOptions(Sound):
    """A misspelt option is ignored."""

    def __init__(self, dim: int, **options: object) -> None:
        super().__init__(dim)


@fails("seed")
class DrawsItsWeights(Sound):
    """Weights ignore torch's seed."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        nn.init.normal_(self.o_proj.weight, generator=torch.Generator().manual_seed(secrets.randbits(32)))


@fails("seed", "causality", "rows", "checkpoint", "untouched", "resume", "packed", "padding", "saved", "mixing_matrix", "empty")
class Noisy(Sound):
    """Every call adds noise."""

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return super().read(o, x) * (1 + 1e-6 * torch.rand(()))


@fails("finite", "padding")
class DividesByTheSpread(Sound):
    """Tokens are divided by their standard deviation, which is 0 for equal channels."""

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        return super().project(F.layer_norm(x, x.shape[-1:], eps=0.0), call)


@fails("finite")
class Overflows(Sound):
    """Keys are exponentials without a maximum."""

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        r = super().project(x, call)
        return replace(r, k=r.k.exp())


@fails("mixing_matrix")
class NotLinear(Sound):
    """Claims to be linear in its values."""

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        return super().attend(r, call).sigmoid()


@fails("compile", "compile_layouts")
class BreaksTheGraph(Sound):
    """Holds a lock, as a lazily computed table may."""

    lock = threading.RLock()

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        with self.lock:
            return super().project(x, call)


@fails("distinct")
class AnotherName(GLA):
    """Registered a second time."""


@fails("golden")
class Renamed(GLA):
    """A parameter has a new name, so saved weights no longer load."""

    __module__ = "linattn.mixers.elsewhere"

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self._modules["out_proj"] = self._modules.pop("o_proj")

    @property
    def o_proj(self) -> nn.Module:
        return self.out_proj


Renamed.info = replace(info("gla"), cls=Renamed)


@fails("ddp", "fsdp2")
class UnusedParameter(Sound):
    """One parameter gets no gradient, which no other check detects."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.unused = nn.Parameter(torch.zeros(dim))
