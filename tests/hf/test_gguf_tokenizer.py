"""Tokenizers of GGUF files against those of the ``tokenizers`` package that they were written from, word by word and whole."""

import json
from itertools import pairwise

import pytest
import transformers
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from linattn.hf.gguf import GGUFFile, tokenizer_of
from tests.hf.gguf_files import write
from tests.hf.theirs import theirs_of

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "Hello world 123, don't go!\n\n  déjà vu", "x = 3.14159; y=2024", "日本語 テスト １２３", "    indent\n\tTab \r\n\r\n end  ", "",
    "WE'LL see: it's 1,000,000.5e-7 ...!?\n", "<|im_start|>user\nhi<|im_end|><unk> e\u0301", "Ⅷ ½ ² مرحبا 👩‍👩‍👧 an unreached token",
]  # fmt: skip
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
HOW = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}


def trained(pre):
    """Train a tokenizer with the pre-tokenizer of published ones of the kind ``pre``.

    It learns from whole words and numbers, so that other pre-tokenizers give other tokens, and has a token that no merges produce.
    """
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps = {
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), bytes_alone],
        "qwen2": [pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"), bytes_alone],
    }[pre]
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    how = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    words = "it's a test of words 12 123 1234\n\n don't  do   that!! e = 3.14 déjà vu"
    learner.train_from_iterator([words] * 9 + TEXTS[:-1], how)
    learned = json.loads(learner.to_str())["model"]
    vocabulary = learned["vocab"] | {"Ġunreached": len(learned["vocab"])}
    inner = Tokenizer(models.BPE(vocabulary, [tuple(m) for m in learned["merges"]], ignore_merges=pre == "llama-bpe"))
    inner.add_special_tokens(SPECIAL)
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    return inner


def parts(inner, pre):
    """Parts of ``inner`` stored in a file."""
    merges = [" ".join(m) for m in json.loads(inner.to_str())["model"]["merges"]]
    tokens = [inner.id_to_token(i) for i in range(inner.get_vocab_size())]
    return {"tokens": tokens, "merges": merges, "pre": pre, "types": [3 if t in SPECIAL else 1 for t in tokens]}


def written(path, **tokenizer):
    return GGUFFile(write(path / "m.gguf", theirs_of("llama", **HOW), "llama", tokenizer=tokenizer))


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_texts_become_the_same_tokens(pre, tmp_path):
    inner = trained(pre)
    ours = tokenizer_of(written(tmp_path, **parts(inner, pre)))
    for text in TEXTS:
        wanted = inner.encode(text).ids
        assert ours.encode(text) == wanted
        assert ours.decode(wanted) == (normalizers.NFC().normalize_str(text) if pre == "qwen2" else text)
    ours.save_pretrained(tmp_path / "saved")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert [again.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]


def test_special_tokens_and_template(tmp_path):
    inner, template = trained("smollm"), "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    roles = {"bos": 1, "eos": 2, "padding": 2, "unknown": 0}
    ours = tokenizer_of(written(tmp_path, **parts(inner, "smollm"), template=template, roles=roles, begins=True))
    assert (ours.bos_token, ours.eos_token, ours.pad_token, ours.unk_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert ours.encode("a") == [1, *inner.encode("a").ids]
    assert ours.encode("a", add_special_tokens=False) == inner.encode("a").ids
    chat = ours.apply_chat_template([{"role": "user", "content": "a"}], return_dict=False)
    assert chat == [1, *inner.encode("a").ids, 2]
    assert ours.decode([1, *inner.encode("a").ids, 2], skip_special_tokens=True) == "a"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pre": "tekken"}, "tokenizer.ggml.pre must be one of 'gpt-2', 'smollm', 'llama-bpe', 'qwen2' to be read, but is 'tekken'"),
        ({"model": "bert"}, "tokenizer.ggml.model must be 'gpt2', byte-level BPE, or 'llama', SentencePiece, to be read, but is 'bert'"),
        ({"model": "llama"}, "tokenizer.ggml.scores must be those of"),
        ({"types": [1]}, "tokenizer.ggml.token_type is of 1 tokens, but there are"),
        ({"roles": {"eos": 5000}}, "tokenizer.ggml.eos_token_id is 5000, but there are"),
        ({"merges": ["a nothing"]}, "tokenizer.ggml.merges do not fit the tokens"),
        ({"merges": ["a"]}, "tokenizer.ggml.merges must be pairs of tokens, but has 'a'"),
        ({"tokens": ["a"] * 4, "types": [1] * 4}, "tokenizer.ggml.tokens has 3 tokens twice"),
    ],
)
def test_what_is_not_read(changes, reason, tmp_path):
    file = written(tmp_path, **parts(trained("smollm"), "smollm") | changes)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        tokenizer_of(file)
    assert reason in str(error.value)


def test_a_file_without_one(tmp_path):
    with pytest.raises(ValueError, match="has no tokenizer"):
        tokenizer_of(GGUFFile(write(tmp_path / "m.gguf", theirs_of("llama", **HOW), "llama")))


def joined(text, scores):
    """SentencePiece's algorithm by definition: merge the neighbours whose piece has the highest score, leftmost first."""
    pieces = list(text)
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not pairs:
            return pieces
        i = -max(pairs)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_of_sentencepiece(prefix, tmp_path):
    """Pieces and scores of a vocabulary as Llama 2's and Gemma's: unknown, control, bytes, learned pieces, characters."""
    learner = Tokenizer(models.BPE())
    words = "it's a test of words 12 123 1234 don't  do   that!! e = 3.14 déjà vu".replace(" ", "▁")
    learner.train_from_iterator([f"▁{words}"] * 9, trainers.BpeTrainer(vocab_size=150, show_progress=False))
    learned = json.loads(learner.to_str())["model"]
    made = ["".join(merge) for merge in learned["merges"]]
    special, data = ["<unk>", "<s>", "</s>"], [f"<0x{i:02X}>" for i in range(256)]
    tokens = [*special, *data, *made, *(t for t in learned["vocab"] if t not in made)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(made))] + [-1000.0] * (len(tokens) - 259 - len(made))
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    roles = {"bos": 1, "eos": 2, "unknown": 0}
    own = {"tokens": tokens, "scores": scores, "types": kinds, "roles": roles, "model": "llama", "pre": "default", "merges": None}
    ours = tokenizer_of(written(tmp_path, **own, begins=True, prefix=prefix))
    known, score = {t: i for i, t in enumerate(tokens)}, dict(zip(tokens[259:], scores[259:], strict=True))
    for text in ("it's a test", "words 1234 don't", " déjà  vu\n", "日本 ∑ test", "do that!! that", ""):
        marked = ("▁" if prefix and text else "") + text.replace(" ", "▁")
        wanted = [n for p in joined(marked, score) for n in ([known[p]] if p in known else [3 + byte for byte in p.encode()])]
        assert ours.encode(text) == [1, *wanted]
        assert ours.decode(wanted) == text
    assert ours.encode("</s>a")[1] == 2
    assert (ours.bos_token, ours.eos_token, ours.unk_token) == ("<s>", "</s>", "<unk>")
    ours.save_pretrained(tmp_path / "saved")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "saved").encode("a test") == ours.encode("a test")
