"""Causality check of a trained model: its held-out loss by several backends, token by token, and from prefixes only.

    linattn train --mixer rwkv7 --data tokens --join-documents --out runs/rwkv7
    python -m benchmarks.causality runs/rwkv7 --data tokens

If a kernel lets tokens read later ones, the loss rises where there are none: in the portable backend, in decoding token by token, and
at the end of a prefix. Rows of results/causality-CARD.json are paired: ``whole`` is the loss of the same positions in one call with
the whole windows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import RESULTS, destination, positive
from linattn.bench.files import command
from linattn.bench.gpu.record import Record
from linattn.data import prepared
from linattn.data.packed import Windows
from linattn.mixers import base
from linattn.models import LanguageModel
from linattn.train.run import load_run

KEY = ("run_folder", "way", "backend", "dtype")
CONFIGURATIONS = (("auto", "bf16"), ("auto", "fp32"), ("torch", "bf16"), ("torch", "fp32"))  # backend and dtype of whole windows


@contextmanager
def using(backend: str) -> Iterator[None]:
    """Run the recurrences of all mixers by ``backend``."""
    own = base.linear_attention
    base.linear_attention = own if backend == "auto" else partial(own, backend=backend)  # type: ignore[assignment]
    try:
        yield
    finally:
        base.linear_attention = own


class Held:
    """A model and held-out windows ``ids`` [N, T]."""

    def __init__(self, model: LanguageModel, ids: Tensor, rows: int, per_byte: Callable[[float], float]) -> None:
        """``rows``: windows of a call; ``per_byte`` converts nats per token."""
        self.model, self.ids, self.rows, self.per_byte = model.eval(), ids, rows, per_byte

    @torch.no_grad()
    def logits(self, ids: Tensor, dtype: str) -> Tensor:
        """Logits [N, T, vocab] of one call with ``ids`` [N, T], float32."""
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=dtype == "bf16"):
            logits = self.model(ids)
        assert isinstance(logits, Tensor)
        return logits.float()

    def mean(self, logits: Tensor, targets: Tensor) -> float:
        """Mean loss of ``logits`` [.., vocab] for ``targets`` [..] in nats."""
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten()).item()

    def whole(self, dtype: str) -> float:
        """Bits per byte of all windows."""
        losses = [self.mean(self.logits(ids, dtype)[:, :-1], ids[:, 1:]) * len(ids) for ids in self.ids.split(self.rows)]
        return self.per_byte(sum(losses) / len(self.ids))

    @torch.no_grad()
    def steps(self, count: int, dtype: str) -> tuple[float, float]:
        """Bits per byte of the first ``count`` tokens: one token a call from the state, and in one call."""
        ids, state, found = self.ids[: self.rows, : count + 1], None, []
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=dtype == "bf16"):
            for i in range(count):
                logits, state = self.model(ids[:, i : i + 1], state, return_state=True)
                found.append(logits.float())
        at_once = self.logits(ids, dtype)[:, :-1]
        return self.per_byte(self.mean(torch.cat(found, 1), ids[:, 1:])), self.per_byte(self.mean(at_once, ids[:, 1:]))

    def prefixes(self, places: list[int], dtype: str) -> dict[str, float]:
        """Bits per byte of the tokens at ``places`` from only the tokens before them, and in one call with the whole windows.

        ``changed`` is the largest ‖difference‖ / ‖logits‖ of logits before a place when the tokens from there on are replaced.
        """
        ids = self.ids[: self.rows]
        whole, alone, changed = self.logits(ids, dtype), [], 0.0
        for place in places:
            alone.append(self.logits(ids[:, :place], dtype)[:, -1])
            other = torch.cat([ids[:, :place], ids[:, place:].roll(1, 0).flip(1)], 1)
            before = whole[:, :place]
            changed = max(changed, ((self.logits(other, dtype)[:, :place] - before).norm() / before.norm()).item())
        targets, at = ids[:, places], torch.tensor(places) - 1
        return {
            "prefixes": self.per_byte(self.mean(torch.stack(alone, 1), targets)),
            "whole": self.per_byte(self.mean(whole[:, at], targets)),
            "changed": changed,
        }


def measured(held: Held, asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of one run."""
    context = held.ids.shape[1]
    generator = torch.Generator().manual_seed(0)
    places = sorted(set((1 + torch.randperm(context - 1, generator=generator)[: asked.places]).tolist()))
    for backend, dtype in CONFIGURATIONS:
        how = {"backend": backend, "dtype": dtype}
        with using(backend):
            yield {"way": "windows", **how, "bits_per_byte": held.whole(dtype), "tokens": held.ids.numel()}
            if backend == "auto":
                found = held.prefixes(places, dtype)
                yield {"way": "prefixes", **how, "bits_per_byte": found.pop("prefixes"), **found, "tokens": len(places) * held.rows}
    alone, whole = held.steps(min(asked.steps, context - 1), "fp32")
    yield {"way": "steps", "backend": "auto", "dtype": "fp32", "bits_per_byte": alone, "whole": whole, "tokens": asked.steps * held.rows}


def main(arguments: list[str] | None = None) -> int:
    """Measure every run named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.causality", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders of linattn train")
    parser.add_argument("--data", required=True, type=Path, help="the folder of linattn data prepare that they read")
    parser.add_argument("--windows", type=positive, default=64, help="held-out windows")
    parser.add_argument("--rows", type=positive, default=16, help="windows of a call")
    parser.add_argument("--places", type=positive, default=24, help="places that prefixes end at")
    parser.add_argument("--steps", type=positive, default=256, help="tokens that are decoded one at a time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    facts, path = destination(parser, "causality", asked.device, asked.out)
    data = prepared(asked.data)
    with Record(path, KEY, facts) as record:
        record.body["runs"][-1]["command"] = command("python -m benchmarks.causality", sys.argv[1:] if arguments is None else arguments)
        for run in asked.runs:
            options = json.loads((run / "run.json").read_text())["options"]
            windows = Windows(data.validation, options["context"], asked.windows, isolated=False)
            ids = torch.stack([windows[i]["input_ids"] for i in range(len(windows))]).to(asked.device)
            model, _ = load_run(run, device=asked.device)
            last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
            record.add({"run_folder": run.name, "way": "trainer", "bits_per_byte": last["validation_bits_per_byte"]})
            for row in measured(Held(model, ids, asked.rows, data.bits_per_byte), asked):
                record.add({"run_folder": run.name, **row})
                print(run.name, *(f"{k} {v:.6g}" if isinstance(v, float) else v for k, v in row.items()), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
