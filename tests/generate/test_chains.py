"""Chains in captured steps: in the graph of every mixer, as for a GPU, and on one."""

import threading

import pytest
import torch

from linattn import mixers
from linattn.generate import captured, chains, flat, joins, stream
from linattn.generate.captured import Choice, step_of
from linattn.generate.prefill import prefill
from linattn.models import LanguageModel, LMConfig
from linattn.ops.linears import chained
from linattn.state import State
from tests.ops.errors import error

RECURRENT = [n for n in mixers.available() if mixers.info(n).resumable and mixers.info(n).recurrent]


def model(mixer: str, device: str = "cpu", **options) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LMConfig(**{"vocab_size": 40, "dim": 32, "layers": 2, "mixer": mixer, **options})).to(device).eval()


@pytest.mark.parametrize(("rows", "layers"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("mixer", RECURRENT)
def test_joined_as_for_a_gpu(mixer, rows, layers, monkeypatch):
    """There more is put into one operation than on a CPU, of one row chains too; what an operation does is the same."""
    lm = model(mixer, layers=layers)
    with torch.no_grad():
        _, state = prefill(lm.model, torch.randint(40, (rows, 7)))
        names, leaves = [list(layer) for layer in state.layers], [t.clone() for layer in state.layers for t in layer.values()]

        def step(token, *leaves):
            rest = iter(leaves)
            hidden, new = lm.model(token[:, None], State([{name: next(rest) for name in layer} for layer in names]), return_state=True)
            return [lm.lm_head(hidden)[:, -1], *(t for layer in new.layers for t in layer.values())]

        token = torch.randint(40, (rows,))
        wanted = [t.clone() for t in step(token, *leaves)]
        with monkeypatch.context() as patch:
            patch.setattr(joins, "on_gpu", lambda t: True)
            patch.setattr(chains, "ON", True)
            module = flat.trace(step, [token, *leaves])
        got = module(token, *leaves)
    lengths = [len(node.args[1]) for node in module.graph.find_nodes(op="call_function", target=chained)]
    if mixer == "gla":
        assert lengths == ([] if rows > 1 else [4, 4])  # out, gate and up, down, and those of the next layer or the head
    for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        assert error((mine + 1 if i in module.meta["counters"] else mine).double(), theirs.double()) <= 2e-5


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", ["gla", "gated_deltanet, rwkv7", "mamba2", "kda, retnet, rwkv4"])
def test_chains(mixer, monkeypatch):
    """One launch of several maps rounds where their own launches do."""
    lm = model(mixer, "cuda", dim=256, layers=4).bfloat16()
    logits, states = {}, {}
    for on in (False, True):
        monkeypatch.setattr(chains, "ON", on)
        captured._steps.clear()
        torch.manual_seed(1)
        with torch.inference_mode():
            _, state = prefill(lm.model, torch.randint(40, (1, 7), device="cuda"))
            step, kept = step_of(lm.model, lm.lm_head, state, 100), []
            choice = Choice(lambda x, kept=kept: kept.append(x) or torch.full((1,), 3, device="cuda"), "kept")
            step.load(step, state, torch.full((1,), 3, device="cuda"), torch.zeros(1, dtype=torch.bool, device="cuda"), choice)
            for _ in range(30):
                step.run()
        assert step._alone == on and step.how == "a CUDA graph"
        logits[on], states[on] = kept[-1].clone(), step.state
    assert error(logits[True].double(), logits[False].double()) <= 0.02
    for mine, theirs in zip(states[True].layers, states[False].layers, strict=True):
        for name, t in mine.items():
            assert torch.equal(t, theirs[name]) if not t.is_floating_point() else error(t.double(), theirs[name].double()) <= 0.02, name


@pytest.mark.gpu
def test_chains_of_several_threads(monkeypatch):
    """Programs that wait for one another want all of a device: four generations take turns, and none hangs."""
    monkeypatch.setattr(chains, "ON", True)
    models = [model("gla", "cuda", dim=256, layers=2).bfloat16() for _ in range(4)]
    prompts = [torch.randint(40, (5 + i,), device="cuda") for i in range(4)]
    alone = [list(stream(lm, p, max_new_tokens=200, temperature=0)) for lm, p in zip(models, prompts, strict=True)]
    got: list[list[int]] = [[] for _ in models]

    def run(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            got[i] += stream(models[i], prompts[i], max_new_tokens=200, temperature=0)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert got == alone
