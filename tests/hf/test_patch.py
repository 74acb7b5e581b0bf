"""The patch function: refusals, undoing, and no foreign kernels on a CPU."""

import contextlib
import copy
import json
import os
import sys
import threading
from importlib import import_module
from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from transformers.models.mamba import modeling_mamba as modeling

import linattn
from benchmarks import patch as benchmark
from linattn.hf.patch import FAMILIES, Patch, call, patch_transformers
from tests.hf.patched import MODELS, TOKENS, VOCABULARY, distance, gradients_of, logits_of, model_of, packings

STAND_INS = {
    "fla": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "chunk_kda", "fused_recurrent_kda"),
    "causal_conv1d": ("causal_conv1d_fn", "causal_conv1d_update"),
    "mamba_ssm": (),
}
INSTALLED = """
import sys, torch
from linattn.hf.patch import patch_transformers
from tests.hf.patched import VOCABULARY, Decoder, model_of

ids = torch.randint(3, VOCABULARY, (1, 9))
for family in ("qwen3_next", "kimi_linear", "mamba", "mamba2"):
    model = model_of(family)
    try:
        Decoder(model)(ids)
    except RuntimeError as error:
        assert "active drivers" in str(error), error
    else:
        sys.exit(f"{family} did not call what is installed: this test shows nothing")
    with patch_transformers([family]):
        decode = Decoder(model)
        assert decode(ids).isfinite().all() and decode(ids[:, :1]).isfinite().all()
        model.train()(input_ids=ids, use_cache=False).logits.sum().backward()
"""


@pytest.fixture
def module():
    return modeling


def test_every_family_is_tested_and_exported():
    assert {FAMILIES[name].folder for name in MODELS} == {family.folder for family in FAMILIES.values()}
    assert linattn.patch_transformers is patch_transformers


def test_all_families_by_default():
    with patch_transformers() as patch:
        assert patch.families == tuple(FAMILIES)
        assert {owner.__name__ for owner, *_ in patch.replaced if isinstance(owner, type(sys))} == {
            f"transformers.models.{family.folder}.modeling_{family.folder}" for family in FAMILIES.values()
        }
    assert not patch.replaced


def test_an_unknown_family_is_refused_with_the_list(module):
    original = module.mamba_selective_scan
    with pytest.raises(ValueError, match=r"'mambo'.*bamba, falcon_mamba.*zamba2"):
        patch_transformers(["mamba", "mambo"])
    for families in ("mamba", 5):
        with pytest.raises(ValueError, match=f"must be a list of model types, but came as {families!r}"):
            patch_transformers(families)
    with pytest.raises(ValueError, match="backend must be one of"):
        patch_transformers(["mamba"], backend="fast")
    assert module.mamba_selective_scan is original


def test_a_family_is_patched_once_at_a_time(module):
    original = module.mamba_selective_scan
    with patch_transformers(["mamba"]) as patch:
        with pytest.raises(ValueError, match="mamba is: undo"):
            patch_transformers(["mamba2", "mamba"])
        with patch_transformers(["mamba2"]):
            assert module.mamba_selective_scan is not original
        patch.undo()
        assert module.mamba_selective_scan is original
        with patch_transformers(["mamba"]):  # the outer one's end does not affect the inner one
            patch.undo()
            assert module.mamba_selective_scan is not original
    assert module.mamba_selective_scan is original
    assert isinstance(patch, Patch)
    assert "undone" in repr(patch)


def test_it_is_undone_after_an_error(module):
    original = module.mamba_selective_scan
    with pytest.raises(ZeroDivisionError), patch_transformers(["mamba"]):
        raise ZeroDivisionError
    assert module.mamba_selective_scan is original


def test_a_patch_that_is_undone_is_not_entered_again(module):
    with patch_transformers(["mamba"]) as patch:
        pass
    with pytest.raises(ValueError, match="has been undone: call patch_transformers again"):
        patch.__enter__()
    with patch_transformers([]):
        pass


def test_half_a_patch_is_undone(module, monkeypatch):
    original = module.mamba_selective_scan
    monkeypatch.delattr(module, "mamba_inner_fn")
    with pytest.raises(KeyError):
        patch_transformers(["mamba"])
    assert module.mamba_selective_scan is original
    monkeypatch.undo()
    with patch_transformers(["mamba"]):
        assert module.mamba_selective_scan is not original


@pytest.mark.parametrize("family", ["qwen3_next", "mamba", "mamba2", "rwkv"])
def test_the_backend_is_passed_on(family):
    model, ids = model_of(family), torch.randint(3, VOCABULARY, (1, 5))
    wanted = logits_of(model, ids)
    for backend in ("reference", "torch"):
        with patch_transformers([family], backend=backend):
            torch.testing.assert_close(logits_of(model, ids), wanted, atol=1e-5, rtol=1e-4)
    with patch_transformers([family], backend="triton"), pytest.raises(ValueError, match="GPU|triton"):
        logits_of(model, ids)


NORMS = [(name, norm) for name, family in FAMILIES.items() for norm in family.norms]


@pytest.mark.parametrize(("family", "norm"), NORMS)
def test_norms_are_one_kernel_where_there_are_many_numbers(family, norm, monkeypatch):
    calls, ours = [], call.rms_norm
    monkeypatch.setattr(call, "rms_norm", lambda *x, **o: calls.append(1) or ours(*x, **o))
    folder = FAMILIES[family].folder
    layer = getattr(import_module(f"transformers.models.{folder}.modeling_{folder}"), norm)(64)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 2)
    x = [torch.randn(2, 200, 64) for _ in range(2 if "Gated" in norm else 1)]

    def run(*x):
        leaves = [t.detach().requires_grad_() for t in x]
        y = layer(*leaves)
        return y, *torch.autograd.grad((y * torch.linspace(-1, 1, 64)).sum(), [*leaves, layer.weight])

    wanted, few = run(*x), layer(*(t[:, :50] for t in x))
    half = copy.deepcopy(layer).bfloat16()
    exact = layer(*(t.bfloat16().float() for t in x))
    theirs = (half(*(t.bfloat16() for t in x)) - exact).norm()
    assert not calls
    with patch_transformers([family]):
        for mine, of_theirs in zip(run(*x), wanted, strict=True):
            assert (mine - of_theirs).norm() < 1e-5 * of_theirs.norm()
        mine = half(*(t.bfloat16() for t in x))
        assert mine.dtype == torch.bfloat16
        assert (mine - exact).norm() < 1.1 * theirs
        assert len(calls) == 2
        assert torch.equal(layer(*(t[:, :50] for t in x)), few)
        layer(*(t.bfloat16() for t in x))  # a weight of another dtype
        assert len(calls) == 2


FFNS = [(name, ffn) for name, family in FAMILIES.items() for ffn in family.ffns]


@pytest.mark.parametrize(("family", "ffn"), FFNS)
def test_feed_forwards_gate_in_one_kernel_where_there_are_many_numbers(family, ffn, monkeypatch):
    calls, ours = [], call.gated
    monkeypatch.setattr(call, "gated", lambda *x, **o: calls.append(1) or ours(*x, **o))
    folder = FAMILIES[family].folder
    config = SimpleNamespace(hidden_size=64, intermediate_size=48, hidden_act="silu", mlp_bias=False)
    made = getattr(import_module(f"transformers.models.{folder}.modeling_{folder}"), ffn)
    layer = made(config, *[48] * ("intermediate_size" in signature(made).parameters))
    x = torch.randn(2, 300, 64)

    def run():
        leaf = x.detach().requires_grad_()
        y = layer(leaf)
        return y, *torch.autograd.grad(y.square().sum(), [leaf, *layer.parameters()])

    wanted = run()
    with patch_transformers([family]):
        for mine, theirs in zip(run(), wanted, strict=True):
            assert (mine - theirs).norm() < 1e-5 * theirs.norm()
        assert len(calls) == 1
        layer(x[:, :9])  # few
        seen = []
        layer.act_fn.register_forward_hook(lambda *given: seen.append(1))
        layer(x)
        layer.act_fn = torch.nn.GELU()
        layer(x)
    assert len(calls) == 1 and seen == [1]


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "rwkv"])
def test_checkpointing_that_would_forget_packing_is_refused(family):
    model, ids = model_of(family).train(), torch.randint(3, VOCABULARY, (1, 37))
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    with patch_transformers([family]), pytest.raises(ValueError, match="packed sequences to its layers when gradient checkpointing"):
        gradients_of(model, ids, **packings()["cu_seq_lens"])


def test_several_packed_rows_are_refused():
    with patch_transformers(["mamba"]), pytest.raises(ValueError, match="one row"):
        logits_of(model_of("mamba"), torch.ones(2, 37, dtype=torch.long), **packings()["cu_seq_lens"])


@pytest.mark.parametrize(
    ("ends", "came"), [([0, 20], TypeError), ([0, 20], "0, 20"), ([0, 30, 20, TOKENS], "0, 30"), ([5, TOKENS], "5, 37")]
)
@pytest.mark.parametrize("family", ["mamba", "qwen3_next"])
def test_ends_that_are_none_are_refused_by_name(family, ends, came):
    model, ids = model_of(family), torch.randint(3, VOCABULARY, (1, TOKENS))
    with patch_transformers([family]):
        if came is TypeError:
            with pytest.raises(TypeError, match="cu_seq_lens_q must be a tensor, but came as list"):
                logits_of(model, ids, cu_seq_lens_q=ends)
        else:
            with pytest.raises(ValueError, match=rf"cu_seq_lens_q must rise from 0 to T = 37 and never fall, but came as \[{came}"):
                logits_of(model, ids, cu_seq_lens_q=torch.tensor(ends))


def test_packing_beside_padding():
    """Softmax attention would use only the mask."""
    ids, mask = torch.randint(3, VOCABULARY, (1, TOKENS)), torch.ones(1, TOKENS).long()
    mask[0, -5:] = 0
    ends = torch.tensor([0, 20, TOKENS - 5, TOKENS])
    for family in ("mamba", "qwen3_next"):
        model = model_of(family)
        with patch_transformers([family]):
            wanted = torch.cat([logits_of(model, ids[:, :20]), logits_of(model, ids[:, 20:-5])], 1)
            assert distance(logits_of(model, ids, cu_seq_lens_q=ends)[:, :-5], wanted) < 5e-5
            if family == "mamba":
                assert distance(logits_of(model, ids, attention_mask=mask, cu_seq_lens_q=ends)[:, :-5], wanted) < 5e-5
                continue
            with pytest.raises(ValueError, match="Qwen3NextModel has softmax attention, which does not isolate .* a sequence of its own"):
                logits_of(model, ids, attention_mask=mask, cu_seq_lens_q=ends)


def test_packing_beside_arguments_by_place():
    model, ids, how = model_of("qwen3_next").model, torch.randint(3, VOCABULARY, (1, TOKENS)), packings()["cu_seq_lens"]
    with patch_transformers(["qwen3_next"]), torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False, **how)[0]
        assert torch.equal(model(ids, torch.ones_like(ids), None, None, None, False, **how)[0], wanted)


def test_of_two_threads_one_patches(module, monkeypatch):
    original, replace, results = module.mamba_selective_scan, Patch._replace, []
    both = threading.Barrier(2)

    def slow(patch):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # until the other one is as far, if it may be
        replace(patch)

    def run():
        try:
            results.append(patch_transformers(["mamba"]))
        except ValueError as error:
            results.append(error)

    monkeypatch.setattr(Patch, "_replace", slow)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (patch,) = (result for result in results if isinstance(result, Patch))
    assert len(results) == 2
    patch.undo()
    assert module.mamba_selective_scan is original


def test_what_is_installed_is_not_called(tmp_path, programs):
    for name, functions in STAND_INS.items():
        body = 'def {}(*args, **kwargs):\n    raise RuntimeError("0 active drivers ([]). There should only be one.")\n'
        inside = tmp_path / name
        inside.mkdir()
        (inside / "__init__.py").write_text("\n".join(body.format(function) for function in functions))
    path = os.pathsep.join([str(tmp_path), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    result = programs.python("-c", INSTALLED, env=os.environ | {"PYTHONPATH": path})
    assert result.returncode == 0, result.stderr


def test_the_benchmark_writes_each_row_as_it_comes(tmp_path, monkeypatch):
    def measured(family, *how):
        rows = json.loads((tmp_path / "patch-cpu.json").read_text())["rows"] if family == "rwkv" else []
        assert [row["family"] for row in rows] == (["mamba"] if family == "rwkv" else [])
        if family == "rwkv":
            raise RuntimeError("no kernel")
        return measure(family, 32, "cpu", 0.0)

    measure = benchmark.measure
    monkeypatch.setattr(benchmark, "measure", measured)
    assert benchmark.main(["--families", "mamba,rwkv", "--out", str(tmp_path)]) == 1
    body = json.loads((tmp_path / "patch-cpu.json").read_text())
    row, failed = body["rows"]
    assert row["difference"] < 1e-5
    assert row["prefill"]["pairs"] == row["decode"]["pairs"] == 2
    assert row["prefill"]["ours_ms"] > 0 < row["decode"]["theirs_ms"]
    assert failed == {"family": "rwkv", "error": "RuntimeError: no kernel"}
    assert body["packages"] == {"fla": False, "mamba_ssm": False, "causal_conv1d": False}
    assert set(benchmark.MODELS) == set(MODELS)
    with pytest.raises(SystemExit):
        benchmark.main(["--families", "mambo"])


def test_some_families_do_not_take_the_place_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    monkeypatch.setattr(benchmark, "measure", lambda family, *_: {"family": family})
    monkeypatch.setattr(benchmark, "line", str)
    benchmark.main(["--families", "mamba,rwkv"])
    assert not list(tmp_path.iterdir())
    benchmark.main(["--device", "cpu"])
    assert [path.name for path in tmp_path.iterdir()] == ["patch-cpu.json"]


@pytest.mark.parametrize(
    ("name", "by"),
    [("mamba", "position_ids"), ("qwen3_next", "cu_seq_lens"), pytest.param("qwen3_next", "position_ids", marks=pytest.mark.slow)],
)
def test_a_compiled_model_keeps_packed_sequences_apart(name, by):
    """One layer of each kind, without experts, to limit Dynamo's time."""
    small = {"num_hidden_layers": 1}
    if name == "qwen3_next":
        small = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1]}
    model, ids, how = model_of(name, **small), torch.randint(3, VOCABULARY, (1, TOKENS)), packings()[by]
    with patch_transformers([name]), torch.no_grad():
        compiled = torch.compile(model, backend="eager")
        wanted = logits_of(model, ids, **how)
        assert distance(compiled(input_ids=ids, use_cache=False, **how).logits, wanted) < 5e-5
        assert distance(compiled(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **how).logits, wanted) < 5e-5
