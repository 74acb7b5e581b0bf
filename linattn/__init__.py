"""linattn: linear attention, every form of it, over one recurrence."""

from importlib import import_module

__version__ = "0.1.0.dev0"

_WHERE = {
    "linear_attention": "linattn.ops",
    "diagonal_scan": "linattn.ops",
    "running_max": "linattn.ops",
    "explain": "linattn.ops",
    "debug": "linattn.ops",
    "Mixer": "linattn.mixers",
    "Recurrence": "linattn.mixers",
    "register": "linattn.mixers",
    "State": "linattn.state",
}


def __getattr__(name: str):
    if name in ("ops", "mixers", "state"):
        return import_module(f"linattn.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'linattn' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
