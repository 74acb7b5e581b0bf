"""A slice of ``make test-targets``, and regressions that it has found."""

import json
import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("triton")

from linattn.ops.gpu import Card
from linattn.ops.triton import table
from linattn.ops.triton.plan import Family
from tests.targets.__main__ import OUT
from tests.targets.cards import CARDS
from tests.targets.fingerprint import normalized
from tests.targets.machine import Kernel
from tests.targets.record import Record, merge

ROOT = Path(__file__).parents[2]
PLAIN = "norm-gated-bfloat16-64$"
OTHERS = "(diagonal_scan-given-rows-bfloat16-4096|linears-gated-bfloat16-64|decode-beta-BTHK-bfloat16-64)$"
# Triton 3.6 did not compile the gradients of the first with eight warps for sm_100, nor a pass over the channels of the second whose
# maximum over a sum in tensor memory met a second maximum without a loop's end between them.
CHANNELS = "attention-plain-BTHK-bfloat16-(128|64)$"
MIXED = "attention-erase-BTHK-mixed-128$"  # failed to compile in Triton 3.6: a loop with an unused sum
FAMILIES = [Family(*fields) for fields in product(range(3), range(3), (False, True), (False, True))]
SPILLS = 1024  # most bytes of a thread


@pytest.mark.parametrize(
    ("target", "cases"),
    [
        pytest.param("sm_120", PLAIN, id="sm_120"),
        pytest.param("sm_120", OTHERS, id="sm_120-others", marks=pytest.mark.slow),
        pytest.param("sm_100", CHANNELS, id="sm_100", marks=pytest.mark.slow),
        pytest.param("sm_90", MIXED, id="sm_90-mixed", marks=pytest.mark.slow),
    ],
)
def test_compiles(target, cases, tmp_path):
    out = tmp_path / "targets.json"
    shutil.copy(OUT, out)
    command = [sys.executable, "-m", "tests.targets", "--targets", target, "--cases", cases, "--out", out]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON"))}
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert f"{target} " in done.stdout


def test_what_was_found_fits():
    record = json.loads(OUT.read_text())
    assert record["schema"] == "linattn.targets"
    for version, run in record["runs"].items():
        for target, cases in run["targets"].items():
            for case, kernels in cases.items():
                assert kernels, (version, target, case)
                for kernel in kernels:
                    facts = Kernel(**{"stages": 0, "warps": 0, **kernel})
                    assert facts.refusal(CARDS[target]) is None, (version, target, case)


def test_launches_of_128_channels_spill_at_most_a_kilobyte():
    """On every card but a Hopper, on which the portable kernels' tiles were measured."""
    over = []
    for target, cases in json.loads(OUT.read_text())["runs"]["3.6.0"]["targets"].items():
        for case, kernels in cases.items() if target != "sm_90" else ():
            if re.fullmatch("attention-.*-128", case):
                over += [(target, case, kernel["name"]) for kernel in kernels if kernel.get("spills", 0) > SPILLS]
    assert not over


def test_what_does_not_fit_is_said():
    card, fine = CARDS["sm_120"], Kernel("scan", "scan", 4, 1, shared=99 << 10)
    assert fine.refusal(card) is None
    assert fine._replace(shared=120 << 10).refusal(card) == "scan wants 122880 bytes of shared memory, and there are 101376"
    assert "544 columns of tensor memory" in str(fine._replace(columns=544).refusal(card))
    assert "does not compile: PassManager" in str(fine._replace(failure="PassManager").refusal(card))


def test_spills_have_a_bound(tmp_path):
    path = tmp_path / "targets.json"
    record = Record.read(path, "3.6.0")
    record.add("sm_80", "a", [Kernel("scan", "scan", 4, 1, spills=1000)])
    record.write(path, command="")
    again = Record.read(path, "3.6.0")
    assert again.has("sm_80", "a") and not Record.read(path, "3.9.0").has("sm_80", "a")
    kernel = Kernel("scan", "scan", 4, 1)
    assert again.spilled("sm_80", "a", kernel._replace(spills=1200)) is None
    assert again.spilled("sm_80", "a", kernel._replace(spills=1300)) == "scan spills 1300 bytes a thread, and spilled 1000"
    assert again.spilled("sm_80", "b", kernel._replace(spills=9999)) is None


def test_files_of_several_machines_become_one(tmp_path):
    """Cases of the later file win; other Tritons, cards and cases stay."""
    paths = [tmp_path / name for name in ("all", "one", "two")]
    for path, rows in zip(paths, ([("3.6.0", "a", 1), ("3.9.0", "a", 2)], [("3.6.0", "a", 3)], [("3.6.0", "b", 4)]), strict=True):
        for version, case, spills in rows:
            record = Record.read(path, version)
            record.add("sm_80", case, [Kernel("scan", "scan", 4, 1, spills=spills)])
            record.write(path, date=path.name)
    assert merge(paths[0], paths[1:]) == "2 cases added to all"
    runs = json.loads(paths[0].read_text())["runs"]
    assert {case: rows[0]["spills"] for case, rows in runs["3.6.0"]["targets"]["sm_80"].items()} == {"a": 3, "b": 4}
    assert runs["3.9.0"]["targets"]["sm_80"]["a"][0]["spills"] == 2
    assert (runs["3.6.0"]["date"], runs["3.9.0"]["date"]) == ("all to two", "all")


def test_the_card_that_the_table_was_measured_on_has_no_rows_of_its_own():
    for family, keys, outputs in product(FAMILIES, (64, 128, 256), (False, True)):
        for card in (CARDS["sm_90"], Card((9, 0), 227 << 10, 78)):
            assert table.forward(family, keys, outputs, card) == table.forward(family, keys, outputs)
            assert table.backward(family, keys, outputs, card) == table.backward(family, keys, outputs)
            assert table.gradients(family, card) == table.gradients(family) and table.chain(True, card).stages == 3


def test_each_row_of_a_card_serves_a_call():
    rows, served = table.read(table.CARDS), set()
    for card, family, keys in product(CARDS.values(), FAMILIES, (64, 128, 256)):
        call = {"rule": table.RULES[family.rule], "decay": table.DECAYS[family.decay], "before": family.before, "half": family.half}
        call |= {"keys": keys, "outputs": True, "erases": True}
        served |= {(kind, table.of_card(kind, call, card)) for kind in rows}
    assert {(kind, row.use) for kind in rows for row in rows[kind]} == {pair for pair in served if pair[1] is not None}


def test_what_the_cards_get():
    gla, kda = (Family(table.CHANNEL, rule, before=False, half=True) for rule in (table.PLAIN, table.DELTA))
    rwkv7, narrow = Family(table.CHANNEL, table.ERASE, before=False, half=True), ("sm_80", "sm_86", "sm_89", "sm_120")
    assert table.unsettled(gla, CARDS["sm_100"]) == table.Config(bk=64, bv=64, warps=8)
    assert {table.unsettled(rwkv7, CARDS[name]) for name in narrow} == {table.Config(bk=16, bv=64, warps=8)}  # 32: 1.7 KB of spills
    assert table.gradients(gla, CARDS["sm_100"]) == table.Config(bk=64, bv=64, warps=8)
    assert all(table.gradients(gla, CARDS[name]).bk == 32 for name in narrow)
    wide = Family(table.NONE, table.DELTA, before=False, half=False)
    assert table.backward(rwkv7, 128, True, CARDS["sm_80"]) == table.Config(bv=64, warps=8, stages=2)  # 1: 2.2 KB of spills
    assert all(table.forward(wide, 128, True, CARDS[name]) == table.Config(bv=16, warps=8) for name in (*narrow, "sm_100"))
    assert table.backward(kda, 128, True, CARDS["sm_80"]) == table.Config(bv=64, warps=8)
    assert table.backward(kda, 128, True, CARDS["sm_90"]) == table.Config(bv=128, warps=8, stages=2)  # of 213 KB
    assert table.forward(kda, 128, True, CARDS["sm_89"]).stages == 1 and table.forward(kda, 128, True, CARDS["sm_90"]).stages == 3
    assert [table.chain(True, CARDS[name]).stages for name in ("sm_80", "sm_89", "sm_120", "sm_100")] == [3, 2, 2, 3]


def test_installed_rows_come_before_those_of_cards():
    """Needed to measure them on another card."""
    family = Family(table.CHANNEL, table.PLAIN, before=False, half=True)
    table.install(table.read())
    try:
        assert table.gradients(family, CARDS["sm_100"]) == table.gradients(family)
    finally:
        table.install(None)


def fingerprint(folder: Path, cases: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.targets", "--fingerprint", folder / "now.txt", "--memo", folder / "memo", "--cases", cases]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TRITON"))}
    return subprocess.run([*command, *arguments], cwd=ROOT, env=kept, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_fingerprints_tell_another_kernel(tmp_path):
    """Each kernel of a call has a line, cached the second time, and kernels with different PTX are named."""
    done = fingerprint(tmp_path, "^plain-none-128x256-$")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    before = (tmp_path / "now.txt").read_text()
    names = [line.split()[2] for line in before.splitlines()]
    assert {"forward", "backward", "gradients"} == set(names) and all("registers=" in line for line in before.splitlines())
    last = before.splitlines()[-1]
    (tmp_path / "before.txt").write_text(before.replace(last, last.replace(" ptx=", " ptx=0")))
    done = fingerprint(tmp_path, "^plain-none-128x256-$", "--against", tmp_path / "before.txt")
    assert done.returncode == 1 and f"{len(names)} kernels, 1 that differ" in done.stdout, done.stdout + done.stderr[-4000:]
    assert (tmp_path / "now.txt").read_text() == before


@pytest.mark.slow
def test_fingerprints_of_the_ir_alone(tmp_path):
    """They need only Triton's own passes, and name kernels with different IR."""
    done = fingerprint(tmp_path, "^beta-BTH-busy-$", "--ir")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    before = (tmp_path / "now.txt").read_text()
    assert "fused" in {line.split()[2] for line in before.splitlines()} and " ptx=" not in before
    (tmp_path / "before.txt").write_text(before.replace(" ir=", " ir=0", 1))
    done = fingerprint(tmp_path, "^beta-BTH-busy-$", "--ir", "--against", tmp_path / "before.txt")
    assert done.returncode == 1 and " 1 that differ" in done.stdout, done.stdout + done.stderr[-4000:]


def test_fingerprints_leave_out_what_machines_do_not_run():
    from tests.targets.fingerprint import instructions, normalized

    def ir(line: int, name: str) -> str:
        place = f"loc(callsite(#loc1 at #loc{line}))"
        return f'#loc = loc("a.py":{line}:0)\n%{name} = arith.addi %x, %x : i32 {place}\nuse %{name} loc("b"(#loc))'

    assert normalized(ir(1, "a")) == normalized(ir(22, "b_1")) == "%0 = arith.addi %1, %1 : i32\nuse %0"
    assert normalized(ir(1, "a")) != normalized(ir(1, "a").replace("addi", "subi"))
    ptx = '.file 1 "a.py"\n\tadd.s32 %r1, %r2, 1; // a sum\n\t.loc 1 2 3\n$L__tmp1:\n.section .debug_info\n{\n.b32 1\n}\n'
    assert instructions(ptx) == "add.s32 %r1, %r2, 1;"


def test_names_of_values_are_no_part_of_a_fingerprint():
    """Also if the body of a specialised warp reuses an outer name."""
    before = "%a = f()\n%b = g(%a)\npartition {\n%b = h()\nuse(%b)\n}"
    assert normalized(before) == normalized("%0 = f()\n%1 = g(%0)\npartition {\n%7 = h()\nuse(%7)\n}")
    assert normalized(before) != normalized("%0 = f()\n%1 = g(%0)\npartition {\n%7 = h()\nuse(%1)\n}")
