"""README.md of a saved model: a description from the facts in its config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

import linattn
from linattn import mixers
from linattn.models import quantised

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
{tags}
---

# {name}

A language model made with linattn {version}: {parameters:,} parameters in {dtype}.

| | |
|---|---|
{facts}

## Mixers

{mixers}

## Usage

```python
import linattn  # registers the model with the Auto classes
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
state = model.prefill([[1, 2, 3]])  # {memory}
tokens = model.generate(torch.tensor([[4]]), state=state, max_new_tokens=20)
```
"""


def write(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write ``folder``/README.md about ``model``; an existing one is kept."""
    path = Path(folder) / "README.md"
    if path.is_dir() or path.exists() or not path.parent.is_dir():
        return
    path.write_text(text(model, path.parent.resolve().name), encoding="utf-8")


def text(model: Any, name: str) -> str:
    """Card as Markdown with the Hub's metadata before it."""
    config = model.config
    used = [mixers.info(mixer) for mixer in dict.fromkeys(config.mixer_names)]
    facts = {
        "Layers": config.layers,
        "Width": config.dim,
        "Tokens": config.vocab_size,
        "Mixer of each layer": config.mixer,
        "Feed-forward of each layer": config.ffn,
        "Norm": f"{config.norm}, {config.block}",
        "Embedding and head": "tied" if config.tie_embeddings else "separate",
    }
    if formats := {form.to for form in quantised.formats(model).values()}:
        facts["Matrices quantised to"] = ", ".join(sorted(formats))
    growing = any(not info.recurrent for info in used)
    return _CARD.format(
        tags="\n".join(f"- {tag}" for tag in ["linattn", "linear-attention", *(info.name for info in used)]),
        name=name,
        version=linattn.__version__,
        parameters=quantised.parameter_count(model),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        facts="\n".join(f"| {key} | {value} |" for key, value in facts.items()),
        mixers="\n".join(
            f"- `{info.name}`: {info.title}" + (f" ([arXiv {info.arxiv}](https://arxiv.org/abs/{info.arxiv}))" if info.arxiv else "")
            for info in used
        ),
        memory="grows with the tokens read" if growing else "has a constant size",
    )
