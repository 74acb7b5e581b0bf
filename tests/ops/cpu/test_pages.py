"""Weights and states that a decoding step reads lie in huge pages where Linux has them, at the addresses of before."""

import sys

import pytest
import torch

from linattn.generate.captured import LONG, step_of
from linattn.generate.prefill import prefill
from linattn.models import LanguageModel, LMConfig
from linattn.ops.cpu import library, pages

SIZE = pages.SIZE


def huge(t):
    """Bytes in huge pages of the mappings that ``t`` overlaps."""
    found, inside = 0, False
    with open("/proc/self/smaps", encoding="ascii") as lines:
        for line in lines:
            first, *rest = line.split()
            if "-" in first and not first.endswith(":"):
                start, end = (int(x, 16) for x in first.split("-"))
                inside = start < t.data_ptr() + t.nbytes and t.data_ptr() < end
            elif inside and first == "AnonHugePages:":
                found += int(rest[0]) << 10
    return found


@pytest.fixture
def some():
    """A tensor with whole huge pages in it; skips where Linux collapses none."""
    t = torch.randn(4 * SIZE // 4)
    if sys.platform != "linux" or not pages.enlarge([t]):
        pytest.skip("Linux gives no huge pages here")
    return torch.randn(4 * SIZE // 4)


def test_numbers_stay_and_their_pages_become_large(some):
    before, place = some.clone(), some.data_ptr()
    already = huge(some)
    assert pages.enlarge([some]) >= 3
    assert huge(some) >= already + 2 * SIZE
    assert torch.equal(some, before) and some.data_ptr() == place


def test_small_tensors_and_a_machine_without_them_are_left_alone(some, monkeypatch, tmp_path):
    assert pages.enlarge([some[: pages.LEAST // 4 - 1]]) == 0
    monkeypatch.setattr(pages, "_SETTING", tmp_path / "enabled")
    assert pages.enlarge([some]) == 0
    pages._SETTING.write_text("always madvise [never]\n")
    assert pages.enlarge([some]) == 0


def test_a_captured_step_of_many_tokens_reads_huge_pages(some):
    if library.reason():
        pytest.skip(library.reason())
    lm = LanguageModel(LMConfig(vocab_size=20000, dim=128, layers=1, mixer="gla")).eval()
    weight = lm.lm_head.weight
    assert weight.nbytes > 4 * SIZE
    already = huge(weight)
    with torch.inference_mode():
        state = prefill(lm.model, torch.zeros(1, 7, dtype=torch.int64))[1]
        few = step_of(lm.model, lm.lm_head, state, LONG - 1)
        assert huge(weight) < already + 3 * SIZE
        assert step_of(lm.model, lm.lm_head, state, LONG) is few  # the same step, of a longer generation
    assert huge(weight) >= already + 3 * SIZE
