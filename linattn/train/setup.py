"""Translation of training options into the model's config, the arguments of transformers' Trainer and the loss."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, cast

import torch
from transformers import TrainingArguments

from linattn import mixers, models
from linattn.arguments import known_device
from linattn.hf import LMConfig
from linattn.mixers import Mixer
from linattn.models import pattern
from linattn.models.block import Block
from linattn.models.loss import TokenLoss, chunk_of
from linattn.models.memory import one_period
from linattn.parallel import heads
from linattn.train.optimizers import BETAS
from linattn.train.options import TrainOptions
from linattn.train.plan_options import PlanOptions
from linattn.train.processes import accumulation, check, world

SCHEDULES = {"cosine": "cosine", "wsd": "warmup_stable_decay", "linear": "linear", "constant": "constant_with_warmup"}


def settled(options: TrainOptions, begun: TrainOptions | None = None, samples: int | None = None) -> TrainOptions:
    """Fill in unset ``options`` that determine the weights: with the resumed run's values, else the defaults.

    Args:
        options: as they were given.
        begun: options of the run that is resumed.
        samples: sequences per step of that run, which determine the number of passes with the current number of processes.

    Raises:
        ValueError: for a device that this machine lacks, a package of ``report_to`` that is not installed, and a number of processes
            that does not fit.
    """
    check(options, world()[0])
    if options.device is not None:
        _check_device(options.device)
    for name in options.report_to:
        if find_spec(name) is None:
            raise ValueError(f"report_to needs the package {name}: pip install {name}")
    dtype = (begun and begun.dtype) or ("bf16" if _on_cuda(options) else "fp32")
    warmup = options.steps // 20 if begun is None or begun.warmup is None else begun.warmup
    if begun is not None and samples is not None and options.accumulate == begun.accumulate:
        options = replace(options, accumulate=accumulation(options, samples))
    return replace(options, dtype=options.dtype or dtype, warmup=warmup if options.warmup is None else options.warmup)


def model_config(options: TrainOptions | PlanOptions, vocab_size: int) -> LMConfig:
    """Build the model's config; ``heads`` applies to each mixer that has that option and no value of its own."""
    given = {name: dict(own) for name, own in options.mixer_options.items()}
    if options.heads is not None:
        names = dict.fromkeys(pattern.parse(options.mixer, "mixer"))
        having = [name for name in names if "heads" in mixers.info(name).options]
        if not having:
            raise ValueError(f"heads must be omitted for {', '.join(names)}, which have no heads, but came as {options.heads}")
        for name in having:
            given[name] = {"heads": options.heads} | given.get(name, {})
    return LMConfig(
        vocab_size=vocab_size, dim=options.dim, layers=options.layers, mixer=options.mixer, ffn=options.ffn,
        ffn_dim=options.ffn_dim, mixer_options=given, ffn_options=options.ffn_options, norm=options.norm,
    )  # fmt: skip


def check_sharing(config: models.LMConfig, cp: int, tp: int) -> None:
    """Raise ValueError for a mixer that cannot share a sequence (``cp``), or a mixer or feed-forward that cannot share heads (``tp``)."""
    one = one_period(config)
    for layer in range(one.layers if max(cp, tp) > 1 else 0):
        with torch.device("meta"):
            block = Block(one, layer)
        if cp > 1:
            try:
                block.mixer.check_sharded()
            except NotImplementedError as error:
                raise ValueError(f"cp must be 1, but came as {cp}: {error}") from None
        for part, given in ((block.mixer, one.options_of(layer)), (block.ffn, one.ffn_options_of(layer))):
            if tp > 1 and part is not None and (why := heads.refusal(cast(Mixer, part), given, tp)) is not None:
                raise ValueError(f"{cast(Mixer, part).info.name} does not run under tensor parallelism of {tp}: {why}")


def loss_chunk(options: TrainOptions, vocab_size: int) -> int:
    """Tokens whose logits are computed at a time."""
    return options.loss_chunk or chunk_of(options.batch_size * options.context // options.cp, vocab_size)


def token_loss(options: TrainOptions, vocab_size: int) -> TokenLoss | None:
    """Build the model's loss; None for transformers' loss on all logits at once."""
    chunk, aligned = loss_chunk(options, vocab_size), options.cp > 1
    own = aligned or options.z_loss or chunk < options.batch_size * options.context
    return TokenLoss(chunk, options.z_loss, aligned, options.compile) if own else None


def training_arguments(options: TrainOptions) -> TrainingArguments:
    """Build the arguments of transformers' Trainer from ``options`` that :func:`settled` filled in."""
    eval_every = options.eval_every or max(10, options.steps // 10)
    asked: dict[str, Any] = {}
    if options.schedule == "wsd":
        asked["lr_scheduler_kwargs"] = {"num_decay_steps": decay_steps(options.steps), "decay_type": "linear"}
    if options.device is not None and (device := torch.device(options.device)).index is not None:
        torch.accelerator.set_device_index(device.index)
    arguments = TrainingArguments(
        output_dir=str(options.folder),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=max(options.batch_size, 4096 // options.context),
        gradient_accumulation_steps=options.accumulate,
        learning_rate=options.learning_rate,
        lr_scheduler_type=SCHEDULES[options.schedule],
        warmup_steps=options.warmup or 0,
        weight_decay=options.weight_decay,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=options.max_grad_norm,
        bf16=options.dtype == "bf16",
        seed=options.seed,
        logging_steps=math.gcd(eval_every, 10),
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=eval_every,
        prediction_loss_only=True,
        save_strategy="steps",
        save_steps=options.save_every or options.steps,
        use_cpu=options.device == "cpu" or not torch.accelerator.is_available(),
        dataloader_pin_memory=_on_cuda(options),
        accelerator_config={"non_blocking": _on_cuda(options)},  # else the host waits for the GPU at every batch
        ignore_data_skip=True,  # the sampler starts at the resumed position
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        report_to=list(options.report_to) or "none",
        **asked,
    )
    if options.device is not None and arguments.n_gpu > 1:  # Trainer would use all GPUs with DataParallel
        arguments._n_gpu = 1
    return arguments


def decay_steps(steps: int) -> int:
    """Number of last steps over which the schedule ``wsd`` falls to 0."""
    return max(1, steps // 5)


def device_type(options: TrainOptions) -> str:
    """Type of the device that the training runs on."""
    if options.device is not None:
        return torch.device(options.device).type
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if there is None else there.type


def _on_cuda(options: TrainOptions) -> bool:
    return torch.cuda.is_available() and (options.device is None or options.device.startswith("cuda"))


def _check_device(name: str) -> None:
    device = known_device("device", name)
    if device.type == "cpu":
        return
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if there is None or there.type != device.type or (device.index or 0) >= torch.accelerator.device_count():
        has = "only the CPU; use 'cpu'" if there is None else f"{torch.accelerator.device_count()} x {there.type}"
        raise ValueError(f"device {name!r} is not available: this machine has {has}")
