"""Chat templates: the text that a turn adds to a conversation whose past is in a state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from linattn.hf import gguf

_REPLY = "\ue000reply\ue000"  # of a private range, which no template has


def load_tokenizer(path: str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's folder or GGUF file.

    Raises:
        OSError: if there is none.
        ValueError: for a GGUF file whose tokenizer is of a kind that is not read.
    """
    path = Path(path)
    if path.suffix == gguf.SUFFIX and not path.is_dir():
        return gguf.tokenizer_of(gguf.GGUFFile(path))
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder with a tokenizer, nor a GGUF file")
    return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


class Chat:
    """Chat template of a tokenizer; ``stops`` are the tokens that end a reply, ``end`` is the text of the one that the template has there.

    Raises:
        ValueError: for a tokenizer without a template or without an end token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: int | list[int] | None = None) -> None:
        if tokenizer.chat_template is None:
            raise ValueError("the tokenizer has no chat template")
        known = ends if isinstance(ends, list) else [ends]
        self.stops = tuple(sorted({token for token in (*known, tokenizer.eos_token_id) if token is not None}))
        if not self.stops:
            raise ValueError("the tokenizer has no end token, so no reply would end")
        self._tokenizer: Any = tokenizer
        behind = self._behind("-")
        texts = [str(self._tokenizer.decode([token])) for token in self.stops]
        self.end = next((text for text in texts if behind.startswith(text)), "")

    def first(self, text: str) -> str:
        """Render what comes before the first reply."""
        return self._render([{"role": "user", "content": text}])

    def later(self, text: str) -> str:
        """Render what comes between a reply, ``end`` included, and the next one."""
        return self._behind(text).removeprefix(self.end)

    def _behind(self, text: str) -> str:
        said = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _REPLY}, {"role": "user", "content": text}]
        return self._render(said).partition(_REPLY)[2]

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
