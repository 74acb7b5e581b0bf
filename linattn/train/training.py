"""One training run from options to result."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from transformers import PrinterCallback, TrainingArguments

from linattn.data import Corpus, PackedTokens, Prepared, corpus, prepared
from linattn.data.packed import Windows, collate
from linattn.hf import LinattnForCausalLM, LMConfig
from linattn.models.memory import require_training
from linattn.parallel.apply import compiled
from linattn.state import only_writer
from linattn.train import checkpoint, run, setup
from linattn.train.options import Terminated, TrainOptions, TrainResult
from linattn.train.process_state import restored_process_state
from linattn.train.processes import Processes
from linattn.train.progress import Bar, Ending, Recorder
from linattn.train.speed import meter
from linattn.train.trainer import RunTrainer

PACKED_MULTIPLE = 64  # rounding of the number of sequences in a packed batch of a compiled model


def train(options: TrainOptions, *, progress: bool = True) -> TrainResult:
    """Train a model on text into ``options.folder``, whose files :mod:`linattn.train.run` lists.

    Equal options, machine and number of processes give equal weights, bit for bit, however often the training was killed and
    resumed. Under ``torchrun`` every process calls this. A run may be resumed by another number of processes: it starts with the same
    parameters and optimizer, bit for bit, and continues equally up to rounding.

    Args:
        options: model, data and optimization.
        progress: show a bar on the terminal.

    Raises:
        OSError, ValueError: for unusable text, options and folders, sizes beyond memory, and a folder that another process is
            writing to; nothing is written then.
        Terminated: after SIGTERM or Ctrl-C to any process, in all of them, once a checkpoint has been written; a second Ctrl-C
            interrupts a single process at once.
    """
    begun = run.saved_options(options.folder) if options.resume else None
    options = setup.settled(options, begun, run.saved_samples(options.folder) if options.resume else None)
    processes = Processes.of(options, setup.device_type(options))
    data = corpus(options.text, options.tokenizer) if options.data is None else prepared(options.data)
    config = setup.model_config(options, data.vocab_size)
    _long_enough(data, options)
    tokens, shards = options.batch_size * options.context // options.cp, processes.count if processes.fsdp else 1
    require_training(config, tokens=tokens, chunk=setup.loss_chunk(options, data.vocab_size), shards=shards)
    with torch.device("meta"):  # refuses invalid widths before the folder is created
        LinattnForCausalLM(config)
    setup.check_sharing(config, options.cp, options.tp)
    args = setup.training_arguments(options)
    main = args.process_index == 0
    with ExitStack() as held:  # locks of the main process
        with args.main_process_first(local=False):
            if main:
                same = run.identity(options, config, data.sha256, options.batch_size * options.accumulate * processes.dp)
                run.check(options, same)
                held.enter_context(only_writer(options.folder))
                run.prepare(options, same, config.to_json_string())
        held.enter_context(restored_process_state())
        return _run(options, (args, processes), config, data, progress)


def _run(
    options: TrainOptions, how: tuple[TrainingArguments, Processes], config: LMConfig, data: Corpus | Prepared, progress: bool
) -> TrainResult:
    args, processes = how
    start = checkpoint.newest(options.folder)
    if start is not None and args.process_index == 0:
        checkpoint.check(start)
    seen = (start and checkpoint.marked(start)) or {"step": 0, "seconds": 0.0, "losses": [], "counts": {}}
    history = run.history(options.folder, seen["step"])
    if args.process_index == 0:
        run.clean(options.folder, history)
        run.present(options.folder)  # the process may have been killed before it did
    torch.manual_seed(options.seed)
    model = LinattnForCausalLM(config)
    model.token_loss = setup.token_loss(options, data.vocab_size)
    end = data.end if isinstance(data, Prepared) else None
    if end is not None:
        model.config.eos_token_id = model.generation_config.eos_token_id = data.codec.encode(end)[0]
    model.model.gradient_checkpointing = options.checkpoint_activations
    if options.compile and not processes.fsdp:  # parallelize compiles sharded ones
        compiled(model.model)
    step_samples, isolated = options.batch_size * options.accumulate * processes.dp, not options.join_documents
    parameters = sum(p.numel() for p in model.parameters())
    if seen["step"] < options.steps:
        recorder = Recorder(
            options.folder / run.METRICS, history, seen, step_tokens=step_samples * options.context, bits_per_byte=data.bits_per_byte
        )  # fmt: skip
        recorder.meter = meter(config, options.context, args.device, args.world_size)
        trainer = RunTrainer(
            model=model, args=args, sharing=(processes, options), codec=data.codec, recorder=recorder, end=end,
            first=seen["step"] * step_samples,
            data_collator=partial(collate, multiple=PACKED_MULTIPLE if options.compile else 1),
            packed=PackedTokens(data.train, options.context, seed=options.seed, samples=options.steps * step_samples, isolated=isolated),
            eval_dataset=Windows(data.validation, options.context, max(1, options.eval_tokens // options.context), isolated=isolated),
        )  # fmt: skip
        _execute(trainer, start, Bar(options.mixer, recorder) if progress else None)
    if not history:
        raise ValueError(f"{options.folder} lacks {run.METRICS}")
    last = history[-1]
    return TrainResult(
        run=options.folder,
        parameters=parameters,
        history=history,
        validation_bits_per_byte=last["validation_bits_per_byte"],
        tokens_per_second=last["tokens"] / last["seconds"],
        corpus_sha256=data.sha256,
    )


def _execute(trainer: RunTrainer, start: Path | None, bar: Bar | None) -> None:
    trainer.remove_callback(PrinterCallback)
    if bar is not None:
        trainer.add_callback(bar)
    try:
        with Ending(trainer.args) as ending:
            trainer.add_callback(ending)
            trainer.train(resume_from_checkpoint=None if start is None else str(start))
    finally:
        if bar is not None:
            bar.stop()
    if ending.received is not None and trainer.state.global_step < trainer.state.max_steps:
        raise Terminated(ending.received, trainer.state.global_step, str(trainer.args.output_dir))


def _long_enough(data: Corpus | Prepared, options: TrainOptions) -> None:
    for name in ("train", "validation"):
        if len(getattr(data, name)) < options.context:
            raise ValueError(
                f"the text is too short for a context of {options.context}: {len(data.train)} training tokens and"
                f" {len(data.validation)} validation tokens; give more text or a smaller context"
            )
