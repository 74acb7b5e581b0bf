"""Reformer (arXiv 2001.04451): tokens are sorted by hash and attend to their neighbours."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linattn.mixers.attention.scores import PIECE, cached, pieces
from linattn.mixers.base import Mixer, Recurrence
from linattn.mixers.context import CallContext
from linattn.mixers.parts import head_size, unit
from linattn.mixers.pattern.learned import by_head, grouped, pick, ranks
from linattn.mixers.registry import register
from linattn.ops.tiles import summed


@register(
    "reformer",
    title="Reformer (LSH attention)",
    paper="Reformer: The Efficient Transformer",
    arxiv="2001.04451",
    year=2020,
    seeds=("001",),
    equation=r"o_t = \sum_r \frac{Z_t^r}{\sum_{r'} Z_t^{r'}} \sum_{i \in C_t^r} \frac{\exp(q_t \hat q_i^\top)}{Z_t^r}\, v_i,"
    r"\quad C_t^r = \text{the chunk of } t \text{ and the one before},\quad \text{sorted by } \arg\max [q R_r; -q R_r]",
    recurrent=False,
    growth="n log n",
    oracle="transformers, LSHSelfAttention without causality; the causal form against loops in float64",
    exemptions={"past": "a token reads only those with its own hash, which few of twelve tokens in 32 buckets share"},
    families=("learnable patterns",),
    chinese={
        "Reformer (LSH attention)": "Reformer（LSH 注意力）",
        "LSHSelfAttention without causality": "不带因果掩码的 LSHSelfAttention",
        "the causal form against loops in float64": "因果形式与 float64 循环比较",
        "a token reads only those with its own hash, which few of twelve tokens in {} buckets share": (
            "一个 token 只读得到哈希相同的 token，而十二个 token 分进 {} 个桶，相同的很少"
        ),
        "the chunk of ": "分块，包含 ",
        " and the one before": "，连同前一块",
        "sorted by ": "排序依 ",
    },
)
class Reformer(Mixer):
    """Queries and keys are shared: k is q at unit length, q / √(Σ q² + 1e-6 K), without another scale. A token sees itself only if it sees
    no other.

    ``rounds`` hashes, each into ``buckets`` by random rotations, sort the tokens; each cuts them into chunks of ``chunk``, and a
    chunk sees itself and the one before it. The rounds are combined by the sums of their softmaxes, so that a pair in
    two rounds counts twice. All as in transformers, which draws rotations at every call; here they are weights.

    There the chunks of a causal model depend on the order of *later* tokens, so steps differ from one pass. Here a causal model cuts
    every bucket into its own chunks, from its first token on, so that no token depends on a later one. State: all keys,
    values and buckets; a call that continues attends to all of them with a mask.
    """

    packs = False
    keep_float32 = ("rotations",)
    rotations: Tensor  # [H, K, rounds, buckets / 2]

    def __init__(
        self, dim: int, heads: int = 4, *, chunk: int = 64, buckets: int = 32, rounds: int = 2, causal: bool = True
    ) -> None:  # fmt: skip
        super().__init__(dim)
        if buckets < 2 or buckets % 2:
            raise ValueError(f"buckets must be an even number of at least 2, but came as {buckets}")
        for name, value in (("chunk", chunk), ("rounds", rounds)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, but came as {value}")
        self.heads, self.chunk, self.buckets, self.rounds, self.causal = heads, chunk, buckets, rounds, causal
        size = head_size("dim", dim, heads)
        self.qk_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.register_buffer("rotations", torch.randn(heads, size, rounds, buckets // 2))

    @torch.no_grad()
    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new rotations, from ``generator`` (of the CPU) if given. States made with the old ones do not fit the new."""
        self.rotations.copy_(torch.randn(self.rotations.shape, generator=generator))

    def project(self, x: Tensor, call: CallContext) -> Recurrence:
        q, v = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.qk_proj, self.v_proj))
        return Recurrence(q, unit(q, eps=1e-6 * q.shape[-1], dtype=q.dtype), v, scale=1.0)

    def hashed(self, q: Tensor) -> Tensor:
        """Bucket of each token in each round: [B, T, H, K] -> [B, T, H, rounds]."""
        turned = torch.einsum("bthk,hkrn->bthrn", q.detach().to(self.rotations.dtype), self.rotations)
        return torch.cat([turned, -turned], -1).argmax(-1)

    def attend(self, r: Recurrence, call: CallContext) -> Tensor:
        bucket = self.hashed(r.q)
        if call.valid is not None:
            bucket = torch.where(call.valid[..., None, None], bucket, self.buckets)  # padding has a bucket of its own
        if self.causal and (call.returning or not call.fresh):
            slots = self._kept(r, bucket, call)
            if call.tokens and not call.fresh:
                return self._continued(r.q, slots, call)
        if not call.tokens:
            return r.v
        bucket = bucket.permute(0, 2, 3, 1)  # [B, H, rounds, T]
        return self._together(r, *(self._by_bucket(bucket) if self.causal else self._sorted(bucket, call)))

    def _kept(self, r: Recurrence, bucket: Tensor, call: CallContext) -> dict[str, Tensor]:
        """Keys, values, buckets, ranks in these and positions of all calls, [B, slots, ...]; keeps them."""
        old = call.get("bucket")
        rank = ranks(bucket.permute(0, 2, 3, 1), self.buckets + 1, None if old is None else old.permute(0, 2, 3, 1))
        slots, _, _ = cached(call, k=r.k, v=r.v, bucket=bucket, rank=rank.permute(0, 3, 1, 2), place=call.positions)
        return slots

    def _together(self, r: Recurrence, places: Tensor, before: Tensor, where: Tensor) -> Tensor:
        """Attention within chunks.

        ``places`` [B, H, rounds, N, chunk] holds their tokens, -1 for none, ``before`` [B, H, rounds, N] the chunk before each, counted
        through all rounds, -1 for none, and ``where`` [B, H, rounds, T] the place of each token in its round.
        """
        q, k, v = (by_head(t) for t in (r.q, r.k, r.v))
        earlier = pick(places.flatten(2, 3), before)  # [B, H, rounds, N, chunk]
        keys = torch.cat([torch.where(before[..., None] < 0, -1, earlier), places], -1)  # [B, H, rounds, N, 2 chunk]
        query, key = places[..., None], keys[..., None, :]
        seen = (key >= 0) & (query >= 0)
        if self.causal:
            seen = seen & (key <= query)
        o, log = summed(pick(q, places), pick(k, keys), pick(v, keys), seen, own=key == query)
        o, log = (t.flatten(3, 4) for t in (o, log[..., None]))  # [B, H, rounds, N chunk, ...]
        o, log = (t.gather(3, where[..., None].expand(*where.shape, t.shape[-1])) for t in (o, log))
        return by_head((log.softmax(2) * o).sum(2)).to(r.v.dtype)

    def _sorted(self, bucket: Tensor, call: CallContext) -> tuple[Tensor, Tensor, Tensor]:
        """Chunks of all tokens by bucket and position; the first of a round follows the last of the round before, cyclically."""
        tokens, device = bucket.shape[-1], bucket.device
        order = bucket.argsort(dim=-1, stable=True)
        real = torch.arange(tokens, device=device) < call.counts[:, None, None, None]
        size = min(self.chunk, tokens)
        count = -(-tokens // size)
        places = torch.nn.functional.pad(torch.where(real, order, -1), (0, count * size - tokens), value=-1)
        chunk, round_ = torch.arange(count, device=device), torch.arange(self.rounds, device=device)[:, None]
        last = (-(-call.counts // self.chunk) - 1).clamp(min=0)[:, None, None]  # [B, 1, 1]: of a row's chunks
        ring = (round_ - 1) % self.rounds * count + last  # [B, rounds, 1]
        before = torch.where(chunk > 0, round_ * count + chunk - 1, ring)  # a single chunk would see its own tokens twice
        return places.unflatten(-1, (count, -1)), before[:, None].expand(-1, self.heads, -1, -1), order.argsort(-1)

    def _by_bucket(self, bucket: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Chunks of each bucket's tokens by position."""
        groups = grouped(bucket, self.buckets + 1, min(self.chunk, bucket.shape[-1]))
        total = groups.places.shape[-2]
        offset = (torch.arange(self.rounds, device=bucket.device) * total)[:, None]
        before = torch.where(groups.first, -1, torch.arange(total, device=bucket.device) + offset - 1)
        return groups.places, before, groups.where

    def _continued(self, q: Tensor, slots: dict[str, Tensor], call: CallContext) -> Tensor:
        """Queries after a state: every pair with a mask, round by round."""
        k, v, chunk = by_head(slots["k"]), by_head(slots["v"]), slots["rank"] // self.chunk  # [B, slots, H, rounds]
        place, bucket, out = slots["place"], slots["bucket"], []
        first = place.shape[1] - call.tokens  # the slot of the first query
        for start, stop in pieces(call.tokens, PIECE):
            own = slice(first + start, first + stop)
            back = (place[:, own, None] - place[:, None])[..., None, None]  # [B, T, slots, 1, 1]
            near = (chunk[:, own, None] - chunk[:, None] <= 1) & (bucket[:, own, None] == bucket[:, None]) & (back >= 0)
            near, same = near.permute(4, 0, 3, 1, 2), (back == 0)[:, None, ..., 0, 0]  # [rounds, B, H, T, slots], [B, 1, T, slots]
            found = [summed(by_head(q[:, start:stop]), k, v, seen, own=same) for seen in near]
            o, log = (torch.stack(t) for t in zip(*found, strict=True))
            out.append(by_head((log.softmax(0)[..., None] * o).sum(0)).to(q.dtype))
        return torch.cat(out, 1)

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(o.flatten(-2))

    def flops(self, x: Tensor, past: int = 0) -> int:
        batch, tokens, dim = x.shape
        size = min(self.chunk, max(tokens, 1))
        chunks = tokens // size + self.buckets + 1 if self.causal else -(-tokens // size)
        pairs = tokens * (past + tokens) if past else 2 * chunks * size**2
        return batch * (tokens * dim * (6 * dim + self.rounds * self.buckets) + 4 * self.rounds * pairs * dim)
