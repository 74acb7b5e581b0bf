"""Tokenizers of SentencePiece in GGUF files (Llama 2, Mistral, Gemma): pieces with scores, which order the merges."""

from __future__ import annotations

from typing import Any

SPACE = "\u2581"  # represents a blank


def merges_of(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Pairs of pieces that merge to another piece, highest score first.

    SentencePiece joins the neighbours whose piece has the highest score (arXiv 1808.06226); as merges in this order a text has the same
    tokens.
    """
    numbers = {token: i for i, token in enumerate(tokens)}
    found: list[tuple[float, int, tuple[str, str]]] = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = ((token[:i], token[i:]) for i in range(1, len(token)))
        found += [(-score, numbers[a] + numbers[b], (a, b)) for a, b in pairs if a in numbers and b in numbers]
    return [pair for *_, pair in sorted(found, key=lambda one: one[:2])]


def tokenizer_of_pieces(tokens: list[str], scores: list[float], unknown: str | None, prefix: bool) -> Any:
    """Make a tokenizer of the ``tokenizers`` package; characters without a piece become bytes.

    Args:
        tokens: the pieces by number.
        scores: score of each.
        unknown: the piece for what cannot be encoded.
        prefix: prepend a blank to the text, so that the first word has the pieces of a later one.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: i for i, token in enumerate(tokens)}
    inner = Tokenizer(models.BPE(vocabulary, merges_of(tokens, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True))
    blanks = normalizers.Replace(" ", SPACE)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), blanks]) if prefix else blanks
    after = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*after, decoders.Strip(" ", 1, 0)] if prefix else after)
    return inner
