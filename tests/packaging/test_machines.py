"""`make test-machines`: every setting in a process of its own, and a red one is told."""

import re

from tests.machines import summary, sweep


def test_a_setting_that_fails_is_red(tmp_path):
    """And nothing that is green looks like the line that continuous integration counts tests by."""
    suite = tmp_path / "test_suite.py"
    suite.write_text("import os\n\n\ndef test_it():\n    assert os.environ.get('MKL_CBWR') != 'AVX2'\n")
    outcomes = sweep(["avx2", "threads-8"], [str(suite)], 2, tmp_path / "logs")
    assert [outcome.green for outcome in outcomes.values()] == [False, True]
    lines = summary(outcomes).splitlines()
    assert "RED" in lines[0] and "MKL_CBWR=AVX2" in lines[0] and "green" in lines[1]
    assert not any(re.search(r"^=+ .*[0-9]+ (passed|failed).* =+$", line) for line in (*lines, outcomes["threads-8"].last))
