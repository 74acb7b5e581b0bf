"""Python programs, each in a process of its own that is forked from one with torch imported, which takes seconds.

    python -m tests.programs

reads requests from standard input, a line of JSON each, runs the program of each in a child and answers with its exit status.
Nothing of linattn or transformers is imported before the fork: a program must import what it uses.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Programs:
    """The process with torch in it, started for the first program; to be closed."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def run(self, folder: Path, program: Path, *arguments: object) -> str:
        """What ``python -W error program arguments`` prints in ``folder``; it must succeed."""
        if self.process is None:
            words = [sys.executable, "-m", "tests.programs"]
            self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdin is not None and self.process.stdout is not None
        said, errors = folder / ".stdout", folder / ".stderr"
        request = {"program": str(program), "arguments": list(map(str, arguments)), "folder": str(folder)}
        request |= {"stdout": str(said), "stderr": str(errors)}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        status = self.process.stdout.readline()
        assert status == "0\n", f"status {status}{said.read_text(encoding='utf-8')}{errors.read_text(encoding='utf-8')}"
        return said.read_text(encoding="utf-8")

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()


def main() -> None:
    import torch._dynamo  # transformers takes most of its time to import from these two
    import torch.distributed.tensor  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if not child:
            os._exit(_status_of(**json.loads(line)))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _status_of(program: str, arguments: list[str], folder: str, stdout: str, stderr: str) -> int:
    """Run ``program`` in this process and return its exit status."""
    write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for descriptor, (path, how) in enumerate([(os.devnull, os.O_RDONLY), (stdout, write), (stderr, write)]):
        os.dup2(os.open(path, how, 0o600), descriptor)
    os.chdir(folder)
    sys.argv, sys.path[0] = [program, *arguments], str(Path(program).parent)
    warnings.resetwarnings()
    warnings.simplefilter("error")
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    main()
