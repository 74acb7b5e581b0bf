"""Comparisons of small models with different mixers, equal in size, training and measurement.

On text with :func:`linattn.report.compare`; :mod:`linattn.compare.task` on the other tasks of ``linattn compare --task``.
"""
