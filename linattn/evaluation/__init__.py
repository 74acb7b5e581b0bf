"""Evaluation of language models: text, a teacher's distributions, retrieval over long contexts, state and speed, side by side."""

from importlib import import_module

from linattn.evaluation.options import EvaluateOptions as EvaluateOptions


def __getattr__(name: str):
    if name != "evaluate":
        raise AttributeError(f"module 'linattn.evaluation' has no attribute {name!r}")
    return import_module("linattn.evaluation.run").evaluate
