"""Bits per byte of trained models whose weights are quantised: ``python -m benchmarks.quality MODEL... --text FILE --calibrate FILE``.

Each model, a folder or a file that :func:`linattn.load` reads, is measured in bfloat16, in int8 rounded to nearest, and in int4
rounded to nearest and with calibration. Without ``--text`` byte models read the end of their training corpus.
Rows are kept as they come.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS, destination, positive

KEY = ("model", "to", "group", "calibrated")
FORMATS = (("bfloat16", False), ("int8", False), ("int4", False), ("int4", True))


def rows(path: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of one model."""
    import linattn
    from linattn.data import sources
    from linattn.data.corpus import corpus
    from linattn.evaluation import measure
    from linattn.evaluation.options import EvaluateOptions
    from linattn.hf.load import load
    from linattn.train.published import codec_at

    model, codec = load(path).to(options.device, torch.bfloat16).eval(), codec_at(path)
    how = EvaluateOptions(text=tuple(options.text), tokens=options.tokens, context=options.context)
    text = b"\n".join(map(sources.read, options.calibrate)) if options.calibrate else bytes(corpus().train)
    ids = codec.encode(text[: 16 * options.calibration].decode(errors="replace"))[: options.calibration]
    given = torch.tensor(ids[: len(ids) // options.context * options.context]).unflatten(0, (-1, options.context))
    tokens, size = measure.held_out(how, codec)
    plain = None
    for to, calibrated in FORMATS:
        start, group = time.perf_counter(), options.group if to == "int4" else None
        if to == "bfloat16":
            one = model
        else:
            one = linattn.quantize(model, to=to, group=options.group, calibrate=given if calibrated else None)
        bits = measure.on_text(one, tokens, size, how)["bits_per_byte"]
        plain = bits if plain is None else plain
        mixer = model.config.mixer if isinstance(model.config.mixer, str) else ", ".join(model.config.mixer)
        yield {
            "model": path.stem if path.is_file() else path.name, "mixer": mixer, "parameters": sum(p.numel() for p in model.parameters()),
            "to": to, "group": group, "calibrated": calibrated, "tokens": len(tokens), "bytes": size, "context": options.context,
            "calibration_tokens": given.numel() if calibrated else 0, "bits_per_byte": bits, "more": bits / plain - 1,
            "seconds": time.perf_counter() - start,
        }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    group = f" in {row['group']}s" if row["group"] else ""
    how = f"{row['to']}{group}{', calibrated' if row['calibrated'] else ''}"
    return f"{row['model']:28} {how:26} {row['bits_per_byte']:.4f} bits per byte, {row['more']:+.2%}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__.split("\n")[0])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, action="append", default=[], help="held-out text; may be repeated")
    parser.add_argument("--calibrate", type=Path, action="append", default=[], help="text for calibration; may be repeated")
    parser.add_argument("--tokens", type=positive, default=8192, help="most tokens of the held-out text")
    parser.add_argument("--calibration", type=positive, default=8192, help="tokens of the text for calibration")
    parser.add_argument("--context", type=positive, default=512, help="tokens")
    parser.add_argument("--group", type=positive, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file, or a folder for quality-MACHINE.json")
    options = parser.parse_args(arguments)
    from linattn.bench.files import command
    from linattn.bench.gpu.record import Record

    facts, path = destination(parser, "quality", options.device, options.out)
    with Record(path, KEY, facts) as record:
        record.body["runs"][-1]["command"] = command("python -m benchmarks.quality", arguments or sys.argv[1:])
        for model in options.models:
            for row in rows(model, options):
                record.add(row)
                print(line(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
