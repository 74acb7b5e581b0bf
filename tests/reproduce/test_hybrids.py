"""Hybrids: patterns with the given share, models of equal size, and a small study."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from linattn.models import LanguageModel, LMConfig
from linattn.reproduce import hybrids
from linattn.reproduce.hybrids import FULL, QUICK, decoding, pattern, stack
from linattn.reproduce.synthetic import finish

TINY = replace(
    QUICK, mixers=("gla",), seeds=1, shares=("0", "1/2", "1"), layers=2, dim=32, ffn_dim=128, context=40, decoded=4,
    recall={"lengths": [[8, 1], [16, 2]], "vocab_size": 16, "examples": 8, "epochs": 1, "batch_size": 4, "learning_rate": 1e-3},
    text={"context": 16, "batch_size": 2, "steps": 2, "learning_rate": 1e-3},
)  # fmt: skip


def test_softmax_stands_evenly():
    wanted = {
        "0": "gla*12", "1/12": "gla*6, softmax, gla*5", "1/6": "gla*3, softmax, gla*5, softmax, gla*2",
        "1/4": "gla*2, softmax, gla*3, softmax, gla*3, softmax, gla", "1": "softmax*12",
    }  # fmt: skip
    assert {part: pattern("gla", Fraction(part), 12) for part in wanted} == wanted
    for part in FULL.shares:
        names = LMConfig(dim=32, layers=12, mixer=pattern("gla", Fraction(part), 12)).mixer_names
        assert Fraction(names.count("softmax"), 12) == Fraction(part)
    with pytest.raises(ValueError, match="whole number of the 4 layers, but came as 1/6"):
        pattern("gla", Fraction("1/6"), 4)


def test_softmax_is_not_mixed_with_itself():
    with pytest.raises(ValueError, match="mixers must not be softmax"):
        stack("softmax:window=8", "1/2", 4)


@pytest.mark.parametrize("settings", [QUICK, FULL])
def test_all_stacks_are_of_one_size(settings):
    counts = {}
    for run in {run["share"]: run for run in hybrids.runs(settings, [])}.values():
        with torch.device("meta"):
            sizes = {name: run[name] for name in ("dim", "layers", "ffn_dim")}
            model = LanguageModel(stack(run["mixer"], run["share"], run["layers"]).config(**sizes))
        counts[run["share"]] = sum(p.numel() for p in model.parameters())
    assert len(counts) == len(settings.shares)
    assert max(counts.values()) < 1.02 * min(counts.values())


def _done(settings):
    """Execute all runs in turn, including requested later ones."""
    done = []
    while len(wanted := hybrids.runs(settings, done)) > len(done):
        done += [(run, finish(hybrids.measure({**run, "device": "cpu"}))) for run in wanted[len(done) :]]
    return done


def test_tables_say_how_a_step_ran():
    column = next(c for c in hybrids.STUDY.columns if c.key == "how")
    ran = ["by a captured step, a CUDA graph", "by a captured step, a list of calls", "as the model is written: the state of layer 0 grows"]
    assert [column.cell({"how": how}) for how in ran] == ["CUDA graph", "list of calls", "operations"]
    assert column.cell({}) == "–"


def test_a_study_gives_rows_and_plots():
    done = _done(TINY)
    assert [run["kind"] for run, _ in done].index("decode") == len(done) - 1 == 3 * 2
    rows = hybrids.rows(TINY, done)
    assert [row["share"] for row in rows] == ["0", "1/2", "1"]
    assert [row["layers"] for row in rows] == ["gla*2", "gla, softmax", "softmax*2"]
    for row in rows:
        assert 0 <= row["recall"] <= 1
        assert 5 < row["bits_per_byte"] < 9
        assert row["bits_per_byte_spread"] is None
        assert row["decode_ms"] > 0
    cache = 2 * 40 * 32 * 4  # keys and values of 40 tokens, float32
    assert rows[2]["state_bytes"] >= 2 * cache
    assert cache <= rows[1]["state_bytes"] - rows[0]["state_bytes"] / 2 < rows[2]["state_bytes"] / 2 + 1
    assert rows[0]["source"] == "arXiv 2406.07887, abstract"
    assert rows[0]["agrees"] is None, "after four steps softmax alone has not learned it, either"
    assert [chart.title for chart in hybrids.charts(TINY, rows)] == ["Recall", "Text", "Memory of the past", "Writing a token"]
    assert [chart.title for chart in hybrids.charts(TINY, hybrids.rows(TINY, done[:3]))] == ["Recall"]


def test_recall_is_held_against_softmax_alone():
    def table(**recall):
        return [{"mixer": "gla", "share": share, "recall": value} for share, value in recall.items()]

    def agrees(share, *values):
        rows = table(**dict(zip(("0", "1/4" if share == "1/4" else "1/6", "1"), values, strict=True)))
        return next(hybrids._paper(row, rows)["agrees"] for row in rows if row["share"] == share)

    assert agrees("0", 0.5, 0.9, 0.95) is True
    assert agrees("0", 0.94, 0.9, 0.95) is False
    assert agrees("1/6", 0.5, 0.9, 0.8) is True
    assert agrees("1/6", 0.5, 0.92, 0.95) is None is agrees("1/6", 0.5, 0.97, 0.95), "as good is neither ahead nor behind"
    assert agrees("1/6", 0.5, 0.8, 0.95) is False
    assert agrees("1/4", 0.5, 0.92, 0.95) is True
    assert agrees("1/4", 0.5, 0.8, 0.95) is False
    assert agrees("1", 0.5, 0.8, 0.95) is None is agrees("1/6", 0.5, 0.8, None)
    assert agrees("0", 0.02, 0.03, 0.03) is None is agrees("1/4", 0.02, 0.03, 0.03), "softmax learned nothing, either"


def test_times_are_measured_one_after_the_other():
    """Processes that measured two mixers at once would slow each other."""
    settings = replace(TINY, mixers=("gla", "retnet", "deltanet"))
    done = [(run, {}) for run in hybrids.runs(settings, [])]
    for mixer in settings.mixers:
        *before, last = hybrids.runs(settings, done)
        assert (last["kind"], last["mixer"]) == ("decode", mixer)
        assert before == [run for run, _ in done]
        done.append((last, {}))
    assert hybrids.runs(settings, done) == [run for run, _ in done]


def test_what_is_kept_is_the_state_behind_the_context():
    models = {name: LanguageModel(LMConfig(dim=32, layers=1, mixer=name)).eval() for name in ("gla", "softmax")}
    short, long = (decoding(models, context, 2) for context in (8, 64))
    assert short["gla"]["state_bytes"] == long["gla"]["state_bytes"]
    ids = torch.zeros(1, 64, dtype=torch.int64)
    assert long["softmax"]["state_bytes"] == models["softmax"](ids, return_state=True)[1].nbytes > short["softmax"]["state_bytes"]


def test_recall_is_learned():
    recall = {"lengths": [[8, 1]], "vocab_size": 8, "examples": 256, "epochs": 8, "batch_size": 16, "learning_rate": 1e-2}
    run = hybrids.runs(replace(TINY, mixers=("deltanet",), shares=("0",), recall=recall), [])[0]
    assert run["kind"] == "recall"
    assert finish(hybrids.measure({**run, "device": "cpu"}))["recall"] > 0.9
