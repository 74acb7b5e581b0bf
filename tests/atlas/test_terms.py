"""Words: one Chinese word for one term in the atlas, the reports and the Chinese pages, and no English sentence that is a riddle."""

import ast
import re
from pathlib import Path

import pytest

import linattn
from linattn.atlas import cell
from tests.atlas.pages import Chinese, pages

# term: the word for it, and words that stand for it elsewhere or are no engineer's
TERMS = {
    "decay": ("衰减", ("淡去", "淡掉", "褪去", "淡化")),
    "erase": ("擦除", ("抹掉", "抹去", "擦掉", "擦去", "抹除")),
    "write": ("写入", ("写进去", "记进")),
    "read": ("读出", ("读取",)),
    "scalar multiplications": ("标量乘法次数", ("单数乘法",)),
    "elapsed time": ("实际耗时", ("看钟表",)),
    "control theory": ("控制理论", ("控制论",)),
    "cost": ("开销", ("价格", "价钱", "代价")),
    "pitfalls": ("常见错误", ("笔误",)),
    "feature map": ("特征映射", ("特征图",)),
    "short convolution": ("短卷积", ("短程卷积", "小卷积")),
    "hybrid model": ("混合模型", ("杂交模型", "混搭模型")),
    "GPU kernel": ("内核", ("GPU 核", "用的核", "的 kernel")),
    "key-value cache": ("KV 缓存", ("键值缓存",)),
    "the atlas": ("图解", ("图册", "图集")),
}
# what a reader of the site alone cannot look up
INSIDE = re.compile(r"five documents|seeds=\(|\bthe notes\b|\bseed 00\d|The notes from which|几篇笔记|五份文档|五篇文档")


def sources():
    """What the atlas, the reports, the Chinese README and the Chinese pages of the documentation are made from."""
    package = Path(linattn.__file__).parent
    atlas = [p for ending in ("*.py", "*.html", "*.js") for p in (package / "atlas").rglob(ending)]
    root = package.parent
    return [*atlas, package / "report" / "chinese.py", root / "README.zh.md", *root.glob("docs/zh/*.md"), *root.glob("docs/*.zh.md")]


@pytest.mark.parametrize("term", TERMS)
def test_a_term_has_one_translation(term):
    word, others = TERMS[term]
    texts = {str(path): path.read_text(encoding="utf-8") for path in sources()}
    assert any(word in text for text in texts.values()), f"{word} stands nowhere"
    found = [(name, other) for name, text in texts.items() for other in others if other in text]
    assert found == []


def test_the_operations_of_a_cell_are_named_alike_in_every_drawing():
    source = Path(cell.__file__).read_text(encoding="utf-8")
    for pair in ('Both("decay", "衰减")', 'Both("erase", "擦除")', 'Both("write", "写入")', 'Both("read", "读出")'):
        assert pair in source


def test_no_page_speaks_of_what_its_reader_cannot_see(site):
    for path in pages(site):
        html = path.read_text(encoding="utf-8")
        words = " ".join(Chinese(html).words) + re.sub(r"<script.*?</script>|<code>.*?</code>", "", html, flags=re.S)
        assert not INSIDE.search(words), (path.name, INSIDE.search(words))


# what has to be read twice, and what the glossary replaces
RIDDLES = re.compile(
    r"\b(?:whoever|whomever|lest|herein)\b|\b(?:one of|is|are) (?:theirs|ours)\b|\bof theirs\b|every form of it|from any split|for want of"
    r"|as with a size that is none|\bwho (?:reads|asks) of\b|what fades|memory of a card:|does not settle",
    re.I,
)


def english():
    """Sentences that a user reads: pages, docstrings, and strings with a space in them, which messages and help texts are."""
    package = Path(linattn.__file__).parent
    root = package.parent
    chinese = {*root.glob("docs/*.zh.md"), *root.glob("docs/zh/*.md")}
    for path in (root / "README.md", *root.glob("docs/**/*.md"), *root.glob("docs/*.rst"), *package.rglob("*.html")):
        if path not in chinese:
            yield str(path.relative_to(root)), path.read_text(encoding="utf-8")
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield f"{path.relative_to(root)}:{node.lineno}", node.value


def test_no_sentence_has_to_be_read_twice():
    found = [(place, match[0]) for place, text in english() for match in RIDDLES.finditer(" ".join(text.split()))]
    assert found == []


@pytest.mark.parametrize("text", ["Whoever asks", "the state is theirs alone", "lest it see none", "linear attention, every form of it"])
def test_a_riddle_is_found(text):
    assert RIDDLES.search(text)
