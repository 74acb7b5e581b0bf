import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from linattn.compare.text_charts import DECODE, STATE, charts, learning_per_step, over_context
from linattn.compare.text_page import page
from linattn.report import html
from linattn.report.html import inlined
from linattn.report.language import policy as security
from linattn.report.language import script
from linattn.report.plot import STYLES

VOID = {"meta", "path", "rect", "br", "hr", "img", "link", "input"}  # paths and rects close themselves here
LOADS = {"src", "href", "srcset", "poster", "data", "action", "background", "xlink:href"}


class Checker(HTMLParser):
    """Refuses improper nesting and external resources; keeps elements, texts and identifiers."""

    def __init__(self):
        super().__init__()
        self.open, self.elements, self.ids, self.text = [], [], [], {}

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_starttag(self, tag, attrs):
        assert not LOADS & dict(attrs).keys(), f"<{tag}> would load {attrs}"
        assert not any(name.startswith("on") for name, _ in attrs), f"<{tag}> runs {attrs}"
        self.elements.append((tag, dict(attrs)))
        if "id" in dict(attrs):
            self.ids.append(dict(attrs)["id"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        tag = self.open[-1] if self.open else ""
        self.text[tag] = self.text.get(tag, "") + data


@pytest.fixture
def checked(report):
    checker = Checker()
    checker.feed(page(report))
    checker.close()
    assert checker.open == []
    return checker


def test_well_formed_and_accessible(checked):
    tags = [tag for tag, _ in checked.elements]
    assert len(checked.ids) == len(set(checked.ids))
    assert dict(checked.elements)["html"] == {"lang": "en"}
    assert tags.count("h1") == tags.count("main") == 1
    for tag, attrs in checked.elements:
        if tag == "svg" and "aria-hidden" not in attrs:
            assert attrs["role"] == "img"
            assert attrs["aria-label"] == attrs["data-label-en"] != attrs["data-label-zh"]
        if tag == "th":
            assert attrs["scope"] in ("row", "col")
    assert tags.count("caption") == tags.count("table") == 6


def test_every_style_has_a_colour_in_light_dark_and_print():
    css = (Path(html.__file__).parent / "page.css").read_text()
    for style in range(STYLES):
        assert len(set(re.findall(rf"--s{style}: (#[0-9a-f]{{6}})", css))) == 2, "one for light and print, one for dark"
        assert len(re.findall(rf"--s{style}: #", css)) == 3
        assert f".s{style} {{ --c: var(--s{style}); --d:" in css
    dashes = re.findall(r"--d: ([^;]+);", css)
    assert len(set(dashes)) == len(dashes) == STYLES, "lines differ without colour, too"


def test_loads_nothing(report, checked):
    html = page(report)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|@font-face", html)
    policy = next(a["content"] for t, a in checked.elements if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'")
    assert [a.get("type") for t, a in checked.elements if t == "script"] == ["application/json", None]
    assert html.endswith(f"<script>{script()}</script>\n</body>\n</html>\n"), "and the switch between the languages is all that runs"
    assert policy == security()


def test_hostile_texts_stay_texts(report, checked):
    html = page(report)
    assert not {"img", "fast", "the"} & {tag for tag, _ in checked.elements}
    assert not set("\x1b\u202e") & set(html)
    assert checked.text["pre"].count("<script>alert(1)</script>") == len(report["mixers"])
    assert "A <fast> one" in checked.text["dd"]


def test_the_page_holds_the_figures(report, checked):
    assert json.loads(checked.text["script"].removesuffix(script())) == report
    cells = checked.text["td"]
    assert "2.500 ± 0.020" in cells, "of the sweep"
    for m in report["mixers"]:
        assert f"{m['parameters']:,}" in cells
        assert f"{m['training']['validation_bits_per_byte']:.3f}" in cells
    assert "softmax at 4,096 tokens: expected to take up to 31 s" in checked.text["li"]


def test_english_and_chinese_say_the_same(report, checked):
    languages = [attrs["lang"] for tag, attrs in checked.elements if "lang" in attrs and tag not in ("html", "button")]
    assert languages.count("en") == languages.count("zh-Hans") > 100
    figures = re.compile(r"\d[\d.,]*\d|\d")
    spoken = re.findall(r'<(span|p|text|dd|li)[^>]* lang="en">(.*?)</\1><\1[^>]* lang="zh-Hans">(.*?)</\1>', page(report), re.S)
    assert len(spoken) == languages.count("en")
    for _, english, chinese in spoken:
        assert sorted(figures.findall(english)) == sorted(figures.findall(chinese)), (english, chinese)
        assert re.search("[\u4e00-\u9fff]", chinese), chinese


@pytest.mark.parametrize("text", ["</script>", "<!--", "\u2028\u2029", "&lt;", "\x1b", "]]>"])
def test_inlined_json(text):
    written = inlined({text: [text]})
    assert not set(written) & set("<>&\u2028\u2029\x1b")
    assert json.loads(written) == {text: [text]}


def test_infinite_figures_are_refused():
    with pytest.raises(ValueError, match="JSON"):
        inlined(float("nan"))


def test_what_the_charts_say(report):
    assert learning_per_step(report).found.en == "At the end: softmax 2.040, gla 2.152, mamba2 2.263."
    assert over_context(report, DECODE).found.en == "At 4,096 tokens: gla 2.00 ms, mamba2 3.00 ms; the most is 1.5 times the least."
    assert "softmax cache" not in over_context(report, STATE).svg
    report["mixers"].pop(0)
    assert "softmax cache" in over_context(report, STATE).svg


def test_one_mixer_and_one_context_are_enough(report):
    report["mixers"] = report["mixers"][1:2]
    report["mixers"][0]["contexts"] = report["mixers"][0]["contexts"][:1]
    report["mixers"][0]["training"]["history"] = report["mixers"][0]["training"]["history"][-2:-1]
    report["key_value_cache"] = report["key_value_cache"][:1]
    assert len(charts(report)) == 6
    assert "gla &lt;the mixer&gt;" in page(report)


def test_the_first_fall_of_the_loss_hides_nothing(report):
    svg = learning_per_step(report).svg
    assert ">8<" not in svg.replace("</text>", "<")
    assert svg.count('class="mark"') == 3 * 10, "all evaluations but the one at step 0"
