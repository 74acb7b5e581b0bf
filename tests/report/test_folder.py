import json
import os

import pytest

from linattn.cli.main import main
from linattn.report import QUICK, CompareOptions
from linattn.report.folder import SCHEMA, VERSION, Folder, write_text
from linattn.state import only_writer


def _names(path):
    return sorted(p.name for p in path.iterdir())


def test_a_new_folder_is_marked_before_anything_else(tmp_path):
    folder = Folder(tmp_path / "a" / "b")
    folder.begin({"schema": SCHEMA, "complete": False})
    assert _names(tmp_path / "a" / "b") == ["models", "report.json"]
    assert json.loads(folder.json.read_text())["complete"] is False


def test_only_what_is_ours_is_replaced(tmp_path):
    folder = Folder(tmp_path)
    folder.begin({"schema": SCHEMA, "version": VERSION})
    for name in ("report.html", "notes.txt", "models/old"):
        (tmp_path / name).write_text("x")
    Folder(tmp_path).begin({"schema": SCHEMA, "version": VERSION, "run": 2})
    assert _names(tmp_path) == ["models", "notes.txt", "report.json"]
    assert _names(tmp_path / "models") == []
    assert json.loads(folder.json.read_text()) == {"schema": SCHEMA, "version": VERSION, "run": 2}


@pytest.mark.parametrize("content", [None, '{"schema": "other"}', "{}"])
def test_foreign_folders_are_refused_and_untouched(tmp_path, content):
    name = "thesis.tex" if content is None else "report.json"
    (tmp_path / name).write_text(content or "mine")
    with pytest.raises(ValueError, match="not part of a linattn report"):
        Folder(tmp_path)
    assert _names(tmp_path) == [name]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "damaged, truncated or not JSON"),
        (json.dumps({"schema": SCHEMA, "version": VERSION, "mixers": []})[:-9], "damaged, truncated or not JSON"),
        (b"\xff\xfe{}", "damaged, truncated or not JSON"),
        ("[" * 100_000, "damaged, truncated or not JSON"),
        ("[]", "must hold a JSON object, but holds a list"),
        (f'"{SCHEMA}"', "must hold a JSON object, but holds a str"),
        (json.dumps({"schema": SCHEMA, "version": VERSION + 1}), f"is of version {VERSION + 1}, and this linattn writes {VERSION}"),
        (json.dumps({"schema": SCHEMA}), f"is of version None, and this linattn writes {VERSION}"),
    ],
)
def test_a_damaged_report_is_named_and_stays(tmp_path, content, says, capsys):
    path = tmp_path / "report.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = path.read_bytes()
    for task in ([], ["--task", "sort"]):
        assert main(["compare", "--quick", "--mixers", "gla", "--out", str(tmp_path), *task]) == 2
        err = capsys.readouterr().err
        assert f"{path} {says}" in err.replace("is damaged", "damaged") and err.count("\n") == 1
    assert path.read_bytes() == before
    assert _names(tmp_path) == ["report.json"]


def test_a_file_and_a_link_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="must be a folder"):
        Folder(tmp_path / "file")
    mine = tmp_path / "mine"
    Folder(tmp_path / "out").begin({"schema": SCHEMA, "version": VERSION})
    mine.mkdir()
    (tmp_path / "out" / "models").rmdir()
    (tmp_path / "out" / "models").symlink_to(mine)
    with pytest.raises(ValueError, match="is a link"):
        Folder(tmp_path / "out")
    assert mine.is_dir()


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "report.html"
    write_text(path, "old")
    with pytest.raises(TypeError):
        write_text(path, None)
    assert path.read_text() == "old"
    write_text(path, "half \udc80 of a name")
    assert path.read_text() == "half ? of a name"
    assert _names(tmp_path) == ["report.html"]


def test_not_a_number_is_never_written(tmp_path):
    folder = Folder(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        folder.save({"loss": float("inf")})
    assert _names(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mixers": ()}, "mixers must name"),
        ({"mixers": ("gla", "softmax", "gla")}, "gla came more than once"),
        ({"steps": 0}, "steps must be at least 1, but came as 0"),
        ({"contexts": ()}, "contexts must be"),
        ({"contexts": (256, 0)}, "contexts must be"),
    ],
)
def test_options_are_checked(options, says):
    with pytest.raises(ValueError, match=says):
        CompareOptions(**options)


def test_the_command_says_what_differs():
    assert CompareOptions().command() == "linattn compare"
    assert QUICK.command() == "linattn compare --quick"
    assert (
        CompareOptions(mixers=("gla", "lstm"), steps=7, text=("a b.txt",)).command()
        == "linattn compare --mixers gla,lstm --text 'a b.txt' --steps 7"
    )


def test_two_comparisons_never_write_to_one_folder(tmp_path, capsys):
    Folder(tmp_path / "out").begin({"schema": SCHEMA, "version": VERSION, "run": 1})
    commands = ("compare --quick", "compare --quick --task sort")
    with only_writer(tmp_path / "out"):
        for command in commands:
            assert main([*command.split(), "--mixers", "gla", "--out", str(tmp_path / "out")]) == 2
            err = capsys.readouterr().err
            assert f"another process (pid {os.getpid()}) is writing to {tmp_path / 'out'}" in err
            assert err.count("\n") == 1
    assert json.loads((tmp_path / "out" / "report.json").read_text())["run"] == 1


def test_a_folder_is_looked_at_again_once_nobody_else_writes_to_it(tmp_path):
    folder = Folder(tmp_path / "out")
    Folder(tmp_path / "out", "linattn.other").begin({"schema": "linattn.other", "version": VERSION})
    with pytest.raises(ValueError, match="not part of a linattn report"), folder.held():
        raise AssertionError("it is another's by now")
    assert Folder(tmp_path / "out", "linattn.other").load() is not None
