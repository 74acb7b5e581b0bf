"""The story: its numbers are the ops', shown at every stop, in both languages, at three widths."""

import re
import xml.etree.ElementTree as ET
from html import unescape

import pytest
import torch

import linattn
from linattn.atlas import lab, sentence
from linattn.atlas.cell import WIDE
from linattn.atlas.page import rounded
from linattn.atlas.story import LINE
from linattn.atlas.story.chapters import AFTER, CHUNKS, DECAYS, FIGURES
from linattn.atlas.story.drawings import BROAD, DRAWINGS, TALL
from tests.atlas.browser import AXE, cells, needed
from tests.atlas.pages import SYSTEMS, data

WORDS = [word.en for word in sentence.SENTENCE]
CHAPTERS = [f"story/{n}.html" for n in FIGURES]
PAGES = ["story/index.html", *CHAPTERS, "lab.html", "capacity.html", "pitfalls.html"]
SVG = "{http://www.w3.org/2000/svg}"
CHINESE = re.compile("[\u4e00-\u9fff]")


def rule(key):
    return next(r for r in lab.RULES if r.key == key)


def reference(key, decay=lab.DECAY, beta=lab.BETA):
    """States after each token by the reference, from one call for every prefix."""
    made = lab.inputs(WORDS, rule(key), decay, beta)
    found = []
    for t in range(1, 13):
        cut = {n: x[:, :t] if isinstance(x, torch.Tensor) and x.ndim > 2 else x for n, x in made.items()}
        if "erase" in made:
            cut["erase"] = tuple(x[:, :t] for x in made["erase"])
        found.append(linattn.linear_attention(**cut, return_state=True, backend="reference")[1][0, 0])
    return found


def test_captions_name_no_side(site):
    """Side by side in a wide window is one below the other in a narrow one."""
    for path in CHAPTERS:
        told = re.findall("<figcaption>(.*?)</figcaption>", (site / path).read_text(encoding="utf-8"), re.S)
        assert not [words for words in told if re.search(r"to the (?:left|right)|[左右]边", words)], path


@pytest.mark.parametrize(("page", "name", "index", "key", "options"), [
    (3, "pot", 0, "none", {}),
    (5, "retention", 3, "constant", {"decay": DECAYS[3]}),
    *((8, "after", i, key, {}) for i, key in enumerate(AFTER)),
    (8, "strength", 6, "delta", {"beta": 2.0}),
])  # fmt: skip
def test_states_and_readings_are_recomputed(site, page, name, index, key, options):
    shown = data(site, f"story/{page}.html")[name]
    variant, states = shown["variants"][index], reference(key, **options)
    names = [word["en"] for word in shown["words"]]
    for t in (0, 5, 10, 11):
        torch.testing.assert_close(torch.tensor(variant["states"][t], dtype=torch.float64), states[t], rtol=6e-3, atol=1e-12)
        q = torch.tensor(lab.vector(WORDS[t]), dtype=torch.float64)
        heard = {w: (q @ states[t] @ torch.tensor(lab.vector(w), dtype=torch.float64)).item() for w in names}
        assert dict(zip(names, variant["recalled"][t], strict=True)) == pytest.approx(heard, rel=6e-3, abs=1e-12)


def test_the_story_tells_what_its_figures_show(site):
    """Sentences without inserted numbers agree with the numbers."""
    pot, after = data(site, "story/3.html")["pot"], data(site, "story/8.html")["after"]
    assert pot["tea"] > 0.6 and pot["milk"] > 0.6
    assert after["heard"]["delta"]["milk"] > 0.8 and abs(after["heard"]["delta"]["tea"]) < 0.2
    numbers = {n["key"]: n["values"] for n in data(site, "story/3.html")["sharpness"]["numbers"]}
    assert numbers["soft"][0] < numbers["share"][0] < numbers["soft"][3] and len(set(numbers["share"])) == 1
    numbers = {n["key"]: n["values"] for n in data(site, "story/6.html")["selection"]["numbers"]}
    assert numbers["s4d"] == [0, 0, 0] and min(numbers["mamba"][1:]) > 0.1
    numbers = {n["key"]: n["values"] for n in data(site, "story/7.html")["chunks"]["numbers"]}
    assert numbers["rank"] == [2, 2, 2, 2, 2, 0] and max(numbers["apart"]) < 1e-14 and numbers["states"] == [12 // c - 1 for c in CHUNKS]
    numbers = {n["key"]: n["values"] for n in data(site, "story/4.html")["reach"]["numbers"]}
    assert numbers["rnn"][0] < numbers["lstm"][1] < numbers["lstm"][2] < numbers["lstm"][3]
    cache = {n["key"]: n["values"] for n in data(site, "story/2.html")["decoding"]["numbers"]}
    assert cache["cache"][3] == cache["kept"][3] == 64 and max(cache["apart"]) < 1e-14


@pytest.mark.parametrize(("chapter", "name"), [(n, name) for n, names in DRAWINGS.items() for name in names])
def test_drawings_are_whole_with_a_shape_on_every_box(site, chapter, name):
    roots = list(ET.fromstring(f"<div>{DRAWINGS[chapter][name]()}</div>"))
    widths = [float(root.get("viewBox").split()[2]) for root in roots]
    assert widths == ([BROAD, TALL] if widths[0] > WIDE else widths[:1]), "wide ones once more for phones"
    for root in roots:
        boxes = [g for g in root.iter(f"{SVG}g") if g.find(f"{SVG}rect[@rx='6']") is not None]
        assert boxes or name == "duality"
        assert all(any("shape" in text.get("class").split() for text in g.iter(f"{SVG}text")) for g in boxes)
        assert root.get("data-label-en") and CHINESE.search(root.get("data-label-zh"))
        assert root.get("aria-label") in unescape((site / f"story/{chapter}.html").read_text(encoding="utf-8"))


def test_the_line_leads_to_chapters_and_to_pages_that_there_are(site):
    html = (site / "story" / "index.html").read_text(encoding="utf-8")
    assert all(f'href="{chapter}.html"' in html for _, chapter, *_ in LINE)
    assert all(linattn.mixers.info(name) and (f'href="../systems/{name}.html"' in html) == (name in SYSTEMS) for name, *_ in LINE)


def test_orders_cost_what_the_products_cost(site):
    shown = data(site, "story/1.html")["orders"]
    d = shown["width"]
    for stop in shown["stops"]:
        n = stop["length"]
        assert (stop["left"], stop["right"]) == (2 * n * n * d, 2 * n * d * d)
    assert shown["apart"] < 1e-14 and shown["softmax"] > 0.1


def test_dependence_is_the_derivative(site):
    torch.manual_seed(sentence.SEED)
    mixer, x = linattn.mixers.create("rnn", dim=sentence.DIM).double(), sentence.embedded()
    jacobian = torch.autograd.functional.jacobian(lambda x: mixer(x)[0, 8], x)[:, 0]  # [dim, T, dim]
    shown = data(site, "story/4.html")["reach"]["sheets"][0]["values"][0][8]
    assert shown[:9] == pytest.approx(jacobian.pow(2).sum((0, 2)).sqrt().tolist()[:9], rel=6e-3)


def test_costs_are_the_cost_sheets(site):
    numbers = {n["key"]: n["values"] for n in data(site, "story/2.html")["lengths"]["numbers"]}
    assert numbers["linear"][2] == rounded(linattn.cost("linear", dim=512, heads=4, tokens=4096).step_flops)
    assert numbers["softmax"][2] == rounded(linattn.cost("softmax", dim=512, heads=4, tokens=4096).step_flops)


@pytest.mark.parametrize("path", PAGES)
def test_both_languages_say_it_and_no_figure_was_typed(site, path):
    html = (site / path).read_text(encoding="utf-8").partition("<main")[2].partition("</main>")[0]
    assert "{{" not in html and "[[" not in html and "nan" not in html.lower().replace("finance", "")
    chinese = "".join(re.findall(r'<(?:p|li|summary)[^>]*lang="zh-Hans">(.*?)</(?:p|li|summary)>', html, re.S))
    chinese = re.sub(r"<math.*?</math>|<[^>]+>|&\w+;", "", chinese, flags=re.S)
    assert not re.search("[\u4e00-\u9fff][,;:?!]", chinese), "half-width punctuation in Chinese"


class TestReading:
    @pytest.fixture(autouse=True)
    def _browser(self):
        needed()

    @pytest.mark.parametrize("path", PAGES)
    def test_every_page_opens_draws_and_fits(self, open_page, path):
        for width, language, scheme in ((390, "zh", "dark"), (820, "en", "light"), (1440, "zh", "light")):
            reader = open_page(path, width=width, language=language, scheme=scheme)
            assert reader.page.locator("figure[data-ready]").count() == reader.page.locator("figure[data-figure]").count()
            assert reader.page.evaluate("document.documentElement.scrollWidth") <= width
            assert bool(CHINESE.search(reader.page.inner_text("main"))) == (language == "zh")

    @pytest.mark.parametrize("path", [*CHAPTERS, "pitfalls.html"])
    def test_sheets_show_the_json_at_every_stop(self, open_page, site, path):
        reader = open_page(path)
        for name, shown in data(site, path).items():
            if "sheets" not in shown:
                continue
            place = reader.page.locator(f"figure[data-set={name}]")
            slider = place.locator("[data-slider]")
            for stop in range(len(shown["control"]["shows"])):
                slider.evaluate("(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); }", stop)
                for sheet in shown["sheets"]:
                    wanted = sheet["values"][min(stop, len(sheet["values"]) - 1)]
                    assert reader.cells(f"figure[data-set={name}] [data-sheet={sheet['key']}]") == cells(wanted)
                for number in shown["numbers"]:
                    output = place.locator(f"output[data-name={number['key']}]")
                    value = number["values"][stop]
                    if isinstance(value, dict):
                        assert value["en"] in output.inner_text()
                    else:
                        assert float(output.get_attribute("data-value")) == value

    @pytest.mark.parametrize(
        ("path", "name"), [("story/3.html", "pot"), ("story/5.html", "retention"), ("story/8.html", "after"), ("story/8.html", "strength")]
    )
    def test_memories_show_the_json_at_every_stop(self, open_page, site, path, name):
        reader, shown = open_page(path), data(site, path)[name]
        place = reader.page.locator(f"figure[data-set={name}]")
        move = "(e, v) => { e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); }"
        heard = "ns => ns.map(n => +n.dataset.value)"
        for index, variant in enumerate(shown["variants"]):
            if shown["control"]:
                place.locator(f"[data-slider={shown['control']['name']}]").evaluate(move, index)
            for token in (1, 7, 11, 12):
                place.locator("[data-slider=token]").evaluate(move, token)
                assert reader.cells(f"figure[data-set={name}] .grid") == cells(variant["states"][token - 1])
                assert place.locator("rect[data-name]").evaluate_all(heard) == variant["recalled"][token - 1]

    def test_the_two_orders_show_the_counts(self, open_page, site):
        reader, shown = open_page("story/1.html"), data(site, "story/1.html")["orders"]
        for i, stop in enumerate(shown["stops"]):
            reader.slide("length", i)
            for side in ("left", "right"):
                assert int(reader.page.locator(f"output[data-name={side}]").get_attribute("data-value")) == stop[side]
            assert f"[{stop['length']}, {stop['length']}]" in reader.page.locator("figure svg").first.text_content()

    def test_a_question_comes_before_its_answer(self, open_page):
        page = open_page("story/3.html").page
        question = page.locator("details.question").first
        assert question.locator("p:visible").count() == 0
        question.locator("summary").focus()
        page.keyboard.press("Enter")
        assert question.locator("p:visible").count() == 1

    @pytest.mark.parametrize(("path", "scheme", "language", "width"), [
        ("story/index.html", "dark", "en", 820), ("story/1.html", "light", "zh", 390), ("story/2.html", "dark", "zh", 390), ("story/3.html", "dark", "en", 1280),
        ("story/4.html", "light", "en", 820), ("story/5.html", "dark", "zh", 1280), ("story/6.html", "light", "zh", 820), ("story/7.html", "dark", "en", 390),
        ("story/8.html", "light", "zh", 390), ("lab.html", "dark", "zh", 390), ("capacity.html", "light", "en", 390), ("pitfalls.html", "dark", "zh", 820),
    ])  # fmt: skip
    def test_axe_finds_nothing(self, open_page, path, scheme, language, width):
        axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
        reader = open_page(path, scheme=scheme, language=language, width=width)
        found = axe.Axe().run(reader.page, options=AXE).response["violations"]
        assert [(v["id"], v["nodes"][0]["html"][:160], v["nodes"][0].get("failureSummary", "")[:200]) for v in found] == []


def boxes(svg):
    """Names of the boxes of a block on the way above and on the way below, from its drawing for wide screens."""
    broad = ET.fromstring(re.search('<svg[^>]*class="cell broad".*?</svg>', svg, re.S)[0])
    named = [
        (float(t.get("y")), "".join(t.itertext()).replace("\u200b", ""))
        for t in broad.iter(f"{SVG}text")
        if t.get("class") in ("t name", "t small") and t.get("lang") != "zh-Hans"
    ]
    return [name for y, name in named if y < 80], [name for y, name in named if y > 150]


def followed(steps, names, x):
    """``x`` after the steps of these names, one after the other."""
    for name in names:
        x = steps[name](x)
    return x


def test_the_block_of_channel_mixing_computes_what_the_mixer_does():
    torch.manual_seed(0)
    x, mixer = torch.randn(1, 9, sentence.DIM), linattn.mixers.create("rwkv_channel", dim=sentence.DIM)
    before = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
    steps = {"Wk": mixer.k_proj, "ReLU²": lambda h: h.relu().square(), "Wv": mixer.o_proj, "Wr": mixer.r_proj, "σ": torch.sigmoid}
    ways = [
        followed(steps | {"mixed with t − 1": lambda h, mix=mix: torch.lerp(before, h, mix)}, way, x)
        for mix, way in zip((mixer.time_mix_key, mixer.time_mix_receptance), boxes(DRAWINGS[8]["channel"]()), strict=True)
    ]
    torch.testing.assert_close(ways[0] * ways[1], mixer(x))


def test_the_block_of_h3_computes_what_the_mixer_does():
    torch.manual_seed(0)
    x, mixer = torch.randn(1, 9, sentence.DIM), linattn.mixers.create("h3", dim=sentence.DIM).double()
    x = x.double()
    decay, B, C = mixer.system()  # [H, K / 2] each
    response = (torch.exp(decay[..., None] * torch.arange(9)) * (B * C)[..., None]).sum(1).real  # [H, 9]
    shift = mixer.shift_kernel().double()[:, :9]

    def convolved(kernel, skip):
        return lambda u: skip * u + sum(kernel[:, j] * torch.nn.functional.pad(u, (0, 0, j, 0))[:, :9] for j in range(9))

    steps = {
        "Wk": mixer.k_proj, "Wq": mixer.q_proj, "⊙ x Wv": lambda k: k * mixer.v_proj(x),
        "shift SSM": convolved(shift, mixer.shift_D), "diagonal SSM": convolved(response, mixer.D),
    }  # fmt: skip
    above, below = (followed(steps, way, x) for way in boxes(DRAWINGS[6]["h3"]()))
    torch.testing.assert_close(mixer.o_proj(above * below), mixer(x), rtol=1e-5, atol=1e-6)
