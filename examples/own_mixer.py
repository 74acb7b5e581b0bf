"""A mixer of one's own, and what it gets for its few lines: python examples/own_mixer.py --steps 50

It fades by head, as Mamba-2 does, and each key also looks one token back, with a part that other mixers use too: its state
(the last token) travels with the mixer's own.
"""

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import linattn
from linattn.mixers import CallContext
from linattn.mixers.parts import ShortConvolution, to_float32


@linattn.register("glance", title="Fading memory with a glance back", year=2026, equation=r"S_t = \alpha_t S_{t-1} + k_t^\top v_t")
class Glance(linattn.Mixer):
    """One decay for each head from the token; keys from this token and the one before."""

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__(dim)
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.back = ShortConvolution(dim, width=2, name="back")
        self.gate = nn.Linear(dim, heads)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def project(self, x: Tensor, call: CallContext) -> linattn.Recurrence:
        """[B, T, D] -> q, k, v [B, T, H, D / H] and the decay [B, T, H]."""
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, self.back(k, call), v))
        return linattn.Recurrence(q, F.normalize(k, dim=-1), v, decay=F.logsigmoid(to_float32(self.gate(x)) + 4))

    def read(self, o: Tensor, x: Tensor) -> Tensor:
        """[B, T, H, V] -> [B, T, D]."""
        return self.o_proj(o.flatten(-2))


def repeating(batch: int, tokens: int, vocab: int) -> Tensor:
    """Random tokens, then the same again: [B, 2 T]. The second half can be told only by who remembers the first."""
    half = torch.randint(vocab, (batch, tokens))
    return torch.cat([half, half], 1)


def main(arguments: Sequence[str] | None = None) -> float:
    """Check the forms, look at the cost, then learn to copy; returns the last loss on the part that can be known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args(arguments).steps

    print(linattn.check_forms(linattn.mixers.create("glance", dim=64), torch.randn(2, 20, 64, dtype=torch.float64)))
    print(linattn.cost("glance", dim=512, tokens=100_000))

    torch.manual_seed(0)
    model = linattn.LanguageModel(linattn.LMConfig(vocab_size=16, dim=64, layers=2, mixer="glance"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        ids = repeating(16, 12, 16)
        loss = F.cross_entropy(model(ids[:, :-1])[:, 11:].flatten(0, 1), ids[:, 12:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:>4}  loss {loss.item():.3f}  (guessing: {torch.tensor(16.0).log().item():.3f})")
    return loss.item()


if __name__ == "__main__":
    main()
