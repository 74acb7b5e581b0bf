import re
import xml.etree.ElementTree as ET

import pytest

from linattn import mixers
from linattn.atlas.mathml import mathml, pieces


def shown(latex: str) -> str:
    """Visible text, without the annotation."""
    tree = ET.fromstring(mathml(latex).replace("&#x2061;", ""))
    return "".join(tree.find("semantics/mrow").itertext())


@pytest.mark.parametrize("name", mixers.available())
def test_every_registered_equation_converts_and_loses_no_letter(name):
    latex = mixers.info(name).equation
    text = shown(latex)
    assert latex.count(r"\mathbb{R}") == text.count("ℝ")
    plain = re.sub(r"\\(?:mathrm|operatorname|text|mathbf|boldsymbol)\b|\\mathbb\{R\}", "", latex)
    letters = re.findall(r"(?<![\\A-Za-z])[A-Za-z]", re.sub(r"\\[A-Za-z]+", " ", plain))
    assert [c for c in letters if c not in text] == []
    assert not set("\\_&") & set(text)
    assert_whole(latex)


@pytest.mark.parametrize("name", mixers.available())
def test_formulas_beside_each_other_are_whole_ones(name):
    latex = mixers.info(name).equation
    assert "".join(shown(piece) for piece in pieces(latex)).split() == shown(latex).split()
    assert not any(re.search(r"\\q?quad(?![^{]*\})", piece) for piece in pieces(latex))


def test_wide_spaces_in_braces_and_fences_part_nothing():
    assert pieces(r"a, \quad b \qquad c") == ["a, ", " b ", " c"]
    assert pieces(r"\frac{a \quad b}{c} \left( d \quad e \right)") == [r"\frac{a \quad b}{c} \left( d \quad e \right)"]


COUNTS = {"msub": 2, "msup": 2, "munder": 2, "mover": 2, "mfrac": 2, "msubsup": 3, "munderover": 3}


def assert_whole(latex: str) -> None:
    """Browsers draw scripts and fractions with a wrong number of parts as a row."""
    wrong = [(e.tag, len(e)) for e in ET.fromstring(mathml(latex)).iter() if len(e) != COUNTS.get(e.tag, len(e))]
    assert wrong == []


@pytest.mark.parametrize("latex", [r"\min_S x", r"\log_2 n", r"\tanh^2 x", r"\max_{i}^{t} x_i", r"\sum_i^t x", r"\exp"])
def test_scripts_of_functions_have_their_places(latex):
    assert_whole(latex)
    assert mathml(r"\log_2 n").count("\u2061") + mathml(r"\log_2 n").count("&#x2061;") == 1


@pytest.mark.parametrize(
    ("latex", "markup"),
    [
        ("k_t^\\top", "<msubsup><mi>k</mi><mrow><mi>t</mi></mrow><mrow><mi>⊤</mi></mrow></msubsup>"),
        ("x^w_t", "<msubsup><mi>x</mi><mrow><mi>t</mi></mrow><mrow><mi>w</mi></mrow></msubsup>"),
        ("b'", "<msup><mi>b</mi><mrow><mo>′</mo></mrow></msup>"),
        (r"\frac{1}{2}", "<mfrac><mrow><mn>1</mn></mrow><mrow><mn>2</mn></mrow></mfrac>"),
        (r"\tfrac12", '<mfrac displaystyle="false"><mrow><mn>1</mn></mrow><mrow><mn>2</mn></mrow></mfrac>'),
        (r"\hat x", '<mover accent="true"><mrow><mi>x</mi></mrow><mo stretchy="false">^</mo></mover>'),
        (r"\mathrm{Diag}", "<mi>Diag</mi>"),
        (r"\operatorname*{mean}_c", "<munder><mi>mean</mi><mrow><mi>c</mi></mrow></munder>"),
        (r"\mathrm{d}", '<mi mathvariant="normal">d</mi>'),
        (r"\left(x\right)", '<mrow><mo stretchy="true" fence="true">(</mo><mi>x</mi><mo stretchy="true" fence="true">)</mo></mrow>'),
        (r"\text{of } t", "<mtext>of\u00a0</mtext><mi>t</mi>"),
        ("a < b", "<mi>a</mi><mo>&lt;</mo><mi>b</mi>"),
        ("-2.5", "<mo>−</mo><mn>2.5</mn>"),
    ],
)
def test_markup(latex, markup):
    assert f"<semantics><mrow>{markup}</mrow><annotation" in mathml(latex)


def test_a_sum_has_its_limits_below_and_above():
    assert "<munderover><mo" in mathml(r"\sum_{i=1}^{t} x_i", display=True)
    assert mathml("x", display=True).startswith('<math display="block">')


@pytest.mark.parametrize(
    "latex",
    [
        r"\unknown",
        r"\left( x",
        "{x",
        "x}",
        "x_1_2",
        "x^1^2",
        r"\frac{1}",
        r"\begin{matrix}",
        "x & y",
        "§",
        r"\left x",
        "x_",
        r"\text{a",
        r"\text{\x}",
    ],
)
def test_what_is_not_known_is_refused(latex):
    with pytest.raises(ValueError, match="in the equation"):
        mathml(latex)


def test_hostile_latex_stays_text():
    with pytest.raises(ValueError, match="is not known"):
        mathml('"<script>')
    assert "<script" not in mathml("x < s c r i p t >")
