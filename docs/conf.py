"""How `make docs` builds the pages: everything on them comes from the docstrings and the register of mixers."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

import linattn

project, author = "linattn", "The linattn authors"
version = release = linattn.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "alabaster"
html_theme_options = {"description": "Every linear attention over one recurrence", "page_width": "1100px", "sidebar_width": "230px"}
html_show_sourcelink = False
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


class Mixers(SphinxDirective):
    """``.. mixers::`` lists everything registered: name, title, paper, and the equation as it stands in the register."""

    def run(self) -> list[nodes.Node]:
        """One definition for each mixer."""
        entries = (linattn.mixers.info(name) for name in linattn.mixers.available())
        return [nodes.definition_list("", *(self.entry(entry) for entry in entries))]

    def entry(self, info: Any) -> nodes.Node:
        """The name with its title, then where it comes from, its options and its equation."""
        source = ", ".join(str(part) for part in (info.paper, info.arxiv and f"arXiv {info.arxiv}", info.year) if part)
        parameters = inspect.signature(info.cls).parameters.values()
        options = ", ".join(f"{p.name}={p.default!r}" for p in parameters if p.default is not p.empty)
        body = [nodes.paragraph("", source)] if source else []
        if options:
            body.append(nodes.paragraph("", "", nodes.Text("Options: "), nodes.literal("", options)))
        if info.equation:
            body.append(nodes.literal_block(info.equation, info.equation, language="latex"))
        term = nodes.term("", "", nodes.literal("", info.name), nodes.Text(f"  {info.title}"), ids=[f"mixer-{info.name}"])
        return nodes.definition_list_item("", term, nodes.definition("", *body))


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


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_directive("mixers", Mixers)
    app.add_directive("oracles", Oracles)
    app.add_directive("help", Help)
