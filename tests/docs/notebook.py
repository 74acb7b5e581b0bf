"""A notebook as a program, without Jupyter."""

import json
from pathlib import Path


def load(path: Path) -> dict:
    """Load the notebook and check its form (nbformat 4.5, no outputs)."""
    book = json.loads(path.read_text(encoding="utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5) and set(book) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert {"kernelspec", "language_info"} <= set(book["metadata"])
    for cell in book["cells"]:
        wanted = {"cell_type", "id", "metadata", "source"} | ({"execution_count", "outputs"} if cell["cell_type"] == "code" else set())
        assert set(cell) == wanted and cell["cell_type"] in ("code", "markdown") and cell["id"].isascii()
        assert isinstance(cell["source"], list) and not cell.get("outputs") and cell.get("execution_count") is None
    ids = [cell["id"] for cell in book["cells"]]
    assert len(set(ids)) == len(ids)
    return book


def program(path: Path) -> str:
    """The code cells, one after the other."""
    return "\n\n".join("".join(cell["source"]) for cell in load(path)["cells"] if cell["cell_type"] == "code") + "\n"
