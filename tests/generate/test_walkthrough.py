"""One step of generation: shows the model's values, changes nothing, and is printed and drawn safely."""

import re
import xml.etree.ElementTree as ET
from dataclasses import asdict

import pytest
import torch

from linattn import ffn
from linattn.atlas.walkthrough import page, svg
from linattn.cli.main import main
from linattn.data.codec import ByteCodec
from linattn.generate import Sampling, stream
from linattn.generate.walkthrough import experts_of, walkthrough
from linattn.models import LanguageModel, LMConfig, files
from linattn.report.language import script
from linattn.report.walkthrough import lines

GREEDY = Sampling(temperature=0)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LanguageModel(LMConfig(dim=32, layers=3, mixer="gla, softmax", ffn="swiglu, experts, none")).eval()


def test_stages_are_what_the_parts_gave(model):
    found = walkthrough(model, ByteCodec(), "abc", sampling=GREEDY)
    parts = [(s.part, s.layer, s.name) for s in found.stages]
    assert parts == [
        ("embedding", 0, "embedding"), ("mixer", 1, "gla"), ("ffn", 1, "swiglu"), ("mixer", 2, "softmax"), ("ffn", 2, "experts"),
        ("mixer", 3, "gla"), ("norm", 0, "rms"), ("classifier", 0, "classifier"),
    ]  # fmt: skip
    ids = torch.tensor([[97, 98, 99]])
    x = model.model.embedding(ids)
    assert torch.equal(found.stages[0].vector, x[0, -1]) and found.stages[0].shape == (1, 3, 32)
    block = model.model.layers[0]
    y, state = block.mixer(block.mixer_norm(x), return_state=True)
    torch.testing.assert_close(found.stages[1].vector, y[0, -1])
    assert found.stages[1].state == {name: tuple(t.shape) for name, t in state.items()}
    assert found.stages[1].state_bytes == sum(t.nbytes for t in state.values())
    x = x + y
    torch.testing.assert_close(found.stages[2].vector, block.ffn(block.ffn_norm(x))[0, -1])
    logits = model(ids)[0, -1]
    torch.testing.assert_close(found.stages[-1].vector, logits)
    best = logits.topk(8)
    assert [t.number for t in found.likeliest] == best.indices.tolist()
    assert [t.probability for t in found.likeliest] == pytest.approx(logits.softmax(0)[best.indices].tolist())
    largest, vector = found.stages[1].largest, found.stages[1].vector  # close to y, but not to the bit on every CPU
    assert [v for _, v in largest] == [vector[place].item() for place, _ in largest]
    assert largest[0][0] == vector.abs().argmax()


def test_the_experts_of_the_last_token(model):
    (stage,) = [s for s in walkthrough(model, ByteCodec(), "abc", sampling=GREEDY).stages if s.name == "experts"]
    seen = []
    handle = model.model.layers[1].ffn.register_forward_hook(lambda module, args, y: seen.append(args[0][0, -1:]))
    model(torch.tensor([[97, 98, 99]]))
    handle.remove()
    weights, chosen = model.model.layers[1].ffn.route(seen[0])
    assert [e for e, _ in stage.experts] == chosen[0].tolist()
    assert [w for _, w in stage.experts] == pytest.approx(weights[0].tolist()) and sum(w for _, w in stage.experts) == pytest.approx(1)
    assert experts_of(ffn.create("swiglu", 32), seen[0]) == []


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7, 20, 0.9)])
def test_the_loop_writes_what_generation_writes(model, sampling):
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    found = walkthrough(model, ByteCodec(), "abc", max_new_tokens=7, sampling=sampling, generator=generators[0])
    how = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    assert [t.number for t in found.written] == list(stream(model, [97, 98, 99], max_new_tokens=7, generator=generators[1], **how))
    assert found.ended == "after 7 tokens, as asked"


def test_what_is_chosen_is_always_among_the_candidates(model):
    found = [walkthrough(model, ByteCodec(), "abc", max_new_tokens=1, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    for one in found:
        assert one.written[0].number in [t.number for t in one.candidates] and len(one.candidates) in (8, 9)
        assert "\n".join(lines(one)).count(" <") == 1 and svg(one).count("← chosen") == 1
    assert any(len(one.candidates) == 9 for one in found)


def test_it_ends_before_the_first_stop_text(model):
    free = walkthrough(model, ByteCodec(), "abc", max_new_tokens=6, sampling=GREEDY)
    stop = free.text[2:4]
    found = walkthrough(model, ByteCodec(), "abc", max_new_tokens=6, sampling=GREEDY, stop=["never", stop])
    assert found.text == free.text[: free.text.index(stop)] and found.ended == f"at the stop text {stop!r}"
    assert len(found.written) < 6


def test_nothing_is_left_on_the_model(model):
    before = model(torch.tensor([[97, 98]]))
    walkthrough(model, ByteCodec(), "abc")
    assert torch.equal(model(torch.tensor([[97, 98]])), before)
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("mixer", ["mamba2", "rwkv7, rwkv_channel", "lstm", "local"])
def test_any_mixer(mixer):
    found = walkthrough(LanguageModel(LMConfig(dim=32, layers=2, mixer=mixer)).eval(), ByteCodec(), "ab", max_new_tokens=2)
    assert len(found.stages) == 7 and "\n".join(lines(found)).count("layer") >= 2


def test_refusals(model):
    with pytest.raises(ValueError, match="prompt must be a text of at least one token"):
        walkthrough(model, ByteCodec(), "")
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, but came as 0"):
        walkthrough(model, ByteCodec(), "a", max_new_tokens=0)


def test_the_lines_and_the_drawing_are_safe_and_complete(model):
    prompt = "<b>\x1b[31mπ"
    found = walkthrough(model, ByteCodec(), prompt, max_new_tokens=3, sampling=GREEDY)
    told = "\n".join(lines(found))
    assert "\x1b" not in told and max(map(len, told.splitlines())) < 100
    assert [line[:1] for line in told.splitlines() if line[:1].isdigit()] == list("123456")
    assert "'\\xcf' 207" in told and "[1, 10, 256]: a logit for each of 256 tokens" in told and "experts" in told
    assert r"'<b>\x1b[31mπ'" in told and r"'\x1b' 27" in told, "a control code is shown, not sent"
    picture, whole = svg(found), page(found)
    root = ET.fromstring(picture)
    values = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("data-value")]
    assert len(values) == 7 * 32, "a cell for every channel of every stage but the classifier"
    assert "<b>" not in whole and "\x1b" not in whole + picture
    assert not re.search(r"(src|href)=|@import", whole) and re.findall("<script>(.*?)</script>", whole, re.S) == [script()]


def test_the_page_is_in_both_languages(model):
    found = walkthrough(model, ByteCodec(), "abc", max_new_tokens=3, sampling=GREEDY)
    english, chinese = (list(lines(found, language)) for language in ("en", "zh"))
    assert len(english) == len(chinese)
    for one, other in zip(english, chinese, strict=True):
        numbers = [re.findall(r"[\d.,]*\d", line) for line in (one, other)]
        assert sorted(numbers[0]) == sorted(numbers[1]), (one, other)
        assert one == other or re.search("[\u4e00-\u9fff]", other), other
    assert chinese[0].startswith("1 分词") and "第 1 层 gla" in "\n".join(chinese)
    drawn = [ET.fromstring(svg(found, language)) for language in ("en", "zh")]
    english, chinese = ([t.text for t in root.iter("{http://www.w3.org/2000/svg}text")] for root in drawn)
    assert len(english) == len(chinese) and "6 loop" in english and "6 循环" in chinese and "6 loop" not in chinese
    assert [page(found).count(f'<div lang="{code}" class="{kind}">') for code in ("en", "zh-Hans") for kind in ("broad", "narrow")] == 4 * [
        1
    ]


def test_a_prompt_with_backslashes_is_drawn(model):
    found = walkthrough(model, ByteCodec(), "C:\\path\n\\1", max_new_tokens=1, sampling=GREEDY)
    label = ET.fromstring(svg(found)).get("aria-label")
    assert r"'C:\path\n\1'" in label


def test_the_command(model, tmp_path, capsys):
    files.save(tmp_path / "run", model, {"model_type": "linattn", **asdict(model.config)})
    command = ["", str(tmp_path / "run"), "--prompt", "def", "--seed", "1", "--max-new-tokens", "4", "--top-k", "9"]
    printed = []
    for earlier, name in ((False, "a.svg"), (True, "a.html")):
        command[0] = "trace" if earlier else "walkthrough"
        assert main([*command, "--out", str(tmp_path / name)]) == 0
        printed.append(capsys.readouterr().out.partition("\n\ndrawing")[0])
        assert (tmp_path / name).stat().st_size > 5000
    assert printed[0] == printed[1] and "temperature 0.8, top 9" in printed[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", "a", "--out", "x.png"], "--out must be a file that ends in .svg or .html, but came as x.png"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--prompt", "a", "--stop", ""], "--stop is empty"),
        (["--prompt", "a"], "nowhere does not exist"),
    ],
)
def test_the_command_refuses(words, message, capsys):
    assert main(["walkthrough", "nowhere", *words]) == 2
    assert message in capsys.readouterr().err
