"""First hour of a user, timed: an installation, then the front page, Start and the guides followed literally, then wrong turns.

``python3 -m benchmarks.first_hour --environment FOLDER --wheel FILE``: FOLDER gets a fresh environment, in which pip installs
torch and the wheel (or source distribution) with its extra ``train``. The blocks of each page run in their order in an empty folder:
Python in one process, as in an interactive session, and the commands of ``linattn`` and ``torchrun`` at the sizes that stand there, or
with ``--small`` at sizes that take seconds. The program itself needs nothing but Python, so that it also runs in a container
(docs/first_hour.md). Rows of steps that are not run again are kept; ``--take`` adds those of a record from another machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from benchmarks import RESULTS

ROOT = Path(__file__).parents[1]
GUIDES = ["op", "own_mixer", "train", "scale", "convert", "serve", "quantise", "hugging_face", "states", "migrate"]
PAGES = ["README.md", "docs/start.md", *(f"docs/guides/{name}.md" for name in GUIDES)]
INSTALLATIONS = ("installation", "installation from source", "installation from source, no compiler")
STARTED = {"linattn": "linattn", "torchrun": "torch.distributed.run"}  # a program, and the module that is the same
# Keeps one namespace: reads a block as a line of JSON, runs it, answers with the line DONE on stdout.
SESSION = """
import json, sys, traceback
space = {"__name__": "__main__"}
for line in sys.stdin:
    try:
        exec(compile(json.loads(line), "<page>", "exec"), space)
        done = "ran"
    except BaseException:
        traceback.print_exc()
        done = "failed"
    print("\\nDONE", done, flush=True)
"""
WITHOUT = "import sys; sys.modules['{}'] = None; from linattn.cli.main import main; sys.exit(main({!r}))"

# Input and expected one-line answer, by the kind of mistake.
TURNS = {
    "a name": {
        "linattn show gal": r"did you mean 'gla'\?",
        "linattn trian": r"Did you mean 'train'.*",
        "linattn frobnicate": r"; see linattn --help",
        "linattn show": r"; see linattn show --help",
        "linattn train --setps 3": r"Possible options: .*--steps.*\)",
        "linattn train --mixer gal --out x": r"did you mean 'gla'\?",
        "linattn train --mixer-option gla.haeds=3 --out x": r"did you mean 'heads'\?",
        "linattn draw gla --what cells -o x.svg": r"Invalid value for '--what': 'cells' is not one of 'cell', .*",
        "linattn.linear_atention": r"did you mean 'linear_attention'\?",
        "linattn.mixers.create('gla', dim=64, haeds=4)": r"did you mean 'heads'\?",
    },
    "a value": {
        "linattn train --steps many --out x": r"a valid integer.*, but came as 'many'",
        "linattn train --dim 33 --out x": r"must be a positive multiple of its heads, but came as 33 with 4 heads",
        "linattn.linear_attention(q, q, q, form='chunked')": r"form must be one of .*, but came as 'chunked'",
    },
    "a shape": {"linattn.linear_attention(q, q, q, decay=-torch.rand(1, 9, 2))": r"transpose\(1, 2\)"},
    "a file": {
        "linattn train --text nothing.txt --out x": r"nothing.txt does not exist; name text files, .*",
        "linattn generate nothing --prompt a": r"nothing does not exist; give the folder of a run .*",
        "linattn export nothing out --to llama": r"nothing does not exist; give the folder of a run .*",
    },
    "no GPU": {"linattn train --device cuda:9 --out x": r"is not available: .*"},
    "no network": {
        "linattn generate organisation/model --prompt a": r"does not exist; .* hf download organisation/model --local-dir FOLDER, .*",
        "linattn.load('organisation/model')": r"organisation/model does not exist; .*hf download organisation/model .*",
    },
    "no extra": {"linattn train --steps 1 --out x": r"transformers is not installed; .*pip install 'transformers.*"},
    "no compiler": {"python -m linattn.ops.cpu.build": r"the portable form will be used on the CPU: there is no C\+\+ compiler.*"},
}
BEFORE = "import torch, linattn\nq = torch.randn(1, 2, 9, 4)\n"  # the calls among them


SMALL = {  # options added to a page's command, so that it takes seconds
    "train": "--steps 2 --dim 32 --layers 2 --context 32",
    "convert": "--tokens1 2048 --tokens2 2048 --context 32 --batch-size 4",
    "evaluate": "--tokens 2000 --context 64 --lengths 512 --samples 1 --decode 0",
    "generate": "--max-new-tokens 4",
}


def small(words: list[str]) -> list[str]:
    """A command at a size that takes seconds; None for a comparison, which takes minutes at any size."""
    if words[0] == "compare":
        return []
    name = words[words.index("linattn") + 1] if "linattn" in words else words[0]
    return [*words, *("--steps 3" if "--resume" in words else SMALL.get(name, "")).split()]


class User:
    """Person with an environment and nothing else: no compiler unless ``compiler``, and nothing of this process's own Python."""

    def __init__(self, python: Path, folder: Path, *, compiler: bool = False) -> None:
        self.python, self.folder = python, folder
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.environment = own if compiler else own | {"CXX": "no-such-compiler"}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.python), *words],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip

    def answer(self, typed: str, kind: str) -> str:
        """The answer to a wrong command or call."""
        if kind == "no extra":
            done = self.run("-c", WITHOUT.format("transformers", shlex.split(typed)[1:]))
        elif typed.startswith(("linattn ", "python ")):
            words = shlex.split(typed)
            done = self.run(*(words[1:] if words[0] == "python" else ["-m", *words]))
        else:
            done = self.run("-c", f"{BEFORE}try: {typed}\nexcept Exception as error: print(str(error), file=__import__('sys').stderr)")
        return done.stderr.strip()


def remains(said: str, language: str) -> str:
    """Relevant part of an error stream: of a command, which prints progress there, warnings and errors; else all but progress bars."""
    lines = re.sub(r".*\d+/\d+ \[.*", "", said.replace("\r", "\n")).splitlines()
    wanted = "W(arning|ARNING)|E(rror|RROR)|Traceback" if language == "sh" else ""
    return "\n".join(line for line in lines if line.strip() and re.search(wanted, line))


def blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    """Line, language and text of each program: whole blocks of Python, single shell commands."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(python|sh)\n(.*?)^```$", text, re.M | re.S):
        line = text.count("\n", 0, found.start(2)) + 1
        if found[1] == "python":
            yield line, "python", found[2]
        else:
            commands = re.sub(r"\\\n\s*", " ", found[2]).splitlines()  # one command over several lines counts as one
            yield from ((line + i, "sh", one) for i, one in enumerate(commands) if shlex.split(one, comments=True))


def followed(command: str) -> bool:
    """False for pip, which the installation measures, and make, which needs a clone."""
    return shlex.split(command, comments=True)[0] in STARTED


def follow(user: User, page: Path, shorten: Callable[[list[str]], list[str]] = list) -> Iterator[dict]:
    """Row for each block of ``page``; ``shorten`` may change a command's words, or skip the command by returning none."""
    with tempfile.TemporaryFile("w+") as said, session(user, said) as python:
        assert python.stdin is not None
        assert python.stdout is not None
        for line, language, text in blocks(page):
            start = time.perf_counter()
            if language == "python":
                before = said.tell()
                python.stdin.write(json.dumps(text) + "\n")
                python.stdin.flush()
                ended = next((one.split()[1] for one in python.stdout if one.startswith("DONE ")), "failed")
                said.seek(before)
                errors, shown = said.read(), text.strip().splitlines()[0]
            else:
                program, *words = shlex.split(text, comments=True)
                if not followed(text) or not (words := shorten(words)):
                    continue
                done = user.run("-m", STARTED[program], *words)
                ended, errors, shown = ("ran" if done.returncode == 0 else "failed"), done.stderr, shlex.join([program, *words])
            seconds = round(time.perf_counter() - start, 1)
            yield {
                "line": line,
                "language": language,
                "first": shown,
                "seconds": seconds,
                "ended": ended,
                "said": remains(errors, language),
            }


def session(user: User, said: IO[str]) -> subprocess.Popen[str]:
    """Python process of ``user`` that runs the blocks it is sent; ``said`` gets its error stream."""
    return subprocess.Popen(
        [str(user.python), "-c", SESSION],
        cwd=user.folder, env=user.environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said,
    )  # fmt: skip


def supplied(folder: Path) -> None:
    """Files that the guides expect from the reader: a text and a collection of documents."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (folder / "text.txt").write_text(text * 3, encoding="utf-8")
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(200)), encoding="utf-8")


def installed(environment: Path, wheel: Path, torch: str) -> Iterator[dict]:
    """Row for each step of an installation in ``environment``, which is made anew."""
    commands = [["pip", "install", torch], ["pip", "install", f"{wheel}[train]"], ["pip", "check"]]
    start = time.perf_counter()
    venv.create(environment, with_pip=True, clear=True)
    yield {"first": "python -m venv", "seconds": round(time.perf_counter() - start, 1), "ended": "ran", "said": ""}
    for words in commands:
        start = time.perf_counter()
        done = subprocess.run([environment / "bin/python", "-m", *words], capture_output=True, text=True, check=False)
        seconds, ended = round(time.perf_counter() - start, 1), "ran" if done.returncode == 0 else "failed"
        said = remains(done.stderr, "sh").replace(str(wheel.parent), "dist")
        yield {"first": " ".join(words).replace(str(wheel.parent), "dist"), "seconds": seconds, "ended": ended, "said": said}


def turns(user: User) -> Iterator[dict]:
    """Row for each wrong turn: the input and the answer."""
    for kind, typed in TURNS.items():
        for words in typed:
            start = time.perf_counter()
            said = user.answer(words, kind)
            seconds = round(time.perf_counter() - start, 1)
            yield {"kind": kind, "typed": words, "said": said, "seconds": seconds}


def right(said: str, wanted: str) -> bool:
    """True if an answer is one line that ends as expected."""
    return re.fullmatch(f".*{wanted}", said) is not None


VERSIONS = """
import json, importlib.metadata as m
from linattn.report.machine import machine
print(json.dumps({**machine(), **{n: m.version(n) for n in ("linattn", "torch", "transformers")}}))
"""


def surroundings(compiler: bool) -> dict:
    """Date, distribution, C++ compiler that a page or an installation can find, and the load of the machine before it."""
    found = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None) if compiler else None
    system = platform.freedesktop_os_release()["PRETTY_NAME"] if sys.platform == "linux" else platform.platform()
    return {"date": today(), "distribution": system, "compiler": found, "load": round(os.getloadavg()[0], 1)}


def processor() -> float:
    """Processor seconds of all processes that have been started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_hour", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--environment", type=Path, help="folder of the environment; --wheel makes it anew")
    parser.add_argument("--wheel", type=Path, help="wheel or source distribution to install first")
    parser.add_argument("--torch", default="torch", help="what pip installs first, such as torch==2.13.0")
    parser.add_argument("--steps", default=",".join((*PAGES, "turns")), help="pages, and turns for the wrong turns; empty for none")
    parser.add_argument("--compiler", action="store_true", help="let the pages find a C++ compiler that is there")
    parser.add_argument("--small", action="store_true", help="commands at sizes that take seconds, without linattn compare")
    parser.add_argument("--take", type=Path, nargs="*", default=[], help="records whose steps are added; nothing runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "first-hour.json")
    options = parser.parse_args(arguments)
    steps = [step for step in options.steps.split(",") if step]
    if unknown := [step for step in steps if step not in (*PAGES, "turns")]:
        parser.error(f"--steps must be among {', '.join(PAGES)} and turns, but has {unknown[0]}")
    body = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {"steps": {}}
    for record in options.take:
        for step, found in json.loads(record.read_text(encoding="utf-8"))["steps"].items():
            rows = [row | {"said": remains(row["said"], row.get("language", ""))} for row in found["rows"]]
            keep(body, options.out, step, found | {"rows": rows})
    if options.take:
        return 0
    if options.environment is None:
        parser.error("--environment names the folder of the environment")
    python = options.environment.absolute() / "bin/python"
    if options.wheel:
        facts, before = surroundings(compiler=True), processor()
        rows = list(installed(options.environment, options.wheel.absolute(), options.torch))
        facts |= {"processor_seconds": round(processor() - before)}
        keep(body, options.out, installation(options.wheel, facts["compiler"]), facts | {"rows": rows})
    for step in steps:
        with tempfile.TemporaryDirectory() as folder:
            user = User(python, Path(folder), compiler=options.compiler)
            supplied(user.folder)
            facts, before = {**surroundings(options.compiler), "small": options.small}, processor()
            rows = list(turns(user) if step == "turns" else follow(user, ROOT / step, small if options.small else list))
            facts |= {"processor_seconds": round(processor() - before), **json.loads(user.run("-c", VERSIONS).stdout)}
        keep(body, options.out, step, facts | {"rows": rows})
        for row in rows:
            expected = (
                right(row["said"], TURNS[row["kind"]][row["typed"]]) if step == "turns" else row["ended"] == "ran" and not row["said"]
            )
            if not expected:
                print(f"{step}: {row}", file=sys.stderr)
        print(f"{step}: {sum(row['seconds'] for row in rows):.0f} s")
    return 0


def installation(wheel: Path, compiler: str | None) -> str:
    """Name of the step that installs ``wheel``, which a source distribution compiles where there is a compiler."""
    if wheel.suffix == ".whl":
        return INSTALLATIONS[0]
    return INSTALLATIONS[1 if compiler else 2]


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def keep(body: dict, out: Path, step: str, found: dict) -> None:
    """Write what was ``found`` in one step beside the others."""
    order = [*INSTALLATIONS, *PAGES, "turns"]
    body |= {"schema": "linattn.first_hour", "command": "python3 -m benchmarks.first_hour --environment FOLDER --wheel FILE"}
    body["steps"] = {**body["steps"], step: found}
    body["steps"] = {name: body["steps"][name] for name in order if name in body["steps"]}
    out.write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
