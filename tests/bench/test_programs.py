"""Programs of benchmarks/ report missing requirements in one line, before measuring."""

import importlib

import pytest

PROGRAMS = {
    "fuzz": ["--cases", "1"], "cold_start": [], "configurations.__main__": [], "kernels": [], "decode": ["--device", "cuda"],
    "cross_entropy": [], "profile": [], "losses": ["--data", "tokens", "--work", "runs"], "causality": ["run", "--data", "tokens"],
}  # fmt: skip


def refused(program: str, arguments: list[str], capsys) -> str:
    if program.startswith("configurations"):
        pytest.importorskip("triton")
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"benchmarks.{program}").main([*PROGRAMS[program], *arguments])
    said = capsys.readouterr()
    assert left.value.code == 2 and not said.out
    return said.err


@pytest.mark.parametrize("program", PROGRAMS)
def test_without_a_gpu(program, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = refused(program, ["--out", str(tmp_path)], capsys)
    name = program.removesuffix(".__main__")
    assert said == f"python -m benchmarks.{name} needs an NVIDIA GPU, and torch sees none\n"


@pytest.mark.parametrize(
    ("program", "more"), [("fuzz", ["--backend", "cpu"]), ("cold_start", ["--device", "cpu"]), ("decode", ["--device", "cpu"])]
)
def test_a_file_that_cannot_be_written(program, more, capsys, tmp_path):
    said = refused(program, [*more, "--out", str(tmp_path / "nowhere" / "x.json")], capsys)
    assert said.startswith(f"python -m benchmarks.{program}: ") and "nowhere" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("program", "arguments", "says"),
    [
        ("cold_start", ["--families", "gla,gal"], "--families must be among linear, retnet"),
        ("fuzz", ["--workers", "0"], "argument --workers: must be at least 1"),
        ("fuzz", ["--cases", "-3"], "argument --cases: must be at least 1"),
        ("configurations.__main__", ["--workers", "0"], "argument --workers: must be at least 1"),
    ],
)
def test_what_is_none(program, arguments, says, capsys):
    assert says in refused(program, arguments, capsys)
