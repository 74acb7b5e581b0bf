"""Time of a training step and of a decoding step by kind of kernel, on a GPU: ``python -m benchmarks.profile``.

A moment belongs to the kernel that began first of those that run, and to gaps where none does: in a training step while it is profiled,
right after others, since clocks sink in long runs; in a decoding step without the profiler. The bound of a kind is the time that its
products take at the speed of large ones, or its bytes at that of large copies, both measured in the same run. Operations and bytes are
counted by the shapes that torch's profiler records, each operand and each result once.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import RESULTS, destination
from linattn.bench import decode
from linattn.bench.files import command
from linattn.bench.gpu import train
from linattn.bench.gpu.record import Record

KEY = ("what", "model", "rows", "kind")
MODELS = ("gla", "gated_deltanet")
ROWS = (1, 64, 256)  # of decoding
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
RESULTS_OF = {  # arguments that results are as large as
    "linattn::chunk_forward": (2,), "linattn::chunk_backward": range(2, 11),
    "linattn::gpu_norm": (0,), "linattn::gpu_norm_backward": (1, 2, 3),
    "linattn::short_convolution": (0,), "linattn::short_convolution_backward": range(1, 5),
}  # fmt: skip
KINDS = {  # operations of a training step, the first that is found in a kernel's
    "optimizer": r"adam|_foreach|Optimizer",
    "recurrence": r"linattn::chunk",
    "short convolution": r"linattn::short_convolution",
    "norms of heads": r"linattn::(gpu_)?norm",
    "loss": r"log_softmax|nll_loss|logsumexp|cross_entropy",
    "fused elementwise": r"^triton_",
}
DECODING = {  # kernels of a decoding step
    "maps": r"vector_kernel|tile_kernel",
    "recurrence": r"^recurrence|deferred_step|^weigh",
    "short convolution": r"^step_kernel",
    "norms": r"^forward_kernel",
    "fused elementwise": r"^triton_",
}
BYTES = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8, "long int": 8, "long": 8, "int": 4, "bool": 1, "unsigned char": 1}


class Launch(NamedTuple):
    """Kernel or copy on the GPU, and the innermost operation that launched it."""

    name: str
    start: float  # microseconds
    end: float
    op: str = ""
    dims: Sequence[Any] = ()
    types: Sequence[str] = ()
    programs: int = 0


def launches(trace: dict[str, Any]) -> list[Launch]:
    """Read the launches of a Chrome trace of torch's profiler, in the order of their starts."""
    ops = {e["args"]["External id"]: e for e in trace["traceEvents"] if e.get("cat") == "cpu_op" and "External id" in e.get("args", {})}
    found = []
    for e in trace["traceEvents"]:
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            op = ops.get(e["args"].get("External id"), {"name": "", "args": {}})
            shapes = op["args"].get("Input Dims", ()), op["args"].get("Input type", ())
            found.append(Launch(e["name"], e["ts"], e["ts"] + e["dur"], op["name"], *shapes, prod(e["args"].get("grid", (0,)))))
    return sorted(found, key=lambda launch: launch.start)


def times(run: Sequence[Launch]) -> list[float]:
    """Microseconds of each launch: from its start, or the end of those before it if that is later, to its own end."""
    end, found = 0.0, []
    for launch in run:
        found.append(max(0.0, launch.end - max(launch.start, end)))
        end = max(end, launch.end)
    return found


def flops(launch: Launch) -> int:
    """Operations of a matrix product, by the shapes of its two matrices, which come first or, in ``addmm``, second; else 0."""
    if launch.op not in PRODUCTS:
        return 0
    first = int("add" in launch.op)
    a, b = launch.dims[first : first + 2]
    return 2 * prod(a) * b[-1]


def moved(launch: Launch) -> int:
    """Bytes of a kernel's operands and results."""
    tensors = zip(launch.dims, launch.types, strict=False)
    sizes = [prod(d) * BYTES[t] if d and t in BYTES else 0 for d, t in tensors]  # lists of tensors have another type
    return sum(sizes) + sum(sizes[i] for i in RESULTS_OF.get(launch.op, ()) if i < len(sizes))


def train_kind(launch: Launch, vocab: int) -> str:
    """Kind of a kernel of a training step; what else has the size of the vocabulary belongs to the loss, but for the embedding."""
    of_vocab = any(vocab in d for d in launch.dims)
    if launch.op in PRODUCTS:
        return "products of the head" if of_vocab else "products of the layers"
    if of_vocab and "embedding" not in launch.op:
        return "loss"
    return next((kind for kind, what in KINDS.items() if re.search(what, launch.op or launch.name)), "other")


def decode_kind(launch: Launch, head: int) -> str:
    """Kind of a kernel of a step, whose head is the map with at least ``head`` programs."""
    kind = next((kind for kind, what in DECODING.items() if re.search(what, launch.name)), "choice of the token")
    return "head" if kind == "maps" and launch.programs >= head else kind


def summed(run: Sequence[Launch], kinds: Iterable[str], steps: int, whole: float) -> dict[str, dict[str, float]]:
    """Milliseconds, launches, operations and bytes of each kind in a step, and what is left of its ``whole`` milliseconds."""
    found: dict[str, dict[str, float]] = {}
    counted: set[Any] = set()  # an operation may have several launches
    for launch, kind, spent in zip(run, kinds, times(run), strict=True):
        row = found.setdefault(kind, {"ms": 0.0, "launches": 0.0, "flops": 0.0, "bytes": 0.0})
        row["ms"] += spent / 1e3 / steps
        row["launches"] += 1 / steps
        if (one := (launch.op, str(launch.dims), id(launch.dims))) not in counted:
            counted.add(one)
            row["flops"] += flops(launch) / steps
            row["bytes"] += moved(launch) / steps
    return found | {"gaps": {"ms": whole - sum(row["ms"] for row in found.values())}}


def profiled(step: Callable[[], object], steps: int, *, warm: int = 0) -> list[Launch]:
    """Launches of ``steps`` steps, after ``warm`` others."""
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, record_shapes=True, schedule=schedule(wait=0, warmup=1, active=1, repeat=1)) as profiler:
        for count in (warm, steps):
            for _ in range(count):
                step()
            torch.cuda.synchronize()
            profiler.step()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        return launches(json.loads(Path(file.name).read_text(encoding="utf-8")))


def peak() -> float:
    """Operations a second of a large product in bfloat16, the median of runs of ten."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    return statistics.median(2 * 8192**3 / train.seconds_of(lambda: a @ b, 10, "cuda") for _ in range(7))


def bounded(rows: dict[str, dict[str, float]], rates: tuple[float, float]) -> dict[str, dict[str, float]]:
    """``rows`` with the milliseconds that their products and bytes take at ``rates``, whichever are more; None without either."""
    for row in rows.values():
        bound = max(row.get("flops", 0) / rates[0], row.get("bytes", 0) / rates[1]) * 1e3
        row["bound_ms"] = bound or None  # type: ignore[assignment]
    return rows


def training(model_name: str, size: train.Size, rates: tuple[float, float]) -> Iterable[dict[str, Any]]:
    """Row of each kind of a compiled training step, and one of the whole, not profiled."""
    step, model = train.step_of("linattn", model_name, True, size, "cuda")
    first = train.seconds_of(step, 1, "cuda")
    train.seconds_of(step, 3, "cuda")
    torch.cuda.reset_peak_memory_stats()
    whole = train.seconds_of(step, size.steps, "cuda") * 1e3
    memory = torch.cuda.max_memory_allocated()
    run = profiled(step, 2, warm=size.steps)
    span = (max(launch.end for launch in run) - run[0].start) / 1e3 / 2
    rows = summed(run, [train_kind(launch, size.vocab_size) for launch in run], 2, span)
    told = {"what": "training", "model": model_name, "rows": size.batch}
    parameters = sum(p.numel() for p in model.parameters())
    if "optimizer" in rows:
        rows["optimizer"]["bytes"] = 7 * sum(p.nbytes for p in model.parameters())  # reads four of each, writes three
    for kind, row in bounded(rows, rates).items():
        yield {**told, "kind": kind, **row}
    yield {**told, "kind": "step", "ms": whole, "profiled_ms": span, "first_s": first, "tokens": size.batch * size.tokens,
           "parameters": parameters, "peak_bytes": memory, "peak_flops": rates[0], "bandwidth": rates[1]}  # fmt: skip
    _print_longest(run, 40, 2)


def _print_longest(run: Sequence[Launch], most: int, steps: int) -> None:
    """Print the ``most`` kernels that take longest in a step, products by their shapes."""
    found: dict[tuple, list[float]] = {}
    for launch, spent in zip(run, times(run), strict=True):
        shape = str(launch.dims)[:90] if launch.op in PRODUCTS else ""
        found.setdefault((launch.op[:60], shape, launch.name[:70], flops(launch)), []).append(spent)
    for (*names, work), spent in sorted(found.items(), key=lambda pair: -sum(pair[1]))[:most]:
        each = statistics.median(spent)
        rate = f"{work / each / 1e6:.0f} TFLOP/s" if work else ""
        print(f"  {sum(spent) / steps / 1e3:7.3f} ms {len(spent) / steps:4.0f} x {each:8.1f} us", *filter(None, (rate, *names)))


def decoding(mixer: str, rows: int, model: Any, rates: tuple[float, float]) -> Iterable[dict[str, Any]]:
    """Row of each kind of a captured decoding step, and one of the whole, not profiled."""
    with torch.inference_mode():
        state = decode.after(model, rows, 64)
    ms, _, step = decode.step_ms(model, state, 100)
    run = profiled(step.run, 5)
    largest = max((launch.programs for launch in run if decode_kind(launch, 1) == "head"), default=1)
    found = bounded(summed(run, [decode_kind(launch, largest) for launch in run], 5, ms), rates)
    head = model.get_output_embeddings().weight.nbytes
    parts = [t for layer in state.layers for t in layer.values()]
    matrices = decode.weights(model) - head
    least = {
        "maps": (matrices, matrices * rows), "head": (head, head * rows),  # two operations on a weight of two bytes
        "recurrence": (2 * sum(t.nbytes for t in parts if t.ndim == 4), 0),
        "short convolution": (2 * sum(t.nbytes for t in parts if t.ndim == 3), 0),
    }  # fmt: skip
    told = {"what": "decoding", "model": mixer, "rows": rows}
    for kind, row in found.items():
        if kind in least:
            row |= dict(zip(("bytes", "flops"), least[kind], strict=True))
        bounded({kind: row}, rates)
        yield {**told, "kind": kind, **row}
    floor = (decode.weights(model) + 2 * state.nbytes) / rates[1] * 1e3
    yield {**told, "kind": "step", "ms": ms, "floor_ms": floor, "peak_flops": rates[0], "bandwidth": rates[1]}
    _print_longest(run, 16, 5)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="of decoding; empty: none")
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--quick", action="store_true", help="tiny models, nothing kept")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file, or a folder for profile-CARD.json")
    options = parser.parse_args(arguments)
    facts, path = destination(parser, "profile", "cuda", options.out)
    rates = peak(), decode.bandwidth("cuda")
    print(f"{rates[0] / 1e12:.0f} TFLOP/s, {rates[1] / 1e12:.2f} TB/s", flush=True)
    with Record(None if options.quick else path, KEY, facts) as record:
        record.body["runs"][-1]["command"] = command("python -m benchmarks.profile", arguments or sys.argv[1:])
        for row in _rows(options, rates):
            record.add(row)
            print(line(row), flush=True)
    return 0


def _rows(options: argparse.Namespace, rates: tuple[float, float]) -> Iterable[dict[str, Any]]:
    for name in options.models.split(","):
        if not options.no_training:
            yield from training(name, train.TINY if options.quick else train.Size(), rates)
            torch.cuda.empty_cache()
    size = decode.SIZES["tiny" if options.quick else "340M"]
    for name in options.models.split(",") if options.rows else ():
        model = decode.build(name, size, "cuda", torch.bfloat16)
        for rows in map(int, options.rows.split(",")):
            yield from decoding(name, rows, model, rates)
        del model
        torch.cuda.empty_cache()


def line(row: dict[str, Any]) -> str:
    """Format a row."""
    what = f"{row['what']} {row['model']} {row['rows']} rows, {row['kind']}: {row['ms']:.3f} ms"
    if row["kind"] == "step":
        return f"{what}, " + ", ".join(f"{name} {value:.4g}" for name, value in row.items() if name not in KEY and name != "ms")
    rate = f", {row['flops'] / row['ms'] / 1e9:.0f} TFLOP/s" if row.get("flops") else ""
    bound = "" if row["bound_ms"] is None else f", bound {row['bound_ms']:.3f} ms"
    return f"{what} in {row.get('launches', 0):.0f} launches{rate}{bound}"


if __name__ == "__main__":
    sys.exit(main())
