"""Small models and texts for the tests of conversion."""

from pathlib import Path

from linattn.hf import LinattnForCausalLM, LMConfig

TEXT = "the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs! " * 60
SMALL = {"tokens1": 256, "tokens2": 256, "context": 16, "batch_size": 4, "save_every": 2}


def softmax_model(layers: int = 3, heads: int = 4, options: dict | None = None, **fields) -> LinattnForCausalLM:
    """A new teacher of width 32; its output projections are large enough for layers to matter."""
    own = {"softmax": {"heads": heads, "kv_heads": 2, **(options or {})}}
    model = LinattnForCausalLM(LMConfig(dim=32, layers=layers, mixer="softmax", mixer_options=own, **fields)).eval()
    for i, layer in enumerate(model.model.layers):
        layer.mixer.o_proj.weight.data.mul_(3.0 + i)
        layer.mixer.q_proj.weight.data.mul_(2.0)
    return model


def contents(folder: Path) -> dict[str, bytes]:
    """Bytes of the files that must not depend on interruptions."""
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.suffix == ".safetensors"}
