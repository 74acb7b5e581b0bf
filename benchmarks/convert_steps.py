"""Time a step of the first two stages of a conversion on a GPU, eagerly and as a CUDA graph, in results/convert-steps-CARD.json.

    python -m benchmarks.convert_steps FOLDER --text "sample/*-train.txt"

FOLDER is a softmax model, such as SmolLM2-135M, or one of its size with random weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS, destination
from linattn.bench.files import command
from linattn.distill.job import Job, job_of, source_of
from linattn.distill.options import ConvertOptions
from linattn.distill.stages import stages_of, trained
from linattn.distill.step import Step, optimizer_of
from linattn.report.folder import write_text

FIRST, TIMED = 4, 6  # steps before the clock starts, and steps that it times


def timed(job: Job, number: int, rows: int, capture: bool) -> dict[str, Any]:
    """Seconds of a step of stage ``number`` with ``rows`` sequences, peak memory, and the losses."""
    width = job.teacher.config.dim  # type: ignore[union-attr]
    stage = stages_of(replace(job.options, batch_size=rows), width)[number - 1]
    state = {name: t.clone() for name, t in job.student.state_dict().items()}
    step = Step(job, stage, optimizer_of(trained(job.student, stage), stage, job.device), capture=capture)
    packed, losses = job.packed(stage), []
    torch.cuda.reset_peak_memory_stats()
    for i in range(FIRST + TIMED):
        if i == FIRST:
            torch.cuda.synchronize()
            began = time.perf_counter()
        losses.append(step(i, job.batch(packed, range(i * rows, (i + 1) * rows))))
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / TIMED
    job.student.load_state_dict(state)
    peak = torch.cuda.max_memory_allocated()
    return {"step_s": seconds, "tokens_per_s": rows * stage.context / seconds, "peak_bytes": peak, "losses": torch.stack(losses).tolist()}


def main(arguments: list[str] | None = None) -> int:
    """Time both ways for each mixer, stage and batch."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convert_steps", description=__doc__)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("--text", required=True)
    parser.add_argument("--mixers", default="gated_deltanet")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    facts, path = destination(parser, "convert-steps", "cuda", asked.out)
    rows = []
    for mixer in asked.mixers.split(","):
        job = job_of(source_of(asked.teacher), ConvertOptions(mixer=mixer, text=(asked.text,), device="cuda"))
        for number, count in ((1, 16), (1, 32), (2, 16), (2, 32)):
            eager, graph = (timed(job, number, count, capture) for capture in (False, True))
            same = eager.pop("losses") == graph.pop("losses")
            rows.append({"mixer": mixer, "stage": number, "rows": count, "eager": eager, "graph": graph, "same_losses": same})
            print(rows[-1], flush=True)
    date = datetime.now(UTC).date().isoformat()
    run = {"command": command("python -m benchmarks.convert_steps", sys.argv[1:]), "date": date, **facts}
    write_text(path, json.dumps({"schema": "linattn.steps", "card": facts["card"], "run": run, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
