"""File beside saved weights by which ``trust_remote_code=True`` finds our classes where nothing has imported linattn."""

from __future__ import annotations

import os
from pathlib import Path

FILE = "modeling_linattn.py"
AUTO_MAP = {
    auto: f"{FILE.removesuffix('.py')}.{name}"
    for auto, name in {"AutoConfig": "LMConfig", "AutoModel": "LinattnModel", "AutoModelForCausalLM": "LinattnForCausalLM"}.items()
}
# transformers reads the imports of such a file first, and where the package is missing says what to install
_CONTENT = '''"""Classes of this model, which the package linattn has: pip install "linattn[hf]"."""

from linattn.hf import LinattnForCausalLM, LinattnModel, LMConfig
'''


def write(folder: str | os.PathLike[str]) -> None:
    """Write the file into ``folder``, which is there."""
    if (path := Path(folder)).is_dir():
        (path / FILE).write_text(_CONTENT, encoding="utf-8")
