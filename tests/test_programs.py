"""Programs report their exit status, and behave like newly started ones."""

import os
import sys

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


def test_words_environment_and_path_are_the_programs_own(tmp_path, programs):
    (tmp_path / "beside.py").write_text("import os, sys\nprint(os.environ['WORD'], sys.argv[1:], __name__, os.getcwd())")
    asked = {"env": {**os.environ, "WORD": "x", "PYTHONPATH": str(tmp_path)}, "cwd": tmp_path.parent}
    done = programs.python("-m", "beside", 1, **asked)
    assert (done.returncode, done.stdout) == (0, f"x ['1'] __main__ {tmp_path.parent}\n"), done.stderr
    code = "import beside, sys, atexit\natexit.register(print, 'end')\ndef f():\n    return sys.modules['__main__'].f is f\n"
    code += "print(f(), sys.argv)"
    assert programs.python("-c", code, "a", **asked).stdout.splitlines()[1:] == ["True ['-c', 'a']", "end"]
    assert "WORD" not in os.environ and "beside" not in sys.modules
    assert "No module named 'beside'" in programs.python("-c", "import beside", cwd=tmp_path.parent).stderr


def test_what_stands_in_no_program_before_it_imports_it(programs):
    code = "import sys; print([n for n in ('linattn', 'transformers', 'safetensors') if n in sys.modules], 'torch' in sys.modules)"
    assert programs.python("-c", code).stdout == "[] True\n"


def test_several_run_side_by_side_and_none_for_ever(tmp_path, programs):
    first = "import os, time\nwhile not os.path.exists('there'): time.sleep(0.01)"
    done = programs.together([("-c", first), ("-c", "open('there', 'w')\nprint('made')")], cwd=tmp_path)
    assert [(d.returncode, d.stdout) for d in done] == [(0, ""), (0, "made\n")]
    assert programs.python("-c", "import time; time.sleep(60)", seconds=1).returncode < 0
