"""Oracles come from wheels that are never installed."""

import importlib.util
import sys

import pytest

from tests.oracles import wheels


def test_fla_is_not_importable():
    wheels.module("fla-core==0.6.0", "fla/ops/gla/naive.py")
    assert importlib.util.find_spec("fla") is None, "fla must not be importable: transformers' Qwen3-Next would ask for a GPU"
    assert not any(str(wheels.folder()) in entry for entry in sys.path)


def test_a_file_is_loaded_once_under_a_private_name():
    naive = wheels.module("fla-core==0.6.0", "fla/ops/gla/naive.py")
    assert naive is wheels.module("fla-core==0.6.0", "fla/ops/gla/naive.py") and naive.__name__.startswith("_linattn_oracle_")
    with pytest.raises(FileNotFoundError, match="no file"):
        wheels.module("fla-core==0.6.0", "fla/ops/gla/no_such_file.py")


def test_without_a_version_it_is_refused():
    with pytest.raises(ValueError, match="name==version"):
        wheels.path("fla-core")


def test_offline_skips_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("LINATTN_ORACLES", str(tmp_path))
    monkeypatch.setenv("LINATTN_OFFLINE", "1")
    with pytest.raises(pytest.skip.Exception, match="LINATTN_OFFLINE"):
        wheels.path("linattn-no-such-oracle==1.0")


def test_an_impossible_download_fails_and_says_what_to_set(tmp_path, monkeypatch):
    monkeypatch.setenv("LINATTN_ORACLES", str(tmp_path))
    monkeypatch.delenv("LINATTN_OFFLINE", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(pytest.fail.Exception, match="set LINATTN_OFFLINE=1"):
        wheels.path("linattn-no-such-oracle==1.0")
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []
