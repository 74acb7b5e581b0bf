"""Libraries that are measured: ours, and for each kind of recurrence another library's call for the same result."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn.bench import wheels
from linattn.bench.gpu.cases import Case

Run = Callable[[dict[str, Tensor]], Tensor]
FLA = ("fla-core==0.6.0", "einops==0.8.2")
FLA_MODELS = ("flash-linear-attention==0.6.0", *FLA)
FLASH_QLA = (
    "flash-qla==0.1.3", "tilelang==0.1.15", "apache-tvm-ffi==0.1.12", "torch-c-dlpack-ext==0.1.5", "z3-solver==4.15.4", "cloudpickle==3.1.3"
)  # fmt: skip
UNPACKED = {"fla": FLA, "flash-qla": FLASH_QLA}  # libraries used from unpacked wheels; the version is the first one's


@dataclass(frozen=True)
class Call:
    """Function of another library: ``arguments`` maps its parameters to our names; q, k and v keep theirs."""

    module: str
    function: str
    arguments: dict[str, str] = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    common: tuple[str, ...] = ("q", "k", "v")

    def load(self) -> Run:
        """Load the call as a function of our tensors."""
        function = getattr(import_module(self.module), self.function)
        names = {name: name for name in self.common} | self.arguments

        def run(x: dict[str, Tensor]) -> Tensor:
            scale = {} if "b" in x else {"scale": x["k"].shape[-1] ** -0.5}
            out = function(**{theirs: x[ours] for theirs, ours in names.items()}, **scale, **self.options)
            return out[0] if isinstance(out, tuple) else out

        return run


_RWKV = ("k", "v")
FLA_CALLS = {
    "none": Call("fla.ops.linear_attn", "chunk_linear_attn", options={"normalize": False}),
    "constant": Call("fla.ops.retention", "chunk_retention"),  # the same decays, built in
    "head": Call("fla.ops.simple_gla", "chunk_simple_gla", {"g": "decay"}),
    "channel": Call("fla.ops.gla", "chunk_gla", {"g": "decay"}),
    "rwkv6": Call("fla.ops.rwkv6", "chunk_rwkv6", {"r": "q", "w": "decay", "u": "bonus"}, common=_RWKV),
    "delta": Call("fla.ops.delta_rule", "chunk_delta_rule", {"beta": "beta"}),
    "gated_delta": Call("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", {"g": "decay", "beta": "beta"}),
    "kda": Call("fla.ops.kda", "chunk_kda", {"g": "decay", "beta": "beta"}),
    "erase": Call("fla.ops.rwkv7", "chunk_rwkv7", {"r": "q", "w": "decay", "a": "read", "b": "write"}, common=_RWKV),
    "scan": Call("fla.ops.hgrn", "chunk_hgrn", {"x": "b", "g": "decay"}, common=()),
}
FLASH_QLA_CALL = Call("flash_qla", "chunk_gated_delta_rule", {"g": "decay", "beta": "beta"})
_STATE = {"output_final_state": True}
FLA_STEPS = {
    "head": Call("fla.ops.simple_gla", "fused_recurrent_simple_gla", {"g": "decay", "initial_state": "state"}, _STATE),
    "channel": Call("fla.ops.gla", "fused_recurrent_gla", {"gk": "decay", "initial_state": "state"}, _STATE),
    "delta": Call("fla.ops.delta_rule", "fused_recurrent_delta_rule", {"beta": "beta", "initial_state": "state"}, _STATE),
    "gated_delta": Call(
        "fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule", {"g": "decay", "beta": "beta", "initial_state": "state"}, _STATE
    ),
    "kda": Call("fla.ops.kda", "fused_recurrent_kda", {"g": "decay", "beta": "beta", "initial_state": "state"}, _STATE),
    "erase": Call(
        "fla.ops.rwkv7", "fused_recurrent_rwkv7",
        {"r": "q", "w": "decay", "a": "read", "b": "write", "initial_state": "state"}, _STATE, _RWKV,
    ),
}  # fmt: skip


def ours(x: dict[str, Tensor]) -> Any:
    """Call of linattn for any family: the tensors determine the recurrence. A step returns its state too."""
    from linattn.ops import diagonal_scan, linear_attention, selective_scan

    if "A" in x:
        return selective_scan(x["x"], x["dt"], x["A"], x["B"], x["C"])
    if "b" in x:
        return diagonal_scan(x["decay"], x["b"])
    return linear_attention(
        x["q"], x["k"], x["v"], decay=x.get("constant", x.get("decay")), beta=x.get("beta"), bonus=x.get("bonus"),
        erase=(x["read"], x["write"]) if "read" in x else None, initial_state=x.get("state"), return_state="state" in x,
    )  # fmt: skip


def _linattn(case: Case) -> Run | None:
    if case.family == "softmax":
        return None
    return (lambda x: ours(x)[0]) if case.shape.T == 1 else ours


def _fla(case: Case) -> Run | None:
    call = (FLA_STEPS if case.shape.T == 1 else FLA_CALLS).get(case.family)
    return None if call is None else call.load()


def _torch(case: Case) -> Run | None:
    if case.family != "softmax":
        return None

    def run(x: dict[str, Tensor]) -> Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in "qkv")
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return run


def _mamba(case: Case) -> Run | None:
    """Call of Mamba's scan, or of state space duality with equal decays by A = -1 and Δ = -decay, which also weights v by Δ."""
    if case.shape.T == 1:
        return None
    if case.family == "selective_scan":
        selective = import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_fn
        return lambda x: selective(*(x[n] if n == "A" else x[n].transpose(1, 2) for n in ("x", "dt", "A", "B", "C"))).transpose(1, 2)
    if case.family != "head":
        return None
    scan = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined

    def run(x: dict[str, Tensor]) -> Tensor:
        minus_one = -torch.ones(x["v"].shape[2], device=x["v"].device)
        return scan(x["v"], -x["decay"], minus_one, x["k"], x["q"], chunk_size=256)

    return run


def _flash_qla(case: Case) -> Run | None:
    return FLASH_QLA_CALL.load() if takes("flash-qla", case) else None


# name -> function that returns the call of a case, None if the library has none; runs in the library's own process
LIBRARIES: dict[str, Callable[[Case], Run | None]] = {
    "linattn": _linattn, "torch": _torch, "fla": _fla, "mamba-ssm": _mamba, "flash-qla": _flash_qla
}  # fmt: skip


def same(library: str, case: Case) -> bool:
    """True if ``library`` computes our result; attention and Mamba-2's weighting by Δ do not."""
    return library in ("fla", "flash-qla") or (library == "mamba-ssm" and case.family == "selective_scan")


def laid_out(library: str, case: Case, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy ``x`` to the memory layout of ``library``: mamba-ssm's scan has time last and copies other layouts."""
    if library != "mamba-ssm" or case.family != "selective_scan":
        return x
    return {name: t if name == "A" else t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in x.items()}


def takes(library: str, case: Case) -> bool:
    """True if ``library`` has a call for ``case``, determined without importing it."""
    if library == "fla":
        return case.family in (FLA_STEPS if case.shape.T == 1 else FLA_CALLS)
    if library == "flash-qla":
        return case.family == "gated_delta" and case.shape.T > 1 and case.shape.D == 128
    if library == "mamba-ssm":
        return case.family in ("head", "selective_scan") and case.shape.T > 1
    return (case.family == "softmax") == (library == "torch")


def find(library: str, device: str, requirements: tuple[str, ...] | None = None) -> tuple[str, list[str]] | str:
    """Version of ``library`` and the folders that its process needs on ``sys.path``; or the reason why it is missing."""
    if library == "linattn":
        import linattn

        return linattn.__version__, []
    if library == "torch":
        return torch.__version__, []
    if device != "cuda":
        return "it runs on a GPU only"
    if library in UNPACKED:
        return _unpacked(requirements or UNPACKED[library])
    if importlib.util.find_spec("mamba_ssm") is None:
        return "it is not installed"
    return version("mamba_ssm"), []


def _unpacked(requirements: tuple[str, ...]) -> tuple[str, list[str]] | str:
    folders: list[Path] = []
    for requirement in requirements:
        if requirement.startswith("einops") and importlib.util.find_spec("einops") is not None:
            continue
        try:
            folders.append(wheels.path(requirement))
        except OSError as error:
            return f"{error}; unpacked wheels are looked for in {wheels.folder()} (LINATTN_WHEELS)"
    return requirements[0].partition("==")[2], [str(folder) for folder in folders]
