"""Generation from a state: ``generate()`` continues from earlier tokens, or from a saved state."""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from linattn.arguments import whole
from linattn.generate.prefill import prefill, resume
from linattn.generate.stream import check_draft
from linattn.hf import captured
from linattn.hf.cache import CACHE, StateCache, keyword, pop_cache
from linattn.hf.packing import ENDS, breaks, check_positions, restarts
from linattn.state import State
from linattn.state.store import PrefixStore

Prefixes = PrefixStore | str | os.PathLike[str]


class StateGenerationMixin(GenerationMixin):
    """Mixin with ``prefill`` and a ``generate`` that continues from its state and takes prompts padded on either side."""

    @torch.no_grad()
    def prefill(
        self: Any,
        input_ids: Tensor | Sequence[int] | Sequence[Sequence[int]],
        attention_mask: Tensor | None = None,
        *,
        state: State | None = None,
        prefixes: Prefixes | None = None,
    ) -> State:
        """Read tokens and return the state after them, which ``generate(..., state=state)`` accepts any number of times.

        Args:
            input_ids: [T] or [B, T]; or a list of prompts of any lengths, which are packed and read in one pass.
            attention_mask: [B, T], 0 for padding; only for tensors.
            state: state before the tokens, one row per prompt.
            prefixes: a :class:`linattn.state.PrefixStore` or its folder: reading starts after the longest stored prefix, and the
                states of new prefixes are stored.

        Returns:
            A state with a row for each prompt.
        """
        if prefixes is not None and state is not None:
            raise ValueError("state must be None with prefixes, which hold states from the beginning")
        if attention_mask is not None and (
            not isinstance(input_ids, Tensor) or not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape
        ):
            wanted = (
                f"the shape of input_ids, {list(input_ids.shape)}" if isinstance(input_ids, Tensor) else "a tensor beside it as input_ids"
            )
            raise ValueError(f"attention_mask must have {wanted}, but came {_came(attention_mask)}")
        if isinstance(input_ids, Tensor) and prefixes is None:
            if input_ids.ndim not in (1, 2) or not input_ids.numel():
                raise ValueError(f"input_ids must be [T] or [B, T] with at least one token, but came with shape {list(input_ids.shape)}")
            ids = input_ids.to(self.device).reshape(-1, input_ids.shape[-1])
            _check_rows(state, len(ids))
            mask = None if attention_mask is None else attention_mask.to(self.device).bool().reshape(ids.shape)
            return prefill(self.model, ids, state, mask=mask)[1]
        rows = _rows(input_ids, attention_mask)
        _check_rows(state, len(rows))
        done = 0
        if prefixes is not None:
            done, state = self._through(_store(prefixes), rows, min(len(row) for row in rows))
        rest = [row[done:] for row in rows]
        if not any(rest) and state is not None:
            return state
        cu_seqlens = torch.tensor([0, *(len(row) for row in rest)], device=self.device).cumsum(0)
        packed = torch.tensor([[token for row in rest for token in row]], device=self.device)
        return prefill(self.model, packed, state, cu_seqlens=cu_seqlens)[1]

    @torch.no_grad()
    def generate(
        self: Any, inputs: Tensor | None = None, *args: Any, state: State | None = None, prefixes: Prefixes | None = None, **kwargs: Any
    ) -> Any:
        """Generate as transformers does, with these additions.

        Args:
            inputs: prompts, which may be padded on either side; they are returned unchanged, followed by the new tokens.
            state: state before ``inputs``, which must have at least one token, with one row per prompt; from :meth:`prefill`,
                ``State.load`` or an earlier call's ``past_key_values.state`` (with transformers 5.24: ``cache.state``), which has read
                all columns of its ``sequences`` but the last one, and no padding after the end of a row. It is not changed.
            prefixes: a :class:`linattn.state.PrefixStore` or its folder: reading starts after the longest stored prefix, and the
                states of new prefixes, and of a single continuation, are stored.
        """
        if (cache := pop_cache(kwargs)) is not None:
            kwargs[CACHE] = cache
        if inputs is not None and kwargs.get("input_ids") is None:
            inputs, kwargs["input_ids"] = None, inputs
        ids = kwargs.get("input_ids")
        _check(state, prefixes, kwargs)
        order = self._pad_left(args, kwargs)
        _check_positions(kwargs)
        if state is not None:
            kwargs[CACHE] = StateCache(state, kept=False)
        store, rows = None, []
        if prefixes is not None:
            store, rows = _store(prefixes), _rows(kwargs["input_ids"], kwargs.get("attention_mask"))
            kwargs |= self._resumed(store, rows, kwargs["input_ids"])
        out = cast(Any, super()).generate(inputs, *args, **kwargs)
        sequences = out if isinstance(out, Tensor) else out.sequences
        if order is not None and ids is not None:
            sequences[:, : ids.shape[1]] = ids.repeat_interleave(len(sequences) // len(ids), 0)
        after = None if store is None else kwargs[CACHE].state
        if store is not None and ids is not None and after is not None and after.rows == len(sequences) == 1:
            whole = [*rows[0], *sequences[0, ids.shape[1] :].tolist()]
            store.put(self, whole[: int(after.position)], after)
        return out

    def prepare_inputs_for_generation(
        self: Any, input_ids: Any, *args: Any, inputs_embeds: Any = None, tokenizer: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Prepare inputs as transformers does, without the tokenizer for stop texts, which transformers passes to every step.

        Positions are dropped too: mixers compute them, and for a prompt they would only mark packed sequences.
        """
        kwargs.pop("position_ids", None)
        return cast(Any, super()).prepare_inputs_for_generation(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)

    def _prefill(self: Any, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Prefill as transformers does; a cache ahead of its columns only reads the remaining tokens.

        The mask is that of the prompts until here, because penalties read it.
        """
        cache, mask = model_kwargs.get(CACHE), model_kwargs.get("attention_mask")
        if mask is not None and isinstance(cache, StateCache) and cache.ahead and cache.state is not None:
            left = mask.sum(1) - cache.state.position
            model_kwargs["attention_mask"] = (torch.arange(mask.shape[1], 0, -1, device=mask.device) <= left[:, None]).long()
            cache.ahead = False
        out = cast(Any, super())._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        if isinstance(cache, StateCache) and (cache.kept or generation_config.return_dict_in_generate):
            cache.prompt = None if cache.state is None or cache.state.rows == 1 else (cache.state, cache.seen)
        return out

    def _sample(
        self: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, synced_gpus: bool = False,
        streamer: Any = None, **model_kwargs: Any,
    ) -> Any:  # fmt: skip
        """Sample as transformers does, by a captured step unless something must inspect single tokens."""
        cache = model_kwargs.get(CACHE)
        if captured.refusal(self, logits_processor, stopping_criteria, generation_config, synced_gpus, cache) is None:
            out = captured.sample(self, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs)
        else:
            out = cast(Any, super())._sample(
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
            )
        self._finish(cache, input_ids, out, stopping_criteria, generation_config)
        return out

    def _assisted_decoding(  # signature of transformers' method
        self: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, synced_gpus: bool = False,
        streamer: Any = None, inputs_tensor: Any = None, assistant_model: Any = None, assistant_tokenizer: Any = None,
        tokenizer: Any = None, **model_kwargs: Any,
    ) -> Any:  # fmt: skip
        """Speculative decoding by ``assistant_model``, or by prompt lookup without one; any number of prompts.

        Tokens are those of plain decoding, with a seed sampled ones too: a draft is accepted where it equals the token drawn there.

        Raises:
            ValueError: for settings that need single tokens, such as a repetition penalty; the message names them.
        """
        cache = model_kwargs.get(CACHE)
        if (why := captured.refusal(self, logits_processor, stopping_criteria, generation_config, synced_gpus, cache)) is not None:
            raise ValueError(f"assisted generation verifies several tokens at once, but {why}")
        count = generation_config.prompt_lookup_num_tokens
        if assistant_model is not None:
            check_draft(assistant_model, self, "assistant_model")
        elif count is not None:
            whole("prompt_lookup_num_tokens", count, 1)
        assistance = captured.Assistance(assistant_model, count)
        out = captured.sample(
            self, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs, assistance=assistance
        )
        self._finish(cache, input_ids, out, stopping_criteria, generation_config)
        return out

    def _validate_generation_mode(self, generation_mode: Any, *args: Any) -> None:
        """Check as transformers does, but allow assisted generation, which transformers refuses for recurrent models."""
        assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        cast(Any, super())._validate_generation_mode(GenerationMode.SAMPLE if assisted else generation_mode, *args)

    def _finish(self: Any, cache: Any, input_ids: Tensor, out: Any, stopping_criteria: Any, generation_config: Any) -> None:
        """Remove padding from the cache if the state after its prompt was kept."""
        if isinstance(cache, StateCache) and cache.prompt is not None:
            new = (out if isinstance(out, Tensor) else out.sequences)[:, input_ids.shape[1] :]
            self._without_padding(cache, *cache.prompt, new, captured.ends(new, stopping_criteria, generation_config))
            cache.prompt = None

    def _without_padding(self: Any, cache: StateCache, state: State, seen: int, new: Tensor, ends: Tensor) -> None:
        """Recompute the state of rows that ended before others, by reading the first ``ends`` [B] tokens of ``new`` [B, n] again.
        These rows have read padding since, which cannot be removed from a state.
        """
        read = new[:, : cache.seen - seen]
        mask = torch.arange(read.shape[1], device=new.device) < ends[:, None]
        if read.shape[1] and not bool(mask.all()):
            cache.state = prefill(self.model, read, state, mask=mask)[1]

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the cache is a state, not keys and values

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> bool:
        cache = model_kwargs.get(CACHE)
        if generation_config.use_cache is False:
            if cache is not None:
                raise ValueError(f"use_cache=False reads all tokens again for each new one: omit state, prefixes and {CACHE}")
            return True
        if cache is None:
            model_kwargs[CACHE] = StateCache(kept=False)
        elif isinstance(cache, StateCache) and cache.batch_size == batch_size:  # beams and samples of a prompt are adjacent rows
            copies = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
            if copies > 1:
                cache.batch_repeat_interleave(copies)
        return True

    def _pad_left(self: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
        """Move padding before the real tokens, as transformers requires; returns the source of each column, None if none has moved."""
        ids, mask, cache = (kwargs.get(name) for name in ("input_ids", "attention_mask", CACHE))
        if mask is None and ids is not None:
            mask = self._padding(ids, args, kwargs)
        if mask is None:
            return None
        order = _order(mask, 0 if cache is None else cache.get_seq_length())
        kwargs["attention_mask"] = mask if order is None else mask.gather(1, order)
        for name in ("input_ids", "inputs_embeds"):
            if order is not None and kwargs.get(name) is not None:
                kwargs[name] = _sorted(kwargs[name], order)
        return order

    def _padding(self: Any, ids: Tensor, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
        """Default mask of transformers: padding is marked by the padding token; None without padding."""
        given = kwargs.get("generation_config") or (args[0] if args else None)
        pad, eos = (_setting(name, kwargs, given, self.generation_config) for name in ("pad_token_id", "eos_token_id"))
        ends = eos if isinstance(eos, list) else [eos]
        return None if pad is None or pad in ends or not bool((ids == pad).any()) else ids.ne(pad).long()

    def _resumed(self: Any, store: PrefixStore, rows: list[list[int]], ids: Tensor) -> dict[str, Any]:
        """Make the cache after the stored prefixes of ``ids`` [B, T], from which ``generate`` continues."""
        width = ids.shape[1]
        lengths = [len(row) for row in rows]
        done, state = self._through(store, rows, min(lengths) - 1)
        seen = width - (max(lengths) - done) if done else 0  # columns that every row has read
        return keyword(StateCache(state, seen, ahead=seen > 0, kept=False))

    def _through(self: Any, store: PrefixStore, rows: list[list[int]], count: int) -> tuple[int, State | None]:
        """Read the first ``count`` tokens of each row, starting from the longest prefix in ``store``, which keeps the new prefixes."""
        return resume(self, rows, count, store)


def _check(state: State | None, prefixes: Prefixes | None, kwargs: dict[str, Any]) -> None:
    ids, embeddings = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    given = embeddings if ids is None else ids
    if (state is not None) + (prefixes is not None) + (kwargs.get(CACHE) is not None) > 1:
        raise ValueError(f"state, prefixes and {CACHE} exclude each other: give generate one of them")
    if prefixes is not None and (ids is None or embeddings is not None):
        raise ValueError("prefixes needs tokens: give generate input_ids without inputs_embeds")
    if ids is not None and (not isinstance(ids, Tensor) or ids.ndim != 2):
        raise ValueError(f"input_ids must be a tensor [B, T], but came {_came(ids)}")
    read, mask = ids if embeddings is None else embeddings, kwargs.get("attention_mask")
    cache = kwargs.get(CACHE)
    if mask is not None and read is not None:
        _check_mask(mask, read.shape[:2], past=cache is not None)
    if isinstance(cache, StateCache) and read is not None:
        _check_unread(cache.seen, "input_ids" if embeddings is None else "inputs_embeds", read, mask)
    if state is None:
        if ids is not None and embeddings is None and not ids.shape[-1]:
            raise ValueError(f"input_ids must be a prompt [B, T] of at least one token, but came with shape {list(ids.shape)}")
        return
    if given is None or not given.shape[1]:
        raise ValueError("input_ids must have at least one token after the state")
    _check_rows(state, len(given))


def _check_positions(kwargs: dict[str, Any]) -> None:
    """Raise ValueError for packed prompts. Positions of padding and of tokens in a cache do not mark packing."""
    ids, embeddings = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    tokens, positions, mask = ids if embeddings is None else embeddings, kwargs.pop("position_ids", None), kwargs.get("attention_mask")
    packed = next((name for name in ("cu_seqlens", *ENDS, "seq_idx") if kwargs.get(name) is not None), None)
    if tokens is not None and positions is not None:
        past = kwargs.get(CACHE) is not None and isinstance(positions, Tensor)
        positions = positions[..., -tokens.shape[1] :] if past else positions
        check_positions(positions, tokens, "position_ids")
        padding = None if mask is None else mask[:, mask.shape[1] - tokens.shape[1] :]
        packed = packed or (None if restarts(breaks(positions), padding) is None else "position_ids")
    if packed is not None:
        raise ValueError(f"{packed} packs sequences into one row, but generate needs one row per prompt; prefill packs a list of prompts")


def _check_mask(mask: Any, shape: torch.Size, *, past: bool) -> None:
    """Check a mask [B, T] for prompts of ``shape``; columns of tokens in a cache (``past``) may precede."""
    fits = isinstance(mask, Tensor) and mask.ndim == 2 and len(mask) == shape[0]
    if not fits or mask.shape[1] < shape[1] or (mask.shape[1] > shape[1] and not past):
        wanted = f"a tensor of the prompts' shape {list(shape)}{f', after the columns that {CACHE} has read' if past else ''}"
        raise ValueError(f"attention_mask must be {wanted}, but came {_came(mask)}")


def _check_unread(seen: int, name: str, read: Tensor, mask: Tensor | None) -> None:
    """Check that the tokens in a cache precede the new ones, in the prompts or, if those are the new tokens alone, in the mask."""
    columns = read.shape[1] if mask is None or name == "inputs_embeds" else mask.shape[1]
    if seen and (columns <= seen or read.shape[1] not in (columns, columns - seen)):
        wanted = f"the {seen} columns that {CACHE} has read and at least one more"
        raise ValueError(f"{name} must be {wanted}, but came with shape {list(read.shape)}")


def _came(value: Any) -> str:
    return f"with shape {list(value.shape)}" if isinstance(value, Tensor) else f"as {type(value).__name__}"


def _store(prefixes: Prefixes) -> PrefixStore:
    if not isinstance(prefixes, PrefixStore | str | os.PathLike):
        raise TypeError(f"prefixes must be a PrefixStore or its folder, but came {_came(prefixes)}")
    return prefixes if isinstance(prefixes, PrefixStore) else PrefixStore(prefixes)


def _check_rows(state: State | None, rows: int) -> None:
    if state is not None and not isinstance(state, State):
        raise TypeError(f"state must be a linattn.State, but came as {type(state).__name__}")
    if state is not None and state.rows != rows:
        raise ValueError(f"state must have {rows} rows, one per prompt, but came with {state.rows}")


def _rows(ids: Any, mask: Tensor | None) -> list[list[int]]:
    """List the tokens of each prompt, without padding."""
    if isinstance(ids, Tensor):
        keep = torch.ones_like(ids) if mask is None else mask
        shape = -1, ids.shape[-1]
        rows = [row[kept.bool()].tolist() for row, kept in zip(ids.reshape(shape), keep.reshape(shape), strict=True)]
    elif not hasattr(ids, "__len__"):
        raise TypeError(f"input_ids must be a prompt of tokens or a list of prompts, but came {_came(ids)}")
    else:
        rows = [ids] if len(ids) and isinstance(ids[0], Integral) else list(ids)
        rows = [row.tolist() if isinstance(row, Tensor) else list(row) for row in rows]
    if (other := next((token for row in rows for token in row if not isinstance(token, Integral)), None)) is not None:
        raise TypeError(f"input_ids must be integers, but contain {other!r}")
    if not rows or not all(rows):
        raise ValueError("every prompt must have at least one token")
    return rows


def _order(mask: Tensor, seen: int) -> Tensor | None:
    """Order [B, T] of columns that moves padding before the real tokens; None if the last column is real.

    The first ``seen`` columns, which a cache has read, keep their place.
    """
    new = mask[:, seen:].bool()
    if not bool(new.any(1).all()):
        raise ValueError("attention_mask must leave every prompt at least one real token, but a row has only padding")
    if bool(new[:, -1].all()):
        return None
    before = torch.arange(seen, device=mask.device).expand(len(mask), -1)
    return torch.cat([before, new.long().argsort(dim=1, stable=True) + seen], 1)


def _sorted(x: Tensor, order: Tensor) -> Tensor:
    """Sort the columns of x [B, T, ...] by ``order`` [B, past + T]; x may lack columns of tokens in a cache."""
    past = order.shape[1] - x.shape[1]
    index = order[:, past:] - past
    return x.gather(1, index.view(*index.shape, *[1] * (x.ndim - 2)).expand_as(x))


def _setting(name: str, kwargs: dict[str, Any], *configs: Any) -> Any:
    """Setting of ``generate``: the call's, else that of the first config that has one."""
    return next((v for v in (kwargs.get(name), *(getattr(c, name, None) for c in configs)) if v is not None), None)
