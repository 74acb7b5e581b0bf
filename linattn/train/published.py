"""Published models where commands take a run: folders of transformers and others, and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from linattn.data.codec import Codec, TokenizerCodec

if TYPE_CHECKING:
    from linattn.hf.model import LinattnForCausalLM

_TOKENIZER, _INDEX = "tokenizer.json", "model.safetensors.index.json"


def is_published(path: Path) -> bool:
    """True for a GGUF file, a folder of another library's model, and a linattn model with its weights in several files."""
    if path.suffix == ".gguf":
        return path.is_file()
    try:
        content: Any = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the reader of runs says what is wrong
        return False
    return isinstance(content, dict) and (content.get("model_type", "linattn") != "linattn" or (path / _INDEX).is_file())


def load_published(path: Path, device: str | torch.device) -> tuple[LinattnForCausalLM, Codec]:
    """Load the model at ``path``, with its ``tokenizer.json`` or the tokenizer in the GGUF file.

    Raises:
        OSError, ValueError: as :func:`linattn.load`, and for a folder without ``tokenizer.json``.
    """
    from linattn.hf.chat import load_tokenizer
    from linattn.hf.load import load

    if path.is_dir():
        if not (path / _TOKENIZER).is_file():
            raise FileNotFoundError(f"{path} has no {_TOKENIZER}, and other tokenizers are not read")
        codec = TokenizerCodec(path / _TOKENIZER)
    else:
        tokenizer: Any = load_tokenizer(path)
        codec = TokenizerCodec.from_text(tokenizer.backend_tokenizer.to_str(), f"the tokenizer of {path}")
    return load(path, device=device), codec
