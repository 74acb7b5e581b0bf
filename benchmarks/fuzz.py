"""Fuzzing of the GPU's or the CPU's kernels against the portable form in float64: ``python -m benchmarks.fuzz --backend cpu``.

Every value and every gradient is held to the limits of its dtype, with outputs and scratch poisoned with NaN first. A draw whose
recurrence is not well-conditioned (the rule of tests/ops/errors.py) is drawn again: nothing is claimed of it. What exceeds its limit is
held to what rounding its terms costs (tests/ops/definition.py), as sums that cancel keep no share of themselves. A share of a CPU's
cases are single tokens without gradients, as in decoding, which the kernels step in place. Several processes share
a GPU, as most of the time is compilation. Writes what was run, how near each family came to its limits, and every failure.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks import RESULTS, destination, positive

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
lost: list[int] = []  # the case after which this process lost its device
KINDS = ("plain", "plain", "beta", "beta", "erase", "bonus", "normalize")
RANKS = ("none", "H", "HK", "BTH", "BTH", "BTHK", "BTHK")
DTYPES = ("bfloat16", "bfloat16", "float16", "float32") if not INTERPRETED else ("float16", "float32")
CPU_DTYPES = ("float32", "float32", "bfloat16", "float16")
# Few sizes, as each compiles anew: (K, V) by dtype.
SIZES = {
    "bfloat16": ((64, 64), (128, 128), (40, 72), (256, 96)),
    "float16": ((64, 64), (72, 40)),
    "float32": ((64, 64), (40, 72)),
}
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 333)
LONG = (600, 1030, 2100)  # several segments
STRENGTHS = ((1e-4, 1e-2), (0.02, 0.6), (0.02, 3.0), (1e-4, 800.0), (1.0, 5.0))
BACKENDS = ("triton", "cpu")
STEPS = 0.25  # share of a CPU's cases that are single tokens without gradients
LAYOUTS = ("dense", "dense", "heads first", "one projection", "unaligned")


@dataclass(frozen=True)
class Draw:
    """Arguments of one case, all of them JSON."""

    backend: str
    seed: int
    kind: str
    rank: str
    dtype: str
    decay_half: bool  # the decay in the dtype of q rather than float32
    B: int
    T: int
    H: int
    Hk: int
    K: int
    V: int
    lengths: tuple[int, ...] | None
    initial: bool
    outputs: tuple[str, ...] | None  # outputs with gradients
    strength: tuple[float, float]
    resets: float  # their share
    scale: float | None
    layout: str
    step: bool  # a token for each state, without gradients

    @property
    def family(self) -> str:
        rank = {"H": "head", "BTH": "head", "HK": "channel", "BTHK": "channel"}.get(self.rank, "none")
        return f"{self.kind}-{rank} {self.dtype}{' step' if self.step else ''}"


def draw(seed: int, backend: str) -> Draw:
    """Draw the case of ``seed``, always the same."""
    r = random.Random(seed)  # noqa: S311
    kind, rank, dtype = r.choice(KINDS), r.choice(RANKS), r.choice(DTYPES if backend == "triton" else CPU_DTYPES)
    if backend == "cpu":
        K, V = (r.choice((r.randint(1, 20), r.randint(1, 150), 64)) for _ in "KV")
    else:
        K, V = r.choice(SIZES[dtype]) if not INTERPRETED else (r.randint(1, 9), r.randint(1, 9))
    long = r.random() < (0.1 if backend == "triton" else 0.02)
    T = r.choice(LONG if long else LENGTHS) if not INTERPRETED else r.randint(1, 40)
    B, H = (1, r.choice((1, 2))) if long or INTERPRETED else (r.choice((1, 1, 2, 3)), r.choice((1, 2, 3, 4)))
    lengths = None
    if r.random() < 0.4:
        ends = sorted(r.choices((0, T, *range(T + 1)), k=r.randint(0, 6)))
        lengths, B = tuple(b - a for a, b in zip([0, *ends], [*ends, T], strict=True)), 1
    strong = rank != "none" and r.random() < 0.3
    d = Draw(
        backend=backend, seed=seed, kind=kind, rank=rank, dtype=dtype, decay_half=r.random() < 0.2, B=B, T=T, H=H,
        Hk=r.choice([h for h in range(1, H + 1) if H % h == 0]), K=K, V=V, lengths=lengths, initial=r.random() < 0.7,
        outputs=r.choice((None, None, None, ("o",), ("S", "z"))), strength=r.choice(STRENGTHS),
        resets=r.choice((0.01, 0.1, 0.5)) if strong else 0.0, scale=r.choice((None, None, 1.0, -0.4)), layout=r.choice(LAYOUTS),
        step=False,
    )  # fmt: skip
    if backend == "triton" or r.random() >= STEPS:
        return d
    rows = 1 if lengths is None else len(lengths)  # packed sequences have a token each
    return replace(d, T=rows, lengths=None if lengths is None else (1,) * rows, initial=True, step=True)


def build(d: Draw):
    """Build the float64 call of ``d``."""
    from tests.ops import cases
    from tests.ops.test_decays import undivided, with_resets

    call = cases.make(
        d.kind, d.rank, B=d.B, T=d.T, H=d.H, Hk=d.Hk, K=d.K, V=d.V, lengths=d.lengths, initial=d.initial, strength=d.strength, seed=d.seed
    )
    if d.scale is not None:
        call = call.set(scale=d.scale)
    if d.resets:
        call = with_resets(call, d.resets, d.seed)
    return undivided(call)  # a quotient has no limit if only one token is remembered


def run(seed: int, backend: str) -> tuple[Draw, dict[str, float], str | None, int]:
    """Run the first well-conditioned draw from ``seed`` on: errors over limits, failures, and the number of rejected draws."""
    import torch

    from tests.ops.errors import admitted

    torch.set_num_threads(1 if backend == "triton" else 1 + seed % 2)
    if lost:
        return draw(seed, backend), {}, f"not run, as its process lost the device in case {lost[0]}", 0
    for skipped in range(20):
        d = replace(draw(seed + skipped * 1_000_003, backend), seed=seed + skipped * 1_000_003)
        dtype = getattr(torch, d.dtype)
        call = here(build(d), backend)
        if d.kind not in ("beta", "erase") or admitted(call.to(dtype)):
            break
    else:
        return d, {}, None, 20
    try:
        errors = ratios(d, call, dtype)
        synchronize(backend)  # attributes a fault to its case
    except Exception as error:
        what = f"{type(error).__name__}: {error}"[:500]
        try:
            synchronize(backend)
        except RuntimeError:
            lost.append(d.seed)
        return d, {}, what, skipped
    wrong = {name: ratio for name, ratio in errors.items() if not ratio <= 1}
    return d, errors, f"errors over what is allowed: {wrong}" if wrong else None, skipped


def ratios(d: Draw, call, dtype) -> dict[str, float]:
    from tests.ops import errors

    exact = "torch"  # faster, and in float64 equal to the reference to 3e-15 of the summands
    if d.backend == "triton":
        from tests.ops.triton.device import EXACT_BACKEND as exact
    run = partial(twice, d)
    return errors.ratios(call, dtype, run=run, exact=exact, decay=dtype if d.decay_half else None, outputs=d.outputs)


def here(call, backend: str):
    """Move the call to the backend's device."""
    if backend == "cpu":
        return call
    from tests.ops.triton import device

    return device.here(call)


def synchronize(backend: str) -> None:
    import torch

    if backend == "triton" and not INTERPRETED:
        torch.cuda.synchronize()


def laid_out(layout: str, call):
    """Copy the values to another memory layout."""
    import torch

    t = call.tensors
    if layout == "heads first":
        return call.with_(**{n: t[n].transpose(1, 2).contiguous().transpose(1, 2) for n in call.timed})
    if layout == "one projection":
        return call.with_(**{n: torch.cat([t[n], t[n] * torch.nan], -1)[..., : t[n].shape[-1]] for n in "qkv"})
    if layout == "unaligned":
        return call.with_(**{n: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x) for n, x in t.items()})
    return call


def twice(d: Draw, call, outputs) -> tuple[dict, dict]:
    """Check that values and gradients have equal bits the second time."""
    from tests.ops.errors import same_bits

    first, second = once(d, call, outputs), once(d, call, outputs)
    for one, two in zip(first, second, strict=True):
        same_bits(one, two, "in the second run")
    return first


def once(d: Draw, call, outputs) -> tuple[dict, dict]:
    import torch

    from tests.ops import cases

    leaves = {n: t.detach().requires_grad_() for n, t in laid_out(d.layout, call).tensors.items()}
    if d.step:
        with poisoned(d.backend):
            return call.with_(**{n: t.detach() for n, t in leaves.items()})(backend=d.backend), {}
    with poisoned(d.backend):
        out = call.with_(**leaves)(backend=d.backend)
        chosen = [t for n, t in out.items() if (outputs is None or n in outputs) and t.requires_grad]
        weights = [cases.cotangent(t) for t in chosen]
        grads = torch.autograd.grad(chosen, list(leaves.values()), weights, allow_unused=True, materialize_grads=True)
    return {n: t.detach() for n, t in out.items()}, dict(zip(leaves, grads, strict=True))


def poisoned(backend: str):
    """Fill uninitialised memory with NaN within the context; on a CPU, also check for writes out of bounds."""
    if backend == "cpu":
        from linattn.ops.cpu import library

        return library.guarded()
    from tests.ops.triton import device

    return device.poisoned()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--backend", choices=BACKENDS, default="triton")
    parser.add_argument("--cases", type=positive, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the cases are those of seed * 10^6 and the integers after it")
    parser.add_argument("--workers", type=positive, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so long")
    parser.add_argument("--onto", type=Path, help="the log of the same run that --seconds ended: go on after its last case")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a file, or a folder for fuzz-CARD.json")
    options = parser.parse_args(arguments)
    machine, path = destination(parser, "fuzz", "cpu" if INTERPRETED or options.backend == "cpu" else "cuda", options.out)
    machine |= instructions(parser, options.backend)
    earlier = read(parser, options.onto, {"backend": options.backend, "seed": options.seed, **machine})
    started = time.monotonic() - earlier["seconds"]
    seeds = [options.seed * 1_000_000 + i for i in range(earlier["cases"], options.cases)]
    families, failures, skipped = earlier["families"], earlier["failures"], earlier["untame_draws"]
    latest = started + earlier["seconds"] + options.seconds
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads of several processes would compete for cores
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=spawn) as pool:
        futures = [pool.submit(run, seed, options.backend) for seed in seeds]
        for done, (d, ratios, failure, vain) in enumerate(results(pool, futures, latest), earlier["cases"] + 1):
            skipped += vain
            family = families.setdefault(d.family, {"cases": 0, "failures": 0, "worst": {}})
            family["cases"] += 1
            for name, ratio in ratios.items():
                family["worst"][name] = max(family["worst"].get(name, 0.0), round(ratio, 4))
            if failure:
                family["failures"] += 1
                failures.append({"what": failure, **asdict(d)})
                print(f"\rfailed: {failures[-1]}", flush=True)
            if done % 25 == 0 or done == options.cases:
                print(f"\r{done}/{options.cases} cases, {len(failures)} failed, {time.monotonic() - started:.0f} s", end="", flush=True)
    print()
    from linattn.bench.files import command

    told = command(parser.prog, arguments or sys.argv[1:], without=("--out", "--onto", "--seconds"))
    facts = {"schema": "linattn.fuzz", "command": told, "backend": options.backend, **machine, "date": time.strftime("%Y-%m-%d")}
    facts |= {"seconds": round(time.monotonic() - started), "seed": options.seed, "untame_draws": skipped}
    write(path, facts, families, failures)
    return 1 if failures else 0


def results(pool: ProcessPoolExecutor, futures: list[Future], latest: float) -> Iterator:
    """Yield the results as they come; after the time ``latest`` only those of started cases, so that results are a prefix of the cases."""
    given = set()
    for future in as_completed(futures):
        yield future.result()
        given.add(future)
        if time.monotonic() > latest:
            break
    pool.shutdown(cancel_futures=True)
    yield from (future.result() for future in futures if future not in given and not future.cancelled())


def instructions(parser: argparse.ArgumentParser, backend: str) -> dict[str, str]:
    """Instruction sets of the CPU kernels and of torch; without these kernels the program ends in one line."""
    if backend != "cpu":
        return {}
    import torch

    from linattn.ops.cpu import library

    if missing := library.reason():
        parser.exit(2, f"{parser.prog}: {missing}\n")
    return {"native_isa": library.isa(), "torch_cpu_capability": torch.backends.cpu.get_cpu_capability()}


def read(parser: argparse.ArgumentParser, path: Path | None, wanted: dict) -> dict:
    """Read the log to continue, of the same seed and machine, or make an empty one."""
    if path is None:
        return {"cases": 0, "seconds": 0, "families": {}, "failures": [], "untame_draws": 0}
    try:
        log = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        parser.error(f"--onto cannot be read: {error}")
    other = [name for name, value in {"schema": "linattn.fuzz", **wanted}.items() if log.get(name) != value]
    if other:
        parser.error(f"--onto {path} is not of this run: it has another {', '.join(other)}")
    return log


def write(path: Path, facts: dict, families: dict, failures: list[dict]) -> None:
    """Write the log, and print its summary."""
    kinds = Counter()
    for name, family in families.items():
        kinds[name.split("-")[0]] += family["cases"]
        worst = max(family["worst"].items(), key=lambda item: item[1], default=("", 0.0))
        print(f"  {name:28} {family['cases']:4} cases, {family['failures']:3} failed, nearest to its limit: {worst[0]} {worst[1]:.2f}")
    counted = {"cases": kinds.total(), "kinds": dict(sorted(kinds.items())), "families": dict(sorted(families.items()))}
    body = {**facts, **counted, "failures": failures}
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(f"{kinds.total()} cases, {len(failures)} failed: {path}")


if __name__ == "__main__":
    sys.exit(main())
