"""GGUF files written by the ``gguf`` package from models and tokenizers of transformers, as llama.cpp's converter lays them out."""

import sys

import numpy as np
import pytest
import torch

from tests.oracles import wheels

try:
    import gguf
except ImportError:  # not installed: use its wheel, which needs only numpy here
    sys.path.append(str(wheels.path("gguf==0.19.0")))
    gguf = pytest.importorskip("gguf")

KINDS = {name: gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")}
_PARTS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_ENDS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def write(path, model, architecture, *, kind="F32", values=(), tensors=(), tokenizer=None):
    """Write ``model``, its matrices as ``kind``; ``values`` are more metadata, ``tensors`` more tensors.

    The weights of ``model`` are rounded to those in the file.
    """
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(size)
    writer.add_value_length(size)
    for key, value in dict(values).items():
        {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string, bool: writer.add_bool}[type(value)](key, value)
    for name, t in dict(tensors).items():
        writer.add_tensor(name, t)
    tied = config.tie_word_embeddings
    for name, weight in model.state_dict().items():
        if not (tied and name == "lm_head.weight"):
            _add(writer, name, weight, architecture, kind, config)
    if tokenizer is not None:
        _add_tokenizer(writer, **tokenizer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer, name, weight, architecture, kind, config):
    data = weight.numpy()
    if architecture == "gemma3" and "norm" in name:
        data = data + 1
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for letter, count in heads.items():
        if architecture == "llama" and f".{letter}_proj." in name:  # the two halves of a head become pairs of neighbours
            data = np.stack(np.split(data.reshape(count, -1, *data.shape[1:]), 2, 1), 2).reshape(data.shape)
    plain = data.ndim == 1
    stored = gguf.quants.quantize(data, KINDS["F32" if plain else kind])
    writer.add_tensor(_named(name, architecture), stored, raw_dtype=KINDS["F32" if plain else kind])
    if not plain:
        back = gguf.quants.dequantize(stored, KINDS[kind]).reshape(data.shape)
        for letter, count in heads.items():
            if architecture == "llama" and f".{letter}_proj." in name:
                pairs = back.reshape(count, -1, 2, *data.shape[1:])
                back = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], 1).reshape(data.shape)
        weight.copy_(torch.from_numpy(np.array(back, np.float32)))


def _named(name, architecture):
    if name in _ENDS:
        return _ENDS[name]
    parts = _PARTS | (_GEMMA if architecture == "gemma3" else {})
    _, _, layer, rest = name.split(".", 3)
    part, _, end = rest.rpartition(".")
    return f"blk.{layer}.{parts[part]}.{end}"


def _add_tokenizer(writer, *, tokens, merges, pre, types, template=None, model="gpt2", roles=(), begins=False, scores=None, prefix=None):
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    if prefix is not None:
        writer.add_add_space_prefix(prefix)
    writer.add_add_bos_token(begins)
    for role, number in dict(roles).items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", number)
    if template is not None:
        writer.add_chat_template(template)
