"""Running a program tells how it ended."""

import pytest


def test_what_a_program_prints_and_how_it_ends(tmp_path, programs):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom beside import x\nprint(x, *sys.argv[1:], __name__, 'linattn' in sys.modules, sys.stdin.read() == '')"
    )
    (tmp_path / "beside.py").write_text("x = 3")
    assert programs.run(tmp_path, program, "a", 1) == "3 a 1 __main__ False True\n"
    endings = {"1 / 0": "ZeroDivisionError", "import warnings\nwarnings.warn('old')": "UserWarning: old", "raise SystemExit(3)": "status 3"}
    for text, said in {**endings, "import os\nos.kill(os.getpid(), 9)": "status -9", "raise SystemExit('a reason')": "status 1"}.items():
        program.write_text(text)
        with pytest.raises(AssertionError, match=said):
            programs.run(tmp_path, program)
    program.write_text("raise SystemExit")
    assert programs.run(tmp_path, program) == ""
