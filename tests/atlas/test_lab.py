"""The lab: the page's recurrence equals the library's op, cell by cell, for any sentence, rule and setting."""

import math

import pytest
import torch

import linattn
from linattn.atlas import lab
from tests.atlas.browser import needed
from tests.atlas.pages import data

RULES = [rule.key for rule in lab.RULES]
SENTENCES = {"given": [w.en for w in lab.sentence.SENTENCE], "typed": "red green red blue , red green Ann 7 blue loves !".split()}


def rule(key):
    return next(r for r in lab.RULES if r.key == key)


def test_words_are_vectors_of_length_one_that_only_their_letters_choose():
    assert lab.vector("tea") == lab.vector("tea") != lab.vector("Tea")
    assert all(math.isclose(math.hypot(*lab.vector(w)), 1) for w in ("Ann", "小安", "naïve", "🙂"))
    drawn = torch.tensor([lab.numbers(f"word {i}", 8) for i in range(2000)])
    assert drawn.min() >= -1 and drawn.max() < 1 and abs(drawn.mean()) < 0.02 and abs(drawn.var() - 1 / 3) < 0.01


@pytest.mark.parametrize("heads", lab.HEADS[1:])
@pytest.mark.parametrize("key", RULES)
def test_each_head_is_the_rule_on_its_share_of_the_channels(key, heads, monkeypatch):
    """The same for one head, on words with only that head's channels."""
    whole, words, size = lab.run(lab.inputs(SENTENCES["typed"], rule(key), 0.7, 0.6, heads)), SENTENCES["typed"], 8 // heads
    vector, gates, shares = lab.vector, lab.gates, lab.shares
    for head in range(heads):
        own = slice(head * size, (head + 1) * size)
        for name, numbers in (("vector", vector), ("gates", gates), ("shares", shares)):
            monkeypatch.setattr(lab, name, lambda word, numbers=numbers, own=own: numbers(word)[own])
        decay = 0.7 ** (0.5**head) if key == "constant" else 0.7
        alone = lab.run(lab.inputs(words, rule(key), decay, 0.6))
        torch.testing.assert_close(whole.outputs[:, own], alone.outputs)
        torch.testing.assert_close(whole.states[:, own, own], alone.states)
    assert whole.states.count_nonzero() <= len(words) * 64 / heads


@pytest.mark.parametrize("key", RULES)
def test_traces_follow_the_rules_as_they_are_written_on_the_page(key):
    """Each equation token by token, against the op."""
    made, words = lab.inputs(SENTENCES["typed"], rule(key), 0.7, 0.6), SENTENCES["typed"]
    found = lab.run(made)
    s, z = torch.zeros(8, 8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    for t, word in enumerate(words):
        v = torch.tensor(lab.vector(word), dtype=torch.float64)
        k = torch.tensor(lab.vector(words[t - 1]), dtype=torch.float64) if t else torch.zeros(8, dtype=torch.float64)
        q, speed = v, torch.tensor(lab.gates(word), dtype=torch.float64)
        if key == "normalize":
            q, k = (torch.where(x > 0, x, x.exp() - 1) + 1 for x in (q, k))
            k, z = k * (t > 0), z + k * (t > 0)
        alpha = {"constant": 0.7, "head": 0.7 ** speed[0], "gated_delta": 0.7 ** speed[0]}.get(key, 1.0)
        if key in ("channel", "kda", "rwkv7"):
            alpha = (0.7**speed)[:, None]
        faded = alpha * s
        if key in ("delta", "gated_delta", "kda"):
            new = torch.outer(k, 0.6 * (v - k @ faded))
        elif key == "rwkv7":
            rate = 0.6 * torch.tensor(lab.shares(word), dtype=torch.float64)
            new = torch.outer(rate * k, v - k @ s)
        else:
            new = torch.outer(k, v)
        s = faded + new
        torch.testing.assert_close(found.states[t], s)
        torch.testing.assert_close(found.outputs[t], q @ s / (q @ z + 1e-6) if key == "normalize" else q @ s)


def test_the_page_carries_the_op_s_numbers(site):
    for shown in data(site, "lab.html")["lab"]["rules"]:
        for heads in lab.HEADS:
            made = lab.inputs(SENTENCES["given"], rule(shown["key"]), heads=heads)
            whole = linattn.linear_attention(**made, backend="reference")[0].flatten(1)
            outputs = torch.tensor(shown["outputs"][str(heads)], dtype=torch.float64)
            torch.testing.assert_close(outputs, whole[-len(outputs) :], rtol=1e-10, atol=1e-12)
            state = torch.tensor(shown["states"][str(heads)], dtype=torch.float64)
            torch.testing.assert_close(state, lab.run(made).states[-1], rtol=1e-10, atol=1e-12)
            assert len(outputs) == (12 if heads == 1 else 1)


class TestPage:
    @pytest.fixture(autouse=True)
    def _browser(self):
        needed()

    @pytest.fixture
    def reader(self, open_page):
        return open_page("lab.html")

    def check(self, reader, words, key, token, decay=lab.DECAY, beta=lab.BETA):
        made = lab.inputs(words, rule(key), decay, beta)
        found, t = lab.run(made), token - 1
        before = found.states[t - 1] if t else torch.zeros_like(found.states[0])
        log = made.get("decay", torch.zeros(1, dtype=torch.float64))
        log = log[0, t, 0] if log.ndim > 1 else log
        # The lab shows the words; feature maps and rates are part of the rule.
        now = [torch.tensor(lab.vector(w), dtype=torch.float64) for w in words]
        key_row = now[t - 1] if t else torch.zeros(8, dtype=torch.float64)
        if key in ("normalize", "rwkv7"):
            now[t], key_row = made["q"][0, t, 0], made["k"][0, t, 0]
        value = torch.tensor(lab.vector(words[t]), dtype=torch.float64)
        rows = torch.stack([now[t], key_row, value, log.exp().expand(8), found.outputs[t]])
        for panel, wanted in (("token", rows), ("state", found.states[t]), ("change", found.states[t] - before)):
            place = {"token": "k", "change": "decay"}.get(panel, panel)
            shown = reader.cells(f"[data-panel={place}]")
            assert len(shown) == wanted.numel()
            for (r, c), got in shown.items():
                assert got == pytest.approx(wanted[r, c].item(), rel=1e-9, abs=1e-12), (key, token, panel, r, c)
        script = "ns => Object.fromEntries(ns.map(n => [n.dataset.name, +n.dataset.value]))"
        heard = reader.page.locator("[data-panel=output] rect[data-name]").evaluate_all(script)
        unique = list(dict.fromkeys(words))
        wanted = lab.recalled(found.outputs[t : t + 1], unique)[0].tolist()
        assert heard == pytest.approx(dict(zip(unique, wanted, strict=True)), rel=1e-9, abs=1e-12)

    def test_every_rule_at_several_tokens(self, reader):
        for key in RULES:
            reader.page.locator(f"[data-choice=rule] input[value={key}]").check(force=True)
            for token in (1, 6, 12):
                reader.slide("token", token)
                self.check(reader, SENTENCES["given"], key, token)
            assert float(reader.page.locator("[data-name=distance]").get_attribute("data-value")) < 1e-12

    @pytest.mark.parametrize("heads", lab.HEADS[1:])
    def test_a_state_of_several_heads_has_a_block_for_each(self, reader, heads):
        reader.page.locator(f"[data-choice=heads] input[value='{heads}']").check(force=True)
        size = 8 // heads
        inside = {(r, c) for r in range(8) for c in range(8) if r // size == c // size}
        assert reader.page.locator("[data-shape=state]").inner_text() == f"{heads} × [{size}, {size}]"
        for key in RULES:
            reader.page.locator(f"[data-choice=rule] input[value={key}]").check(force=True)
            found = lab.run(lab.inputs(SENTENCES["given"], rule(key), heads=heads))
            for token in (1, 11):
                reader.slide("token", token)
                for panel, wanted in (
                    ("state", found.states[token - 1]),
                    ("decay", found.states[token - 1] - found.states[token - 2] * (token > 1)),
                ):
                    shown = reader.cells(f"[data-panel={panel}]")
                    assert set(shown) == inside
                    assert all(shown[cell] == pytest.approx(wanted[cell].item(), rel=1e-9, abs=1e-12) for cell in inside)
            assert float(reader.page.locator("[data-name=distance]").get_attribute("data-value")) < 1e-12

    def test_a_typed_sentence_and_other_settings(self, reader):
        reader.page.locator("[data-input=sentence]").fill(" ".join(SENTENCES["typed"]))
        reader.slide("decay", 0.65)
        reader.slide("beta", 1.4)
        for key in RULES:
            reader.page.locator(f"[data-choice=rule] input[value={key}]").check(force=True)
            for token in (2, 12):
                reader.slide("token", token)
                self.check(reader, SENTENCES["typed"], key, token, 0.65, 1.4)
        assert reader.page.locator("[data-name=distance]").get_attribute("data-value") == ""

    def test_chinese_words_of_the_sentence_are_the_same_words(self, open_page):
        reader = open_page("lab.html", language="zh")
        field = reader.page.locator("[data-input=sentence]")
        assert field.input_value() == "小安爱茶，小本爱奶，现在小安爱奶"
        field.fill("小本爱茶，小安爱猫")
        reader.slide("token", 9)
        self.check(reader, ["Ben", "loves", "tea", ",", "Ann", "loves", "猫"], "none", 7)

    def test_chinese_is_cut_by_words_and_a_known_word_within_another_is_not_cut_out(self, open_page):
        reader = open_page("lab.html", language="zh")
        reader.page.locator("[data-input=sentence]").fill("可爱的熊猫喜欢竹子，小安也喜欢茶")
        words = ["可爱", "的", "熊猫", "喜欢", "竹子", ",", "Ann", "也", "喜欢", "tea"]
        assert reader.page.locator("[data-slider=token]").get_attribute("max") == str(len(words))
        reader.slide("token", 9)
        self.check(reader, words, "none", 9)

    def test_editing_keeps_the_place(self, reader):
        reader.slide("token", 5)
        field = reader.page.locator("[data-input=sentence]")
        field.fill(f"{field.input_value()}, now Ben loves tea")
        assert reader.page.locator("[data-slider=token]").input_value() == "5"
        field.fill("Ann loves tea")
        assert reader.page.locator("[data-slider=token]").input_value() == "3", "the last there is"

    def test_nothing_typed_and_too_much(self, reader):
        field = reader.page.locator("[data-input=sentence]")
        for text in ("", "   ", "x", "<b>&amp;", "a " * 500):
            field.fill(text)
        assert reader.page.locator("[data-slider=token]").get_attribute("max") == "40"
        words = [
            "\U0001f468\u200d\U0001f469\u200d\U0001f467",
            "\u2764\ufe0f",
            "\U0001f44d\U0001f3fd",
            "हिन्दी",
            "e\u0301t\u00e9",
            "tea",
            "我们",
            "2",
        ]
        field.fill("  ".join(words[:6]) + "我们2")
        assert reader.page.locator("[data-slider=token]").get_attribute("max") == "8"
        reader.slide("token", 8)
        self.check(reader, words, "none", 8)
        field.fill("a " * 500)
        reader.slide("token", 40)
        self.check(reader, ["a"] * 40, "none", 40)
