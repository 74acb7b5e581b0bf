"""Pages in Chromium from disk: no errors, no requests, the data's numbers at every stop, keyboard, both languages, three widths."""

import re

import pytest

from linattn.atlas.cost_page import evaluate
from tests.atlas.browser import cells, needed
from tests.atlas.pages import data

PAGES = [
    "index.html",
    "systems/index.html",
    "triangle.html",
    "cost.html",
    *(f"systems/{name}.html" for name in ("gla", "softmax", "lstm")),
]
CHINESE = re.compile("[\u4e00-\u9fff]")


@pytest.fixture(autouse=True)
def _browser():
    needed()


def below(matrix, causal):
    return [[None if causal and j > i else v for j, v in enumerate(row)] for i, row in enumerate(matrix)]


@pytest.mark.parametrize("path", PAGES)
def test_every_page_opens_draws_and_fits(open_page, path):
    """The fixture asserts at the end that there were no console messages and no requests."""
    for width, language, scheme in ((390, "zh", "dark"), (820, "en", "light"), (1440, "zh", "light")):
        reader = open_page(path, width=width, language=language, scheme=scheme)
        figures = reader.page.locator("figure[data-figure]")
        assert reader.page.locator("figure[data-ready]").count() == figures.count()
        assert reader.page.evaluate("document.documentElement.scrollWidth") <= width
        shown = reader.page.inner_text("main")
        assert bool(CHINESE.search(shown)) == (language == "zh")
        assert reader.page.evaluate("document.documentElement.lang") == ("zh-Hans" if language == "zh" else "en")


@pytest.mark.parametrize("path", ["systems/gla.html", "triangle.html", "cost.html", "capacity.html", "lab.html", "story/1.html"])
def test_drawings_whose_numbers_stand_elsewhere_are_hidden_from_readers_aloud(open_page, path):
    """The attribute needs the value true."""
    hidden = open_page(path).page.locator("svg[aria-hidden]")
    assert set(hidden.evaluate_all("ns => ns.map(n => n.getAttribute('aria-hidden'))")) == {"true"}


@pytest.mark.parametrize("name", ["gla", "softmax", "lstm", "agent"])
def test_no_word_of_a_cell_is_cut_off(open_page, name):
    script = """ns => ns.filter(n => n.getClientRects().length).filter(n => {
        const word = n.getBoundingClientRect(), whole = n.ownerSVGElement.getBoundingClientRect();
        return word.left < whole.left || word.right > whole.right || word.top < whole.top || word.bottom > whole.bottom; })
        .map(n => n.textContent)"""
    for language in ("en", "zh"):
        assert open_page(f"systems/{name}.html", language=language).page.locator("svg.cell text").evaluate_all(script) == []


@pytest.mark.parametrize("name", ["gla", "softmax", "lstm", "agent"])
def test_matrix_and_state_show_the_json_at_every_stop(open_page, site, name):
    reader, sets = open_page(f"systems/{name}.html"), data(site, f"systems/{name}.html")
    mask, state = sets.get("mask"), sets.get("state")
    if mask:
        for head in range(len(mask["matrix"])):
            reader.page.locator("[data-choice=head] input").nth(head).check(force=True)
            assert reader.cells("#mask") == cells(below(mask["matrix"][head], mask["causal"]))
        for stop in (1, 7, 12):
            reader.slide("query", stop)
            bright = "ns => [...new Set(ns.filter(n => !n.classList.contains('dim')).map(n => +n.dataset.row))]"
            assert reader.page.locator("#mask rect[data-row]").evaluate_all(bright) == [stop - 1]
    if state:
        vector = not state["grows"] and len(state["values"][0][0]) == 1
        for stop in (1, 5, 12):
            reader.slide("token", stop)
            if vector:
                wanted = [step[0][0] for step in state["values"][:stop]]
            else:
                wanted = state["values"][stop - 1][0]
            assert reader.cells("#state") == cells(wanted)
            assert reader.page.locator("#state output").inner_text().startswith(str(stop))


def test_a_slider_reacts_within_a_tenth_of_a_second(open_page):
    sliders = (
        ("systems/gla.html", "token", range(1, 13)), ("systems/gla.html", "query", range(13)), ("cost.html", "dim", range(8, 14)),
        ("story/1.html", "length", range(14)), ("story/2.html", "token", range(12)), ("story/8.html", "rule", range(8)),
        ("capacity.html", "pairs", range(1, 65, 9)), ("lab.html", "decay", (0.5, 0.6, 0.9)),
    )  # fmt: skip
    script = """([name, stops]) => stops.map(v => { const e = document.querySelector(`[data-slider=${name}]`);
        const start = performance.now(); e.value = v; e.dispatchEvent(new Event("input")); document.body.offsetHeight;
        return performance.now() - start; })"""
    for path, name, stops in sliders:
        page = open_page(path).page
        tries = [page.evaluate(script, [name, list(stops)]) for _ in range(5)]
        best = [min(times) for times in zip(*tries, strict=True)]  # other load does not slow down all tries
        assert max(best) < 100, (path, name, best)


def test_on_a_phone_a_plot_and_the_two_orders_fit_and_turn_wide_again(open_page):
    for path, place in (("cost.html", "svg.plot"), ("capacity.html", "svg.plot"), ("story/1.html", ".orders > svg")):
        page = open_page(path, width=390).page
        narrow = page.locator(place).first.bounding_box()
        assert narrow["x"] >= 0 and narrow["x"] + narrow["width"] <= 390
        letters = "ns => Math.min(...ns.filter(n => n.textContent && n.getClientRects().length).map(n => n.getBoundingClientRect().height))"
        assert page.locator(f"{place} text").evaluate_all(letters) >= 10
        page.set_viewport_size({"width": 1280, "height": 900})
        page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")  # reported with a frame
        assert page.locator(place).first.bounding_box()["width"] > 600
        assert page.locator(place).first.get_attribute("viewBox").split()[2] in ("760", "640")


@pytest.mark.parametrize(
    "path",
    [
        *(f"systems/{name}.html" for name in ("gla", "softmax", "agent", "lstm")),
        *("lab.html", "choose.html", "capacity.html", "methods/delta.html", "methods/hybrids.html"),
    ],
)
def test_nothing_scrolls_sideways(open_page, path):
    """Equations, comparisons and tables, on a phone and in a window of 900 pixels."""
    script = """ns => ns.filter(n => n.getClientRects().length && n.scrollWidth > n.clientWidth + 1).map(n => n.textContent.slice(0, 60))"""
    for width, language in ((390, "en"), (390, "zh"), (900, "en")):
        page = open_page(path, width=width, language=language).page
        page.evaluate("document.querySelectorAll('main details').forEach(d => { d.open = true; })")
        page.wait_for_timeout(50)
        assert page.locator("main .equation, main dl.equations dd, main .wide, main .scroll").evaluate_all(script) == []


@pytest.mark.parametrize("path", ["systems/softmax.html", "systems/agent.html", "systems/gated_deltanet.html"])
def test_a_folded_table_names_each_cell_by_its_column(open_page, path):
    """In the page's language, with the wide table's headings; empty cells are omitted."""
    script = """ns => ns.flatMap(table => [...table.tBodies[0].rows].map(row => [...row.cells]
        .filter(cell => getComputedStyle(cell).display !== "none" || cell.textContent === "–")
        .map(cell => getComputedStyle(cell, "::before").content.replace(/^"|"$/g, "").replaceAll('\\\\"', '"'))))"""
    heads = """ns => ns.flatMap(table => [...table.tBodies[0].rows].map(() => [...table.tHead.rows[0].cells].map(h => h.textContent &&
        [...h.childNodes].filter(n => !n.lang || n.lang === document.documentElement.lang).map(n => n.textContent).join(""))))"""
    for language in ("en", "zh"):
        page = open_page(path, width=390, language=language).page
        page.evaluate("document.querySelectorAll('main details').forEach(d => { d.open = true; })")
        page.wait_for_timeout(50)
        tables = page.locator("table.folded")
        assert tables.count() > 0
        named, wanted = tables.evaluate_all(script), tables.evaluate_all(heads)
        assert len(named) == len(wanted) and all(a == b for a, b in zip(named, wanted, strict=True))


def test_a_phone_closes_long_tables_of_measurements(open_page):
    rows = "ns => ns.map(d => [d.open, d.querySelectorAll('tbody tr').length])"
    narrow = open_page("systems/softmax.html", width=390).page.locator("details.measured").evaluate_all(rows)
    assert {is_open for is_open, count in narrow if count <= 6} == {True} and {is_open for is_open, count in narrow if count > 6} == {False}
    assert all(is_open for is_open, _ in open_page("systems/softmax.html", width=1400).page.locator("details.measured").evaluate_all(rows))


SMALL = """ns => ns.filter(n => n.checkVisibility() && n.textContent.trim()).filter(n => {
    const m = n.getScreenCTM();
    return parseFloat(getComputedStyle(n).fontSize) * Math.hypot(m.b, m.d) < 10.95; }).map(n => n.textContent)"""


@pytest.mark.parametrize(
    "path", [*PAGES, "capacity.html", "story/2.html", "story/6.html", "story/8.html", "methods/chunks.html", "lab.html"]
)
def test_words_of_drawings_can_be_read_on_a_phone(open_page, path):
    """At least 11 pixels, but for indices."""
    assert open_page(path, width=390).page.locator("main svg text").evaluate_all(SMALL) == []


def test_pairs_of_the_capacity_page_are_cut_into_lines_where_there_is_no_room(open_page, site):
    """The same values, sixteen to a line."""
    shown = data(site, "capacity.html")["capacity"]
    wide, narrow = (open_page("capacity.html", width=width).cells("[data-figure=capacity]") for width in (1400, 390))
    size = shown["size"]
    lines = len(shown["values"]) // size
    assert len(wide) == 3 * size and narrow == {(lines * r + c // size, c % size): v for (r, c), v in wide.items()}


@pytest.mark.parametrize(
    "path", ["lab.html", "story/2.html", "methods/hybrids.html", "methods/chunks.html", "systems/gla.html", "choose.html"]
)
def test_nothing_stands_beyond_the_right_edge(open_page, path):
    """Except in scrolling frames."""
    script = """n => [...n.querySelectorAll("*")].filter(e => e.getClientRects().length && !e.closest(".scroll, .wide, .equation, pre"))
        .filter(e => e.getBoundingClientRect().right > n.getBoundingClientRect().right + 1).map(e => e.tagName + ": " + e.textContent.slice(0, 40))"""
    for width, language in ((900, "zh"), (1400, "en"), (1400, "zh")):
        assert open_page(path, width=width, language=language).page.locator("main").evaluate(script) == []


def test_a_wide_window_is_used_to_its_right_edge(open_page):
    """Prose in two columns of at most 80 characters, and short sections side by side; not on a phone."""
    columns = (
        "ns => new Set(ns.filter(n => n.getClientRects().length).flatMap(n => [...n.getClientRects()].map(r => Math.round(r.left)))).size"
    )
    for width, wanted in ((1400, 2), (390, 1)):
        page = open_page("methods/kernels.html", width=width).page
        assert page.locator("main > p").evaluate_all(columns) == wanted
        assert page.locator("main > p:visible").evaluate_all("ns => Math.max(...ns.map(n => n.getClientRects()[0].width))") <= 640
        page = open_page("systems/gla.html", width=width).page
        assert page.locator(".pair > section").evaluate_all(columns) == wanted


def test_what_is_compared_is_in_sight(open_page):
    page = open_page("triangle.html", width=390).page
    for name in ("gla", "softmax"):
        page.locator(f"[data-system={name}]").click()
    box = page.locator(".comparison").bounding_box()
    assert box["y"] < 900 and box["y"] + box["height"] > 0


def test_the_cost_page_shows_what_the_formulas_say(open_page, site):
    reader, shown = open_page("cost.html"), data(site, "cost.html")["cost"]
    systems = {s["name"]: s for s in shown["systems"]}

    def figures():
        script = "nodes => nodes.map(n => [n.dataset.system, +n.dataset.value])"
        return dict(reader.page.locator("td[data-value]").evaluate_all(script))

    for dim, heads, layers, batch, length in ((11, 4, 1, 0, 12), (12, 5, 24, 3, 17)):
        for name, value in (("dim", dim), ("heads", heads), ("layers", layers), ("batch", batch), ("length", length)):
            reader.slide(name, value)
        many = layers * 2**batch
        for view, key, times in (("prefill", "prefill", 2**length), ("step", "step", 1), ("memory", "state", 1)):
            reader.page.locator(f"[data-choice=view] input[value={view}]").check(force=True)
            found = figures()
            assert set(found) == set(shown["first"])
            for name, value in found.items():
                wanted = many * times * evaluate(systems[name][key], 2**dim, 2**heads, 2**length)
                assert value == pytest.approx(wanted, rel=1e-9), (view, name)
    assert "softmax" in reader.page.locator("figure .readout").first.inner_text()


def test_any_set_of_systems_can_be_compared(open_page, site):
    reader, shown = open_page("cost.html"), data(site, "cost.html")["cost"]
    reader.page.locator("details:has([data-pick]) summary").click()
    names = [s["name"] for s in shown["systems"]]
    for wanted in (names, names[-1:]):
        for button in reader.page.locator("[data-pick]").all():
            if (button.get_attribute("aria-pressed") == "true") != (button.get_attribute("data-pick") in wanted):
                button.click()
        drawn = reader.page.locator("[data-series]").evaluate_all("nodes => nodes.map(n => n.dataset.series)")
        told = reader.page.locator("td[data-system]").evaluate_all("nodes => nodes.map(n => n.dataset.system)")
        assert sorted(drawn) == sorted(told) == sorted(wanted)


def test_measured_points_stand_on_the_theory_of_their_size(open_page, site):
    reader, shown = open_page("cost.html"), data(site, "cost.html")["cost"]
    assert shown["measured"], "the results of this checkout"
    reader.page.locator("[data-choice=view] input[value=alone]").check(force=True)
    kinds = [s["kind"] for s in shown["systems"] if s["name"] in shown["first"]]
    for heads, size, batch in {(p["H"], p["D"], p["B"]) for p in shown["measured"]}:
        reader.page.locator(f"[data-button=size-{heads}-{size}-{batch}]").click()
        found = reader.page.locator("path[data-value]").evaluate_all("nodes => nodes.map(n => +n.dataset.value)")
        same = [p for p in shown["measured"] if (p["H"], p["D"], p["B"]) == (heads, size, batch)]
        assert sorted(found) == sorted(p["ms"] / 1e3 for p in same for kind in kinds if p["kind"] == kind)
    reader.page.locator("[data-choice=view] input[value=step]").check(force=True)
    assert not reader.page.locator("[data-button^=size]").first.is_visible()


def test_two_matrices_are_compared_cell_by_cell(open_page, site):
    reader, shown = open_page("triangle.html"), data(site, "triangle.html")["triangles"]
    a, b = (next(s for s in shown["systems"] if s["name"] == name) for name in ("gla", "softmax"))
    for name in ("gla", "softmax"):
        reader.page.locator(f"[data-system={name}]").click()
    assert reader.cells("[data-side=gla]") == cells(below(a["matrix"], True))
    assert reader.cells("[data-side=softmax]") == cells(below(b["matrix"], True))
    most, least = (max(abs(v) for row in m for v in row) for m in (a["matrix"], b["matrix"]))
    for (i, j), value in reader.cells("[data-side=difference]").items():
        assert value == pytest.approx(a["matrix"][i][j] / most - b["matrix"][i][j] / least, rel=6e-3, abs=1e-9)


def test_families_are_filtered_and_order_changes(open_page, site):
    reader, shown = open_page("triangle.html"), data(site, "triangle.html")["triangles"]["systems"]

    def names():
        return reader.page.locator(".thumbnails button").evaluate_all("nodes => nodes.map(n => n.dataset.system)")

    assert set(names()) == {s["name"] for s in shown}
    reader.page.locator("[data-choice=order] input[value=year]").check(force=True)
    years = {s["name"]: s["year"] for s in shown}
    assert [years[n] for n in names()] == sorted(years.values())
    reader.page.locator("[data-family=delta-rule]").click()
    assert "gated_deltanet" not in names() and "gla" in names()


def test_the_switches_work_and_are_remembered(open_page):
    reader = open_page("index.html")
    page = reader.page
    english = page.inner_text("h1")
    page.locator("[data-switch=language]").click()
    assert CHINESE.search(page.inner_text("h1")) and page.inner_text("[data-switch=language]") == "English"
    assert CHINESE.search(page.title()) and CHINESE.search(page.locator("nav.top").get_attribute("aria-label"))
    page.reload()
    assert CHINESE.search(page.inner_text("h1"))
    page.locator("nav.top a", has_text="实验台").click()
    page.wait_for_url("**/lab.html")  # and for its script, which comes after the page
    assert CHINESE.search(page.inner_text("h1"))
    page.go_back()
    page.locator("[data-switch=language]").click()
    assert page.inner_text("h1") == english
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    page.locator("[data-switch=theme]").click()
    assert page.evaluate(back) != light


def test_by_keyboard_alone(open_page, site):
    reader = open_page("systems/gla.html")
    page, keys = reader.page, reader.page.keyboard
    keys.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    keys.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.locator("#mask .grid").focus()
    keys.press("ArrowDown")
    keys.press("ArrowDown")
    assert "(2) reads" in page.locator("#mask .readout").inner_text()
    page.locator("[data-slider=token]").focus()
    keys.press("Home")
    state = data(site, "systems/gla.html")["state"]
    assert reader.cells("#state") == cells(state["values"][0][0])
    keys.press("ArrowRight")
    assert reader.cells("#state") == cells(state["values"][1][0])
    page.locator("nav.top .mark").focus()
    reached = []
    while "SUMMARY" not in reached and len(reached) < 60:
        keys.press("Tab")
        reached.append(page.evaluate("document.activeElement.tagName + (document.activeElement.dataset.slider ?? '')"))
    assert {"INPUTquery", "INPUTtoken", "INPUT", "BUTTON", "A", "DIV", "SUMMARY"} <= set(reached)


def test_chinese_has_glyphs(open_page):
    """Characters missing in a font are drawn as equal boxes."""
    page = open_page("index.html", language="zh").page
    script = """text => { const c = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
        c.font = "40px " + getComputedStyle(document.body).fontFamily;
        return [...text].map(s => { c.clearRect(0, 0, 99, 99); c.fillText(s, 5, 45);
            return c.getImageData(0, 0, 60, 60).data.join(); }); }"""
    assert len(set(page.evaluate(script, "线性注意力图")) | set(page.evaluate(script, "\U0010fffd"))) == 7


def test_nothing_moves_where_that_is_asked_for(open_page):
    page = open_page("index.html", motion="reduce").page
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    assert page.evaluate("document.getAnimations().length") == 0


def test_without_a_script_the_text_is_there_and_both_languages_say_what_is_not(chromium, site):
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((site / "story/3.html").as_uri())
    assert page.locator("noscript p:visible").count() == 2
    assert "Let us look into the state" in page.inner_text("main")
    context.close()


def test_a_page_of_python_and_one_of_the_browser_draw_the_same_cells(open_page):
    """`linattn draw` and the script paint the same strengths."""
    from linattn.atlas.draw import draw

    page = open_page("systems/gla.html").page
    script = "ns => ns.map(n => [n.getAttribute('class'), +n.getAttribute('fill-opacity'), +n.getAttribute('x'), +n.getAttribute('y')])"
    shown = page.locator("#mask rect[data-value]").evaluate_all(script)
    drawn = re.findall(r'<rect x="(\d+)" y="(\d+)"[^>]*class="(pos|neg)" fill-opacity="([\d.]+)"', draw("gla", "mask"))
    assert len(shown) == len(drawn) == 78
    for (kind, strength, x, y), (dx, dy, dkind, dstrength) in zip(shown, drawn, strict=True):
        assert (x, y) == (int(dx), int(dy)) and kind == dkind and strength == pytest.approx(float(dstrength), abs=0.0101)
