"""Program ``python -m benchmarks.revisions TREE``: operations of the revision in TREE and of this one, in turns, each in a CUDA graph.

TREE is the root of another checkout, such as ``git worktree add TREE REVISION`` makes. Each revision runs in a process of its own.
``--decays`` measures with these mean decays of a token in place of the usual one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks import RESULTS, destination
from linattn.bench.gpu.cases import PASSES, SHAPES

FAMILIES = ("none", "head", "channel", "delta", "gated_delta", "kda", "erase")
TURNS, SECONDS = 3, 0.08
KEY = ("family", "shape", "mode", "decay")
# Compiles the cases of its argument, answers with "ready", then with the milliseconds of each case that it reads.
CHILD = """
import sys, torch
from dataclasses import replace
from linattn.bench.gpu import libraries, measure, timing
from linattn.bench.gpu.cases import Case, SHAPES, tensors

def steps(name):
    family, shape, mode, decay = name.split("/")
    case = Case.of(family, SHAPES[int(shape)], mode)
    case = replace(case, decay=float(decay)) if decay else case
    run = libraries.LIBRARIES["linattn"](case)
    return [measure._step(run, tensors(case, "cuda", seed), mode) for seed in range(2)]

for name in filter(None, sys.argv[1].split(",")):
    timing.milliseconds(steps(name), "cuda", 0.01)
    torch.cuda.empty_cache()
print("ready", flush=True)
last, made = None, None
for line in sys.stdin:
    if line.strip() != last:
        last, made = line.strip(), None
        torch.cuda.empty_cache()
        made = steps(last)
    print(timing.graph_milliseconds(made, float(sys.argv[2])), flush=True)
"""


def child(tree: Path, names: list[str], pipe: int | None) -> subprocess.Popen[str]:
    """Process of the revision in ``tree``, with a ``pipe`` for its input and output, or without any."""
    command = [sys.executable, "-c", CHILD, ",".join(names), str(SECONDS)]
    end = subprocess.DEVNULL if pipe is None else pipe
    return subprocess.Popen(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, stdin=end, stdout=end, text=True)


def milliseconds(process: subprocess.Popen[str], name: str) -> float:
    assert process.stdin
    assert process.stdout
    process.stdin.write(name + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.revisions", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tree", type=Path, help="root of the other revision")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--decays", nargs="+", type=float, default=[""], help="mean decays, for families with a decay per channel")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file, or a folder for revisions-CARD.json or decays-CARD.json")
    given = parser.parse_args(arguments)
    if not (given.tree / "linattn").is_dir():
        parser.error(f"{given.tree} has no folder linattn")
    from linattn.bench.files import command
    from linattn.bench.gpu.record import Record

    facts, path = destination(parser, "revisions" if given.decays == [""] else "decays", "cuda", given.out)
    names = [
        f"{family}/{shape}/{mode}/{decay}" for family in given.families for decay in given.decays for shape in (0, 1) for mode in PASSES
    ]
    trees = [given.tree.absolute(), Path(__file__).parents[1]]
    cores = max((os.cpu_count() or 2) // 2, 1)
    for process in [child(tree, names[i::cores], None) for tree in trees for i in range(min(cores, 4))]:  # compile on several cores
        process.wait()
    processes = [child(tree, names, subprocess.PIPE) for tree in trees]
    for process in processes:
        assert process.stdout
        if process.stdout.readline().strip() != "ready":
            parser.exit(1, "a revision could not run the operations; its error is above\n")
    with Record(path, KEY, facts) as record:
        record.body["runs"][-1]["command"] = command("python -m benchmarks.revisions", arguments or sys.argv[1:])
        for name in names:
            times = [[milliseconds(process, name) for process in processes] for _ in range(TURNS)]
            before, after = (statistics.median(turn) for turn in zip(*times, strict=True))
            family, shape, mode, decay = name.split("/")
            case = {"family": family, "shape": str(SHAPES[int(shape)]), "mode": mode, "decay": float(decay) if decay else None}
            record.add({**case, "before_ms": before, "after_ms": after})
            print(f"{name}: {before:.3f} and {after:.3f} ms", flush=True)
    for process in processes:
        assert process.stdin
        process.stdin.close()
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
