"""fla's functions run by our ops, against fla's references (fla-core 0.6.0), in a separate process."""

import json
import os

import pytest

import linattn
from tests.oracles import wheels

CASES = ("gla", "gla steps", "simple_gla", "delta", "gated delta", "kda", "comba", "rwkv6", "iplr", "dplr", "rwkv7")


@pytest.fixture(scope="module")
def found(programs):
    fla = wheels.path("fla-core==0.6.0")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(fla), os.getcwd()])}
    done = programs.python("-m", "tests.hf.fla_cases", env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_each_family_equals_its_reference(found):
    assert set(found["references"]) == set(CASES)
    assert not {case: error for case, error in found["references"].items() if not error <= 1e-5}
    assert not found["refused"]


def test_options_of_fla_say_what_they_say_there(found):
    assert len(found["variants"]) == 10
    assert not {case: error for case, error in found["variants"].items() if not error <= 1e-5}


def test_names_are_exchanged_everywhere_and_restored(found):
    assert found["everywhere"] and found["restored"] and not found["left"]
    assert len(found["names"]) >= 35
    assert "on already" in found["twice"]


def test_compiled_calls_are_one_graph(found):
    errors, graphs = found["compiled"]
    assert max(errors) <= 1e-6 and graphs == 1


def test_what_is_not_covered_goes_to_flas_own_with_the_reason(found):
    assert found["own"] == found["too large"] == "fla's own"
    assert "0 calls by linattn" in found["explained"]
    assert "gv: linattn's op has no such argument" in found["explained"]
    assert "decay is the natural logarithm" in found["explained"]


def test_bad_keywords_are_refused_by_flas_own_function(found):
    assert found["keyword"] == "chunk_gla() got an unexpected keyword argument 'heads'"


def test_bad_names_are_refused(found):
    assert "names must be a list" in found["text"]
    assert "'chunk_glas'" in found["unknown"] and "chunk_gla" in found["unknown"]


def test_without_fla_it_says_what_to_install():
    with pytest.raises(ImportError, match="pip install flash-linear-attention"):
        linattn.patch_fla()
    with pytest.raises(ValueError, match="backend"):
        linattn.patch_fla(backend="gpu")
