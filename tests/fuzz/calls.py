"""Random calls of all public functions: valid calls with up to two arguments replaced by invalid ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.fuzz import models, ops
from tests.fuzz.values import Draw, mutated

TARGETS: dict[str, Callable[[Draw], tuple[Callable[..., Any], dict[str, Any]]]] = {
    f.__name__: f
    for f in (
        ops.linear_attention, ops.diagonal_scan, ops.running_max, ops.selective_scan, ops.long_conv, ops.lti, ops.pattern_attention,
        ops.patterns, ops.explain, ops.decode, models.create, models.mix, models.mix_other, models.cost, models.inspect_mixer, models.info,
        models.register, models.feed_forward, models.config, models.preset, models.other_configs, models.language_model,
        models.other_models,
        models.state, models.files, models.streamed, models.read, models.text, models.options, models.patch,
        models.quantize, models.pool, models.task, models.prepare,
    )
}  # fmt: skip


@st.composite
def calls(draw: Draw, names: tuple[str, ...] = tuple(TARGETS)) -> tuple[str, Callable[..., Any], dict[str, Any]]:
    """The target's name, the callable, and its arguments by name."""
    name = draw(st.sampled_from(names))
    call, given = TARGETS[name](draw)
    arguments = dict(given)
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 1, 2]))):
        argument = draw(st.sampled_from(sorted(arguments)))
        arguments[argument] = mutated(draw, arguments[argument])
    return name, call, arguments
