"""Decoding step by every available compiler: ``python -m benchmarks.compilers``, on a GPU if there is one.

One step of a language model reads one token per row, updates its states and gives the next token. The same function runs eagerly, by
the library's captured step, by ``torch.compile``, by AOTInductor and, on a GPU, as a plain CUDA graph; all copy the new states over
the old ones, and take the largest logit. Ways alternate, so that other load affects all of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import RESULTS, destination, positive
from linattn.bench import decode
from linattn.bench.decode import SIZES, Row, wait
from linattn.generate import captured
from linattn.generate.sampling import greedy
from linattn.state import State

KEY = ("way", "model", "size", "dtype", "rows", "context")
Run = Callable[[], object]


class Buffers:
    """Step of ``model`` on fixed buffers of tokens and states."""

    def __init__(self, model: Any, state: State) -> None:
        self.model, self.names = model, [list(layer) for layer in state.layers]
        self.tokens = torch.zeros(state.rows, dtype=torch.int64, device=model.device)
        self.leaves = [t.clone() for layer in state.layers for t in layer.values()]

    def step(self, tokens: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Next tokens and new states."""
        rest = iter(leaves)
        state = State([{name: next(rest) for name in names} for names in self.names])
        hidden, state = self.model.model(tokens[:, None], state, return_state=True)
        new = [layer[name] for layer, names in zip(state.layers, self.names, strict=True) for name in names]
        return greedy(self.model.lm_head(hidden)[:, -1]), *new

    def advance(self) -> None:
        """Run the step and copy its results over its inputs."""
        self.take(self.step(self.tokens, *self.leaves))

    def take(self, new: tuple[Tensor, ...]) -> None:
        torch._foreach_copy_([self.tokens, *self.leaves], list(new))


class _Module(torch.nn.Module):
    """Step as a module, as exporting requires."""

    def __init__(self, buffers: Buffers) -> None:
        super().__init__()
        self.model, self.step = buffers.model, buffers.step

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.step(*inputs)


def own(buffers: Buffers, state: State) -> Run:
    """Captured step of the library."""
    step = captured.step_of(buffers.model.model, buffers.model.lm_head, state, 1 << 20)
    if isinstance(step, str):
        raise RuntimeError(step)
    step.load(step, state, buffers.tokens, torch.zeros_like(buffers.tokens, dtype=torch.bool), captured.Choice(greedy, "greedy"))
    buffers.tokens = step.tokens
    return step.run


def written(buffers: Buffers, _: State) -> Run:
    return buffers.advance


def graphed(buffers: Buffers, _: State) -> Run:
    """Plain CUDA graph of the eager step."""
    if buffers.tokens.device.type != "cuda":
        raise NotImplementedError("CUDA graphs are for GPUs")
    inputs = [buffers.tokens, *buffers.leaves]
    before = [t.clone() for t in inputs]
    graph = captured.Graph(buffers.advance, None)
    torch._foreach_copy_(inputs, before)  # the capture runs the step
    return graph.replay


def compiled(mode: str | None) -> Callable[[Buffers, State], Run]:
    """Step by ``torch.compile``, including the copies over the inputs, which keep their addresses, so that a CUDA graph copies none."""

    def made(buffers: Buffers, _: State) -> Run:
        if mode == "reduce-overhead" and buffers.tokens.device.type != "cuda":
            raise NotImplementedError("it is torch.compile with CUDA graphs, which are for GPUs")
        for t in (buffers.tokens, *buffers.leaves):
            torch._dynamo.mark_static_address(t)
        return torch.compile(buffers.advance, mode=mode, fullgraph=True, dynamic=False)

    return made


def ahead(buffers: Buffers, _: State) -> Run:
    """Step by AOTInductor: exported, compiled to a separate library, loaded."""
    exported = torch.export.export(_Module(buffers), (buffers.tokens, *buffers.leaves), strict=False)
    folder = Path(tempfile.mkdtemp())
    package = torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / "step.pt2"))
    step = torch._inductor.aoti_load_package(package)
    return lambda: buffers.take(step(buffers.tokens, *buffers.leaves))


WAYS: dict[str, Callable[[Buffers, State], Run]] = {
    "captured": own, "as written": written, "torch.compile": compiled(None), "reduce-overhead": compiled("reduce-overhead"),
    "AOTInductor": ahead, "CUDA graph": graphed,
}  # fmt: skip


Made = dict[str, tuple[Run, float, list[Tensor]]]  # by way: its run, seconds to make it, first tokens


def make(model: Any, state: State, ways: Sequence[str]) -> tuple[Made, list[Row]]:
    """Make the step of each way and run it 16 times; a way that fails is a row."""
    device, runs, failed = model.device.type, {}, []
    torch.compiler.reset()  # once: drops earlier compilations
    for way in ("as written", *ways):
        buffers = Buffers(model, state)
        start = time.perf_counter()
        try:
            run = WAYS[way](buffers, state)
            tokens = []
            for i in range(16):
                run()
                tokens.append(buffers.tokens.clone())
                if i == 0:
                    wait(device)
                    made = time.perf_counter() - start
        except Exception as error:  # a way that fails is a row of the table
            said = str(error).strip().splitlines()[0] if str(error).strip() else ""
            failed.append({"way": way, "failed": f"{type(error).__name__}: {said}"[:200]})
            continue
        runs[way] = (run, made, tokens)
    return runs, failed


def measure(runs: Made, device: str, steps: int, turns: int) -> Iterator[Row]:
    """Measure a row for each way: seconds to make it, milliseconds of a step, and the number of first tokens equal to the model's."""
    expected = runs["as written"][2]
    times: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(turns):
        for way, (run, _, _) in runs.items():
            wait(device)
            start = time.perf_counter()
            for _ in range(steps):
                run()
            wait(device)
            times[way].append((time.perf_counter() - start) / steps * 1e3)
    for way, (_, made, tokens) in runs.items():
        equal = sum(bool(torch.equal(a, b)) for a, b in zip(tokens, expected, strict=True))
        yield {"way": way, "step_ms": statistics.median(times[way]), "made_s": made, "equal": equal, "of": len(tokens)}


@dataclass(frozen=True)
class Job:
    """A model whose step is made in each of ``ways``."""

    mixer: str
    size: str
    device: str
    dtype: str
    rows: int
    context: int
    ways: tuple[str, ...]

    @property
    def what(self) -> Row:
        return {"model": self.mixer, "size": self.size, "dtype": self.dtype, "rows": self.rows, "context": self.context}

    def make(self) -> tuple[Made, list[Row]]:
        model = decode.build(self.mixer, SIZES[self.size], self.device, getattr(torch, self.dtype))
        return make(model, decode.after(model, self.rows, self.context), self.ways)


def apart(job: Job, steps: int, turns: int, link: Connection) -> None:
    """Run ``job`` in this process: report when its steps are compiled, wait, then send its rows and None."""
    with torch.inference_mode(mode=False), torch.no_grad():
        runs, failed = job.make()
        link.send("made")
        link.recv()
        for row in (*failed, *measure(runs, job.device, steps, turns)):
            link.send(row)
        link.send(None)


def at_once(jobs: Sequence[Job], steps: int, turns: int) -> Iterator[Row]:
    """Rows of ``jobs``, compiled concurrently in a process each, then measured one after the other."""
    context, started = get_context("spawn"), []
    for job in jobs:
        ours, theirs = context.Pipe()
        process = context.Process(target=apart, args=(job, steps, turns, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append((job, process, ours))
    ready = [_received(link) == "made" for _, _, link in started]
    for (job, process, link), made in zip(started, ready, strict=True):
        if made:
            link.send("go on")
        while row := _received(link) if made else None:
            yield {**job.what, **row, "made_beside": len(jobs) - 1}
        process.join()
        if process.exitcode:
            yield {**job.what, "way": "all", "failed": f"the process ended with {process.exitcode}"}


def _received(link: Connection) -> Any:
    """Next message, or None where the process has ended."""
    try:
        return link.recv()
    except EOFError:
        return None


def in_turn(jobs: Sequence[Job], steps: int, turns: int) -> Iterator[Row]:
    """Rows of ``jobs``, one after the other in this process."""
    with torch.inference_mode(mode=False), torch.no_grad():
        for job in jobs:
            runs, failed = job.make()
            for row in (*failed, *measure(runs, job.device, steps, turns)):
                yield {**job.what, **row}


def main(arguments: list[str] | None = None) -> int:
    ways = [way for way in WAYS if way != "as written"]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compilers", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=list(SIZES), help="340M on a GPU, else 130M")
    parser.add_argument("--mixers", default="gla,gated_deltanet,mamba2")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--ways", default=",".join(ways), help="some of: %(default)s; a process may die of one of a compiler's")
    parser.add_argument("--rows", type=positive, default=1)
    parser.add_argument("--context", type=positive, default=64, help="tokens read before")
    parser.add_argument("--steps", type=positive, default=16, help="in a turn")
    parser.add_argument("--turns", type=positive, default=7)
    parser.add_argument("--at-once", action="store_true", help="make the steps of all models at once, in a process each; then measure")
    parser.add_argument("--quick", action="store_true", help="a tiny model, nothing kept")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file, or a folder for compilers-CARD.json")
    options = parser.parse_args(arguments)
    from linattn.bench.files import command
    from linattn.bench.gpu.record import Record

    chosen = options.ways.split(",")
    if unknown := [way for way in chosen if way not in ways]:
        parser.exit(2, f"{parser.prog}: --ways has {unknown[0]}, which is not among {', '.join(ways)}\n")
    facts, path = destination(parser, "compilers", options.device, options.out)
    size = "tiny" if options.quick else options.size or ("340M" if options.device == "cuda" else "130M")
    jobs = [
        Job(mixer, size, options.device, dtype, options.rows, options.context, tuple(chosen))
        for dtype in options.dtypes.split(",")
        for mixer in options.mixers.split(",")
    ]
    with Record(None if options.quick else path, KEY, facts) as record:
        record.body["runs"][-1]["command"] = command("python -m benchmarks.compilers", arguments or sys.argv[1:])
        for row in (at_once if options.at_once else in_turn)(jobs, options.steps, options.turns):
            record.add(row)
            print(line(row), flush=True)
    print("nothing kept" if options.quick else path)
    return 0


def line(row: Row) -> str:
    """Format a row."""
    what = f"{row['model']} {row['size']} {row['dtype']}, {row['rows']} rows, {row['way']:15}"
    if "failed" in row:
        return f"{what}: {row['failed']}"
    return f"{what}: {row['step_ms']:.3f} ms, made in {row['made_s']:.1f} s, {row['equal']} of {row['of']} tokens equal"


if __name__ == "__main__":
    sys.exit(main())
