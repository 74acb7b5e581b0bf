"""Plug-in for vLLM: ``vllm serve FOLDER`` for the models of this library, through the entry point group ``vllm.general_plugins``.

vLLM imports this module at its start and calls :func:`register`. Nothing here imports vLLM before that.
"""

from __future__ import annotations


def register() -> None:
    """Make the models of this library known to vLLM, and the published families that vLLM does not know."""
    from linattn.vllm.registration import register as make_known

    make_known()
