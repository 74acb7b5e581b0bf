"""Folder of a published model: JSON and safetensors files, validated on reading and written atomically."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from linattn.arguments import absent
from linattn.models.quantised import METHOD
from linattn.state import damage, write_tensors
from linattn.state.files import sync

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
TOKENIZER = (  # files of a tokenizer, copied unchanged
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json", "chat_template.jinja",
    "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "tiktoken.model",
)  # fmt: skip
WORD = r"[A-Za-z0-9_-]+"  # name of a variant
FLOATS = ("F64", "F32", "F16", "BF16")
CODES = ("I8", "U8")  # dtypes of quantised weights


def config_of(folder: Path) -> dict[str, Any]:
    """Read a folder's ``config.json``; raise an error for other paths and for weights that cannot be read safely."""
    if folder.suffix in PICKLES:
        raise ValueError(f"{folder} is a pickle, which can run code when read: give a folder with safetensors files")
    if not folder.is_dir():
        is_file = f"{folder} is a file: give the folder that holds it and {CONFIG}"
        raise FileNotFoundError(is_file if folder.exists() else absent(folder))
    content = _json(_inside(folder, CONFIG))
    found = content.get("quantization_config")
    if found is not None and (not isinstance(found, dict) or found.get("quant_method") != METHOD):
        raise ValueError(
            f"{folder} holds a model quantised by another program, but weights must be {', '.join(FLOATS)} or quantised by linattn quantize"
        )
    return content


def generation_of(folder: Path) -> dict[str, Any] | None:
    """Read a folder's ``generation_config.json``, with end tokens and sampling; None if there is none."""
    return _json(_inside(folder, GENERATION)) if os.path.lexists(folder / GENERATION) else None


def tokenizer_of(folder: Path) -> dict[str, Path]:
    """Find the files of a folder's tokenizer, by name; empty if there are none."""
    if not folder.is_dir():
        raise FileNotFoundError(f"tokenizer must be a folder with a tokenizer, but {folder} is not one")
    return {name: _inside(folder, name) for name in TOKENIZER if os.path.lexists(folder / name)}


@contextmanager
def weights_of(folder: Path, variant: str | None = None) -> Iterator[Weights]:
    """Open the weights of a folder, or of its ``variant``, to be read on demand; checksums in the files are compared at once."""
    if variant is not None and not (isinstance(variant, str) and re.fullmatch(WORD, variant)):
        raise ValueError(f"variant must be a word in the names of files, such as 'fp16', but came as {variant!r}")
    with ExitStack() as stack:
        yield Weights(folder, stack, variant)


class Weights:
    """Tensors by name, each read on demand."""

    def __init__(self, folder: Path, stack: ExitStack, variant: str | None) -> None:
        from safetensors import SafetensorError, safe_open

        self._where: dict[str, tuple[Any, str]] = {}  # name -> file and name in it
        for file, names in _files(folder, variant).items():
            path = _inside(folder, file)
            try:
                opened = stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged, truncated or not a safetensors file: {error}") from None
            if problem := damage(path, opened.metadata()):
                raise ValueError(f"{path} {problem}")
            there = set(opened.keys())
            if names is not None and (lacking := sorted(names - there)):
                raise ValueError(f"{path} lacks weights that {_variant(INDEX, variant)} lists: {listed(lacking)}")
            self._where |= {name: (opened, name) for name in (there if names is None else names)}
        for name, (opened, _) in self._where.items():
            if (dtype := opened.get_slice(name).get_dtype()) not in (CODES if name.endswith(".codes") else FLOATS):
                raise ValueError(f"{folder}: {name} has dtype {dtype}, but weights must be {', '.join(FLOATS)}")

    def rename(self, aliases: Mapping[str, str], ignored: str | None = None) -> None:
        """Drop weights that ``ignored`` matches, and rename the others by the patterns of ``aliases``."""
        if ignored is not None:
            self._where = {name: place for name, place in self._where.items() if not re.search(ignored, name)}
        for pattern, name in aliases.items():
            renamed = [(re.sub(pattern, name, old), old) for old in self._where]
            if len({new for new, _ in renamed}) < len(renamed):
                twice = sorted(new for new, old in renamed if new != old and new in self._where)
                raise ValueError(f"there are weights with two names each: {listed(twice)}")
            self._where = {new: self._where[old] for new, old in renamed}

    @property
    def names(self) -> set[str]:
        """Names of all weights."""
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in the file's header."""
        opened, there = self._where[name]
        return tuple(opened.get_slice(there).get_shape())

    def __getitem__(self, name: str) -> Tensor:
        opened, there = self._where[name]
        return opened.get_tensor(there)


def write(folder: Path, contents: Mapping[str, dict[str, Any] | str], weights: Mapping[str, Tensor], copied: Mapping[str, Path]) -> None:
    """Write ``folder`` atomically: a JSON or text file for each of ``contents``, one of weights, and the files ``copied`` from elsewhere.

    Raises:
        FileExistsError: if ``folder`` exists.
        FileNotFoundError: if its parent folder does not exist.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} already exists: choose another folder, or remove it")
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"{folder} cannot be written: {folder.parent} does not exist")
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.part")
    aside.mkdir()
    try:
        own = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in weights.items()}
        write_tensors(aside / WEIGHTS, own, {"format": "pt"})
        for name, content in contents.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"
            (aside / name).write_text(text, encoding="utf-8")
        for name, source in copied.items():
            shutil.copyfile(source, aside / name)
        for path in (aside / WEIGHTS, *(aside / name for name in (*contents, *copied)), aside):
            sync(path)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    sync(folder.parent)


def listed(names: list[str], most: int = 8) -> str:
    """Join the first names with the number of remaining ones."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _variant(name: str, variant: str | None) -> str:
    """Name of a file in a ``variant``, as transformers makes it."""
    return name if variant is None else f"{name.rpartition('.')[0]}.{variant}.{name.rpartition('.')[2]}"


def _files(folder: Path, variant: str | None) -> dict[str, set[str] | None]:
    """Map each file of weights to the names to read from it; None: all."""
    weights, index = _variant(WEIGHTS, variant), _variant(INDEX, variant)
    if os.path.lexists(folder / weights):
        return {weights: None}
    if not os.path.lexists(folder / index):
        files = sorted(path.name for path in folder.iterdir())
        shapes = (rf"model\.({WORD}(?<!-of-\d{{5}}))\.safetensors", rf"model\.safetensors\.index\.({WORD})\.json")
        if others := [found[1] for name in files for shape in shapes if (found := re.fullmatch(shape, name))]:
            raise FileNotFoundError(f"{folder} has neither {weights} nor {index}, but the variants {listed(others)}: name one as variant")
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
        if pickles:
            raise ValueError(
                f"{folder} has its weights in {listed(pickles)}: a pickle can run code when read, so only safetensors files are accepted. "
                "Convert it once where you trust it, by transformers' save_pretrained"
            )
        raise FileNotFoundError(f"{folder} has neither {weights} nor {index}")
    places = _json(_inside(folder, index)).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise ValueError(f"{folder / index} has no weight_map from the names of weights to files")
    return {file: {name for name, place in places.items() if place == file} for file in sorted(set(places.values()))}


def _inside(folder: Path, name: str) -> Path:
    """Path of the file ``name``, after checking that it is inside ``folder``."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"{folder} names the file {name!r}, which is outside of it")
    path = folder / name
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        raise ValueError(
            f"{path} is a link out of its folder, to {path.resolve()}: copy the files into one folder (hf download --local-dir does)"
        )
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no file {name}")
    if name.endswith(PICKLES) or (name not in TOKENIZER and not name.endswith((".safetensors", ".json"))):
        raise ValueError(f"{path} is not a safetensors file")
    return path


def _number(value: dict[str, Any]) -> Any:
    """Decode transformers' form of infinity, {"__float__": "Infinity"}."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=_number)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, but holds a {type(content).__name__}")
    return content
