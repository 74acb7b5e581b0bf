"""Conversion of softmax Transformers to linear attention: copy matching weights, then distil in stages that resume bit for bit."""

from importlib import import_module
from typing import Any

from linattn.distill.options import ConvertOptions as ConvertOptions
from linattn.distill.options import ConvertResult as ConvertResult

_WHERE = {"convert": "conversion", "make_plan": "plan", "student_of": "student", "teacher_pass": "teacher", "rank_layers": "keep"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'linattn.distill' has no attribute {name!r}")
    return getattr(import_module(f"linattn.distill.{_WHERE[name]}"), name)
