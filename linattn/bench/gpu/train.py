"""Command ``linattn bench train``: whole training steps of a language model of 340 to 400 million parameters, tokens per second.

bfloat16 weights and activations (our time constants stay float32), AdamW in its fused form, random tokens, no
checkpointing, equal for every library. Our Gated DeltaNet has 8 heads of keys, of 128 channels, and 16 of
values, so that it is comparable with fla's DeltaNet, which has 8 heads of 128.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from linattn.bench.files import file_for
from linattn.bench.gpu import libraries
from linattn.bench.gpu.measure import quick_tuning
from linattn.bench.gpu.record import Record, about
from linattn.bench.gpu.worker import Failure, Worker
from linattn.models.loss import TokenLoss, chunk_of

KEY = ("library", "model", "compiled")
# The models of each library, in the order in which they are measured.
MODELS = {
    "linattn": ("gla", "gated_deltanet", "linear_transformer", "retnet", "mamba2"),
    "transformers": ("llama",),
    "fla": ("gla", "delta_net", "gated_deltanet"),
}
OPTIONS = {"gated_deltanet": {"heads": 8}}  # options other than the mixers' defaults
TIMEOUT = 600.0
WARM = ("fla",)  # tunes for minutes, so it keeps its compiler cache, as `empty_cache` in the row says


@dataclass(frozen=True)
class Size:
    """Size of a model and of its batches."""

    layers: int = 24
    dim: int = 1024
    ffn_dim: int = 2816
    vocab_size: int = 32000
    batch: int = 8
    tokens: int = 4096
    steps: int = 10


TINY = Size(layers=2, dim=64, ffn_dim=128, vocab_size=100, batch=2, tokens=32, steps=2)


def run(
    *, quick: bool = False, device: str = "cuda", models: tuple[str, ...] = (), peers: tuple[str, ...] | None = None,
    seconds: float | None = None, out: Path | None = None,
) -> None:  # fmt: skip
    """Measure the models of each library, eager and compiled, and add the rows to ``out`` (JSON, or a folder for it) if given."""
    from linattn.report.progress import Progress

    say, started = Progress(True).say, time.monotonic()
    turns = _turns(models, peers, quick)
    facts = about(device)
    versions = _versions({library for library, _, _ in turns}, device, say)
    with Record(out and file_for(out, "train", facts["card"]), KEY, facts) as record:
        for library, model, compiled in turns:
            left = float("inf") if seconds is None else seconds - (time.monotonic() - started)
            if library not in versions or left <= 0:
                continue
            version, folders = versions[library]
            row = {"library": library, "version": version, "model": model, "compiled": compiled}
            row |= _row(folders, library, model, compiled, TINY if quick else Size(), device, min(TIMEOUT, left))
            say(_line(row))
            record.add(row)


def _turns(models: tuple[str, ...], peers: tuple[str, ...] | None, quick: bool) -> list[tuple[str, str, bool]]:
    known = {model for names in MODELS.values() for model in names}
    others = [name for name in MODELS if name != "linattn"]
    if unknown := [name for name in models if name not in known]:
        raise ValueError(f"--models must be among {', '.join(sorted(known))}, but has {', '.join(unknown)}")
    if unknown := [name for name in peers or () if name not in others]:
        raise ValueError(f"--peers must be among {', '.join(others)}, but has {', '.join(unknown)}")
    return [
        (library, model, compiled)
        for library, names in MODELS.items()
        if library == "linattn" or peers is None or library in peers
        for model in names
        if not models or model in models
        for compiled in (False, True)
        if not (compiled and (quick or library == "fla"))  # fla's ops disable the compiler
    ]


def _versions(names: set[str], device: str, say: Callable[[str], None]) -> dict[str, tuple[str, list[str]]]:
    """Versions of the installed libraries and the folders for their processes."""
    import transformers

    versions: dict[str, tuple[str, list[str]]] = {"transformers": (transformers.__version__, [])}
    for name in names - {"transformers"}:
        found = libraries.find(name, device, libraries.FLA_MODELS)
        if isinstance(found, str):
            say(f"without {name}: {found}")
        else:
            versions[name] = found
    return versions


def _row(folders: list[str], library: str, model: str, compiled: bool, size: Size, device: str, timeout: float) -> dict[str, Any]:
    row: dict[str, Any] = {"empty_cache": library not in WARM, "tokens_per_second": None}
    with tempfile.TemporaryDirectory() as cache:
        environment = {"TRITON_CACHE_DIR": cache, "TORCHINDUCTOR_CACHE_DIR": cache} if row["empty_cache"] else {}
        with Worker(folders, environment) as worker:
            try:
                return row | worker.call(train, library, model, compiled, size, device, timeout=timeout)
            except Failure as failure:
                return row | {"failure": failure.kind, "message": str(failure)}


def step_of(library: str, model_name: str, compiled: bool, size: Size, device: str) -> tuple[Callable[[], None], torch.nn.Module]:
    """Make a training step, which does not wait for a GPU, and its model."""
    torch.manual_seed(0)
    model = build(library, model_name, size).to(device, torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    ids = torch.randint(size.vocab_size, (size.batch, size.tokens), device=device)
    if device == "cuda" and library == "fla":
        quick_tuning()
    if library == "linattn":  # the loss of `linattn train`, which never holds the logits of all tokens
        tokens = size.batch * size.tokens
        model.token_loss = TokenLoss(chunk_of(tokens, size.vocab_size), compile=compiled)  # type: ignore[assignment]
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        forward(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model


def seconds_of(step: Callable[[], object], steps: int, device: str) -> float:
    """Seconds of a step, of ``steps`` that a GPU's queue takes one after the other, as in training."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - start) / steps


def train(library: str, model_name: str, compiled: bool, size: Size, device: str) -> dict[str, Any]:
    """Time the first step and then the mean of ``size.steps`` steps, in a process of its own."""
    step, model = step_of(library, model_name, compiled, size, device)
    parameters = sum(p.numel() for p in model.parameters())
    first = seconds_of(step, 1, device)
    seconds_of(step, 3, device)
    seconds = seconds_of(step, size.steps, device)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    figures = {"parameters": parameters, "first_step_s": first, "step_ms": seconds * 1e3, "peak_gb": peak, **asdict(size)}
    return figures | {"tokens_per_second": size.batch * size.tokens / seconds}


def build(library: str, model: str, size: Size) -> torch.nn.Module:
    """Build a language model that takes ``input_ids`` and ``labels`` and returns a ``loss``."""
    if library == "linattn":
        from linattn.hf import LinattnForCausalLM, LMConfig

        options = {name: given for name, given in OPTIONS.items() if name == model}
        return LinattnForCausalLM(
            LMConfig(
                vocab_size=size.vocab_size, dim=size.dim, layers=size.layers, mixer=model, mixer_options=options,
                ffn_dim=size.ffn_dim, use_cache=False,
            )
        )  # fmt: skip
    sizes: dict[str, Any] = {"hidden_size": size.dim, "intermediate_size": size.ffn_dim, "num_hidden_layers": size.layers}
    common = sizes | {"vocab_size": size.vocab_size, "use_cache": False}
    if library == "transformers":
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**common, num_attention_heads=size.dim // 64, max_position_embeddings=size.tokens))  # SDPA
    models = import_module("fla.models")
    name, heads = {"gla": ("GLA", 4), "delta_net": ("DeltaNet", 8), "gated_deltanet": ("GatedDeltaNet", 4)}[model]
    config = getattr(models, f"{name}Config")(**common, num_heads=heads)
    return getattr(models, f"{name}ForCausalLM")(config)


def _line(row: dict[str, Any]) -> str:
    what = f"{row['library']} {row['model']}{' compiled' if row['compiled'] else ''}"
    if row["tokens_per_second"] is None:
        return f"{what}: {row['failure']} ({row['message'][:200]})"
    memory = "" if row["peak_gb"] is None else f", peak {row['peak_gb']:.1f} GB"
    speed = f"{row['tokens_per_second']:.0f} tokens/s, step {row['step_ms']:.0f} ms, first step {row['first_step_s']:.1f} s"
    return f"{what}: {speed}{memory}, {row['parameters'] / 1e6:.0f}M parameters"
