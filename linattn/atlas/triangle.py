"""Triangle page: the mixing matrices of all systems on one sentence, side by side, and any two of them cell by cell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from linattn.atlas import sentence
from linattn.atlas.families import FAMILY
from linattn.atlas.inspection import Inspection
from linattn.atlas.page import Entry, Page, figure, rounded
from linattn.atlas.text import Both, spoken
from linattn.mixers.taxonomy import FAMILIES

if TYPE_CHECKING:
    from linattn.atlas.build import Atlas

ENTRY = Entry(
    "triangle.html",
    Both("One triangle", "同一个三角"),
    Both(
        "What a causal system reads of the values is a shaded lower triangle; reading both ways fills the square. Click any two to "
        "compare them.",
        "因果方法怎样读各个值，就是一个深浅不一的下三角；双向的填满方阵。点任意两个，逐格比较。",
    ),
)
TEXT = Both(
    "Unroll any of these recurrences, and the output is a weighted sum of the values of all tokens so far: a matrix below the diagonal. "
    "Softmax fills it by comparing every pair; a sum without decay fills it by a product of features; a decay shades it "
    "towards the lower left; "
    "erasing takes single columns out again. Repeated words make the pattern plain: “Ann loves” comes twice, and what it is "
    "followed by changes.",
    "把任何一种递推展开，输出都是此前所有 token 的值的加权和：对角线以下的一个矩阵。softmax 逐对比较来填满它；无衰减的求和用特征之积来填；"
    "衰减让它朝左下角变浅；擦除则去掉个别的列。重复的词让规律一目了然：“小安爱”出现两次，后面接的东西却变了。",
)
HOW = Both(
    "Mixers as created, before any training; the first head of each, strengths relative to its own strongest cell. Choose two to compare.",
    "权重为刚创建时，未经训练；各取第一个头，深浅相对于各自最强的一格。选两个来比较。",
)


def pages(atlas: Atlas) -> Iterator[Page]:
    """Make the page."""
    body = spoken(TEXT, "p") + figure("triangles", "triangles", caption=HOW, kind="plain")
    yield Page(ENTRY.path, ENTRY.name, body, {"triangles": data(atlas)}, lead=ENTRY.summary)


def data(atlas: Atlas) -> dict[str, object]:
    """Data of the figure "triangles": the systems that have a matrix, each with its first head."""
    shown = [seen for seen in atlas.inspections.values() if seen.matrix is not None]
    families = [
        {"key": FAMILY[name].key, "name": FAMILY[name].name._asdict()} for name in FAMILIES if any(seen.family == name for seen in shown)
    ]
    return {"tokens": sentence.tokens(), "families": families, "systems": [_system(seen) for seen in shown]}


def _system(seen: Inspection) -> dict[str, object]:
    assert seen.matrix is not None
    head = seen.matrix[0]
    return {
        "name": seen.info.name,
        "title": seen.title._asdict(),
        "year": seen.info.year,
        "family": FAMILY[seen.family].key,
        "causal": seen.info.causal,
        "reach": rounded(reach(head)),
        "matrix": rounded(head),
    }


def reach(matrix: list[list[float]]) -> float:
    """Mean distance |i − j| of a matrix, weighted by the magnitude of its cells."""
    cells = [(abs(i - j), abs(value)) for i, row in enumerate(matrix) for j, value in enumerate(row)]
    total = sum(size for _, size in cells)
    return sum(distance * size for distance, size in cells) / total if total else 0.0
