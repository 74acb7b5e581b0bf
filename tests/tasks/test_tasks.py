"""Every generator against its definition, checked example by example in plain Python."""

from collections import Counter
from itertools import permutations

import pytest
import torch

from linattn import tasks
from linattn.tasks import IGNORED
from linattn.tasks.examples import distinct, weighted
from linattn.tasks.mad import _motifs
from linattn.tasks.tracking import products

MAKERS = {
    "multi_query_recall": {"tokens": 40, "pairs": 6, "vocab_size": 24},
    "forgetting_recall": {"tokens": 40, "pairs": 6, "updates": 4, "vocab_size": 24},
    "in_context_recall": {"tokens": 32, "vocab_size": 12},
    "fuzzy_recall": {"tokens": 40, "vocab_size": 10},
    "selective_copying": {"tokens": 24, "content": 6, "vocab_size": 8},
    "compression": {"tokens": 12},
    "memorisation": {"tokens": 12, "vocab_size": 20},
    "copying": {"length": 9},
    "induction_heads": {"tokens": 17},
    "parity": {"tokens": 11},
    "word_problem": {"tokens": 11, "group": "S3"},
}


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _made(name, count=200, seed=0, **options):
    return getattr(tasks, name)(count, **{**MAKERS[name], **options}, generator=_generator(seed))


def _rows(examples):
    return zip(examples.ids.tolist(), examples.labels.tolist(), strict=True)


@pytest.mark.parametrize("name", MAKERS)
def test_seeds_shapes_and_ranges(name):
    one, same, other = _made(name), _made(name), _made(name, seed=1)
    assert torch.equal(one.ids, same.ids) and torch.equal(one.labels, same.labels)
    assert not torch.equal(one.ids, other.ids)
    assert one.ids.shape == one.labels.shape
    assert one.ids.dtype == one.labels.dtype == torch.int64
    assert len(one) == 200
    assert one.ids.min() >= 0 and one.ids.max() < one.vocab_size
    asked = one.labels[one.labels != IGNORED]
    assert len(asked) and asked.min() >= 0 and asked.max() < one.vocab_size
    empty = _made(name, count=0)
    assert empty.ids.shape == (0, one.ids.shape[1])


@pytest.mark.parametrize("name", MAKERS)
def test_every_task_says_where_it_is_from_and_what_it_refuses(name):
    said = getattr(tasks, name).__doc__
    assert "arXiv" in said and "Raises:" in said


def _pairs_and_queries(ids, labels, slots):
    written = list(zip(ids[0 : 2 * slots : 2], ids[1 : 2 * slots : 2], strict=True))
    queries = {i: label for i, label in enumerate(labels) if label != IGNORED}
    return written, queries


def test_multi_query_recall():
    examples = _made("multi_query_recall")
    places = Counter()
    for ids, labels in _rows(examples):
        written, queries = _pairs_and_queries(ids, labels, 6)
        keys, values = zip(*written, strict=True)
        assert len(set(keys)) == len(set(values)) == 6
        assert all(1 <= k < 12 for k in keys) and all(12 <= v < 24 for v in values)
        assert sorted(ids[i] for i in queries) == sorted(keys), "each key is asked once"
        assert all(i >= 12 and i % 2 == 0 and label == dict(written)[ids[i]] for i, label in queries.items())
        places.update(queries)
    assert set(places) == set(range(12, 40, 2))
    assert places[12] > 1.5 * places[38], "near places are likelier"


def test_forgetting_recall_asks_for_the_last_value():
    changed = 0
    for ids, labels in _rows(_made("forgetting_recall")):
        written, queries = _pairs_and_queries(ids, labels, 10)
        first, last = dict(written[:6]), dict(written)
        assert len(first) == len(last) == 6, "no new keys"
        assert sum(first[k] != last[k] for k in first) == 4, "four of them changed"
        assert sorted(ids[i] for i in queries) == sorted(first)
        assert all(label == last[ids[i]] for i, label in queries.items())
        changed += sum(last[ids[i]] != first[ids[i]] for i in queries)
    assert changed == 4 * 200


@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_in_context_recall(noise):
    examples = _made("in_context_recall", noise=noise, noise_vocab=4)
    noisy = asked = 0
    for ids, labels in _rows(examples):
        assert len(ids) == 31
        known = {}
        for i in range(0, 31, 2):
            key, value = ids[i], ids[i + 1] if i < 30 else labels[i]
            if key >= 8:
                assert value >= 8 and labels[i] == IGNORED and i < 30
                noisy += 1
                continue
            assert key < 4 <= value < 8
            assert labels[i] == (value if key in known else IGNORED)
            assert known.setdefault(key, value) == value
            asked += labels[i] != IGNORED
        assert set(labels[1::2]) == {IGNORED}
        assert labels[-1] != IGNORED
    assert asked > 200
    assert abs(noisy - noise * 200 * 14) < 200


def test_fuzzy_recall():
    sizes = Counter()
    for ids, labels in _rows(_made("fuzzy_recall")):
        start = next(i for i, token in enumerate(ids) if token != 9)
        assert 9 not in ids[start:]
        known, i = {}, start
        while i < len(ids):
            begin = i
            while i < len(ids) and ids[i] < 4:
                i += 1
            key = tuple(ids[begin:i])
            place = i - 1  # from the key's last token on the value is asked
            value = []
            while i < len(ids) and ids[i] >= 4:
                value.append(ids[i])
                i += 1
            last = i == len(ids)
            if last:
                value.append(labels[-1])
            assert 1 <= len(key) <= 3 == len(set(key)) + 3 - len(key)
            assert 1 <= len(value) <= 3 and len(set(value)) == len(value)
            wanted = value if key in known else [IGNORED] * len(value)
            assert labels[place : place + len(value)] == wanted
            assert known.setdefault(key, value) == value
            sizes[len(key)] += 1
        assert labels[-1] != IGNORED
    assert set(sizes) == {1, 2, 3}
    assert min(sizes.values()) > 0.7 * max(sizes.values()), "all sizes as likely"
    for ids, _ in _rows(_made("fuzzy_recall", key_sizes=(3,))):
        start = next(i for i, token in enumerate(ids) if token != 9)
        assert all(token < 4 for token in ids[start : start + 3])


def test_motifs_of_a_size_are_all_that_there_are_as_likely():
    motifs = _motifs(4, 7, (1, 2), (6000, 3), _generator())
    counts = Counter(tuple(t for t in row if t >= 0) for row in motifs.flatten(0, 1).tolist())
    assert set(counts) == {p for n in (1, 2) for p in permutations(range(4, 7), n)}
    assert all(abs(n - (expected := 9000 / (3 if len(motif) == 1 else 6))) < 5 * expected**0.5 for motif, n in counts.items())


def test_fuzzy_recall_of_many_letters_takes_no_list_of_all_keys():
    """There are 19,000 billion keys."""
    for ids, labels in _rows(_made("fuzzy_recall", vocab_size=102, key_sizes=(8,), value_size=2, count=4)):
        key, said = tuple(ids[-10:]), [label for label in labels if label != IGNORED]
        written = "".join(map(chr, ids))
        probe = "".join(map(chr, (t for t in key if t < 50)))
        assert len(probe) == 8 and len(said) in (1, 2)
        assert written.index(probe) < len(ids) - 10, "it stands before"
        assert [ord(c) for c in written[written.index(probe) + 8 :][: len(said)]] == said


def test_selective_copying():
    places = Counter()
    for ids, labels in _rows(_made("selective_copying")):
        content = [token for token in ids[:17] if token != 6]
        assert len(content) == 6 and max(content) < 6
        assert ids[17:] == [7, 6, 6, 6, 6, 6, 6]
        assert labels == [IGNORED] * 18 + content
        places.update(i for i, token in enumerate(ids[:17]) if token != 6)
    assert set(places) == set(range(17))
    assert min(places.values()) > 0.5 * max(places.values()), "all places as likely"


def test_compression_and_memorisation():
    for ids, labels in _rows(_made("compression")):
        assert ids[-1] == 15 and 15 not in ids[:-1]
        assert labels == [*ids[:-1], IGNORED]
    facts = {}
    for ids, labels in _rows(_made("memorisation")):
        for i in range(0, 12, 2):
            assert ids[i] < 9 <= labels[i + 1] < 18
            assert ids[i + 1] == 19 and labels[i] == IGNORED
            assert facts.setdefault(ids[i], labels[i + 1]) == labels[i + 1]
    assert len(facts) == len(set(facts.values())) == 9
    same = _made("memorisation", seed=1)
    assert all(facts[ids[0]] == labels[1] for ids, labels in _rows(same)), "the facts are the same for every seed of the examples"
    other = _made("memorisation", facts=1)
    assert any(facts[ids[0]] != labels[1] for ids, labels in _rows(other))


def test_copying_and_induction_heads():
    for ids, labels in _rows(_made("copying")):
        string = ids[1:10]
        assert ids == [26, *string, 27, *string[:-1]]
        assert labels == [IGNORED] * 10 + string
    places = Counter()
    for ids, labels in _rows(_made("induction_heads")):
        assert ids[-1] == 15 and ids.count(15) == 2
        assert labels == [IGNORED] * 16 + [ids[ids.index(15) + 1]]
        places[ids.index(15)] += 1
    assert set(places) == set(range(15))


def test_a_million_tokens():
    examples = tasks.induction_heads(2, tokens=1 << 20, generator=_generator())
    place = (examples.ids == 15).nonzero()
    assert place.shape == (4, 2)
    assert examples.labels[0, -1] == examples.ids[0, place[0, 1] + 1]


def test_parity():
    for ids, labels in _rows(_made("parity")):
        assert labels == [sum(ids[: i + 1]) % 2 for i in range(11)]


@pytest.mark.parametrize(("group", "order"), [("S3", 6), ("A5", 60), ("S5", 120)])
def test_word_problems(group, order):
    things = int(group[1])
    elements = [p for p in permutations(range(things)) if group[0] == "S" or _swaps(p) % 2 == 0]
    examples = _made("word_problem", group=group)
    assert examples.vocab_size == len(elements) == order
    for ids, labels in _rows(examples):
        state = tuple(range(things))
        for token, label in zip(ids, labels, strict=True):
            state = tuple(elements[token][i] for i in state)  # the latest is applied last
            assert elements[label] == state
    table = products(group)
    assert all(sorted(row) == list(range(order)) for row in table.tolist()), "every row of a group's table is a permutation"


def _swaps(p):
    """Number of transpositions that sort p."""
    p, count = list(p), 0
    for i in range(len(p)):
        while p[i] != i:
            j = p[i]
            p[i], p[j] = p[j], p[i]
            count += 1
    return count


def test_distinct_draws_every_ordered_choice_alike():
    drawn = distinct(24_000, 2, 4, _generator())
    counts = Counter(map(tuple, drawn.tolist()))
    assert set(counts) == set(permutations(range(4), 2))
    assert all(abs(n - 2000) < 5 * 2000**0.5 for n in counts.values())


def test_weighted_draws_one_after_the_other():
    weights = torch.tensor([1.0, 2.0, 5.0])
    counts = Counter(map(tuple, weighted(40_000, 2, weights, _generator()).tolist()))
    for (a, b), n in counts.items():
        expected = 40_000 * (weights[a] / 8 * weights[b] / (8 - weights[a])).item()
        assert abs(n - expected) < 5 * expected**0.5


def test_questions_and_their_places():
    labels = torch.tensor([[-100, 3, -100, 1], [2, -100, -100, -100]])
    places, answers = tasks.Examples(torch.zeros_like(labels), labels, 4).asked()
    assert places[0].tolist() == [1, 3] and places[1, 0] == 0
    assert answers.tolist() == [[3, 1], [2, -100]]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("multi_query_recall", {"tokens": 23}, "tokens must be even and at least 24"),
        ("multi_query_recall", {"tokens": 22}, "tokens must be even and at least 24"),
        ("multi_query_recall", {"vocab_size": 12}, "vocab_size must be even and above 12"),
        ("multi_query_recall", {"pairs": 0}, "pairs must be an integer of at least 1, but came as 0"),
        ("forgetting_recall", {"updates": 7}, "updates must be at most the 6 pairs"),
        ("forgetting_recall", {"tokens": 30}, "at least 32"),
        ("in_context_recall", {"noise": 0.2}, "noise must be from 0"),
        ("in_context_recall", {"noise": "0.2"}, "noise must be from 0 .* but came as '0.2' with 0"),
        ("in_context_recall", {"noise_vocab": 2.0}, "noise_vocab must be an integer of at least 0, but came as 2.0"),
        ("in_context_recall", {"noise_vocab": 11}, "vocab_size must be an integer of at least 13, but came as 12"),
        ("in_context_recall", {"tokens": 7}, "tokens must be even"),
        ("fuzzy_recall", {"key_sizes": (5,)}, "must have 1 to 4 tokens"),
        ("fuzzy_recall", {"key_sizes": ()}, r"key_sizes must be integers, at least one, but came as \(\)"),
        ("fuzzy_recall", {"key_sizes": 3}, "key_sizes must be integers, at least one, but came as 3"),
        ("selective_copying", {"content": 12}, "tokens must be an integer of at least 25, but came as 24"),
        ("memorisation", {"tokens": 5}, "tokens must be even"),
        ("memorisation", {"vocab_size": None}, "vocab_size must be an integer of at least 3, but came as None"),
        ("memorisation", {"facts": 0.5}, "facts must be an integer of at least 0, but came as 0.5"),
        ("multi_query_recall", {"vocab_size": "24"}, "vocab_size must be an integer of at least 0, but came as '24'"),
        ("multi_query_recall", {"pairs": True}, "pairs must be an integer of at least 1, but came as True"),
        ("copying", {"length": 0}, "length must be an integer of at least 1"),
        ("induction_heads", {"tokens": 2}, "tokens must be an integer of at least 3"),
        ("parity", {"tokens": 0}, "tokens must be"),
        ("parity", {"tokens": 10**12}, "tokens must be an integer of at most 2147483647"),
        ("parity", {"tokens": 2**31 - 1, "count": 2**31 - 1}, "count must be lower, or the examples shorter"),
        ("word_problem", {"group": "S4"}, "group must be one of S3, A5, S5, but came as 'S4'"),
        ("word_problem", {"group": ["S3"]}, "group must be one of S3, A5, S5, but came as .'S3'."),
    ],
)
def test_what_does_not_fit_is_refused(name, options, says):
    with pytest.raises(ValueError, match=says):
        _made(name, **options)
    with pytest.raises(ValueError, match="count must be"):
        _made(name, count=-1)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("generator", [None, 0])
def test_without_a_generator_nothing_is_drawn(name, generator):
    """torch's default generator would not give reproducible examples."""
    with pytest.raises(TypeError, match="generator must be a torch.Generator of the CPU.* but came as (NoneType|int)"):
        getattr(tasks, name)(4, **MAKERS[name], generator=generator)
