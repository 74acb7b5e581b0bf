"""Model in a folder: model.safetensors and config.json, without executable content."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import nn

from linattn.state import damage, replacing, save_tensors

CONFIG, WEIGHTS = "config.json", "model.safetensors"
Model = TypeVar("Model", bound=nn.Module)


def save(folder: str | os.PathLike[str], model: nn.Module, config: dict[str, Any]) -> None:
    """Write ``model`` and its ``config`` to ``folder``, which is created if missing; the weights are written last."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / CONFIG) as aside:
        aside.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    weights = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    save_tensors(folder / WEIGHTS, weights, {"format": "pt"})


def read_config(folder: str | os.PathLike[str], model_type: str) -> dict[str, Any]:
    """Read config.json of a model of ``model_type`` from ``folder``, without that entry.

    Raises:
        OSError: if there is none.
        ValueError: if it is not the config of such a model.
    """
    path = Path(folder) / CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.pop("model_type", None) != model_type:
        raise ValueError(f"{path} is not the config of a {model_type} model")
    return content


def read_weights(path: Path, build: Callable[[], Model], tied: frozenset[str] = frozenset()) -> Model:
    """Build a model and load the weights in ``path``; shapes are compared with the file's header before memory is allocated.

    Args:
        path: a safetensors file.
        build: creates the model; called once on the meta device and once to be loaded.
        tied: names that the file may lack, because they are tied to other weights.

    Raises:
        ValueError: if the file is damaged (its checksum is compared, if it has one) or of another model, naming the first weight
            that differs.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    with torch.device("meta"):
        wanted = {name: list(t.shape) for name, t in build().state_dict().items()}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        wrong = sorted(n for n in wanted.keys() | shapes.keys() if wanted.get(n) != shapes.get(n) and not (n in tied and n not in shapes))
        if wrong:
            raise ValueError(f"{path} does not fit its config: {wrong[0]} has {shapes.get(wrong[0])}, wanted {wanted.get(wrong[0])}")
        if problem := damage(path, metadata):
            raise ValueError(f"{path} {problem}")
        model = build()
        model.load_state_dict(load_file(path), strict=not tied)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return model


class SavedModel(nn.Module):
    """Base of models that are saved to a folder: model.safetensors and config.json."""

    MODEL_TYPE: ClassVar[str]  # in config.json
    CONFIG: ClassVar[type[Any]]
    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write model.safetensors and config.json to ``folder``."""
        save(folder, self, {"model_type": self.MODEL_TYPE, **asdict(self.config)})

    @classmethod
    def load(cls, folder: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Self:
        """Load the model in ``folder``, in evaluation mode.

        Raises:
            OSError: if there is none.
            ValueError: if it is damaged or not such a model.
        """
        config = cls.CONFIG(**read_config(folder, cls.MODEL_TYPE))
        return read_weights(Path(folder) / WEIGHTS, lambda: cls(config)).to(device).eval()
