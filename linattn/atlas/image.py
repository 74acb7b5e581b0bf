"""Files of drawings by suffix: SVG directly, PNG and PDF through an installed converter."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

from linattn.report.folder import write_text
from linattn.state import replacing

CONVERTED = (".png", ".pdf")
ZOOM = 3  # pixels of a PNG per unit of the drawing


def check(path: Path) -> None:
    """Raise ValueError if ``path`` has a suffix that cannot be written here."""
    if path.suffix in ("", ".svg"):
        return
    if path.suffix not in CONVERTED:
        raise ValueError(f"--out must be a file that ends in .svg, .png or .pdf, but came as {path}")
    if not _rsvg() and not importlib.util.find_spec("cairosvg"):
        raise ValueError(f"--out {path} needs rsvg-convert (package librsvg2-bin) or cairosvg, and neither is installed; .svg needs none")


def write(path: Path, svg: str) -> None:
    """Write ``svg`` to ``path``: converted if it ends in .png or .pdf.

    Raises:
        ValueError: as :func:`check`, and if the converter fails.
    """
    check(path)
    if path.suffix not in CONVERTED:
        write_text(path, svg)
        return
    with replacing(path) as aside:
        aside.write_bytes(_converted(svg, path.suffix[1:]))


def _rsvg() -> str | None:
    return shutil.which("rsvg-convert")


def _converted(svg: str, kind: str) -> bytes:
    if program := _rsvg():
        asked = [program, f"--format={kind}", f"--zoom={ZOOM if kind == 'png' else 1}"]
        done = subprocess.run(asked, check=False, input=svg.encode(), capture_output=True)
        if done.returncode or not done.stdout:
            raise ValueError(f"rsvg-convert could not write {kind}: {done.stderr.decode(errors='replace').strip() or 'no output'}")
        return done.stdout
    import cairosvg  # type: ignore[import-not-found]

    convert = cairosvg.svg2png if kind == "png" else cairosvg.svg2pdf
    return bytes(convert(bytestring=svg.encode(), scale=ZOOM if kind == "png" else 1))
