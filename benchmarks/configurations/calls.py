"""Calls that the rows of the table serve: the rows that each looks up, its errors, and a pass of it to time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from linattn.ops.triton import table
from linattn.ops.triton.table import find  # itself, whatever stands in its place while calls are measured

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

Place = tuple[str, int]  # a row: its kind and number
RANKS = {"none": table.NONE, "BTH": table.HEAD, "BTHK": table.CHANNEL}
RULES = {"plain": table.PLAIN, "beta": table.DELTA, "erase": table.ERASE, "bonus": table.PLAIN}
# What to time a rule with a decay by: families of linattn.bench.gpu.cases, what matters most first.
FAMILIES = {
    ("beta", "BTH"): "gated_delta", ("plain", "BTH"): "head", ("beta", "BTHK"): "kda", ("erase", "BTHK"): "erase",
    ("plain", "BTHK"): "channel", ("plain", "none"): "none", ("beta", "none"): "delta", ("bonus", "BTHK"): "rwkv6",
}  # fmt: skip


@dataclass(frozen=True)
class Chunks:
    """Call of the chunked form, with keys and values of ``size`` channels, over several segments."""

    kind: str
    rank: str
    dtype: str
    size: int
    shared: bool = False  # one head of keys for two of values: gradients then have a kernel where nothing decays, too

    def __str__(self) -> str:
        return f"{self.kind} {self.rank} {self.dtype} {self.size}{' shared keys' if self.shared else ''}"

    @property
    def asks(self) -> set[Place]:
        """Rows that a forward and a backward pass look up."""
        call = {"rule": table.RULES[RULES[self.kind]], "decay": table.DECAYS[RANKS[self.rank]], "before": self.kind == "bonus"}
        call |= {"half": self.dtype == "bfloat16", "keys": self.size}
        wanted = [("forward", True), ("forward", False), ("backward", True), *([] if INTERPRETED else [("backward", False)])]
        found = {(kind, find(kind, {**call, "outputs": outputs})) for kind, outputs in wanted}
        if (self.kind, self.rank) != ("plain", "none") or self.shared:  # whose gradients are the scans themselves
            found.add(("gradients", find("gradients", call)))
        if self.rank == "BTHK":
            found.add(("unsettled", find("unsettled", call)))
        if self.kind != "plain" or self.rank == "BTHK":
            found.add(("prepare", find("prepare", call)))
        return found

    def ratios(self) -> dict[str, float]:
        """Ratio of error to limit, by result and gradient."""
        from tests.ops import cases
        from tests.ops.errors import admitted
        from tests.ops.triton import device

        dtype = getattr(torch, self.dtype)
        size = dict(B=1, T=20 if INTERPRETED else 1100, H=2, Hk=1 if self.shared else 2, K=self.size, V=self.size)
        for seed in range(20):
            call = cases.make(self.kind, self.rank, **size, seed=seed)
            if self.kind not in ("beta", "erase") or admitted(device.here(call).to(dtype)):
                return device.ratios(call, dtype)
        raise ValueError(f"no well-conditioned call of {self} in 20 draws")

    @property
    def timed(self) -> bool:
        return (self.kind, self.rank) in FAMILIES

    def step(self) -> Callable[[], object]:
        """Forward and backward pass at the size that is timed."""
        import linattn
        from linattn.bench.gpu import cases

        shape = cases.Shape(1, 20, 1, self.size) if INTERPRETED else cases.Shape(1, 16384 if self.size <= 128 else 8192, 16, self.size)
        x = cases.tensors(cases.Case.of(FAMILIES[self.kind, self.rank], shape, "forward+backward"), DEVICE, 0)
        if self.dtype == "float32":
            x = {name: t.float() for name, t in x.items()}
        if self.shared:
            x |= {name: x[name][:, :, :1].contiguous() for name in "qk"}

        def run(x: dict[str, torch.Tensor]) -> torch.Tensor:
            erase = (x["read"], x["write"]) if "read" in x else None
            others = {name: x.get(name) for name in ("decay", "beta", "bonus")}
            return linattn.linear_attention(x["q"], x["k"], x["v"], erase=erase, **others, backend="triton")

        return _with_gradients(run, x, x["v"])


@dataclass(frozen=True)
class Scan:
    """Call of both elementwise scans, of the dtypes of decay and values, with B and T as they are timed."""

    batch: int
    tokens: int
    decay: str
    values: str
    packed: bool = False
    constant: bool = False
    timed: bool = True

    def __str__(self) -> str:
        words = f"{' packed' if self.packed else ''}{' constant' if self.constant else ''}"
        return f"scan B{self.batch} T{self.tokens} {self.decay} {self.values}{words}"

    @property
    def asks(self) -> set[Place]:
        call = {"short": self.tokens <= 8, "packed": self.packed, "shared": not self.constant and self.batch == 1}
        call |= {f"{name}_bytes": getattr(torch, getattr(self, of)).itemsize for name, of in (("decay", "decay"), ("value", "values"))}
        return {("elementwise", find("elementwise", {**call, "backward": backward})) for backward in (False, True)}

    def ratios(self) -> dict[str, float]:
        import linattn
        from tests.ops.errors import error
        from tests.ops.triton import test_scan as tests

        packed = {"cu_seqlens": torch.tensor([0, 0, 7, 1500, 1501, 3000], device=DEVICE)} if self.packed else {}
        rows = 5 if self.packed else self.batch
        width = 512 if self.batch == 1 else 2048
        rank, dtype = "D" if self.constant else "BTD", getattr(torch, self.values)
        tokens = min(self.tokens, 3000 if self.batch == 1 else 600)
        a = tests.arguments(DEVICE, tokens, self.batch, width, rank=rank, dtype=dtype, N=rows)
        a["decay"] = a["decay"].to(getattr(torch, self.decay))

        def portable(kind: str, a: dict[str, torch.Tensor], **options) -> tuple:
            function = linattn.diagonal_scan if kind == "sum" else linattn.running_max
            return function(a["decay"], a["x"], initial_state=a["initial"], return_state=True, backend="torch", **options)

        found = {}
        value, gradient = tests.LIMIT[dtype]
        names = ("values", "state", "gradient of decay", "gradient of x", "gradient of the state")
        for kind in tests.KINDS:
            mine = tests.results(tests.door, kind, a, **packed)
            wanted = tests.results(portable, kind, {name: t.double() for name, t in a.items()}, **packed)
            for name, m, w in zip(names, mine, wanted, strict=True):
                finite = w.isfinite()
                same = torch.equal(m.double()[~finite], w[~finite])
                limit = gradient if name.startswith("gradient") else value
                found[f"{kind}: {name}"] = error(m[finite], w[finite], floor=1e-30) / limit if same else math.inf
        return found

    def step(self) -> Callable[[], object]:
        import linattn
        from linattn.bench.gpu import cases

        case = cases.Case("scan", cases.Shape(self.batch, self.tokens, 16, 128), "forward+backward", cases.DECAY, self.decay)
        x = cases.tensors(case, DEVICE, 0)
        x["b"] = x["b"].to(getattr(torch, self.values))
        if self.constant:
            x["decay"] = x["decay"][0, 0].contiguous()
        ends = torch.arange(0, self.tokens + 1, self.tokens // 8, device=DEVICE) if self.packed else None
        return _with_gradients(lambda x: linattn.diagonal_scan(x["decay"], x["b"], cu_seqlens=ends, backend="triton"), x, x["b"])


@dataclass(frozen=True)
class Step:
    """Step of one token for each of ``batch`` sequences of 16 heads."""

    kind: str
    rank: str
    batch: int
    timed: bool = True

    def __str__(self) -> str:
        return f"step {self.kind} {self.rank} B{self.batch}"

    @property
    def asks(self) -> set[Place]:
        return {("decode", find("decode", {"columns": self.batch * 16 * 128}))}

    def ratios(self) -> dict[str, float]:
        from linattn.ops.triton import decode
        from tests.ops import cases
        from tests.ops.errors import error
        from tests.ops.triton import test_decode as tests

        found = {}
        for dtype in (torch.float32, torch.bfloat16):
            x = tests.inputs(cases.make(self.kind, self.rank, B=self.batch, T=2, H=16, K=128, V=128), dtype)
            out, wanted = tests.named(decode.recurrent(x)), tests.exact(x)
            found |= {f"{n}, {dtype}": error(out[n], w) / (tests.LIMIT[dtype] if n == "o" else 2e-6) for n, w in wanted.items()}
        return found

    def milliseconds(self, seconds: float) -> float:
        from linattn.bench.gpu import cases, measure

        case = cases.Case.of(FAMILIES[self.kind, self.rank], cases.Shape(self.batch, 1, 16, 128), "decode")
        return measure.measure("linattn", case, DEVICE, seconds, False)["ms"]


Call = Chunks | Scan | Step


def _with_gradients(run: Callable, x: dict[str, torch.Tensor], like: torch.Tensor) -> Callable[[], object]:
    leaves = [t.requires_grad_() for t in x.values()]
    gradient = torch.randn_like(like)
    return lambda: torch.autograd.grad(run(x), leaves, gradient)


def calls() -> Iterator[Call]:
    """Calls that the rows serve, the most important first."""
    kinds = [*FAMILIES, ("erase", "none"), ("erase", "BTH"), ("bonus", "none"), ("bonus", "BTH")]
    if INTERPRETED:
        yield Chunks("beta", "BTH", "float32", 4)  # does everything run?
        return
    yield from (Chunks(kind, rank, "bfloat16", 128) for kind, rank in kinds)
    yield Chunks("plain", "none", "bfloat16", 128, shared=True)
    yield Scan(1, 32768, "bfloat16", "bfloat16")
    yield Scan(1, 32768, "float32", "bfloat16")
    yield from (Step(kind, "BTHK" if kind == "erase" else "BTH", batch) for batch in (64, 1) for kind in ("beta", "plain", "erase"))
    yield from (Chunks(kind, rank, "bfloat16", 64) for kind, rank in kinds)
    yield from (Chunks(kind, rank, "bfloat16", 256) for kind, rank in kinds)
    yield from (Scan(8, 4096, decay, "bfloat16") for decay in ("bfloat16", "float32"))
    yield Scan(1, 32768, "float32", "bfloat16", packed=True)
    yield Scan(64, 4, "float32", "bfloat16")
    yield Scan(1, 32768, "float32", "float32")
    yield Scan(1, 32768, "float32", "bfloat16", constant=True)
    yield from (Chunks(kind, rank, "float32", size) for size in (128, 256) for kind, rank in kinds)
    yield Chunks("plain", "none", "float32", 128, shared=True)
