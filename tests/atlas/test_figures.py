"""Figures, computed independently and read in Chromium."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import linattn
from linattn import mixers
from linattn.atlas import begin, choose, lab, tiny
from linattn.atlas.build import Atlas
from linattn.atlas.evidence import Evidence, period
from linattn.atlas.index import thumbnail
from linattn.atlas.inspection import inspect_mixer
from linattn.atlas.methods import TITLES, figures
from linattn.atlas.story.chapters import RULES
from linattn.atlas.story.sheets import WORDS
from linattn.models import pattern
from tests.atlas.browser import AXE, cells, needed
from tests.atlas.pages import SYSTEMS, data

NEW = ["begin.html", "choose.html", "systems/index.html", "methods/index.html", *(f"methods/{name}.html" for name in TITLES)]


@pytest.fixture
def page(open_page):
    needed()
    return open_page


def numbers(figure):
    return {n["key"]: n["values"] for n in figure["numbers"]}


def test_the_shipped_model_recalls_what_its_texts_say():
    right, count = tiny.accuracy(tiny.model(), texts=60, seed=9)
    assert count > 50 and right > 0.97 * count
    guess, _ = tiny.accuracy(tiny.LanguageModel(tiny.CONFIG).double().eval(), texts=60, seed=9)
    assert guess < 0.5 * count, "an untrained one does not"


def test_places_of_recall_are_those_that_follow():
    ann, loves, tea, milk = 4, 10, 12, 13
    told = [ann, loves, tea, 1, ann, loves, tea, 1, tiny.NOW, ann, loves, milk, 1, ann, loves, milk, tiny.STOP]
    assert tiny.recalls(told) == [(5, tea), (14, milk)]


def test_weights_survive_the_file_to_its_resolution():
    model = tiny.LanguageModel(tiny.CONFIG)
    for name, weight in tiny.unpacked(tiny.packed(model)).items():
        own = model.state_dict()[name].double()
        assert (weight - own).abs().max() <= 0.51 * own.abs().max() / tiny.LEVELS


def test_kernels_are_the_formulas():
    x = figures._words()
    scores = (x @ x.T).exp().tril()
    exact = scores / scores.sum(-1, keepdim=True)
    products = {"elu": None, "taylor": 1 + x @ x.T + (x @ x.T) ** 2 / 2, "relu": x.relu() @ x.relu().T}
    phi = torch.where(x > 0, x + 1, x.exp())
    products["elu"] = phi @ phi.T
    found = numbers(figures.kernels())
    for name, product in products.items():
        low = product.tril()
        own = low / low.sum(-1, keepdim=True).clamp_min(1e-12)
        at = list(figures.FEATURES).index(name)
        assert found["error"][at] == pytest.approx(((own - exact).norm() / exact.norm()).item(), rel=6e-3)
    many = torch.cat([figures.random(x) * math.sqrt(figures.RANDOM)], -1)
    assert (many > 0).all(), "random features are positive"
    i = torch.arange(1, 13, dtype=torch.float64)
    wanted = (x.relu() @ x.relu().T) * (math.pi / 2 * (i[:, None] - i) / 12).cos()
    torch.testing.assert_close(figures.cosine(x) @ figures.cosine(x).T, wanted)


def test_the_triangular_system_gives_the_delta_rule():
    made = lab.inputs(WORDS, RULES["delta"])
    k, v = made["k"][0, :, 0], made["v"][0, :, 0]
    state = torch.zeros(8, 8, dtype=torch.float64)
    states = []
    for t in range(12):
        state = state + lab.BETA * torch.outer(k[t], v[t] - k[t] @ state)
        states.append(state)
    shown = next(s for s in figures.triangular()["sheets"] if s["key"] == "state")["values"]
    for chunk, values in enumerate(shown):
        torch.testing.assert_close(torch.tensor(values, dtype=torch.float64), states[4 * chunk + 3], rtol=6e-3, atol=1e-9)
    assert max(numbers(figures.triangular())["apart"]) < 1e-12


def test_forms_and_cards_agree_and_would_not_without_their_decay():
    for values in numbers(figures.forms()).values():
        assert max(values) < 1e-12
    told = figures.cards()
    assert max(numbers(told)["apart"]) < 1e-12
    sheet = {s["key"]: s["values"] for s in told["sheets"]}
    three = figures.CARDS.index(3)
    summed = torch.tensor(sheet["own"][three]) + torch.tensor(sheet["came"][three])
    assert (summed - torch.tensor(sheet["final"][three])).norm() > 0.05 * summed.norm(), "what is handed on decays"


def test_a_thumbnail_has_a_character_per_cell():
    assert thumbnail([[2.0, 0.0], [-1.0, 0.2]], True) == "9 d1"
    assert thumbnail([[0.0, 2.0], [-2.0, 1.0]], False) == "09 i4"


def test_needs_are_columns_of_the_results(tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    rows = [{"task": "mqar", "mixer": m, "accuracy": a} for m, a in (("gla", 0.5), ("gla:heads=2", 0.75), ("softmax", 0.9), ("softmax:window=4", 1.0))]  # fmt: skip
    (results / "reproduce-recall-full.json").write_text(
        json.dumps({"schema": "x", "rows": [*rows, {"task": "copying", "mixer": "gla", "accuracy": 1.0}]})
    )
    found = {need.key: need for need in choose.needs(Atlas(("gla", "softmax", "agent"), results))}
    assert found["recall"].values == {"gla": 0.75, "softmax": 0.9} and set(found) == {"recall", "memory", "checkpoints"}
    assert set(found["memory"].values) == {"gla", "softmax"} and found["memory"].values["softmax"] > found["memory"].values["gla"]


def test_published_families_are_all_named():
    pytest.importorskip("transformers")
    from linattn.hf.convert import FAMILIES

    assert {kind for kinds in choose.CHECKPOINTS.values() for kind in kinds} == set(FAMILIES)


@pytest.mark.parametrize("path", NEW)
def test_every_new_page_opens_and_fits(page, path):
    for width, language, scheme in ((390, "zh", "dark"), (900, "en", "light"), (1400, "zh", "light")):
        reader = page(path, width=width, language=language, scheme=scheme)
        assert reader.page.locator("figure[data-ready]").count() == reader.page.locator("figure[data-figure]").count()
        assert reader.page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_model_of_the_page_is_the_library_s_and_writes_on(page):
    reader = page("begin.html")
    assert float(reader.page.locator("[data-name=distance]").get_attribute("data-value")) < 1e-9
    reader.slide("temperature", 0)
    reader.page.locator("[data-button=next]").click()
    assert reader.page.locator(".chips li").count() == len(begin.PROMPT) + 1
    assert reader.page.locator(".chips li").last.inner_text().startswith("milk")
    reader.page.locator("[data-input=text]").fill("Tom fears soup, Tom fears")
    reader.page.locator("[data-button=next]").click()
    assert reader.page.locator("[data-input=text]").input_value() == "Tom fears soup, Tom fears soup"
    reader.page.locator("[data-input=text]").fill("Zoe xyz soup")
    assert reader.page.locator(".chips small").all_inner_texts() == ["0", "0", str(len(tiny.VOCABULARY) - 2)]


@pytest.mark.parametrize(("path", "name", "slider"), [("kernels", "kernels", "phi"), ("delta", "triangular", "chunk"), ("chunks", "forms", "system"), ("cards", "cards", "cards")])  # fmt: skip
def test_sheets_show_the_json_at_every_stop(page, site, path, name, slider):
    reader, shown = page(f"methods/{path}.html"), data(site, f"methods/{path}.html")[name]
    for stop in range(len(shown["control"]["shows"])):
        reader.slide(slider, stop)
        for sheet in shown["sheets"]:
            wanted = sheet["values"][min(stop, len(sheet["values"]) - 1)]
            assert reader.cells(f"[data-sheet={sheet['key']}]") == cells(wanted)


def test_systems_are_found_by_word_family_introduction_and_year(page):
    reader = page("systems/index.html")

    def shown():
        return reader.page.locator("li[data-families]:visible a").evaluate_all("ns => ns.map(n => n.getAttribute('href'))")

    assert sorted(shown()) == sorted(f"{name}.html" for name in SYSTEMS)
    assert reader.page.locator(".thumb svg").count() == 5, "of all but the LSTM"
    reader.page.locator("[data-input=find]").fill("delta gated")
    assert shown() == ["gated_deltanet.html"]
    reader.page.locator("[data-input=find]").fill("")
    reader.page.locator("[data-select=family]").select_option("recurrent-networks")
    assert shown() == ["lstm.html"]
    reader.page.locator("[data-select=family]").select_option("")
    reader.page.locator("[data-select=named]").select_option("daodaoning")
    assert set(shown()) == {f"{name}.html" for name in SYSTEMS if "000" in mixers.info(name).seeds} < {f"{name}.html" for name in SYSTEMS}
    reader.page.locator("[data-select=named]").select_option("")
    reader.slide("year", 2024)
    assert "gated_deltanet.html" in shown() and "lstm.html" not in shown()


def test_needs_order_the_mixers(page, site):
    reader, shown = page("choose.html"), data(site, "choose.html")["choose"]
    needs = {need["key"]: need for need in shown["needs"]}

    def order():
        return reader.page.locator("tr[data-system]").evaluate_all("ns => ns.map(n => n.dataset.system)")

    recall = needs["recall"]["values"]
    known = {s["name"] for s in shown["systems"]}
    assert [recall[n] for n in order()] == sorted((v for n, v in recall.items() if n in known), reverse=True)
    reader.page.locator("[data-need=recall]").click()
    reader.page.locator("[data-need=memory]").click()
    kept = needs["memory"]["values"]
    assert [kept[n] for n in order()] == sorted(kept[n] for n in order())
    reader.page.locator("[data-need=memory]").click()
    assert order() == [], "nothing is asked"


def test_a_link_to_the_lab_keeps_its_sentence_system_and_token(page):
    reader = page("lab.html")
    reader.page.locator("[data-input=sentence]").fill("one two one three one")
    reader.page.locator("[data-choice=rule] input[value=delta]").check(force=True)
    reader.page.locator("[data-choice=heads] input[value='2']").check(force=True)
    reader.slide("token", 4)
    state = reader.cells("[data-panel=state]")
    reader.page.evaluate("localStorage.clear()")
    reader.page.reload()  # only the address is kept
    assert reader.page.locator("[data-input=sentence]").input_value() == "one two one three one"
    assert reader.page.locator("[data-choice=rule] input[value=delta]").is_checked()
    assert reader.page.locator("[data-choice=heads] input[value='2']").is_checked()
    assert reader.page.locator("[data-slider=token]").input_value() == "4" and reader.cells("[data-panel=state]") == state


def test_the_lab_plays_and_pauses(page):
    reader = page("lab.html")
    reader.slide("token", 12)
    reader.page.locator("[data-button=play]").click()
    slider = reader.page.locator("[data-slider=token]")
    assert slider.input_value() == "1", "from the start, where the end was reached"
    reader.page.wait_for_timeout(1000)
    reader.page.locator("[data-button=play]").click()
    assert reader.page.locator("[data-button=play]").inner_text() == "play" and slider.input_value() in ("2", "3")


@pytest.mark.parametrize("name", ["gla", "gated_deltanet", "softmax"])
def test_a_cell_is_whole_on_a_phone(page, name):
    box = page(f"systems/{name}.html", width=390).page.locator("svg.cell").first.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390


@pytest.mark.parametrize("chapter", [2, 4, 5, 6, 7, 8])
def test_drawings_of_the_story_are_whole_and_large_enough_on_a_phone(page, chapter):
    script = """ns => ns.filter(n => n.getClientRects().length).map(n => {
        const word = n.getBoundingClientRect(), whole = n.ownerSVGElement.getBoundingClientRect();
        const size = parseFloat(getComputedStyle(n).fontSize) * n.getScreenCTM().a;
        return [n.textContent, size, word.left - whole.left, whole.right - word.right, whole.left, whole.right]; })"""
    for language in ("en", "zh"):
        reader = page(f"story/{chapter}.html", width=390, language=language)
        found = reader.page.locator("figure.drawn svg text").evaluate_all(script)
        assert found
        for word, size, left, right, start, end in found:
            assert size >= 9 and left >= -1 and right >= -1, (word, size, left, right)
            assert start >= 0 and end <= 390, (word, start, end)


def test_the_label_of_a_gate_has_the_gate_s_colour(page):
    """Text outside the group with its colour would be black on black."""
    script = "ns => new Set(ns.map(n => getComputedStyle(n).fill)).size"
    words = page("story/5.html", scheme="dark").page.locator("svg .tq text.t")
    assert words.count() >= 4 and words.evaluate_all(script) == 1
    black = "ns => ns.filter(n => getComputedStyle(n).fill === 'rgb(0, 0, 0)').map(n => n.textContent)"
    assert page("story/5.html", scheme="dark").page.locator("svg text").evaluate_all(black) == []


def test_gates_and_short_convolutions_are_drawn_where_the_code_has_them(site):
    drawn = {name: (site / "systems" / f"{name}.html").read_text(encoding="utf-8") for name in SYSTEMS}
    assert "short convolution (4)" in drawn["gated_deltanet"] and "multiplied by a gate" in drawn["gated_deltanet"]
    assert "short convolution (4)" not in drawn["gla"] and "multiplied by a gate" in drawn["gla"]


GATED = {
    "gla": True,
    "retnet": True,
    "kda": True,
    "rwkv7": True,
    "mamba2": True,
    "mlstm": True,
    "deltanet": False,
    "hgrn2": False,
    "linear": False,
}


@pytest.mark.parametrize("name", GATED)
def test_a_gate_is_found_by_what_it_does(name):
    spec = inspect_mixer(name).spec
    assert spec.gate == GATED[name] and spec.conv == (4 if name in ("kda", "mamba2", "deltanet") else 0)


@pytest.mark.parametrize(
    "path",
    [
        *NEW,
        "index.html",
        "lab.html",
        "capacity.html",
        "pitfalls.html",
        "cost.html",
        "triangle.html",
        "systems/gla.html",
        "systems/lstm.html",
    ],
)
def test_axe_finds_nothing(page, path):
    """Including minor violations, such as skipped heading levels."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    for language, scheme in (("en", "light"), ("zh", "dark")):
        found = axe.Axe().run(page(path, language=language, scheme=scheme).page, options=AXE).response["violations"]
        assert [(v["id"], v["nodes"][0]["html"][:160]) for v in found] == []


def test_the_patterns_of_the_hybrids_are_the_layers_that_were_measured():
    """Repeated, as a config does."""
    body = json.loads((Path(linattn.__file__).parents[1] / "benchmarks/results/reproduce-hybrids-full.json").read_text())
    shown = [period(row["layers"]) for row in body["rows"]]
    layers = [pattern.parse(row["layers"], "layers") for row in body["rows"]]
    assert [pattern.fill(pattern.parse(text, "layers"), len(names)) for text, names in zip(shown, layers, strict=True)] == layers
    assert "mamba2, softmax" in shown


def test_the_table_of_hybrids_tells_which_steps_ran_as_one_graph():
    """A captured step and one that launches each operation do not compare."""
    body = json.loads((Path(linattn.__file__).parents[1] / "benchmarks/results/reproduce-hybrids-full.json").read_text())
    found = Evidence(SimpleNamespace(measured=lambda name: [(name, body)])).hybrids()
    captured = [row["state_bytes"] for row in body["rows"] if "CUDA graph" in row["how"]]
    at = [head.en for head in found.heads].index("step run as")
    assert [row["share"] for row in body["rows"] if row["state_bytes"] in captured] == ["0"]
    assert [row[0] for row in found.rows if "CUDA graph" in row[at]] == ["0"] and len(found.rows) == len(body["rows"]) > 1
