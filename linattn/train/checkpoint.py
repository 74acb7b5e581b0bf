"""Optimizer, schedule and random generators as safetensors and JSON, and the marker of a complete checkpoint."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from linattn.state import content_of, damage, digest, digest_of_text, read_json, replacing, write_tensors

MARK = "complete.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def mark(folder: Path, **about: Any) -> None:
    """Mark ``folder`` as complete, by the last file written to it.

    The file records ``about`` (step, seconds, losses, counts) with the sizes and SHA-256 digests of the other files.
    """
    files = [path for path in folder.iterdir() if path.name != MARK]
    sizes, digests = {path.name: path.stat().st_size for path in files}, {path.name: digest(path) for path in files}
    content = {**about, "files": sizes, "sha256": digests}
    with replacing(folder / MARK) as aside:
        aside.write_text(json.dumps({**content, "checksum": _checksum(content)}))


def marked(folder: Path) -> dict[str, Any] | None:
    """Read the record that :func:`mark` wrote; None if the checkpoint is incomplete, because its process was killed while it wrote.

    Raises:
        ValueError: if the record itself is damaged; a killed process does not cause that.
    """
    path = folder / MARK
    if not path.is_file():
        return None
    about = read_json(path)
    with content_of(path):
        if lacking := {"step", "seconds", "losses", "files"} - about.keys():
            raise KeyError(min(lacking))
        # Digests without a checksum: the word "checksum" itself is damaged. Without both: an earlier version wrote the record.
        if ("checksum" in about or "sha256" in about) and about.get("checksum") != _checksum(about):
            raise ValueError("its SHA-256 differs from the one recorded in it")
        files = about["files"].items()
    return about if all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in files) else None


def check(folder: Path) -> None:
    """Compare the files of a complete checkpoint with their recorded digests; records of an earlier version have none.

    Raises:
        ValueError: naming the first file whose bytes have changed.
    """
    for name, wanted in ((marked(folder) or {}).get("sha256") or {}).items():
        if digest(folder / name) != wanted:
            raise ValueError(
                f"{folder / name} is damaged: its SHA-256 differs from the one in {MARK}; delete the folder {folder.name} to resume "
                "from the checkpoint before it"
            )


def _checksum(about: dict[str, Any]) -> str:
    return digest_of_text(json.dumps({k: v for k, v in about.items() if k != "checksum"}, sort_keys=True))


def newest(run: Path) -> Path | None:
    """Find the complete checkpoint of ``run`` with the highest step."""
    steps = {int(match[1]): path for path in run.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))}
    return next((steps[step] for step in sorted(steps, reverse=True) if marked(steps[step]) is not None), None)


def write(path: Path, tensors: dict[str, Tensor], about: Any) -> None:
    """Write ``tensors`` to one safetensors file, with ``about`` as JSON in its header."""
    tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    write_tensors(path, tensors, {"linattn": json.dumps(about)})


def read(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Read the tensors and the JSON value that :func:`write` wrote.

    Raises:
        ValueError: if the file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            if problem := damage(path, file.metadata()):
                raise ValueError(problem.removeprefix("is damaged: "))
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["linattn"])  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def flatten(optimizer: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split an optimizer's ``state_dict()`` into tensors by name and JSON values."""
    tensors, rest = {}, {}
    for index, values in optimizer["state"].items():
        tensors.update({f"{index}.{name}": value for name, value in values.items() if isinstance(value, Tensor)})
        rest[str(index)] = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    return tensors, {"state": rest, "param_groups": optimizer["param_groups"]}


def unflatten(tensors: dict[str, Tensor], about: dict[str, Any]) -> dict[str, Any]:
    """Invert :func:`flatten`."""
    state = {int(index): dict(values) for index, values in about["state"].items()}
    for key, tensor in tensors.items():
        index, name = key.split(".", 1)
        state[int(index)][name] = tensor
    groups = [{k: tuple(v) if k in ("betas", "ns_coefficients") else v for k, v in group.items()} for group in about["param_groups"]]
    return {"state": state, "param_groups": groups}


def generators() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the states of Python's, NumPy's and torch's random generators."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()  # noqa: NPY002  (libraries use the global generator)
    kind, keys, position, has_gauss, cached = legacy
    tensors = {"python": torch.tensor(words), "numpy": torch.from_numpy(keys.astype(np.int64)), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors, {"python": [version, gauss], "numpy": [kind, int(position), int(has_gauss), float(cached)]}


def set_generators(tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Restore the states that :func:`generators` read."""
    version, gauss = about["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), gauss))
    kind, *rest = about["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
