"""Atlas: an illustrated guide to every registered system; its numbers are computed by the library's ops when it is built."""

from __future__ import annotations

from linattn.atlas.build import build as build
from linattn.atlas.serve import serve as serve
