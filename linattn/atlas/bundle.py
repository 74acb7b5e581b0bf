"""Bundle of the site's script: the modules of ``script/`` in sequence, each once, its imports before it.

Browsers refuse modules from ``file://``, so imports and exports are removed and all top-level names share one scope.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).with_name("script")
IMPORT = re.compile(r'^import (?:\{[^}]*\} from )?"\./([\w/-]+\.js)";\n', re.M)
NAME = re.compile(r"^(?:async )?(?:function\*?|const|let|class) (\w+)", re.M)


def bundle(entry: Path = FOLDER / "main.js") -> str:
    """Make a classic script equivalent to the module ``entry``.

    Raises:
        ValueError: if two modules share a top-level name, import in a circle, or import in another form.
    """
    parts: dict[Path, str] = {}
    _collect(entry.resolve(), parts, ())
    owners: dict[str, Path] = {}
    for path, code in parts.items():
        for name in NAME.findall(code):
            if name in owners:
                raise ValueError(f"{name} is defined at the top of both {owners[name].name} and {path.name}: rename one")
            owners[name] = path
    body = "\n".join(f"// {path.name}\n{code}" for path, code in parts.items())
    return f'"use strict";\n(() => {{\n{body}}})();\n'


def _collect(path: Path, parts: dict[Path, str], above: tuple[Path, ...]) -> None:
    """Append the imports of ``path``, then its own code, to ``parts``."""
    if path in above:
        raise ValueError(f"modules import in a circle: {' > '.join(p.name for p in (*above, path))}")
    if path in parts:
        return
    code = path.read_text(encoding="utf-8")
    for imported in IMPORT.findall(code):
        _collect((path.parent / imported).resolve(), parts, (*above, path))
    code = re.sub(r"^export (?!\{|default|\*)", "", IMPORT.sub("", code), flags=re.M)
    if left := re.search(r"^(?:import|export)\b.*", code, re.M):
        raise ValueError(f"{path.name} has a form of import or export that the bundle does not support: {left[0]}")
    parts[path] = code.strip() + "\n"
