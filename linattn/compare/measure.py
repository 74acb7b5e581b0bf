"""Prefill and decoding times of a model, and the size of its state."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn

from linattn.experiment.study import LeftOut
from linattn.state import State

DECODED = 16  # tokens of a round of decoding
ROUNDS = 3  # rounds of decoding at each context
REPEATS = 3  # repetitions of a prefill
ENOUGH = 1.5  # seconds after which a prefill is not repeated


@torch.inference_mode()
def at_context(model: nn.Module, ids: Tensor) -> dict:
    """Read ``ids`` [1, T], then decode greedily from the state.

    Returns:
        ``context`` (T), ``prefill_ms`` (median) and ``decode_ms`` (the least median of the rounds), both after a warm-up, and
        ``state_bytes`` (after the prefill).

    Raises:
        LeftOut: if memory does not suffice.
    """
    try:
        prefill, (logits, state) = _prefill(model, ids)
        kept = state.nbytes
        decode = _decode(model, logits[:, -1:].argmax(-1), state)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "memory" in str(error):
            raise LeftOut("there was not enough memory") from error
        raise
    return {"context": ids.shape[1], "prefill_ms": 1e3 * prefill, "decode_ms": 1e3 * decode, "state_bytes": kept}


def expected_seconds(measured: list[dict], context: int) -> float:
    """Expected seconds of a prefill of ``context`` tokens, quadratically extrapolated from the last measured one."""
    return 0.0 if not measured else 1e-3 * measured[-1]["prefill_ms"] * (context / measured[-1]["context"]) ** 2


def _prefill(model: nn.Module, ids: Tensor) -> tuple[float, tuple]:
    """Median seconds of a prefill, and the output of the last one."""
    out = model(ids, return_state=True)  # warm-up
    taken: list[float] = []
    while len(taken) < REPEATS and sum(taken) < ENOUGH:
        begin = time.perf_counter()
        out = model(ids, return_state=True)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken), out


def _decode(model: nn.Module, token: Tensor, state: State) -> float:
    """Minimum over rounds of the median seconds of a token [1, 1] after ``state``, to exclude rounds disturbed by other processes."""
    taken = []
    for _ in range(ROUNDS * DECODED + 2):
        begin = time.perf_counter()
        logits, state = model(token, state, return_state=True)
        token = logits[:, -1:].argmax(-1)
        taken.append(time.perf_counter() - begin)
    return min(statistics.median(taken[i : i + DECODED]) for i in range(2, len(taken), DECODED))  # the first two are warm-up
