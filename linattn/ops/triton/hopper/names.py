"""Functions of Gluon whose names depend on triton's version: the kernels import them from here and from ``tma``.

A name that no candidate has is None and listed in ``missing``: ``trial.refusal`` then keeps the kernels from being imported.
"""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper

missing: list[str] = []


def first(module: Any, *names: str) -> Any:
    """Attribute of ``module`` under the first existing of ``names``, newest first, because an old name may only raise an error."""
    for name in names:
        if (found := getattr(module, name, None)) is not None:
            return found
    missing.append(" or ".join(names))
    return None


barrier = first(gl, "barrier", "thread_barrier")  # 3.7 | 3.6
fence_async_shared = first(hopper, "fence_async_shared")
mbarrier = first(hopper, "mbarrier")
reinterpret = first(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")  # 3.9 | 3.6
warpgroup_mma = first(hopper, "warpgroup_mma")
warpgroup_mma_wait = first(hopper, "warpgroup_mma_wait")
_copy = first(ampere, "async_copy")
copy_async = first(_copy, "async_load", "async_copy_global_to_shared")  # 3.8 | 3.6
copy_commit = first(_copy, "commit_group")
copy_wait = first(_copy, "wait_group")
