"""Chat templates: the text that a turn adds to a conversation whose earlier turns are in a state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from linattn.hf import gguf

_REPLY = "\ue000reply\ue000"  # private-use characters, which no template contains


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's folder or GGUF file.

    Raises:
        OSError: if there is none.
        ValueError: for a GGUF file with an unsupported kind of tokenizer.
    """
    path = Path(path)
    if path.suffix == gguf.SUFFIX and not path.is_dir():
        return gguf.tokenizer_of(gguf.GGUFFile(path))
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is neither a folder with a tokenizer nor a GGUF file")
    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


class Chat:
    """Chat template of a tokenizer. ``stops``: tokens that end a reply; ``end``: text of the end token that the template writes.

    Raises:
        ValueError: for a tokenizer without a template or without an end token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: int | list[int] | None = None) -> None:
        if tokenizer.chat_template is None:
            raise ValueError("the tokenizer has no chat template")
        known = ends if isinstance(ends, list) else [ends]
        self.stops = tuple(sorted({token for token in (*known, tokenizer.eos_token_id) if token is not None}))
        if not self.stops:
            raise ValueError("the tokenizer has no end token, so replies would not end")
        self._tokenizer: Any = tokenizer
        behind = self._behind("-")
        texts = [str(self._tokenizer.decode([token])) for token in self.stops]
        self.end = next((text for text in texts if behind.startswith(text)), "")

    def first(self, text: str) -> str:
        """Render the text before the first reply."""
        return self._render([{"role": "user", "content": text}])

    def later(self, text: str) -> str:
        """Render the text between a reply, including ``end``, and the next reply."""
        return self._behind(text).removeprefix(self.end)

    def _behind(self, text: str) -> str:
        turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _REPLY}, {"role": "user", "content": text}]
        return self._render(turns).partition(_REPLY)[2]

    def _render(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def chat_of(path: str | os.PathLike[str], model: Any) -> Chat | None:
    """Chat template of ``model``, which was loaded from ``path``; None if its tokenizer has none."""
    tokenizer = load_tokenizer(path)
    if tokenizer.chat_template is None:
        return None
    generation = getattr(model, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    return Chat(tokenizer, getattr(model.config, "eos_token_id", None) if ends is None else ends)
