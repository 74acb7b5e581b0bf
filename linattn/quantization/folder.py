"""Quantised models on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from linattn.models import quantised


def save(model: Any, path: str | os.PathLike[str], *, tokenizer: str | os.PathLike[str] | None = None) -> None:
    """Write a quantised ``model`` atomically as a folder that :func:`linattn.load` reads.

    Args:
        model: a :class:`linattn.hf.LinattnForCausalLM` that :func:`linattn.quantize` has made.
        path: the folder; it must not exist.
        tokenizer: a folder whose tokenizer is copied.

    Raises:
        ValueError: if ``model`` is not quantised.
        OSError: if the folder exists or cannot be written.
    """
    from linattn.hf import folder as folders
    from linattn.hf import remote

    if not quantised.formats(model):
        raise ValueError("model must be quantised, but all its weights are floating-point")
    content = json.loads(model.config.to_json_string()) | {"quantization_config": quantised.config_of(model)}
    content |= {"dtype": str(model.dtype).removeprefix("torch."), "architectures": [type(model).__name__], "auto_map": remote.AUTO_MAP}
    told = {folders.CONFIG: content, remote.FILE: remote.CONTENT}
    if model.generation_config is not None:
        told[folders.GENERATION] = json.loads(model.generation_config.to_json_string())
    copied = {} if tokenizer is None else folders.tokenizer_of(Path(tokenizer))
    folders.write(Path(path), told, model.state_dict(), copied)
