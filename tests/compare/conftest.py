import math

import pytest

HOSTILE = "x</script><script>alert(1)</script>\x1b[2J\u202e\u2028<img src=x onerror=alert(2)>&amp;"


def _evaluated(i, step):
    bits = 2 + 6 * math.exp(-step / 20) + i / 9
    return {"step": step, "tokens": step * 64, "train_loss": 2.0, "validation_bits_per_byte": bits, "seconds": step / (9 - i)}


def _tried(rate, bits):
    return {"learning_rate": rate, "validation_bits_per_byte": bits, "validation_bits_per_byte_spread": 0.02}


def _mixer(i, name, contexts):
    history = [_evaluated(i, step) for step in range(0, 101, 10)]
    return {
        "name": name,
        "title": f"{name} <the mixer>",
        "arxiv": "2312.06635" if i else None,
        "ffn_dim": 100 - i,
        "parameters": 50_000 + i,
        "parts": {
            "grows": not i,
            "conv_width": 4 * (i == 2),
            "norm": bool(i),
            "decay": ("none", "channel", "head")[i],
            "erases": False,
            "gate": bool(i),
            "positions": not i,
        },
        "model": f"models/{name}",
        "training": {
            "history": history,
            "validation_bits_per_byte": history[-1]["validation_bits_per_byte"],
            "validation_bits_per_byte_spread": 0.0125,
            "learning_rate": 0.004,
            "learning_rate_from": "sweep",
            "tried": [_tried(0.004, 2.5)],
            "swept": [_tried(0.002, 2.61 + i), _tried(0.004, 2.5 + i)],
            "runs": [],
            "tokens_per_second": 900.0 / (i + 1),
            "seconds": history[-1]["seconds"],
        },
        "contexts": [{"context": c, "prefill_ms": c / 10, "decode_ms": 1.0 + i, "state_bytes": 800 if i else 100 * c} for c in contexts],
        "left_out": [],
        "sample": HOSTILE,
    }


@pytest.fixture
def report():
    """A report as written by compare, with malicious prompt and samples."""
    contexts = (256, 1024, 4096)
    mixers = [_mixer(i, name, contexts) for i, name in enumerate(("softmax", "gla", "mamba2"))]
    late = mixers[0]["contexts"].pop()
    mixers[0]["left_out"].append({"context": late["context"], "reason": "expected to take up to 31 s"})
    return {
        "schema": "linattn.compare",
        "version": 1,
        "complete": True,
        "command": "linattn compare --text 'a<b>.txt'",
        "created": "2026-01-02T03:04:05+00:00",
        "machine": {
            "cpu": "A <fast> one",
            "cores": 2,
            "threads": 2,
            "memory_bytes": 1,
            "system": "Linux",
            "python": "3",
            "torch": "2",
            "transformers": None,
            "linattn": "0",
        },
        "options": {"steps": 100, "dim": 64, "layers": 2, "batch_size": 4, "train_context": 64, "learning_rate": [], "seed": 0, "seeds": 2},
        "corpus": {"name": "a<b>.txt", "sha256": "00" * 32, "vocab_size": 256},
        "prompt": HOSTILE,
        "prompts_tried": 2,
        "sweep": {
            "command": "python -m <sweep>",
            "created": "2026-01-01T00:00:00+00:00",
            "machine": {"cpu": "A <fast> one"},
            "steps": 100,
            "layers": 2,
            "dim": 64,
            "rows": [],
        },
        "mixers": mixers,
        "key_value_cache": [{"context": c, "bytes": 100 * c} for c in contexts],
    }
