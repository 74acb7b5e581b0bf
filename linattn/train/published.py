"""Published models in place of a run: model folders of transformers and other libraries, and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from linattn.data.codec import Codec, TokenizerCodec, codec_of
from linattn.state import read_json

if TYPE_CHECKING:
    from linattn.hf.model import LinattnForCausalLM

_TOKENIZER, _INDEX = "tokenizer.json", "model.safetensors.index.json"


def is_published(path: Path) -> bool:
    """True for a GGUF file, a folder of another library's model, and a linattn model quantised or with its weights in several files."""
    if path.suffix == ".gguf":
        return path.is_file()
    try:
        content: Any = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the reader of runs reports the error
        return False
    if not isinstance(content, dict):
        return False
    quantised = content.get("quantization_config") is not None
    return content.get("model_type", "linattn") != "linattn" or quantised or (path / _INDEX).is_file()


def load_published(path: Path, device: str | torch.device) -> tuple[LinattnForCausalLM, Codec]:
    """Load the model at ``path``, with its ``tokenizer.json`` or the tokenizer in the GGUF file.

    Raises:
        OSError, ValueError: as :func:`linattn.load`, and for a folder without ``tokenizer.json``.
    """
    from linattn.hf.load import load

    codec = codec_at(path)
    return load(path, device=device), codec


def codec_at(path: Path) -> Codec:
    """Codec of the model at ``path``, a folder or a GGUF file; raises as :func:`load_published`."""
    from linattn.hf.chat import load_tokenizer

    if not path.is_dir():
        tokenizer: Any = load_tokenizer(path)
        return TokenizerCodec.from_text(tokenizer.backend_tokenizer.to_str(), f"the tokenizer of {path}")
    content = read_json(path / "config.json")
    if content.get("model_type") == "linattn":
        return codec_of(path, content.get("vocab_size", 0))
    if not (path / _TOKENIZER).is_file():
        raise FileNotFoundError(f"{path} has no {_TOKENIZER}, and no other tokenizer format is read")
    return TokenizerCodec(path / _TOKENIZER)
