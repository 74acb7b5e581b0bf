"""Training of a language model on text: a run killed at any moment resumes bit for bit."""

from importlib import import_module
from typing import Any

from linattn.train.options import Terminated as Terminated
from linattn.train.options import TrainOptions as TrainOptions
from linattn.train.options import TrainResult as TrainResult

_MODULES = {"train": "training", "load_run": "run", "saved_options": "run"}  # imported on first use, since the trainer takes seconds


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'linattn.train' has no attribute {name!r}")
    return getattr(import_module(f"linattn.train.{_MODULES[name]}"), name)
