"""Evaluation of language models: text, distance from a teacher, retrieval over long contexts, state size and speed."""

from importlib import import_module
from typing import Any

from linattn.evaluation.options import EvaluateOptions as EvaluateOptions


def __getattr__(name: str) -> Any:
    if name != "evaluate":
        raise AttributeError(f"module 'linattn.evaluation' has no attribute {name!r}")
    return import_module("linattn.evaluation.run").evaluate
