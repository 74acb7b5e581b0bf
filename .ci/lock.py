"""Write requirements.lock: everything the suite and the demo need besides torch, with hashes, for Python 3.11 and 3.12.

    python .ci/lock.py python3.11 python3.12 [--upgrade]

Each interpreter resolves pyproject.toml on its own (pip-tools in a venv that is thrown away); what they agree on is written
once, what they don't gets a marker. Pins of the present lock are kept unless ``--upgrade``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
TORCH = "torch==2.13.0"  # the Makefile installs it first, from an index of the user's choice; it is not in the lock
LEFT_OUT = re.compile(r"(torch|linattn|pip|(nvidia|cuda)-[\w-]+)==")
APART = re.compile(r"triton\b")  # the torch of some indexes wants another version than the kernels are tested with
HEADER = """\
# Everything besides torch that `make test` and `make demo` install, for Python 3.11 and 3.12. Written by `make lock`.
"""


def requirements() -> list[str]:
    """Dependencies of the package and of its `test` extra, with references to its own extras resolved."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]

    def flat(lines: list[str]) -> list[str]:
        out = []
        for line in lines:
            own = re.fullmatch(r"linattn\[(.+)\]", line)
            out += [x for name in own[1].split(",") for x in flat(extras[name])] if own else [line]
        return out

    return [TORCH, *project["dependencies"], *flat(extras["test"])]


def resolve(python: str, folder: Path, upgrade: bool) -> tuple[str, dict[str, str]]:
    """The version of ``python`` (3.11) and, for each ``name==version``, its line with hashes."""
    venv, source, out = folder / "venv", folder / "requirements.in", folder / "out.txt"
    subprocess.run([python, "-m", "venv", venv], check=True)
    run = [venv / "bin" / "python", "-m"]
    subprocess.run([*run, "pip", "install", "--quiet", "pip-tools"], check=True)
    options = ["--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "--no-emit-trusted-host"]
    unsafe = ["--unsafe-package", "torch", "--unsafe-package", "pip", "--resolver", "backtracking", "--strip-extras", "--quiet"]
    lines: dict[str, str] = {}
    for apart in (False, True):
        source.write_text("\n".join(line for line in requirements() if bool(APART.match(line)) == apart) + "\n")
        if LOCK.exists() and not upgrade:
            shutil.copy(LOCK, out)
        subprocess.run([*run, "piptools", "compile", *options, *unsafe, "--output-file", out, source], check=True, cwd=folder)
        lines |= {name: block for name, block in blocks(out.read_text()).items() if bool(APART.match(name)) == apart}
    tag = subprocess.check_output([*run[:1], "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True).strip()
    return tag, lines


def blocks(text: str) -> dict[str, str]:
    """``name==version`` (and its marker) of each requirement, with the whole of its lines."""
    found = re.findall(r"^[A-Za-z0-9][^\n]*(?:\n    --hash[^\n]*)*", text, re.M)
    return {block.split("\\\n")[0].strip(): block for block in found if not LEFT_OUT.match(block)}


def main() -> None:
    """Resolve for each interpreter, merge, write."""
    pythons, upgrade = [a for a in sys.argv[1:] if a != "--upgrade"], "--upgrade" in sys.argv
    resolved = {}
    for python in pythons:
        with tempfile.TemporaryDirectory() as folder:
            tag, lines = resolve(python, Path(folder), upgrade)
            resolved[tag] = lines
    merged = []
    for key in sorted({key for lines in resolved.values() for key in lines}, key=str.lower):
        tags = [tag for tag, lines in resolved.items() if key in lines]
        block = resolved[tags[0]][key]
        if len(tags) < len(resolved):
            newest = list(resolved)[-1]  # serves later Pythons too
            test = " or ".join(f'python_version {">=" if tag == newest else "=="} "{tag}"' for tag in tags)
            head, joint = key, " and " if ";" in key else " ; "
            block = block.replace(head, f"{head}{joint}{f'({test})' if ' or ' in test else test}", 1)
        merged.append(block)
    LOCK.write_text(HEADER + "\n".join(merged) + "\n")


if __name__ == "__main__":
    main()
