"""Measures of the source, on a source with known measures."""

import ast
import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import source

ROOT = Path(__file__).parents[2]
KERNEL = """
@triton.jit(do_not_specialize=["T"])
def kernel(x, y, T, W: tl.constexpr):
    a, _, _ = helper(x, T)
    _, b = helper(y, T)
    return a + b
"""
MODULE = '''
"""What a module is."""
from linattn import two

class A:
    """A class."""
    def of(self, a, *b, c=0, **d):
        """Whether it is."""
        from linattn.three import name
        first, _ = a
        return first
'''


@pytest.fixture
def tree():
    texts = {
        "linattn/__init__.py": "from linattn import one", "linattn/one.py": MODULE, "linattn/two.py": "import linattn.one",
        "linattn/three.py": "if TYPE_CHECKING:\n    import linattn.one\n" + KERNEL,
    }  # fmt: skip
    return {path: ast.parse(text) for path, text in texts.items()}


def test_measures(tree):
    found = source.measures(tree, 7)
    assert (found["files"], found["lines"], found["functions"], found["kernels and their helpers"]) == (4, 7, 1, 1)
    assert found["lines of a function"] == {"median": 5, "p90": 5, "most": 5}
    assert found["arguments of a function"]["p90"] == 4 and found["arguments of a kernel"] == {"p90": 4, "most": 4}
    assert found["arguments that a kernel does not name"] == {"unused": 1, "of": 4}
    assert found["unpackings with _ in kernels"] == {"unpackings": 2, "_": 3}
    assert found["docstrings that begin with a question word"] == {"these": 2, "of": 3}


def test_circles(tree):
    """Imports within functions count, those for types only and through the package's public names do not."""
    assert source.circles(tree) == [["linattn.one", "linattn.two"]]
    tree["linattn/two.py"] = ast.parse("")
    assert source.circles(tree) == []
    tree["linattn/three.py"] = ast.parse("def late():\n    import linattn.one")
    assert source.circles(tree) == [["linattn.one", "linattn.three"]]


def test_repeated_lines():
    """Also within a module; without overlaps, imports, and lines in many places."""
    lines = [f"x = {i}" for i in range(6)]
    again = "\n".join(lines)
    texts = {"a": f"import b\n{again}", "b": f"def f():\n    {again.replace(chr(10), chr(10) + '    ')}\ny = 1", "c": f"{again}\n{again}"}
    tree = {path: ast.parse(text) for path, text in texts.items()}
    assert source.repeated(tree) == [("a", "b"), ("a", "c"), ("b", "c"), ("c", "c")]
    assert source.repeated({"d": ast.parse("x = 1\n" * 8), "e": ast.parse("import b\n" * 6), "f": ast.parse("import b\n" * 6)}) == []
    assert source.repeated({str(i): tree["a"] for i in range(9)}) == []
    assert source.repeated({"a": tree["a"], "b": ast.parse("\n".join(lines[1:]))}) == []


@pytest.mark.slow
def test_the_command_keeps_each_revision(tmp_path, capsys):
    out = tmp_path / "source.json"
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode == 0:
        assert source.main(["--rev", "HEAD", "--out", str(out)]) == 0
    assert source.main(["--out", str(out)]) == 0
    kept = json.loads(out.read_text())
    assert kept["revisions"]["working tree"]["circles of imports"] == 0 and kept["command"] == "python -m benchmarks.source"
    assert all(figures["lines"] > 50_000 for figures in kept["revisions"].values())
    capsys.readouterr()
    assert source.main(["--wide"]) == 0
    assert "linattn/ops/linear_attention.py" in capsys.readouterr().out
