"""Experiment engine: runs of a study over mixers, settings and seeds, a small trainer, worker processes, and saved results.

:mod:`linattn.compare` and :mod:`linattn.reproduce` use it.
"""
