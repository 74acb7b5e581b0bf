"""Precision: rounded recurrences against an explicit one, models with rounded states, and restoring from storage."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from linattn.models import LanguageModel, LMConfig
from linattn.reproduce import precision, storage
from linattn.reproduce.precision import DECAYS, DTYPES, QUICK, answered, errors, rounded_outputs, stored
from linattn.reproduce.storage import brought, filled
from linattn.reproduce.synthetic import finish
from linattn.state import State
from linattn.tasks import multi_query_recall

RECALL = {"lengths": [[8, 1], [16, 2]], "vocab_size": 16, "examples": 8, "epochs": 1, "batch_size": 4, "learning_rate": 1e-3, "dim": 32}
TINY = replace(
    QUICK, mixers=("deltanet", "gla"), seeds=2, size=8, length=256, every=(1, 16), recall={**RECALL, "layers": 1, "ffn_dim": 32},
    stack={"layers": 2, "dim": 64, "heads": 4, "kv_heads": 2, "contexts": [16, 64]},
)  # fmt: skip


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("every", [1, 4])
def test_rounded_outputs_are_those_of_the_recurrence(delta, every):
    q, k, v = (torch.randn(1, 11, 1, 4, dtype=torch.float64) for _ in range(3))
    k /= k.norm(dim=-1, keepdim=True)
    found = rounded_outputs(q, k, v, delta=delta, every=every)
    assert found.shape == (4, 11, len(DECAYS), 4)
    for row, dtype in enumerate((torch.float64, *DTYPES.values())):
        for head, decay in enumerate(DECAYS):
            state = torch.zeros(4, 4, dtype=torch.float64)
            for t in range(11):
                key = k[0, t, 0]
                state = decay * state
                state = state + torch.outer(key, v[0, t, 0] - (key @ state if delta else 0))
                assert torch.allclose(found[row, t, head], q[0, t, 0] @ state, rtol=1e-9, atol=1e-12)
                state = state.to(dtype).double() if (t + 1) % every == 0 else state


def test_errors_grow_as_theory_says():
    each = errors("additive", 16, 1024, 1, seed=0)
    assert each["tokens"] == [64, 128, 256, 512, 1024]
    without, faded = each["bfloat16"][0], each["bfloat16"][DECAYS.index(0.9)]
    assert 0.5 < without[-1] / without[0] / 4 < 2  # the root of 1024 / 64
    assert 0.7 < faded[-1] / faded[0] < 1.4
    assert 5 < without[-1] / each["float16"][0][-1] < 12  # 2^3
    assert 2**15 < without[-1] / each["float32"][0][-1] < 2**17
    seldom = errors("additive", 16, 1024, 64, seed=0)["bfloat16"][0]
    assert 5 < without[-1] / seldom[-1] < 12  # the root of 64
    assert errors("delta", 16, 1024, 1, seed=0)["bfloat16"][0][-1] < without[-1] / 2


def test_stored_states_lose_what_their_dtype_cannot_hold():
    model = LanguageModel(LMConfig(dim=32, layers=2, mixer="deltanet")).eval()
    _, state = model(torch.randint(256, (2, 9)), return_state=True)
    kept = stored(state, torch.bfloat16)
    for old, new in zip(state.layers, kept.layers, strict=True):
        assert old.keys() == new.keys()
        for name, t in old.items():
            assert new[name].dtype == t.dtype
            assert torch.equal(new[name], t.bfloat16().to(t.dtype) if t.is_floating_point() else t)
    assert not torch.equal(kept.layers[0]["S"], state.layers[0]["S"])


def test_answers_are_those_of_the_model(monkeypatch):
    torch.manual_seed(1)
    model = LanguageModel(LMConfig(vocab_size=16, dim=32, layers=1, mixer="gated_deltanet")).eval()
    examples = multi_query_recall(64, tokens=16, pairs=2, vocab_size=16, generator=torch.Generator().manual_seed(0))
    guessed = model(examples.ids).argmax(-1)
    wanted = (guessed == examples.labels).sum().item() / (examples.labels >= 0).sum().item()
    for every, dtype in ((16, None), (1, None), (3, torch.float32)):
        assert answered(model, examples, every, dtype) == pytest.approx(wanted)
    monkeypatch.setattr(precision, "stored", lambda state, dtype: State([{k: t * 0 for k, t in layer.items()} for layer in state.layers]))
    alone = model(examples.ids.reshape(-1, 1)).argmax(-1).view_as(examples.ids)  # states rounded that coarsely are useless
    forgetful = (alone == examples.labels).sum().item() / (examples.labels >= 0).sum().item()
    assert answered(model, examples, 1, torch.float16) == pytest.approx(forgetful) != pytest.approx(wanted)


def test_states_are_as_large_as_those_of_models():
    config = LMConfig(dim=64, layers=2, mixer="softmax", mixer_options={"softmax": {"heads": 4, "kv_heads": 2}})
    for mixer, options in (("softmax", {"heads": 4, "kv_heads": 2}), ("gla", {}), ("mamba2", {"state_size": 16})):
        config = LMConfig(dim=64, layers=2, mixer=mixer, mixer_options={mixer: options})
        _, state = LanguageModel(config).bfloat16()(torch.randint(256, (1, 24)), return_state=True)
        made = filled(mixer, 24, layers=2, dim=64, **options)
        assert [{k: (t.shape, t.dtype) for k, t in layer.items()} for layer in made.layers] == [
            {k: (t.shape, t.dtype) for k, t in layer.items()} for layer in state.layers
        ]
        assert made.nbytes == state.nbytes


def test_what_comes_back_is_what_was_kept(tmp_path, monkeypatch):
    state, came = filled("gla", 1, layers=2, dim=64), []
    forgotten = []
    monkeypatch.setattr(storage, "_forget", lambda path, forget=storage._forget: (forgotten.append(path), forget(path)))
    monkeypatch.setattr(storage, "_timed", lambda bring, device: came.append(bring()) or float(len(came)))
    found = brought(state, "cpu", tmp_path)
    assert found == {"bytes": state.nbytes, "accelerator": None, "memory": 7.0, "disk": 8.0}  # the first of each is a warm-up
    assert len(forgotten) == len(came) / 2
    for back in came:
        for old, new in zip(state.layers, back.layers, strict=True):
            assert all(torch.equal(t, new[name]) and t.data_ptr() != new[name].data_ptr() for name, t in old.items())
    assert brought(state, "cpu", None)["disk"] is None


def test_a_file_leaves_the_page_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "cache_folder", lambda: tmp_path / "cache")
    with storage.disk() as (folder, kind):
        assert kind == storage._file_system(tmp_path)
        assert kind != "unknown" or not Path("/proc/self/mounts").exists()
        assert folder is None or folder.parent == tmp_path / "cache"
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.delattr(os, "posix_fadvise")
    with storage.disk() as (folder, kind):
        assert folder is None
        assert "page cache" in kind


def test_a_study_gives_rows_and_plots():
    done = []
    while len(wanted := precision.runs(TINY, done)) > len(done):
        done += [(run, finish(precision.measure({**run, "device": "cpu"}))) for run in wanted[len(done) :]]
    assert [run["kind"] for run, _ in done].index("bring") == len(done) - 1
    rows = precision.rows(TINY, done)
    by = {key: [row for row in rows if row.get(key) is not None] for key in ("error", "recall", "bytes")}
    assert [len(by[key]) for key in by] == [2 * 3 * 2, 2 * 3 * 2, 2 + 2]
    assert {(row["mixer"], row["every"], row["dtype"]) for row in by["error"]} == {
        (rule, every, dtype) for rule in ("additive", "delta") for every in (1, 16) for dtype in DTYPES
    }
    for row in by["error"]:
        at_end = next(p for p in row["curve"] if p["tokens"] == 256 and p["decay"] == 1.0)
        assert row["error"] == at_end["error"] > 0
    assert all(row["recall"] == row["exact"] for row in by["recall"] if row["dtype"] == "float32")
    assert [row["tokens"] for row in by["bytes"]] == [16, 64, 64, 64]
    assert all(row["memory_rate"] == row["bytes"] / row["memory"] for row in by["bytes"])
    assert all(column.cell(row) for column in precision.STUDY.all_columns for row in rows)
    titles = [chart.title for chart in precision.charts(TINY, rows)]
    assert titles[0] == "Error, additive, rounded after every token"
    assert titles[-2:] == ["Recall", "Restoring"]
    assert len(titles) == 6


def test_the_plot_of_restoring_names_mixers_in_short_form():
    """Full option names would leave little space for lines, and small letters on a phone."""
    row = {"mixer": "deltanet:negative_eigenvalues=true", "tokens": 64, "bytes": 8, "memory": 0.5}
    (chart,) = precision.charts(TINY, [{**row, "mixer": "softmax"}, row])
    assert "deltanet β&lt;2, memory" in chart.svg and "negative_eigenvalues" not in chart.svg
