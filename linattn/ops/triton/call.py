"""Call of the recurrence on a GPU: its arguments, its plan, and which kernels can run it."""

from __future__ import annotations

from copy import copy
from typing import Self

import torch
import triton.language as tl
from torch import Tensor

from linattn.ops import gpu
from linattn.ops.triton import hopper, table
from linattn.ops.triton.arguments import Arguments
from linattn.ops.triton.hopper import choice
from linattn.ops.triton.launch import Recorder
from linattn.ops.triton.plan import CHANNEL, DELTA, ERASE, HEAD, NONE, PLAIN, Family, plan, precision


class Call:
    """Arguments of a call, the tensors that its kernels share, and properties that decide which kernels run."""

    def __init__(self, recorder: Recorder, given: Arguments, scale: float) -> None:
        q, k, v, decay, beta, read, write, bonus, _, cu = given
        self.q, self.k, self.v, self.decay, self.beta, self.read, self.write = q, k, v, decay, beta, read, write
        self.recorder, self.bonus, self.cu, self.card = recorder, bonus, cu, gpu.card(v.device)
        self.least = table.NARROWEST if v.dtype == torch.bfloat16 else 16  # channels of a block
        self.fast = False  # True if the kernels for Hopper run
        self.turned = False
        self.batch, self.tokens, self.heads, self.size_v = v.shape
        self.size_k = k.shape[3]
        self.group = self.heads // k.shape[2]
        rank = NONE if decay is None else HEAD if decay.ndim == 3 else CHANNEL
        rule = DELTA if beta is not None else ERASE if read is not None else PLAIN
        self.family = Family(rank, rule, bonus is not None, v.dtype == torch.bfloat16)
        self.sequences = self.batch if cu is None else cu.shape[0] - 1
        self.plan = plan(self.family, self.batch, self.tokens, self.heads, (self.size_k, self.size_v), self.sequences, cu is not None)
        self.local = self.plan.split  # True if scans find the ends of segments first
        self.dtype = torch.bfloat16 if self.family.half else torch.float32  # dtype of the operands of products
        self.numbers = (self.sequences, self.tokens, self.heads, self.group, scale)
        self.constants = dict(
            K=self.size_k, C=self.plan.chunk, DECAY=rank, RULE=rule, BEFORE=self.family.before, PACKED=cu is not None,
            BITS=17 if v.dtype != torch.float32 else 40, PRECISION=precision(v.dtype, rule),
            kind=tl.bfloat16 if self.family.half else tl.float32,
        )  # fmt: skip
        self.p: Tensor | None = None  # written by prepare.py if the family needs them
        self.p_write: Tensor | None = None
        self.b: Tensor | None = None
        self.t: Tensor | None = None
        self.w: Tensor | None = None
        self.q_faded: Tensor | None = None
        self.k_faded: Tensor | None = None
        self.write_faded: Tensor | None = None
        self.fade: Tensor | None = None
        self.settled: Tensor | None = None  # of how many tokens the blocks of a chunk settle, see hopper/decays.py

    @property
    def exchanges(self) -> bool:
        """True if the recurrence itself, exchanged or reversed, gives the gradients of q, k and v, so that no states are saved."""
        plain = self.family.rule == PLAIN and self.family.decay != CHANNEL and not self.family.before
        return plain and self.group == 1 and self.size_v <= (hopper.WIDEST if self.fast else 256)

    @property
    def rowwise(self) -> bool:
        """True if the state-independent parts of a chunk are stored in rows, one per token."""
        return self.fast and self.family.rule == DELTA and self.family.decay != CHANNEL

    @property
    def in_place(self) -> bool:
        """True if the gradients of q and k alias a chunk's values and parts, which the backward kernels read before."""
        return self.rowwise and self.size_v <= hopper.WIDEST

    @property
    def fusible(self) -> bool:
        """True if there is a kernel that scans the state's cotangent and computes the gradients, so that no cotangents are stored."""
        plain = self.fast and self.family.rule == PLAIN and self.family.decay != NONE and not self.family.before
        return (plain or self.rowwise) and self.size_k == self.size_v == hopper.WIDEST

    def fuses(self, ddecay: bool) -> bool:
        """True if that kernel runs; for the plain rule only with the decay's gradient, without which the scans themselves are faster."""
        return self.fusible and (ddecay or self.rowwise) and self.separate(ddecay) is None

    def separate(self, ddecay: bool) -> str | None:
        """Reason why two kernels run in place of that one, or None."""
        if self.rowwise and ddecay and self.decay is not None and self.decay.stride(1) == 0:
            return "the gradient of a constant decay, a sum over tokens with cancellation, would be inaccurate"
        if self.family.decay == CHANNEL and (reason := hopper.unsuited((self.size_k, self.size_v), self.decay)) is not None:
            return f"decays per channel do not suit it: {reason}"
        return choice.idle(self.v.device, self.plan.segments * self.heads)

    def unkept(self) -> str | None:
        """Reason why the backward pass prepares the chunks again, or None if the forward pass keeps what it has prepared.

        Without reuse it would alias the gradient of k; states do so now, so that a backward pass needs no more memory.
        """
        if not self.fast and self.family.rule == DELTA and self.family.decay != CHANNEL:
            return None
        if not self.fusible or (self.family.decay == HEAD and not self.rowwise):
            return "only the delta rule without decays per channel and the plain rule with them save them, for K = V = 128"
        if self.rowwise and not self.aligned:
            return f"not every chunk has {self.plan.chunk} tokens, so that its states do not fit into the memory of its gradients"
        return self.separate(True)

    @property
    def prepared(self) -> tuple[Tensor | None, ...]:
        """What a backward pass reads of the prepared chunks.

        They are p, b (None if both are in rows), decays or bounds, of how many tokens blocks settle, decayed keys, and decayed queries,
        which only the scan that finds the ends of segments reads.
        """
        queries = self.q_faded if self.local else None
        return self.p, None if self.rowwise else self.b, self.fade, self.settled, self.k_faded, queries

    @property
    def aligned(self) -> bool:
        """True if a chunk's state is stored in the rows of its tokens of two tensors, which it fits if every chunk is whole."""
        return self.rowwise and self.cu is None and self.tokens % self.plan.chunk == 0

    @property
    def narrowest(self) -> int:
        """Minimum of channels of a block; on Hopper Triton miscompiles narrow blocks of bfloat16, see table.py."""
        return min(32, self.least) if self.card.capability[0] in (8, 12) else self.least

    def part(self, ddecay: bool) -> int:
        """Chunks of each segment whose cotangents of states exist at once, or 0 for all: the last ones first, in memory that is reused.

        With decays per channel what is prepared of the chunks would need as much memory as parts save: then there are none, nor for many
        packed sequences, which fill no segment.
        """
        p = self.plan
        if self.fast or self.family.decay == CHANNEL or p.chunks * self.heads < table.PARTED or (self.exchanges and not ddecay):
            return 0
        chunks = -(-p.length // (p.chunk * table.PARTS[self.family.rule]))
        return chunks if p.segments * chunks < p.chunks else 0

    @property
    def own(self) -> tuple[int, int, int]:
        return self.batch, self.tokens, self.heads

    @property
    def state(self) -> tuple[int, int, int]:
        return self.heads, self.size_k, self.size_v

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.recorder.empty(*shape, dtype=dtype or self.dtype)

    def choose(self, *others: Tensor) -> None:
        """Set ``fast``: the kernels for Hopper must support all tensors that they read and write, including ``others``."""
        write = self.write if self.family.decay != CHANNEL else None  # else it is a prepared tensor
        self.fast = self.plan.chunk == hopper.CHUNK and hopper.fits((self.size_k, self.size_v), self.q, self.k, self.v, write, *others)

    def exchanged(self, do: Tensor) -> Self:
        """Recurrence with keys and values exchanged and ``do`` as queries; its states are the transposed states of this one.

        Without erasure its output is the gradient of q and, run backwards, that of k.
        """
        other = copy(self)
        other.q, other.k, other.v = do, self.v, self.k
        other.size_k, other.size_v = self.size_v, self.size_k
        other.constants = {**self.constants, "K": self.size_v}
        other.turned = True
        return other
