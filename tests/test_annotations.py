"""Functions in modules of GPU kernels have types, which mypy cannot require there, since Triton interprets kernels' annotations."""

import ast
from pathlib import Path

MODULES = Path(__file__).parents[1] / "linattn" / "ops" / "triton"


def untyped(source: str) -> list[str]:
    """Names of functions without the type of an argument or of the result, except kernels and their helpers."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return [
        f.name
        for f in functions
        if not any(map(_compiles, f.decorator_list)) and (f.returns is None or not all(map(_typed, _arguments(f))))
    ]


def _compiles(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).split("(")[0] in ("triton.jit", "gluon.jit", "gluon.constexpr_function")


def _arguments(function: ast.FunctionDef) -> list[ast.arg]:
    given = function.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]


def _typed(argument: ast.arg) -> bool:
    return argument.annotation is not None or argument.arg == "self"


def test_functions_that_are_no_kernels_have_types():
    assert {path.name: names for path in MODULES.rglob("*.py") if (names := untyped(path.read_text()))} == {}


def test_what_counts():
    kernels = (
        "@triton.jit(do_not_specialize=['T'])\ndef f(x): pass\n@gluon.jit\ndef g(x): pass\n@gluon.constexpr_function\ndef h(x): pass\n"
    )
    methods = (
        "class C:\n    def f(self, *x: int) -> None:\n        def a(y): pass\n    def g(self, *, z) -> None: pass\n    def h(self): pass\n"
    )
    assert untyped(kernels + methods) == ["g", "h", "a"]
