"""Lines of text for one step of generation."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator

from linattn.generate.text import printable
from linattn.generate.walkthrough import Stage, Walkthrough
from linattn.report.language import Both
from linattn.report.words import memory, percent

BAR = 24  # length in characters of a probability of 1


TITLES = {
    "tokenise": Both("1 tokenise", "1 分词"),
    "embedding": Both("2 embed", "2 嵌入"),
    "layers": Both("3 layers", "3 各层"),
    "classify": Both("4 classify", "4 分类"),
    "sample": Both("5 sample", "5 采样"),
    "loop": Both("6 loop", "6 循环"),
}


def lines(walk: Walkthrough, language: str = "en") -> Iterator[str]:
    """The steps from text to text, numbered, in the language "en" or "zh"; no control codes."""

    def say(words: Both) -> str:
        return getattr(words, language)

    def title(step: str, width: int = 14) -> str:
        return _padded(say(TITLES[step]), width)

    count = len(walk.tokens)
    counted = Both(f"{count} {'token' if count == 1 else 'tokens'}", f"{count} 个 token")
    yield f"{title('tokenise')}{quoted(walk.prompt)}: {say(counted)}"
    yield from _wrapped(f"{quoted(t.text)} {t.number}" for t in walk.tokens)
    entries = Both("largest entries, of the last token", "最后一个 token 的最大分量")
    yield f"{'':24}{_padded(say(Both('shape', '形状')), 15)}{'rms':>8}   {say(entries)}"
    yield f"{title('embedding', 24)}{described(next(s for s in walk.stages if s.part == 'embedding'))}"
    yield say(TITLES["layers"])
    for stage in walk.stages:
        if stage.part in ("mixer", "ffn", "norm"):
            yield f"{_padded(say(name_of(stage)), 24)}{described(stage)}"
            if more := told(stage):
                yield f"{'':24}{say(more)}"
    classifier = walk.stages[-1].shape
    yield f"{title('classify')}{shape(classifier)}: {say(logits(classifier[-1]))}"
    yield f"{title('sample')}{say(how(walk))}"
    width = max(len(quoted(t.text)) for t in walk.candidates)
    for t in walk.candidates:
        chosen = " <" if t.number == walk.written[0].number else ""
        bar = "#" * round(BAR * t.probability) + chosen
        yield f"    {quoted(t.text):{width}} {t.number:6}  logit {t.logit:7.2f}  {percent(t.probability):>8} {bar}".rstrip()
    chosen_count = Both(f"{len(walk.written)} chosen, ended ", f"选出 {len(walk.written)} 个，")
    yield f"{title('loop')}{say(chosen_count)}{say(ended(walk))}"
    yield from _wrapped(f"{quoted(t.text)} {percent(t.probability)}" for t in walk.written)
    yield f"{_padded(say(Both('  text', '  文本')), 14)}{quoted(walk.text)}"


def _padded(text: str, width: int) -> str:
    """Pad ``text`` to ``width`` columns, of which a Chinese character takes two; longer text is cut off."""
    used = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
    return text[:width] if used >= width else text + " " * (width - used)


def logits(vocabulary: int) -> Both:
    """Description of the classifier's output."""
    return Both(f"a logit for each of {vocabulary:,} tokens", f"{vocabulary:,} 个 token 各一个 logit")


def ended(walk: Walkthrough) -> Both:
    """Reason why the loop ended."""
    count = len(walk.written)
    if walk.ended.startswith("after"):
        return Both(walk.ended, f"按要求写出 {count} 个 token 后结束")
    stop = walk.ended.removeprefix("at the stop text ")
    return Both(walk.ended, f"遇到停止文本 {stop} 结束" if stop != walk.ended else walk.ended)


def quoted(text: str) -> str:
    """Quote ``text`` on one line, with control codes escaped as in Python."""
    return "'" + "".join(c if c not in "\n\t" and printable(c) else c.encode("unicode_escape").decode() for c in text) + "'"


def shape(size: Iterable[int]) -> str:
    """[1, 9, 128]."""
    return f"[{', '.join(map(str, size))}]"


def largest(stage: Stage) -> str:
    """The entries farthest from 0, as channel and value."""
    return ", ".join(f"{place}: {value:+.2f}" for place, value in stage.largest)


def described(stage: Stage) -> str:
    """Shape, root mean square and largest entries in a line."""
    return f"{shape(stage.shape):15}{stage.rms:8.3f}   {largest(stage)}"


def told(stage: Stage) -> Both | None:
    """State or routing of a layer; None for most."""
    if stage.experts:
        listed = ", ".join(f"{number} ({percent(weight)})" for number, weight in stage.experts)
        return Both(f"experts {listed}", f"专家 {listed}")
    kept = {name: size for name, size in stage.state.items() if name != "position"}
    if not kept:
        return None
    listed = ", ".join(f"{name} {shape(size)}" for name, size in kept.items())
    return Both(f"keeps {memory(stage.state_bytes)}: {listed}", f"保留 {memory(stage.state_bytes)}：{listed}")


def how(walk: Walkthrough) -> Both:
    """Description of the choice of the token."""
    s = walk.sampling
    if s.temperature == 0:
        return Both("the likeliest", "取概率最大者")
    limits = [f"top {s.top_k}"] if s.top_k is not None else []
    limits += [f"top {percent(s.top_p)}"] if s.top_p is not None else []
    return Both(", ".join([f"temperature {s.temperature:g}", *limits]), "，".join([f"温度 {s.temperature:g}", *limits]))


def name_of(stage: Stage) -> Both:
    """Name of a stage: a mixer has its layer's number, a feed-forward follows it."""
    if stage.part == "mixer":
        return Both(f"  layer {stage.layer} {stage.name}", f"  第 {stage.layer} 层 {stage.name}")
    return Both(f"    {stage.name} norm", f"    {stage.name} 归一化") if stage.part == "norm" else Both(*[f"    {stage.name}"] * 2)


def _wrapped(words: Iterable[str], width: int = 76) -> Iterator[str]:
    line = ""
    for word in words:
        if line and len(line) + len(word) > width:
            yield f"    {line.rstrip()}"
            line = ""
        line += word + "  "
    if line:
        yield f"    {line.rstrip()}"
