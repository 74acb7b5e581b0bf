"""Comparisons: small models of several mixers, equally large, trained alike and measured alike.

On text with :func:`linattn.report.compare`; :mod:`linattn.compare.task` on the other tasks of ``linattn compare --task``.
"""
