r"""Conversion of registered equations from LaTeX to MathML, which browsers render without fonts or scripts.

Supports the LaTeX of formulas in this field: letters, scripts, fractions, roots, accents, fences, sums, functions and the
symbols below. Anything else raises an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape

GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ϵ", "varepsilon": "ε", "zeta": "ζ", "eta": "η", "theta": "θ",
    "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "xi": "ξ", "pi": "π", "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "ϕ",
    "varphi": "φ", "chi": "χ", "psi": "ψ", "omega": "ω", "Gamma": "Γ", "Delta": "Δ", "Theta": "Θ", "Lambda": "Λ", "Xi": "Ξ",
    "Pi": "Π", "Sigma": "Σ", "Phi": "Φ", "Psi": "Ψ", "Omega": "Ω", "ell": "ℓ", "top": "⊤", "bot": "⊥", "infty": "∞", "emptyset": "∅",
    "ldots": "…", "dots": "…", "cdots": "⋯", "vdots": "⋮", "prime": "′",
}  # fmt: skip
OPERATORS = {
    "odot": "⊙", "oplus": "⊕", "otimes": "⊗", "cdot": "·", "times": "×", "circ": "∘", "ast": "∗", "star": "⋆", "pm": "±",
    "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "neq": "≠", "ne": "≠", "ll": "≪", "gg": "≫", "approx": "≈", "sim": "∼", "equiv": "≡",
    "propto": "∝", "in": "∈", "notin": "∉", "subset": "⊂", "cup": "∪", "cap": "∩", "setminus": "∖", "leftarrow": "←",
    "rightarrow": "→", "to": "→", "mapsto": "↦", "Rightarrow": "⇒", "gets": "←", "nabla": "∇", "partial": "∂", "forall": "∀",
    "mid": "∣", "parallel": "∥", "colon": ":", "wedge": "∧", "vee": "∨", "bmod": "mod", "land": "∧", "lor": "∨",
    "neg": "¬", "lesssim": "≲", "gtrsim": "≳", "doteq": "≐", "cong": "≅", "perp": "⊥", "iff": "⇔", "implies": "⇒", "leftrightarrow": "↔",
    "uparrow": "↑", "downarrow": "↓",
}  # fmt: skip
FENCES = {
    "lVert": "‖", "rVert": "‖", "Vert": "‖", "|": "‖", "lvert": "|", "rvert": "|", "vert": "|", "lfloor": "⌊", "rfloor": "⌋",
    "lceil": "⌈", "rceil": "⌉", "langle": "⟨", "rangle": "⟩", "{": "{", "}": "}",
}  # fmt: skip
SUMS = {"sum": "∑", "prod": "∏", "bigcup": "⋃", "bigoplus": "⨁", "int": "∫"}
LIMITS = {"max": "max", "min": "min", "lim": "lim", "argmax": "arg max", "argmin": "arg min"}
FUNCTIONS = ("arg", "exp", "log", "ln", "sin", "cos", "tan", "tanh", "sinh", "cosh", "det", "dim", "ker", "Re", "Im", "deg", "Pr")
SPACES = {
    ",": "0.17em", ":": "0.22em", ";": "0.28em", " ": "0.28em", "!": "-0.17em", "quad": "1em", "qquad": "2em", "~": "0.28em",
}  # fmt: skip
ACCENTS = {"hat": "^", "widehat": "^", "tilde": "~", "widetilde": "~", "bar": "¯", "overline": "¯", "vec": "→", "dot": "˙", "ddot": "¨"}
SIZES = ("big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr")
VARIANTS = {"mathrm", "operatorname", "operatorname*", "text", "mathit", "textrm", "mathbf", "boldsymbol", "mathbb", "mathcal"}
APPLY = "<mo>&#x2061;</mo>"  # between a function and its argument
TOKEN = re.compile(r"\\(?:operatorname\*|[A-Za-z]+|.)|\d+(?:\.\d+)?|\s+|.", re.S)


def mathml(latex: str, display: bool = False) -> str:
    """Convert ``latex`` to a ``<math>`` element; ``display`` sets it as a formula of its own.

    Raises:
        ValueError: for a command outside the subset, which it names, and for braces and fences that do not match.
    """
    body = _Parser(latex).whole()
    kind = ' display="block"' if display else ""
    source = escape(" ".join(latex.split()))
    return f'<math{kind}><semantics><mrow>{body}</mrow><annotation encoding="application/x-tex">{source}</annotation></semantics></math>'


def pieces(latex: str) -> list[str]:
    r"""Split ``latex`` at every ``\quad`` and ``\qquad`` outside braces and fences: formulas that may go on separate lines."""
    found, depth = [""], 0
    for token in TOKEN.findall(latex):
        depth += (token in ("{", r"\left")) - (token in ("}", r"\right"))
        if depth == 0 and token in (r"\quad", r"\qquad"):
            found.append("")
        else:
            found[-1] += token
    return [piece for piece in found if piece.strip()]


def spread(latex: str) -> str:
    """Convert ``latex`` to ``<math>`` elements with line breaks allowed between them."""
    return " ".join(mathml(piece) for piece in pieces(latex))


class _Parser:
    """Recursive-descent parser: every method consumes the tokens of its element and returns MathML."""

    def __init__(self, latex: str) -> None:
        self.latex = latex
        found = [m for m in TOKEN.finditer(latex) if not m[0].isspace()]
        self.tokens, self.places = [m[0] for m in found], [m.start() for m in found]
        self.at = 0

    def whole(self) -> str:
        body = self.row(())
        if self.at < len(self.tokens):
            raise self.wrong(f"{self.tokens[self.at]!r} closes nothing")
        return body

    def wrong(self, what: str) -> ValueError:
        return ValueError(f"{what} in the equation {self.latex!r}; linattn/atlas/mathml.py says which LaTeX is known")

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        part = self.peek()
        if not part:
            raise self.wrong("something is missing at the end")
        self.at += 1
        return part

    def row(self, ends: tuple[str, ...]) -> str:
        r"""Parse elements up to one of ``ends`` (not consumed), a closing brace, ``\right`` or the end."""
        parts = []
        while self.peek() and self.peek() not in (*ends, "}", r"\right"):
            parts.append(self.scripted())
        return "".join(parts)

    def scripted(self) -> str:
        """Parse an element with its subscript and superscript, in either order."""
        limits = self.peek()[1:] in (*SUMS, *LIMITS, "operatorname*")
        if self.peek() in ("^", "_"):
            base = "<mrow></mrow>"
        else:
            base = self.element()
        base, applied = base.removesuffix(APPLY), APPLY if base.endswith(APPLY) else ""
        below, above = "", ""
        while self.peek() in ("^", "_", "'"):
            mark = self.take()
            if mark == "'":
                above += "<mo>′</mo>"
            elif mark == "_" and not below:
                below = self.argument()
            elif mark == "^" and (not above or above == "<mo>′</mo>"):
                above += self.argument()
            else:
                raise self.wrong(f"a second {mark!r} at one place")
        if not below and not above:
            return base + applied
        low, high = f"<mrow>{below}</mrow>", f"<mrow>{above}</mrow>"
        under, over, both = ("munder", "mover", "munderover") if limits else ("msub", "msup", "msubsup")
        if below and above:
            return f"<{both}>{base}{low}{high}</{both}>{applied}"
        return f"<{under}>{base}{low}</{under}>{applied}" if below else f"<{over}>{base}{high}</{over}>{applied}"

    def argument(self) -> str:
        """Parse one element, or a group in braces."""
        if self.peek()[:1].isdigit() and len(self.peek()) > 1:  # of a number, its first digit
            first, self.tokens[self.at] = self.peek()[0], self.peek()[1:]
            return f"<mn>{first}</mn>"
        if self.peek() != "{":
            return self.element()
        self.take()
        body = self.row(())
        if self.peek() != "}":
            raise self.wrong("a brace is not closed")
        self.take()
        return body

    def element(self) -> str:
        part = self.peek()
        if part == "{":
            return f"<mrow>{self.argument()}</mrow>"
        self.take()
        if part[0] == "\\":
            return self.command(part[1:])
        if part[0].isdigit():
            return f"<mn>{part}</mn>"
        if part.isalpha():
            return f"<mi>{part}</mi>"
        if part in "()[]|/":
            return f'<mo stretchy="false">{part}</mo>'
        if part in "+=<>,;.:!*-":
            return f"<mo>{escape('−' if part == '-' else '∗' if part == '*' else part)}</mo>"
        raise self.wrong(f"{part!r} is not known")

    def command(self, name: str) -> str:
        for table, write in _TABLES:
            if name in table:
                return write(table[name])
        if name in FUNCTIONS:
            return f"<mi>{name}</mi>{APPLY}"
        if name in SUMS:
            return f'<mo largeop="true" movablelimits="true">{SUMS[name]}</mo>'
        if name in ACCENTS:
            return f'<mover accent="true"><mrow>{self.argument()}</mrow><mo stretchy="false">{ACCENTS[name]}</mo></mover>'
        if name in ("frac", "tfrac", "dfrac"):
            top, bottom = self.argument(), self.argument()
            small = ' displaystyle="false"' if name == "tfrac" else ""
            return f"<mfrac{small}><mrow>{top}</mrow><mrow>{bottom}</mrow></mfrac>"
        if name == "sqrt":
            return f"<msqrt>{self.argument()}</msqrt>"
        if name in VARIANTS:
            return self.upright(name)
        if name == "left":
            return self.fenced()
        if name in SIZES:
            size = "1.2em" if name.startswith("big") and not name.startswith("bigg") else "1.8em"
            return f'<mo minsize="{size}" maxsize="{size}" symmetric="true">{self.fence()}</mo>'
        if name in ("underbrace", "overbrace"):
            tag, brace = ("munder", "⏟") if name == "underbrace" else ("mover", "⏞")
            return f"<{tag}><mrow>{self.argument()}</mrow><mo>{brace}</mo></{tag}>"
        raise self.wrong(f"\\{name} is not known")

    def upright(self, name: str) -> str:
        r"""Parse ``\mathrm{...}``: one word, or words and other elements set upright; ``\text{...}`` keeps its blanks."""
        start = self.at
        if name in ("text", "textrm"):
            return self.words()
        body = self.argument()
        text = "".join(self.tokens[start : self.at]).strip("{}")
        if not text.isalpha():
            return f"<mrow>{body}</mrow>"
        variant = ' mathvariant="normal"' if len(text) == 1 and name in ("mathrm", "operatorname") else ""
        bold = ' style="font-weight:bold"' if name in ("mathbf", "boldsymbol") else ""
        letter = {"R": "ℝ", "N": "ℕ", "C": "ℂ", "E": "𝔼"}.get(text, text) if name == "mathbb" else text
        return f"<mi{variant}{bold}>{letter}</mi>"

    def words(self) -> str:
        if self.take() != "{":
            raise self.wrong(r"\text without braces")
        start = self.places[self.at - 1] + 1
        while self.peek() != "}":
            if self.take()[0] in "\\{":
                raise self.wrong(r"a command within \text")
        text = escape(self.latex[start : self.places[self.at]])
        self.take()
        return f"<mtext>{text.replace(' ', chr(0xA0))}</mtext>"

    def fenced(self) -> str:
        r"""Parse ``\left( ... \right)``."""
        opening = self.fence()
        body = self.row(())
        if self.peek() != r"\right":
            raise self.wrong(r"\left without \right")
        self.take()
        closing = self.fence()
        return f'<mrow><mo stretchy="true" fence="true">{opening}</mo>{body}<mo stretchy="true" fence="true">{closing}</mo></mrow>'

    def fence(self) -> str:
        part = self.take()
        if part == ".":
            return ""
        if part in "()[]|/":
            return part
        if part[0] == "\\" and part[1:] in FENCES:
            return FENCES[part[1:]]
        raise self.wrong(f"{part!r} is not a fence")


_TABLES: tuple[tuple[dict[str, str], Callable[[str], str]], ...] = (
    (GREEK, lambda s: f"<mi>{s}</mi>"),
    (OPERATORS, lambda s: f"<mo>{s}</mo>"),
    (FENCES, lambda s: f'<mo stretchy="false">{s}</mo>'),
    (LIMITS, lambda s: f"<mi>{s}</mi>{APPLY}"),
    (SPACES, lambda s: f'<mspace width="{s}"></mspace>'),
)
