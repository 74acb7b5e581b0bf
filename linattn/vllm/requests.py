"""Extension of the OpenAI schema: requests that name state files, in ``vllm_xargs``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from linattn.vllm import states


class StateFiles(LogitsProcessor):
    """Logits processor, through which vLLM reports which sequence is in which row of a step; it changes only the logits of failed ones."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse a request with a file that is missing or does not fit: the server answers 400."""
        states.check(sampling_params.extra_args, sampling_params.n or 1)

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        end = getattr(vllm_config.model_config.hf_config, "eos_token_id", None)
        self._end = (end[0] if isinstance(end, list) else end) or 0

    def is_argmax_invariant(self) -> bool:
        """Return False, because a failed sequence gets its end token."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update the rows as sequences are added, removed and moved."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            states.ROWS.remove(row)
        for row, params, *_ in batch_update.added:
            states.ROWS.add(row, params.extra_args)
        for source, target, direction in batch_update.moved:
            states.ROWS.move(source, target, swap=direction == MoveDirectionality.SWAP)

    def apply(self, logits: Tensor) -> Tensor:
        """End the sequences whose state could not be read."""
        for row in states.ROWS.failed:
            logits[row] = -torch.inf
            logits[row, self._end] = 0.0
        return logits
