"""`import linattn` is cheap, and works on a machine with nothing but torch and numpy."""

import ast
import os
import subprocess
import sys
from pathlib import Path

HEAVY = "transformers safetensors typer click rich triton tokenizers accelerate"

TIMED = """
import time, torch
start = time.process_time()
import linattn
linattn.linear_attention
print(time.process_time() - start)
"""

LOADED = f"""
import sys, linattn
assert "torch" not in sys.modules, "import linattn alone should not even load torch"
linattn.linear_attention, linattn.mixers.available()
print(*[name for name in "{HEAVY}".split() if name in sys.modules])
"""

CALLED = """
import sys, torch, linattn
from importlib.util import find_spec
q, k, v = torch.randn(3, 1, 300, 2, 16, requires_grad=True).unbind(0)
linattn.linear_attention(q, k, v, decay=-torch.rand(1, 300, 2)).sum().backward()
x = torch.randn(1, 300, 32)
linattn.mixers.create("gla", dim=32)(x)[0].sum().backward()
if find_spec("triton"):
    import linattn.ops.triton.linear_attention
print(*[name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""

BARE = """
import importlib.metadata as metadata, re, sys

def closure(name, seen):
    if name not in seen:
        seen.add(name)
        for line in metadata.requires(name) or []:
            if "extra" not in line:
                try:
                    closure(re.match(r"[\\w.-]+", line)[0].lower().replace("_", "-"), seen)
                except metadata.PackageNotFoundError:
                    pass
    return seen

allowed = closure("torch", {"numpy", "linattn"})
blocked = {top for top, dists in metadata.packages_distributions().items() if not allowed & {d.lower().replace("_", "-") for d in dists}}
blocked -= set(sys.stdlib_module_names)

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in blocked else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
assert {"transformers", "safetensors", "typer", "rich", "pytest"} <= blocked, blocked
import linattn, torch

q, k, v = torch.randn(3, 1, 5, 2, 8).unbind(0)
assert linattn.linear_attention(q, k, v).shape == v.shape
for name in linattn.mixers.available():
    if linattn.mixers.info(name).resumable:
        x = torch.randn(1, 5, 32)
        y, state = linattn.mixers.create(name, dim=32)(x, return_state=True)
        assert y.shape == x.shape and state, name
model = linattn.LanguageModel(linattn.LMConfig(vocab_size=16, dim=32, layers=2))
assert len(list(linattn.generate.stream(model, [1, 2, 3], max_new_tokens=3))) == 3
assert not blocked & set(sys.modules)
print("works with", *sorted(allowed))
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    """Environment without hooks of coverage tools."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("COV_", "PYTHON"))}


def test_import_costs_at_most_a_fifth_of_a_second_more_than_torch():
    assert any(float(run(TIMED)) <= 0.2 for _ in range(5))  # processor time; once is enough, since other work only adds to it


def test_import_loads_nothing_heavy():
    assert run(LOADED).split() == []


def test_a_call_loads_no_compiler():
    assert run(CALLED).split() == []


def test_torch_and_numpy_are_enough():
    assert run(BARE).startswith("works with")


def test_who_reads_types_finds_every_name():
    """The module loads its names lazily, so the stub declares them for type checkers."""
    import linattn

    tree = ast.parse(Path(linattn.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imported = {alias.asname: (node.module, alias.name) for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(imported) == {*linattn._MODULES, *linattn._SUBPACKAGES, "LMConfig"}
    for name, (module, original) in imported.items():
        assert original == name and module == {**linattn._MODULES, "LMConfig": "linattn.models"}.get(name, "linattn")
