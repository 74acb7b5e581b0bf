"""Conversion of text to tokens and back, whole or token by token."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

from linattn.arguments import described, typed

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"  # files beside a model
CODEC, BYTES = "linattn_codec", "bytes"  # entry of tokenizer settings that marks ByteCodec's tokens
REPLACEMENT = "\ufffd"  # the decoded form of an incomplete character


class Stream(Protocol):
    """Decoder of tokens one by one; a character is returned with its last token."""

    def push(self, token: int) -> str:
        """Decode ``token``: the text that it completes, often one character, sometimes none."""
        ...

    def end(self) -> str:
        """Remaining text."""
        ...


class Codec(Protocol):
    """Encodes and decodes text."""

    vocab_size: int

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def stream(self) -> Stream: ...


class ByteCodec:
    """One token per UTF-8 byte."""

    vocab_size = 256

    @typed
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return _bytes(tokens).decode(errors="replace")

    def stream(self) -> Stream:
        return _ByteStream()


def _bytes(tokens: Sequence[int]) -> bytes:
    try:
        return bytes(list(tokens))
    except (TypeError, ValueError):
        raise ValueError(f"tokens must be integers from 0 to 255, but came as {described(tokens)}") from None


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(_bytes([token]))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class TokenizerCodec:
    """A Hugging Face ``tokenizer.json``, read with the ``tokenizers`` package."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raise OSError if there is no such file and ValueError if it holds no tokenizer."""
        try:
            content = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not a tokenizer.json of the tokenizers package: {error}") from None
        self._set(content, str(path))

    @classmethod
    def from_text(cls, content: str, source: str) -> Self:
        """Make a codec from the ``content`` of a ``tokenizer.json``; ``source`` names it in errors."""
        codec = cls.__new__(cls)
        codec._set(content, source)
        return codec

    def _set(self, content: str, source: str) -> None:
        from tokenizers import Tokenizer

        self.content = content
        try:
            self._tokenizer = Tokenizer.from_str(content)
        except Exception as error:  # the package raises bare exceptions
            raise ValueError(f"{source} is not a tokenizer.json of the tokenizers package: {error}") from None
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)  # not the number of tokens, because ids may have gaps

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts in parallel."""
        return [e.ids for e in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def stream(self) -> Stream:
        return _TokenizerStream(self)


def codec_of(folder: Path, vocab_size: int) -> Codec:
    """Codec of the model of ``vocab_size`` tokens in ``folder``: its ``tokenizer.json``, or bytes if there is none.

    Raises:
        ValueError: if the tokenizer cannot be read, or if there is none and the model does not have 256 tokens.
    """
    settings = folder / SETTINGS
    if settings.is_file():
        try:
            if json.loads(settings.read_text(encoding="utf-8")).get(CODEC) == BYTES:
                return ByteCodec()
        except (ValueError, AttributeError):
            raise ValueError(f"{settings} is damaged: it is not a JSON object") from None
    if (folder / TOKENIZER).is_file():
        return TokenizerCodec(folder / TOKENIZER)
    if vocab_size != ByteCodec.vocab_size:
        raise ValueError(f"{folder} has {vocab_size} tokens, but no {TOKENIZER}")
    return ByteCodec()


class _TokenizerStream:
    """Decoder of the last few tokens with a few earlier ones as context, so that spaces are those of the whole text."""

    def __init__(self, codec: TokenizerCodec) -> None:
        self._codec = codec
        self._written: list[int] = []
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        self._waiting.append(token)
        text = self._text()
        if text.endswith(REPLACEMENT) and len(self._waiting) < 16:  # incomplete character, always below 16 tokens
            return ""
        self._written, self._waiting = self._waiting, []
        return text

    def end(self) -> str:
        return self._text()

    def _text(self) -> str:
        return self._codec.decode(self._written + self._waiting)[len(self._codec.decode(self._written)) :]
