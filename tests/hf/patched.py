"""Tiny models of the families that can be patched, and what is asked of every one of them, patched and not."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import Tensor

from linattn.hf.patch import patch_transformers

VOCABULARY, TOKENS, SHORT = 60, 37, 23
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "initializer_range": 0.2,  # large enough that every part shows in the logits
}  # fmt: skip
_ATTENTION: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40}
_MIXED = ["linear_attention", "full_attention", "linear_attention"]
_DELTA: dict[str, Any] = _ATTENTION | {
    "layer_types": _MIXED, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
}  # fmt: skip
_MAMBA2: dict[str, Any] = {
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": _DELTA | _EXPERTS | {"head_dim": 16},
    "qwen3_5_text": _DELTA | {"head_dim": 16},
    "qwen3_5_moe_text": _DELTA | _EXPERTS | {"head_dim": 16},
    "olmo_hybrid": _DELTA | {"linear_num_key_heads": 4, "linear_allow_neg_eigval": True},
    "kimi_linear": _ATTENTION | {
        "layer_types": _MIXED, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "kv_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 10, "qk_nope_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 3,
        "n_shared_experts": 2,
    },
    "mamba": {"state_size": 8, "use_bias": True},
    "falcon_mamba": {"state_size": 8, "tie_word_embeddings": False},
    "jamba": _ATTENTION | {
        "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 3, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 16, "time_step_limit": (0.02, 0.5)},
    "bamba": _ATTENTION | _MAMBA2 | {"attn_layer_indices": [1]},
    "zamba2": _ATTENTION | {
        "num_key_value_heads": 4, "mamba_d_state": 8, "mamba_headdim": 16, "mamba_ngroups": 2, "n_mamba_heads": 4, "mamba_expand": 2,
        "chunk_size": 16, "num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid", "mamba"], "add_bias_linear": False,
        "time_step_min": 0.05,
    },
    "nemotron_h": _ATTENTION | {
        "layers_block_type": ["mamba", "attention", "mamba"], "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16,
        "n_groups": 2, "chunk_size": 16, "head_dim": 8, "time_step_min": 0.05,
    },
    "granitemoehybrid": _ATTENTION | _MAMBA2 | {
        "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 24,
        "embedding_multiplier": 1.0,
    },
    "rwkv": {"intermediate_size": 48, "rescale_every": 2},
}  # fmt: skip
CACHE = {"rwkv": "state"} | dict.fromkeys(("mamba", "falcon_mamba", "mamba2"), "cache_params")
Model = Any


def model_of(name: str, **changes: Any) -> Model:
    """A model of transformers with random weights, float32, in evaluation."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(name, **_SMALL | MODELS[name] | changes)
    config._experts_implementation = "eager"  # the other ones refuse float64
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter, t in model.named_parameters():
            if parameter.endswith(("time_decay", "time_first")):
                t.uniform_(-2, 0)
            if parameter.endswith(("in_proj.bias", "conv1d.bias")):
                t.normal_(0, 0.3)
    return model


_shared_model = functools.cache(model_of)


def distance(got: Tensor, wanted: Tensor) -> float:
    return ((got - wanted).norm() / wanted.norm()).item()


@torch.no_grad()
def logits_of(model: Model, ids: Tensor, **options: Any) -> Tensor:
    return model(input_ids=ids, use_cache=False, **options).logits


class Decoder:
    """A model and its cache, called with one piece after the other; positions and masks as ``generate`` gives them."""

    def __init__(self, model: Model) -> None:
        self.model, self.name = model, CACHE.get(model.config.model_type, "past_key_values")
        self.given: dict[str, Any] = {}
        self.mask: Tensor | None = None

    @torch.no_grad()
    def __call__(self, ids: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        mask = torch.ones_like(ids) if mask is None else mask
        self.mask = mask if self.mask is None else torch.cat([self.mask, mask], 1)
        options: dict[str, Any] = {}
        if self.name == "past_key_values":
            options["position_ids"] = (self.mask.cumsum(1) - 1).masked_fill(self.mask == 0, 0)[:, -ids.shape[1] :]
        if ids.shape[1] > 1 or self.name == "past_key_values":
            options["attention_mask"] = self.mask if self.name == "past_key_values" else mask
        out = self.model(input_ids=ids, use_cache=True, **self.given, **options, **more)
        self.given = {self.name: out[self.name]}
        return out.logits


def recurrent_states(cache: Any) -> list[Tensor]:
    """All that a cache holds of them."""
    if isinstance(cache, list):
        return cache[2:]
    layers = [getattr(layer, "recurrent_states", {}) for layer in cache.layers]
    return [states[0] for states in layers if states.get(0) is not None]


def same_states(one: Decoder, other: Decoder) -> bool:
    """Whether their first layers keep the same: no attention stands before it, whose masks know of no packing where there is a cache."""

    def states(cache: Any) -> list[Tensor]:
        if isinstance(cache, list):
            return [t[..., 0] for t in cache[1:]]
        return [cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0]]

    pairs = zip(*(states(decoder.given[decoder.name]) for decoder in (one, other)), strict=True)
    return all(distance(got, wanted) < 1e-5 for got, wanted in pairs)


def pieces(model: Model, ids: Tensor) -> Tensor:
    """Logits of ``ids`` read as a prompt, a second one, and token by token."""
    decode, cuts = Decoder(model), [0, 11, 30, *range(31, TOKENS + 1)]
    return torch.cat([decode(ids[:, a:b]) for a, b in zip(cuts, cuts[1:], strict=False)], 1)


def padded(ids: Tensor, length: int, side: str) -> tuple[Tensor, Tensor]:
    """``ids`` and their mask, where the second row is only its first ``length`` tokens."""
    ids, mask = ids.clone(), torch.ones_like(ids)
    gap = ids.shape[1] - length
    ids[1] = torch.cat([ids[1, :length], ids.new_zeros(gap)]).roll(gap if side == "left" else 0)
    mask[1] = (ids[1] != 0).long()
    return ids, mask


def packings() -> dict[str, dict[str, Tensor | int]]:
    """The ways in which one row of TOKENS is said to be two sequences, the first of SHORT tokens."""
    rest = TOKENS - SHORT
    positions = torch.cat([torch.arange(SHORT), torch.arange(rest)])[None]
    ends = torch.tensor([0, SHORT, TOKENS], dtype=torch.int32)
    return {
        "cu_seq_lens": {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": SHORT, "max_length_k": SHORT},
        "seq_idx": {"seq_idx": torch.tensor([[0] * SHORT + [1] * rest], dtype=torch.int32)},
        "position_ids": {"position_ids": positions},
    }


def everything(module: ModuleType) -> dict[tuple[str, ...], Any]:
    """Every global of a module and every attribute of its classes, as they are."""
    found: dict[tuple[str, ...], Any] = {(name,): value for name, value in vars(module).items()}
    for name, owner in vars(module).items():
        if isinstance(owner, type):
            found |= {(name, attribute): value for attribute, value in vars(owner).items()}
    return found


def gradients_of(model: Model, ids: Tensor, **options: Any) -> dict[str, Tensor]:
    """Of a sum of the logits with fixed random weights."""
    torch.manual_seed(2)
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False, **options).logits
    (logits * torch.randn_like(logits)).sum().backward()
    return {name: t.grad.clone() for name, t in model.named_parameters() if t.grad is not None}


class Agreement:
    """Subclasses set ``op`` and, for decoded tokens, ``step``, which must have been called; ``family`` is their module's fixture."""

    op: str
    step: str
    pieces_of_theirs: ClassVar[dict[str, float]] = {}  # how far off theirs must be read in pieces; not named: theirs is right
    left_of_theirs: tuple[str, ...] = ()  # where theirs is wrong with padding on the left

    @pytest.fixture
    def model(self, family):
        return _shared_model(family)

    @pytest.fixture
    def ids(self):
        return torch.randint(3, VOCABULARY, (2, TOKENS))

    @pytest.fixture
    def alone(self, model, ids):
        """Logits of the token 5 after all of the first row, and after the short start of the second."""
        rows = (ids[:1], ids[1:, :SHORT])
        return torch.cat([logits_of(model, torch.cat([row, torch.tensor([[5]])], 1))[:, -1] for row in rows])

    def test_ours_are_called_and_everything_is_put_back(self, family, model, ids):
        module = __import__(type(model).__module__, fromlist=["*"])
        before, logits = everything(module), logits_of(model, ids)
        with patch_transformers([family]) as patch:
            assert not patch.calls
            logits_of(model, ids)
            assert patch.calls[self.op] >= 2
            once = patch.calls[self.op]
            pieces(model, ids)
            assert patch.calls[self.op] == once * 3  # two prompts more
            assert patch.calls[self.step] == once * 7
            during = everything(module)
            changed = {key for key in before if during[key] is not before[key]}
            names = {(name,) if owner is module else (owner.__name__, name) for owner, name, *_ in patch.replaced}
            assert changed == names
            assert len(changed) >= 4
        after = everything(module)
        assert after.keys() == before.keys()
        assert all(after[key] is before[key] for key in before)
        assert torch.equal(logits_of(model, ids), logits)

    def test_logits_and_gradients_agree(self, family, model, ids):
        logits, gradients = logits_of(model, ids), gradients_of(model, ids)
        with patch_transformers([family]):
            assert distance(logits_of(model, ids), logits) < 1e-5
            ours = gradients_of(model, ids)
        assert ours.keys() == gradients.keys()
        whole = torch.cat([g.flatten() for g in gradients.values()]).norm()
        for name, gradient in gradients.items():
            assert (ours[name] - gradient).norm() < 3e-4 * gradient.norm() + 1e-6 * whole, name  # theirs is float32 too

    def test_checkpointing_runs_layers_again_alike(self, family, model, ids):
        model.train()
        try:
            with patch_transformers([family]):
                gradients = gradients_of(model, ids)
                getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # 5.17 has the older name
                again = gradients_of(model, ids)
        finally:
            getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
            model.eval()
        assert again.keys() == gradients.keys()
        assert all((again[name] - g).norm() <= 1e-6 * g.norm() for name, g in gradients.items())

    def test_pieces_are_the_whole(self, family, model, ids):
        whole = logits_of(model, ids)
        if family == "rwkv":
            with pytest.raises(RuntimeError):
                distance(pieces(model, ids), whole)
        elif family in self.pieces_of_theirs:
            assert distance(pieces(model, ids), whole) > self.pieces_of_theirs[family]
        else:
            assert distance(pieces(model, ids), whole) < 1e-4
        with patch_transformers([family]):
            assert distance(pieces(model, ids), whole) < 2e-5

    def test_tokens_move_the_states_of_the_cache_on_where_they_are(self, family, model, ids):
        """Of a cache that theirs has begun too."""
        whole = logits_of(model, ids[:1])
        for patched in (False, True):
            decode = Decoder(model)
            patch = patch_transformers([family]) if patched else None
            decode(ids[:1, :20])
            with patch or patch_transformers([family]) as patch:
                states = recurrent_states(decode.given[decode.name])
                places, before = [t.data_ptr() for t in states], [t.clone() for t in states]
                assert patch.calls[self.step] == 0
                assert distance(decode(ids[:1, 20:21]), whole[:, 20:21]) < 2e-5
                assert patch.calls[self.step] >= 2
                assert [t.data_ptr() for t in states] == places
                assert not any(map(torch.equal, states, before))
                assert distance(decode(ids[:1, 21:22]), whole[:, 21:22]) < 2e-5

    def test_a_cache_of_another_dtype_keeps_it(self, family, model, ids):
        if family == "rwkv":
            pytest.skip("its states are float32")
        whole = logits_of(model, ids[:1])
        decode = Decoder(model)
        with patch_transformers([family]) as patch:
            decode(ids[:1, :20])
            layers = [layer for layer in decode.given[decode.name].layers if getattr(layer, "recurrent_states", {}).get(0) is not None]
            for layer in layers:
                layer.conv_states[0], layer.recurrent_states[0] = layer.conv_states[0].bfloat16(), layer.recurrent_states[0].bfloat16()
            states = recurrent_states(decode.given[decode.name]) + [layer.conv_states[0] for layer in layers]
            before = [t.clone() for t in states]
            once = patch.calls[self.op]
            assert distance(decode(ids[:1, 20:21]), whole[:, 20:21]) < 0.02
            assert distance(decode(ids[:1, 21:22]), whole[:, 21:22]) < 0.02
            assert patch.calls[self.step] + patch.calls[self.op] - once == 2 * len(layers)
        assert all(t.dtype == torch.bfloat16 for t in states)
        assert not any(map(torch.equal, states, before))

    def test_padding_decodes_as_rows_alone(self, family, model, ids, alone):
        def decoded(side: str) -> float:
            decode = Decoder(model)
            decode(*padded(ids, SHORT, side))
            return distance(decode(torch.tensor([[5], [5]]))[:, -1], alone)

        assert decoded("right") > 0.05
        if family in self.left_of_theirs:
            assert decoded("left") > 1e-4
        else:
            assert decoded("left") < 1e-5
        with patch_transformers([family]):
            assert decoded("right") < 5e-5
            assert decoded("left") < 5e-5

    def test_padding_inside_of_a_conversation(self, family, model, ids):
        """Two ragged turns and a token: the state goes on from the last real token of each row."""
        wanted = torch.cat([
            logits_of(model, torch.cat([ids[:1, :11], ids[:1, 11:], torch.tensor([[5]])], 1))[:, -1],
            logits_of(model, torch.cat([ids[1:, :7], ids[1:, 11:13], torch.tensor([[5]])], 1))[:, -1],
        ])  # fmt: skip
        with patch_transformers([family]):
            decode = Decoder(model)
            decode(*padded(ids[:, :11], 7, "right"))
            decode(*padded(ids[:, 11:], 2, "right"))
            assert distance(decode(torch.tensor([[5], [5]]))[:, -1], wanted) < 5e-5

    def test_padding_inside_of_one_row_is_no_packing(self, family, model, ids):
        """Its positions begin again behind the padding, as generate counts them."""
        wanted = logits_of(model, torch.cat([ids[:1, :15], ids[:1, 17:18]], 1))[:, -1]
        mask = torch.tensor([[1, 1, 1, 1, 0, 0, 1]])
        with patch_transformers([family]):
            decode = Decoder(model)
            decode(ids[:1, :11])
            assert distance(decode(ids[:1, 11:18], mask)[:, -1], wanted) < 5e-5

    def test_packed_sequences_do_not_leak(self, family, model, ids):
        ids = ids[:1]
        wanted = torch.cat([logits_of(model, ids[:, :SHORT]), logits_of(model, ids[:, SHORT:])], 1)
        for how, options in packings().items():
            try:
                assert distance(logits_of(model, ids, **options), wanted) > 0.02
            except ValueError as refused:
                assert "packed" in str(refused)  # in 5.17 it is wrong instead
            with patch_transformers([family]):
                assert distance(logits_of(model, ids, **options), wanted) < 5e-5, how

    def test_positions_tell_sequences_of_one_token_apart(self, family, model, ids):
        ends = [0, 1, 2, SHORT, TOKENS - 1, TOKENS]
        parts = [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]
        wanted = torch.cat([logits_of(model, ids[:1, part]) for part in parts], 1)
        for first in (0, 2):  # as DataCollatorWithFlattening(position_ids_start=2) counts
            positions = torch.cat([torch.arange(first, first + part.stop - part.start) for part in parts])[None]
            with patch_transformers([family]):
                assert distance(logits_of(model, ids[:1], position_ids=positions), wanted) < 5e-5

    def test_packed_gradients(self, family, model, ids):
        ids = ids[:1]
        torch.manual_seed(2)
        weights = torch.randn(1, TOKENS, VOCABULARY)
        with patch_transformers([family]):
            packed = gradients_of(model, ids, **packings()["cu_seq_lens"])
            model.zero_grad()
            for part in (slice(0, SHORT), slice(SHORT, TOKENS)):
                (model(input_ids=ids[:, part], use_cache=False).logits * weights[:, part]).sum().backward()
        for name, t in model.named_parameters():
            if t.grad is not None:
                assert (packed[name] - t.grad).norm() < 3e-4 * t.grad.norm() + 1e-4, name

    @pytest.mark.parametrize("rest", [TOKENS - SHORT, 2])
    def test_a_packed_row_leaves_its_last_sequence_in_the_cache(self, family, model, ids, rest):
        packed, alone = Decoder(model), Decoder(model)
        with patch_transformers([family]):
            packed(ids[:1], seq_idx=(torch.arange(TOKENS) >= TOKENS - rest).int()[None])
            alone(ids[:1, TOKENS - rest :])
        assert same_states(packed, alone)

    def test_the_first_of_packed_sequences_goes_on_from_the_cache(self, family, model, ids):
        packed, alone = Decoder(model), Decoder(model)
        with patch_transformers([family]):
            packed(ids[:1, :11])
            logits = packed(ids[:1, 11:], seq_idx=(torch.arange(TOKENS - 11) >= 9).int()[None])
            alone(ids[:1, 20:])
            assert same_states(packed, alone)
            if family in CACHE:  # no attention, which would see all
                assert distance(logits[:, :9], logits_of(model, ids[:1, :20])[:, 11:]) < 2e-5

    def test_greedy_generation_of_a_padded_batch(self, family, model, ids):
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        with patch_transformers([family]):
            batch, mask = padded(ids, SHORT, "left")
            got = model.generate(batch, attention_mask=mask, **options)[:, TOKENS:]
            for row, (one, length) in enumerate(zip(ids, (TOKENS, SHORT), strict=True)):
                wanted = model.generate(one[None, :length], attention_mask=torch.ones(1, length).long(), **options)[0, length:]
                assert torch.equal(got[row], wanted)

    def test_float64(self, family, ids):
        model = model_of(family).double()
        wanted = logits_of(model, ids)
        with patch_transformers([family]):
            assert distance(logits_of(model, ids), wanted) < 1e-5  # theirs is float32 in places

    def test_what_is_not_given_is_said_by_them(self, family, model):
        with patch_transformers([family]), pytest.raises(ValueError, match="input_ids"):
            model(use_cache=False)

    def test_bfloat16(self, family, ids):
        model = model_of(family)
        wanted = logits_of(model, ids)
        model.bfloat16()
        theirs = distance(logits_of(model, ids).float(), wanted)
        with patch_transformers([family]):
            assert distance(logits_of(model, ids).float(), wanted) < 1.5 * theirs
