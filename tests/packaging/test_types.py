"""Result types of operations for type checkers, and overloads that accept every argument."""

import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import linattn

REPOSITORY = Path(linattn.__file__).parents[1]
OPS = ("linear_attention", "diagonal_scan", "running_max", "selective_scan", "lti")

CALLS = """
from typing import Any, assert_type

from torch import Tensor

from linattn import diagonal_scan, linear_attention, lti, running_max, selective_scan

Pair = tuple[Tensor, Tensor]

def calls(t: Tensor, asked: bool, how: bool | float | str) -> None:
    assert_type(linear_attention(t, t, t, decay=t, initial_state=None, scale=1.0, form="chunk"), Tensor)
    assert_type(linear_attention(t, t, t, normalize=asked), Tensor)
    assert_type(linear_attention(t, t, t, normalize=1e-6, return_state=False), Tensor)
    assert_type(linear_attention(t, t, t, normalize="return"), Pair)
    assert_type(linear_attention(t, t, t, erase=(t, t), return_state=True), Pair)
    assert_type(linear_attention(t, t, t, normalize=False, return_state=True), Pair)
    assert_type(linear_attention(t, t, t, normalize=True, return_state=True), tuple[Tensor, Pair])
    assert_type(linear_attention(t, t, t, normalize=0.5, initial_state=(t, t), return_state=True), tuple[Tensor, Pair])
    assert_type(linear_attention(t, t, t, normalize="return", return_state=True), tuple[Pair, Pair])
    assert_type(linear_attention(t, t, t, normalize=asked, return_state=True), Any)
    assert_type(linear_attention(t, t, t, normalize=how, return_state=asked), Any)
    assert_type(diagonal_scan(t, t, backend="cpu"), Tensor)
    assert_type(diagonal_scan(t, t, return_state=True), Pair)
    assert_type(running_max(t, t, cu_seqlens=t), Tensor)
    assert_type(running_max(t, t, return_state=True), Pair)
    assert_type(selective_scan(t, t, t, t, t, t, softplus=True), Tensor)
    assert_type(selective_scan(t, t, t, t, t, return_state=True), Pair)
    assert_type(lti(t, t, t, t, t, lengths=t), Tensor)
    assert_type(lti(t, t, t, t, return_state=True), Pair)
    assert_type(lti(t, t, t, t, return_state=asked), Any)
    linear_attention(t, t, t, gk=t)  # type: ignore[call-overload]
    diagonal_scan(t, t, normalize=True)  # type: ignore[call-overload]
"""

# Stubs of torch's Tensor and of linattn's operations, since mypy takes half a minute for the rest.
CONFIG = """
[mypy]
follow_imports = skip
warn_unused_ignores = true
[mypy-torch,linattn,linattn.ops,linattn.ops.linear_attention,linattn.ops.scan,linattn.ops.selective_scan,linattn.ops.long_conv]
follow_imports = silent
"""
TORCH = "from typing import Any\nclass Tensor: ...\ndef __getattr__(name: str) -> Any: ...\n"


def test_what_comes_back(tmp_path):
    """The number of results follows from the arguments, and so do their types."""
    pytest.importorskip("mypy")
    for name, text in (("calls.py", CALLS), ("mypy.ini", CONFIG), ("torch/__init__.pyi", TORCH)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "calls.py"],
        cwd=tmp_path, env={"MYPYPATH": f"{tmp_path}:{REPOSITORY}"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", OPS)
def test_every_way_of_calling_takes_every_argument(name):
    """Overloads agree with the function's signature."""
    op = getattr(linattn, name)
    told = typing.get_overloads(op)
    wanted = inspect.signature(op).parameters
    assert len(told) >= 3
    for one in told:
        named = dict(inspect.signature(one).parameters)
        assert named.pop("options").kind is inspect.Parameter.VAR_KEYWORD
        assert {*named, *one.__globals__["_Options"].__annotations__} == {*wanted}
        assert all(p.kind is wanted[n].kind for n, p in named.items())
        assert all(p.default is p.empty or p.default == wanted[n].default for n, p in named.items())


def test_the_stub_of_the_mixers_is_current():
    """Every mixer by its class name, with its options: written by ``make stubs``."""
    stubs = runpy.run_path(str(REPOSITORY / ".ci/stubs.py"))
    assert stubs["STUB"].read_text(encoding="utf-8") == stubs["stub"](), "run: make stubs"
    mixers = stubs["stub"]()
    for name in linattn.mixers.available():
        assert f'def create(name: Literal["{name}"], *, dim: int' in mixers


USER = """
from typing import assert_type
from torch import Tensor, randn
import linattn
from linattn.mixers import GLA, Mixer, create
from linattn.ops import Backend, Form
from linattn.train import TrainOptions

q = randn(1, 4, 2, 8)
form: Form = "chunk"
backend: Backend = "torch"
assert_type(linattn.linear_attention(q, q, q, form=form, backend=backend), Tensor)
assert_type(create("gla", dim=64, heads=2), GLA)
assert_type(create("mixer of a plugin", dim=64, anything=1), Mixer)
assert_type(linattn.mixers.GatedDeltaNet(dim=64), linattn.mixers.GatedDeltaNet)
TrainOptions(mixer="gla", data="tokens", out="runs/small")
"""
WRONG = """
linattn.linear_attention(q, q, q, form="chunked")
GLA(dim=64, haeds=2)
linattn.linear_atention(q, q, q)
"""


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "basedpyright", "pyright"])
def test_a_users_file_is_understood(checker, tmp_path):
    """From outside, by the marker py.typed: correct code passes, and each wrong line is reported."""
    command = {"mypy": [sys.executable, "-m", "mypy", "--cache-dir", tmp_path / "cache"]}.get(checker, [shutil.which(checker)])
    if command[0] is None:
        pytest.skip(f"{checker} is not installed")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    options = [] if checker == "mypy" else ["--pythonpath", sys.executable]
    for text, errors in ((USER, 0), (USER + WRONG, 3)):
        (tmp_path / "user.py").write_text(text, encoding="utf-8")
        environment = {**os.environ, "MYPYPATH": str(REPOSITORY), "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run([*command, *options, "user.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
        found = set(re.findall(r"user\.py:(\d+).*error", done.stdout))
        assert len(found) == errors and (done.returncode == 0) == (errors == 0), done.stdout
