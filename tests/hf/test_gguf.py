"""GGUF files of the Llama family: logits against transformers' classes with the file's weights; damaged files."""

import re
import struct

import numpy as np
import pytest
import torch
import transformers

import linattn
from linattn.hf.gguf import GGUFFile
from tests.hf.gguf_files import KINDS, write
from tests.hf.llama_models import LLAMA3, YARN
from tests.hf.theirs import distance, theirs_of

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64}
LONG = LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("kind", KINDS)
def test_types_of_tensors(kind, tmp_path):
    theirs = theirs_of("llama", **HEADS, rms_norm_eps=1e-5)
    path, ids = write(tmp_path / "m.gguf", theirs, "llama", kind=kind), torch.randint(60, (2, 30))
    ours = linattn.load(path, dtype=torch.float32)
    assert distance(logits(ours, ids), logits(theirs, ids)) < 1e-5
    assert ours.config.norm_eps == 1e-5
    assert linattn.load(path).dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)


@pytest.mark.parametrize(
    ("architecture", "options", "values"),
    [
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 12}, {}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}, {
            "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0, "llama.rope.freq_base": 500.0,
        }),
        ("llama", {"rope_parameters": YARN, "max_position_embeddings": 64}, {
            "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.freq_base": 1000.0,
            "llama.rope.scaling.original_context_length": 16,
        }),
        ("qwen2", {"tie_word_embeddings": True}, {}),
        ("qwen3", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"qwen3.rope.freq_base": 1e6}),
        ("gemma3", {"num_hidden_layers": 7, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9}, {
            "gemma3.rope.freq_base": 1e6, "gemma3.attention.sliding_window": 9,
        }),
    ],
)  # fmt: skip
def test_architectures(architecture, options, values, tmp_path):
    theirs = theirs_of({"gemma3": "gemma3_text"}.get(architecture, architecture), **HEADS | options)
    path, ids = write(tmp_path / "m.gguf", theirs, architecture, values=values), torch.randint(60, (2, 45))
    assert distance(logits(linattn.load(path), ids), logits(theirs, ids)) < 1e-5


def test_rotary_divisors_of_llama_3(tmp_path):
    """Between files and transformers' frequencies, of 16 pairs: some kept, some divided, some in between."""
    theirs = theirs_of("llama", **HEADS, head_dim=32, rope_parameters=LONG, max_position_embeddings=131072)
    plain = 1 / 500000.0 ** (np.arange(0, 32, 2) / 32)
    divisors = (plain / theirs.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert len(set(divisors.round(3))) >= 3
    how = {"values": {"llama.rope.freq_base": 500000.0}, "tensors": {"rope_freqs.weight": divisors}}
    path, ids = write(tmp_path / "m.gguf", theirs, "llama", **how), torch.randint(60, (2, 45))
    ours = linattn.load(path)
    assert distance(logits(ours, ids), logits(theirs, ids)) < 1e-5
    assert ours.model.layers[0].mixer.scaling == {key: value for key, value in LONG.items() if key != "rope_theta"}
    other = write(tmp_path / "o.gguf", theirs, "llama", **how | {"tensors": {"rope_freqs.weight": divisors[::-1].copy()}})
    with pytest.raises(ValueError, match=r"rope_freqs.weight must be those of Llama 3"):
        linattn.load(other)


def test_transformers_reads_the_same_from_the_file(tmp_path):
    path, ids = write(tmp_path / "m.gguf", theirs_of("llama", **HEADS), "llama", kind="Q4_1"), torch.randint(60, (1, 30))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    ours = linattn.load(path)
    assert distance(logits(ours, ids), logits(theirs, ids)) < 1e-5
    how = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(ours.generate(ids, **how), theirs.generate(ids, **how))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    return write(folder / "m.gguf", theirs_of("llama", **HEADS | {"num_hidden_layers": 1}), "llama", kind="Q8_0")


def test_a_file_cut_short_anywhere(small, tmp_path):
    whole, cut = small.read_bytes(), tmp_path / "cut.gguf"
    end = max(t.start + t.nbytes for t in GGUFFile(small).tensors.values())  # padding may follow
    for length in [*range(64), *range(64, end, 331), end - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="is damaged, truncated or not a GGUF file") as error:
            GGUFFile(cut)
        assert "\n" not in str(error.value)


def test_lengths_that_no_file_has_take_no_memory(small, tmp_path):
    """Lengths of the metadata, a key, and its list are checked against the file first."""
    whole, huge = small.read_bytes(), struct.pack("<Q", 1 << 60)
    for at in (8, 16, 24):
        (tmp_path / "m.gguf").write_bytes(whole[:at] + huge + whole[at + 8 :])
        with pytest.raises(ValueError, match="is damaged, truncated"):
            GGUFFile(tmp_path / "m.gguf")
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)
    for inner in (0, 4, 8, 9, 77):
        (tmp_path / "m.gguf").write_bytes(head + struct.pack("<IQ", inner, 1 << 60))
        with pytest.raises(ValueError, match="is damaged, truncated"):
            GGUFFile(tmp_path / "m.gguf")


def test_changed_bytes_of_the_header(small, tmp_path):
    """Each gives a model, or a one-line error."""
    whole, changed, random, refused = bytearray(small.read_bytes()), tmp_path / "m.gguf", np.random.default_rng(0), 0
    end = min(tensor.start for tensor in GGUFFile(small).tensors.values())
    for at in random.integers(0, end, 500):
        other = whole.copy()
        other[at] ^= 1 << int(random.integers(8))
        changed.write_bytes(other)
        try:
            linattn.load(changed)
        except ValueError as error:
            refused += 1
            assert "\n" not in str(error), error
    assert refused > 100


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"general.architecture": "mpt"}, "rwkv7, qwen3next, kimi-linear, minimax-01 to be read, but is 'mpt'"),
        ({"llama.expert_count": 4}, "llama.expert_count must be 0 to be read, but is 4"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type must be none, linear or yarn to be read, but is 'longrope'"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor must be a number above 0, but is None"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count must be that of a head, 8, to be read, but is 4"),
        ({"llama.embedding_length": 64}, "the weights do not fit the config"),
        ({"llama.block_count": 2**31}, "num_hidden_layers = 2147483648, but there are"),
        ({"llama.context_length": None}, "llama.context_length must be a number above 0, but is None"),
        ({"llama.context_length": 12.5}, "llama.context_length must be an integer, but is 12.5"),
        ({"llama.attention.head_count": [4, 2]}, "llama.attention.head_count must be one value for all layers to be read, but is a list"),
    ],
)  # fmt: skip
def test_what_is_not_read(values, reason, small, monkeypatch):
    opened = GGUFFile.__init__

    def with_values(self, path):
        opened(self, path)
        self.metadata |= values

    monkeypatch.setattr(GGUFFile, "__init__", with_values)
    with pytest.raises(ValueError, match=re.escape(reason)) as error:
        linattn.load(small)
    assert str(error.value).startswith(str(small))


def test_other_types_are_refused_by_name(small, tmp_path):
    whole = small.read_bytes()
    place = whole.index(b"blk.0.ffn_down.weight") + len(b"blk.0.ffn_down.weight") + 4 + 16
    assert struct.unpack_from("<I", whole, place) == (8,)
    (tmp_path / "m.gguf").write_bytes(whole[:place] + struct.pack("<I", 12) + whole[place + 4 :])
    with pytest.raises(ValueError, match=r"blk.0.ffn_down.weight is stored as Q4_K; only F32, F16, Q4_0, Q4_1, Q8_0, BF16 are read"):
        linattn.load(tmp_path / "m.gguf")


def test_memory_is_asked_for_first(small, monkeypatch):
    monkeypatch.setattr("linattn.models.memory.available", lambda: 1000)
    with pytest.raises(ValueError, match=r"the weights in .*m.gguf need at least .* of memory, but there are 1,000 bytes"):
        linattn.load(small)


def test_paths_and_packages(small, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"no.gguf does not exist"):
        linattn.load(tmp_path / "no.gguf")
    with pytest.raises(ValueError, match="variant must be None for a GGUF file, but came as 'fp16'"):
        linattn.load(small, variant="fp16")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'gguf>="):
        linattn.load(small)
