import re

import pytest

from linattn.atlas.bundle import bundle
from linattn.atlas.page import rounded
from linattn.atlas.text import Both, fragment, labelled, spoken


def test_both_languages_are_there_and_marked():
    assert spoken(Both("a < b", "甲")) == '<span lang="en">a &lt; b</span><span lang="zh-Hans">甲</span>'
    assert spoken(Both("GLA", "GLA"), "b") == "<b>GLA</b>"
    assert 'data-label-zh="&quot;"' in labelled(Both("x", '"'))


def test_latex_in_words_is_mathml():
    assert "<msub><mi>q</mi>" in spoken(Both(r"the query \(q_t\)", r"查询 \(q_t\)"), "p")
    assert '<math display="block">' in fragment(r"<p>\[a < b\]</p>")
    assert fragment(r"\(a &lt; b\)") == fragment(r"\(a < b\)")


def test_no_line_ends_between_a_formula_and_a_mark_beside_it():
    html = fragment(r"<p>值（\(v\)），键 \(k\)。“\(q\)”: \(a\) b</p>")
    html = re.sub(r"<math>.*?</math>", "M", html, flags=re.S).replace('<span class="kept">', "[").replace("</span>", "]")
    assert html == "<p>值[（M），]键 [M。][“M”:] M b</p>"


def test_numbers_come_from_the_data():
    html = '<p lang="en">{{ pot.errors.1:.2f }}</p><p lang="zh-Hans">{{pot.errors.1:.2f}}，{{pot.name}}</p>'
    assert fragment(html, {"pot": {"errors": [1, 0.256], "name": "<b>"}}) == '<p lang="en">0.26</p><p lang="zh-Hans">0.26，&lt;b&gt;</p>'


@pytest.mark.parametrize("place", ["pot.error", "pot.errors.7", "pan", "pot.errors.x", "pot.errors.0.x"])
def test_a_number_that_nobody_computed_is_refused(place):
    with pytest.raises(ValueError, match="no number stands at"):
        fragment("{{" + place + "}}", {"pot": {"errors": [1]}})


def test_a_missing_translation_is_refused():
    with pytest.raises(ValueError, match="2 elements are in English and 1 in Chinese"):
        fragment('<p lang="en">a</p><p lang="en">b</p><p lang="zh-Hans">甲</p>')


def test_rounded():
    assert rounded({"a": [0.123456, 2.0, None, -0.0], "b": True, "c": 1234567}) == {"a": [0.123, 2, None, 0], "b": True, "c": 1234567}
    with pytest.raises(ValueError, match="JSON"):
        rounded(float("nan"))


def write(folder, **files):
    for name, code in files.items():
        (folder / f"{name}.js").write_text(code)
    return folder / "main.js"


def test_the_bundle_orders_modules_and_keeps_each_once(tmp_path):
    main = write(
        tmp_path,
        main='import { b } from "./b.js";\nimport "./a.js";\nb();\n',
        b='import { a } from "./a.js";\nexport function b() { return a; }\n',
        a="export const a = 1;\n",
    )
    code = bundle(main)
    assert code.count("const a = 1;") == 1 and "import" not in code and "export" not in code
    assert code.index("const a") < code.index("function b") < code.index("b();")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"main": 'import "./a.js";\nconst x = 1;\n', "a": "function x() {}\n"}, "x is defined at the top of both a.js and main.js"),
        ({"main": 'import "./a.js";\n', "a": 'import "./main.js";\n'}, "circle: main.js > a.js > main.js"),
        ({"main": 'import * as a from "./a.js";\n'}, "a form of import"),
        ({"main": "export default 1;\n"}, "a form of import or export"),
    ],
)
def test_what_the_bundle_refuses(tmp_path, files, says):
    with pytest.raises(ValueError, match=says):
        bundle(write(tmp_path, **files))
