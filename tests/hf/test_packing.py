"""Packed rows as made by transformers' collators: each form of marking equals separate sequences."""

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from linattn.hf import LinattnModel
from tests.hf.prompts import model

MIXERS = ["gla, softmax", "mamba2, softmax", "gated_deltanet, rwkv7", "retnet, fox"]
LENGTHS = [4, 1, 1, 7, 2]
TOKENS = sum(LENGTHS)
ENDS = torch.tensor([0, *LENGTHS]).cumsum(0)


def positions(start=0):
    return torch.cat([torch.arange(start, start + n) for n in LENGTHS])[None]


def ways():
    index = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]
    ends = ENDS.int()
    flash = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    return {
        "cu_seqlens": {"cu_seqlens": ENDS},
        "position_ids": {"position_ids": positions()},
        "position_ids from 2": {"position_ids": positions(2)},
        "cu_seq_lens": flash,
        "seq_idx": {"seq_idx": index.int()},
        "all of them": {"cu_seqlens": ENDS, "position_ids": positions(), "seq_idx": index, **flash},
        "beside a mask of ones": {"position_ids": positions(), "attention_mask": torch.ones(1, TOKENS)},
    }


def apart(lm, ids, **how):
    return torch.cat([lm(part, **how).logits for part in ids.split(LENGTHS, 1)], 1)


def gradients(lm, loss):
    lm.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in lm.parameters()]


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_way_of_packing_equals_the_sequences_on_their_own(mixer):
    lm, ids = model(mixer), torch.randint(50, (1, TOKENS))
    want = apart(lm, ids)
    for name, how in ways().items():
        torch.testing.assert_close(lm(ids, **how).logits, want, msg=name)
    hidden = LinattnModel(lm.config).double()
    hidden.load_state_dict(lm.model.state_dict(), strict=False)
    hidden.model.load_state_dict(lm.model.state_dict())
    torch.testing.assert_close(lm.lm_head(hidden.eval()(ids, position_ids=positions()).last_hidden_state), want)


@pytest.mark.parametrize("options", [{"window": 3}, {"kv_heads": 2, "base": 100.0}])
def test_windows_and_rotary_positions_begin_again(options):
    lm, ids = model(mixer_options={"softmax": options}), torch.randint(50, (1, TOKENS))
    torch.testing.assert_close(lm(ids, position_ids=positions()).logits, apart(lm, ids))


@pytest.mark.parametrize("mixer", MIXERS)
def test_losses_and_gradients_are_those_of_the_sequences(mixer):
    lm, ids = model(mixer).train(), torch.randint(50, (1, TOKENS))
    learned = TOKENS - len(LENGTHS)
    want = sum(lm(part, labels=part, num_items_in_batch=learned).loss for part in ids.split(LENGTHS, 1) if part.shape[1] > 1)
    wanted = gradients(lm, want)
    separated = ids.clone()
    separated[0, ENDS[:-1]] = -100  # as transformers' collator does; without it a border is no label either
    for name, how in ways().items():
        for labels in (ids, separated):
            loss = lm(ids, labels=labels, **how).loss
            torch.testing.assert_close(loss, want, msg=name)
            for got, p in zip(gradients(lm, loss), wanted, strict=True):
                torch.testing.assert_close(got, p, msg=name)
    assert torch.equal(separated[0, ENDS[:-1]], torch.full((len(LENGTHS),), -100)) and not torch.equal(ids, separated)


def test_rows_of_a_batch_may_be_packed_each_in_its_own_way():
    lm, ids = model(), torch.randint(50, (3, 6))
    places = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 3, 4]])
    want = torch.stack([torch.cat([lm(ids[b : b + 1, s]).logits[0] for s in parts]) for b, parts in enumerate(
        ([slice(0, 3), slice(3, 6)], [slice(0, 6)], [slice(0, 1), slice(1, 6)])
    )])  # fmt: skip
    out = lm(ids, position_ids=places, labels=ids, output_hidden_states=True)
    torch.testing.assert_close(out.logits, want)
    assert {tuple(h.shape) for h in out.hidden_states} == {(3, 6, 32)}
    embedded = lm(inputs_embeds=lm.get_input_embeddings()(ids), position_ids=places)
    torch.testing.assert_close(embedded.logits, want)
    torch.testing.assert_close(lm(ids, position_ids=places, logits_to_keep=1).logits, want[:, -1:])


def test_positions_that_run_on_or_stand_beside_padding_change_nothing():
    lm, ids = model(), torch.randint(50, (2, 6))
    want = lm(ids).logits
    for places in (torch.arange(6)[None], torch.arange(6).expand(2, -1), torch.arange(5, 11)[None]):
        assert torch.equal(lm(ids, position_ids=places).logits, want)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    for filled in (0, 1):
        places = (mask.cumsum(1) - 1).masked_fill(mask == 0, filled)
        out = lm(ids[:1], attention_mask=mask, position_ids=places)
        torch.testing.assert_close(out.logits[:, 2:], lm(ids[:1, 2:]).logits)
        assert out.past_key_values.state.rows == 1


def test_the_states_of_packed_sequences_go_on():
    lm, ids, more = model(), torch.randint(50, (1, 6)), torch.randint(50, (1, 5))
    cache = lm(ids, position_ids=torch.tensor([[0, 1, 0, 1, 2, 3]])).past_key_values
    assert cache.state.rows == 2
    out = lm(more, position_ids=torch.tensor([[2, 3, 4, 4, 5]]), past_key_values=cache)
    want = [lm(torch.cat([a, b], 1)).logits[:, a.shape[1] :] for a, b in zip(ids.split([2, 4], 1), more.split([3, 2], 1), strict=True)]
    torch.testing.assert_close(out.logits, torch.cat(want, 1))
    again = lm(ids[:, :3], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="state must have one row a sequence, 2 here, but came with 1"):
        lm(more, position_ids=torch.tensor([[3, 4, 0, 1, 2]]), past_key_values=again)


REFUSED = [
    ({"position_ids": torch.arange(5)[None]}, r"position_ids must have shape \[B, T\] = \[1, 6\], but came with \[1, 5\]"),
    ({"position_ids": torch.arange(6)}, r"position_ids must have shape \[B, T\] = \[1, 6\].*, but came with \[6\]"),
    ({"position_ids": torch.rand(1, 6)}, "position_ids must be torch.int64 or torch.int32, but came as torch.float32"),
    ({"position_ids": [[0, 1, 2, 0, 1, 2]]}, "position_ids must be a tensor, but came as list"),
    ({"seq_idx": torch.zeros(1, 5, dtype=torch.int64)}, r"seq_idx must have shape \[B, T\] = \[1, 6\].*, but came with \[1, 5\]"),
    ({"cu_seq_lens_q": torch.tensor([0, 3, 5])}, r"cu_seq_lens_q must rise from 0 to T = 6 and never fall, but came as \[0, 3, 5\]"),
    ({"cu_seq_lens_k": torch.tensor([[0, 6]])}, r"cu_seq_lens_k must have shape \[N \+ 1\], but came with \[1, 2\]"),
    (
        {"cu_seqlens": torch.tensor([0, 4, 6]), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])},
        r"position_ids must begin sequences where cu_seqlens does, \[0, 4, 6\], but begins them at \[0, 3, 6\]",
    ),
    (
        {"cu_seq_lens_q": torch.tensor([0, 4, 6]), "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]])},
        r"seq_idx must begin sequences where cu_seq_lens_q does, \[0, 4, 6\], but begins them at \[0, 3, 6\]",
    ),
    (
        {"cu_seq_lens_q": torch.tensor([0, 4, 6]), "cu_seq_lens_k": torch.tensor([0, 3, 6])},
        r"cu_seq_lens_k must begin sequences where cu_seq_lens_q does, \[0, 4, 6\], but begins them at \[0, 3, 6\]",
    ),
    ({"cu_seq_len_q": torch.tensor([0, 6])}, "unexpected keyword argument 'cu_seq_len_q'"),
]


@pytest.mark.parametrize(("how", "message"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(how, message):
    lm, ids = model(), torch.randint(50, (1, 6))
    for face in (lm, LinattnModel(lm.config).double()):
        with pytest.raises((TypeError, ValueError), match=message):
            face(ids, **how)


def test_ends_of_packed_sequences_are_of_one_row():
    with pytest.raises(ValueError, match="cu_seq_lens_q packs the sequences into one row, so B must be 1, but is 2"):
        model()(torch.randint(50, (2, 6)), cu_seq_lens_q=torch.tensor([0, 3, 6]))


def test_empty_sequences_contradict_nothing():
    lm, ids = model(), torch.randint(50, (1, 6))
    places = torch.tensor([[0, 1, 2, 0, 1, 2]])
    out = lm(ids, cu_seqlens=torch.tensor([0, 3, 3, 6, 6]), position_ids=places, labels=ids)
    torch.testing.assert_close(out.logits, lm(ids, position_ids=places).logits)
    assert out.past_key_values.state.rows == 4


def test_no_tokens_and_single_ones():
    lm, ids = model(), torch.randint(50, (2, 6))
    none = dict.fromkeys(("position_ids", "seq_idx", "labels"), ids[:1, :0])
    assert lm(ids[:1, :0], cu_seqlens=torch.tensor([0, 0]), **none).logits.shape == (1, 0, 50)
    assert lm(ids[:1, :0], **none).logits.shape == (1, 0, 50)
    cache = lm(ids[:, :5]).past_key_values
    one = {"position_ids": torch.full((2, 1), 5), "seq_idx": torch.zeros(2, 1, dtype=torch.int64)}
    torch.testing.assert_close(lm(ids[:, 5:], past_key_values=cache, **one).logits, lm(ids).logits[:, 5:])


@pytest.mark.slow
def test_a_compiled_model_keeps_packed_sequences_apart():
    lm, ids = model(), torch.randint(50, (1, TOKENS))
    want = apart(lm, ids, use_cache=False)
    compiled = torch.compile(lm, backend="eager")
    for how in ({"position_ids": positions()}, {"seq_idx": ways()["seq_idx"]["seq_idx"]}):
        torch.testing.assert_close(compiled(ids, use_cache=False, **how).logits, want)
    whole = torch.compile(lm, backend="eager", fullgraph=True)
    for how in ({"cu_seqlens": ENDS, "position_ids": positions()}, ways()["cu_seq_lens"]):
        torch.testing.assert_close(whole(ids, use_cache=False, labels=ids, **how).logits, want)


@pytest.mark.parametrize("flags", [{}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True},
                                   {"return_flash_attn_kwargs": True, "return_position_ids": False}])  # fmt: skip
def test_the_stock_trainer_learns_from_the_flattening_collator_as_from_single_sequences(flags, tmp_path):
    texts = [torch.randint(50, (n,)).tolist() for n in (3, 7, 5, 2)]
    data = [{"input_ids": t, "labels": t} for t in texts]
    start, ends = model().float().train(), []
    for packed in (True, False):
        lm = model().float()
        lm.load_state_dict(start.state_dict())
        settings = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4 if packed else 1, gradient_accumulation_steps=1 if packed else 4,
            max_steps=2, learning_rate=1e-2, lr_scheduler_type="constant", optim="sgd", report_to=[], use_cpu=True, save_strategy="no",
            disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        Trainer(lm, settings, train_dataset=data, data_collator=DataCollatorWithFlattening(**flags)).train()
        ends.append(lm.state_dict())
    assert not torch.equal(ends[0]["lm_head.weight"], start.state_dict()["lm_head.weight"])
    for name, weight in ends[0].items():
        torch.testing.assert_close(weight, ends[1][name])


@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_with_positions(use_cache):
    lm, ids = model(), torch.randint(1, 50, (2, 7))
    want = lm.generate(ids, max_new_tokens=5, do_sample=False)
    how = {"max_new_tokens": 5, "do_sample": False, "use_cache": use_cache}
    assert torch.equal(lm.generate(ids, position_ids=torch.arange(7).expand(2, -1), **how), want)
    assert torch.equal(lm.generate(ids, position_ids=torch.arange(7)[None], **how), want)
    for row in ids[:, 3:], ids[:1, 3:]:  # left padding, alone and beside a full row
        whole = torch.cat([row.new_zeros(len(row), 3), row], 1)
        mask = (whole != 0).long()
        alone = lm.generate(row, max_new_tokens=5, do_sample=False)
        for places in (None, (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)):
            given = {} if places is None else {"position_ids": places}
            assert torch.equal(lm.generate(whole, attention_mask=mask, **given, **how)[:, 7:], alone[:, 4:])


def test_generate_refuses_packed_prompts():
    lm, ids = model(), torch.randint(50, (1, 6))
    for how in (
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])},
        *({name: torch.tensor([0, 3, 6])} for name in ("cu_seqlens", "cu_seq_lens_q")),
    ):
        with pytest.raises(ValueError, match=f"{next(iter(how))} packs sequences into one row, .* one row per prompt"):
            lm.generate(ids, max_new_tokens=2, **how)
    with pytest.raises(ValueError, match=r"position_ids must have shape \[B, T\] = \[1, 6\].*, but came with \[1, 4\]"):
        lm.generate(ids, max_new_tokens=2, position_ids=torch.arange(4)[None])
