import os
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

import linattn
import linattn.mixers
from linattn.cli.main import COMMANDS, main


def _linattn(*args, **options):
    return subprocess.run([sys.executable, "-m", "linattn", *args], capture_output=True, text=True, timeout=60, **options)


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"^  {name}  +\S.*[^.]\.$", text, re.M), f"no whole sentence about {name} in\n{text}"


def test_no_arguments_is_help(capsys):
    assert main([]) == 0
    bare = capsys.readouterr().out
    main(["-h"])
    assert bare.strip() == capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_explains_every_option(name, capsys):
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: linattn {name}")
    block = text[text.index("Options:") :]
    for option in re.finditer(r"^  (--?[a-z-]+.*(?:\n {10,}.*)*)", block, re.M):
        assert len(option[1].split()) > 3, f"unexplained: {option[1]}"


def test_help_of_compare_shows_both_defaults(capsys):
    main(["compare", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "softmax, softmax:conv_width=4, gla, mamba2, gated_deltanet" in text
    assert "with --quick 12]" in text


def test_help_needs_no_torch():
    script = (
        "import sys; from linattn.cli.main import COMMANDS, main\n"
        "for name in COMMANDS: main([name, '--help'])\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"linattn {linattn.__version__}\n"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["lits"], "No such command 'lits'. Did you mean 'list'?"),
        (["frobnicate"], "No such command 'frobnicate'; see linattn --help\n"),
        (["list", "--jsn"], "No such option: --jsn"),
        (["list", "--frobnicate"], "No such option: --frobnicate; see linattn list --help\n"),
        (["show"], "Missing argument 'name'; see linattn show --help\n"),
        (["show", "glaa"], "did you mean 'gla'?"),
        (["show", "gla", "--dim", "many"], "unable to parse string as an integer, but came as 'many'\n"),
        (["show", "gla", "--tokens", "-1"], "-1"),
        (["show", "gla", "--dim", "33"], "33"),
        (["show", "gla", "--dim", str(10**12)], "need more memory than there is"),
        (["show", "gla", "--tokens", "9" * 20], "tokens must be at most 1,000,000,000,000,000"),
        (["show", "lstm", "--heads", "4"], "heads"),
        (["bench", "moons"], "'suite': 'moons' is not one of 'ops'"),
        (["generate", "organisation/model", "--prompt", "x"], "hf download organisation/model --local-dir FOLDER"),
        (["compare", "--mixers", "gla,softmx"], "did you mean 'softmax'?"),
        (["compare", "--mixers", "gla,gla"], "gla came more than once"),
        (["compare", "--mixers", ","], "mixers must name"),
        (["compare", "--contexts", "1,x"], "--contexts must be whole numbers"),
        (["compare", "--contexts", "0"], "contexts must be token counts"),
        (["compare", "--steps", "0"], "steps must be at least 1, but came as 0"),
        (["compare", "--seed", "-1"], "seed must be"),
        (["compare", "--dim", "33"], "33"),
        (["compare", "--text", "nowhere.txt"], "nowhere.txt"),
        (["generate", "run", "--prompt", "x", "--seed", "9" * 23], "seed must be from 0 to 2**64 - 1"),
        (["generate", "run", "--prompt", "x", "--save-state", "nowhere/s"], "nowhere/s cannot be written: nowhere does not exist"),
        (["chat", "run", "--save-state", "."], ". cannot be written: it is a folder"),
        (["walkthrough", "run", "--prompt", "x", "--out", "nowhere/x.svg"], "nowhere/x.svg cannot be written"),
        (["draw", "gla", "--out", "."], ". cannot be written: it is a folder"),
        (["bench", "ops", "--peers", "products", "--quick", "--device", "cpu", "--out", "nowhere/x"], "nowhere/x cannot be written"),
        (["atlas", "build", "site", "--systems", ""], "at least one system"),
        (["atlas", "serve", "site", "--systems", "gla"], "--systems and --results apply to a new atlas"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(args, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("linattn: ")
    assert err.count("\n") == 1
    assert says in err
    assert not any(tmp_path.iterdir()), "nothing half-written"


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="there is no folder in which not even root can write")
@pytest.mark.parametrize(
    "args",
    [
        ["train", "--text", "text", "--steps", "1", "--dim", "32", "--layers", "1", "--context", "16", "--out", "/sys/kernel/x"],
        ["data", "prepare", "text", "--out", "/sys/kernel/x"],
        ["draw", "gla", "--out", "/sys/kernel/x"],
        ["atlas", "build", "/sys/kernel/x"],
    ],
    ids=lambda args: args[0],
)
def test_a_read_only_folder_is_named_on_one_line(args, capsys, tmp_path, monkeypatch):
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 80)
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    err = capsys.readouterr().err
    assert err.startswith("linattn: ") and err.count("\n") == 1
    assert re.search("(Permission denied|Operation not permitted|Read-only file system): /sys/kernel/", err)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (FileNotFoundError(2, "No such file or directory", "a.txt"), 2, "linattn: No such file or directory: a.txt\n"),
        (OSError("disk full\nreally"), 2, "linattn: disk full really\n"),
        (ModuleNotFoundError("No module named 'x.y'", name="x.y"), 2, "linattn: x is not installed"),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"), 2, r"linattn: a text must be UTF-8, but came as '\udcff'"),
        (MemoryError(), 2, "linattn: not enough memory\n"),
        (KeyboardInterrupt(), 130, "linattn: interrupted\n"),
    ],
)
def test_what_goes_wrong_inside_is_one_line_too(error, code, says, capsys, monkeypatch):
    def fail():
        raise error

    monkeypatch.setattr(linattn.mixers, "available", fail)
    assert main(["list"]) == code
    err = capsys.readouterr().err
    assert err.startswith(says)
    assert err.count("\n") == 1


def test_an_interrupt_is_heard_where_python_drops_what_is_raised(capsys, monkeypatch):
    """Exceptions in callbacks of weak references are dropped, of which meta tensors have many."""

    def work():
        thing = set()
        kept = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
        del thing
        end = time.monotonic() + 10
        while time.monotonic() < end:
            time.sleep(0.001)
        assert kept() is None
        return []

    hook, handler = sys.unraisablehook, signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
    monkeypatch.setattr(linattn.mixers, "available", work)
    try:
        assert main(["list"]) == 130 and capsys.readouterr().err == "linattn: interrupted\n"
    finally:
        signal.signal(signal.SIGINT, handler)
    assert sys.unraisablehook is hook


@pytest.mark.parametrize("error", [ZeroDivisionError(), RuntimeError("a bug"), ModuleNotFoundError("no", name="linattn.nothing")])
def test_a_bug_keeps_its_traceback(error, monkeypatch):
    def fail():
        raise error

    monkeypatch.setattr(linattn.mixers, "available", fail)
    with pytest.raises(type(error)):
        main(["list"])


def test_a_reader_that_goes_away_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "linattn", "--help"], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 1


def test_python_m_is_the_same_door():
    done = _linattn("show", "nothing")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("linattn: no mixer is called 'nothing'")
    assert done.stderr.count("\n") == 1


def test_a_refusal_is_printed_by_one_process_of_a_launch(capsys, monkeypatch, tmp_path):
    """By the first one, since torchrun then ends the others. A message of a single process is printed by it."""
    for rank in (1, 0):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        assert main(["show", "nothing"]) == 2
        assert main(["show", f"nothing{rank}"]) == 2
    assert re.findall(r"is called '(\w+)'", capsys.readouterr().err) == ["nothing", "nothing1", "nothing0"]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")  # torchrun keeps no files
    assert main(["show", "nothing"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_a_refusal_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "linattn"]
    given = ["train", "--cp", "3", "--resume", "--out", str(tmp_path / "run")]
    done = subprocess.run([*command, *given], capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if "must divide the number of processes" in line or "holds no run yet" in line]
    assert [line.partition(" ")[0] for line in said] == [str(tmp_path / "run"), "linattn:"], done.stderr
    assert done.returncode == 1 and re.findall(r"exitcode +: (-?\d+)", done.stderr)[-1] == "2"
