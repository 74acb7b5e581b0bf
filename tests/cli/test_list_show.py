import json
import os

import pytest

from linattn import mixers
from linattn.cli.main import main


def test_list_elsewhere_is_tab_separated(capsys):
    assert main(["list"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == mixers.available()
    by_name = {row[0]: row[1:] for row in rows}
    assert by_name["gla"] == ["Gated Linear Attention", "2023", "2312.06635", "sequence", "yes", "yes"]
    assert by_name["softmax"][4:] == ["no", "yes"]
    assert by_name["lstm"][2] == "-"


def test_list_on_a_terminal_is_a_table_within_its_width(run_on_terminal):
    code, text = run_on_terminal("list")
    lines = text.splitlines()
    assert code == 0
    assert lines[0].split() == ["name", "title", "year", "arXiv", "kind", "recurrent", "causal"]
    assert max(map(len, lines)) <= 70
    assert not set("\t\x1b") & set(text)


def test_list_json(capsys):
    assert main(["list", "--json"]) == 0
    known = {i["name"]: i for i in json.loads(capsys.readouterr().out)}
    assert list(known) == mixers.available()
    info = mixers.info("gla")
    assert known["gla"]["equation"] == info.equation
    assert known["gla"]["seeds"] == list(info.seeds)
    assert "cls" not in known["gla"]


@pytest.mark.parametrize("name", mixers.available())
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
