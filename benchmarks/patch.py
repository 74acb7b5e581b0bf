"""Benchmark of transformers' own models with our ops and without: ``python -m benchmarks.patch`` (CPU), ``... --device cuda`` (beside fla).

For each family a small model of its published mixer sizes, random weights: milliseconds of a prefill and of sixteen decoded tokens,
patched and not in turn, and the medians of the ratios of neighbours. Both fill a cache, as ``generate`` does. On a CPU float32 and one
row, where transformers has its own torch code; on a GPU bfloat16 and eight rows, where it uses fla if found, as the file
records. Rows are written as they come.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS

AIMS = {"kimi_linear": 10.0, "mamba": 10.0}  # speed-ups of the prefill at T 2048; others must not be slower
ROWS = {"cpu": 1, "cuda": 8}
MOST = 5  # maximum of pairs of calls
_ALL: dict[str, Any] = {"vocab_size": 1000, "num_hidden_layers": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_HYBRID: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1024}
_LINEAR = ["linear_attention"] * 3 + ["full_attention"]
_DELTA: dict[str, Any] = _HYBRID | {
    "layer_types": _LINEAR, "head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}  # fmt: skip
_FEW_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
}  # fmt: skip
_MAMBA2: dict[str, Any] = {
    "mamba_d_state": 128, "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_expand": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": _DELTA | _FEW_EXPERTS,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA | _FEW_EXPERTS,
    "olmo_hybrid": _DELTA | {"linear_num_key_heads": 8},
    "kimi_linear": _HYBRID | {
        "layer_types": _LINEAR, "num_local_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 256, "n_shared_experts": 1,
        "kv_lora_rank": 128, "qk_rope_head_dim": 32, "v_head_dim": 64, "qk_nope_head_dim": 32, "linear_head_dim": 128,
        "linear_num_heads": 4,
    },
    "mamba": {"hidden_size": 768},
    "falcon_mamba": {"hidden_size": 768},
    "jamba": _HYBRID | {
        "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 4, "attn_layer_offset": 3, "expert_layer_period": 4,
        "expert_layer_offset": 1,
    },
    "mamba2": {"hidden_size": 768, "num_heads": 24, "head_dim": 64, "n_groups": 1},
    "bamba": _HYBRID | _MAMBA2 | {"attn_layer_indices": [3]},
    "zamba2": _HYBRID | {
        "mamba_d_state": 64, "mamba_headdim": 64, "mamba_ngroups": 1, "n_mamba_heads": 16, "mamba_expand": 2, "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "mamba", "mamba", "hybrid"],
    },
    "nemotron_h": _HYBRID | {
        "layers_block_type": ["mamba", "mamba", "mamba", "attention"], "ssm_state_size": 128, "mamba_num_heads": 16, "mamba_head_dim": 64,
        "n_groups": 8, "head_dim": 64,
    },
    "granitemoehybrid": _HYBRID | _MAMBA2 | {
        "layer_types": ["mamba", "mamba", "mamba", "attention"], "num_local_experts": 2, "num_experts_per_tok": 1,
        "shared_intermediate_size": 512,
    },
    "rwkv": {"hidden_size": 768},
}  # fmt: skip


def measure(family: str, tokens: int, device: str, seconds: float) -> dict[str, Any]:
    """Measure one row; each of its two calls is repeated for about ``seconds``."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **_ALL | MODELS[family])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model = model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    ids = torch.randint(3, config.vocab_size, (ROWS[device], tokens), device=device)
    row: dict[str, Any] = {"family": family, "rows": len(ids), "tokens": tokens, "parameters": sum(t.numel() for t in model.parameters())}
    row["dtype"] = str(model.dtype).removeprefix("torch.")
    row["prefill"], row["difference"] = pairs(family, lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1), device, seconds)
    row["decode"], _ = pairs(family, _decode(model, ids[:, :64]), device, seconds)
    row["aim"] = AIMS.get(family, 1.0) if device == "cpu" else 1.0
    return row


def pairs(family: str, call: Callable[[], Any], device: str, seconds: float) -> tuple[dict[str, Any], float | None]:
    """Time ``call`` unpatched and patched in turn, and compare its logits, relative to theirs."""
    from linattn.hf.patch import patch_transformers

    times: list[tuple[float, float]] = []
    difference, end = None, 0.0
    while len(times) < 2 or (len(times) < MOST and time.perf_counter() < end):
        theirs, wanted = timed(call, device)
        with patch_transformers([family]):
            ours, got = timed(call, device)
        if not end:  # the first one warms up
            end = time.perf_counter() + seconds
            difference = None if got is None else ((got.logits - wanted.logits).norm() / wanted.logits.norm()).item()
            continue
        times.append((theirs, ours))
    return {
        "theirs_ms": round(statistics.median(theirs for theirs, _ in times) * 1e3, 3),
        "ours_ms": round(statistics.median(ours for _, ours in times) * 1e3, 3),
        "ratio": round(statistics.median(theirs / ours for theirs, ours in times), 3),
        "pairs": len(times),
    }, difference


@torch.no_grad()
def timed(call: Callable[[], Any], device: str) -> tuple[float, Any]:
    start = time.perf_counter()
    out = call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, out


def _decode(model: Any, ids: torch.Tensor, steps: int = 16) -> Callable[[], Any]:
    """Decode sixteen tokens after a short prompt, both sides in turn with one cache."""
    from linattn.hf.cache import name_of_cache

    name = "state" if model.config.model_type == "rwkv" else name_of_cache(model.forward)
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True)[name]

    def call() -> Any:
        for _ in range(steps):
            model(input_ids=ids[:, :1], use_cache=True, **{name: cache})

    return call


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.patch", description=__doc__.split("\n")[0])
    parser.add_argument("--families", default=",".join(MODELS), help="some of them, kept with --out alone")
    parser.add_argument("--device", choices=tuple(ROWS), default="cpu")
    parser.add_argument("--tokens", type=int, default=2048, help="of the prefill")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each measured call, of which a family has two")
    parser.add_argument("--quick", action="store_true", help="few tokens, two pairs, nothing kept")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file, or a folder for patch-cpu.json or patch-h200.json")
    options = parser.parse_args(arguments)
    families = options.families.split(",")
    if unknown := [name for name in families if name not in MODELS]:
        parser.error(f"--families has {', '.join(unknown)}, but must be of {', '.join(MODELS)}")
    if options.quick:
        options.tokens, options.seconds = 256, 0.0
    packages = found(options.device)
    from linattn.bench.files import command, file_for
    from linattn.report.machine import machine

    path = file_for(options.out, "patch", "cpu" if options.device == "cpu" else torch.cuda.get_device_name())
    told = command("python -m benchmarks.patch", arguments or sys.argv[1:])
    about = {"command": told, "date": time.strftime("%Y-%m-%d"), "machine": machine(), "packages": packages}
    body: dict[str, Any] = {"schema": "linattn.patch", **about, "rows": []}
    kept = options.out != RESULTS or not (options.quick or set(families) < set(MODELS))  # partial results must not replace all
    for family in families:
        try:
            row = measure(family, options.tokens, options.device, options.seconds)
        except (RuntimeError, OSError, ImportError) as error:  # for example if theirs downloads a kernel
            row = {"family": family, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(line(row), flush=True)
        body["rows"].append(row)
        if kept:
            path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return int(any("error" in row for row in body["rows"]))


def found(device: str) -> dict[str, bool]:
    """Installed packages among those that transformers uses if importable; on a GPU fla is made importable."""
    if device == "cuda":
        from linattn.bench.gpu import libraries

        place = libraries.find("fla", device)
        if isinstance(place, str):
            print(f"without fla: {place}", file=sys.stderr)
        else:
            sys.path.extend(place[1])
    return {name: importlib.util.find_spec(name) is not None for name in ("fla", "mamba_ssm", "causal_conv1d")}


def line(row: dict[str, Any]) -> str:
    """Format a row."""
    if "error" in row:
        return f"{row['family']:18} {row['error']}"
    each = ", ".join(f"{name} {row[name]['theirs_ms']:9.2f} -> {row[name]['ours_ms']:8.2f} ms" for name in ("prefill", "decode"))
    return f"{row['family']:18} {each}, {row['prefill']['ratio']:6.2f} x and {row['decode']['ratio']:5.2f} x, aim {row['aim']:g} x"


if __name__ == "__main__":
    sys.exit(main())
