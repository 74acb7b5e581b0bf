"""Huge pages for memory that each decoding step reads.

At the end of each page the next address is translated before reading goes on, which takes longer still in a virtual machine. One core of
an EPYC reads 17 GB/s from pages of 4 KB and 30 GB/s from pages of 2 MB. To move one took 5 ms there, in a virtual machine.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

SIZE = 1 << 21  # bytes of a huge page
LEAST = 1 << 16  # bytes of a tensor from which on its pages matter
_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def enlarge(tensors: Iterable[Tensor]) -> int:
    """Move the memory of ``tensors`` to huge pages, at unchanged addresses, and return how many there are.

    Pages that hold other memory of the process too are moved whole. Nothing happens where Linux does not do this: before 6.1, where
    huge pages are switched off or used up, and in memory that is mapped from a file.
    """
    if sys.platform != "linux" or not _allowed():
        return 0
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    places = {page for t in tensors if t.nbytes >= LEAST for page in _pages(t)}
    return sum(advise(page * SIZE, SIZE, _COLLAPSE) == 0 for page in sorted(places))


def _pages(t: Tensor) -> range:
    """Numbers of the huge pages in which the memory of the dense ``t`` lies."""
    return range(t.data_ptr() // SIZE, (t.data_ptr() + t.nbytes - 1) // SIZE + 1)


def _allowed() -> bool:
    try:
        return "[never]" not in _SETTING.read_text(encoding="ascii")
    except OSError:
        return False
