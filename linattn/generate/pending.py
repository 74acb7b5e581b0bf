"""Tokens that are being copied from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class Pending:
    """Next ``tokens`` [n] of ``items``, one each, copied while the device continues."""

    def __init__(self, items: list, tokens: Tensor) -> None:
        self._items, self._event = items, None
        if tokens.is_cuda:
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True).copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._tokens = tokens.to("cpu", copy=True)

    @property
    def finished(self) -> bool:
        """True if the copy has arrived."""
        return self._event is None or bool(self._event.query())

    def values(self) -> tuple[list, list[int]]:
        """Wait for the copy; returns the items with their tokens."""
        if self._event is not None:
            self._event.synchronize()
        return self._items, self._tokens.tolist()
