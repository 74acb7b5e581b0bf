"""Conversations from the command line: a state in a file, a constant-size state, and terminal output."""

import io
import re
import sys

import pytest
import torch
from safetensors.torch import save_file

from linattn import State
from linattn.cli.main import main
from linattn.cli.status import Status
from linattn.data import ByteCodec
from linattn.generate import stream
from linattn.generate.text import printable
from linattn.hf import LMConfig
from linattn.models import LanguageModel
from linattn.train import load_run

CODEC = ByteCodec()


def make(path, mixer="gla", seed=0):
    """A checkpoint of an untrained model."""
    torch.manual_seed(seed)
    path.mkdir()
    config = LMConfig(dim=32, layers=2, mixer=mixer)
    config.save_pretrained(path)
    save_file(LanguageModel(config).state_dict(), path / "model.safetensors")
    return str(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make(tmp_path_factory.mktemp("runs") / "gla")


def same(a: State, b: State) -> None:
    for ours, theirs in zip(a.layers, b.layers, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


def read(model, content: bytes) -> State:
    with torch.no_grad():
        return model(torch.tensor([list(content)]), return_state=True)[1]


def test_a_saved_state_goes_on_where_the_text_ended(run, tmp_path, capsys):
    path = str(tmp_path / "chat.safetensors")
    how = ["--temperature", "0", "--max-new-tokens"]
    assert main(["generate", run, "--prompt", "import ", *how, "3", "--save-state", path]) == 0
    first = capsys.readouterr().out[len("import ") : -1]
    model, _ = load_run(run)
    tokens = list(stream(model, CODEC.encode("import "), max_new_tokens=3, temperature=0))
    assert CODEC.decode(tokens) == first
    kept = State.load(path, model=model)
    assert kept.position.tolist() == [10]
    same(kept, read(model, b"import " + bytes(tokens)))
    assert main(["generate", run, "--prompt", "xyz", *how, "8", "--load-state", path]) == 0
    got = capsys.readouterr().out[len("xyz") : -1]
    whole = list(b"import " + bytes(tokens) + b"xyz")
    assert got == CODEC.decode(list(stream(model, whole, max_new_tokens=8, temperature=0)))
    same(State.load(path, model=model), kept)
    assert main(["generate", run, "--prompt", "xyz", *how, "0", "--load-state", path, "--save-state", path]) == 0
    same(State.load(path, model=model), read(model, bytes(whole)))


def test_a_prompt_alone_is_read_and_kept(run, tmp_path, capsys):
    path = tmp_path / "chat.safetensors"
    assert main(["generate", run, "--prompt", "import ", "--max-new-tokens", "0", "--save-state", str(path)]) == 0
    assert capsys.readouterr().err == "0 tokens\n"  # nothing had been read when the line was written
    same(State.load(path), read(load_run(run)[0], b"import "))


def test_the_stop_text_is_kept_too(run, tmp_path, capsys):
    path, how = tmp_path / "chat.safetensors", ["--prompt", "import ", "--max-new-tokens", "9", "--temperature", "0"]
    assert main(["generate", run, *how]) == 0
    whole = capsys.readouterr().out[len("import ") :]
    assert main(["generate", run, *how, "--stop", whole[0], "--save-state", str(path)]) == 0
    assert capsys.readouterr().out == "import \n"
    assert State.load(path).position.item() > len("import ")


def test_states_that_do_not_fit_are_one_line(run, tmp_path, capsys):
    path = tmp_path / "s.safetensors"
    assert main(["generate", run, "--prompt", "x", "--max-new-tokens", "1", "--save-state", str(path)]) == 0
    other = make(tmp_path / "other", seed=1)
    whole = path.read_bytes()
    model = load_run(run)[0]
    for change, door, said in [
        (lambda: None, other, "is of a model with other weights"),
        (lambda: path.write_bytes(whole[:-9]), run, "is damaged or not a safetensors file"),
        (lambda: State([{"S": torch.zeros(1)}]).save(path), run, "does not name its model"),
        (lambda: read(model, b"ab").fork(2).save(path, model=model), run, "a row for each sequence of ids, 1, but came with 2"),
        (path.unlink, run, "No such file"),
    ]:
        change()
        capsys.readouterr()
        for command in (["generate", door, "--prompt", "x"], ["chat", door]):
            if command[0] == "chat" and "a row" in said:
                continue
            assert main([*command, "--load-state", str(path)]) == 2
            captured = capsys.readouterr()
            assert captured.out == ""
            assert said in captured.err
            assert captured.err.count("\n") == 1


def chat(run, lines, *options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert main(["chat", run, "--seed", "1", *options]) == 0
    return capsys.readouterr()


def test_a_conversation_remembers_and_does_not_grow(run, tmp_path, monkeypatch, capsys):
    path = str(tmp_path / "chat.safetensors")
    how = ("--temperature", "0", "--max-new-tokens", "6")
    whole = chat(run, ["hello", "", "and then?", "why?"], *how, "--save-state", path, monkeypatch=monkeypatch, capsys=capsys)
    model, _ = load_run(run)
    heard, replies = b"", []
    for line in (b"hello\n", b"and then?\n", b"why?\n"):
        heard += line
        reply = bytes(stream(model, list(heard), max_new_tokens=6, temperature=0))
        reply = reply[: reply.index(b"\n") + 1] if b"\n" in reply else reply + b"\n"
        heard += reply
        replies.append(printable(reply[:-1].decode(errors="replace")))
    assert whole.out == "".join(f"{reply}\n" for reply in replies)
    same(State.load(path, model=model), read(model, heard))
    sizes = re.findall(r"tokens.*, state ([\d,]+) bytes\n", whole.err)
    assert len(sizes) == 3
    assert len(set(sizes)) == 1
    assert int(sizes[0].replace(",", "")) == State.load(path).nbytes
    begun = chat(run, ["hello"], *how, "--save-state", path, monkeypatch=monkeypatch, capsys=capsys)
    rest = chat(run, ["and then?", "why?"], *how, "--load-state", path, monkeypatch=monkeypatch, capsys=capsys)
    assert begun.out + rest.out == whole.out


def test_a_hybrid_says_that_it_grows(tmp_path, monkeypatch, capsys):
    hybrid = make(tmp_path / "hybrid", "gla, softmax")
    err = chat(hybrid, ["a", "b"], "--max-new-tokens", "4", monkeypatch=monkeypatch, capsys=capsys).err
    first, second = (int(n.replace(",", "")) for n in re.findall(r"state ([\d,]+) bytes", err))
    assert second > first


def test_replies_end_at_the_stop_text_and_have_no_control_codes(run, monkeypatch, capsys):
    how = ("--temperature", "0", "--max-new-tokens", "12")
    text = chat(run, ["a"], *how, "--stop", "never", monkeypatch=monkeypatch, capsys=capsys).out
    stop = text[3:5]
    got = chat(run, ["a"], *how, "--stop", stop, monkeypatch=monkeypatch, capsys=capsys).out
    assert got == text[: text.index(stop)] + "\n"
    wild = chat(run, ["a"], "--temperature", "9", "--max-new-tokens", "400", "--stop", "never", monkeypatch=monkeypatch, capsys=capsys).out
    assert wild == printable(wild)
    assert len(wild) > 100
    assert main(["chat", run, "--stop", ""]) == 2
    assert "--stop is empty" in capsys.readouterr().err


def test_what_does_not_fit_is_refused_before_a_line_is_typed(run, tmp_path, monkeypatch, capsys):
    model, _ = load_run(run)
    read(model, b"x").fork(2).save(tmp_path / "two.safetensors", model=model)
    for option, value, said in [
        ("--temperature", "-1", "temperature must be 0"), ("--top-k", "0", "top_k must be"), ("--top-p", "2", "top_p must be"),
        ("--max-new-tokens", "-1", "max_new_tokens must be"), ("--load-state", str(tmp_path / "two.safetensors"), "but came with 2"),
    ]:  # fmt: skip
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        assert main(["chat", run, option, value]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["stdin", "stdout", "stderr"])
def test_a_process_without_a_stream(run, missing, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    monkeypatch.setattr(sys, missing, None)
    assert main(["chat", run, "--max-new-tokens", "3"]) == 0
    getattr(sys, missing).close()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_speed_and_bytes_as_it_goes_and_stays_whole(run, monkeypatch):
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr("linattn.cli.status._EVERY", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("LINES", "20")
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["generate", run, "--prompt", "x", "--max-new-tokens", "9", "--temperature", "0"]
    assert main(arguments) == 0
    written = out.getvalue()
    shown = re.findall(r"\x1b7\x1b\[20;1H\x1b\[K([^\x1b]*)\x1b8", written)
    assert len(shown) == 9
    assert re.fullmatch(r"1 token, state [\d,]+ bytes", shown[0])
    assert re.fullmatch(r"9 tokens, [\d,]+ tokens/s, state [\d,]+ bytes", shown[-1])
    assert written.startswith("\n\x1b[A\x1b7\x1b[1;19r\x1b8")
    assert written.endswith("\x1b7\x1b[r\x1b[20;1H\x1b[K\x1b8")
    assert err.getvalue() == shown[-1] + "\n"
    text = re.sub(r"\x1b7[^\n]*?\x1b8|\x1b\[A", "", written[1:])
    monkeypatch.setattr(sys, "stdout", plain := io.StringIO())
    assert main(arguments) == 0
    assert text == printable(plain.getvalue())


def test_a_terminal_is_given_back_after_an_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", out := Terminal())
    monkeypatch.setattr(sys, "stderr", err := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(KeyboardInterrupt), Status():
        raise KeyboardInterrupt
    assert "\x1b[r" in out.getvalue()
    assert err.getvalue() == ""


def test_drafts_and_pieces_change_no_text(run, tmp_path, capsys):
    how = ["generate", run, "--prompt", "abcabcabcabcabcabc", "--temperature", "0", "--max-new-tokens", "20"]
    small = make(tmp_path / "small", seed=1)
    texts = []
    for extra in ([], ["--lookup"], ["--draft", small], ["--prefill-chunk", "5", "--prefixes", str(tmp_path / "states")]):
        assert main([*how, *extra]) == 0
        texts.append(capsys.readouterr().out)
    assert texts == texts[:1] * 4
    assert len(list((tmp_path / "states").glob("*.safetensors"))) == 4  # behind 5, 10, 15 and 17 of 18 tokens
    assert main([*how, "--prefill-chunk", "0"]) == 2
    assert "prefill_chunk must be" in capsys.readouterr().err
