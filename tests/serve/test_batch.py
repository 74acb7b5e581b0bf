"""States in pages without vLLM: for any schedule of pieces, pages and rows outputs equal those of whole sequences."""

import random
from types import SimpleNamespace

import pytest
import torch

from linattn import mixers
from linattn.models import LMConfig
from linattn.models.language import Backbone
from linattn.vllm.batch import Batch, Paged
from linattn.vllm.layout import ALIGNMENT, Layout, after, growing

RECURRENT = [n for n in mixers.available() if mixers.info(n).resumable and mixers.info(n).recurrent]
DIM, PAGES, GARBAGE = 32, 7, 255


def made(name: str, **options) -> torch.nn.Module:
    torch.manual_seed(0)
    return mixers.create(name, dim=DIM, **options).eval()


def language(name: str, dtype: torch.dtype = torch.float32, **options) -> Backbone:
    torch.manual_seed(0)
    return Backbone(LMConfig(vocab_size=40, dim=DIM, mixer=name, layers=2, mixer_options={name: options})).to(dtype).eval()


def fresh(mixer) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return mixer(torch.empty(1, 0, DIM), return_state=True, **({"return_shared": True} if mixer.shares else {}))[1]


class Scheduler:
    """Random scheduler: sequences arrive at random, are read in pieces and preempted; unused pages hold garbage."""

    def __init__(self, mixer, seed: int = 0) -> None:
        self.draw, self.mixer, self.layout = random.Random(seed), mixer, Layout(fresh(mixer))
        pages = torch.full((PAGES, self.layout.nbytes + 3 * ALIGNMENT), GARBAGE, dtype=torch.uint8)
        self.paged = Paged(mixer, pages, self.layout, fresh(mixer))
        self.free, self.running = list(range(1, PAGES)), {}  # no sequence owns page 0

    def step(self, sequences: dict[int, torch.Tensor], outputs: dict[int, list], shared: dict[int, torch.Tensor]) -> None:
        for name in sequences:
            if name not in self.running and self.free and self.draw.random() < 0.6 and not complete(sequences, outputs, name):
                self.running[name], outputs[name] = self.free.pop(self.draw.randrange(len(self.free))), []
        rows = [(n, self.draw.choice((1, 1, 3, 9))) for n in self.running]
        rows = [(n, min(size, sequences[n].shape[1] - read(outputs, n))) for n, size in rows]
        rows.sort(key=lambda row: row[1] > 1)  # sequences that decode come first
        if not rows:
            return
        pieces = [slice(read(outputs, n), read(outputs, n) + size) for n, size in rows]
        x = torch.cat([sequences[n][:, piece] for (n, _), piece in zip(rows, pieces, strict=True)], 1)
        own = torch.cat([shared[n][:, piece] for (n, _), piece in zip(rows, pieces, strict=True)], 1) if shared else None
        y, _ = self.paged.run(x, Batch.of(self.metadata(rows, outputs)), own)
        for (n, _), part in zip(rows, y.split([size for _, size in rows], 1), strict=True):
            outputs[n].append(part)
            if complete(sequences, outputs, n) or self.draw.random() < 0.05:  # finished, or preempted and restarted
                outputs[n] = outputs[n] if complete(sequences, outputs, n) else []
                page = self.running.pop(n)
                self.paged.pages[page] = GARBAGE
                self.free.append(page)

    def metadata(self, rows, outputs) -> SimpleNamespace:
        sizes = torch.tensor([size for _, size in rows], dtype=torch.int32)
        decodes = sum(size == 1 for _, size in rows)
        return SimpleNamespace(
            num_decodes=decodes, num_prefills=len(rows) - decodes,
            query_start_loc=torch.cat([torch.zeros(1, dtype=torch.int32), sizes.cumsum(0).int()]),
            seq_lens=sizes + torch.tensor([read(outputs, n) for n, _ in rows], dtype=torch.int32),
            state_indices_tensor=torch.tensor([self.running[n] for n, _ in rows], dtype=torch.int32),
        )  # fmt: skip


def read(outputs, name: int) -> int:
    return sum(part.shape[1] for part in outputs.get(name, []))


def complete(sequences, outputs, name: int) -> bool:
    return read(outputs, name) == sequences[name].shape[1]


@torch.no_grad()
@pytest.mark.parametrize("name", RECURRENT)
def test_outputs_are_those_of_a_whole_sequence(name):
    mixer, draw = made(name), random.Random(1)
    scheduler = Scheduler(mixer)
    sequences = {n: torch.randn(1, draw.randrange(1, 24), DIM) for n in range(9)}
    shares = mixer.shares
    shared = {n: 0.5 * mixer(x, return_shared=True)[2].flip(1) for n, x in sequences.items()} if shares else {}
    outputs, steps = {}, 0
    while not all(complete(sequences, outputs, n) for n in sequences):
        scheduler.step(sequences, outputs, shared)
        steps += 1
        assert steps < 400
    for n, x in sequences.items():
        whole = mixer(x, shared=shared[n], return_shared=True)[0] if shares else mixer(x)
        torch.testing.assert_close(torch.cat(outputs[n], 1), whole, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_holds_every_bit_of_a_state(name, dtype):
    model = language(name, dtype)
    assert growing(model) == []
    for start, state in zip(after(model, 0).layers, model(torch.randint(40, (3, 5)), return_state=True)[1].layers, strict=True):
        layout = Layout(start)
        assert layout.fits(state) and layout.nbytes % ALIGNMENT == 0
        pages = torch.randint(0, 255, (6, layout.nbytes), dtype=torch.uint8)
        before, index = pages.clone(), torch.tensor([4, 0, 3])
        layout.write(pages, index, state)
        again = layout.read(pages, index)
        assert all(torch.equal(again[key].flatten().view(torch.uint8), t.flatten().view(torch.uint8)) for key, t in state.items())
        assert torch.equal(pages[[1, 2, 5]], before[[1, 2, 5]])


def test_a_given_state_begins_a_sequence_and_nothing_else():
    mixer = made("gated_deltanet")
    layout, x = Layout(fresh(mixer)), torch.randn(1, 12, DIM)
    with torch.no_grad():
        _, state = mixer(x[:, :6], return_state=True)
        whole = mixer(x)
        paged = Paged(mixer, torch.full((3, layout.nbytes), GARBAGE, dtype=torch.uint8), layout, fresh(mixer))
        for first, last in ((6, 9), (9, 12)):  # it is given in both calls
            batch = Batch(0, torch.tensor([0, last - first, 2 * (last - first)]), torch.tensor([2, 1]), torch.tensor([first > 6] * 2))
            y, _ = paged.run(x[:, first:last].repeat(1, 2, 1), batch, given={0: state})
            torch.testing.assert_close(y[:, : last - first], whole[:, first:last], rtol=1e-4, atol=1e-5)
            assert not torch.allclose(y[:, last - first :], whole[:, first:last], atol=1e-3)


def test_growing_states_are_told_from_constant_ones():
    assert growing(language("softmax")) == growing(language("mla")) == [0, 1]
    assert growing(language("softmax", window=4)) == []
