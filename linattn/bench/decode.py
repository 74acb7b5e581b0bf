"""Benchmark of decoding: the captured step alone and through ``generate``, beside the time to read weights and states.

Models have random weights, which run as fast as trained ones. The floor of a row is the time to read the weights once and to read
and write the state, at the machine's memory bandwidth measured in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from linattn.generate import captured, stream
from linattn.generate.prefill import prefill
from linattn.generate.sampling import greedy
from linattn.state import State

Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Size of a model."""

    name: str
    dim: int
    layers: int = 24
    ffn_dim: int | None = None
    vocab_size: int = 32000


SIZES = {
    "tiny": Size("tiny", 64, 4, 128, 100),
    "130M": Size("130M", 768, 12),
    "340M": Size("340M", 1024, 24, 2816),
    "1.3B": Size("1.3B", 2048, 24, 5632),
}


def build(mixer: str, size: Size, device: str, dtype: torch.dtype) -> Any:
    """Build our model for transformers."""
    from linattn.hf import LinattnForCausalLM, LMConfig

    torch.manual_seed(0)
    options = {"gated_deltanet": {"heads": size.dim // 128}} if mixer == "gated_deltanet" and size.dim >= 1024 else {}
    config = LMConfig(
        vocab_size=size.vocab_size, dim=size.dim, layers=size.layers, mixer=mixer, mixer_options=options, ffn_dim=size.ffn_dim,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.device(device):
        model: Any = LinattnForCausalLM(config)
    return model.to(dtype).eval()


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def bandwidth(device: str) -> float:
    """Bytes a second of large reads or copies, whichever are faster."""
    count = (4 << 30 if device == "cuda" else 1 << 28) // 4
    x = torch.ones(count, device=device)
    y = torch.empty_like(x)
    best = 0.0
    for run, moved in ((lambda: y.copy_(x), 2 * x.nbytes), (x.sum, x.nbytes)):
        for _ in range(6):
            wait(device)
            start = time.perf_counter()
            run()
            wait(device)
            best = max(best, moved / (time.perf_counter() - start))
    return best


def weights(model: Any) -> int:
    """Bytes of weights read per token: all, but only one row of the embedding."""
    lookup = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is lookup
    return sum(p.nbytes for p in model.parameters()) - (0 if tied else lookup.nbytes)


def after(model: Any, rows: int, context: int) -> State:
    """State after ``tokens`` tokens, read by one row and copied to the others."""
    device = str(model.device)
    ids = torch.randint(model.config.vocab_size, (1, context), device=device)
    with torch.inference_mode():
        return prefill(model.model, ids)[1].fork(rows)


def step_ms(model: Any, state: State, steps: int) -> tuple[float, float, captured.Step]:
    """Milliseconds of a captured step, seconds that making it took, and the step."""
    device = model.device.type
    tokens = torch.zeros(state.rows, dtype=torch.int64, device=model.device)
    start = time.perf_counter()
    step = captured.step_of(model.model, model.lm_head, state, 1 << 20)
    if isinstance(step, str):
        raise RuntimeError(step)
    choice = captured.Choice(greedy, "greedy")
    step.load(step, state, tokens, torch.zeros_like(tokens, dtype=torch.bool), choice)
    wait(device)
    made = time.perf_counter() - start
    for _ in range(5):
        step.run()
    wait(device)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(steps):
            step.run()
        wait(device)
        times.append((time.perf_counter() - start) / steps)
    return statistics.median(times) * 1e3, made, step


def per_token(run: Callable[[int], object], few: int, many: int, device: str) -> float:
    """Milliseconds per token of ``run(tokens)``, by the difference of two runs, which excludes the prompt."""
    run(many)  # warm-up
    times: dict[int, list[float]] = {few: [], many: []}
    for _ in range(3):
        for count in (few, many):
            wait(device)
            start = time.perf_counter()
            run(count)
            wait(device)
            times[count].append(time.perf_counter() - start)
    return (min(times[many]) - min(times[few])) / (many - few) * 1e3


def streamed(model: Any, state: State, rows: int, *, sampled: bool = False) -> Callable[[int], object]:
    """Run of :func:`linattn.generate.stream`, greedy or with a temperature, top-k and top-p."""
    ids = torch.zeros(rows, 1, dtype=torch.int64, device=model.device)
    how: Row = {"temperature": 0.8, "top_k": 50, "top_p": 0.95} if sampled else {"temperature": 0}

    def run(count: int) -> None:
        for _ in stream(model, ids[0] if rows == 1 else ids, max_new_tokens=count, state=state, **how):
            pass

    return run


def generated(model: Any, ids: Tensor, **how: Any) -> Callable[[int], object]:
    """Run of transformers' ``generate``, greedy."""
    with torch.inference_mode():
        return lambda count: model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=None, do_sample=False, **how
        )


def ours(mixer: str, size: Size, rows: int, context: int, speed: float, steps: int, *, model: Any) -> Row:
    """Measure one row of ``model``: the captured step, and both ways to generate."""
    device, dtype = model.device.type, model.dtype
    with torch.inference_mode():
        state = after(model, rows, context)
    one, made, step = step_ms(model, state, steps)
    read = weights(model)
    floor = (read + 2 * state.nbytes) / speed * 1e3
    row: Row = {"library": "linattn", "model": mixer, "size": size.name, "dtype": str(dtype).removeprefix("torch."), "rows": rows}
    row |= {"context": context, "weights_bytes": read, "state_bytes": state.nbytes, "floor_ms": floor, "weights_ms": read / speed * 1e3}
    row |= {"step_ms": one, "of_floor": floor / one, "made_s": made, "how": step.how}
    row["stream_ms"] = per_token(streamed(model, state, rows), steps, 3 * steps, device)
    row["sampled_ms"] = per_token(streamed(model, state, rows, sampled=True), steps, 3 * steps, device)
    ids = torch.randint(size.vocab_size, (rows, 16), device=model.device)
    row["generate_ms"] = per_token(generated(model, ids, state=state), steps, 3 * steps, device)
    return row


def peer(library: str, name: str, size_name: str, device: str, dtype_name: str, rows: int, context: int, tokens: int) -> Row:
    """Measure one row of another library's model, through its ``generate``."""
    size, dtype = SIZES[size_name], getattr(torch, dtype_name)
    torch.manual_seed(0)
    with torch.device(device):
        model = MODELS[library](name, size).to(dtype).eval()
    row: Row = {"library": library, "model": name, "size": size_name, "dtype": dtype_name, "rows": rows, "context": context}
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    ids = torch.randint(size.vocab_size, (rows, context), device=device)
    row["weights_bytes"] = weights(model)
    with torch.inference_mode():
        row["generate_ms"] = per_token(generated(model, ids), tokens, 3 * tokens, device)
    return row


def _transformers(name: str, size: Size) -> Any:
    import transformers

    ffn = size.ffn_dim or -(-8 * size.dim // 96) * 32
    common: Row = {
        "vocab_size": size.vocab_size, "hidden_size": size.dim, "num_hidden_layers": size.layers,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    heads = {"num_attention_heads": size.dim // 64, "num_key_value_heads": size.dim // 64, "head_dim": 64}
    own: dict[str, Row] = {
        "llama": {**heads, "intermediate_size": ffn, "max_position_embeddings": 1 << 16},
        "mamba": {"num_hidden_layers": 2 * size.layers},
        "mamba2": {"num_hidden_layers": 2 * size.layers, "num_heads": size.dim // 32, "head_dim": 64, "n_groups": 1},
        "rwkv": {},
        "qwen3_next": {
            **heads, "intermediate_size": ffn, "num_experts": 0, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
            "linear_key_head_dim": size.dim // 8, "linear_value_head_dim": size.dim // 8, "max_position_embeddings": 1 << 16,
        },
    }  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **{**common, **own[name]}))


def _fla(name: str, size: Size) -> Any:
    models = import_module("fla.models")
    kind, heads = {"gla": ("GLA", 4), "gated_deltanet": ("GatedDeltaNet", size.dim // 256)}[name]
    config = getattr(models, f"{kind}Config")(
        hidden_size=size.dim, intermediate_size=size.ffn_dim, num_hidden_layers=size.layers, vocab_size=size.vocab_size, num_heads=heads
    )
    return getattr(models, f"{kind}ForCausalLM")(config)


MODELS: dict[str, Callable[[str, Size], Any]] = {"transformers": _transformers, "fla": _fla}


def same(mixer: str, device: str, dtype: torch.dtype, size: Size, rows: int, tokens: int) -> Row:
    """Compare tokens and states of the captured step with those of the uncaptured model.

    The step reads the tokens of the uncaptured model (teacher forcing), so that a different token does not change later ones.
    """
    model = build(mixer, size, device, dtype)
    with torch.inference_mode():
        state = after(model, rows, 20)
        token = torch.randint(size.vocab_size, (rows,), device=device)
        step = captured.step_of(model.model, model.lm_head, state, 1 << 20)
        if isinstance(step, str):
            raise RuntimeError(step)
        step.load(step, state, token, torch.zeros_like(token, dtype=torch.bool), captured.Choice(greedy, "greedy"))
        equal, near = 0, 0
        for _ in range(tokens):
            step.tokens.copy_(token)
            hidden, state = prefill(model.model, token[:, None], state)
            logits = model.lm_head(hidden)[:, -1].float()
            step.run()
            token = greedy(logits)
            chosen = logits.gather(1, step.tokens[:, None])[:, 0]
            equal += int((step.tokens == token).sum())
            near += int((chosen >= logits.amax(1) - 0.02 * logits.std(1)).sum())
        errors = [
            (float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)), name)
            for ours, theirs in zip(step.state.layers, state.layers, strict=True)
            for (name, a), b in zip(ours.items(), theirs.values(), strict=True)
        ]
    worst, name = max(errors)
    count = rows * tokens
    return {"model": mixer, "dtype": str(dtype).removeprefix("torch."), "rows": rows, "tokens": count, "equal": equal, "near": near,
            "state_error": worst, "state": name, "how": step.how}  # fmt: skip


def kernels(model: Any, rows: int, most: int = 14) -> list[str]:
    """Kernels of a captured step on a GPU: launches, total microseconds, and names, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    step = step_ms(model, after(model, rows, 16), 10)[2]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            step.run()
        torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.device_type.name == "CUDA"]
    events.sort(key=lambda e: -e.self_device_time_total)
    total, count = sum(e.self_device_time_total for e in events) / 3, sum(e.count for e in events) / 3
    each = [f"    {e.count / 3:5.0f} x {e.self_device_time_total / e.count:8.2f} us  {e.key[:90]}" for e in events[:most]]
    return [f"    {count:.0f} launches, {total:.0f} us of kernels in a step", *each]


def line(row: Row) -> str:
    """Format a row."""
    what = f"{row['library']} {row['model']} {row['size']} {row['dtype']}, {row['rows']} rows after {row['context']:,} tokens"
    if "step_ms" not in row:
        return f"{what}: generate {row['generate_ms']:.3f} ms a token"
    return (
        f"{what}: step {row['step_ms']:.3f} ms ({row['of_floor']:.0%} of the floor {row['floor_ms']:.3f}), stream {row['stream_ms']:.3f}, "
        f"sampled {row['sampled_ms']:.3f}, generate {row['generate_ms']:.3f}; made in {row['made_s']:.1f} s, {row['how']}"
    )
