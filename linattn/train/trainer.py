"""Hugging Face Trainer with atomic checkpoints without pickles, and with data in packed order."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput

from linattn.data.codec import TOKENIZER, ByteCodec, Codec, TokenizerCodec
from linattn.data.folders import publish
from linattn.data.packed import PackedTokens
from linattn.ffn import added_counts, reports
from linattn.hf import LinattnForCausalLM
from linattn.hf.tokenizer import tokenizer_of
from linattn.train import checkpoint, sharded
from linattn.train.optimizers import MuonAdamW, decayed
from linattn.train.options import TrainOptions
from linattn.train.processes import Batches, Processes
from linattn.train.progress import Recorder
from linattn.train.run import GENERATORS, OPTIMIZER, SCHEDULE, present


class Consecutive(Sampler):
    """Sample indices from ``first`` to ``count`` - 1 in order, so that a run resumes at any of them."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.count))

    def __len__(self) -> int:
        return self.count


class RunTrainer(Trainer):
    """Trainer of one run, whose checkpoints are safetensors with JSON in their headers in place of pickles."""

    optimizer: Any  # created by Trainer when it starts, as is lr_scheduler
    lr_scheduler: Any

    def __init__(
        self, *, model: LinattnForCausalLM, packed: PackedTokens, codec: Codec, recorder: Recorder,
        sharing: tuple[Processes, TrainOptions], first: int = 0, end: str | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        """``first``: samples that the run has already trained on; ``end``: text of the token that ends documents."""
        super().__init__(model=model, train_dataset=packed, callbacks=[recorder], **kwargs)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                "accelerate must not shard the model: give --fsdp to linattn train, and neither FSDP nor DeepSpeed to accelerate"
            )
        self.packed, self.codec, self.recorder = packed, codec, recorder
        self.processes, options = sharing
        muon = options.optimizer == "muon"
        if self.processes.fsdp:
            self.processes.parallelize(model, options)
            self.is_distributed_loading_by_transformers = True  # Trainer's name for a model that is sharded already
        self._muon, self._first, self._end = muon, first, None if isinstance(codec, ByteCodec) else end
        self._start: str | None = None  # checkpoint whose random generators are restored once the first batch is read
        self._aside: Path | None = None

    @property
    def _own(self) -> nn.Module:
        """Model without Trainer's wrappers."""
        return cast(nn.Module, self.model)

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of this process's part as Trainer does, and in training record the token counts of mixtures of experts."""
        part, active = self.processes.shared(inputs)
        with reports() as told, active:
            loss = super().compute_loss(model, part, *args, **kwargs)
        if model.training:
            self.recorder.count({name: n.detach() if isinstance(n, Tensor) else n for name, n in added_counts(told).items()})
        return loss

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return decayed(model)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create AdamW as Trainer does, or Muon with AdamW."""
        if self._muon and self.optimizer is None:
            rate, decay = self.args.learning_rate, self.args.weight_decay
            self.optimizer = MuonAdamW(cast(nn.Module, model or self.model), lr=rate, weight_decay=decay, fused=True)
        return super().create_optimizer(model)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as Trainer does, with the speed beside the loss."""
        super().log({**logs, **self.recorder.log_speed(self.state.global_step)} if "loss" in logs else logs, start_time)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Count the floating-point operations of a batch by the mixers' formulas."""
        meter = self.recorder.meter
        return 0 if meter is None else int(inputs["input_ids"].numel() * meter.token_flops)

    def get_cp_size(self) -> int:
        """Processes that share a sequence, by which Trainer divides numbers of labels."""
        return self.processes.cp

    def get_tp_size(self) -> int:
        """Processes that share heads, by which Trainer divides numbers of labels too."""
        return self.processes.tp

    def get_train_dataloader(self) -> DataLoader:
        """Build the loader as Trainer does; processes that share sequences get equal batches."""
        if self.processes.sharing == 1:
            return super().get_train_dataloader()
        return self._batches(self.packed, Batches(self._first, len(self.packed), self.args.train_batch_size, self.processes))

    def evaluation_loop(
        self, dataloader: DataLoader, description: str, prediction_loss_only: bool | None = None, ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:  # fmt: skip
        """Evaluate as Trainer does; each group of processes reads its own windows, in equally many passes."""
        if self.processes.count == 1:
            return super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        dataset, size = dataloader.dataset, self.args.eval_batch_size
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        self._own.eval()
        batches = Batches(0, len(dataset), size, self.processes)  # type: ignore[arg-type]
        for chosen in batches.padded():
            rows = cast(Any, self.data_collator)([dataset[i] for i in chosen or [0]])
            total += self._evaluated(rows, len(chosen))
        loss, count = self.processes.summed(total).tolist()
        mean = loss / (count / self.processes.cp)
        return EvalLoopOutput(None, None, {f"{metric_key_prefix}_loss": mean}, len(dataset))  # type: ignore[arg-type]

    @torch.no_grad()
    def _evaluated(self, rows: dict[str, Any], count: int) -> Tensor:
        """Loss of this process's part of ``rows``, times their number ``count``, and ``count``: two sums for the mean."""
        inputs = self._prepare_inputs(rows)
        items = (inputs["labels"][:, 1:] != -100).sum()
        part, active = self.processes.shared(inputs)
        with active:
            loss = self._own(**part, num_items_in_batch=items).loss
        return torch.stack([loss.double() * count, loss.new_tensor(count, dtype=torch.float64)])

    def _batches(self, dataset: Dataset, batches: Batches) -> DataLoader:
        return DataLoader(dataset, batch_sampler=batches, collate_fn=self.data_collator, pin_memory=self.args.dataloader_pin_memory)

    @contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        """Reduce gradients after every pass: unreduced ones would need the memory that sharding saves."""
        yield

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler:
        return Consecutive(self._first, len(self.packed))  # already in the right order

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Read batches as Trainer does; then restore the generators, because opening the loader draws random numbers."""
        batches = super().get_batch_samples(*args, **kwargs)
        if self._start is not None:
            checkpoint.set_generators(*checkpoint.read(self._generators(Path(self._start))))
            self._start = None
        return batches

    def _generators(self, folder: Path) -> Path:
        """This process's generators, or the first one's if there were fewer processes."""
        own = folder / GENERATORS.format(self.args.process_index)
        return own if own.is_file() else folder / GENERATORS.format(0)

    def _get_output_dir(self, trial: Any = None) -> str:
        return str(self._aside or self.args.output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the checkpoint to a temporary folder, sync it, rename it and mark it complete."""
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
            raise OSError(f"{run / name} cannot be written: {error}; earlier checkpoints are complete") from error
        finally:
            if main:
                shutil.rmtree(aside, ignore_errors=True)
            self._aside = None
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Save model and tokenizer without the pickled arguments of Trainer; a sharded model's weights follow with its optimizer."""
        assert output_dir is not None
        state_dict = {} if self.processes.fsdp else state_dict
        self.accelerator.unwrap_model(self.model).save_pretrained(output_dir, state_dict=state_dict)
        tokenizer_of(self.codec, end=self._end).save_pretrained(output_dir)
        if isinstance(self.codec, TokenizerCodec):  # byte for byte the given file
            Path(output_dir, TOKENIZER).write_text(self.codec.content, encoding="utf-8")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = self.optimizer.optimizer
        if self.processes.fsdp:
            self.accelerator.wait_for_everyone()
            sharded.save(Path(output_dir), self._own, optimizer)
        elif self.args.should_save:
            checkpoint.write(Path(output_dir, OPTIMIZER), sharded.named_state(self._own, optimizer), {})
        if self.args.should_save:
            checkpoint.write(Path(output_dir, SCHEDULE), {}, self.lr_scheduler.state_dict())

    def _save_rng_state(self, output_dir: str) -> None:
        checkpoint.write(Path(output_dir, GENERATORS.format(self.args.process_index)), *checkpoint.generators())

    def _load_optimizer_and_scheduler(self, checkpoint_dir: str | None) -> None:
        """Load both, and set the next step's learning rate by this run's schedule, which may be longer than the saved one."""
        if checkpoint_dir is None:
            return
        sharded.load_optimizer(Path(checkpoint_dir), self._own, self.optimizer.optimizer)
        self.lr_scheduler.load_state_dict(checkpoint.read(Path(checkpoint_dir, SCHEDULE))[1])
        scheduler = self.lr_scheduler
        for group, peak, share in zip(self.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = peak * share(scheduler.last_epoch)
        scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.processes.fsdp:
            sharded.load_weights(Path(resume_from_checkpoint), self._own)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint_dir: str | None) -> None:
        self._start = checkpoint_dir
