"""Code blocks and links of a page in Markdown or reStructuredText."""

import ast
import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Block:
    """A fenced code block: its language, its text and the line where its text starts."""

    language: str
    text: str
    line: int


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    form = r"^\.\. code-block:: (\w+)\n\n((?: +.*\n|\n)+)" if path.suffix == ".rst" else r"^```(\w+)\n(.*?)^```$"
    found = re.finditer(form, text, re.M | (re.NOFLAG if path.suffix == ".rst" else re.S))
    return [Block(m[1], textwrap.dedent(m[2]), text.count("\n", 0, m.start(2)) + 1) for m in found]


def unnamed(path: Path) -> list[str]:
    """Lines that open a code block without its language."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".rst":
        return re.findall(r"^(?!\.\. ).*::$", text, re.M)
    return re.findall(r"^```$", re.sub(r"^```[a-z{].*?^```$", "", text, flags=re.M | re.S), re.M)


def python(path: Path) -> str:
    """All Python blocks as one program that keeps the file's line numbers."""
    lines: list[str] = []
    for block in blocks(path):
        if block.language == "python":
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return "\n".join(lines) + "\n"


def commands(path: Path) -> list[list[str]]:
    """The words of each command in the shell blocks, without comments."""
    lines = [line for block in blocks(path) if block.language == "sh" for line in block.text.replace("\\\n", "").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def without_words(program: str) -> str:
    """A program without comments and docstrings, which must be equal in both languages."""
    tree = ast.parse(program)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def links(path: Path) -> list[str]:
    """Targets of links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
