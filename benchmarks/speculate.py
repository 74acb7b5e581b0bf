"""Benchmark of speculative decoding: speed against plain decoding on three kinds of text, and random patterns of accepted drafts.

``python -m benchmarks.speculate`` measures models with random weights whose choices follow a given text, so that acceptance is that of
a model that writes this text: repetitive text, code rewritten with edits, and random tokens.
``--patterns 10000`` verifies drafts of random lengths instead and keeps random parts of them, for every causal mixer, and compares hidden
states with decoding token by token.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import RESULTS, destination, positive
from linattn import mixers
from linattn.bench import decode
from linattn.generate.captured import Choice
from linattn.generate.drafter import Source
from linattn.generate.noise import Rule
from linattn.generate.prefill import prefill
from linattn.generate.speculate import LEAD, Speculated
from linattn.generate.tokens import Tokens
from linattn.generate.verify import Chunk
from linattn.generate.verify_graph import LONGEST as CALLS
from linattn.models import LanguageModel, LMConfig

KEY = ("what", "mixer", "size", "dtype", "rows", "text", "dim")
LONGEST_CALL = CALLS[-1]
LONGEST = 8  # tokens of a row in a verification of --patterns
ROWS, ROUNDS = 10, 50  # of --patterns; 100 rows take up to 30 times as long in calls of quadratic time


def texts(vocabulary: int, rows: int, prompt: int, new: int) -> dict[str, list[list[int]]]:
    """Texts of ``prompt`` + ``new`` tokens for each row: repeating, code with edits, and without any repetition.

    Code is from Python's library, a token per word, sign or space; after the prompt it is repeated with three words changed.
    """
    words: dict[str, int] = {}

    def coded(text: str) -> list[int]:
        return [words.setdefault(word, len(words)) % vocabulary for word in re.findall(r"[A-Za-z]+| ?[^\sA-Za-z]|\s+", text)]

    draw = random.Random(0)  # noqa: S311
    found: dict[str, list[list[int]]] = {"repeating": [], "code": [], "new": []}
    modules = itertools.cycle([argparse, inspect, statistics, random])
    for _ in range(rows):
        period = [draw.randrange(vocabulary) for _ in range(prompt // 2)]
        found["repeating"].append((period * (2 + new // len(period) + 1))[: prompt + new])
        source = inspect.getsource(next(modules))[3000:]
        edited = coded(source.replace("self", "this").replace("return", "yield").replace("name", "title"))
        found["code"].append(coded(source)[:prompt] + (edited[:prompt] * (1 + new // prompt))[:new])
        found["new"].append([draw.randrange(vocabulary) for _ in range(prompt + new)])
    return found


class Scripted:
    """Choice of the tokens of a text, after the work of a greedy choice."""

    def __init__(self, tokens: Sequence[Sequence[int]], prompt: int, device: str) -> None:
        text = torch.tensor(tokens)
        self.tokens = torch.cat([text, text[:, -2 * LEAD :]], 1)  # rows that are ahead of others continue beyond the end
        self.prompt, self.device = prompt, device
        self._ids = self.tokens[:, :prompt].to(device)
        self._next = self.tokens[:, prompt].to(device)  # a step's choice, which a CUDA graph reads

        self._several = torch.zeros(len(tokens), LONGEST_CALL, dtype=torch.int64, device=device)  # the same of a verification

    def _choose(self, logits: Tensor) -> Tensor:
        return torch.where(logits.argmax(-1) < 0, 0, self._next)

    def _choose_several(self, logits: Tensor) -> Tensor:
        return torch.where(logits.argmax(-1) < 0, 0, self._several[:, : logits.shape[1]])

    def plain(self, model: Any, count: int) -> Tokens:
        """Plain decoding, whose time does not depend on its tokens; it always writes one token of the text."""
        return Tokens(model, self._ids, count, Choice(self._choose, self), None, single=False)

    def speculated(self, model: Any, count: int) -> Speculated:
        """Speculative decoding, written by the text."""
        tokens = Speculated(model, self._ids, count, Rule(), (), None, Source(), single=False)

        def chosen(hidden: Tensor, rows: Sequence[Sequence[int]]) -> list[list[int]]:
            model.lm_head(hidden).argmax(-1).tolist()
            return [self.tokens[b, (start := self.prompt + len(tokens._made[b])) : start + len(row)].tolist() for b, row in enumerate(rows)]

        def refill(_: int = 0) -> None:
            places = [self.prompt + len(made) for made in tokens._made]
            self._next.copy_(self.tokens[torch.arange(len(places)), torch.tensor(places)])

        def verification(longest: int, find: Any = tokens._captured_verification) -> Any:
            starts = [self.prompt + len(made) for made in tokens._made]
            self._several.copy_(torch.stack([self.tokens[b, n : n + LONGEST_CALL] for b, n in enumerate(starts)]))
            return find(longest)

        tokens._captured_verification, tokens._several = verification, self._choose_several  # type: ignore[method-assign]
        tokens._chosen = chosen  # type: ignore[method-assign]
        tokens._refill = refill  # type: ignore[method-assign]
        tokens._choice = Choice(self._choose, self)
        return tokens


def seconds(tokens: Iterator[Any], device: str) -> float:
    """Seconds of all but the first tokens; on a CPU processor time, to exclude other programs."""
    for _ in range(4):
        next(tokens)
    decode.wait(device)
    now = time.process_time if device == "cpu" else time.perf_counter
    start = now()
    for _ in tokens:
        pass
    decode.wait(device)
    return now() - start


def compare(model: Any, script: Scripted, count: int, turns: int) -> dict[str, Any]:
    """Median ratio of plain to speculative decoding over alternating runs, and the drafts of the last."""
    ratios, rates = [], []
    for turn in range(turns + 1):
        plain, tokens = seconds(script.plain(model, count), script.device), script.speculated(model, count)
        ratio = plain / seconds(tokens, script.device)
        if turn:  # the first captures steps
            ratios.append(ratio)
            rates.append(plain / (count - 4))
    drafted = {"calls": tokens.verified, "drafted": tokens.drafted, "accepted": tokens.accepted}
    return {"speedup": statistics.median(ratios), "least": min(ratios), "plain_ms": statistics.median(rates) * 1e3, **drafted}


def speeds(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of all models, batches and texts."""
    for mixer, dtype in itertools.product((options.mixers or "gla,gated_deltanet,mamba2").split(","), options.dtypes.split(",")):
        model = decode.build(mixer, decode.SIZES[options.size], options.device, getattr(torch, dtype))
        for rows in map(int, options.rows.split(",")):
            written = texts(model.config.vocab_size, rows, options.prompt, options.new)
            for text in options.texts.split(","):
                row = {"what": "speed", "mixer": mixer, "size": options.size, "dtype": dtype, "rows": rows, "text": text}
                yield row | compare(model, Scripted(written[text], options.prompt, options.device), options.new, options.turns)


@torch.no_grad()
def patterns(mixer: str, rows: int, rounds: int, seed: int = 0, **config: Any) -> dict[str, Any]:
    """Verify ``rounds`` times drafts of random lengths in ``rows`` rows and keep random parts of them.

    Returns the largest error ‖a − b‖ / ‖b‖ of a kept token's hidden state against decoding token by token, and whether the bits of all
    states are independent of rejected tokens.
    """
    draw = random.Random(seed)  # noqa: S311
    torch.manual_seed(seed)
    model = LanguageModel(LMConfig(**{"vocab_size": 40, "dim": 32, "layers": 2, "mixer": mixer, **config})).double().eval()

    def some(n: int) -> list[int]:
        return [draw.randrange(40) for _ in range(n)]

    kept_tokens: list[list[int]] = [some(5) for _ in range(rows)]
    prompt, hidden = prefill(model.model, torch.tensor(kept_tokens))[1], []
    state, same = prompt, True
    for number in range(rounds):
        drafts = [some(draw.randint(1, LONGEST)) for _ in range(rows)]
        kept = [draw.randint(1, len(draft)) for draft in drafts]
        chunk = Chunk(model.model, drafts, state)
        hidden.append([h[:n] for h, n in zip(chunk.hidden.split([len(d) for d in drafts]), kept, strict=True)])
        after = chunk.advance(kept)
        if number % 10 == 0:
            other = Chunk(model.model, [[*d[:n], *some(len(d) - n)] for d, n in zip(drafts, kept, strict=True)], state).advance(kept)
            same = same and all(torch.equal(t, o[name]) for a, o in zip(after.layers, other.layers, strict=True) for name, t in a.items())
        state = after
        kept_tokens = [[*row, *draft[:n]] for row, draft, n in zip(kept_tokens, drafts, kept, strict=True)]
    return {"error": _error(model, prompt, kept_tokens, hidden), "bits": same, "patterns": rows * rounds}


def _error(model: Any, state: Any, tokens: Sequence[Sequence[int]], hidden: list[list[Tensor]]) -> float:
    """Largest error of ``hidden`` against decoding ``tokens`` one by one from ``state``, after the first five."""
    got = [torch.cat([row[b] for row in hidden]) for b in range(len(tokens))]
    worst = 0.0
    for t in range(max(map(len, got))):
        real = torch.tensor([t < len(row) for row in got])
        step = torch.tensor([[row[5 + t] if t + 5 < len(row) else 0] for row in tokens])
        y, state = model.model(step, state, return_state=True, mask=None if bool(real.all()) else real[:, None])
        for b in real.nonzero().flatten().tolist():
            worst = max(worst, float((got[b][t] - y[b, 0]).norm() / y[b, 0].norm()))
    return worst


def causal() -> list[str]:
    """Names of the mixers that a language model can have."""
    return [name for name in mixers.available() if mixers.info(name).resumable]


def drawn(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of ``--patterns`` for each mixer, from independent batches distributed over processes."""
    batches = -(-options.patterns // (ROWS * ROUNDS))
    results: dict[str, list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(options.workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        names = options.mixers.split(",") if options.mixers else causal()
        mixer_of = {pool.submit(_batch, mixer, seed): mixer for mixer in names for seed in range(batches)}
        for each in as_completed(mixer_of):
            mixer = mixer_of[each]
            done = results.setdefault(mixer, [])
            done.append(each.result())
            if len(done) == batches:
                yield joined_row(mixer, done)


def _batch(mixer: str, seed: int) -> dict[str, Any]:
    start = time.process_time()
    return patterns(mixer, ROWS, ROUNDS, seed) | {"seconds": time.process_time() - start}


def joined_row(mixer: str, batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Row of a mixer: the largest error of its ``batches`` and whether the bits of all were the same."""
    return {
        "what": "patterns", "mixer": mixer, "dtype": "float64", "rows": ROWS, "dim": 32, "rounds": ROUNDS,
        "error": max(batch["error"] for batch in batches), "bits": all(batch["bits"] for batch in batches),
        "patterns": sum(batch["patterns"] for batch in batches), "seconds": round(sum(batch["seconds"] for batch in batches), 1),
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    if row["what"] == "patterns":
        bits = "bits of states do not depend on what is rejected" if row["bits"] else "states depend on what is rejected"
        return f"{row['mixer']:22} {row['patterns']:6} patterns, error {row['error']:.1e}, {bits}"
    what = f"{row['mixer']:15} {row['size']} {row['dtype']:8} {row['rows']:2} rows, {row['text']:9}"
    return f"{what} {row['speedup']:.2f} x (least {row['least']:.2f}), {row['calls']} calls, {row['accepted']} of {row['drafted']} accepted"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculate", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", help="of the speeds; patterns run on a CPU")
    parser.add_argument("--mixers", help="default: gla,gated_deltanet,mamba2; of --patterns every causal one")
    parser.add_argument("--size", default="130M", choices=decode.SIZES)
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--texts", default="repeating,code,new")
    parser.add_argument("--prompt", type=positive, default=512, help="tokens")
    parser.add_argument("--new", type=positive, default=256, help="tokens")
    parser.add_argument("--turns", type=positive, default=3, help="alternating runs that count")
    parser.add_argument("--patterns", type=int, default=0, help="random patterns of each mixer, in place of speeds")
    parser.add_argument("--workers", type=positive, default=1, help="processes of --patterns, of one thread each")
    parser.add_argument("--quick", action="store_true", help="nothing kept")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file, or a folder for speculate-MACHINE.json")
    options = parser.parse_args(arguments)
    from linattn.bench.files import command
    from linattn.bench.gpu.record import Record

    facts, path = destination(parser, "speculate", options.device, options.out)
    with Record(None if options.quick else path, KEY, facts) as record:
        record.body["runs"][-1]["command"] = command("python -m benchmarks.speculate", arguments or sys.argv[1:])
        for row in drawn(options) if options.patterns else speeds(options):
            record.add(row)
            print(line(row), flush=True)
    print("nothing kept" if options.quick else path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
