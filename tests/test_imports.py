"""Imports in the package, within functions too: no circles, and none from a higher layer."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1] / "linattn"
# From the ground up, as in CONTRIBUTING; packages on one floor may import from each other.
FLOORS = (
    ("arguments", "extras", "_registration"), ("ops",), ("mixers",), ("ffn",), ("models", "state"), ("parallel",), ("data", "tasks"),
    ("generate",), ("hf",), ("quantization", "vllm"), ("train",), ("report", "bench"), ("experiment", "distill"),
    ("compare", "reproduce", "evaluation"),
    ("atlas",), ("cli",), ("__main__",),
)  # fmt: skip


REEXPORTS = {"linattn", "linattn.report"}  # packages that re-export public names of higher layers


@cache
def graph() -> dict[str, set[str]]:
    """The modules that each module imports, except imports only for types."""
    files = {_name(path): path for path in ROOT.rglob("*.py")}
    return {
        name: set() if name in REEXPORTS else set(_resolved(ast.parse(path.read_text()), files)) - {name} for name, path in files.items()
    }


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def _resolved(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    for node in _imports(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        else:
            assert node.level == 0, "a relative import"
            for alias in node.names:
                yield from [name for name in (f"{node.module}.{alias.name}", node.module or "") if name in known][:1]


def _imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test):
        return
    if isinstance(tree, (ast.Import, ast.ImportFrom)):
        yield tree
    for child in ast.iter_child_nodes(tree):
        yield from _imports(child)


def reached(start: str) -> set[str]:
    """The modules reachable from ``start``."""
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph()[ahead.pop()] - seen
        seen |= new
        ahead += new
    return seen


def test_no_module_leads_back_to_itself():
    assert [module for module in graph() if module in reached(module)] == []


def test_floors_import_from_below_alone():
    floor = {name: i for i, names in enumerate(FLOORS) for name in names}
    assert {m.split(".")[1] for m in graph() if "." in m} == set(floor)
    above = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in sorted(others)
        if "." in module and "." in other and floor[other.split(".")[1]] > floor[module.split(".")[1]]
    ]
    assert above == []


def test_what_counts():
    """Imports of functions do, those for types do not."""
    tree = ast.parse("if TYPE_CHECKING:\n    import a\ndef f():\n    from b import c\n    import d\nimport e")
    assert [ast.unparse(node) for node in _imports(tree)] == ["from b import c", "import d", "import e"]
