"""The engine of experiments: runs of a study over mixers, settings and seeds, a small trainer, processes, and what is kept of them.

:mod:`linattn.compare` and :mod:`linattn.reproduce` are two uses of it.
"""
