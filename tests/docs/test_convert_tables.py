"""The tables of conversions are those of the measured data."""

import json

import pytest

from benchmarks import convert_tables


def student(name, kept=(), over=0.0, top1=0.8, **options):
    found = {"bits_per_byte": 1.0 + over, "kl": 0.2, "top1": top1, "tasks": [{"task": "needle", "length": 1024, "right": 0.5}]}
    history = [{"stage": 2, "tokens": 5000, "kl": 0.25, "top1": 0.75, "bits_per_byte": 1.1}]
    run = {"command": "python -m benchmarks.convert students", "torch": "2.11.0", "date": "2026-11-27"}
    given = {"tokens1": 0, "tokens2": 2_500_000, "rate2": 4e-4, **options}
    first = {"stage": "copy", "tokens": 0, "kl": 9.0, "top1": 0.0, "bits_per_byte": 5.0}
    return {
        "name": name, "options": given, "kept": list(kept), "history": [first, *history], "evaluation": found, "run": run,
        "seconds": 60.0, "teacher_bits_per_byte": 1.0,
    }  # fmt: skip


def body():
    first = student("gla stage 1", tokens1=3_000_000)
    decode = {"decoding": [{"length": 32768, "state_bytes": 2048, "tokens_per_s": 123.4}], "run": first["run"]}
    rows = [
        {"name": "teacher", "evaluation": student("teacher")["evaluation"]}, first, student("gla pure", over=0.12),
        student("gla uniform", kept=[3, 7], over=0.05, top1=0.85), student("gla uniform, seed 1", kept=[3, 7], over=0.06),
        {"name": "decode cuda, gla pure", **decode},
        {key: value for key, value in student("gla uniform, rate 0.0004").items() if key != "evaluation"},
        {key: value for key, value in student("gla uniform, cut off").items() if key != "evaluation"},
        student("gla stage 1, not calibrated", tokens1=3_000_000),
        student("gla uniform, no stage 1", kept=[3, 7], over=0.09, tokens2=5_500_000),
    ]  # fmt: skip
    return {"schema": "linattn.students", "card": "NVIDIA H200", "rows": rows}


@pytest.mark.parametrize("page", [convert_tables.PAGE, convert_tables.SERVING], ids=lambda page: page.name)
def test_a_page_shows_what_was_measured(page):
    assert page.read_text(encoding="utf-8") == convert_tables.filled(page), "run: python -m benchmarks.convert_tables"


def test_a_third_of_the_steps_with_calibration_stands_beside_all_without_it():
    rows = [
        {
            "mixer": "gla",
            "steps": 30,
            "seed": seed,
            "calibrated": [{"kl": 1.0}, {"kl": 0.04 + seed}],
            "not calibrated": [{"kl": 0.03 + seed}],
        }
        for seed in (0, 1)
    ]
    run = {"command": "python -m benchmarks.convert_calibration", "cpu": "a CPU", "torch": "2.13.0", "date": "2026-11-27"}
    made = convert_tables.thirds({"run": run, "rows": rows})
    assert "   * - gla\n     - 30\n     - 0.0300 · 1.0300\n     - 10\n     - 0.0400 · 1.0400\n" in made


def test_pools_become_a_table():
    row = {"mixer": "gla", "defer": True, "tokens_per_s": 92048.0, "share": 1.053, "p50_ms": 2.53, "p99_ms": 5.7}
    row |= {"loaded_p50_ms": 2.71, "loaded_p99_ms": 5.9}
    made = convert_tables.pool({"rows": [row, {**row, "defer": False, "share": 0.96}]}).split("   * - ")
    assert [line.replace("\n     - ", " | ").strip() for line in made[2:]] == [
        "gla | every step | 92.0k | 96% | 2.5 ms | 5.7 ms | 2.7 ms | 5.9 ms",
        "gla | deferred | 92.0k | 105% | 2.5 ms | 5.7 ms | 2.7 ms | 5.9 ms",
    ]


def test_students_become_tables(tmp_path, monkeypatch):
    page = tmp_path / "docs" / "convert.rst"
    monkeypatch.setattr(convert_tables, "PAGE", page)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    page.parent.mkdir()
    page.write_text("before\n.. from benchmarks/results/convert-h200.json\n.. end\nafter\n", encoding="utf-8")
    assert convert_tables.filled() == "before\n.. from benchmarks/results/convert-h200.json\n\n.. end\nafter\n"
    (tmp_path / "benchmarks" / "results" / "convert-h200.json").write_text(json.dumps(body()), encoding="utf-8")
    made = convert_tables.filled()
    assert "Measured on NVIDIA H200, torch 2.11.0, 2026-11-27 (``python -m benchmarks.convert students``, and" in made
    line = ["gla, uniform", "3, 7", "3M + 2.5M", "1.050", "5.0 %", "0.200", "85.0 %", "50 %"]
    assert "   * - " + "\n     - ".join(line) + "\n" in made
    assert "   * - gla pure\n     - 2.00 KiB\n     - 123\n" in made
    assert "   * - gla\n     - 5,000\n     - 9.00\n     - –\n     - 0.250\n     - 75.0 %\n     - 1.100\n     - 10.0 %\n     - 60\n" in made
    assert "   * - gla uniform\n     - 5,000\n     - 0.250\n     - 75.0 %\n     - 1.100\n     - 10.0 %\n" in made
    assert "   * - stage 2 alone\n     - 5,500,000\n     - 0.250\n" in made
    assert "Needles that the teacher finds: 50 % at 1k." in made
    assert made.endswith("\n.. end\nafter\n")


def test_aims_count_the_students_that_reach_them():
    rows = body()["rows"] + [student("gla stage 1, more text", tokens1=3_000_000), student("gla pure, more text", over=0.07)]
    for kind, needles in (("uniform", 0.25), ("uniform, seed 1", 0.5), ("chosen", 0.5), ("chosen, seed 1", 0.5)):
        row = student(f"kda {kind}", kept=[3, 7], over=0.02)
        row["evaluation"]["tasks"][0]["right"] = needles
        rows.append(row)
    rows += [student("kda stage 1", tokens1=3_000_000)]
    made = convert_tables.aims(convert_tables.joined([{"rows": rows}]))
    for line in (
        ["a hybrid at most 3 % more bits per byte than the teacher", "2 of 3", "2.0 % (kda uniform)"],
        ["a pure student at most 8 % more bits per byte than the teacher", "1 of 2", "7.0 % (gla pure, more text)"],
        ["a hybrid with 90 % top-1 agreement", "0 of 3", "85.0 % (gla uniform)"],
        ["more needles with chosen than with uniform layers, kda", "1 of 2 seeds", "+25.0 · +0.0 percentage points"],
        ["at most 30 minutes a student", "5 of 5", "at most 2.0 minutes beside others on the card (kda uniform)"],
        ["with calibration the same KL in a third of the tokens", "no", "gla: at 100 % of them"],
    ):
        assert "   * - " + "\n     - ".join(line) + "\n" in made
    assert "not measured" in convert_tables.aims({"rows": [row for row in rows if "not calibrated" not in row["name"]]})


def test_another_card_adds_the_rows_that_the_first_lacks():
    other = body() | {"card": "NVIDIA H100"}
    calibrated, plain = student("gla stage 1"), student("gla stage 1, not calibrated")
    calibrated["history"] = [{"stage": 1, "tokens": n, "kl": kl} for n, kl in ((2000, 0.3), (3000, 0.2))]
    plain["history"] = [{"stage": 1, "tokens": 9000, "kl": 0.2}]
    other["rows"] = [student("gla pure", over=9.0), student("gla chosen, longer", kept=[1], top1=0.91), calibrated, plain]
    first = body()
    first["rows"] = [row for row in first["rows"] if not row["name"].endswith(convert_tables.PLAIN)]
    made = convert_tables.joined([first, other])
    assert "12.0 %" in convert_tables.students(made) and "900.0 %" not in convert_tables.students(made)
    aims = convert_tables.aims(made)
    assert "1 of 2\n     - 91.0 % (gla chosen, longer)" in aims
    assert "third of the tokens\n     - yes\n     - gla: at 33 % of them" in aims, "compared on its own card"


def test_the_second_half_of_a_stage_is_compared_with_its_first():
    rows = body()["rows"]
    assert convert_tables.second_half({"rows": rows}) == ""
    row = next(row for row in rows if row["name"] == "gla pure")
    row["history"].append({**row["history"][-1], "kl": 0.2})
    assert convert_tables.second_half({"rows": rows}) == "In the second half of the second stage the KL falls by 20 to 20 %.\n"


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_readme_says_what_its_student_needs(page):
    root = convert_tables.PAGE.parents[1]
    rows = {row["name"]: row for row in json.loads((root / "benchmarks/results/convert-h200.json").read_text(encoding="utf-8"))["rows"]}
    best, found = rows["teacher"]["evaluation"]["bits_per_byte"], rows["kda chosen"]["evaluation"]["bits_per_byte"]
    text = (root / page).read_text(encoding="utf-8")
    assert "--mixer kda --keep 7" in text
    said = {"README.md": "needs {:.1f} % more bits per byte than its teacher", "README.zh.md": "每字节比特数比教师高 {:.1f} %"}[page]
    assert said.format(100 * (found / best - 1)) in text


@pytest.mark.parametrize("part", ["students", "decoding", "rates", "calibration", "seeds", "cut_off", "without_first"])
def test_parts_that_were_not_measured_are_left_out(part):
    few = body()
    few["rows"] = few["rows"][:3]
    made = getattr(convert_tables, part)(convert_tables.joined([few]))
    assert (made == "") == (part != "students")
