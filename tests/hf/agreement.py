"""Tests of every patchable family, patched and unpatched."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from linattn.hf.patch import patch_transformers
from tests.hf.patched import (
    PURE,
    SHORT,
    TOKENS,
    VOCABULARY,
    Decoder,
    distance,
    everything,
    gradients_of,
    logits_of,
    model_of,
    packings,
    padded,
    pieces,
    recurrent_states,
    same_states,
    shared_model,
)


class Agreement:
    """Subclasses set ``op`` and, for decoded tokens, ``step``, which must be called; ``family`` is their module's fixture."""

    op: str
    step: str
    pieces_of_theirs: ClassVar[dict[str, float]] = {}  # minimum error of theirs in pieces; others are right
    left_of_theirs: tuple[str, ...] = ()  # families whose originals are wrong with left padding

    @pytest.fixture
    def model(self, family):
        return shared_model(family)

    @pytest.fixture
    def ids(self):
        return torch.randint(3, VOCABULARY, (2, TOKENS))

    @pytest.fixture
    def alone(self, model, ids):
        """Logits of the token 5 after all of the first row, and after the short start of the second."""
        rows = (ids[:1], ids[1:, :SHORT])
        return torch.cat([logits_of(model, torch.cat([row, torch.tensor([[5]])], 1))[:, -1] for row in rows])

    def test_ours_are_called_and_everything_is_put_back(self, family, model, ids):
        module = __import__(type(model).__module__, fromlist=["*"])
        before, logits = everything(module), logits_of(model, ids)
        with patch_transformers([family]) as patch:
            assert not patch.calls
            logits_of(model, ids)
            assert patch.calls[self.op] >= 2
            once = patch.calls[self.op]
            pieces(model, ids)
            assert patch.calls[self.op] == once * 3  # two prompts more
            assert patch.calls[self.step] == once * 7
            during = everything(module)
            changed = {key for key in before if during[key] is not before[key]}
            names = {(name,) if owner is module else (owner.__name__, name) for owner, name, *_ in patch.replaced}
            assert changed == names
            assert len(changed) >= 4
        after = everything(module)
        assert after.keys() == before.keys()
        assert all(after[key] is before[key] for key in before)
        assert torch.equal(logits_of(model, ids), logits)

    def test_logits_and_gradients_agree(self, family, model, ids):
        logits, gradients = logits_of(model, ids), gradients_of(model, ids)
        with patch_transformers([family]):
            assert distance(logits_of(model, ids), logits) < 1e-5
            ours = gradients_of(model, ids)
        assert ours.keys() == gradients.keys()
        whole = torch.cat([g.flatten() for g in gradients.values()]).norm()
        for name, gradient in gradients.items():
            assert (ours[name] - gradient).norm() < 3e-4 * gradient.norm() + 1e-6 * whole, name  # theirs is float32 too

    def test_checkpointing_runs_layers_again_alike(self, family, model, ids):
        model.train()
        try:
            with patch_transformers([family]):
                gradients = gradients_of(model, ids)
                getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # 5.17 has the older name
                again = gradients_of(model, ids)
        finally:
            getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
            model.eval()
        assert again.keys() == gradients.keys()
        assert all((again[name] - g).norm() <= 1e-6 * g.norm() for name, g in gradients.items())

    def test_pieces_are_the_whole(self, family, model, ids):
        whole = logits_of(model, ids)
        if family == "rwkv":
            with pytest.raises(RuntimeError):
                distance(pieces(model, ids), whole)
        elif family in self.pieces_of_theirs:
            assert distance(pieces(model, ids), whole) > self.pieces_of_theirs[family]
        else:
            assert distance(pieces(model, ids), whole) < 1e-4
        with patch_transformers([family]):
            assert distance(pieces(model, ids), whole) < 2e-5

    def test_tokens_move_the_states_of_the_cache_on_where_they_are(self, family, model, ids):
        """Also of a cache started by theirs."""
        whole = logits_of(model, ids[:1])
        for patched in (False, True):
            decode = Decoder(model)
            patch = patch_transformers([family]) if patched else None
            decode(ids[:1, :20])
            with patch or patch_transformers([family]) as patch:
                states = recurrent_states(decode.given[decode.name])
                places, before = [t.data_ptr() for t in states], [t.clone() for t in states]
                assert patch.calls[self.step] == 0
                assert distance(decode(ids[:1, 20:21]), whole[:, 20:21]) < 2e-5
                assert patch.calls[self.step] >= 2
                assert [t.data_ptr() for t in states] == places
                assert not any(map(torch.equal, states, before))
                assert distance(decode(ids[:1, 21:22]), whole[:, 21:22]) < 2e-5

    def test_a_cache_of_another_dtype_keeps_it(self, family, model, ids):
        if family == "rwkv":
            pytest.skip("its states are float32")
        whole = logits_of(model, ids[:1])
        decode = Decoder(model)
        with patch_transformers([family]) as patch:
            decode(ids[:1, :20])
            layers = [layer for layer in decode.given[decode.name].layers if getattr(layer, "recurrent_states", {}).get(0) is not None]
            for layer in layers:
                layer.conv_states[0], layer.recurrent_states[0] = layer.conv_states[0].bfloat16(), layer.recurrent_states[0].bfloat16()
            states = recurrent_states(decode.given[decode.name]) + [layer.conv_states[0] for layer in layers]
            before = [t.clone() for t in states]
            once = patch.calls[self.op]
            assert distance(decode(ids[:1, 20:21]), whole[:, 20:21]) < 0.02
            assert distance(decode(ids[:1, 21:22]), whole[:, 21:22]) < 0.02
            assert patch.calls[self.step] + patch.calls[self.op] - once == 2 * len(layers)
        assert all(t.dtype == torch.bfloat16 for t in states)
        assert not any(map(torch.equal, states, before))

    def test_padding_decodes_as_rows_alone(self, family, model, ids, alone):
        def decoded(side: str) -> float:
            decode = Decoder(model)
            decode(*padded(ids, SHORT, side))
            return distance(decode(torch.tensor([[5], [5]]))[:, -1], alone)

        assert decoded("right") > 0.05
        if family in self.left_of_theirs:
            assert decoded("left") > 1e-4
        else:
            assert decoded("left") < 1e-5
        with patch_transformers([family]):
            assert decoded("right") < 5e-5
            assert decoded("left") < 5e-5

    def test_padding_inside_of_a_conversation(self, family, model, ids):
        """Two ragged turns and a token: the state continues from the last real token of each row."""
        wanted = torch.cat([
            logits_of(model, torch.cat([ids[:1, :11], ids[:1, 11:], torch.tensor([[5]])], 1))[:, -1],
            logits_of(model, torch.cat([ids[1:, :7], ids[1:, 11:13], torch.tensor([[5]])], 1))[:, -1],
        ])  # fmt: skip
        with patch_transformers([family]):
            decode = Decoder(model)
            decode(*padded(ids[:, :11], 7, "right"))
            decode(*padded(ids[:, 11:], 2, "right"))
            assert distance(decode(torch.tensor([[5], [5]]))[:, -1], wanted) < 5e-5

    def test_padding_inside_of_one_row_is_no_packing(self, family, model, ids):
        """Its positions restart after the padding, as in generate."""
        wanted = logits_of(model, torch.cat([ids[:1, :15], ids[:1, 17:18]], 1))[:, -1]
        mask = torch.tensor([[1, 1, 1, 1, 0, 0, 1]])
        with patch_transformers([family]):
            decode = Decoder(model)
            decode(ids[:1, :11])
            assert distance(decode(ids[:1, 11:18], mask)[:, -1], wanted) < 5e-5

    def test_packed_sequences_do_not_leak(self, family, model, ids):
        ids = ids[:1]
        wanted = torch.cat([logits_of(model, ids[:, :SHORT]), logits_of(model, ids[:, SHORT:])], 1)
        for how, options in packings().items():
            try:
                assert distance(logits_of(model, ids, **options), wanted) > 0.02
            except (ValueError, TypeError) as refused:  # 5.17 is wrong instead, or gives a function cu_seqlens twice
                assert "packed" in str(refused) or "multiple values for keyword argument 'cu_seqlens'" in str(refused)
            with patch_transformers([family]):
                assert distance(logits_of(model, ids, **options), wanted) < 5e-5, how
                for mask in (torch.ones_like(ids), torch.ones_like(ids).bool()):  # masks without padding
                    assert distance(logits_of(model, ids, attention_mask=mask, **options), wanted) < 5e-5, how

    def test_positions_tell_sequences_of_one_token_apart(self, family, model, ids):
        ends = [0, 1, 2, SHORT, TOKENS - 1, TOKENS]
        parts = [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]
        wanted = torch.cat([logits_of(model, ids[:1, part]) for part in parts], 1)
        for first in (0, 2):  # as DataCollatorWithFlattening(position_ids_start=2) counts
            positions = torch.cat([torch.arange(first, first + part.stop - part.start) for part in parts])[None]
            with patch_transformers([family]):
                assert distance(logits_of(model, ids[:1], position_ids=positions), wanted) < 5e-5

    def test_ends_hold_beside_positions_that_say_nothing_of_them(self, family, model, ids):
        """Also with softmax attention: continuing positions, and three-axis positions of text and images."""
        places = torch.arange(TOKENS)[None]
        wanted = torch.cat([logits_of(model, ids[:1, :SHORT]), logits_of(model, ids[:1, SHORT:])], 1)
        with patch_transformers([family]):
            assert distance(logits_of(model, ids[:1], position_ids=places, **packings()["cu_seq_lens"]), wanted) < 5e-5
            if family.startswith("qwen3_5"):
                places = packings()["position_ids"]["position_ids"].expand(3, 1, -1)
                assert distance(logits_of(model, ids[:1], position_ids=places), wanted) < 5e-5

    def test_rows_of_a_batch_are_not_packed_each_on_its_own(self, family, model, ids):
        places = packings()["position_ids"]["position_ids"]
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        with patch_transformers([family]):
            for given in (places, places.expand(2, -1)):
                with pytest.raises(ValueError, match="packed sequences must be one row, but the batch came with 2"):
                    logits_of(model, ids, position_ids=given)
            logits_of(model, ids, position_ids=torch.arange(TOKENS)[None])
            logits_of(model, ids, position_ids=(mask.cumsum(1) - 1).clamp(min=0), attention_mask=mask)

    def test_packed_gradients(self, family, model, ids):
        ids = ids[:1]
        torch.manual_seed(2)
        weights = torch.randn(1, TOKENS, VOCABULARY)
        with patch_transformers([family]):
            packed = gradients_of(model, ids, **packings()["cu_seq_lens"])
            model.zero_grad()
            for part in (slice(0, SHORT), slice(SHORT, TOKENS)):
                (model(input_ids=ids[:, part], use_cache=False).logits * weights[:, part]).sum().backward()
        for name, t in model.named_parameters():
            if t.grad is not None:
                assert (packed[name] - t.grad).norm() < 3e-4 * t.grad.norm() + 1e-4, name

    @pytest.mark.parametrize("rest", [TOKENS - SHORT, 2])
    def test_a_packed_row_leaves_its_last_sequence_in_the_cache(self, family, model, ids, rest):
        packed, alone = Decoder(model), Decoder(model)
        with patch_transformers([family]):
            packed(ids[:1], seq_idx=(torch.arange(TOKENS) >= TOKENS - rest).int()[None])
            alone(ids[:1, TOKENS - rest :])
        assert same_states(packed, alone)

    def test_the_first_of_packed_sequences_goes_on_from_the_cache(self, family, model, ids):
        packed, alone = Decoder(model), Decoder(model)
        with patch_transformers([family]):
            packed(ids[:1, :11])
            logits = packed(ids[:1, 11:], seq_idx=(torch.arange(TOKENS - 11) >= 9).int()[None])
            alone(ids[:1, 20:])
            assert same_states(packed, alone)
            if family in PURE:  # no attention, which would see all tokens
                assert distance(logits[:, :9], logits_of(model, ids[:1, :20])[:, 11:]) < 2e-5

    def test_greedy_generation_of_a_padded_batch(self, family, model, ids):
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        with patch_transformers([family]):
            batch, mask = padded(ids, SHORT, "left")
            got = model.generate(batch, attention_mask=mask, **options)[:, TOKENS:]
            for row, (one, length) in enumerate(zip(ids, (TOKENS, SHORT), strict=True)):
                wanted = model.generate(one[None, :length], attention_mask=torch.ones(1, length).long(), **options)[0, length:]
                assert torch.equal(got[row], wanted)

    def test_float64(self, family, ids):
        model = model_of(family).double()
        wanted = logits_of(model, ids)
        with patch_transformers([family]):
            assert distance(logits_of(model, ids), wanted) < 1e-5  # theirs is float32 in places

    def test_what_is_not_given_is_said_by_them(self, family, model):
        with patch_transformers([family]), pytest.raises(ValueError, match="input_ids"):
            model(use_cache=False)

    def test_bfloat16(self, family, ids):
        model = model_of(family)
        wanted = logits_of(model, ids)
        model.bfloat16()
        theirs = distance(logits_of(model, ids).float(), wanted)
        with patch_transformers([family]):
            assert distance(logits_of(model, ids).float(), wanted) < 1.5 * theirs
