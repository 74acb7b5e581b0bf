"""Plans against real models: parameters, states, shards, activations; and traffic on a mesh."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import linattn
from benchmarks import plans
from linattn.cli.main import main
from linattn.train.plan import plan
from linattn.train.plan_options import PlanOptions

HYBRID: dict[str, Any] = {
    "mixer": "gated_deltanet*2, gla, softmax", "dim": 64, "layers": 5, "vocab_size": 97, "context": 48, "batch_size": 2, "dtype": "fp32",
    "ffn": "swiglu, mlp", "mixer_options": {"softmax": {"kv_heads": 2}},
}  # fmt: skip


def model_of(options: PlanOptions) -> linattn.LanguageModel:
    names = ("mixer", "dim", "layers", "vocab_size", "ffn", "ffn_dim", "mixer_options", "norm", "tie_embeddings")
    torch.manual_seed(0)
    return linattn.LanguageModel(linattn.LMConfig(**{name: getattr(options, name) for name in names}))


@pytest.mark.parametrize("given", [{}, {"tie_embeddings": True, "norm": "layer"}, {"mixer": "mamba2", "ffn": "none", "mixer_options": {}}])
def test_parameters_and_states_are_those_of_the_model(given) -> None:
    options = PlanOptions(**{**HYBRID, **given})
    model, found = model_of(options), plan(options)
    count = sum(p.numel() for p in model.parameters())
    assert found.parameters == count
    assert (found.memory["weights"], found.memory["gradients"], found.memory["optimizer"]) == (4 * count, 4 * count, 8 * count)
    _, state = model(torch.zeros(options.batch_size, options.context, dtype=torch.int64), return_state=True)
    assert found.memory["states"] == state.nbytes


def test_the_optimizer_is_as_large_as_it_says() -> None:
    options = PlanOptions(**HYBRID)
    from linattn.hf import LinattnForCausalLM
    from linattn.hf import LMConfig as Config
    from linattn.train.optimizers import MuonAdamW

    names = ("mixer", "dim", "layers", "vocab_size", "ffn", "mixer_options")
    model = LinattnForCausalLM(Config(**{name: getattr(options, name) for name in names}))
    for name, optimizer in (
        ("adamw", torch.optim.AdamW(model.parameters())),
        ("muon", MuonAdamW(model, lr=1e-3, weight_decay=0.0)),
    ):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        moments = sum(t.nbytes for slots in optimizer.state.values() for key, t in slots.items() if key != "step")
        assert plan(replace(options, optimizer=name)).memory["optimizer"] == moments


def test_activations_are_about_what_the_model_keeps() -> None:
    """With four times the tokens from which the plan extrapolates."""
    options = PlanOptions(**{**HYBRID, "context": 1024, "batch_size": 1})
    model, seen = model_of(options), {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(t: Tensor) -> Tensor:
        seen[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        hidden, _ = model.model(torch.zeros(1, options.context, dtype=torch.int64))
    assert hidden.requires_grad
    kept = sum(t.untyped_storage().nbytes() for place, t in seen.items() if place not in own)
    assert plan(options).memory["activations"] == pytest.approx(kept, rel=0.35)
    assert plan(replace(options, checkpoint_activations=True)).memory["activations"] < kept / 2


def test_what_follows_from_a_mesh() -> None:
    options = PlanOptions(**HYBRID)
    one = plan(options)
    assert set(one.traffic.values()) == {0}
    assert one.seconds["step"] == one.seconds["compute"]
    copies, shards = plan(replace(options, dp=2)), plan(replace(options, dp=2, fsdp=True))
    assert copies.memory["weights"] == one.memory["weights"]
    assert copies.traffic == {"dp": 4 * one.parameters, "cp": 0, "tp": 0}  # an all-reduce sends half of it twice
    assert shards.memory["weights"] == pytest.approx(one.memory["weights"] / 2, rel=0.01)
    assert shards.traffic["fsdp"] == pytest.approx(6 * one.parameters, rel=0.01)  # half of it thrice, all of it float32
    assert copies.tokens == shards.tokens == 2 * one.tokens
    cut = plan(replace(options, cp=2))
    assert cut.tokens == one.tokens and cut.memory["activations"] < 0.6 * one.memory["activations"]
    delta, gla, keys = 8 * 16 * 16 + 8 * 16 * 16, 4 * 8 * 16 + 4 * 8, 2 * 24 * 2 * 16  # numbers of a row: states, links, a card's cache
    least = 2 * 4 * 2 * (3 * delta + gla + keys)  # forward and backward, in float32, of two rows
    assert least <= cut.traffic["cp"] < 1.5 * least  # and the tokens before the cut for convolutions
    shared = plan(replace(options, tp=2))
    assert shared.traffic["tp"] == (5 * 2 * 2) * 4 * (2 * 48 * 64)  # two sums a block each way, of which a card sends half twice
    assert shared.memory["states"] < 0.6 * one.memory["states"]
    assert 0 < plan(replace(options, tp=2, link=1.0)).seconds["tp"] > shared.seconds["tp"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mixer": "retnet", "tp": 2}, "retnet does not run under tensor parallelism of 2"),
        ({"mixer": "gla*2, lstm", "dim": 64, "cp": 2}, "cp must be 1, but came as 2: lstm does not run under context_parallel"),
        ({"layers": 10**12}, "layers must be at most 100000, but came as 1000000000000"),
        ({"context": 4, "cp": 8}, "context must have a token for each of cp = 8 cards, but came as 4"),
        ({"device": "tpu"}, "device must be 'h200' or"),
        ({"link": 0.0}, "link must be positive"),
        ({"mfu": 1.5}, "mfu must be at most 1"),
        ({"dp": 0}, "dp must be"),
    ],
)
def test_what_cannot_be_planned(given, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan(PlanOptions(**given))


def test_the_command(capsys) -> None:
    words = "plan --mixer gla --dim 64 --layers 2 --vocab-size 97 --context 64 --dp 2 --cp 2 --checkpoint-activations".split()
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "on 4 GPUs" in said and "fits into" in said and "tokens/s" in said
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cards"] == 4
    assert main(["plan", "--mixer", "retnet", "--tp", "2"]) == 2
    assert capsys.readouterr().err.startswith("linattn: retnet does not run under tensor parallelism")


@pytest.mark.slow
def test_the_table_is_that_of_today() -> None:
    with plans.RESULTS.open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == [list(plans.COLUMNS), *plans.rows()], "run: python -m benchmarks.plans"
