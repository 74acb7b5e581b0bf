"""Extrapolation: losses by definition, and a small study that is interrupted and continued."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from linattn.experiment.study import LeftOut
from linattn.models import LanguageModel, LMConfig
from linattn.reproduce import extrapolation
from linattn.reproduce.extrapolation import QUICK, averages, borders, losses
from linattn.reproduce.training import Stack, widths

TINY = replace(QUICK, mixers=("softmax:window=4", "gla"), seeds=2, context=16, length=64, sequences=2, dim=32, steps=2, ffn_dim=64)


def _model(mixer, layers=2):
    torch.manual_seed(1)
    return LanguageModel(LMConfig(dim=32, layers=layers, mixer=mixer)).double().eval()


def _defined(model, ids, start, stop):
    """-log2 p(token | tokens from start on), one call for each token of one sequence."""
    found = []
    for t in range(start + 1, stop):
        logits = model(ids[:, start:t])[:, -1]
        found.append(-logits.softmax(-1)[0, ids[0, t]].log2().item())
    return found


@pytest.mark.parametrize("mixer", ["softmax", "gla", "mamba2", "rwkv7"])
@torch.no_grad()
def test_losses_are_those_of_definition(mixer):
    model, ids = _model(mixer), torch.randint(256, (1, 27))
    carried, fresh = (losses(model, ids, 8, carried=c)[0].tolist() for c in (True, False))
    assert carried == pytest.approx(_defined(model, ids, 0, 27), rel=1e-9)
    wanted = [bits for start in (0, 8, 16, 24) for bits in _defined(model, ids, start, min(start + 9, 27))]
    assert fresh == pytest.approx(wanted, rel=1e-9)


@torch.no_grad()
def test_a_past_that_is_carried_is_seen():
    model = _model("gla")
    ids, other = torch.randint(256, (2, 33)), torch.randint(256, (2, 33))
    other[:, 8:] = ids[:, 8:]
    for carried in (True, False):
        same = torch.equal(losses(model, ids, 8, carried=carried)[:, 8:], losses(model, other, 8, carried=carried)[:, 8:])
        assert same is not carried


def test_averages_cover_every_prediction_once():
    edges = borders(256, 8192)
    assert edges == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    loss = torch.rand(3, 8191)
    counts = [e - s for s, e in zip([0, *edges], edges, strict=False)]
    counts[-1] -= 1  # of n bytes n - 1 can be predicted
    assert np.dot(averages(loss, edges), counts) == pytest.approx(loss.double().mean().item() * 8191)
    assert averages(loss, edges)[4] == pytest.approx(loss[:, 128:256].double().mean().item())
    assert borders(8, 64) == [1, 2, 4, 8, 16, 32, 64]


def test_texts_are_pieces_of_the_text_and_do_not_overlap():
    source = np.arange(1000)
    texts = extrapolation._texts(source, 64, 4)
    assert texts.tolist() == [list(range(64 * i, 64 * i + 64)) for i in (0, 5, 9, 14)]
    assert len(extrapolation._texts(source, 300, 8)) == 3
    with pytest.raises(LeftOut, match="1,000 bytes, but 1,001 are needed"):
        extrapolation._texts(source, 1001, 1)


def test_all_models_are_of_one_size_whatever_else_is_compared():
    wanted = {run["mixer"]: run["ffn_dim"] for run in extrapolation.runs(QUICK, [])}
    assert len(wanted) == 6
    counts = []
    for mixer, width in wanted.items():
        alone = extrapolation.runs(replace(QUICK, mixers=(mixer,)), [])
        assert {run["ffn_dim"] for run in alone} == {width}
        model = LanguageModel(Stack.of(mixer).config(dim=64, layers=2, ffn_dim=width))
        counts.append(sum(p.numel() for p in model.parameters()))
    assert max(counts) < 1.02 * min(counts)
    with pytest.raises(ValueError, match="parameter counts of these mixers"):
        widths({"rwkv7": Stack("rwkv7")}, dim=64, layers=2, ffn_dim=1)


def test_what_is_too_large_is_left_out_and_keeps_nobody_from_taking_part():
    large, small = extrapolation.runs(replace(QUICK, mixers=("mamba3_mimo", "gla"), seeds=1), [])
    assert (large["ffn_dim"], small["ffn_dim"]) == (None, extrapolation.runs(replace(QUICK, mixers=("gla",)), [])[0]["ffn_dim"])
    with pytest.raises(LeftOut, match="2 layers of width 64 have more parameters"):
        extrapolation.measure({**large, "device": "cpu"})
    with pytest.raises(ValueError, match="multiple of its heads"):
        extrapolation.runs(replace(QUICK, mixers=("gla:heads=3",)), [])


def test_a_study_gives_rows_and_plots():
    done = [({**run, "device": "cpu"}, extrapolation.measure({**run, "device": "cpu"})) for run in extrapolation.runs(TINY, [])]
    rows = extrapolation.rows(TINY, done)
    assert [row["mixer"] for row in rows] == ["softmax:window=4", "gla"]
    for row in rows:
        assert [p["positions"] for p in row["curve"]] == [1, 2, 4, 8, 16, 32, 64]
        assert row["curve"][4]["gain"] == 0  # the first segment has no earlier state
        assert row["learned"] == row["curve"][4]["carried"]
        assert row["positions"] == 64
        assert 5 < row["carried"] < 9
        assert row["gain"] == pytest.approx(row["fresh"] - row["carried"])
        assert row["carried_spread"] > 0
    assert rows[0]["source"] is None
    assert rows[1]["source"].startswith("arXiv 2507.02782")
    assert rows[0]["agrees"] is None
    assert rows[1]["agrees"] is (rows[1]["gain"] < 0)
    drawn = extrapolation.charts(TINY, rows)
    assert [chart.title for chart in drawn] == ["Loss by position", "Gain from the past"]
    assert all("gla" in chart.svg and "softmax window 4" in chart.svg for chart in drawn)


def test_what_the_papers_say_and_whether_it_came_out():
    def row(mixer, carried, gain=0.1):
        return {"mixer": mixer, "learned": 2.5, "carried": carried, "gain": gain}

    table = [row("softmax", 4.0, -1.0), row("gla", 2.9), row("gated_deltanet", 2.8), row("rwkv7", 2.95)]
    assert [extrapolation._paper(r, table)["agrees"] for r in table] == [True, False, True, None], "harder text alone is no divergence"
    lower = [*table, row("mamba2", 2.7)]
    assert extrapolation._paper(table[2], lower)["agrees"] is False
    assert extrapolation._paper(table[2], [*table, row("softmax", 2.7)])["agrees"] is True, "of the recurrent ones"
    own = [row("gated_deltanet", 2.8), row("gated_deltanet:heads=2", 2.7), row("softmax", 2.9)]
    assert extrapolation._paper(own[0], own)["agrees"] is None, "there is no other one"
    assert all(extrapolation._paper(r, table)["source"] for r in table)
    assert extrapolation._paper(row("softmax:window=null", 4.0, -1.0), table)["agrees"] is True, "no window is softmax itself"


def test_what_diverges_in_a_seed_has_no_mean_and_the_others_have_theirs():
    """JSON has no such number, so it is None."""
    settings = replace(TINY, mixers=("gla", "gated_deltanet", "rwkv7"), ffn_dim=128)
    stretches = {"borders": [8, 16, 64], "fresh": [3.0, 3.0, 3.0]}
    done = [(run, {**stretches, "carried": [3.0, 2.9, 2.8]}) for run in extrapolation.runs(settings, [])]
    done[0][1]["carried"] = [3.0, 2.9, None]
    gla, gated, _ = rows = extrapolation.rows(settings, done)
    assert (gla["carried"], gla["carried_spread"], gla["gain"]) == (None, None, None)
    assert gla["learned"] == pytest.approx(2.9)
    assert [row["agrees"] for row in rows] == [True, True, None]
    assert gated["gain"] == pytest.approx(0.2)
    chart, _ = extrapolation.charts(settings, rows)
    assert chart.found == "Up to byte 64: gla –, gated_deltanet 2.800, rwkv7 2.800."
    done[0][1]["carried"] = done[0][1]["fresh"] = [None, None, None]
    assert extrapolation.rows(settings, done)[0]["agrees"] is None, "it learned nothing that could be lost"


def test_training_is_part_of_it():
    run = {**extrapolation.runs(replace(TINY, mixers=("gla",), steps=60), [])[0], "device": "cpu"}
    assert extrapolation.measure(run)["bits_per_byte"] < 0.8 * math.log2(256)
