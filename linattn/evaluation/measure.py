"""Measurements of one model: text, distance from a teacher, tasks, state and speed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from linattn.data import sources
from linattn.data.codec import ByteCodec, Codec
from linattn.data.corpus import corpus
from linattn.distill import losses
from linattn.evaluation.options import EvaluateOptions
from linattn.evaluation.tasks import Prompt, prompts
from linattn.generate.stream import stream

_PIECE = 4096  # bytes of text encoded at a time
_BATCH = 1 << 14  # tokens of one forward pass

Row = dict[str, Any]


def held_out(options: EvaluateOptions, codec: Codec) -> tuple[list[int], int]:
    """Encode the held-out text: its tokens, and the number of bytes that they cover."""
    if options.text:
        text = b"\n".join(sources.read(path) for path in sources.files(options.text))
    else:
        text = bytes(corpus().validation)
    tokens: list[int] = []
    start = 0
    while start < len(text) and len(tokens) < options.tokens:
        stop = min(start + _PIECE, len(text))
        while stop < len(text) and text[stop] & 0xC0 == 0x80:  # inside a character
            stop += 1
        tokens += codec.encode(text[start:stop].decode(errors="replace"))
        start = stop
    if len(tokens) < 2:
        raise ValueError(f"text must have at least 2 tokens, but has {len(tokens)}")
    return tokens, start


@torch.no_grad()
def on_text(model: Any, tokens: Sequence[int], size: int, options: EvaluateOptions, teacher: Any = None) -> Row:
    """Measure bits per byte of the text, and the distance of the next-token distributions from the teacher's.

    Every token but the first is predicted from at most ``options.context`` tokens before it.

    Returns:
        ``bits_per_byte``; with a teacher ``kl``, in nats per token, and ``top1``, the share of tokens with the
        teacher's most likely next token.
    """
    entropy, kl, same, count = 0.0, 0.0, 0.0, 0
    for ids in _windows(tokens, options.context, model.device):
        hidden = cast(Tensor, model.model(ids)[0])
        entropy += losses.cross_entropy(model, hidden, ids).item()
        if teacher is not None:
            target = teacher.model(ids)[0][:, :-1]
            kl += losses.distances(model, teacher, hidden[:, :-1], target).item()
            same += losses.agreement(model, teacher, hidden[:, :-1], target).item()
        count += ids[:, 1:].numel()
    row: Row = {"bits_per_byte": entropy / count * len(tokens) / size / math.log(2)}
    return row if teacher is None else row | {"kl": kl / count, "top1": same / count}


def _windows(tokens: Sequence[int], context: int, device: torch.device) -> Iterator[Tensor]:
    """Windows [B, context + 1] of ``tokens``, each starting at the last token of the previous one; the last may be shorter."""
    ids = torch.tensor(tokens, device=device)
    full = (len(tokens) - 1) // context
    if full:
        rows = ids.unfold(0, context + 1, context)
        yield from rows.split(max(1, _BATCH // context))
    if len(tokens) - full * context > 1:
        yield ids[None, full * context :]


@torch.no_grad()
def on_tasks(model: Any, codec: Codec, options: EvaluateOptions) -> list[Row]:
    """Measure the share of prompts that the greedy continuation answers, for each task and length."""
    rows = []
    for task in options.tasks:
        for length in options.lengths:
            right = [_answers(model, prompt) for prompt in prompts(task, codec, length, options.samples, options.seed)]
            rows.append({"task": task, "length": length, "right": sum(right) / len(right), "samples": len(right)})
    return rows


def _answers(model: Any, prompt: Prompt) -> bool:
    """True if greedy decoding gives the answer."""
    ids = torch.tensor([prompt.tokens + prompt.answer[:-1]], device=model.device)
    hidden = cast(Tensor, model.model(ids)[0])[:, len(prompt.tokens) - 1 :]
    likeliest = model.lm_head(hidden)[0].argmax(-1)
    return bool(likeliest.tolist() == prompt.answer)


def decoding(model: Any, tokens: Sequence[int], options: EvaluateOptions) -> list[Row]:
    """Measure bytes of state and decoding speed of one sequence after each length of text."""
    if not options.decode:
        return []
    begun = zip(started(model, tokens, options), options.lengths, strict=True)
    return [timed(written, length, model.device) for written, length in begun]


def started(model: Any, tokens: Sequence[int], options: EvaluateOptions) -> Iterator[Any]:
    """Begin to decode after each length of ``tokens``: the first steps compile and capture."""
    for length in options.lengths:
        prompt = [tokens[i % len(tokens)] for i in range(length)]
        written = stream(model, prompt, max_new_tokens=options.decode + 8, temperature=0.0)
        for _ in range(8):
            next(written)
        yield written


def timed(written: Any, length: int, device: torch.device) -> Row:
    """Decode the rest of the stream ``written``, which began after ``length`` tokens."""
    _wait(device)
    start = time.perf_counter()
    made = sum(1 for _ in written)
    _wait(device)
    return {"length": length, "state_bytes": written.state.nbytes, "tokens_per_s": made / (time.perf_counter() - start)}


def same_tokens(codec: Codec, other: Codec) -> bool:
    """True if both codecs encode text to the same tokens."""
    if isinstance(codec, ByteCodec) or isinstance(other, ByteCodec):
        return type(codec) is type(other)
    return cast(Any, codec).content == cast(Any, other).content


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
