"""Stop texts split anywhere, terminal safety, and the command."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from linattn.cli.main import main
from linattn.data import ByteCodec
from linattn.generate import stream_text
from linattn.generate.text import printable
from linattn.hf import LMConfig
from linattn.models import LanguageModel


def streamed(text: str, stop=()) -> list[str]:
    codec = ByteCodec()
    return list(stream_text(codec.encode(text), codec.stream(), stop))


@given(st.text("ab\né", max_size=12), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop(text, stop):
    ends = [at for at in range(len(text)) if any(text[: at + n].endswith(s) for s in stop for n in [1])]
    want = text
    if ends:  # the first completed stop text, of several the one that begins first
        end = min(ends) + 1
        want = text[: end - max(len(s) for s in stop if text[:end].endswith(s))]
    assert "".join(streamed(text, stop)) == want


def test_text_comes_as_it_is_written():
    assert streamed("añb") == ["a", "ñ", "b"]
    assert streamed("xaab", ["aac"]) == ["x", "aab"]  # held back while it could have been a stop


def test_terminals_get_no_control_codes():
    assert printable("a\x1b[31mb\x07\r\x9b2Jc\u202ed\ne\tf\x7f") == "a[31mb2Jcd\ne\tf"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A checkpoint of an untrained model."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("run")
    config = LMConfig(dim=32, layers=1, mixer="gla")
    config.save_pretrained(path)
    save_file(LanguageModel(config).state_dict(), path / "model.safetensors")
    return path


def test_the_command_is_reproducible(run, capsys):
    out = []
    for seed in (1, 1, 2):
        assert main(["generate", str(run), "--prompt", "import ", "--max-new-tokens", "30", "--seed", str(seed)]) == 0
        out.append(capsys.readouterr().out)
    assert out[0] == out[1] != out[2]
    assert len(out[0]) > 10


def test_the_command_stops(run, capsys):
    arguments = ["generate", str(run), "--prompt", "import ", "--max-new-tokens", "20", "--temperature", "0"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    text = out.removeprefix("import ")
    assert text != out, "the prompt comes first"
    assert main([*arguments, "--stop", text[3:5]]) == 0
    assert capsys.readouterr().out == "import " + text[: text.index(text[3:5])] + "\n"


def test_the_command_keeps_terminals_whole(run, capsys, monkeypatch):
    arguments = ["generate", str(run), "--prompt", "x", "--max-new-tokens", "200", "--temperature", "5", "--seed", "1"]
    assert main(arguments) == 0
    raw = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(arguments) == 0
    assert capsys.readouterr().out == printable(raw)
    assert printable(raw) != raw


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": "nowhere"}, "nowhere does not exist"),
        ({"run": "."}, ". is neither a run of linattn train"),
        ({"--prompt": ""}, "--prompt is empty"),
        ({"--stop": ""}, "--stop is empty"),
        ({"--top-k": "0"}, "top_k must be"),
        ({"--temperature": "-1"}, "temperature must be"),
        ({"--max-new-tokens": "-1"}, "max_new_tokens must be"),
    ],
)
def test_errors_are_one_line(change, message, run, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = {"run": str(run), "--prompt": "x", **change}
    words = [word for name, value in arguments.items() for word in ([value] if name == "run" else [name, value])]
    assert main(["generate", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
