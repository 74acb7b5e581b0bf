"""Reports of studies and tasks in Chinese: only names stay in English."""

import json
import re
from pathlib import Path

import pytest

from linattn.compare import tasks
from linattn.compare.task_page import charts as task_charts
from linattn.report.chinese import chinese
from linattn.report.language import both
from linattn.reproduce import STUDIES, variants
from linattn.reproduce.ledger import load

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NAMES = re.compile(
    r"Python|UCI|scikit-learn|--?[\w-]+|arXiv [\d.]+|[\w:=*]*\d[\w:=*]*|[a-z]+_\w+|log2|deltaproduct|softmax|delta\b|token|Zoology|MAD"
)


def assert_chinese(texts, names=()):
    for text in texts:
        said = both(text).zh
        for name in sorted(names, key=len, reverse=True):
            said = said.replace(name, "")
        left = NAMES.sub("", said)
        assert re.search("[\u4e00-\u9fff]", said) and not re.search("[a-zA-Z]{3,} [a-z]{2,}", left), (text, said)


@pytest.mark.parametrize("name", STUDIES)
def test_every_sentence_of_a_study_has_chinese(name):
    study = load(name)
    assert_chinese([study.title, study.question, *study.notes])
    assert_chinese(c.heading for c in study.all_columns)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("reproduce-*.json")), ids=lambda path: path.stem)
def test_every_sentence_of_a_plot_has_chinese(path):
    body = json.loads(path.read_text())
    study = load(body["study"])
    settings = study.full if "full" in path.stem else study.quick
    rows = study.rows(settings, [(one["run"], one["result"]) for one in body["runs"]])
    labels = {variants.label(str(row["mixer"])) for row in rows}
    charts = study.charts(settings, rows)
    assert charts
    for chart in charts:
        assert_chinese([chart.title, chart.meaning, chart.found], labels)
        axes = re.findall(r'<text class="axis"[^>]*?( lang="[^"]*")?>([^<]*)</text>', chart.svg)
        assert [lang for lang, _ in axes] == [' lang="en"', ' lang="zh-Hans"'] * 2, "both axes in both languages"


@pytest.mark.parametrize("name", tasks.TASKS)
def test_every_sentence_of_a_task_has_chinese(name):
    task = tasks.load(name)
    assert_chinese([task.title, task.question, *(f.heading for f in task.figures if f.heading not in ("HR@10", "NDCG@10"))])
    body = json.loads((RESULTS / f"compare-{name}.json").read_text())
    assert_chinese([body["data"]["name"], *(k for k, v in body["data"].items() if isinstance(v, int)), *body["data"].get("references", {})])
    for chart in task_charts(body["mixers"], task):
        assert re.search("[\u4e00-\u9fff]", both(chart.meaning).zh), chart.meaning


def test_numbers_sentences_heads_and_clauses_are_looked_up():
    assert chinese("bits per byte") == "每字节比特数"
    assert (
        chinese("Random pairs are written into a state of 7 x 8, then each key is read.") == "把随机键值对写入 7 x 8 的状态，再逐个键读出。"
    )
    assert (
        chinese("At 1,024 tokens: gla 0.500, lstm 0.250; by chance 0.125.") == "1,024 个 token 处：gla 0.500，lstm 0.250；随机猜测 0.125。"
    )
    assert chinese("mqar: accuracy by bytes of state") == "多问联想回忆（MQAR）：正确率与状态字节数"
    assert chinese("Nobody has said this before. bits per byte.") is None
    assert chinese("gla 1, lstm 2") is None
