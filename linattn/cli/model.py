"""The model that a command writes with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linattn.data.codec import Codec, codec_of

INDEX = "model.safetensors.index.json"  # of weights in several files, as save_pretrained cuts large models


def read(path: Path, device: str) -> tuple[Any, Codec]:
    """Model and codec in ``path``: a run of linattn train, one of its checkpoints, or any folder that :func:`linattn.load` reads.

    Raises:
        OSError: if there is none.
        ValueError: if it is damaged, of an unknown kind, or without a tokenizer.json that its tokens need.
    """
    from linattn.models.files import CONFIG
    from linattn.state import read_json
    from linattn.train import load_run

    foreign = (path / CONFIG).is_file() and read_json(path / CONFIG).get("model_type") != "linattn"
    if not foreign and not (path / INDEX).is_file():
        return load_run(path, device=device)
    from linattn.hf.load import load

    model = load(path, device=device)
    return model, codec_of(path, model.config.vocab_size)
