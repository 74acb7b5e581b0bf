"""Compile the cases for the cards and write the results: ``python -m tests.targets --targets sm_80,sm_100 --cases attention``.

``--triton FOLDER`` uses another Triton: the result of ``pip download --no-deps triton==3.9.0``, unpacked there.
Existing cases of a file are replaced, others stay, so that several runs fill one file.

``--fingerprint FILE`` writes fingerprints of the kernels for Hopper instead, see fingerprint.py; with ``--against FILE``, from before a
change, it fails if the PTX of a kernel differs. ``--ir`` compares Triton's simplified IR instead, in a tenth of the time. Equal IR
gives equal PTX; different IR may too (values may be renamed), see its .ttgir. ``--merge FILE ...`` only adds other machines' results.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUT = ROOT / "benchmarks" / "results" / "targets.json"


def main() -> int:
    given = _arguments()
    if given.merge:
        from tests.targets.record import merge

        print(merge(given.out, given.merge))
        return 0
    if given.triton:
        sys.path.insert(0, str(Path(given.triton).resolve()))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # children are forked, which threads do not survive
    import torch
    import triton

    torch.set_num_threads(1)
    if given.fingerprint:
        return _fingerprint(given)
    from tests.targets.cards import CARDS
    from tests.targets.cases import CASES
    from tests.targets.machine import Machine
    from tests.targets.record import Record

    names = [name for name in CASES if re.search(given.cases, name)]
    record = Record.read(given.out, triton.__version__)
    facts = {
        "command": "python -m tests.targets", "torch": torch.__version__, "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}", "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }  # fmt: skip
    end, failed = time.monotonic() + 60 * given.minutes, 0
    for target in given.targets.split(",") if given.targets else CARDS:
        machine = Machine(CARDS[target], given.jobs)
        for name in names:
            if time.monotonic() > end:
                print("out of time", flush=True)
                break
            if given.missing and record.has(target, name):
                continue
            start = time.monotonic()
            with machine():
                CASES[name]()
                kernels = machine.kernels()
            record.add(target, name, kernels)
            wrong = [reason for kernel in kernels if (reason := kernel.refusal(CARDS[target]) or record.spilled(target, name, kernel))]
            failed += bool(wrong)
            worst = max((k.spills for k in kernels), default=0)
            shared = max((k.shared for k in kernels), default=0)
            said = "; ".join(wrong) or f"{len(kernels)} kernels, at most {shared} bytes shared, {worst} spilled"
            print(f"{target} {name}: {said} ({time.monotonic() - start:.0f} s)", flush=True)
            record.write(given.out, **facts)
    return int(failed > 0)


def _fingerprint(given: argparse.Namespace) -> int:
    from tests.targets.fingerprint import Memo, differing, lines

    found = []
    with given.fingerprint.open("w") as file:
        for line in lines(given.cases, Memo(given.memo or given.fingerprint.with_suffix(".memo"), given.ir), given.jobs):
            found.append(line)
            print(line, file=file, flush=True)
    field = "ir" if given.ir else "ptx"
    others = differing(given.against.read_text(), found, field) if given.against else [line for line in found if f" {field}=" not in line]
    for line in others:
        print(line[:300])
    print(f"{len(found)} kernels, {len(others)} that differ or do not compile")
    return int(bool(others))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.targets", description=__doc__)
    parser.add_argument("--targets", default="", help="comma-separated, as sm_80,sm_100; all of them if left out")
    parser.add_argument("--cases", default="", help="a regular expression that names of cases have to match")
    parser.add_argument("--triton", default=os.environ.get("LINATTN_TARGETS_TRITON", ""), help="a folder with another Triton")
    parser.add_argument("--out", type=Path, default=OUT, help="the file of results")
    parser.add_argument("--jobs", type=int, default=1, help="kernels compiled at a time")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after so many minutes")
    parser.add_argument("--fingerprint", type=Path, help="write what the kernels for Hopper compile to into this file")
    parser.add_argument("--against", type=Path, help="such a file, with which --fingerprint compares")
    parser.add_argument("--ir", action="store_true", help="compare Triton's IR, and compile no further")
    parser.add_argument("--memo", type=Path, help="a folder for what --fingerprint has compiled; beside its file if left out")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="add these files of results to --out, compile nothing")
    parser.add_argument("--missing", action="store_true", help="only what the file does not have of this Triton")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
