"""Text decoded token by token equals the whole text."""

import pytest

from linattn.data import ByteCodec, TokenizerCodec

TEXT = "naïve 日本語 🎉👩‍🚀 end"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> TokenizerCodec:
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["naïve words end naïve words end"] * 9, vocab_size=280, show_progress=False)
    path = tmp_path_factory.mktemp("codec") / "tokenizer.json"
    tokenizer.save(str(path))
    return TokenizerCodec(path)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> TokenizerCodec:
    """A tokenizer whose decoder writes the spaces, so that joints matter."""
    from tokenizers import SentencePieceUnigramTokenizer

    tokenizer = SentencePieceUnigramTokenizer()
    tokenizer.train_from_iterator(
        [TEXT, "some more words to cut"] * 9, vocab_size=60, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
    )
    path = tmp_path_factory.mktemp("codec") / "tokenizer.json"
    tokenizer.save(str(path))
    return TokenizerCodec(path)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "pieces"])
def test_streams_join_to_the_whole(kind, request):
    codec = ByteCodec() if kind == "bytes" else request.getfixturevalue(kind)
    text = TEXT.replace("\u200d", "") if kind == "pieces" else TEXT  # that one normalizes
    tokens = codec.encode(text)
    stream = codec.stream()
    parts = [stream.push(token) for token in tokens]
    assert "".join(parts) + stream.end() == codec.decode(tokens) == text
    assert not any("\ufffd" in part for part in parts)
    assert sum(map(bool, parts)) > 8  # as they come, not at the end


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_half_a_character_is_shown_at_the_end(kind, request):
    codec = ByteCodec() if kind == "bytes" else request.getfixturevalue(kind)
    stream = codec.stream()
    tokens = codec.encode("a日")[:-1]
    assert "".join(stream.push(t) for t in tokens) == "a"
    assert set(stream.end()) == {"\ufffd"}


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_broken_bytes_do_not_hold_up_what_follows(kind, request):
    codec = ByteCodec() if kind == "bytes" else request.getfixturevalue(kind)
    broken = codec.encode("日")[:1] * 40 + codec.encode("fine")
    stream = codec.stream()
    text = "".join(stream.push(t) for t in broken) + stream.end()
    assert text.endswith("fine")
    assert text.count("\ufffd") == 40


def test_ids_with_gaps(tmp_path):
    """The vocabulary includes the last id, despite gaps below it."""
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 300}, unk_token="a")).save(str(path))
    codec = TokenizerCodec(path)
    assert codec.encode("b") == [300] and codec.vocab_size == 301


def test_a_tokenizer_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer.json of the tokenizers package"):
        TokenizerCodec(path)
