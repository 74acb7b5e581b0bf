"""All code in the two READMEs runs, and READMEs and pages of tables agree in both languages."""

import re
import subprocess
import sys
import tomllib

import pytest

from linattn.cli.main import main
from linattn.hf.convert import FAMILIES
from tests.docs import markdown
from tests.packaging.tree import ROOT

ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"
PAGES = ["README", "docs/studies", "docs/benchmarks"]


def run(words: list[str], folder) -> str:
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_python_blocks_run(tmp_path, programs):
    program = tmp_path / "README.py"
    program.write_text(markdown.python(ENGLISH))
    said = programs.run(tmp_path, program)
    assert re.search("cpu: runs, recurrent form|torch: runs, chunk form", said) and said.startswith("keeps its size.")


def test_the_recipe_takes_twenty_lines():
    guide = markdown.python(ROOT / "docs/guides/own_mixer.md")
    (recipe,) = re.findall(r"^@linattn\.register.*?(?=\n\n\n|\Z)", guide, re.M | re.S)
    assert len([line for line in recipe.split("\n```")[0].splitlines() if line.strip()]) <= 20


def test_the_commands_run_at_their_smallest(tmp_path, monkeypatch, capsys):
    """Training and generation run in this process; of longer commands only the options are parsed."""
    tiny = {"train": "--steps 1 --dim 32 --layers 1", "generate": "--max-new-tokens 4", "atlas": "--systems gla", "reproduce": "--seeds 1"}
    long = {"compare", "bench"}
    monkeypatch.chdir(tmp_path)
    for program, *words in markdown.commands(ENGLISH):
        if program != "linattn":
            continue
        if words[0] in long:
            assert main([words[0], "--help"]) == 0
            known = capsys.readouterr().out
            assert all(word in known for word in words if word.startswith("--"))
        else:
            code, said = main([*words, *tiny.get(words[0], "").split()]), capsys.readouterr()
            assert code == 0 and said.out, said.err


def test_the_targets_of_make_are_there(tmp_path):
    targets = [words[1] for words in markdown.commands(ENGLISH) if words[0] == "make"]
    assert targets == ["demo", "test"]
    for target in targets:
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


def test_both_languages_show_the_same_code():
    assert markdown.without_words(markdown.python(ENGLISH)) == markdown.without_words(markdown.python(CHINESE))
    assert markdown.commands(ENGLISH) == markdown.commands(CHINESE)
    assert len(markdown.python(ENGLISH)) > 1000 and len(ENGLISH.read_text(encoding="utf-8").splitlines()) <= 160


@pytest.mark.parametrize("path", [ENGLISH, CHINESE], ids=lambda path: path.name)
def test_the_badges_are_true(path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (line for line in project["dependencies"] if line.startswith("torch"))
    python = project["requires-python"]
    wanted = [f"python-{python.removeprefix('>=')}%2B-blue", f"torch-{torch.removeprefix('torch>=')}%2B-orange", "types-mypy-green"]
    shown = re.findall(r"badge/([^)]+)\)", path.read_text(encoding="utf-8"))
    assert shown == [f"licence-{project['license'].replace('-', '--')}-blue", *wanted]


@pytest.mark.parametrize("page", PAGES)
def test_both_languages_have_the_same_tables(page):
    def cells(path):
        return [line.count("|") for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]

    english, chinese = (cells(ROOT / f"{page}{language}.md") for language in ("", ".zh"))
    assert english == chinese and len(english) > 10


def test_the_numbers_of_families_are_those_of_the_converters():
    for path, words in ((ENGLISH, r"(\d+) families of published checkpoints"), (CHINESE, r"(\d+) 个系列的已发表权重")):
        assert re.findall(words, path.read_text(encoding="utf-8")) == [str(len(FAMILIES))]


CHINESE_PAGES = [CHINESE, *sorted((ROOT / "docs").glob("*.zh.md")), *sorted((ROOT / "docs/zh").glob("*.md"))]
CHARACTER = "[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef“”]"


@pytest.mark.parametrize("path", CHINESE_PAGES, ids=lambda path: path.name)
def test_chinese_text_has_no_spaces_and_no_straight_quotation_marks(path):
    """A line break within Chinese text becomes a space on the page."""
    text = re.sub(r"^(?:```(?s:.*?)^```| {4}.*| *<.*)$", "", path.read_text(encoding="utf-8"), flags=re.M)
    text = re.sub("`[^`\\n]*`", "code", text)
    assert re.findall(f".{{0,9}}{CHARACTER}[ \n](?={CHARACTER})", text) == []
    assert re.findall(f'.*{CHARACTER}"|"{CHARACTER}.*', text) == []


@pytest.mark.parametrize("language", ["", ".zh"])
@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page, language):
    path = ROOT / f"{page}{language}.md"
    found = markdown.links(path)
    assert f"{path.name.partition('.')[0]}{'' if language else '.zh'}.md" in found
    missing = [link for link in found if "://" not in link and not (path.parent / link.partition("#")[0]).exists()]
    assert missing == []
    for file, _, anchor in (link.partition("#") for link in found if "://" not in link and "#" in link):
        heads = re.findall(r"^#+ (.*)$", (path.parent / file).read_text(encoding="utf-8"), re.M)
        assert anchor in [head.lower().replace(" ", "-") for head in heads], (file, anchor)
