"""One training run from options to result."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import PrinterCallback, TrainingArguments

from linattn.data import Corpus, PackedTokens, Prepared, corpus, prepared
from linattn.data.packed import Windows, collate
from linattn.hf import LinattnForCausalLM, LMConfig
from linattn.models.memory import require_training
from linattn.state import only_writer
from linattn.train import checkpoint, run, setup
from linattn.train.options import Terminated, TrainOptions, TrainResult
from linattn.train.progress import Bar, Ending, Recorder
from linattn.train.speed import meter
from linattn.train.surroundings import own_surroundings
from linattn.train.trainer import RunTrainer

VALIDATION_TOKENS = 1 << 14  # evenly spaced over the validation text


def train(options: TrainOptions, *, progress: bool = True) -> TrainResult:
    """Train a model on text and leave it in ``options.folder``; see :mod:`linattn.train.run` for what is in there.

    The same options, machine and number of processes give the same weights, bit for bit, however often the training was
    killed and resumed on the way. Under ``torchrun`` every process calls this.

    Args:
        options: what to train.
        progress: show a bar on the terminal.

    Raises:
        OSError, ValueError: for text, options and folders that do not fit, sizes that memory does not hold, and a folder to which another
            process is writing, before anything is written.
        Terminated: after SIGTERM or Ctrl-C, once a checkpoint has been written; a second Ctrl-C interrupts at once.
    """
    options = setup.settled(options, run.saved_options(options.folder) if options.resume else None)
    data = corpus(options.text, options.tokenizer) if options.data is None else prepared(options.data)
    config = setup.model_config(options, data.vocab_size)
    _long_enough(data, options)
    require_training(config, tokens=options.batch_size * options.context, chunk=setup.loss_chunk(options, data.vocab_size))
    with torch.device("meta"):  # widths that do not divide are refused before there is a folder
        LinattnForCausalLM(config)
    args = setup.training_arguments(options)
    main = args.process_index == 0
    with ExitStack() as held:  # by the first process, for all
        with args.main_process_first(local=False):
            if main:
                same = run.identity(options, config, data.sha256, args.world_size)
                run.check(options, same)
                held.enter_context(only_writer(options.folder))
                run.prepare(options, same, config.to_json_string())
        held.enter_context(own_surroundings())
        return _run(options, args, config, data, progress)


def _run(options: TrainOptions, args: TrainingArguments, config: LMConfig, data: Corpus | Prepared, progress: bool) -> TrainResult:
    start = checkpoint.newest(options.folder)
    if start is not None and args.process_index == 0:
        checkpoint.check(start)
    seen = (start and checkpoint.marked(start)) or {"step": 0, "seconds": 0.0, "losses": [], "counts": {}}
    history = run.history(options.folder, seen["step"])
    if args.process_index == 0:
        run.clean(options.folder, history)
        run.present(options.folder)  # a process may have been killed before it did
    torch.manual_seed(options.seed)
    model = LinattnForCausalLM(config)
    model.token_loss = setup.token_loss(options, data.vocab_size)
    end = data.end if isinstance(data, Prepared) else None
    if end is not None:
        model.config.eos_token_id = model.generation_config.eos_token_id = data.codec.encode(end)[0]
    model.model.gradient_checkpointing = options.checkpoint_activations
    step_samples = options.batch_size * options.accumulate * args.world_size
    if seen["step"] < options.steps:
        recorder = Recorder(
            options.folder / run.METRICS, history, seen, step_tokens=step_samples * options.context, bits_per_byte=data.bits_per_byte
        )  # fmt: skip
        recorder.meter = meter(config, options.context, args.device, args.world_size)
        trainer = RunTrainer(
            model=model, args=args, codec=data.codec, recorder=recorder, muon=options.optimizer == "muon", end=end,
            first=seen["step"] * step_samples, data_collator=collate,
            packed=PackedTokens(data.train, options.context, seed=options.seed, samples=options.steps * step_samples),
            eval_dataset=Windows(data.validation, options.context, max(1, VALIDATION_TOKENS // options.context)),
        )  # fmt: skip
        _go(trainer, start, Bar(options.mixer, recorder) if progress else None)
    if not history:
        raise ValueError(f"{options.folder} has lost its {run.METRICS}")
    last = history[-1]
    return TrainResult(
        run=options.folder,
        parameters=sum(p.numel() for p in model.parameters()),
        history=history,
        validation_bits_per_byte=last["validation_bits_per_byte"],
        tokens_per_second=last["tokens"] / last["seconds"],
        corpus_sha256=data.sha256,
    )


def _go(trainer: RunTrainer, start: Path | None, bar: Bar | None) -> None:
    trainer.remove_callback(PrinterCallback)
    if bar is not None:
        trainer.add_callback(bar)
    try:
        with Ending(trainer.args.world_size) as ending:
            trainer.add_callback(ending)
            trainer.train(resume_from_checkpoint=None if start is None else str(start))
    finally:
        if bar is not None:
            bar.stop()
    if ending.asked is not None and trainer.state.global_step < trainer.state.max_steps:
        raise Terminated(ending.asked, trainer.state.global_step, str(trainer.args.output_dir))


def _long_enough(data: Corpus | Prepared, options: TrainOptions) -> None:
    for name in ("train", "validation"):
        if len(getattr(data, name)) < options.context:
            raise ValueError(
                f"the text is too short for a context of {options.context}: {len(data.train)} tokens to learn from and"
                f" {len(data.validation)} to validate on; give more text or a smaller context"
            )
