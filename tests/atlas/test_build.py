"""The site: its numbers are the ops', its pages are self-contained, its folder is safe."""

import json
import os
import re
from functools import cache
from html import escape
from importlib import import_module
from pathlib import Path

import pytest
import torch

import linattn
from linattn import mixers
from linattn.atlas import build, inspection, sentence
from linattn.atlas.page import rounded
from linattn.atlas.systems import cost_facts
from linattn.cli.main import main
from linattn.mixers.errors import measured_errors
from linattn.report.folder import write_text
from linattn.state import only_writer
from tests.atlas.pages import SYSTEMS, Chinese, Elements, data, pages
from tests.docs import pages as links
from tests.packaging.tree import ROOT

writing = import_module("linattn.atlas.build")  # the package has a function of this name
INSPECTED = cache(writing.inspect_mixer)


def three(tensor):
    return rounded(tensor.tolist())


@pytest.mark.parametrize("name", [n for n in SYSTEMS if mixers.info(n).linear_in_values])
def test_matrices_on_the_pages_are_recomputed(site, name):
    torch.manual_seed(sentence.SEED)
    mixer = mixers.create(name, dim=sentence.DIM).double()
    with torch.no_grad():
        wanted = linattn.mixing_matrix(mixer, *mixer.arguments(sentence.embedded()))[0]
    shown = data(site, f"systems/{name}.html")["mask"]
    assert shown["matrix"] == three(wanted[:4]) and shown["causal"] == mixers.info(name).causal
    (triangle,) = (s for s in data(site, "triangle.html")["triangles"]["systems"] if s["name"] == name)
    assert triangle["matrix"] == three(wanted[0])


@pytest.mark.parametrize("name", [n for n in SYSTEMS if mixers.info(n).resumable])
def test_states_on_the_pages_are_recomputed(site, name):
    torch.manual_seed(sentence.SEED)
    mixer, x, state = mixers.create(name, dim=sentence.DIM).double(), sentence.embedded(), None
    shown = data(site, f"systems/{name}.html")["state"]
    with torch.no_grad():
        for t in range(x.shape[1]):
            _, state = mixer(x[:, : t + 1], return_state=True)
            kept = state[shown["name"]][0]
            n = inspection.SHOWN
            first = kept[:, 0, :n] if shown["grows"] else kept[None, : inspection.VECTOR] if kept.ndim == 1 else kept[0, :n, :n]
            found = [row for row in shown["values"][t][0] if row[0] is not None]
            torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), first, rtol=6e-3, atol=1e-12)


@pytest.mark.parametrize("name", SYSTEMS)
def test_costs_on_the_pages_are_the_library_s(site, name):
    c = linattn.cost(name, dim=512, tokens=4096)
    html = (site / "systems" / f"{name}.html").read_text()
    for value in (c.parameters, c.flops, c.step_flops, c.state_bytes):
        assert value is None or f'data-value="{value}"' in html
    assert escape(linattn.mixers.info(name).oracle) in html


@pytest.mark.parametrize("name", ["log_linear", "gla", "rwkv4"])
def test_both_languages_say_the_same_multiple_of_the_state(name):
    said = cost_facts(linattn.cost(name, dim=512, tokens=4096))[-1][1]
    (english,), (chinese,) = re.findall(r", ([\d.,]+) times as much<", said), re.findall(r"，是状态的 ([\d.,]+) 倍<", said)
    assert english == chinese != "1"


def test_the_page_tells_the_recorded_distance_to_the_oracle(site):
    recorded = {name: measured_errors(name) for name in SYSTEMS}
    assert recorded["gla"] is not None
    for name, errors in recorded.items():
        html = (site / "systems" / f"{name}.html").read_text(encoding="utf-8").replace("<wbr>", "")
        for error in errors.largest.values() if errors else ():
            assert f'<span data-value="{error!r}">{error:.1e}</span>' in html and errors.test in html


def test_every_page_is_whole_and_loads_only_the_script_and_the_sheet(site):
    root = {path.name for path in site.iterdir()}
    assert {
        "index.html",
        "atlas.css",
        "atlas.js",
        "atlas.json",
        "systems",
        *(f"{n}.html" for n in ("begin", "triangle", "cost", "capacity", "choose", "lab", "pitfalls")),
    } <= root
    for path in pages(site):
        html = path.read_text(encoding="utf-8")
        found = Elements(html).found
        tags = [tag for tag, _ in found]
        assert tags.count("h1") == tags.count("main") == 1, path
        ids = [a["id"] for _, a in found if "id" in a]
        assert len(ids) == len(set(ids)), path
        assert all(not name.startswith("on") for _, a in found for name in a), path
        assert {a["src"] for t, a in found if t == "script" and "src" in a} <= {"atlas.js", "../atlas.js"}
        policy = next(a["content"] for t, a in found if t == "meta" and "http-equiv" in a)
        assert policy.startswith("default-src 'none'")
        counts = [html.count(f'lang="{code}"') for code in ("en", "zh-Hans")]
        assert counts[0] == counts[1], f"{path}: the page's own and the switch's aside, both languages are there"
    assert links.broken(site) == [] and links.foreign(site) == []
    assert not re.search(
        r"url\(|@import|@font-face|fetch\(|XMLHttp|innerHTML", (site / "atlas.css").read_text() + (site / "atlas.js").read_text()
    )


def test_the_documentation_names_places_that_there_are(site):
    """Every page and anchor in the table of others' figures exists."""
    text = (ROOT / "docs" / "figures.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.html)(?:#(\w+))?`", text)
    assert len(named) > 40
    rows = [int(n) for n in re.findall(r"^\| (\d+) \|", text, re.M)]
    assert rows == list(range(1, 19))
    for path, anchor in named:
        if path.startswith("systems/") and not (site / path).exists():
            assert Path(path).stem in mixers.available(), path
            continue
        ids = {a["id"] for _, a in Elements((site / path).read_text(encoding="utf-8")).found if "id" in a}
        assert not anchor or anchor in ids, (path, anchor)


def test_sizes(site):
    assert max(path.stat().st_size for path in pages(site)) < 300_000
    first = sum((site / name).stat().st_size for name in ("index.html", "atlas.css", "atlas.js"))
    assert first < 300_000


ENGLISH = re.compile(
    r"(?<![\w./-])(?:the|of|and|with|its|is|are|was|by|that|which|from|not|as|in|to|on|at|for|or|an|every|than)(?![\w./-])"
)


@pytest.mark.slow
def test_the_whole_site_is_small_and_leaves_no_english_to_a_chinese_reader(tmp_path):
    build(tmp_path / "site")
    whole = sum(path.stat().st_size for path in (tmp_path / "site").rglob("*.*"))
    assert whole < 5_000_000
    assert {path.stem for path in (tmp_path / "site" / "systems").glob("*.html")} >= set(mixers.available())
    found = {
        path.name: [w for w in Chinese(path.read_text(encoding="utf-8")).words if ENGLISH.search(w)] for path in pages(tmp_path / "site")
    }
    assert {name: words for name, words in found.items() if words} == {}
    systems = [path.read_text(encoding="utf-8") for path in (tmp_path / "site" / "systems").glob("*.html") if path.stem != "index"]
    cases = sum(bool(re.search(r'data-claim="(recurrence|steps)"', html)) for html in systems)
    others = len(systems) - cases
    assert abs(cases - 50) <= 5 and abs(others - 80) <= 5, "the first sentences of the READMEs say about fifty, and eighty more"


def test_a_mixer_that_registers_has_its_page(tmp_path):
    gla = mixers.info("gla")

    @mixers.register("gla_of_mine", title="Mine & <yours>", equation=r"S_t = \strange{x}", paper="P", year=2030)
    class Mine(gla.cls):
        pass

    try:
        build(tmp_path, names=["gla_of_mine"])
        html = (tmp_path / "systems" / "gla_of_mine.html").read_text()
    finally:
        del mixers.registry._registered["gla_of_mine"]
    assert "Mine &amp; &lt;yours&gt;" in html and r"<code>S_t = \strange{x}</code>" in html
    assert data(tmp_path, "systems/gla_of_mine.html")["mask"]["matrix"] == rounded(inspection.inspect_mixer("gla").matrix)


def test_a_later_build_replaces_an_earlier_one_and_nothing_else(tmp_path):
    build(tmp_path, names=["gla", "lstm", "gla"])
    assert len(data(tmp_path, "cost.html")["cost"]["systems"]) == 2
    (tmp_path / "mine.txt").write_text("mine")
    build(tmp_path, names=["lstm"])
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert sorted(p.name for p in (tmp_path / "systems").iterdir()) == ["index.html", "lstm.html"]


MADE = {"index.html": "first", "systems/a.html": "a", "atlas.js": "script"}


def mark(folder):
    return json.loads((folder / "atlas.json").read_text())["files"]


def test_a_build_that_was_cut_off_is_no_atlas_and_the_next_one_takes_its_place(tmp_path, monkeypatch):
    for earlier in ([], ["index.html", "systems/old.html"]):
        folder = tmp_path / f"{len(earlier)}"
        if earlier:
            writing._write(folder, dict.fromkeys(earlier, "old"), [])

        def cut(path, text):
            if path.name == "a.html":
                raise OSError("the disk is full")
            write_text(path, text)

        with monkeypatch.context() as m:
            m.setattr(writing, "write_text", cut)
            with pytest.raises(OSError, match="the disk is full"):
                writing._write(folder, MADE, earlier)
        assert not (folder / "index.html").exists() and not (folder / "systems" / "old.html").exists()
        writing._write(folder, MADE, writing._earlier(folder))
        assert mark(folder) == sorted(MADE) and {p: (folder / p).read_text() for p in MADE} == MADE


def test_a_page_falls_on_no_file_of_another_s_and_leaves_the_folder_by_no_link(tmp_path):
    site = tmp_path / "site"
    writing._write(site, {"index.html": "first"}, [])
    (site / "atlas.js").write_text("mine")
    with pytest.raises(ValueError, match=r"atlas\.js exists but does not belong to the atlas"):
        writing._write(site, MADE, writing._earlier(site))
    (site / "atlas.js").unlink()
    (site / "systems").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="leads out of the folder"):
        writing._write(site, MADE, writing._earlier(site))
    assert not (tmp_path / "a.html").exists() and (site / "index.html").read_text() == "first"


def test_a_system_that_fails_leaves_an_earlier_atlas_as_it_was(tmp_path, monkeypatch):
    writing._write(tmp_path, {"index.html": "first"}, [])

    def fail(name):
        raise RuntimeError(name)

    monkeypatch.setattr(writing, "inspect_mixer", fail)
    with pytest.raises(RuntimeError, match="gla"):
        build(tmp_path, names=["gla"])
    assert (tmp_path / "index.html").read_text() == "first" and mark(tmp_path) == ["index.html"]


def test_folders_that_hold_something_else_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds files that do not belong to an atlas"):
        build(tmp_path, names=["gla"])
    with pytest.raises(ValueError, match="is a file"):
        build(tmp_path / "notes.txt", names=["gla"])
    with pytest.raises(ValueError, match="results must be a folder"):
        build(tmp_path / "new", names=["gla"], results=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="did you mean 'gla'"):
        build(tmp_path / "new", names=["glaa"])
    with pytest.raises(ValueError, match="at least one system"):
        build(tmp_path / "new", names=[])
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "content",
    [
        '{"schema": "linattn.bench.gpu"',
        "[]",
        '{"schema": "linattn.bench.gpu"}',
        '{"schema": "linattn.bench.gpu", "rows": 3}',
        '{"schema": "linattn.bench.gpu", "rows": [{"family": "channel"}]}',
        '{"schema": "linattn.compare", "machine": {}}',
        '{"schema": "linattn.reproduce", "study": "recall"}',
        '{"schema": "linattn.reproduce", "study": "moons"}',
        '{"schema": "linattn.reproduce", "study": ["recall"]}',
    ],
)
def test_a_damaged_result_is_named(tmp_path, content, capsys, monkeypatch):
    monkeypatch.setattr(writing, "inspect_mixer", INSPECTED)
    path = tmp_path / "results" / "ops-damaged.json"
    path.parent.mkdir()
    path.write_text(content)
    assert main(["atlas", "build", str(tmp_path / "site"), "--systems", "gla", "--results", str(path.parent)]) == 2
    err = capsys.readouterr().err
    assert str(path) in err.splitlines()[-1]
    assert not (tmp_path / "site" / "index.html").exists()


def test_a_result_that_is_no_json_is_told_before_anything_is_made(tmp_path, capsys):
    (tmp_path / "ops-cut.json").write_text("{")
    assert main(["atlas", "build", str(tmp_path / "site"), "--systems", "gla", "--results", str(tmp_path)]) == 2
    assert re.fullmatch(r"linattn: \S+ops-cut.json is damaged, .*\n", capsys.readouterr().err)
    assert not (tmp_path / "site").exists()


def test_two_builds_never_write_to_one_folder(tmp_path):
    with only_writer(tmp_path), pytest.raises(ValueError, match=rf"another process \(pid {os.getpid()}\) is writing to"):
        build(tmp_path, names=["gla"])
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


def test_a_forged_list_of_files_reaches_nothing_outside(tmp_path):
    (tmp_path / "outside.txt").write_text("precious")
    site = tmp_path / "site"
    site.mkdir()
    (site / "link").symlink_to(tmp_path)
    forged = {"schema": "linattn.atlas", "files": ["../outside.txt", "link/outside.txt", str(tmp_path / "outside.txt")]}
    (site / "atlas.json").write_text(json.dumps(forged))
    build(site, names=["lstm"])
    assert (tmp_path / "outside.txt").read_text() == "precious"


def test_measured_figures_are_those_of_the_files(tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    row = {"library": "linattn", "family": "channel", "shape": "B1 T64 H2 D16", "mode": "forward", "ms": 1.2345, "decay": -0.05,
           "decay_dtype": "bfloat16"}  # fmt: skip
    unusual = [{**row, "decay_dtype": "float32", "ms": 88.0}, {**row, "decay": -5.0, "ms": 88.0}]
    body = {
        "schema": "linattn.bench.gpu",
        "card": "A <card>",
        "runs": [{"date": "2030-01-01"}],
        "rows": [row, {**row, "library": "fla", "ms": 7.0}, *unusual],
    }
    (results / "ops-x.json").write_text(json.dumps(body))
    steps = {"library": "linattn", "model": "gla", "dtype": "bfloat16", "tokens_per_second": 6543.2, "times_llama": 1.234}
    run = {"date": "2030-01-02", "cpu": "A <small cpu>", "threads": 2}
    (results / "train-cpu.json").write_text(json.dumps({**body, "card": "cpu", "runs": [run], "rows": [steps]}))
    token = {
        "library": "linattn",
        "model": "gla",
        "size": "1M",
        "dtype": "float16",
        "rows": 3,
        "context": 4321,
        "step_ms": 0.25,
        "floor_ms": 0.1,
    }
    peer = {"library": "fla", "model": "gla", "size": "1M", "dtype": "float16", "rows": 3, "context": 4321, "generate_ms": 77.0}
    (results / "decode-x.json").write_text(json.dumps({**body, "rows": [token, peer]}))
    image = {"mixer": "focused", "side": 8, "mode": "forward", "ms": 1.0, "tokens_per_second": 4567.0}
    (results / "vision-x.json").write_text(json.dumps({**body, "rows": [image, {**image, "mixer": "softmax", "side": 16}]}))
    study = {"schema": "linattn.reproduce", "study": "recall", "title": "Recall", "command": "linattn reproduce recall", "created": "2030-01-01T",
             "machines": [{"cpu": "A <cpu>", "accelerator": None}, {"cpu": "A <cpu>", "accelerator": None, "cores": 2}],
             "rows": [{"mixer": "gla:heads=2", "accuracy": 0.5, "accuracy_spread": 0.01, "curve": {"2 pairs": 1}}]}  # fmt: skip
    (results / "recall.json").write_text(json.dumps(study))
    machine = {"cpu": "A cpu", "accelerator": None, "threads": 2}
    compared = {"schema": "linattn.compare", "machine": machine, "created": "2030-01-03T", "options": {"layers": 2, "steps": 12}}
    history = [{"validation_bits_per_byte": bits} for bits in (7.5, 6.5, 5.25)]
    learned = {
        "name": "gla",
        "training": {"history": history, "tokens_per_second": 4321.4},
        "contexts": [{"context": 256, "decode_ms": 1.5}],
    }
    (results / "compare-all.json").write_text(json.dumps({**compared, "mixers": [learned]}))
    judged = {"name": "focused", "accuracy": 0.987, "accuracy_spread": 0.002, "images_per_second": 1234.0, "images_per_second_spread": 5.0}
    (results / "compare-digits.json").write_text(json.dumps({**compared, "task": "digits", "title": "Digits", "mixers": [judged]}))
    build(tmp_path / "site", names=["gla", "lstm", "focused"], results=results)
    html = (tmp_path / "site" / "systems" / "gla.html").read_text()
    assert "<td>4,321</td><td>0.250</td><td>0.100</td>" in html and "77.0" not in html and "8 × 8" not in html
    assert "<td>7.500</td><td>5.250</td><td>4,321</td><td>1.50\u00a0ms (256)</td>" in html and "A cpu, 2 threads, 2030-01-03" in html
    assert '<span class="kept">2030-01-03</span></span></caption>' in html, "a date stands on one line"
    focused = (tmp_path / "site" / "systems" / "focused.html").read_text()
    assert "98.70\u00a0%\u00a0±\u00a00.20\u00a0%" in focused
    assert "<td>focused</td><td>4.57</td><td>–</td>" in focused and "<td>softmax</td>" in focused
    assert "2030-01-01</span>; pass: forward</span>" in focused and "2030-01-01</span>；计算：前向</span>" in focused, (
        "what every row says stands above them"
    )
    assert "<td>1.23</td><td>7.00</td>" in html and "A &lt;card&gt;, 2030-01-01" in html and "0.500\u00a0±\u00a00.010" in html
    assert "A &lt;small cpu&gt;, 2 threads, 2030-01-02" in html and "<td>bfloat16</td><td>6,543</td><td>1.23</td>" in html
    assert "linattn reproduce recall, A &lt;cpu&gt;, 2030-01-01" in html and "<td>gla heads 2</td>" in html and "2 pairs" not in html
    assert 'id="measured"' not in (tmp_path / "site" / "systems" / "lstm.html").read_text()
    (point,) = data(tmp_path / "site", "cost.html")["cost"]["measured"]
    assert point == {"kind": "channel", "card": "A <card>", "ms": 1.2345, "B": 1, "T": 64, "H": 2, "D": 16}
