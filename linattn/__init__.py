"""Linear attention for PyTorch: one recurrence with fast kernels, and the published systems that are cases of it."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from linattn import _registration

__version__ = "0.1.0"

_MODULES = {
    "linear_attention": "linattn.ops",
    "diagonal_scan": "linattn.ops",
    "running_max": "linattn.ops",
    "selective_scan": "linattn.ops",
    "long_conv": "linattn.ops",
    "lti": "linattn.ops",
    "explain": "linattn.ops",
    "debug": "linattn.ops",
    "Mixer": "linattn.mixers",
    "Recurrence": "linattn.mixers",
    "register": "linattn.mixers",
    "cost": "linattn.mixers",
    "mixing_matrix": "linattn.mixers",
    "check_forms": "linattn.mixers",
    "State": "linattn.state",
    "LanguageModel": "linattn.models",
    "patch_transformers": "linattn.hf.patch",
    "patch_fla": "linattn.hf.fla",
    "load": "linattn.hf.load",
    "convert": "linattn.distill.conversion",
    "quantize": "linattn.quantization",
}
_SUBPACKAGES = ("ops", "mixers", "ffn", "models", "state", "parallel", "generate", "hf", "data", "train", "report")


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return import_module(f"linattn.{name}")
    if name == "LMConfig":  # with transformers installed, a subclass of its config
        return import_module("linattn.hf" if find_spec("transformers") else "linattn.models").LMConfig
    if name not in _MODULES:
        from linattn.arguments import suggestion

        close = "" if name.startswith("_") else suggestion(name, (*_MODULES, *_SUBPACKAGES, "LMConfig"), " ")
        raise AttributeError(f"module 'linattn' has no attribute {name!r}{close}".rstrip())
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, *_SUBPACKAGES, "LMConfig"])


_registration.arrange()
