"""Command ``linattn bench train --device cpu``: training steps of byte-level language models of 7 million parameters, beside transformers'.

Steps of the models of one dtype alternate, so that other load affects all of them; reported are the
median of the tokens per second, and the median of the ratios to Llama's step of the same round. ``linattn, portable`` is the same
model without the native kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linattn.bench.files import file_for
from linattn.bench.gpu.record import Record, about
from linattn.ops import dispatch

KEY = ("library", "model", "dtype")
OURS = ("linattn", "linattn, portable")
MODELS = (
    ("linattn", "gla"),
    ("linattn", "gated_deltanet"),
    ("linattn, portable", "gla"),
    ("linattn, portable", "gated_deltanet"),
    ("transformers", "llama"),
    ("transformers", "qwen3_next"),
    ("transformers", "mamba2"),
)
BASE = ("transformers", "llama")  # baseline of all rows
FFN = {"gated_deltanet": 0.55, "qwen3_next": 0.89}  # feed-forward width relative to Llama's, for equal parameters
DTYPES = (torch.float32, torch.bfloat16)  # of weights and activations
SLOW = 20.0  # seconds above which a step is not repeated


@dataclass(frozen=True)
class Size:
    """Size of the models and of their batches."""

    dim: int = 256
    layers: int = 8
    ffn_dim: int = 768
    vocab_size: int = 256
    batch: int = 8
    tokens: int = 512
    rounds: int = 7


TINY = Size(dim=64, layers=2, ffn_dim=128, batch=2, tokens=32, rounds=2)


def run(*, quick: bool = False, models: tuple[str, ...] = (), out: Path | None = None) -> None:
    """Measure, print a table, and add the rows to ``out`` (JSON, or a folder for it) if given; ``models`` are names, none: all."""
    from linattn.report.progress import Progress

    if unknown := [name for name in models if name not in {name for _, name in MODELS}]:
        raise ValueError(f"--models must be among {', '.join(dict.fromkeys(name for _, name in MODELS))}, but has {', '.join(unknown)}")
    chosen = [pair for pair in MODELS if not models or pair[1] in models or pair == BASE]
    size, facts, rows = TINY if quick else Size(), about("cpu"), []
    with (
        Record(out and file_for(out, "train", facts["card"]), KEY, facts) as record,
        Progress(True).counted("training", len(chosen) * len(DTYPES)) as advance,
    ):
        for dtype in DTYPES:
            for row in measure(chosen, dtype, size):
                rows.append(row)
                record.add(row)
                advance(_line(row))
    _print(rows)


def measure(chosen: list[tuple[str, str]], dtype: torch.dtype, size: Size) -> list[dict[str, Any]]:
    """Measure a row for each model: the median of its steps, and of the ratios to :data:`BASE`'s step of the same round."""
    steps = [step_of(library, name, dtype, size) for library, name in chosen]
    first = [step() for step, _ in steps]
    seconds: list[list[float]] = [[] for _ in steps]
    for number in range(size.rounds):
        for taken, (step, _), begun in zip(seconds, steps, first, strict=True):
            if number == 0 or begun < SLOW:
                taken.append(step())
    base = seconds[chosen.index(BASE)]
    return [
        {
            "library": library,
            "model": name,
            "dtype": str(dtype).removeprefix("torch."),
            "batch": size.batch,
            "tokens": size.tokens,
            "parameters": parameters,
            "rounds": len(taken),
            "step_ms": statistics.median(taken) * 1e3,
            "tokens_per_second": size.batch * size.tokens / statistics.median(taken),
            "times_llama": statistics.median(b / t for b, t in zip(base, taken, strict=False)),
        }
        for (library, name), (_, parameters), taken in zip(chosen, steps, seconds, strict=True)
    ]


def step_of(library: str, name: str, dtype: torch.dtype, size: Size) -> tuple[Callable[[], float], int]:
    """Make a training step, which returns its seconds, and count the parameters."""
    torch.manual_seed(0)
    model = build(library, name, size).to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    ids = torch.randint(size.vocab_size, (size.batch, size.tokens), generator=torch.Generator().manual_seed(1))

    def step() -> float:
        with without_kernels() if library == OURS[1] else nullcontext():
            start = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return time.perf_counter() - start

    return step, sum(p.numel() for p in model.parameters())


def build(library: str, name: str, size: Size) -> nn.Module:
    """Build a language model that takes ``input_ids`` and ``labels`` and returns a ``loss``."""
    inner = 8 * round(size.ffn_dim * FFN.get(name, 1) / 8)
    if library in OURS:
        from linattn.hf import LinattnForCausalLM, LMConfig

        common: dict[str, Any] = {"vocab_size": size.vocab_size, "dim": size.dim, "layers": size.layers, "ffn_dim": inner}
        return LinattnForCausalLM(LMConfig(**common, mixer=name, mixer_options={name: {"heads": size.dim // 64}}, use_cache=False))
    import transformers

    heads: dict[str, Any] = {"num_attention_heads": size.dim // 64, "num_key_value_heads": size.dim // 64}
    linear: dict[str, Any] = {"linear_num_key_heads": heads["num_attention_heads"], "linear_num_value_heads": heads["num_attention_heads"]}
    common = {"vocab_size": size.vocab_size, "hidden_size": size.dim, "use_cache": False}
    layers: dict[str, Any] = {"num_hidden_layers": size.layers}
    config = {
        "llama": lambda: transformers.LlamaConfig(**common, **layers, **heads, intermediate_size=inner),
        "qwen3_next": lambda: transformers.Qwen3NextConfig(
            **common, **layers, **heads, **linear, head_dim=64, linear_key_head_dim=64, linear_value_head_dim=64,
            intermediate_size=inner, num_experts=0, layer_types=["linear_attention"] * size.layers,
        ),
        # Its block has no feed-forward, so twice as many blocks have equal parameters.
        "mamba2": lambda: transformers.Mamba2Config(
            **common, num_hidden_layers=2 * size.layers, num_heads=size.dim // 32, head_dim=64, state_size=64, n_groups=1, chunk_size=64,
        ),
    }[name]()  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa" if name != "mamba2" else None)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Context in which all operations run in their portable form, as without a compiler."""
    known, dispatch.BACKENDS = dispatch.BACKENDS, ("torch", "reference")
    try:
        yield
    finally:
        dispatch.BACKENDS = known


def _line(row: dict[str, Any]) -> str:
    speed = f"{row['tokens_per_second']:,.0f} tokens/s, {row['times_llama']:.2f} x Llama"
    return f"{row['library']} {row['model']} {row['dtype']}: {speed}, {row['parameters'] / 1e6:.1f}M parameters"


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("library", "model", "dtype", "tokens/s", "x Llama", "step, ms", "parameters, M")
    for r in rows:
        figures = (f"{r['tokens_per_second']:,.0f}", f"{r['times_llama']:.2f}", f"{r['step_ms']:.0f}", f"{r['parameters'] / 1e6:.1f}")
        table.add_row(r["library"], r["model"], r["dtype"], *figures)
    Console().print(table)
