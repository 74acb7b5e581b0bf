"""State of a conversion: models, data and device, and measurements on held-out text."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from linattn import mixers, models
from linattn.data import Corpus, PackedTokens, corpus
from linattn.data.corpus import cache_folder
from linattn.data.folders import new_folder
from linattn.data.packed import Windows
from linattn.distill import losses
from linattn.distill.options import ConvertOptions
from linattn.distill.processes import Group, device_of
from linattn.distill.stages import Stage, stages_of
from linattn.distill.student import SOFTMAX, Layer, check_teacher, config_with, layers_of, replaced, student_layers, student_of
from linattn.distill.teacher import TeacherPass, teacher_pass
from linattn.hf import LinattnForCausalLM, folder, load
from linattn.hf.chat import load_tokenizer
from linattn.models.memory import FLOAT, TRAINED, language_parameters, require
from linattn.state import digest_of_text
from linattn.state.identity import identity
from linattn.train import checkpoint

TOKENIZER = "tokenizer.json"
HELD_OUT = 1 << 14  # tokens, evenly spaced over the validation text
CALIBRATION = 1 << 14  # tokens


@dataclass(frozen=True)
class Source:
    """The teacher: its model, its path (None if given as a model), and the folder of its tokenizer."""

    model: nn.Module
    path: Path | None = None
    tokenizers: Path | None = None

    @property
    def tokenizer(self) -> Path | None:
        """The teacher's ``tokenizer.json``; None if there is none."""
        found = None if self.tokenizers is None else self.tokenizers / TOKENIZER
        return found if found is not None and found.is_file() else None


def source_of(teacher: Any) -> Source:
    """Read ``teacher``: a model, a folder or GGUF file that :func:`linattn.load` reads, or a run of ``linattn train``.

    Raises:
        TypeError, OSError, ValueError: if it cannot be read, or has other mixers than softmax.
    """
    if isinstance(teacher, str | Path):
        path = Path(teacher)
        newest = None if (path / folder.CONFIG).is_file() and not (path / "run.json").is_file() else checkpoint.newest(path)
        path = path if newest is None else newest
        source = Source(load(path), path, path if path.is_dir() else unpacked_tokenizer(path))
    else:
        source = Source(teacher, None)
    check_teacher(source.model)
    return source


def unpacked_tokenizer(path: Path) -> Path:
    """Extract the tokenizer of the GGUF file ``path`` to the cache; returns its folder."""
    tokenizer: Any = load_tokenizer(path)
    content = tokenizer.backend_tokenizer.to_str() + str(tokenizer.chat_template)
    place = cache_folder() / "tokenizers" / digest_of_text(content)
    if not place.is_dir():
        with new_folder(place, kept=place.is_dir) as aside:
            tokenizer.save_pretrained(aside)
    return place


@dataclass
class Job:
    """Models, data and options of the stages; ``student`` and ``layers`` change when softmax layers are restored."""

    options: ConvertOptions
    source: Source
    teacher: nn.Module
    data: Corpus
    device: torch.device
    layers: list[Layer]
    student: LinattnForCausalLM
    group: Group = field(default_factory=Group)
    start: str | None = None  # hash of the student's initial weights, if they are another conversion's

    @property
    def stages(self) -> list[Stage]:
        """The three stages."""
        return stages_of(self.options, cast(models.LMConfig, self.teacher.config).dim)

    def precision(self) -> AbstractContextManager[Any]:
        """Context of the computation: autocast to bfloat16 by option, or by default on a GPU."""
        asked = self.options.dtype or ("fp32" if self.device.type == "cpu" else "bf16")
        return torch.autocast(self.device.type, torch.bfloat16, enabled=asked == "bf16")

    def batch(self, data: Dataset, rows: range) -> Tensor:
        """Load the samples ``rows`` as tokens [B, T] on the device."""
        return torch.stack([data[i]["input_ids"] for i in rows]).to(self.device, non_blocking=True)

    def packed(self, stage: Stage) -> PackedTokens:
        """Training data of ``stage``; each stage has its own order."""
        return PackedTokens(
            self.data.train, stage.context, seed=4 * self.options.seed + stage.number, samples=max(1, stage.steps) * stage.rows
        )  # fmt: skip

    def held_out(self, context: int) -> Iterator[Tensor]:
        """Iterate over batches [B, T] of held-out tokens."""
        windows = Windows(self.data.validation, context, max(1, HELD_OUT // context))
        for start in range(0, len(windows), self.options.batch_size):
            yield self.batch(windows, range(start, min(start + self.options.batch_size, len(windows))))

    def calibration(self) -> Iterator[TeacherPass]:
        """Run the teacher on training tokens, in an order of its own."""
        context, rows = self.options.context, self.options.batch_size
        count = max(1, CALIBRATION // (context * rows))
        data = PackedTokens(self.data.train, context, seed=4 * self.options.seed, samples=count * rows)
        for i in range(count):
            yield teacher_pass(self.teacher, self.batch(data, range(i * rows, (i + 1) * rows)))


def job_of(source: Source, options: ConvertOptions) -> Job:
    """Load everything and make the student, with weights from the teacher and ``options.seed``.

    Raises:
        OSError, ValueError: for unusable text, tokenizer, mixers and layers, and for sizes beyond memory.
    """
    config = cast(models.LMConfig, source.model.config)
    kept = () if options.keep is not None else options.keep_layers
    if options.keep is not None and options.keep > config.layers:
        raise ValueError(f"keep must be at most {config.layers}, the layers of the teacher, but came as {options.keep}")
    layers = student_layers(source.model, options.mixer, kept=kept, rotary=options.rotary, mixer_options=options.mixer_options)
    ours = language_parameters(config_with(config, layers))
    require(TRAINED * ours + FLOAT * language_parameters(config), f"a teacher and a student of {ours:,} parameters in training")
    data = corpus(options.text, options.tokenizer or source.tokenizer)
    if data.vocab_size > config.vocab_size:
        raise ValueError(f"tokenizer has {data.vocab_size:,} tokens, but the teacher has {config.vocab_size:,}: use its tokenizer")
    device = device_of(options.device)
    teacher = trainable_copy(source.model, device)
    torch.manual_seed(options.seed)
    student = student_of(teacher, layers, context=options.context)
    start = None if options.start is None else continued(student, load(options.start), layers)
    job = Job(options, source, teacher, data, device, layers, student, start=start)
    for stage in job.stages:
        if stage.steps:
            job.packed(stage)
    next(job.held_out(options.context))
    return job


@torch.no_grad()
def continued(student: LinattnForCausalLM, start: Any, layers: list[Layer]) -> str:
    """Copy the weights of ``start`` into ``student``, except where only ``student`` is softmax; returns the hash of these.

    Raises:
        ValueError: if ``start`` has another size, or other mixers in the layers that ``student`` replaces.
    """
    config = start.config
    if (config.dim, config.layers) != (student.config.dim, student.config.layers):
        came = f"{config.layers} layers of width {config.dim}"
        raise ValueError(f"start must have the teacher's {student.config.layers} layers of width {student.config.dim}, but has {came}")
    restored = []
    for i, (there, here) in enumerate(zip(layers_of(config), layers, strict=True)):
        if here[0] == SOFTMAX:
            restored += [f"model.layers.{i}.mixer."] * (there[0] != SOFTMAX)
        elif _trained(there) != _trained(here):
            raise ValueError(f"start must have {here[0]} with the same options in layer {i}, but has {there[0]}")
    weights = {name: t for name, t in start.state_dict().items() if not name.startswith(tuple(restored))}
    found, wanted = ({name: t.shape for name, t in named.items()} for named in (weights, student.state_dict()))
    if different := [n for n in found.keys() | wanted.keys() if not n.startswith(tuple(restored)) and found.get(n) != wanted.get(n)]:
        raise ValueError(f"start must have the student's weights, but {min(different)} differs")
    student.load_state_dict(weights, strict=False)
    return identity(start)["weights"]


def _trained(layer: Layer) -> Layer:
    """``layer`` without the options that follow from its number and determine new weights."""
    name, options = layer
    placed = mixers.info(name).cls.placed(0, 1)
    return name, {option: value for option, value in options.items() if option not in placed}


def trainable_copy(model: nn.Module, device: torch.device) -> nn.Module:
    """Return ``model`` in evaluation mode on ``device`` in at least float32; a copy unless it already is."""
    like = cast(Any, model).model.embedding.weight
    dtype = torch.promote_types(like.dtype, torch.float32)
    if (like.device, like.dtype, model.training) == (device, dtype, False):
        return model
    return copy.deepcopy(model).to(device=device, dtype=dtype).eval()


@torch.no_grad()
def measured(job: Job, student: nn.Module | None = None, *, outputs: bool = True) -> dict[str, Any]:
    """Measure KL, top-1 agreement and bits per byte of the student on held-out text, and each replaced mixer's output error."""
    model = job.student if student is None else student
    was, total = model.training, torch.zeros(3, dtype=torch.float64)
    model.eval()
    errors: list[Tensor] = []
    tokens = predicted = 0
    with job.precision():
        for ids in job.held_out(job.options.context):
            seen, hidden = teacher_pass(job.teacher, ids), cast(Any, model).model(ids)[0]
            kl, same = losses.distances(model, job.teacher, hidden, seen.hidden), losses.agreement(model, job.teacher, hidden, seen.hidden)
            total += torch.tensor([kl.item(), same.item(), losses.cross_entropy(model, hidden, ids).item()])
            tokens, predicted = tokens + ids.numel(), predicted + ids[:, 1:].numel()
            if outputs and replaced(model):
                errors.append(losses.output_errors(model, seen) * len(ids))
    model.train(was)
    kl, same, entropy = total.tolist()
    figures = {"kl": kl / tokens, "top1": same / tokens, "bits_per_byte": job.data.bits_per_byte(entropy / predicted)}
    rows = tokens // job.options.context
    return figures | ({"output_error": (torch.stack(errors).sum(0) / rows).tolist()} if errors else {})


@torch.no_grad()
def teacher_bits_per_byte(job: Job) -> float:
    """Measure bits per byte of the teacher on the held-out text."""
    total, predicted = 0.0, 0
    with job.precision():
        for ids in job.held_out(job.options.context):
            total += losses.cross_entropy(job.teacher, cast(Any, job.teacher).model(ids)[0], ids).item()
            predicted += ids[:, 1:].numel()
    return job.data.bits_per_byte(total / predicted)
