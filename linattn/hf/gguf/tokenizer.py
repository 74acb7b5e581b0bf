"""Tokenizer of a GGUF file: byte-level BPE, cut into words by the rule named in ``tokenizer.ggml.pre``, or SentencePiece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from linattn.hf.gguf.file import GGUFFile
from linattn.hf.gguf.pieces import tokenizer_of_pieces
from linattn.hf.gguf.vocabulary import NO_MERGES

_KEY = "tokenizer.ggml."
_CONTROL, _USER = 3, 4  # token types: tokens that never occur in a text, and tokens that are not split
_ROLES = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


@dataclass(frozen=True)
class _Words:
    """Rules by which a text is cut into words, within which tokens are merged.

    ``digits``: every digit is a word. ``pattern``: a regular expression of words, None for GPT-2's. ``whole``: a word that is a token
    needs no merges. ``nfc``: the text is composed first.
    """

    digits: bool = False
    pattern: str | None = None
    whole: bool = False
    nfc: bool = False


def _pattern(digits: str) -> str:
    """Pattern of words of tiktoken's later vocabularies, with numbers of at most ``digits`` digits."""
    contractions, letters = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+"
    marks, blanks = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+|\s+(?!\S)|\s+"
    return f"{contractions}|{letters}|{digits}|{marks}|{blanks}"


WORDS = {
    "gpt-2": _Words(),
    "smollm": _Words(digits=True),
    "llama-bpe": _Words(pattern=_pattern(r"\p{N}{1,3}"), whole=True),
    "qwen2": _Words(pattern=_pattern(r"\p{N}"), nfc=True),
}


def tokenizer_of(file: GGUFFile) -> PreTrainedTokenizerFast:
    """Make the tokenizer in ``file``, its special tokens and its chat template.

    Raises:
        ValueError: for a file without a tokenizer, for another kind than byte-level BPE and SentencePiece or another ``pre``, and for
            lists that contradict each other.
    """
    from tokenizers import AddedToken

    metadata = {key.removeprefix(_KEY): value for key, value in file.metadata.items() if key.startswith(_KEY)}
    if "model" not in metadata:
        raise ValueError(f"{file.path} has no tokenizer")
    if (made := _KINDS.get(metadata["model"])) is None:
        known = ", byte-level BPE, or ".join(map(repr, _KINDS)) + ", SentencePiece"
        raise ValueError(f"{file.path}: {_KEY}model must be {known}, to be read, but is {metadata['model']!r}")
    inner, tokens = made(file, metadata)
    kinds = metadata.get("token_type", [1] * len(tokens))
    for kind, special in ((_CONTROL, True), (_USER, False)):
        inner.add_tokens([AddedToken(t, special=special, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == kind])
    roles = {name: tokens[metadata[f"{role}_token_id"]] for name, role in _ROLES.items() if f"{role}_token_id" in metadata}
    if metadata.get("add_bos_token", metadata["model"] == "llama") and "bos_token" in roles:
        _begin(inner, roles["bos_token"], metadata["bos_token_id"])
    template = file.metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, clean_up_tokenization_spaces=False, chat_template=template, **roles
    )  # fmt: skip


def _words_of_bytes(file: GGUFFile, metadata: dict[str, Any]) -> tuple[Any, list[str]]:
    """Make the inner tokenizer of byte-level BPE; returns its tokens too."""
    from tokenizers import Tokenizer, decoders, models

    if (pre := metadata.get("pre")) not in WORDS:
        raise ValueError(f"{file.path}: {_KEY}pre must be one of {', '.join(map(repr, WORDS))} to be read, but is {pre!r}")
    words, (tokens, vocabulary) = WORDS[pre], _vocabulary(file, metadata)
    listed_merges = metadata.get("merges", [])
    merges: list[Any] = [] if listed_merges == NO_MERGES else [tuple(str(merge).split(" ")) for merge in listed_merges]
    if wrong := [" ".join(pair) for pair in merges if len(pair) != 2]:
        raise ValueError(f"{file.path}: {_KEY}merges must be pairs of tokens, but has {wrong[0]!r}")
    try:
        inner = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=words.whole))
    except Exception as error:  # the package raises bare exceptions
        raise ValueError(f"{file.path}: {_KEY}merges do not fit the tokens: {error}") from None
    _cut(inner, words)
    inner.decoder = decoders.ByteLevel()
    return inner, tokens


def _pieces(file: GGUFFile, metadata: dict[str, Any]) -> tuple[Any, list[str]]:
    """Make the inner tokenizer of SentencePiece; returns its tokens too."""
    tokens, _ = _vocabulary(file, metadata)
    scores = metadata.get("scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        came = "there are none" if scores is None else f"there are {len(scores)}"
        raise ValueError(f"{file.path}: {_KEY}scores must be those of {len(tokens)} tokens, but {came}")
    number = metadata.get("unknown_token_id")
    return tokenizer_of_pieces(tokens, scores, None if number is None else tokens[number], metadata.get("add_space_prefix", True)), tokens


_KINDS = {"gpt2": _words_of_bytes, "llama": _pieces}


def _vocabulary(file: GGUFFile, metadata: dict[str, Any]) -> tuple[list[str], dict[str, int]]:
    """Tokens, and the number of each."""
    tokens = metadata.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(t, str) for t in tokens):
        raise ValueError(f"{file.path} has no {_KEY}tokens")
    vocabulary = {t: i for i, t in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise ValueError(f"{file.path}: {_KEY}tokens has {len(tokens) - len(vocabulary)} tokens twice")
    if len(metadata.get("token_type", tokens)) != len(tokens):
        raise ValueError(f"{file.path}: {_KEY}token_type is of {len(metadata['token_type'])} tokens, but there are {len(tokens)}")
    for role in _ROLES.values():
        if not 0 <= metadata.get(f"{role}_token_id", 0) < len(tokens):
            raise ValueError(f"{file.path}: {_KEY}{role}_token_id is {metadata[f'{role}_token_id']}, but there are {len(tokens)} tokens")
    return tokens, vocabulary


def _cut(inner: Any, words: _Words) -> None:
    """Make ``inner`` cut a text into words of bytes."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if words.digits else []
    if words.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(words.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words.pattern is None))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if words.nfc:
        inner.normalizer = normalizers.NFC()


def _begin(inner: Any, token: str, number: int) -> None:
    """Make every text begin with ``token``."""
    from tokenizers.processors import TemplateProcessing

    inner.post_processor = TemplateProcessing(single=f"{token} $A", special_tokens=[(token, number)])
