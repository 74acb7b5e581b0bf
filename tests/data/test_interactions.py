"""Interactions: CSV files with bad rows, and the synthetic log's probabilities."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linattn.data.interactions import Chain, markov_interactions, read_interactions


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def named(log):
    return [[log.items[i] for i in history.tolist()] for history in log.histories]


def test_rows_are_put_in_order_of_time(tmp_path):
    log = read_interactions(write(tmp_path / "log.csv", "a,tea,3\nb,milk,1\na,milk,1.5\na,jam,3\n\nb,tea,2024-01-01T12:00:00\n"))
    assert named(log) == [["milk", "tea", "jam"], ["milk", "tea"]], "equal times keep their order"
    assert (log.bad, log.bad_lines, log.told()) == (0, [], "")


def test_columns_may_be_named_in_any_order_among_others(tmp_path):
    text = '\ufeffTime,stars,Item, user\r\n2,5,"tea, green",u\r\n2024-05-01,4,milk,u\r\n1,1,jam,u\r\n'
    log = read_interactions(write(tmp_path / "log.csv", text))
    assert named(log) == [["jam", "tea, green", "milk"]] and log.bad == 0


def test_columns_may_be_named_behind_blank_lines(tmp_path):
    log = read_interactions(write(tmp_path / "log.csv", "\n  \nitem,user,time\ntea,u,2\njam,u,1\n \t\n"))
    assert named(log) == [["jam", "tea"]] and log.bad == 0
    log = read_interactions(write(tmp_path / "log.csv", "u,jam,1\nuser,item,time\nu,tea,2\n"))
    assert (named(log), log.bad_lines) == ([["jam", "tea"]], [2]), "names stand before all rows or nowhere"


def test_whole_numbers_of_any_size_are_told_apart(tmp_path):
    late, early = 1_700_000_000_000_000_001, 1_700_000_000_000_000_000  # nanoseconds; the same number as floats
    text = f"u,late,{late}\nu,early,{early}\nu,last,{10**400}\nu,first,-1e300\nu,never,{'9' * 5000}\n"
    log = read_interactions(write(tmp_path / "log.csv", text))
    assert (named(log), log.bad_lines) == ([["first", "early", "late", "last"]], [5])


def test_bad_rows_are_counted_and_the_first_named(tmp_path):
    good = b"u,a,1\n"
    bad = [b"u,a\n", b"u,a,soon\n", b",a,1\n", b"u,,1\n", b'u,"a,1\n', b"u,\xff,1\n", b"u,a,nan\n", b"u,a,inf\n", b"u,a,1,2\n", b"\x00\n"]
    log = read_interactions(write(tmp_path / "log.csv", good + b"".join(bad) + b"u," + b"x" * 200_000 + b",2\n" + good))
    assert named(log) == [["a", "a"]]
    assert (log.bad, log.bad_lines) == (11, [2, 3, 4, 5, 6])
    assert log.told().startswith("11 lines were left out (line 2, 3, 4, 5, 6, ...): a line is user,item,time")
    log = read_interactions(write(tmp_path / "log.csv", good + b"u,a\n"))
    assert log.told().startswith("1 line was left out (line 2): ")


@given(st.binary(max_size=60))
def test_no_file_is_too_bad(tmp_path_factory, content):
    path = write(tmp_path_factory.mktemp("log") / "log.csv", b"user,item,time\n" + content + b"\nu,a,1\n")
    log = read_interactions(path)
    assert sum(map(len, log.histories)) >= 1
    lines = content.splitlines()
    assert log.bad + sum(map(len, log.histories)) <= len(lines) + 1


@pytest.mark.parametrize(
    ("text", "message"), [("", "no row of the form"), ("user,item,time\n", "no row of"), ("x,y\nz", "first malformed line is 1")]
)
def test_a_file_without_rows_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_interactions(write(tmp_path / "log.csv", text))
    with pytest.raises(IsADirectoryError):
        read_interactions(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_interactions(tmp_path / "none.csv")


def test_the_log_follows_its_chain():
    """Frequencies of next items after the same two agree with the chain within four standard deviations."""
    generator = torch.Generator().manual_seed(0)
    chain = Chain.drawn(12, generator)
    for table in (chain.last, chain.before, chain.popular):
        torch.testing.assert_close(table.sum(-1), torch.ones_like(table.sum(-1)))
    taken = chain.histories(20_000, 20, generator)
    windows = taken.unfold(1, 3, 1).reshape(-1, 3)
    pairs, counts = (windows[:, 0] * 12 + windows[:, 1]).unique(return_counts=True)
    pair = pairs[counts.argmax()]
    seen = windows[windows[:, 0] * 12 + windows[:, 1] == pair]
    chances, n = chain.chances(seen[:1, :2])[0], len(seen)
    off = (torch.bincount(seen[:, 2], minlength=12) / n - chances) / (chances * (1 - chances) / n).sqrt()
    assert off.abs().max() < 4
    (log, _), (again, _), (other, _) = (markov_interactions(20, 10, 8, seed=s) for s in (0, 0, 1))
    assert log.sha256 == again.sha256 != other.sha256 and {len(h) for h in log.histories} == {4, 5, 6, 7, 8}
