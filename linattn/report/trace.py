"""Lines of text for a traced step of generation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from linattn.generate.text import printable
from linattn.generate.trace import Stage, Trace
from linattn.report.words import memory, percent

BAR = 24  # characters of a probability of 1


def lines(trace: Trace) -> Iterator[str]:
    """The steps from text to text, numbered; no control codes."""
    yield f"1 tokenise    {quoted(trace.prompt)}: {len(trace.tokens)} {'token' if len(trace.tokens) == 1 else 'tokens'}"
    yield from _wrapped(f"{quoted(t.text)} {t.number}" for t in trace.tokens)
    for number, part, title in ((2, "embedding", "embed"), (3, "", "layers")):
        stages = [s for s in trace.stages if (s.part == part if part else s.part in ("mixer", "ffn", "norm"))]
        if part:
            yield f"{'':24}{'shape':15}{'rms':>8}   largest entries, of the last token"
            yield f"{number} {title:22}{described(stages[0])}"
        else:
            yield f"{number} {title}"
            yield from (line for stage in stages for line in _layer(stage))
    classifier = trace.stages[-1]
    yield f"4 classify    {shape(classifier.shape)}: a logit for each of {classifier.shape[-1]:,} tokens"
    yield f"5 sample      {how(trace)}"
    width = max(len(quoted(t.text)) for t in trace.candidates)
    for t in trace.candidates:
        chosen = " <" if t.number == trace.written[0].number else ""
        bar = "#" * round(BAR * t.probability) + chosen
        yield f"    {quoted(t.text):{width}} {t.number:6}  logit {t.logit:7.2f}  {percent(t.probability):>8} {bar}".rstrip()
    yield f"6 loop        {len(trace.written)} chosen, ended {trace.ended}"
    yield from _wrapped(f"{quoted(t.text)} {percent(t.probability)}" for t in trace.written)
    yield f"  text        {quoted(trace.text)}"


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


def told(stage: Stage) -> str:
    """State or routing of a layer; empty for most."""
    if stage.experts:
        return "experts " + ", ".join(f"{number} ({percent(weight)})" for number, weight in stage.experts)
    kept = {name: size for name, size in stage.state.items() if name != "position"}
    if not kept:
        return ""
    return f"keeps {memory(stage.state_bytes)}: " + ", ".join(f"{name} {shape(size)}" for name, size in kept.items())


def how(trace: Trace) -> str:
    """Description of the choice of the token."""
    s = trace.sampling
    if s.temperature == 0:
        return "the likeliest"
    limits = [f"top {s.top_k}"] if s.top_k is not None else []
    limits += [f"top {percent(s.top_p)}"] if s.top_p is not None else []
    return ", ".join([f"temperature {s.temperature:g}", *limits])


def name_of(stage: Stage) -> str:
    """Name of a stage: a mixer has its layer's number, a feed-forward follows it."""
    if stage.part == "mixer":
        return f"  layer {stage.layer} {stage.name}"
    return f"    {stage.name} norm" if stage.part == "norm" else f"    {stage.name}"


def _layer(stage: Stage) -> Iterator[str]:
    yield f"{name_of(stage):24.24}{described(stage)}"
    if more := told(stage):
        yield f"{'':24}{more}"


def _wrapped(words: Iterable[str], width: int = 76) -> Iterator[str]:
    line = ""
    for word in words:
        if line and len(line) + len(word) > width:
            yield f"    {line.rstrip()}"
            line = ""
        line += word + "  "
    if line:
        yield f"    {line.rstrip()}"
