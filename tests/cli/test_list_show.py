import json
import os
import re
from itertools import groupby

import pytest

from linattn import mixers
from linattn.cli.main import main
from linattn.mixers.documents import DOCUMENTS, named
from linattn.mixers.taxonomy import FAMILIES
from tests.sweeps import swept

GLA, HIPPO = ("000", "001", "003", "004"), ("000", "001", "004")  # the introductions that name them


def test_list_elsewhere_is_tab_separated_kind_after_kind(capsys):
    assert main(["list"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert sorted(row[0] for row in rows) == mixers.available()
    by_name = {row[0]: row[1:] for row in rows}
    assert by_name["gla"] == [
        "Gated Linear Attention", "2023", "2312.06635", "sequence", "yes", "yes", "n", "linear attention with decay",
    ]  # fmt: skip
    assert by_name["softmax"][4:] == ["no", "yes", "n^2", "softmax attention"]
    assert by_name["performer"][-1] == "kernels, low rank" and by_name["axial"][-2] == "n^1.5"
    assert by_name["lstm"][2] == "-"
    kinds = [kind for kind, _ in groupby(row[-1].partition(", ")[0] for row in rows)]
    assert kinds == [family for family in FAMILIES if family in kinds], "each kind stands together, in the order of the survey"


def test_list_on_a_terminal_has_a_heading_for_each_kind_and_stays_within_its_width(run_on_terminal):
    code, text = run_on_terminal("list")
    lines = text.splitlines()
    assert code == 0
    assert lines[0].split() == ["name", "title", "year", "arXiv", "grows", "as", "state"]
    assert max(map(len, lines)) <= 70
    assert not set("\t\x1b") & set(text)
    at = {word: i for i, line in enumerate(lines) for word in line.split()}
    assert lines.index(next(line for line in lines if line.strip() == "state spaces")) < at["mamba"] < at["rwkv4"]


def test_documents_elsewhere_are_tab_separated(capsys):
    assert main(["list", "--documents"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    titles = {name: "; ".join(DOCUMENTS[d] for d in documents) for name, documents in (("gla", GLA), ("hippo", HIPPO))}
    assert ["gla", "Gated Linear Attention", titles["gla"], 'linattn.mixers.create("gla", dim=...)'] in rows
    assert ["-", "HiPPO", titles["hippo"], "linattn.ops.hippo, in s4"] in rows
    assert [row for row in rows if len(row) != 4] == []


def test_documents_json(capsys):
    assert main(["list", "--documents", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [entry["title"] for entry in told] == [s.title for s in named()]
    first = next(entry for entry in told if entry["name"] == "linrec")
    assert first["documents"] == [DOCUMENTS["001"]] and first["title"] == "LinRec"


def test_documents_on_a_terminal(run_on_terminal):
    code, text = run_on_terminal("list", "--documents")
    assert code == 0 and max(map(len, text.splitlines())) <= 70
    assert text.splitlines()[0].split() == ["name", "title", "A", "B", "C", "D", "E"]
    assert "A  刀刀宁，简单图解一下线性注意力机制 (2024)" in text


def test_list_json(capsys):
    assert main(["list", "--json"]) == 0
    known = {i["name"]: i for i in json.loads(capsys.readouterr().out)}
    assert sorted(known) == mixers.available()
    assert known["longformer"]["families"] == ["fixed patterns", "combined patterns", "neural memory"]
    info = mixers.info("gla")
    assert known["gla"]["equation"] == info.equation
    assert not {"cls", "seeds"} & set(known["gla"])


@pytest.mark.parametrize("command", ["list", "list --json", "list --documents", "list --documents --json", "show gla", "show gla --json"])
def test_introductions_are_named_by_title_not_by_key(command, capsys):
    assert main(command.split()) == 0
    assert not re.search(r"\b00\d\b", capsys.readouterr().out)
    assert "seeds" not in repr(mixers.info("gla"))


@pytest.mark.parametrize("name", swept(mixers.available()))
def test_show_any_mixer(name, capsys):
    assert main(["show", name]) == 0
    text, info = capsys.readouterr().out, mixers.info(name)
    for part in (info.title, info.equation, info.oracle, info.arxiv or "", *info.exemptions.values()):
        assert part in text
    assert "bfloat16" in text


def test_show_json_holds_the_costs(capsys):
    assert main(["show", "gla", "--dim", "256", "--heads", "8", "--tokens", "1000", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    cost = mixers.cost("gla", dim=256, heads=8, tokens=1000)
    assert told["cost"]["parameters"] == cost.parameters
    assert told["cost"]["state_bytes"] == cost.state_bytes
    assert told["cost"]["softmax_cache_bytes"] == cost.softmax_cache_bytes
    assert told["cost"]["dtype"] == "bfloat16"
    assert told["arxiv"] == "2312.06635"
    assert os.path.isfile(told["source"])


def test_show_says_how_much_smaller_the_state_is(capsys):
    main(["show", "gla", "--tokens", "100000"])
    long = capsys.readouterr().out
    cost = mixers.cost("gla", dim=512, tokens=100_000)
    assert f"{cost.softmax_cache_bytes / cost.state_bytes:,.0f} times as much" in long
    main(["show", "softmax", "--tokens", "100000"])
    assert "times as much" not in capsys.readouterr().out
