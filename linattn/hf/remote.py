"""File beside saved weights through which ``trust_remote_code=True`` finds the classes without an import of linattn."""

from __future__ import annotations

import os
from pathlib import Path

FILE = "modeling_linattn.py"
AUTO_MAP = {
    auto: f"{FILE.removesuffix('.py')}.{name}"
    for auto, name in {"AutoConfig": "LMConfig", "AutoModel": "LinattnModel", "AutoModelForCausalLM": "LinattnForCausalLM"}.items()
}
# transformers checks the imports of this file first, and reports a missing package
CONTENT = '''"""Classes of this model, from the package linattn with its extra hf."""

from linattn.hf import LinattnForCausalLM, LinattnModel, LMConfig
'''


def write(folder: str | os.PathLike[str]) -> None:
    """Write the file to ``folder``, if it exists."""
    if (path := Path(folder)).is_dir():
        (path / FILE).write_text(CONTENT, encoding="utf-8")
