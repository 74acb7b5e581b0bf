"""The table of configurations: the row of every call, no unused rows, and the program that tunes it."""

import json
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.configurations.calls import calls
from benchmarks.configurations.search import Candidate, Search, neighbours, wanted_places
from linattn.bench.gpu.worker import Failure
from linattn.ops.triton import table
from linattn.ops.triton.linear_attention import WIDEST
from linattn.ops.triton.plan import Family
from linattn.ops.triton.table import CHANNEL, DELTA, ERASE, HEAD, NONE, PLAIN, Config, Decode, Elementwise

ROOT = Path(__file__).parents[2]
BOOLS = (False, True)
FAMILIES = [Family(*fields) for fields in product((NONE, HEAD, CHANNEL), (PLAIN, DELTA, ERASE), BOOLS, BOOLS)]
KEYS = range(1, WIDEST + 1)
SCANS = list(product(BOOLS, BOOLS, BOOLS, BOOLS, (2, 4), (2, 4)))
PLACES = [(kind, number) for kind, rows in table.read().items() for number in range(len(rows))]


def name(place) -> str:
    return f"{place[0]}:{place[1]}"


@pytest.fixture(autouse=True)
def as_it_was():
    table.install(None)
    yield
    table.install(None)


@pytest.fixture
def asked(monkeypatch):
    """Rows used by calls, by kind and number, in order."""
    found, find = [], table.find

    def noted(kind, call):
        found.append((kind, find(kind, call)))
        return found[-1][1]

    monkeypatch.setattr(table, "find", noted)
    return found


# Meaning of the rows' conditions; their values are measured and may change.


def forward(family, keys, outputs) -> int:
    if not family.half:
        return 0 if keys <= 128 else 1
    if keys > 128:
        return 6 if family.rule == PLAIN else 7
    if family.rule == PLAIN:
        return 3 if outputs else 2
    return 4 if family.rule == ERASE and keys > 64 else 5


def backward(family, keys, outputs) -> int:
    if not family.half:
        return 0 if keys <= 128 else 1
    if family.rule == ERASE and keys > 64:
        return 3 if keys <= 128 else 2
    if keys > 128:
        return 8 if family.rule == PLAIN else 9
    if family.rule == PLAIN and not outputs:
        return 4
    if keys > 64 and family.rule == DELTA:
        return 5
    return 6 if keys > 64 and family.decay == CHANNEL else 7


def prepare(family) -> int:
    if not family.half:
        return 0
    if family.decay == CHANNEL:
        return 2
    return 1 if family.decay == HEAD and family.rule == DELTA else 3


def gradients(family) -> int:
    if not family.half:
        return 0
    if family.decay == CHANNEL:
        return 1
    return 2 if family.rule == DELTA and family.decay == HEAD else 3


def elementwise(short, packed, shared, backward, decay_bytes, value_bytes) -> int:
    if short:
        return 0
    if packed:
        return 1
    if not shared:
        return 2
    return {(False, 4, 2): 3, (False, 2, 2): 4, (True, 4, 2): 5}.get((backward, decay_bytes, value_bytes), 6)


def test_every_call_gets_its_row_and_every_row_has_a_call(asked):
    def gets(kind, number, config):
        assert asked[-1] == (kind, number) and config == table.read()[kind][number].use

    for family in FAMILIES:
        gets("prepare", prepare(family), table.prepare(family))
        gets("gradients", gradients(family), table.gradients(family))
        gets("unsettled", 1 if family.half else 0, table.unsettled(family))
        for keys, outputs in product(KEYS, BOOLS):
            for kind, lookup, number in (("forward", table.forward, forward), ("backward", table.backward, backward)):
                config = lookup(family, keys, outputs)
                assert asked[-1] == (kind, number(family, keys, outputs))
                assert config is table.rows()[kind][asked[-1][1]].use
    for call in SCANS:
        gets("elementwise", elementwise(*call), table.elementwise(*call))
    for columns in (1, 16383, 16384, 1 << 24):
        gets("decode", 0 if columns >= 16384 else 1, table.decode(columns))
    assert set(asked) == set(PLACES), "a row that no call ever gets"


def test_a_call_that_no_row_takes_is_an_error():
    rows = table.read()
    table.install({**rows, "gradients": rows["gradients"][:1]})
    assert table.gradients(Family(NONE, DELTA, False, False)) == rows["gradients"][0].use
    with pytest.raises(LookupError, match="no row under 'gradients'"):
        table.gradients(Family(NONE, DELTA, False, True))


def test_a_condition_that_calls_do_not_have_is_an_error():
    table.install({**table.read(), "gradients": (table.Row({"keys_at_most": 64}, Config()),)})
    with pytest.raises(KeyError, match="keys"):
        table.gradients(Family(NONE, PLAIN, False, True))


@pytest.mark.parametrize("place", PLACES, ids=name)
def test_rows_hold_what_the_kernels_take(place):
    """Including neighbouring configurations tried by the search."""
    kind, row = place[0], table.read()[place[0]][place[1]]
    for c in (row.use, *neighbours(kind, row)):
        if isinstance(c, Config):
            least = 16 if row.when.get("half") is False else table.NARROWEST
            assert all(least <= size <= 128 and size & (size - 1) == 0 for size in (c.bk, c.bv) if size), c
            assert (c.bk > 0) == (kind in ("prepare", "gradients", "unsettled")) and (c.bv > 0) == (kind != "prepare")
            assert c.warps in (2, 4, 8) and 1 <= c.stages <= 4
        elif isinstance(c, Elementwise):
            assert c.spans & (c.spans - 1) == 0 and c.spans <= 32 and c.channels % 32 == 0
            assert c.span * c.spans >= 8 and (c.spans == 1 or not row.when.get("short"))
        else:
            assert isinstance(c, Decode) and all(n & (n - 1) == 0 for n in c)
    assert row.use not in neighbours(kind, row) and len(neighbours(kind, row)) >= 2


def test_the_file_is_what_is_written(tmp_path):
    table.write(table.read(), tmp_path / "table.json")
    assert (tmp_path / "table.json").read_text() == table.FILE.read_text()


def test_importing_does_not_read_it(programs):
    code = "from linattn.ops.triton import linear_attention, table; print(table._read.cache_info().currsize, table._installed)"
    assert programs.python("-c", code).stdout.split() == ["0", "None"]


def test_every_row_has_calls_that_check_and_time_it():
    search = Search(table.read(), PLACES, 1, 0.0)
    assert not search.idle and set(search.places) == set(PLACES)
    assert all(search.timed(place) for place in PLACES)
    assert len({str(call) for call in calls()}) == len(list(calls()))


def test_rows_can_be_named():
    rows = table.read()
    assert wanted_places(rows, None) == PLACES
    assert wanted_places(rows, ["prepare", "forward:1"]) == [*(("prepare", n) for n in range(len(rows["prepare"]))), ("forward", 1)]
    with pytest.raises(ValueError, match="'forward:99'"):
        wanted_places(rows, ["forward:99"])


class Canned(Search):
    """Search without a device: results come from ``give(configuration, function)``."""

    def __init__(self, give) -> None:
        super().__init__(table.read(), [("decode", 1)], 1, 60.0)
        self.give = give

    def run(self, what, tasks, share):
        return [self.give(table_of["decode"][1].use, function.__name__) for function, _, table_of, *_ in tasks]

    def outcome(self) -> Decode:
        self.check(0.5)
        self.try_neighbours()
        self.time()
        self.choose()
        return self.new_rows()["decode"][1].use


NOW = table.read()["decode"][1].use
OTHER, THIRD, *_ = neighbours("decode", table.read()["decode"][1])
RIGHT, WRONG = {"o": 0.5, "S": 1.0}, {"o": 0.5, "S": 1.01}


def give(times, wrong=None):
    """Right and with the given ``times`` (default 1 ms), except the outcomes in ``wrong``."""

    def canned(config, function):
        if wrong and config in wrong and function == "checked":
            return wrong[config]
        return RIGHT if function == "checked" else times.get(config, 1.0)

    return canned


@pytest.mark.parametrize(
    ("times", "wrong", "wanted"),
    [
        ({}, {}, NOW),
        ({OTHER: 0.98}, {}, NOW),  # too little
        ({OTHER: 0.96}, {}, OTHER),
        ({OTHER: 0.96, THIRD: 0.9}, {}, THIRD),
        ({OTHER: 0.96, THIRD: 0.9}, {THIRD: WRONG}, OTHER),
        ({OTHER: 0.96, THIRD: 0.9}, {THIRD: {"o": float("nan")}}, OTHER),
        ({OTHER: 0.96}, {OTHER: Failure("crashed", "an illegal access")}, NOW),
        ({OTHER: 0.96}, {OTHER: None}, NOW),  # not reached
        ({OTHER: 0.96, THIRD: Failure("timed out", "")}, {}, OTHER),
        ({OTHER: 2.0, THIRD: 3.0}, {NOW: WRONG}, None),  # any right configuration is better than a wrong one
    ],
)
def test_the_fastest_right_one_is_chosen(times, wrong, wanted, capsys):
    search = Canned(give(times, wrong))
    found = search.outcome()
    assert found == wanted if wanted else found != NOW
    assert not search.failed()
    json.dumps(search.log(), allow_nan=False)


def test_what_is_wrong_in_a_call_that_it_was_not_timed_in_is_not_kept():
    """Right in the calls used for timing, wrong in the final check of all calls."""
    timed = give({OTHER: 0.5})
    seen = []

    def later(config, function):
        seen.append((config, function))
        return WRONG if config == OTHER and function == "checked" and (OTHER, "milliseconds") in seen else timed(config, function)

    assert Canned(later).outcome() == NOW


def test_what_fails_as_it_stands_is_said():
    search = Canned(give({}, {NOW: WRONG}))
    search.check(1.0)
    assert search.failed() and all("decode:1" in line and "'S': 1.01" in line for line in search.failed())
    unreached = Canned(give({}, {NOW: None}))
    unreached.check(1.0)
    assert unreached.failed()


def test_a_candidate_with_errors_is_not_right():
    candidate = Candidate(NOW)
    candidate.take("a call", RIGHT)
    assert candidate.right
    candidate.take("another", WRONG)
    assert not candidate.right


@pytest.mark.slow
def test_it_runs_under_the_interpreter(tmp_path):
    """One row from end to end: checks, timing of neighbours, the written table and log."""
    mine = tmp_path / "table.json"
    shutil.copy(table.FILE, mine)
    command = [sys.executable, "-m", "benchmarks.configurations", "--write", "--rows", "prepare:0", "--workers", "1"]
    done = subprocess.run(
        [*command, "--table", mine, "--out", tmp_path / "log.json"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checking: 1 of 1" in done.stderr and "trying neighbours" in done.stderr
    log = json.loads((tmp_path / "log.json").read_text())
    (row,) = log["rows"]
    tried = [row["present"], *row["neighbours"]]
    assert log["schema"] == "linattn.configurations" and log["card"] == "cpu" and "--rows prepare:0" in log["command"]
    assert len(tried) == 5 and all(c["reached"] and not c["failures"] and c["ms"] and c["nearest"]["of_limit"] > 0 for c in tried)
    rows, before = table.read(mine), table.read()
    assert rows["prepare"][0].use._asdict() == row["chosen"]
    assert {**rows, "prepare": ()} == {**before, "prepare": ()}
