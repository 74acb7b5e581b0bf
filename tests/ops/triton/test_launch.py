"""Compilation before the first launch."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from linattn.ops.triton import launch, record


class Kernel:
    """Kernel compiled in a pool, as in Triton's async mode; cached the second time."""

    def __init__(self, pool, compiler):
        self.placeholder = SimpleNamespace(future=pool.submit(compiler))

    def warmup(self, *_, grid, **options):
        return self.placeholder


def test_launchers_are_built_where_kernels_are_compiled_once_each(monkeypatch):
    built = []
    monkeypatch.setattr(record, "driver", SimpleNamespace(active=SimpleNamespace(launcher_cls=lambda *of: built.append(of))))
    done = SimpleNamespace(src="signature", metadata="metadata")

    def fails():
        raise RuntimeError("of the compiler")

    compiler = launch.Compiler(torch.zeros(1), ())
    there = SimpleNamespace(warmup=lambda *_, grid, **options: done)
    with ThreadPoolExecutor(2) as pool:
        kernels = [Kernel(pool, lambda: done), Kernel(pool, fails)]
        for kernel in (*kernels, *kernels, there):
            compiler.launch(kernel, (1, 1, 1), (), ())
    assert built == [("signature", "metadata")]
