"""Optimizer, schedule and random generators as safetensors and JSON, and the mark of a whole checkpoint."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from linattn.state import replacing

MARK = "complete.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def mark(folder: Path, **about: Any) -> None:
    """Declare ``folder`` whole; the last thing that is written to it. ``about``, kept in the mark, has step, seconds and losses."""
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    with replacing(folder / MARK) as aside:
        aside.write_text(json.dumps({**about, "files": files}))


def marked(folder: Path) -> dict[str, Any] | None:
    """What :func:`mark` wrote, or None where the folder is not whole."""
    try:
        about = json.loads((folder / MARK).read_text())
        whole = {"step", "seconds", "losses"} <= about.keys() and all(
            (folder / name).stat().st_size == size for name, size in about["files"].items()
        )
        return about if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def newest(run: Path) -> Path | None:
    """The whole checkpoint of ``run`` with the highest step."""
    steps = {int(match[1]): path for path in run.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))}
    return next((steps[step] for step in sorted(steps, reverse=True) if marked(steps[step]) is not None), None)


def write(path: Path, tensors: dict[str, Tensor], about: Any) -> None:
    """One safetensors file with JSON in its header."""
    tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    save_file(tensors, path, metadata={"linattn": json.dumps(about)})


def read(path: Path) -> tuple[dict[str, Tensor], Any]:
    """What :func:`write` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["linattn"])  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def flatten(optimizer: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's ``state_dict()`` as tensors by name and the rest as JSON."""
    tensors, rest = {}, {}
    for index, values in optimizer["state"].items():
        tensors.update({f"{index}.{name}": value for name, value in values.items() if isinstance(value, Tensor)})
        rest[str(index)] = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    return tensors, {"state": rest, "param_groups": optimizer["param_groups"]}


def unflatten(tensors: dict[str, Tensor], about: dict[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`flatten`."""
    state = {int(index): dict(values) for index, values in about["state"].items()}
    for key, tensor in tensors.items():
        index, name = key.split(".", 1)
        state[int(index)][name] = tensor
    groups = [{k: tuple(v) if k == "betas" else v for k, v in group.items()} for group in about["param_groups"]]
    return {"state": state, "param_groups": groups}


def generators() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The states of Python's, NumPy's and torch's random generators."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()  # noqa: NPY002  (the global one is what libraries use)
    kind, keys, position, has_gauss, cached = legacy
    tensors = {"python": torch.tensor(words), "numpy": torch.from_numpy(keys.astype(np.int64)), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors, {"python": [version, gauss], "numpy": [kind, int(position), int(has_gauss), float(cached)]}


def set_generators(tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Put the generators back to what :func:`generators` saw."""
    version, gauss = about["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    kind, *rest = about["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
