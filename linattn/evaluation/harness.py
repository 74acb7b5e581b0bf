"""Tasks of lm-eval (imported on use) on a loaded model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from linattn.data.codec import Codec
from linattn.evaluation.options import EvaluateOptions
from linattn.extras import missing
from linattn.generate.batch import complete

_BATCH = 1 << 14  # tokens of one forward pass
_LONGEST = 256  # tokens of an answer where the task gives no limit, as in lm-eval

Pair = tuple[list[int], list[int]]  # tokens of a context and of its continuation


def require() -> None:
    """Raise ModuleNotFoundError where lm-eval is not installed, naming what to install."""
    try:
        import_module("lm_eval")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing("lm_eval", "EvaluateOptions.lm_eval"), name="lm_eval") from error


def on_harness(model: Any, codec: Codec, options: EvaluateOptions) -> list[dict[str, Any]]:
    """Run the tasks ``options.lm_eval``: a dict of ``task``, ``metric``, ``value`` and ``samples`` for each metric."""
    if not options.lm_eval:
        return []
    folder = options.lm_eval_tasks
    manager = import_module("lm_eval.tasks").TaskManager(
        include_path=None if folder is None else str(folder), include_defaults=folder is None
    )  # reading lm-eval's own thousands takes seconds
    if unknown := [name for name in options.lm_eval if name not in manager.all_tasks]:
        raise ValueError(f"lm_eval must name tasks {'of lm-eval' if folder is None else f'in {folder}'}, but has {unknown[0]!r}")
    found = import_module("lm_eval").simple_evaluate(
        adapted(model, codec), tasks=list(options.lm_eval), task_manager=manager, limit=options.lm_eval_limit, bootstrap_iters=0,
        log_samples=False,
    )  # fmt: skip
    rows = []
    for task, values in found["results"].items():
        samples = found["n-samples"].get(task, {}).get("effective", 0)
        for name, value in values.items():
            metric, _, rule = name.partition(",")
            if rule and isinstance(value, int | float) and not metric.endswith("_stderr"):
                shown = metric if rule == "none" else f"{metric} ({rule})"
                rows.append({"task": task, "metric": shown, "value": float(value), "samples": samples})
    return rows


def adapted(model: Any, codec: Codec) -> Any:
    """Wrap ``model`` and ``codec`` for lm-eval; the context of a text without one is the end-of-document token, or token 0."""

    class Adapted(import_module("lm_eval.api.model").TemplateLM):  # type: ignore[misc]  # a class of Any
        @property
        def eot_token_id(self) -> int:
            return getattr(model.config, "eos_token_id", None) or 0

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return codec.encode(string)

        def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any) -> list[tuple[float, bool]]:
            return likelihoods(model, [(context, rest) for _, context, rest in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            pairs = [([self.eot_token_id], codec.encode(request.args[0])) for request in requests]
            return [likelihood for likelihood, _ in likelihoods(model, pairs)]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return answers(model, codec, [request.args for request in requests])

    return Adapted()


@torch.no_grad()
def likelihoods(model: Any, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
    """Compute the log-likelihood in nats of each continuation after its context, and whether it is the greedy one.

    Contexts have at least one token. Shorter rows of a batch are padded behind their ends, which a causal model does not read.
    """
    found = [(0.0, True)] * len(pairs)
    for batch in _batches([len(context) + len(rest) for context, rest in pairs]):
        rows = [torch.tensor((pairs[i][0] + pairs[i][1])[:-1] or pairs[i][0]) for i in batch]
        ids = pad_sequence(rows, batch_first=True).to(model.device)
        hidden = cast(Tensor, model.model(ids)[0])
        for row, i in zip(hidden, batch, strict=True):
            context, rest = pairs[i]
            logits = model.lm_head(row[len(context) - 1 : len(context) - 1 + len(rest)]).float().log_softmax(-1)
            wanted = ids.new_tensor(rest)
            found[i] = (logits.gather(1, wanted[:, None]).sum().item(), bool((logits.argmax(-1) == wanted).all()))
    return found


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of ``lengths``, the longest first, in groups that take at most a forward pass's tokens when padded."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    while order:
        count = max(1, _BATCH // max(1, lengths[order[0]]))
        yield order[:count]
        order = order[count:]


def answers(model: Any, codec: Codec, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Continue each prompt up to its ``until`` texts, greedily or at its ``temperature``."""
    found = [""] * len(requests)
    groups: dict[str, list[int]] = {}
    for i, (_, how) in enumerate(requests):
        groups.setdefault(json.dumps(dict(how), sort_keys=True), []).append(i)
    for key, indices in groups.items():
        how = json.loads(key)
        until = how.get("until") or []
        stop = [text for text in ([until] if isinstance(until, str) else until) if text]
        done = complete(
            model, [codec.encode(requests[i][0]) for i in indices], max_new_tokens=how.get("max_gen_toks", _LONGEST), stop=stop,
            codec=codec, temperature=float(how.get("temperature") or 0.0) if how.get("do_sample") else 0.0, seed=0,
        )  # fmt: skip
        for i, request in zip(indices, done, strict=True):
            found[i] = request.text
    return found
