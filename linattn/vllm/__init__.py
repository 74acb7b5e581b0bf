"""Plug-in for vLLM, by which ``vllm serve FOLDER`` serves models of this library; entry point group ``vllm.general_plugins``.

vLLM imports this module at its start and calls :func:`register`. Nothing here imports vLLM before that.
"""

from __future__ import annotations


def register() -> None:
    """Register the models of this library with vLLM, and the published families that vLLM lacks."""
    from linattn.vllm.registration import register as make_known

    make_known()
