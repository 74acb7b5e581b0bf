"""Published models are read with the same logits and exported with the same weights, against their own classes."""

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

import linattn
from linattn.hf.convert import family
from linattn.hf.load import config_of, export, load
from tests.hf import llama_models
from tests.hf.theirs import distance, theirs_of

MODELS = {
    **llama_models.MODELS,
    "mamba": [{"num_hidden_layers": 2, "state_size": 8}, {"num_hidden_layers": 1, "tie_word_embeddings": False, "time_step_rank": 5}],
    "falcon_mamba": [{"num_hidden_layers": 2, "state_size": 8, "tie_word_embeddings": False}],
    "mamba2": [
        {"num_hidden_layers": 2, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "layer_norm_epsilon": 1e-6},
        {"num_hidden_layers": 1, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 4, "time_step_limit": (0.02, 0.5)},
    ],
    "rwkv": [{"num_hidden_layers": 3, "rescale_every": 2, "intermediate_size": 48}],
    "qwen3_next": [
        {
            "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1],
            "shared_expert_intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
            "intermediate_size": 40, "attention_bias": True, "rms_norm_eps": 1e-5,
        },
    ],
    "recurrent_gemma": [
        {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 96, "attention_window_size": 16},
        {
            "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 96, "attention_window_size": 64, "lru_width": 48,
            "head_dim": 20,
            "attention_bias": True, "logits_soft_cap": 5.0, "block_types": ["attention", "recurrent"], "tie_word_embeddings": False,
        },
    ],
    "minimax": [
        {
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "num_local_experts": 3,
            "intermediate_size": 24, "linear_attn_alpha_factor": 1.5, "mlp_beta_factor": 0.5, "full_attn_alpha_factor": 3,
        },
        {  # number of heads whose rates are no short binary fractions
            "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 12, "num_local_experts": 3,
            "intermediate_size": 24,
        },
    ],
    "xlstm": [
        {"hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2, "output_logit_soft_cap": 3.0, "ffn_round_up_to_multiple_of": 32},
        {"hidden_size": 128, "num_hidden_layers": 1, "num_heads": 2, "tie_word_embeddings": True},  # not supported by its class
    ],
    "kimi_linear": [
        {
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 16, "intermediate_size": 40, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 10,
            "qk_nope_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 3, "n_shared_experts": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"], "tie_word_embeddings": True,
        },
    ],
}  # fmt: skip
CASES = [(name, options) for name, several in MODELS.items() for options in several]

# Published configs beyond their class's defaults; of very large models one period of layers.
PUBLISHED = {
    **llama_models.PUBLISHED,
    "state-spaces/mamba-130m-hf": {"model_type": "mamba", "num_hidden_layers": 24, "time_step_rank": 48, "intermediate_size": 1536},
    "tiiuae/falcon-mamba-7b": {
        "model_type": "falcon_mamba", "hidden_size": 4096, "intermediate_size": 8192, "expand": 16, "num_hidden_layers": 64,
        "time_step_rank": 256, "vocab_size": 65024, "tie_word_embeddings": False,
    },
    "mistralai/Mamba-Codestral-7B-v0.1": {"model_type": "mamba2", "norm_before_gate": True, "rms_norm": True},
    "RWKV/rwkv-4-169m-pile": {"model_type": "rwkv", "hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072},
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {
        "model_type": "qwen3_next", "num_hidden_layers": 4, "full_attention_interval": 4, "intermediate_size": 5120,
        "rope_theta": 10000000, "partial_rotary_factor": 0.25,
    },
    "google/recurrentgemma-2b": {"model_type": "recurrent_gemma", "num_key_value_heads": 1, "intermediate_size": 15360},
    "MiniMaxAI/MiniMax-Text-01-hf": {
        "model_type": "minimax", "hidden_size": 6144, "intermediate_size": 9216, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "num_local_experts": 32, "num_hidden_layers": 8, "vocab_size": 200064, "rope_theta": 10000000,
        "layer_types": ["linear_attention"] * 7 + ["full_attention"], "full_attn_alpha_factor": 3.5565588200778455,
        "linear_attn_alpha_factor": 3.5565588200778455, "mlp_alpha_factor": 3.5565588200778455,
    },
    "NX-AI/xLSTM-7b": {
        "model_type": "xlstm", "embedding_dim": 4096, "num_blocks": 32, "num_heads": 8, "vocab_size": 50304,
        "chunkwise_kernel": "chunkwise--triton_xl_chunk", "sequence_kernel": "native_sequence__triton", "step_kernel": "triton",
    },
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": {
        "model_type": "kimi_linear", "num_hidden_layers": 5, "first_k_dense_replace": 1, "num_experts": 256, "num_experts_per_token": 8,
        "num_shared_experts": 1, "linear_attn_config": {
            "full_attn_layers": [4], "kda_layers": [1, 2, 3, 5], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize(("model_type", "options"), CASES)
def test_logits_generation_and_the_way_back(model_type, options, tmp_path):
    theirs = theirs_of(model_type, **options)
    if options.get("n_groups", 1) > 1 and not hasattr(theirs.backbone.layers[0].mixer.norm, "group_size"):
        pytest.skip("this transformers normalises over all groups at once, unlike the paper's code and unlike later versions")
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    ids = torch.randint(3, 60, (2, 45))
    with torch.no_grad():
        assert distance(ours(ids).logits, theirs(ids).logits) < 1e-5
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    wanted = ids[:1]
    for _ in range(12):
        with torch.no_grad():
            wanted = torch.cat([wanted, theirs(wanted, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(ours.generate(ids[:1], **how), wanted)
    assert len(set(wanted[0, -12:].tolist())) > 1

    ours.save_pretrained(tmp_path / "ours")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "ours")(ids).logits, ours(ids).logits)

    export(ours, model_type, tmp_path / "back")
    again = type(theirs).from_pretrained(tmp_path / "back")
    before = type(theirs).from_pretrained(tmp_path / "theirs").state_dict()
    after = again.state_dict()
    assert before.keys() == after.keys()
    for name, weight in after.items():
        assert torch.equal(weight, before[name]), name
    with torch.no_grad():
        assert distance(again.eval()(ids).logits, theirs(ids).logits) < 1e-5


@pytest.mark.parametrize(("model_type", "options"), CASES)
def test_names_of_their_modules(model_type, options, tmp_path):
    """Names in a plain ``state_dict``: experts are one tensor, and some names differ from those of ``save_pretrained``."""
    theirs = theirs_of(model_type, **options)
    theirs.config.save_pretrained(tmp_path)
    save_file({name: t.clone() for name, t in theirs.state_dict().items()}, tmp_path / "model.safetensors")
    theirs.save_pretrained(tmp_path / "theirs")
    ours, published = load(tmp_path).state_dict(), load(tmp_path / "theirs").state_dict()
    assert all(torch.equal(ours[name], t) for name, t in published.items())


def test_more_experts_in_one_tensor_than_there_are_weights(tmp_path):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 1, "intermediate_size": 8, "num_local_experts": 40}
    theirs = theirs_of("minimax", num_hidden_layers=1, **sizes)
    theirs.config.save_pretrained(tmp_path)
    weights = dict(theirs.state_dict())
    save_file(weights, tmp_path / "model.safetensors")
    assert load(tmp_path).model.layers[0].ffn.count == 40
    lost = "model.layers.0.mlp.experts.down_proj"
    save_file({name: t for name, t in weights.items() if name != lost}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="counts 40 experts in a layer, but there are"):
        load(tmp_path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_and_shapes_of_published_models(name):
    """From their own class on the meta device, as it would save them."""
    source = family(PUBLISHED[name]["model_type"])
    complete = source.config_of(PUBLISHED[name])
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(complete)
        ours = linattn.LanguageModel(config_of(PUBLISHED[name]))
    wanted = {n: tuple(t.shape) for n, t in revert_weight_conversion(theirs, theirs.state_dict()).items()}
    wanted = {n if source.model_type != "kimi_linear" else _published(n): shape for n, shape in wanted.items()}
    if ours.config.tie_embeddings:
        del wanted[source.tied[1]]
    own, known = ours.state_dict(), set()
    for line in source.lines(ours.config):
        known |= set(line.ours)
        shapes = [tuple(t.shape) for t in line.write([own[n] for n in line.ours])]
        assert shapes == [wanted.pop(n) for n in line.theirs]
    assert not wanted
    assert known == own.keys() - ({"lm_head.weight"} if ours.config.tie_embeddings else set())


def _published(name):
    """transformers renames dense layers too when it saves; published files call them mlp."""
    dense = any(f"block_sparse_moe.{part}_proj" in name for part in ("gate", "up", "down"))
    return name.replace("block_sparse_moe", "mlp") if dense else name
