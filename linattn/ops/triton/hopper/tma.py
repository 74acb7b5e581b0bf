"""Copies of tiles by TMA, under names as in ``names``."""

from triton.experimental.gluon.language.nvidia import hopper

from linattn.ops.triton.hopper.names import first

_tma = first(hopper, "tma")
describe = first(_tma, "make_tensor_descriptor")
load = first(_tma, "async_load", "async_copy_global_to_shared")  # 3.8 | 3.6
store = first(_tma, "async_store", "async_copy_shared_to_global")  # 3.8 | 3.6
store_wait = first(_tma, "store_wait")
