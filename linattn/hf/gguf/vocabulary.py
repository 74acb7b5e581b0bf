"""Vocabulary of a ``tokenizer.json`` in GGUF's format: tokens, types, merges, and the rule that cuts a text into words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from linattn.hf import folder as folders
from linattn.state import read_json

NORMAL, CONTROL, USER, UNUSED = 1, 3, 4, 5  # types of tokens
NO_MERGES = ["no merges"]  # llama.cpp requires a merge; this one joins two texts that never occur
_ROLES = {"bos": "bos_token", "eos": "eos_token", "pad": "pad_token", "unk": "unk_token"}


def vocabulary_of(folder: Path, size: int) -> dict[str, Any]:
    """Read the tokenizer of ``folder`` for a model of ``size`` tokens.

    Returns:
        ``pre``, ``tokens``, ``types``, ``merges`` and ``special``: the tokens of roles by their name.

    Raises:
        OSError: if there is no ``tokenizer.json``.
        ValueError: for another kind than byte-level BPE, for words that llama.cpp cuts in another way, and for more tokens than ``size``.
    """
    files = folders.tokenizer_of(folder)
    if "tokenizer.json" not in files:
        raise FileNotFoundError(f"{folder} has no tokenizer.json")
    content = read_json(files["tokenizer.json"])
    model = content.get("model", {})
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise ValueError(f"{files['tokenizer.json']}: only byte-level BPE is written to GGUF, but its model is {model.get('type')!r}")
    added = {token["id"]: token for token in content.get("added_tokens", [])}
    by_id = {number: token for token, number in model["vocab"].items()} | {number: token["content"] for number, token in added.items()}
    if by_id and max(by_id) >= size:
        raise ValueError(f"{files['tokenizer.json']} has a token {max(by_id)}, but the model has {size} tokens")
    kinds = {number: CONTROL if token["special"] else USER for number, token in added.items()}
    names = {token: number for number, token in by_id.items()}
    return {
        "pre": _pre(files["tokenizer.json"], content),
        "tokens": [by_id.get(n, f"[unused {n}]") for n in range(size)],
        "types": [kinds.get(n, NORMAL if n in by_id else UNUSED) for n in range(size)],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]] or NO_MERGES,
        "special": {role: names[text] for role, text in _roles(files) if text in names},
    }


def _pre(path: Path, content: dict[str, Any]) -> str:
    """llama.cpp's name of the rule by which the tokenizer cuts a text into words."""
    cut = content.get("pre_tokenizer") or {}
    parts = cut.get("pretokenizers", [cut])
    kinds = [part.get("type") for part in parts]
    last = parts[-1]
    plain = content.get("normalizer") is None and kinds[-1:] == ["ByteLevel"] and not last.get("add_prefix_space")
    if plain and kinds == ["ByteLevel"] and (last.get("use_regex", True) or not content["model"]["merges"]):
        return "gpt-2"
    if plain and kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits") and last.get("use_regex", True):
        return "smollm"
    came = " and ".join(map(str, kinds))
    raise ValueError(f"{path}: words are cut by {came}; only byte-level BPE as in GPT-2, and with single digits, is written to GGUF")


def _roles(files: dict[str, Path]) -> list[tuple[str, str]]:
    """Roles of special tokens with their texts."""
    content = read_json(files["tokenizer_config.json"]) if "tokenizer_config.json" in files else {}
    texts = {role: content.get(name) for role, name in _ROLES.items()}
    return [(role, text["content"] if isinstance(text, dict) else text) for role, text in texts.items() if text is not None]
