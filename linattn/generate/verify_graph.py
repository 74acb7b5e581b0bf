"""Verification of drafts on the buffers of a captured step, without Python between its operations: one CUDA graph on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from linattn.generate import capacity
from linattn.generate.captured import UNTRACEABLE, Choose, Graph, Step
from linattn.generate.sampling import greedy
from linattn.generate.verify import recorded_inputs
from linattn.state import State

LONGEST = (4, 8, 16, 32)  # tokens of each row that a graph reads, drafts and the token before them


class Verification:
    """Call of the backbone ``model`` on ``longest`` tokens of each row, which keeps those that ``choose`` would have chosen.

    It reads the state in the buffers of ``step`` and leaves the state after the accepted tokens there. ``tokens`` of the step become
    the last ones chosen, which have not been read.
    """

    def __init__(self, model: Any, head: nn.Module, step: Step, longest: int, stops: Sequence[int], choose: Choose) -> None:
        rows, device = len(step.tokens), step.tokens.device
        self._model, self._head, self._step, self._stops = model, head, step, tuple(stops)
        self._choose = choose
        self._given = torch.ones(rows, longest + 2, dtype=torch.int64, device=device)  # tokens, their number, and 1 if all are accepted
        self._found = torch.zeros(rows, longest + 1, dtype=torch.int64, device=device)  # chosen tokens, and the number of accepted ones
        self._longest = longest
        self._run: Callable[[], Any] = self._verify
        if step.tokens.is_cuda:
            self._run = Graph(self._verify, None).replay

    @torch.inference_mode()
    def __call__(self, rows: Sequence[Sequence[int]], done: Sequence[bool]) -> list[list[int]]:
        """Chosen tokens after the accepted ones of ``rows``; for rows that are ``done`` all are accepted and none is chosen."""
        laid = [[*row, *[0] * (self._longest - len(row)), len(row), int(end)] for row, end in zip(rows, done, strict=True)]
        self._given.copy_(torch.tensor(laid))
        self._run()
        found = self._found.tolist()
        return [[row[0]] * len(row) if end else own[: own[-1]] for row, end, own in zip(rows, done, found, strict=True)]

    def _verify(self) -> None:
        ids, lengths, done = self._given[:, :-2], self._given[:, -2], self._given[:, -1:].bool()
        state = State([dict(layer) for layer in self._step.buffers.layers])
        with recorded_inputs(self._model) as inputs:
            hidden, _ = self._model(embeddings=self._model.embedding(ids), state=state, return_state=True)
        chosen = self._choose(self._head(hidden))
        right = (ids[:, 1:] == chosen[:, :-1]) & ~self._stopped(ids[:, 1:]) | done
        right = right & (torch.arange(1, self._longest, device=ids.device) < lengths[:, None])
        kept = 1 + right.long().cumprod(1).sum(1)
        self._found[:, :-1] = chosen
        self._found[:, -1] = kept
        last = torch.where(done[:, 0], ids[:, 0], chosen.gather(1, kept[:, None] - 1)[:, 0])
        layers: list[dict[str, Tensor]] = []
        shared: dict[str, Tensor | None] = {}
        for layer, old, x in zip(self._model.layers, state.layers, inputs, strict=True):
            mixer, name = layer.mixer, layer.mixer.info.name
            sharing = {"shared": shared.get(name), "return_shared": True} if mixer.shares else {}
            _, new, *passed = mixer(x, old, return_state=True, mask=kept, **sharing)
            layers.append(new)
            shared[name] = passed[0] if passed else None
        for old, new in zip(self._step.buffers.layers, layers, strict=True):
            for key, t in old.items():
                t.copy_(new[key])
        self._step.tokens.copy_(last)
        self._step.ended.logical_or_(self._stopped(last))

    def _stopped(self, tokens: Tensor) -> Tensor:
        found = torch.zeros_like(tokens, dtype=torch.bool)
        for stop in self._stops:
            found = found | (tokens == stop)
        return found


def of_step(model: Any, head: nn.Module, step: Step, longest: int, stops: Sequence[int], choose: Choose = greedy) -> Verification | None:
    """The verification of ``longest`` tokens on the buffers of ``step``, made at its first use; None if it cannot be captured."""
    key = longest, tuple(stops), id(head), choose
    if key not in step.verifications:
        kept = step.state, step.tokens.clone(), step.ended.clone()
        try:
            step.verifications[key] = Verification(model, head, step, longest, stops, choose)
        except UNTRACEABLE:
            step.verifications[key] = None
        capacity.fill(step.buffers, kept[0], capacity.slots_of(model))
        step.tokens.copy_(kept[1])
        step.ended.copy_(kept[2])
    found: Verification | None = step.verifications[key]
    return found


def refusal(model: Any) -> str | None:
    """Reason why verifications of ``model`` are not captured; None if they are."""
    if not next(model.parameters()).is_cuda:
        return "launch overhead on a CPU is small"
    if any(capacity.slots_of(model)):
        return "its states have a slot for each token"
    return None
