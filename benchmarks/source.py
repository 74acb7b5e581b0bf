"""Measures of the library's source: ``python -m benchmarks.source``, or of an earlier revision, ``--rev e83976b``.

Lines, lengths of functions, numbers of arguments, arguments that a kernel does not use, ``_`` in unpackings, circles of imports,
docstrings that begin with a question word, and repeated lines. A kernel here is a function that Triton compiles; the others are functions.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import statistics
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path

from benchmarks import RESULTS

ROOT = Path(__file__).parents[1]
PACKAGE = "linattn"
QUESTIONS = ("What", "Of", "Whether", "Where", "Who", "How", "Which", "That")
MANY = 8  # arguments
RUN, COMMON = 6, 8  # equal lines of a repetition; maximum of places, beyond which it is boilerplate
REEXPORTS = {"linattn", "linattn.report"}  # packages that re-export public names of higher layers
Sources = Mapping[str, ast.Module]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def read(rev: str | None) -> tuple[dict[str, ast.Module], int]:
    """Modules of the package by path, and the number of lines; in the working tree, or in the revision ``rev``."""
    if rev is None:
        texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in (ROOT / PACKAGE).rglob("*.py")}
    else:
        archive = subprocess.run(["git", "archive", rev, PACKAGE], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            texts = {m.name: tar.extractfile(m).read().decode() for m in tar if m.name.endswith(".py")}  # type: ignore[union-attr]
    return {path: ast.parse(text) for path, text in texts.items()}, sum(text.count("\n") for text in texts.values())


def functions(sources: Sources) -> Iterator[tuple[str, Function]]:
    """Every function and method with the path of its module."""
    for path, tree in sources.items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, Function))


def compiled(function: Function) -> bool:
    """True if Triton compiles ``function``."""
    return any(ast.unparse(decorator).partition("(")[0].endswith("jit") for decorator in function.decorator_list)


def arguments(function: Function) -> list[str]:
    """Names of the arguments, without ``self`` and ``cls``."""
    given = function.args
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    names = [argument.arg for argument in every if argument is not None]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def unused(function: Function) -> list[str]:
    """Arguments that the body does not name."""
    named = {node.id for statement in function.body for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return [name for name in arguments(function) if name not in named]


def unpackings(bodies: Iterable[ast.AST]) -> list[int]:
    """Number of ``_`` in each unpacking that has one."""
    tuples = [node for body in bodies for node in ast.walk(body) if isinstance(node, ast.Tuple) and isinstance(node.ctx, ast.Store)]
    found = (sum(isinstance(one, ast.Name) and one.id == "_" for one in node.elts) for node in tuples)
    return [count for count in found if count]


def circles(sources: Sources) -> list[list[str]]:
    """Groups of modules that import each other, within functions too, except imports only for types."""
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): tree for path, tree in sources.items()}
    graph = {name: set() if name in REEXPORTS else set(_imported(tree, modules)) - {name} for name, tree in modules.items()}
    reached = {name: _reached(graph, name) for name in graph}
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph if name in reached[name]}
    return sorted(sorted(group) for group in groups)


def _imported(tree: ast.AST, modules: Mapping[str, ast.Module]) -> Iterator[str]:
    if isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test):
        return
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names if alias.name in modules)
    elif isinstance(tree, ast.ImportFrom) and tree.module:
        for alias in tree.names:
            yield from [name for name in (f"{tree.module}.{alias.name}", tree.module) if name in modules][:1]
    for child in ast.iter_child_nodes(tree):
        yield from _imported(child, modules)


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph[ahead.pop()] - seen
        seen |= new
        ahead += new
    return seen


def questions(sources: Sources) -> tuple[int, int]:
    """Docstrings that begin with a question word or a preposition, and all docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for tree in sources.values() for node in ast.walk(tree) if isinstance(node, kinds)]
    said = [text for text in texts if text]
    return sum(text.split()[0].rstrip(",:") in QUESTIONS for text in said), len(said)


def repeated(sources: Sources) -> list[tuple[str, str]]:
    """Pairs of modules, or a module twice, that share :data:`RUN` equal lines; imports, comments and layout do not count."""
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for path, tree in sources.items():
        lines = [line for line in map(str.strip, ast.unparse(tree).splitlines()) if line and not line.startswith(("import ", "from "))]
        for first in range(len(lines) - RUN + 1):
            places[tuple(lines[first : first + RUN])].append((path, first))
    few = [found for found in places.values() if len(found) <= COMMON]
    pairs = ((*sorted((a, b)), abs(i - j)) for found in few for (a, i), (b, j) in combinations(found, 2))
    return sorted({(a, b) for a, b, apart in pairs if a != b or apart >= RUN})


def tenth(values: Iterable[int]) -> int:
    """90th percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


def measures(sources: Sources, lines: int) -> dict[str, object]:
    every = [function for _, function in functions(sources)]
    kernels, others = [f for f in every if compiled(f)], [f for f in every if not compiled(f)]
    lengths = [function.end_lineno - function.lineno + 1 for function in others if function.end_lineno]
    in_kernels, asked = [len(arguments(f)) for f in kernels], [len(arguments(f)) for f in others]
    blanks, (worded, said) = unpackings(kernels), questions(sources)
    return {
        "files": len(sources), "lines": lines, "functions": len(others), "kernels and their helpers": len(kernels),
        "lines of a function": {"median": statistics.median_low(lengths), "p90": tenth(lengths), "most": max(lengths)},
        "arguments of a function": {"p90": tenth(asked), "most": max(asked), f"more than {MANY}": sum(n > MANY for n in asked)},
        "arguments of a kernel": {"p90": tenth(in_kernels), "most": max(in_kernels)},
        "arguments that a kernel does not name": {"unused": sum(len(unused(f)) for f in kernels), "of": sum(in_kernels)},
        "unpackings with _ in kernels": {"unpackings": len(blanks), "_": sum(blanks)},
        "circles of imports": len(circles(sources)),
        "docstrings that begin with a question word": {"these": worded, "of": said},
        f"pairs of modules that share {RUN} lines": len(repeated(sources)),
    }  # fmt: skip


def wide(sources: Sources) -> list[str]:
    """Functions of more than :data:`MANY` arguments, except kernels."""
    found = [(len(arguments(f)), path, f) for path, f in functions(sources) if not compiled(f) and len(arguments(f)) > MANY]
    return [f"{count} {path}:{f.lineno} {f.name}" for count, path, f in sorted(found, key=lambda row: (-row[0], row[1], row[2].lineno))]


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.source", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rev", help="a revision of git instead of the working tree")
    parser.add_argument("--wide", action="store_true", help=f"list the functions of more than {MANY} arguments, and keep nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "source.json", help="file of figures by revision")
    options = parser.parse_args(given)
    sources, lines = read(options.rev)
    if options.wide:
        print("\n".join(wide(sources)))
        return 0
    figures = measures(sources, lines)
    body = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {"command": parser.prog, "revisions": {}}
    told = ["git", "show", "--no-patch", "--format=%cs", options.rev or "HEAD"]
    date = subprocess.run(told, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    body["revisions"][options.rev or "working tree"] = {"date": date, **figures}
    options.out.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
