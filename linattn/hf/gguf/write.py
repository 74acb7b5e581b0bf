"""Writing a model as a GGUF file, which llama.cpp runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linattn import models
from linattn.arguments import described, typed
from linattn.hf.convert import family
from linattn.hf.gguf.families import FAMILIES, Written, comparable, family_of
from linattn.hf.gguf.file import gguf_package
from linattn.hf.gguf.vocabulary import vocabulary_of
from linattn.models import quantised
from linattn.ops.torch.quantised import BLOCK, group_scale, nearest, packed
from linattn.state import replacing

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")  # of matrices


@typed
def export_gguf(
    model: nn.Module, path: str | os.PathLike[str], *, dtype: str = "F32", tokenizer: str | os.PathLike[str] | None = None,
    context: int = 1 << 20,
) -> str:  # fmt: skip
    """Write ``model`` as one GGUF file and return the name of its architecture.

    Args:
        model: a :class:`linattn.LanguageModel` or its Hugging Face twin, of one of the families mamba, mamba2, rwkv6,
            rwkv7, qwen3_next, kimi_linear and minimax.
        path: the file; an old one is replaced.
        dtype: of the matrices: F32, F16, BF16, or Q8_0 and Q4_0 (rows of other lengths than multiples of 32 stay F32). All others are
            F32. Weights in int4 by :func:`linattn.quantize` have the same values in Q4_0; its embedding and head in int8 become Q8_0.
        tokenizer: a folder with ``tokenizer.json``, byte-level BPE; None: the file has no vocabulary, only its size.
        context: maximum number of tokens in llama.cpp; the size of the state does not depend on it.

    Raises:
        ImportError: if the ``gguf`` package is not installed.
        TypeError: if ``model`` is of another class.
        ValueError: for a model or a tokenizer that the format cannot express, with the reason.
    """
    from linattn.hf.load import their_config
    from linattn.hf.model import LinattnForCausalLM

    if not isinstance(model, models.LanguageModel | LinattnForCausalLM):
        raise TypeError(f"model must be a linattn.LanguageModel or a LinattnForCausalLM, but came as {described(model)}")
    if dtype not in TYPES:
        raise ValueError(f"dtype must be one of {', '.join(TYPES)}, but came as {dtype!r}")
    ours, name = model.config, family_of(model.config)
    written, gguf = FAMILIES[name], gguf_package()
    their_config(comparable(ours), family(written.published or name))  # raises for models that the published class cannot express
    metadata = {"context_length": context, "embedding_length": ours.dim, **written.metadata(ours)}
    vocabulary = {} if tokenizer is None else vocabulary_of(Path(tokenizer), ours.vocab_size)
    with replacing(Path(path)) as part:
        writer = gguf.GGUFWriter(part, name)
        writer.add_file_type(getattr(gguf.LlamaFileType, {"F32": "ALL_F32"}.get(dtype, f"MOSTLY_{dtype}")))
        for key, value in metadata.items():
            _add(writer, f"{name}.{key}", value)
        _add_vocabulary(writer, vocabulary, ours.vocab_size)
        eights = _ends_of_8_bits(model)
        with torch.no_grad():
            for tensor, value in _tensors(model, written):
                matrix = tensor.removesuffix(".weight").split(".")[-1] in (*written.matrices, "token_embd", "output")
                own = "Q8_0" if dtype == "Q4_0" and tensor.split(".")[0] in eights else dtype
                _add_tensor(gguf, writer, tensor, value, own if matrix else "F32")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return name


def _tensors(model: Any, written: Written) -> list[tuple[str, Tensor]]:
    weights, ours = quantised.floats(model), model.config
    found = [("token_embd.weight", weights["model.embedding.weight"])]
    if not (ours.tie_embeddings and written.tied):
        found.append(("output.weight", weights["lm_head.weight"]))
    return [*found, *written.tensors(ours, weights)]


def _ends_of_8_bits(model: Any) -> set[str]:
    """Names of the tensors that stand for the embedding and the head, where those are int8."""
    names = {"model.embedding": "token_embd", "lm_head": "output"}
    return {names[name] for name, form in quantised.formats(model).items() if name in names and form.to == "int8"}


def _add(writer: Any, key: str, value: Any) -> None:
    """Add one value of the metadata, or a list of one for each layer; integers are 32 bits wide."""
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add[type(value)](key, value)


def _add_vocabulary(writer: Any, vocabulary: dict[str, Any], size: int) -> None:
    """Add the tokenizer's metadata, or only the number of tokens."""
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2" if vocabulary else "no_vocab")
    if not vocabulary:
        return
    writer.add_tokenizer_pre(vocabulary["pre"])
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    writer.add_token_merges(vocabulary["merges"])
    writer.add_add_bos_token(False)
    for role, token in vocabulary["special"].items():
        getattr(writer, f"add_{role}_token_id")(token)


def _add_tensor(gguf: Any, writer: Any, name: str, value: Tensor, dtype: str) -> None:
    data = value.detach().cpu().float().contiguous().numpy()
    kind = gguf.GGMLQuantizationType["F32" if dtype in ("Q8_0", "Q4_0") and data.shape[-1] % 32 else dtype]
    writer.add_tensor(name, _q4_0(data) if kind.name == "Q4_0" else gguf.quants.quantize(data, kind), raw_dtype=kind)


def _q4_0(data: np.ndarray) -> np.ndarray:
    """Rows [.., K] as blocks of a float16 scale and 16 bytes of codes, uint8 [.., K / 32 * 18]; scales by least squared error."""
    groups = torch.from_numpy(data).unflatten(-1, (-1, BLOCK))
    scale = group_scale(groups)
    codes = packed(nearest(groups, scale.float()[..., None], 7))
    return torch.cat([scale[..., None].view(torch.uint8), codes], -1).flatten(-2).numpy()
