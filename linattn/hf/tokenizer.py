"""Tokenizer of transformers for a run's codec, for pipelines, stop strings and lm-eval."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from linattn.data.codec import BYTES, CODEC, ByteCodec, Codec, TokenizerCodec

NUL = "\0"  # a byte that texts do not contain


def tokenizer_of(codec: Codec, *, end: str | None = None) -> PreTrainedTokenizerFast:
    """Build the tokenizer with the tokens of ``codec``; ``save_pretrained`` writes it beside a model.

    Args:
        codec: codec of a run, as :func:`linattn.train.load_run` returns it.
        end: end and padding token, which a ``tokenizer.json`` does not name; the byte 0 for bytes.

    Raises:
        ValueError: if ``end`` is not a single token of ``codec``.
    """
    if isinstance(codec, ByteCodec):
        if end not in (None, NUL):
            raise ValueError(f"end must be {NUL!r} for a codec of bytes, but came as {end!r}")
        return _of_bytes()
    from tokenizers import Tokenizer

    if not isinstance(codec, TokenizerCodec):
        raise TypeError(f"codec must be a ByteCodec or a TokenizerCodec, but came as {type(codec).__name__}")
    if end is not None and len(codec.encode(end)) != 1:
        raise ValueError(f"end must be one token, but {end!r} is {len(codec.encode(end))}")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(codec.content), eos_token=end, pad_token=end)


def _of_bytes() -> PreTrainedTokenizerFast:
    """Build the tokenizer of bytes, where token b is the byte b."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = bytes_to_unicode() | {0: NUL}  # the default letter may occur in texts
    inner = Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=NUL, pad_token=NUL, clean_up_tokenization_spaces=False, **{CODEC: BYTES}
    )  # fmt: skip
