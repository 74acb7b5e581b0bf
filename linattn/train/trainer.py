"""The Hugging Face Trainer with checkpoints that are whole or absent and hold no pickle, and data in the packed order."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler
from transformers import Trainer

from linattn.data.codec import TOKENIZER, ByteCodec, Codec, TokenizerCodec
from linattn.data.folders import publish
from linattn.data.packed import PackedTokens
from linattn.ffn import added_counts, reports
from linattn.hf import LinattnForCausalLM
from linattn.hf.tokenizer import tokenizer_of
from linattn.train import checkpoint
from linattn.train.optimizers import MuonAdamW, decayed
from linattn.train.progress import Recorder
from linattn.train.run import GENERATORS, OPTIMIZER, SCHEDULE, present


class Ahead(Sampler):
    """The samples from ``first`` on, of ``count`` that the whole run has: going on at any of them is arithmetic."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.count))

    def __len__(self) -> int:
        return self.count


class RunTrainer(Trainer):
    """One run. What Trainer would pickle is written as safetensors with JSON in their headers."""

    optimizer: Any  # Trainer makes these two when it begins
    lr_scheduler: Any

    def __init__(
        self, *, model: LinattnForCausalLM, packed: PackedTokens, codec: Codec, recorder: Recorder, muon: bool = False, first: int = 0,
        end: str | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """``first`` is the number of samples that the run has seen, ``end`` the text of the token that ends documents."""
        super().__init__(model=model, train_dataset=packed, callbacks=[recorder], **kwargs)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError("training writes whole optimizer states: use plain torchrun, without FSDP or DeepSpeed")
        self.packed, self.codec, self.recorder = packed, codec, recorder
        self._muon, self._first, self._end = muon, first, None if isinstance(codec, ByteCodec) else end
        self._start: str | None = None  # checkpoint whose random generators are restored once the first batch is read
        self._aside: Path | None = None

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As Trainer has it; what mixtures of experts tell of their tokens goes to the recorder, in training."""
        with reports() as told:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        if model.training:
            self.recorder.count({name: n.detach() if isinstance(n, Tensor) else n for name, n in added_counts(told).items()})
        return loss

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decayed(model)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As Trainer has it, AdamW, or Muon beside it."""
        if self._muon and self.optimizer is None:
            rate, decay = self.args.learning_rate, self.args.weight_decay
            self.optimizer = MuonAdamW(cast(nn.Module, model or self.model), lr=rate, weight_decay=decay, fused=True)
        return super().create_optimizer(model)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As Trainer has it, with the speed beside the loss."""
        super().log({**logs, **self.recorder.speed(self.state.global_step)} if "loss" in logs else logs, start_time)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Operations of a batch, from the mixers' own counts."""
        meter = self.recorder.meter
        return 0 if meter is None else int(inputs["input_ids"].numel() * meter.token_flops)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler:
        return Ahead(self._first, len(self.packed))  # already in the right order

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer has it; beginning to read draws random numbers, which the run before did not."""
        batches = super().get_batch_samples(*args, **kwargs)
        if self._start is not None:
            checkpoint.set_generators(*checkpoint.read(Path(self._start, GENERATORS.format(self.args.process_index))))
            self._start = None
        return batches

    def _get_output_dir(self, trial=None) -> str:
        return str(self._aside or self.args.output_dir)

    def _save_checkpoint(self, model: nn.Module, trial) -> None:
        """Write aside, sync, rename, mark."""
        run, name = Path(str(self.args.output_dir)), f"checkpoint-{self.state.global_step}"
        aside, main = run / f".{name}.part", self.is_world_process_zero()
        self._aside = aside
        try:
            if main:
                shutil.rmtree(aside, ignore_errors=True)
                (aside / name).mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if main:
                publish(aside / name, run / name)
                checkpoint.mark(run / name, step=self.state.global_step, **self.recorder.seen())
                present(run)
        except (OSError, SafetensorError) as error:
            raise OSError(f"{run / name} cannot be written: {error}; the checkpoints before it are whole") from error
        finally:
            if main:
                shutil.rmtree(aside, ignore_errors=True)
            self._aside = None
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Trainer's own pickles its arguments beside the weights."""
        assert output_dir is not None
        self.accelerator.unwrap_model(self.model).save_pretrained(output_dir, state_dict=state_dict)
        tokenizer_of(self.codec, end=self._end).save_pretrained(output_dir)
        if isinstance(self.codec, TokenizerCodec):  # as it came
            Path(output_dir, TOKENIZER).write_text(self.codec.content, encoding="utf-8")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:
            checkpoint.write(Path(output_dir, OPTIMIZER), *checkpoint.flatten(self.optimizer.state_dict()))
            checkpoint.write(Path(output_dir, SCHEDULE), {}, self.lr_scheduler.state_dict())

    def _save_rng_state(self, output_dir: str) -> None:
        checkpoint.write(Path(output_dir, GENERATORS.format(self.args.process_index)), *checkpoint.generators())

    def _load_optimizer_and_scheduler(self, checkpoint_dir: str | None) -> None:
        """Load both; the rate of the next step follows from this schedule, whose horizon may be another than the one before."""
        if checkpoint_dir is None:
            return
        self.optimizer.load_state_dict(checkpoint.unflatten(*checkpoint.read(Path(checkpoint_dir, OPTIMIZER))))
        self.lr_scheduler.load_state_dict(checkpoint.read(Path(checkpoint_dir, SCHEDULE))[1])
        scheduler = self.lr_scheduler
        for group, peak, share in zip(self.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = peak * share(scheduler.last_epoch)
        scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _load_rng_state(self, checkpoint_dir: str | None) -> None:
        self._start = checkpoint_dir
