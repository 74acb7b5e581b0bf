"""Options of an evaluation. The module imports nothing slow, because the command line reads its defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from linattn.arguments import check_fields, option

TASKS = ("needle", "variables", "words")
DTYPES = ("bf16", "fp32")


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of an evaluation.

    Args:
        teacher: a model with the same tokens, evaluated too, from which the distance of the other models' distributions is measured.
        text: held-out UTF-8 files or glob patterns; empty: the held-out part of Python's standard library.
        tokens: maximum number of tokens of the text, from its beginning.
        context: tokens of the text in one window; each window starts from an empty state.
        tasks: ``"needle"`` (a number among sentences), ``"variables"`` (a chain of assignments), ``"words"`` (the most frequent word).
        lengths: prompt lengths in tokens, for tasks and for the measurement of state and speed.
        samples: prompts of each task and length.
        lm_eval: tasks of lm-eval, which must be installed; with ``HF_DATASETS_OFFLINE=1`` it reads data sets from disk alone.
        lm_eval_tasks: folder of the YAML files that define them, which name their data; None: lm-eval's own tasks.
        lm_eval_limit: documents of each of these tasks; None: all.
        decode: tokens decoded to measure the speed; 0 skips speed and state.
        dtype: ``"bf16"`` or ``"fp32"``: precision of weights and computation; None: bf16 on a GPU, else that of the model's files.
        device: device of the models; None: the accelerator if there is one.
        seed: seed of the prompts.
        out: folder for report.json and report.html; None writes neither.

    Raises:
        ValueError: for values out of range, naming the field.
    """

    teacher: Path | None = option(None, "Model to compare with; it must have the same tokenizer.", "FOLDER")
    text: tuple[str | Path, ...] = option(
        (), "Held-out UTF-8 text or a quoted pattern; may be given again.", "FILES", shown="the source of Python's standard library"
    )
    tokens: int = option(100_000, "Maximum number of tokens of the text.", "N", least=2)
    context: int = option(1024, "Tokens of one window of the text.", "T", least=2)
    tasks: tuple[str, ...] = option(TASKS, "Retrieval tasks.", "A,B,...", separated=True, shown="needle,variables,words")
    lengths: tuple[int, ...] = option((512, 2048), "Lengths of the prompts, in tokens.", "T,T,...", separated=True, shown="512,2048")
    samples: int = option(20, "Prompts of each task and length.", "N", least=1)
    lm_eval: tuple[str, ...] = option((), "Tasks of lm-eval.", "A,B,...", separated=True)
    lm_eval_tasks: Path | None = option(None, "Folder with the definitions of these tasks.", "DIR", shown="lm-eval's own")
    lm_eval_limit: int | None = option(None, "Documents of each of these tasks.", "N", shown="all", least=1)
    decode: int = option(64, "Tokens decoded to measure speed; 0: none.", "N", least=0)
    dtype: str | None = option(None, "Precision of weights and computation.", "bf16|fp32", shown="bf16 on a GPU")
    device: str | None = option(None, "cpu, cuda or cuda:1.", "DEVICE", shown="the GPU if there is one")
    seed: int = option(0, "Seed of the prompts.", "S", least=0)
    out: Path | None = option(None, "Folder for report.json and report.html.", "DIR")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dtype not in (*DTYPES, None):
            raise ValueError(f"dtype must be 'bf16' or 'fp32' or None, but came as {self.dtype!r}")
        if unknown := [task for task in self.tasks if task not in TASKS]:
            raise ValueError(f"tasks must be among {', '.join(TASKS)}, but have {unknown[0]!r}")
        if short := [length for length in self.lengths if length < 1]:
            raise ValueError(f"lengths must be at least 1 token, but have {short[0]}")
        if self.lm_eval_tasks is not None and not self.lm_eval_tasks.is_dir():
            raise ValueError(f"lm_eval_tasks must be a folder, but {self.lm_eval_tasks} is not one")
