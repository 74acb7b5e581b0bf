"""Batches of vLLM for one call of a mixer: sequences that decode a token each, then packed pieces of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from linattn.ops.checks import values_visible
from linattn.vllm.layout import Layout


@dataclass(frozen=True)
class Batch:
    """Sequences of one call.

    Args:
        decodes: number of sequences, the first ones, with one token each.
        starts: first token of each sequence, and the number of all tokens, [N + 1].
        index: page of each sequence, [N] int64.
        begun: True for sequences with tokens read by earlier calls, [N] bool.
    """

    decodes: int
    starts: Tensor
    index: Tensor
    begun: Tensor

    @classmethod
    def of(cls, metadata: Any) -> Batch:
        """Read the batch from the metadata that vLLM builds for linear attention."""
        rows = metadata.num_decodes + metadata.num_prefills
        starts = metadata.query_start_loc[: rows + 1]
        begun = metadata.seq_lens[:rows] > starts.diff()
        index = metadata.state_indices_tensor[:rows].clamp(min=0)  # padding of a graph: page 0, which no sequence owns
        return cls(metadata.num_decodes, starts, index.long(), begun)

    @property
    def tokens(self) -> int:
        """Number of tokens if no synchronisation is needed: if all sequences decode, or if the tensors are on the host."""
        return self.decodes if self.decodes == len(self.index) else int(self.starts[-1])


class Paged:
    """A mixer whose states lie in ``pages`` [P, bytes] uint8, laid out by ``layout``; ``fresh`` is the state before the first token."""

    def __init__(self, mixer: Any, pages: Tensor, layout: Layout, fresh: Mapping[str, Tensor]) -> None:
        self.mixer, self.pages, self.layout, self.fresh = mixer, pages, layout, fresh

    def run(
        self, x: Tensor, batch: Batch, shared: Tensor | None = None, given: Mapping[int, Mapping[str, Tensor]] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Mix ``x`` [1, T, D] and replace the states of its sequences; returns y [1, T, D] and what is passed on to the next layer.

        ``given`` has initial states of some sequences that begin, in place of the fresh one; ``shared`` [1, T, ...] comes from the
        previous layer of the same kind.
        """
        n, rows, given = batch.decodes, len(batch.index), given or {}
        results: list[tuple[Tensor, Any]] = []
        if n:
            own = None if shared is None else shared[0, :n, None]
            y, passed = self._part(x[0, :n, None], batch, slice(0, n), own, given)
            results.append((y.transpose(0, 1), None if passed is None else passed.transpose(0, 1)))
        if n < rows:
            own = None if shared is None else shared[:, n:]
            cu_seqlens = batch.starts[n:] - n
            results.append(self._part(x[:, n:], batch, slice(n, rows), own, given, cu_seqlens=cu_seqlens))
        y = torch.cat([part for part, _ in results], 1)
        return y, None if results[0][1] is None else torch.cat([part for _, part in results], 1)

    def _part(
        self, x: Tensor, batch: Batch, rows: slice, shared: Tensor | None, given: Mapping[int, Mapping[str, Tensor]], **how: Any
    ) -> tuple[Tensor, Tensor | None]:
        state = self._state(batch, rows, given)
        how |= {"shared": shared, "return_shared": True} if self.mixer.shares else {}
        y, state, *passed = self.mixer(x, state, return_state=True, **how)
        self.layout.write(self.pages, batch.index[rows], state)
        return y, passed[0] if passed else None

    def _state(self, batch: Batch, rows: slice, given: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """States of the sequences ``rows``; a sequence that begins gets the fresh or given state, whatever its page contains."""
        state, begun = self.layout.read(self.pages, batch.index[rows]), batch.begun[rows]
        if not values_visible(begun) or not bool(begun.all()):
            state = {name: torch.where(begun.view(-1, *[1] * (t.ndim - 1)), t, self.fresh[name].to(t.device)) for name, t in state.items()}
            for row, own in given.items():
                if rows.start <= row < rows.stop:
                    at = row - rows.start
                    for name, t in state.items():
                        t[at] = torch.where(begun[at], t[at], own[name][0].to(t.device))
        return state
