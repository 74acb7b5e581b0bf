"""A run's codec as a tokenizer of transformers: equal tokens, saving and loading, refusals."""

import pytest
from transformers import AutoTokenizer

from linattn.data.codec import ByteCodec, TokenizerCodec
from linattn.hf.tokenizer import NUL, tokenizer_of

TEXT = "abc é Ā \n\t 图解 \x01\x7f <s>  x , y's"


def words(path) -> TokenizerCodec:
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({"[?]": 0, "one": 1, "two": 2, "end": 3}, unk_token="[?]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(str(path))
    return TokenizerCodec(path)


def test_bytes(tmp_path):
    codec, tokenizer = ByteCodec(), tokenizer_of(ByteCodec())
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert len(each) == codec.vocab_size
        assert each(TEXT).input_ids == codec.encode(TEXT)
        assert each.decode(codec.encode(TEXT)) == TEXT
        assert each.decode(list(range(256))) == codec.decode(list(range(256)))
        assert (each.eos_token_id, each.pad_token_id, each(f"a{NUL}b").input_ids) == (0, 0, [97, 0, 98])
        assert each.decode([97, 0, 98], skip_special_tokens=True) == "ab"


def test_a_tokenizer_json(tmp_path):
    codec = words(tmp_path / "tokenizer.json")
    tokenizer = tokenizer_of(codec, end="end")
    tokenizer.save_pretrained(tmp_path / "out")
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "out")):
        assert each("one two three").input_ids == codec.encode("one two three") == [1, 2, 0]
        assert (each.eos_token_id, each.pad_token_id, len(each)) == (3, 3, 4)
    assert tokenizer_of(codec).eos_token_id is None


def test_what_is_refused(tmp_path):
    codec = words(tmp_path / "tokenizer.json")
    for call, error, said in [
        (lambda: tokenizer_of(ByteCodec(), end="x"), ValueError, "end must be '.x00' for a codec of bytes, but came as 'x'"),
        (lambda: tokenizer_of(codec, end="one two"), ValueError, "end must be one token, but 'one two' is 2"),
        (lambda: tokenizer_of("bytes"), TypeError, "codec must be a ByteCodec or a TokenizerCodec, but came as str"),
    ]:
        with pytest.raises(error, match=said):
            call()
