"""Chat templates: concatenated turns equal the template of the whole conversation, also on the command line."""

import io
import sys

import pytest
import torch
import transformers

from linattn.cli.main import main
from linattn.data import TokenizerCodec
from linattn.generate import stream
from linattn.hf.chat import Chat, chat_of, load_tokenizer
from linattn.train import load_run
from tests.hf.gguf_files import write
from tests.hf.test_gguf_tokenizer import HOW, parts, trained
from tests.hf.theirs import distance, theirs_of

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROLES = {"bos": 1, "eos": 2, "padding": 2, "unknown": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A GGUF file with a random model, a tokenizer and a template."""
    inner = trained("smollm")
    theirs = theirs_of("llama", **HOW, vocab_size=inner.get_vocab_size())
    path = tmp_path_factory.mktemp("chat") / "m.gguf"
    theirs.save_pretrained(path.parent / "folder")
    return write(path, theirs, "llama", tokenizer=parts(inner, "smollm") | {"template": CHATML, "roles": ROLES})


def test_turns_are_the_template_of_the_conversation(model):
    chat, tokenizer = chat_of(model, load_run(model)[0]), load_tokenizer(model)
    assert (chat.stops, chat.end) == ((2,), "<|im_end|>")
    text = chat.first("one") + "two<|im_end|>" + chat.later("three")
    said = [{"role": r, "content": c} for r, c in (("user", "one"), ("assistant", "two"), ("user", "three"))]
    assert text == tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)


def test_a_template_without_an_end(model):
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"
    chat = Chat(tokenizer, [2, 5])
    assert (chat.stops, chat.end, chat.first("a"), chat.later("b")) == ((2, 5), "", "a\n", "\nb\n")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        Chat(tokenizer)
    tokenizer.chat_template, tokenizer.eos_token = CHATML, None
    with pytest.raises(ValueError, match="has no end token"):
        Chat(tokenizer)


def said(monkeypatch, capsys, *lines, args):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert main(["chat", *args, "--temperature", "0", "--max-new-tokens", "5"]) == 0
    return capsys.readouterr().out


def test_a_conversation_is_what_the_model_says_to_the_whole_text(model, monkeypatch, capsys, tmp_path):
    """In one call, and in two with the state in a file between them: greedy replies of 5 tokens, truncated and closed explicitly."""
    language_model, codec = load_run(model)
    read, wanted = [], ""
    chat = chat_of(model, language_model)
    for turn in (chat.first("it's a test"), chat.later("of words")):
        read += codec.encode(turn)
        tokens = [t for t in stream(language_model, read, max_new_tokens=5, temperature=0, stop=chat.stops) if t != 2]
        wanted += codec.decode(tokens) + "\n"
        read += [*tokens, 2]
    path, state = str(model), str(tmp_path / "state.safetensors")
    assert said(monkeypatch, capsys, "it's a test", "of words", args=[path]) == wanted
    first = said(monkeypatch, capsys, "it's a test", args=[path, "--save-state", state])
    assert first + said(monkeypatch, capsys, "of words", args=[path, "--load-state", state]) == wanted


def test_a_published_folder_talks_like_the_file(model, monkeypatch, capsys):
    folder = model.parent / "folder"
    load_tokenizer(model).save_pretrained(folder)
    wanted = said(monkeypatch, capsys, "it's a test", args=[str(model)])
    assert said(monkeypatch, capsys, "it's a test", args=[str(folder)]) == wanted
    ours, codec = load_run(folder)
    assert isinstance(codec, TokenizerCodec)
    assert torch.equal(ours.lm_head.weight, load_run(model)[0].lm_head.weight)
    (folder / "tokenizer.json").unlink()
    assert main(["generate", str(folder), "--prompt", "a"]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


def test_a_file_goes_out_as_a_folder_with_its_tokenizer(model, capsys, tmp_path):
    out = tmp_path / "out"
    assert main(["export", str(model), "--to", "llama", str(out)]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    ids = torch.randint(250, (1, 20))
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
        assert distance(theirs(ids).logits, load_run(model)[0](ids).logits) < 1e-5
    tokenizer, known = transformers.AutoTokenizer.from_pretrained(out), load_tokenizer(model)
    assert tokenizer.encode("it's a test 12") == known.encode("it's a test 12")
    assert (tokenizer.chat_template, tokenizer.eos_token_id) == (CHATML, 2)
    bare = write(tmp_path / "bare.gguf", theirs_of("llama", **HOW), "llama")
    assert main(["export", str(bare), "--to", "llama", str(tmp_path / "bare")]) == 0
    assert not (tmp_path / "bare/tokenizer.json").exists()


def test_what_cannot_be_opened(model, tmp_path, capsys, monkeypatch):
    with pytest.raises(FileNotFoundError, match="is neither a folder with a tokenizer nor a GGUF file"):
        load_tokenizer(tmp_path / "nothing")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(["generate", str(model), "--prompt", "a"]) == 2
    assert capsys.readouterr().err == "linattn: gguf is not installed; this command needs it: pip install 'gguf>=0.17'\n"
