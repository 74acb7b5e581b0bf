"""Python programs in separate processes, forked from one with torch imported to save seconds.

    python -m tests.programs

reads requests from standard input, a line of JSON each, runs the programs of each concurrently in children, and answers with their exit
statuses. linattn, transformers and triton are not imported before the fork. Tests of process start, or with variables that torch reads
on import, need a new process.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SECONDS = 300  # of a program, after which it is killed


class Programs:
    """The process with torch imported, started for the first program; must be closed."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def run(self, folder: Path, program: Path, *arguments: object) -> str:
        """Output of ``python -W error program arguments`` in ``folder``; it must succeed."""
        done = self.python(str(program), *arguments, cwd=folder, strict=True)
        assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def python(self, *words: object, **how: Any) -> subprocess.CompletedProcess[str]:
        """Run Python with ``words`` as :func:`subprocess.run` would, its output captured as text; ``how`` are those of :meth:`together`."""
        return self.together([words], **how)[0]

    def together(
        self, programs: list[tuple[object, ...]], *, cwd: Path = ROOT, env: dict[str, str] | None = None, strict: bool = False,
        seconds: int = SECONDS,
    ) -> list[subprocess.CompletedProcess[str]]:  # fmt: skip
        """Run Python concurrently with each of the ``programs``, words such as ``-c CODE``, ``-m MODULE`` or a file with arguments.

        Each has the environment ``env``, this process's if None. With ``strict``, warnings are errors.
        """
        if self.process is None:
            words = [sys.executable, "-m", "tests.programs"]
            self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdin is not None and self.process.stdout is not None
        with tempfile.TemporaryDirectory() as kept:
            request = {"programs": [list(map(str, words)) for words in programs], "kept": kept, "folder": str(cwd)}
            request |= {"environment": dict(os.environ if env is None else env), "strict": strict, "seconds": seconds}
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            statuses = json.loads(self.process.stdout.readline())
            said = [[_said(kept, rank, stream) for stream in ("stdout", "stderr")] for rank in range(len(programs))]
        return [subprocess.CompletedProcess(words, status, *texts) for words, status, texts in zip(programs, statuses, said, strict=True)]

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()


def _said(kept: str, rank: int, stream: str) -> str:
    return Path(kept, f"{rank}.{stream}").read_text(encoding="utf-8", errors="replace")


def main() -> None:
    import torch._dynamo  # transformers takes most of its time to import from these two
    import torch.distributed.tensor  # noqa: F401

    for line in sys.stdin:
        request, children = json.loads(line), []
        for rank, words in enumerate(request.pop("programs")):
            child = os.fork()
            if not child:
                os._exit(_status_of(words, f"{request['kept']}/{rank}", **request))
            children.append(child)
        print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children], flush=True)


def _status_of(words: list[str], said: str, *, kept: str, folder: str, environment: dict[str, str], strict: bool, seconds: int) -> int:
    """Run ``words`` in this process as a new Python would and return its exit status."""
    write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for descriptor, (path, how) in enumerate([(os.devnull, os.O_RDONLY), (f"{said}.stdout", write), (f"{said}.stderr", write)]):
        os.dup2(os.open(path, how, 0o600), descriptor)
    signal.alarm(seconds)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = environment.get("PYTHONPATH", "").split(os.pathsep) if "PYTHONPATH" in environment else []
    if strict:
        warnings.resetwarnings()
        warnings.simplefilter("error")
    status = _outcome(words)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _outcome(words: list[str]) -> int:
    how = words[0] if words[0] in ("-c", "-m") else None
    what, *arguments = words[1:] if how else words
    sys.argv = [how or what, *arguments]
    sys.path[0] = os.getcwd() if how else str(Path(what).parent)
    try:
        if how == "-c":
            main = sys.modules["__main__"] = type(sys)("__main__")
            exec(compile(what, "<string>", "exec"), vars(main))
        elif how == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(what, run_name="__main__")
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
