"""Valid calls of mixers, models, states, generation, training and files, from which :mod:`tests.fuzz.calls` makes wrong ones."""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

import linattn
from linattn import ffn, generate, hf, mixers, models, tasks
from linattn.data import ByteCodec, PackedTokens
from linattn.state import PrefixStore, State
from tests.fuzz.ops import ids
from tests.fuzz.values import Draw, tensor

Call = tuple[Callable[..., Any], dict[str, Any]]
DIM = 32


def create(draw: Draw) -> Call:
    """Any mixer with any of its options, mutated from their defaults."""
    name = draw(st.sampled_from(mixers.available()))
    return mixers.create, {"name": name, "dim": DIM} | _options(draw, name)


def _options(draw: Draw, name: str) -> dict[str, Any]:
    known = inspect.signature(mixers.info(name).cls).parameters
    defaults = {option: p.default for option, p in known.items() if option != "dim" and p.default is not inspect.Parameter.empty}
    if not defaults:
        return {}
    chosen = draw(st.lists(st.sampled_from(sorted(defaults)), max_size=2, unique=True))
    return {option: defaults[option] for option in chosen}


@cache
def _mixer(name: str) -> Any:
    torch.manual_seed(0)
    return mixers.create(name, dim=DIM)


def mix(draw: Draw) -> Call:
    name = draw(st.sampled_from([name for name in mixers.available() if mixers.info(name).kind == "sequence"]))
    mixer, batch, tokens = _mixer(name), draw(st.integers(1, 2)), draw(st.integers(1, 5))
    given: dict[str, Any] = {"x": tensor(draw, batch, tokens, DIM)}
    if mixer.causal:
        given["return_state"] = draw(st.booleans())
        if draw(st.booleans()):
            with torch.no_grad():
                given["state"] = mixer(tensor(draw, batch, 3, DIM), return_state=True)[1]
    layout = draw(st.sampled_from(["dense", "mask", "packed"]))
    if layout == "mask":
        given["mask"] = torch.ones(batch, tokens, dtype=torch.bool)
    elif layout == "packed" and batch == 1:
        given["cu_seqlens"] = torch.tensor([0, tokens])
    return mixer, given


def mix_other(draw: Draw) -> Call:
    name = draw(st.sampled_from([name for name in mixers.available() if mixers.info(name).kind != "sequence"]))
    mixer, kind = _mixer(name), mixers.info(name).kind
    if kind == "grid":
        return mixer, {"x": tensor(draw, 1, 16, DIM), "height": 4, "width": 4}
    if kind == "cross":
        return mixer, {"x": tensor(draw, 1, 3, DIM), "context": tensor(draw, 1, 4, DIM), "return_state": draw(st.booleans())}
    return mixer, {"x": tensor(draw, 1, 8, DIM)}


def cost(draw: Draw) -> Call:
    name = draw(st.sampled_from(["gla", "softmax", "kda", "mamba2", "cross_softmax", "swiglu"]))
    given = {"name": name, "dim": DIM, "tokens": 16, "batch": 1, "dtype": torch.bfloat16}
    return linattn.cost, given | _options(draw, name)


def inspect_mixer(draw: Draw) -> Call:
    mixer = _mixer(draw(st.sampled_from(["gla", "softmax", "gated_deltanet", "lstm"])))
    if draw(st.booleans()):
        return linattn.mixing_matrix, {"mixer": mixer, "x": tensor(draw, 1, 4, DIM)}
    return linattn.check_forms, {"mixer": mixer, "x": tensor(draw, 1, 4, DIM), "tolerance": 1e-9, "seed": 0}


def info(draw: Draw) -> Call:
    return mixers.info, {"name": "gla"}


def register(draw: Draw) -> Call:
    given = {
        "name": "fuzzed",
        "title": "A title",
        "paper": "",
        "arxiv": None,
        "year": 2020,
        "seeds": (),
        "equation": "",
        "kind": "sequence",
    }
    return linattn.register, given | {
        "kind": "sequence",
        "causal": True,
        "recurrent": True,
        "oracle": "",
        "exemptions": {},
        "growth": None,
        "symmetry": None,
    }


def feed_forward(draw: Draw) -> Call:
    name = draw(st.sampled_from(ffn.available()))
    return ffn.create, {"name": name, "dim": DIM, "hidden": draw(st.sampled_from([None, 16]))} | (
        {} if name == ffn.NONE else _options(draw, name)
    )


CONFIG: dict[str, Any] = {
    "vocab_size": 20, "dim": DIM, "layers": 2, "mixer": "gla, softmax", "ffn": "swiglu", "mixer_options": {"gla": {"heads": 2}},
    "ffn_dim": 16,
    "ffn_options": {}, "layer_options": None, "norm": "rms", "norm_eps": 1e-5, "block": "pre", "residual_scales": {"gla": [1.0, 0.5]},
    "embedding_norm": False, "embedding_scale": 1.0, "logit_soft_cap": None, "tie_embeddings": False,
}  # fmt: skip


def _some(draw: Draw, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=4, unique=True))}


def config(draw: Draw) -> Call:
    """A config and, for small sizes, its model on the meta device."""
    kind = draw(st.sampled_from([models.LMConfig, linattn.LMConfig]))

    def made(**fields: Any) -> None:
        ours = kind(**fields)
        if max(ours.layers, ours.dim, ours.vocab_size, ours.ffn_dim or 0) < 1000:
            with torch.device("meta"):
                models.LanguageModel(ours)

    return made, {name: CONFIG[name] for name in ("dim", "layers", "mixer", "mixer_options", "residual_scales")} | _some(draw, CONFIG)


def preset(draw: Draw) -> Call:
    return models.LMConfig.preset, {"name": "based", "dim": DIM, "layers": 5, "mixer_options": {"softmax": {"window": 4}}}


def other_configs(draw: Draw) -> Call:
    common = {"dim": DIM, "layers": 1, "ffn": "mlp", "mixer_options": {}, "ffn_dim": 16, "ffn_options": {}}
    image = {"image_size": (8, 8), "patch_size": 4, "overlap": False, "channels": 1, "classes": 10, "mixer": "focused", "norm": "layer"}
    sequences = {"source_vocab": 9, "target_vocab": 9, "length": 8, "encoder": "softmax", "decoder": "softmax", "cross": "cross_softmax"}
    items = {"items": 9, "length": 8, "mixer": "linrec", "causal": True, "dropout": 0.0}
    return draw(
        st.sampled_from(
            [
                (models.ImageConfig, image | common | {"norm_eps": 1e-5, "norm_steps": 10}),
                (models.Seq2SeqConfig, sequences | common | {"ratio": 1.0, "spread": False, "dropout": 0.0}),
                (models.RecommendConfig, items | common),
            ]
        )
    )


@cache
def _model(mixer: str = "gla, softmax") -> models.LanguageModel:
    torch.manual_seed(0)
    return models.LanguageModel(models.LMConfig(vocab_size=20, dim=DIM, layers=2, mixer=mixer, ffn="none")).eval()


@cache
def _state(rows: int) -> State:
    with torch.no_grad():
        return _model()(torch.ones(rows, 3, dtype=torch.long), return_state=True)[1]


def language_model(draw: Draw) -> Call:
    batch, tokens = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    given: dict[str, Any] = {"ids": ids(draw, batch, tokens), "return_state": draw(st.booleans())}
    if draw(st.booleans()):
        given["state"] = _state(batch)
    if draw(st.booleans()):
        given["mask"] = torch.ones(batch, tokens, dtype=torch.bool)
    elif batch == 1 and draw(st.booleans()):
        given["cu_seqlens"] = torch.tensor([0, tokens])
    return _model(), given


@cache
def _other_models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    small = {"dim": DIM, "layers": 1}
    return {
        "image": models.ImageModel(models.ImageConfig(image_size=(8, 8), patch_size=4, classes=3, channels=1, **small)).eval(),
        "recommend": models.RecommendModel(models.RecommendConfig(items=9, length=8, **small)).eval(),
        "seq2seq": models.Seq2SeqModel(models.Seq2SeqConfig(source_vocab=9, target_vocab=9, length=8, **small)).eval(),
    }


def other_models(draw: Draw) -> Call:
    kind = draw(st.sampled_from(["image", "recommend", "seq2seq"]))
    model = _other_models()[kind]
    names = list(inspect.signature(model.forward).parameters)
    if kind == "image":
        return model, {names[0]: tensor(draw, 2, 1, 8, 8)}
    first = ids(draw, 2, 5, vocab=8) + 1
    return model, {names[0]: first} if kind == "recommend" else {names[0]: first, names[1]: first.clone()}


def state(draw: Draw) -> Call:
    own = _state(2)

    def moved(targets: Any) -> State:
        return own.to(targets)

    return draw(
        st.sampled_from(
            [
                (State, {"layers": [dict(layer) for layer in own.layers]}),
                (own.select, {"rows": torch.tensor([1, 0])}),
                (own.select, {"rows": [1, 0, 1]}),
                (own.fork, {"n": 2}),
                (State.cat, {"states": [own, own]}),
                (moved, {"targets": torch.float64}),
                (moved, {"targets": "cpu"}),
            ]
        )
    )


@cache
def _folder() -> Path:
    """Valid files of each kind to read, and paths to write."""
    folder = Path(tempfile.mkdtemp(prefix="linattn-fuzz-"))
    import atexit

    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _state(1).save(folder / "state", model=_model(), description={"a": 1})
    ours = asdict(_model().config)
    models.files.save(folder / "model", _model(), {**ours, "model_type": "linattn"})
    (folder / "text").write_text("a b c " * 50)
    (folder / "lines.jsonl").write_text('{"text": "a b c"}\n' * 20)
    (folder / "store").mkdir()
    return folder


def files(draw: Draw) -> Call:
    from linattn.train import load_run

    folder = _folder()
    own = _state(1)
    return draw(
        st.sampled_from(
            [
                (own.save, {"path": folder / "written", "model": _model(), "description": {"b": 2}}),
                (State.load, {"path": folder / "state", "model": _model(), "device": "cpu", "description": {"a": 1}}),
                (linattn.load, {"path_or_config": folder / "model", "dtype": None, "device": "cpu", "variant": None}),
                (linattn.load, {"path_or_config": {**asdict(_model().config), "model_type": "linattn"}, "dtype": torch.float32}),
                (load_run, {"path": folder / "model", "device": "cpu"}),
                (hf.export, {"model": _model("mamba2"), "model_type": "mamba2", "path": folder / "state", "tokenizer": None}),
                (linattn.data.corpus, {"paths": (str(folder / "text"),), "tokenizer": None}),
                (PrefixStore, {"folder": folder / "store", "max_bytes": 10**6}),
                (PrefixStore(folder / "store").find, {"model": _model(), "rows": [[1, 2, 3]]}),
                (PrefixStore(folder / "store").put, {"model": _model(), "tokens": [1, 2, 3], "state": own}),
            ]
        )
    )


def streamed(draw: Draw) -> Call:
    def run(**arguments: Any) -> None:
        if isinstance(count := arguments["max_new_tokens"], int) and count > 100:
            arguments = {**arguments, "max_new_tokens": 100}
        for _ in zip(range(2), generate.stream(**arguments), strict=False):
            pass

    prompt = draw(st.sampled_from([[1, 2, 3], torch.tensor([[1, 2], [3, 4]])]))
    given = {"model": _model(), "ids": prompt, "max_new_tokens": 2, "temperature": 1.0, "top_k": 3, "top_p": 0.9, "stop": (4,)}
    return run, given | {"generator": None, "state": draw(st.sampled_from([None, _state(2 if isinstance(prompt, torch.Tensor) else 1)]))}


def read(draw: Draw) -> Call:
    if draw(st.booleans()):
        return generate.Sampling, {"temperature": 0.5, "top_k": 3, "top_p": 0.9}
    return generate.prefill, {"model": _model().model, "ids": ids(draw, 1, 3), "state": None, "mask": torch.ones(1, 3, dtype=torch.bool)}


def text(draw: Draw) -> Call:
    codec = ByteCodec()

    def streamed_text(**arguments: Any) -> None:
        list(generate.stream_text(**arguments))

    return draw(
        st.sampled_from(
            [
                (codec.encode, {"text": "abc"}),
                (codec.decode, {"tokens": [97, 98]}),
                (streamed_text, {"tokens": [97, 98, 99], "decoder": codec.stream(), "stop": ("c",)}),
                (PackedTokens, {"tokens": torch.arange(50).numpy(), "context": 8, "seed": 0, "samples": 3}),
            ]
        )
    )


def options(draw: Draw) -> Call:
    from linattn.distill import ConvertOptions
    from linattn.evaluation import EvaluateOptions
    from linattn.report import CompareOptions
    from linattn.train import TrainOptions

    asked = {
        "mixer": "gla", "text": ("a.txt",), "tokenizer": None, "steps": 3, "dim": DIM, "layers": 1, "ffn": "swiglu", "ffn_dim": 16,
        "context": 8,
        "batch_size": 2, "learning_rate": 1e-3, "seed": 0, "save_every": 1, "eval_every": 1, "out": Path("x"), "resume": False,
        "mixer_options": {}, "ffn_options": {},
    }  # fmt: skip
    converted = {
        "mixer": "gated_deltanet", "text": ("a.txt",), "out": Path("x"), "keep": 1, "keep_layers": None, "rotary": "keep", "tokens1": 64,
        "tokens2": 64, "tokens3": 0, "rate1": 1e-3, "rate2": None, "context": 8, "context3": None, "batch_size": 2, "accumulate": 1,
        "dtype": None, "device": None, "save_every": 1, "tokenizer": None, "calibrate": True, "seed": 0, "resume": False,
        "mixer_options": {},
    }  # fmt: skip
    evaluated = {
        "teacher": None, "text": ("a.txt",), "tokens": 64, "context": 8, "tasks": ("needle",), "lengths": (512,), "samples": 2, "decode": 4,
        "device": None, "seed": 0, "out": Path("x"),
    }  # fmt: skip
    compared = {
        "mixers": ("gla", "softmax"), "text": (), "steps": 3, "dim": DIM, "layers": 1, "contexts": (16,), "seed": 0, "out": Path("x"),
        "train_context": 8, "batch_size": 2, "sample_tokens": 4, "patience": 1.0, "quick": False,
    }  # fmt: skip
    kinds = [(TrainOptions, asked), (CompareOptions, compared), (ConvertOptions, converted), (EvaluateOptions, evaluated)]
    return draw(st.sampled_from(kinds))


def patch(draw: Draw) -> Call:
    def patched(**arguments: Any) -> None:
        linattn.patch_transformers(**arguments).undo()

    return patched, {"families": draw(st.sampled_from([["mamba"], []])), "backend": "auto"}


def quantize(draw: Draw) -> Call:
    given: dict[str, Any] = {"model": _model(), "to": draw(st.sampled_from(["int8", "int4"])), "group": 32}
    return linattn.quantize, given | {"calibrate": draw(st.sampled_from([None, torch.ones(1, 4, dtype=torch.long)]))}


def pool(draw: Draw) -> Call:
    sizes = {"slots": 2, "prefix_bytes": 10**4, "block": 4, "queue": 2, "context": 16}
    given = {"model": _model(), **sizes, "codec": ByteCodec(), "lookup": False}
    if draw(st.booleans()):
        return generate.Pool, given
    made = generate.Pool(**given)

    def submitted(**arguments: Any) -> None:
        made.submit(**arguments)
        list(made.run())

    asked = {"ids": draw(st.sampled_from([[1, 2, 3], torch.tensor([1, 2])])), "max_new_tokens": 2, "temperature": 0.5, "top_k": 3}
    return submitted, asked | {"top_p": 0.9, "seed": 0, "stop": (4, "c"), "state": draw(st.sampled_from([None, _state(1)])), "salt": ""}


def task(draw: Draw) -> Call:
    """Any task of :mod:`linattn.tasks`, small."""
    made, given = draw(
        st.sampled_from(
            [
                (tasks.compression, {"tokens": 8, "vocab_size": 6}),
                (tasks.copying, {"length": 4, "vocab_size": 6}),
                (tasks.forgetting_recall, {"tokens": 16, "pairs": 2, "updates": 1, "vocab_size": 12}),
                (tasks.fuzzy_recall, {"tokens": 32, "vocab_size": 8, "key_sizes": (1, 2), "value_size": 2}),
                (tasks.in_context_recall, {"tokens": 16, "vocab_size": 8, "noise": 0.2, "noise_vocab": 2}),
                (tasks.induction_heads, {"tokens": 8, "vocab_size": 6}),
                (tasks.memorisation, {"tokens": 8, "vocab_size": 12, "facts": 2}),
                (tasks.multi_query_recall, {"tokens": 16, "pairs": 2, "vocab_size": 12}),
                (tasks.parity, {"tokens": 8}),
                (tasks.selective_copying, {"tokens": 16, "content": 4, "vocab_size": 8}),
                (tasks.word_problem, {"group": "A5", "tokens": 4}),
            ]
        )
    )
    return made, {"count": 2, **given, "generator": torch.Generator().manual_seed(0)}


def prepare(draw: Draw) -> Call:
    folder = _folder()

    def prepared(**arguments: Any) -> None:
        shutil.rmtree(folder / "shards", ignore_errors=True)
        linattn.data.prepare(**arguments)

    given = {"inputs": [str(folder / "lines.jsonl")], "out": folder / "shards", "tokenizer": None, "end": None}
    return prepared, given | {"field": "text", "validation": 0.5, "shard_tokens": 64}
