"""Runs of two processes, which shard parameters, share sequences and heads, equal those of one; and resume in any number of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from linattn import load
from linattn.data import prepare
from linattn.train import TrainOptions, checkpoint, load_run, processes, train
from linattn.train.processes import Batches, Processes
from tests.pair import answer_of
from tests.train.pair import digest, options_of, recorded
from tests.train.runs import TEXT, options

SMALL = {
    "mixer": "gated_deltanet, softmax", "steps": 4, "dim": 32, "layers": 2, "context": 15, "batch_size": 4, "save_every": 2,
    "eval_every": 2, "dtype": "fp32",
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"batch_size": 2},
    "fsdp": {"batch_size": 2, "fsdp": True},
    "accumulated": {"batch_size": 1, "accumulate": 2, "fsdp": True},
    "cp": {"cp": 2},
    "fsdp cp": {"cp": 2, "fsdp": True, "checkpoint_activations": True},
    "tp": {"tp": 2},
    "packed cp": {"cp": 2, "fsdp": True},
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Documents of 7 and of 40 tokens, some of them across the cut."""
    folder = tmp_path_factory.mktemp("documents")
    lines = folder / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": TEXT[i * 47 : i * 47 + (7 if i % 3 else 40)]}) + "\n" for i in range(70)))
    prepare([str(lines)], validation=0.2, out=folder / "shards")
    return folder / "shards"


def asked(folder: Path, text: Path, shards: Path, name: str, **given: Any) -> dict[str, Any]:
    own = {**SMALL, **KINDS.get(name, {}), "out": str(folder / name.replace(" ", "_")), "text": [str(text)], **given}
    return {**own, "text": [], "data": str(shards)} if name.startswith("packed") else own


def one(folder: Path, options: dict[str, Any]) -> Any:
    return train(options_of({**options, "out": folder}), progress=False)


def together(folder: Path, *runs: dict[str, Any]) -> list[dict[str, Any]]:
    (folder / "rendezvous").unlink(missing_ok=True)
    return answer_of("tests.train.pair", folder, "2", json.dumps(runs), timeout=540)


@pytest.fixture(scope="module")
def found(tmp_path_factory, text, shards) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("pairs")
    runs = {name: asked(folder, text, shards, name) for name in KINDS}
    answers = together(folder, *runs.values())
    return {name: {**options, **answer} for (name, options), answer in zip(runs.items(), answers, strict=True)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, text, shards) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    return {name: one(folder / name, asked(folder, text, shards, name, **SMALL)) for name in ("alone", "packed")}


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_two_processes_train_as_one(name, found, alone) -> None:
    """Losses and weights after four steps of AdamW on the same sequences, in float32."""
    wanted, got = alone["packed" if name.startswith("packed") else "alone"], found[name]
    assert got["parameters"] == wanted.parameters
    for mine, its in zip(got["history"], wanted.history, strict=True):
        for what in ("train_loss", "validation_bits_per_byte"):
            assert mine[what] == pytest.approx(its[what], rel=1e-5)
        assert mine["tokens"] == its["tokens"]
    weights, reference = (load_file(Path(run) / "model.safetensors") for run in (got["out"], wanted.run))
    assert weights.keys() == reference.keys()
    away = sum(float((weights[n] - reference[n]).norm()) ** 2 for n in weights) ** 0.5
    moved = sum(float(t.norm()) ** 2 for t in reference.values()) ** 0.5
    assert away < 1e-4 * moved


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "tp", "cp"])
def test_its_model_is_read_by_all(name, found) -> None:
    run = Path(found[name]["out"])
    model, _ = load_run(run)
    ids = torch.arange(9)[None]
    torch.testing.assert_close(load(run)(ids).logits, model(ids))
    assert {p.suffix for p in run.rglob("*") if p.is_file() and p.name != ".lock"} == {".json", ".jsonl", ".md", ".py", ".safetensors"}
    assert not [p for p in run.rglob("*") if p.name == ".metadata" or p.name.endswith(".part")]


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Weights and optimizer of a checkpoint, assembled from its files by the offsets in their headers."""
    found: dict[str, Tensor] = {}
    for path in sorted([*folder.glob("model*.safetensors"), *folder.glob("optimizer*.safetensors")]):
        with safe_open(path, "pt") as file:
            offsets = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in file.keys():  # noqa: SIM118
                piece = file.get_tensor(name)
                start = offsets[name]["saved_offsets"] if name in offsets else [0] * piece.ndim
                stop = [a + n for a, n in zip(start, piece.shape, strict=True)]
                old = found.get(name)
                shape = stop if old is None else [max(a, n) for a, n in zip(stop, old.shape, strict=True)]
                whole = torch.full(shape, math.nan)
                if old is not None:
                    whole[tuple(slice(n) for n in old.shape)] = old
                whole[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] = piece
                found[name] = whole
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "tp"])
def test_two_to_one_to_two(name, found, tmp_path, text, shards) -> None:
    """Each resumes from the other's bits of weights and optimizer; one process has ``--tp 1``."""
    run = {**found[name], "resume": True}
    options = {key: run[key] for key in (*SMALL, *KINDS[name], "out", "text", "resume")}
    left = tensors_of(Path(run["out"]) / "checkpoint-4")
    assert not any(t.isnan().any() for t in left.values())
    assert {key for key in left if key.endswith(".exp_avg")} == {f"{n}.exp_avg" for n in load_file(Path(run["out"]) / "model.safetensors")}
    with recorded() as read:
        one(Path(run["out"]), {**options, "tp": 1, "steps": 6})
    assert read == [digest(left)]
    assert (Path(run["out"]) / "checkpoint-6" / "optimizer.safetensors").is_file()
    (answer,) = together(tmp_path, {**options, "steps": 8})
    assert answer["loaded"] == [digest(tensors_of(Path(run["out"]) / "checkpoint-6"))]
    assert [r["step"] for r in answer["history"]] == [2, 4, 6, 8]
    assert [r["tokens"] for r in answer["history"]] == [120, 240, 360, 480]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["_weights", "named_state", "_publish"])
def test_a_kill_in_a_save_loses_nothing(place, tmp_path, text, shards) -> None:
    """The previous checkpoint is complete, and the run resumes from it."""
    options = asked(tmp_path, text, shards, "fsdp")
    with pytest.raises(AssertionError):
        together(tmp_path, {**options, "die": place})
    run = Path(options["out"])
    assert checkpoint.newest(run).name == "checkpoint-2"
    result = one(run, {**options, "resume": True})
    assert checkpoint.newest(run).name == "checkpoint-4"
    assert [r["step"] for r in result.history] == [2, 4]
    assert not list(run.glob(".*.part"))


def test_batches_of_groups() -> None:
    """Groups take turns; processes that share a sequence get equal batches, padded by empty ones."""
    groups = [[list(Batches(0, 10, 2, Processes(4, rank, cp=2))) for rank in pair] for pair in ((0, 1), (2, 3))]
    assert groups == [[[[0, 1], [4, 5], [8, 9]]] * 2, [[[2, 3], [6, 7]]] * 2]
    assert list(Batches(0, 10, 2, Processes(4, 2, cp=2)).padded()) == [[2, 3], [6, 7], []]
    assert next(iter(Batches(4, 8, 1, Processes(2, 1)))) == [5]


@pytest.mark.parametrize(
    ("given", "count", "message"),
    [
        ({"cp": 2}, 1, "cp x tp must divide the number of processes, but came as 2 x 1 with 1"),
        ({"cp": 2, "tp": 2}, 6, "cp x tp must divide the number of processes, but came as 2 x 2 with 6"),
    ],
)
def test_processes_that_do_not_fit(given, count, message) -> None:
    with pytest.raises(ValueError, match=message):
        processes.check(TrainOptions(**given), count)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mixer": "gla, slstm", "cp": 2}, "cp must be 1, but came as 2: slstm does not run under context_parallel: it has no form"),
        ({"mixer": "gla, retnet", "tp": 2}, "retnet does not run under tensor parallelism of 2: its heads are not independent"),
        ({"heads": 1, "tp": 2}, "gla does not run under tensor parallelism of 2: its 1 heads are not a multiple of 2"),
    ],
)
def test_mixers_that_cannot_be_shared_are_refused_before_anything_is_written(given, message, text, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=message):
        train(options(tmp_path / "run", text, **given), progress=False)
    assert not (tmp_path / "run").exists()


def test_passes_of_a_step_follow_the_processes(monkeypatch) -> None:
    options = TrainOptions(batch_size=2, accumulate=1)
    for count, passes in ((1, 4), (2, 2), (4, 1)):
        monkeypatch.setenv("WORLD_SIZE", str(count))
        assert processes.accumulation(options, 8) == passes
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="8 sequences, so the 6 sequences of a pass .* must divide it: batch_size came as 2"):
        processes.accumulation(options, 8)
