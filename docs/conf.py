"""How `make docs` builds the pages: everything on them comes from the docstrings and the register of mixers."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

import linattn
from linattn.atlas.mathml import mathml
from linattn.mixers.option_texts import options

project, author = "linattn", "The linattn authors"
version = release = linattn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".rst": "restructuredtext", ".md": "markdown"}
html_theme = "furo"
html_title = f"linattn {release}"
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
myst_heading_anchors = 3
html_static_path, html_css_files, html_js_files = ["static"], ["site.css"], ["tables.js"]
smartquotes = False  # it takes quotation marks beside Chinese characters for closing ones
html_show_sourcelink = False
html_show_copyright = False
html_copy_source = False
exclude_patterns = ["images"]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
python_maximum_signature_line_length = 100
add_module_names = False

# Links to our own names must resolve; the types of others have no page here.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!linattn\b).*")]
nitpick_ignore = [("py:class", "linattn.generate.request.Stops")]  # what Pool.submit makes of its argument stop


def prose(text: str) -> list[nodes.Node]:
    """Text of a docstring with its names in double backticks and its roles as code: a whole parser would take |λ| for a substitution."""
    parts = re.split(r"(``.+?``|:\w+:`[^`]+`)", " ".join(text.split()))
    return [nodes.literal("", code[1]) if (code := CODE.fullmatch(part)) else nodes.Text(part) for part in parts if part]


CODE = re.compile(r"(?:``|:\w+:`(?:~[\w.]+\.)?)(.+?)`+")


class MixerPage(SphinxDirective):
    """``.. mixer:: gla`` shows an entry of the register: source, equation, options, costs, evidence and the class's docstring."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """One node for each part that the entry has."""
        info = linattn.mixers.info(self.arguments[0])
        source = ", ".join(str(part) for part in (info.paper, info.year) if part)
        words = (inspect.getdoc(info.cls) or "").partition("\nArgs:")[0].partition("\nRaises:")[0]
        found: list[nodes.Node] = [nodes.paragraph("", "", *prose(part)) for part in words.split("\n\n") if part.strip()]
        if source:
            found.append(nodes.paragraph("", "", nodes.Text(source), *self.arxiv(info.arxiv)))
        if info.equation:
            markup = mathml(info.equation, display=True)
            found.append(nodes.raw("", f'<div class="equation" style="overflow-x: auto" tabindex="0">{markup}</div>', format="html"))
        if self.env.app.tags.has("atlas"):
            link = nodes.reference("", "its page in the atlas", refuri=f"../atlas/systems/{info.name}.html")
            found.append(nodes.paragraph("", "", nodes.Text("With figures: "), link))
        example = f'linattn.mixers.{info.cls.__name__}(dim=256)  # or linattn.mixers.create("{info.name}", dim=256)'
        found.append(nodes.literal_block(example, example, language="python"))
        facts = [("Option " + o.name, f"{o.text} ({o.type}, default {o.default})") for o in options(info)]
        facts += [("Kind", info.kind), ("Causal", "yes" if info.causal else "no"), ("Time and memory grow as", info.growth)]
        facts += [("Compared with", info.oracle)] if info.oracle else []
        facts += [(f"Exempt from {check}", reason) for check, reason in info.exemptions.items()]
        return [*found, nodes.field_list("", *(self.field(*fact) for fact in facts))]

    def arxiv(self, number: str | None) -> list[nodes.Node]:
        """A link to the paper, with a comma before."""
        return [nodes.Text(", "), nodes.reference("", f"arXiv {number}", refuri=f"https://arxiv.org/abs/{number}")] if number else []

    def field(self, name: str, value: str) -> nodes.Node:
        """One row of the list of facts."""
        return nodes.field("", nodes.field_name("", name), nodes.field_body("", nodes.paragraph("", "", *prose(value))))


class Oracles(SphinxDirective):
    """``.. oracles::`` lists what each registered mixer is compared with, as its entry in the register says."""

    def run(self) -> list[nodes.Node]:
        """One list, sorted by name."""
        entries = (linattn.mixers.info(name) for name in linattn.mixers.available())
        return [nodes.bullet_list("", *(self.entry(entry) for entry in entries if entry.oracle))]

    def entry(self, info: Any) -> nodes.Node:
        """The mixer's name and its oracle."""
        return nodes.list_item("", nodes.paragraph("", "", nodes.literal("", info.name), nodes.Text(f": {info.oracle}")))


class Help(SphinxDirective):
    """``.. help:: train`` shows what ``linattn train --help`` says."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """One literal block."""
        words = ["-m", "linattn", *self.arguments, "--help"]
        said = subprocess.check_output([sys.executable, *words], text=True, env={**os.environ, "COLUMNS": "110", "NO_COLOR": "1"})
        return [nodes.literal_block(said, said, language="text")]


_analyze = ModuleAnalyzer.analyze


def _analyze_without_overloads(analyzer: ModuleAnalyzer) -> None:
    """Overloads are for type checkers; who reads wants the one signature that all arguments are in."""
    _analyze(analyzer)
    analyzer.overloads = {}


ModuleAnalyzer.analyze = _analyze_without_overloads  # type: ignore[method-assign]


def show_defaults(_app: Sphinx, _what: str, _name: str, _obj: Any, _options: Any, arguments: str | None, returned: str | None) -> Any:
    """Write defaults that are functions and classes by name, and those that a function makes as ``...``: Sphinx reads only Python."""
    named = arguments and re.sub(r"<(?:class '|function )(?:\w+\.)*(\w+)[^>]*>", r"\1", arguments)
    return named and named.replace("<factory>", "..."), returned


REGISTRY = Path(__file__).parent / "registry"  # written before each build; git ignores it
KINDS = {
    "sequence": "Sequences",
    "cross": "One sequence reads another",
    "grid": "Images",
    "resample": "Changing the length",
    "feed-forward": "Feed-forwards",
}


def write_registry(*_: object) -> None:
    """A page for each registered mixer, and an index of them by kind."""
    REGISTRY.mkdir(exist_ok=True)
    infos = [linattn.mixers.info(name) for name in linattn.mixers.available()]
    texts = {info.name: _headed(info.title, f"``{info.name}``\n\n.. mixer:: {info.name}\n") for info in infos}
    lists = [
        f"{_headed(words, '', '-')}\n.. toctree::\n   :maxdepth: 1\n\n" + "".join(f"   {i.name}\n" for i in infos if i.kind == kind)
        for kind, words in KINDS.items()
    ]
    count = f"The {len(infos)} mixers and feed-forwards of the register, each with its paper, equation, options and evidence.\n"
    texts["index"] = _headed("All mixers", count + "\n" + "\n".join(lists))
    for name, text in texts.items():
        path = REGISTRY / f"{name}.rst"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _headed(title: str, text: str, line: str = "=") -> str:
    return f"{title}\n{line * 2 * len(title)}\n\n{text}"


class SourceLinks(SphinxTransform):
    """Links from pages to files of the source that have no page here become the file's name."""

    default_priority = 1

    def apply(self) -> None:
        """Replace references to files outside of the documentation."""
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node.get("refdomain") == "doc" and node["reftarget"] not in self.env.found_docs:
                node.replace_self(nodes.literal("", node.astext()))


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", write_registry)
    app.connect("autodoc-process-signature", show_defaults)
    app.add_transform(SourceLinks)
    app.add_directive("mixer", MixerPage)
    app.add_directive("oracles", Oracles)
    app.add_directive("help", Help)
