"""`make test-machines`: every setting in a separate process, with failures reported."""

import re

from tests.machines import summary, sweep


def test_a_setting_that_fails_is_red(tmp_path):
    """Passing output does not match the summary line that CI parses."""
    suite = tmp_path / "test_suite.py"
    suite.write_text("import os\n\n\ndef test_it():\n    assert os.environ.get('MKL_CBWR') != 'AVX2'\n")
    outcomes = sweep(["avx2", "threads-8"], [str(suite)], 2, tmp_path / "logs")
    assert [outcome.green for outcome in outcomes.values()] == [False, True]
    lines = summary(outcomes).splitlines()
    assert "RED" in lines[0] and "MKL_CBWR=AVX2" in lines[0] and "green" in lines[1]
    assert not any(re.search(r"^=+ .*[0-9]+ (passed|failed).* =+$", line) for line in (*lines, outcomes["threads-8"].last))
