"""The Hugging Face classes: Auto classes, saving, loss, and ``generate()`` against the forward pass without a cache."""

import copy
import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

from linattn.hf import LinattnModel, LMConfig, StateCache
from linattn.hf.cache import CACHE
from linattn.models import LanguageModel
from tests.hf.prompts import greedy, model

MIXERS = ["gla", "softmax", "mamba2, softmax", "gated_deltanet"]


@pytest.mark.parametrize("mixer", MIXERS)
def test_greedy_equals_the_uncached_forward(mixer):
    lm, ids = model(mixer), torch.randint(50, (2, 7))
    want = greedy(lm, ids, 6)
    for how in ({}, {"use_cache": False}, {"prefill_chunk_size": 3}):
        assert torch.equal(lm.generate(ids, max_new_tokens=6, do_sample=False, **how), want), how


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("how", [{"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "num_return_sequences": 2, "top_k": 20}])
def test_beams_and_samples_equal_the_uncached(mixer, how):
    lm, ids, out = model(mixer), torch.randint(50, (2, 7)), []
    for use_cache in (True, False):
        torch.manual_seed(1)
        out.append(lm.generate(ids, max_new_tokens=6, use_cache=use_cache, **how))
    assert torch.equal(*out)
    assert out[0].shape == (4, 13)


@pytest.mark.parametrize("mixer", MIXERS)
def test_left_padding_changes_nothing(mixer):
    lm, ids = model(mixer), torch.randint(50, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for how in ({}, {"prefill_chunk_size": 2}):
        out = lm.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, **how)
        assert torch.equal(out[0, 4:], greedy(lm, ids[:1, 4:], 5)[0])
        assert torch.equal(out[1:], greedy(lm, ids[1:], 5))


def test_a_cache_goes_on_where_it_was():
    lm, ids = model(), torch.randint(50, (1, 6))
    first = lm.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, torch.randint(50, (1, 3))], 1)
    assert first.past_key_values.get_seq_length() == 9
    out = lm.generate(longer, past_key_values=first.past_key_values, max_new_tokens=4, do_sample=False)
    assert torch.equal(out, greedy(lm, longer, 4))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_has_its_old_and_its_new_name(name):
    """For any transformers: the name was ``past_key_values`` until 5.23 and is ``cache`` since."""
    lm, ids = model(), torch.randint(50, (1, 9))
    with torch.no_grad():
        for part in (lm, lm.model):
            cache = part(input_ids=ids[:, :6], use_cache=True)[CACHE]
            following = part(input_ids=ids[:, 6:], **{name: cache})
            assert following[CACHE] is cache and cache.get_seq_length() == 9
            torch.testing.assert_close(following[0], part(input_ids=ids, use_cache=False)[0][:, 6:])
        cache = lm(ids[:, :6])[CACHE]
    assert torch.equal(lm.generate(ids, max_new_tokens=4, do_sample=False, **{name: cache}), greedy(lm, ids, 4))
    with pytest.raises(ValueError, match="cache and past_key_values are names of one argument"):
        lm(ids, cache=cache, past_key_values=cache)


def test_the_cache_is_constant_where_the_mixers_are_recurrent():
    sizes = {}
    for mixer in ("gla", "softmax"):
        out = [model(mixer)(torch.zeros(1, n, dtype=torch.long)).past_key_values.state.nbytes for n in (3, 30)]
        sizes[mixer] = out[1] - out[0]
    assert sizes["gla"] == 0 < sizes["softmax"]


def test_what_a_cache_cannot_do_is_said():
    lm, ids = model(), torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(TypeError, match=r"must be a linattn.hf.StateCache, but came as DynamicCache"):
        lm(ids, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="cannot forget"):
        StateCache().crop(1)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[B, T\]"):
        lm(ids, attention_mask=torch.ones(1, 1, 2, 2))
    for shape in ((1, 1), (2, 2)):
        with pytest.raises(ValueError, match=r"attention_mask must have shape \[B, T\], .* with B = 1 and T at least 2, but came with \["):
            lm(ids, attention_mask=torch.ones(shape))
    with pytest.raises(ValueError, match=r"input_ids must have shape \[B, T\], but came with \[2\]"):
        lm(ids[0])
    with pytest.raises(ValueError, match="either input_ids"):
        lm()


def test_caches_reset_repeat_and_select():
    lm, ids = model(), torch.randint(50, (2, 5))
    with torch.no_grad():
        cache = lm(ids).past_key_values
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    assert cache.batch_size == 2
    with torch.no_grad():
        got = lm(torch.tensor([[1], [2]]), past_key_values=cache).logits
    want = lm(torch.cat([ids[[1, 0]], torch.tensor([[1], [2]])], 1)).logits[:, -1:]
    torch.testing.assert_close(got, want)
    before = copy.deepcopy(cache)
    lm(torch.tensor([[5], [6]]), past_key_values=cache)
    assert (before.get_seq_length(), cache.get_seq_length()) == (6, 7)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert not cache.is_initialized


@pytest.mark.parametrize("tie", [False, True])
def test_saved_and_loaded(tie, tmp_path):
    lm, ids = model(tie_embeddings=tie, mixer_options={"gla": {"heads": 2}}), torch.randint(50, (1, 8))
    lm.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tie
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, lm(ids).logits)
    base = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(lm.lm_head(base(ids).last_hidden_state), lm(ids).logits)
    plain = LanguageModel(again.config).double()
    plain.load_state_dict(lm.state_dict())
    assert torch.equal(plain(ids), lm(ids).logits)


def test_configs_are_saved_with_every_field(tmp_path):
    config = LMConfig(vocab_size=50, dim=32, layers=3, mixer="gla*2, softmax", ffn_dim=77, norm="layer", block="post", tie_embeddings=True)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is LMConfig
    assert again.to_diff_dict() == config.to_diff_dict()
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {k: saved[k] for k in ("model_type", "dim", "mixer", "ffn_dim")} == {
        "model_type": "linattn",
        "dim": 32,
        "mixer": "gla*2, softmax",
        "ffn_dim": 77,
    }
    assert (again.hidden_size, again.num_hidden_layers, again.tie_word_embeddings) == (32, 3, True)
    assert LMConfig(hidden_size=64, num_hidden_layers=1).dim == 64


def test_slips_in_config_fields_are_errors():
    with pytest.raises(TypeError, match="no field 'mixr'; did you mean 'mixer'"):
        LMConfig(mixr="gla")
    with pytest.raises(TypeError, match="no field 'hiden_size'; did you mean 'hidden_size'"):
        LMConfig(hiden_size=64)
    assert LMConfig(hidden_act="silu").dim == LMConfig().dim  # fields of other models are accepted
    with pytest.raises(ValueError, match="no mixer is called 'glu'"):
        LMConfig(mixer="glu")


def test_a_narrow_dtype_leaves_time_constants_alone(tmp_path):
    lm = model("mamba2, gated_deltanet").float()
    lm.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    wide = {name.rsplit(".", 1)[-1] for name, p in again.named_parameters() if p.dtype == torch.float32}
    assert wide == {"A_log", "dt_bias"}
    assert again.lm_head.weight.dtype == torch.bfloat16
    for name, p in again.named_parameters():
        if p.dtype == torch.float32:
            assert torch.equal(p, lm.get_parameter(name))


def test_what_a_checkpoint_lacks_starts_as_in_a_new_model(tmp_path):
    lm = model().float()
    lm.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    head = weights.pop("lm_head.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.model.embedding.weight, lm.model.embedding.weight)
    assert not torch.equal(again.lm_head.weight, head)
    assert 0.015 < again.lm_head.weight.std().item() < 0.025


def test_loss_is_the_mean_over_shifted_labels():
    lm, ids = model(), torch.randint(50, (2, 9))
    labels = ids.clone()
    labels[0, 4:] = -100
    out = lm(ids, labels=labels)
    want = F.cross_entropy(out.logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    torch.testing.assert_close(out.loss, want)
    torch.testing.assert_close(lm(ids, labels=labels, num_items_in_batch=5).loss, want * 11 / 5)


def test_a_config_may_ask_for_tuples():
    lm, ids = model(), torch.randint(50, (2, 9))
    full = lm(ids).logits
    lm.config.return_dict = False
    loss, logits, *_ = lm(ids, labels=ids)
    assert loss.ndim == 0 and torch.equal(logits, full)
    assert isinstance(lm(ids, return_dict=True).logits, torch.Tensor)
    assert lm.generate(ids, max_new_tokens=2, do_sample=False).shape == (2, 11)
    hidden = LinattnModel(lm.config)(ids)
    assert isinstance(hidden, tuple) and hidden[0].shape == (2, 9, 32)


def test_embeddings_packing_and_kept_logits():
    lm, ids = model(), torch.randint(50, (1, 9))
    full = lm(ids).logits
    assert torch.equal(lm(inputs_embeds=lm.get_input_embeddings()(ids)).logits, full)
    torch.testing.assert_close(lm(ids, logits_to_keep=2).logits, full[:, -2:])
    with pytest.raises(ValueError, match=r"embeddings must be \[B, T, 32\], but came with shape \[1, 9, 31\]"):
        lm(inputs_embeds=torch.zeros(1, 9, 31))
    packed = lm(ids, cu_seqlens=torch.tensor([0, 4, 9])).logits
    torch.testing.assert_close(packed[:, 4:], lm(ids[:, 4:]).logits)
    assert lm(ids, return_dict=False)[0].shape == full.shape


@pytest.mark.parametrize("mixer", ["gla, softmax", "rwkv7"])  # the second passes a tensor from layer to layer
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradient_checkpointing_is_switched_on_the_transformers_way(mixer, reentrant):
    lm, ids = model(mixer).train(), torch.randint(50, (1, 6))
    lm(ids, labels=ids).loss.backward()
    plain = [p.grad.clone() for p in lm.parameters()]
    lm.zero_grad()
    checkpointing(lm, reentrant)
    calls = []
    lm.model.layers[0].mixer.register_forward_hook(lambda *_: calls.append(1))
    lm(ids, labels=ids).loss.backward()
    assert len(calls) == 2
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, lm.parameters(), strict=True))


def checkpointing(lm, reentrant):
    name = "activation_checkpointing" if hasattr(lm, "activation_checkpointing_enable") else "gradient_checkpointing"  # before 5.23
    getattr(lm, f"{name}_enable")(**{f"{name}_kwargs": None if reentrant is None else {"use_reentrant": reentrant}})


def test_what_reentrant_checkpointing_would_cut_off_is_refused():
    ids = torch.randint(50, (1, 6))
    cases = ({}, {"use_cache": True}, "the state"), ({"ffn": "swiglu, switch"}, {}, "the losses of ffn 'swiglu, switch'")
    for options, how, lost in cases:
        lm = model(**options).train()
        checkpointing(lm, True)
        with pytest.raises(ValueError, match=f"use_reentrant .* must be False: with True {lost}"):
            lm(ids, labels=ids, **how)
        with torch.no_grad():
            lm(ids, labels=ids, **how)
        checkpointing(lm, False)
        lm(ids, labels=ids, **how).loss.backward()


def test_the_auto_classes_know_us_if_transformers_came_first(programs):
    code = """
import transformers, linattn
assert transformers.AutoConfig.for_model("linattn").model_type == "linattn"
"""
    programs.python("-c", code).check_returncode()


def test_asking_whether_transformers_is_there_does_not_load_it():
    """If it is imported later, its Auto classes have our models too."""
    code = """
import sys, linattn
from importlib.util import find_spec
assert find_spec("transformers").origin.endswith("__init__.py") and "transformers" not in sys.modules and "torch" not in sys.modules
from transformers import AutoConfig
assert AutoConfig.for_model("linattn").model_type == "linattn"
assert type(sys.modules["transformers"].__spec__.loader).__name__ == "SourceFileLoader"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_does_not_fit_is_refused_by_name():
    lm, ids = model(), torch.randint(50, (2, 6))
    lm.config.output_attentions = False
    for how, message in (
        ({"labels": ids[:, :5]}, r"labels must have shape \[B, T\] = \[2, 6\], but came with \[2, 5\]"),
        ({"labels": ids[:1]}, r"labels must have shape \[B, T\] = \[2, 6\], but came with \[1, 6\]"),
        ({"labels": ids.int()}, "labels must be torch.int64, but came as torch.int32"),
        ({"labels": ids.tolist()}, "labels must be a tensor, but came as list"),
        ({"labels": ids, "logits_to_keep": 2}, "logits_to_keep must be 0 with labels, which need the logits of every token, but is 2"),
        ({"shift_labels": ids}, "shift_labels belong to rows split over processes, .*: give labels"),
        ({"attention_mask": [[1] * 6] * 2}, "attention_mask must be a tensor, but came as list"),
        ({"logits_to_keep": -1}, "logits_to_keep must be at least 0, or indices, but came as -1"),
        ({"logits_to_keep": 1.5}, "logits_to_keep must be at least 0, or indices, but came as 1.5"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            lm(ids, **how)
    for given, message in (
        (ids.float(), "input_ids must be torch.int64 or torch.int32, but came as torch.float32"),
        ([[1]], "input_ids must be a tensor"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            lm(given)
    lm.config._attn_implementation = "eager"  # transformers itself refuses attentions beside sdpa, which layers of softmax have
    lm.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions must not be True"):
        lm(ids)
    assert lm(ids, output_attentions=False).logits.shape == (2, 6, 50)
