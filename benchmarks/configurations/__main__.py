"""Program that makes or checks the GPU kernels' table of configurations: ``python -m benchmarks.configurations --write``.

Every row of linattn/ops/triton/table.json is run as it stands, and then, unless ``--check`` asks for no more, with its neighbours:
one block twice or half as large, other warps, another depth of the pipeline. Each runs in another process, where a crash or a hang
hurts nobody else, and is held in all values and gradients to the limits of the tests against the portable form in float64. What is
right is timed, alone on the device, by the kernels that the row configures. With ``--write`` the fastest takes the row, if it is 3 %
faster than what was there and right in every call that the row serves. The conditions of the rows stay as they are.

The rows serve devices and sizes without kernels of Hopper's own, so those are switched off here. Measures what matters most first;
a row that ``--seconds`` leaves no time for stays as it is, and the log says so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

from benchmarks import RESULTS, destination, positive
from benchmarks.configurations.calls import DEVICE
from benchmarks.configurations.search import SHARES, Search, name_of, wanted_places
from linattn.ops.triton import table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.configurations", description=__doc__.split("\n")[0])
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--check", action="store_true", help="only check the rows as they are, each in every call that it serves")
    how.add_argument("--write", action="store_true", help="write the fastest back into the table; without it they are only logged")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="a kind (forward) or a row (forward:0); all of them without")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so long; rows that were not reached stay")
    parser.add_argument("--workers", type=positive, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--table", type=Path, default=table.FILE, help="the table to read, and with --write to write")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file for the log, or a folder for configurations-CARD.json")
    options = parser.parse_args(arguments)
    machine, path = destination(parser, "configurations", DEVICE, options.out)
    rows = table.read(options.table)
    try:
        places = wanted_places(rows, options.rows)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    search = Search(rows, places, options.workers, options.seconds)
    search.check(1.0 if options.check else SHARES[0])
    if not options.check:
        search.try_neighbours()
        search.time()
        search.choose()
    if options.write:
        table.write(search.new_rows(), options.table)
    return report(search, machine, path)


def report(search: Search, machine: dict, path: Path) -> int:
    """Write the log, and print its summary."""
    from linattn.bench.files import command
    from linattn.report.folder import write_text

    body = {
        "schema": "linattn.configurations", **machine, "command": command("python -m benchmarks.configurations", sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"), "seconds": round(search.passed), "rows": search.log(),
    }  # fmt: skip
    write_text(path, json.dumps(body, indent=1) + "\n")
    for place in search.places:
        now, new = search.present[place], search.chosen[place]
        state = f"{len(now.ratios)} of {len(search.calls[place])} calls right" if not now.failures else f"{len(now.failures)} calls wrong"
        times = "" if now.ms is None else f", {now.ms:.4f} ms"
        change = f" -> {new.config} {new.ms:.4f} ms" if new is not now else ""
        print(f"  {name_of(place):14} {now.config}: {state}{times}{change}")
    failed = search.failed()
    print("\n".join(failed), end="\n" * bool(failed))
    print(f"{len(search.places)} rows, {len(failed)} complaints, {search.passed:.0f} s: {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
