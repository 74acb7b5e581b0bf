"""RWKV-4: two decayed sums per channel, and the shift to the previous token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from linattn.hf.patch.call import Call, Family, Replacement, around, current, to_float32
from linattn.ops import diagonal_scan, running_max

FAMILIES = {"rwkv": Family("rwkv", "RwkvSelfAttention", "RwkvModel", head="RwkvForCausalLM", lost=("packing", "padding"))}
_NOTHING = -1e38  # the exponent of an empty sum; finite, so that differences are finite


def replacements(module: ModuleType, family: str, run: Callable) -> Iterator[Replacement]:
    yield module, "rwkv_linear_attention", _attention(run)
    yield module.RwkvSelfAttention, "extract_key_value", _extract_key_value
    yield module.RwkvFeedForward, "forward", _feed_forward
    yield from around(module, FAMILIES[family])


def _extract_key_value(self: Any, hidden: Tensor, state: list[Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor, list[Tensor] | None]:
    """Receptance, key and value [B, T, D] of each token and the one before."""
    shifted = _shift(hidden, state, 1, self.layer_id)
    mixes = (self.time_mix_key, self.time_mix_value, self.time_mix_receptance)
    key, value, receptance = (torch.lerp(shifted, hidden, mix) for mix in mixes)
    return torch.sigmoid(self.receptance(receptance)), self.key(key), self.value(value), state


def _feed_forward(self: Any, hidden: Tensor, state: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor] | None]:
    shifted = _shift(hidden, state, 0, self.layer_id)
    key, receptance = (torch.lerp(shifted, hidden, mix) for mix in (self.time_mix_key, self.time_mix_receptance))
    value = self.value(torch.square(torch.relu(self.key(key))))
    return torch.sigmoid(self.receptance(receptance)) * value, state


def _shift(hidden: Tensor, state: list[Tensor] | None, place: int, layer: int) -> Tensor:
    """Real token before each of ``hidden`` [B, T, D]; writes the last real one into ``state[place]`` [B, D, layers]."""
    call, tokens = current(), hidden.shape[1]
    if state is not None and _alone(call, tokens):
        before = state[place][:, None, :, layer].to(hidden.dtype, copy=True)
        state[place][:, :, layer] = hidden[:, 0]
        return before
    old = hidden.new_zeros(hidden.shape[0], hidden.shape[2]) if state is None else state[place][:, :, layer].to(hidden.dtype)
    longer = torch.cat([old[:, None], hidden], 1)  # element t is the token before token t
    if call.real is None:
        before, last = longer[:, :-1], longer[:, -1]
    else:
        place_of = torch.arange(1, tokens + 1, device=hidden.device) * call.real
        upto = place_of.cummax(1).values  # [B, T], place of the last real token up to each token; 0: the state
        at = torch.cat([torch.zeros_like(upto[:, :1]), upto], 1)[..., None].expand(-1, -1, hidden.shape[-1])
        longer = longer.gather(1, at)
        before, last = longer[:, :-1], longer[:, -1]
    if call.cu_seqlens is not None:
        begins = call.cu_seqlens[1:-1]
        before = before.index_fill(1, begins[begins < tokens], 0.0)
    if state is not None:
        state[place][:, :, layer] = last
    return before


def _alone(call: Call, tokens: int) -> bool:
    """True if each row has one token, a real one."""
    return tokens == 1 and call.real is None and call.cu_seqlens is None


def _attention(run: Callable) -> Callable:
    def attention(
        time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, state: list[Tensor] | None = None, return_state: bool = False
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Weighted mean of value [B, T, D], with weights e^key that decay by e^(-e^time_decay) per token; state: num, den, max [B, D].

        Both sums are kept relative to e^max, the largest weight so far, so no key overflows; gradients treat max as a constant,
        because the output does not depend on it.
        """
        call = current()
        if state is not None and _alone(call, key.shape[1]):
            return run(wkv_step, time_decay, time_first, key, value, state)
        k, v = call.only_real(to_float32(key), _NOTHING), call.only_real(to_float32(value))
        fade = call.only_real((-torch.exp(to_float32(time_decay))).to(k.dtype).expand(k.shape))
        num, den, top = _states(state, k, call)
        largest, last = run(running_max, fade, k, initial_state=top, return_state=True, cu_seqlens=call.cu_seqlens)
        largest, earlier = largest.detach(), _before(largest, top, call).detach()
        log = earlier + fade - largest
        log = log - log.detach().clamp(min=0)  # values above 0 are rounding errors
        weight = (k - largest).exp()
        sums, after = run(
            diagonal_scan, torch.cat([log, log], -1), torch.cat([weight * v, weight], -1),
            initial_state=torch.cat([num, den], -1), return_state=True, cu_seqlens=call.cu_seqlens,
        )  # fmt: skip
        own = to_float32(time_first) + k
        base = torch.maximum(earlier, own).detach()
        past, now = (earlier - base).exp(), (own - base).exp()
        seen_num, seen_den = _before(sums, torch.cat([num, den], -1), call).chunk(2, -1)
        output = (past * seen_num + now * v) / call.only_real(past * seen_den + now, 1.0)
        if return_state or state is not None:
            state = [call.last(t) for t in (*after.chunk(2, -1), last)]
        return output.to(key.dtype), state

    return attention


def wkv_step(
    time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, state: Sequence[Tensor], **_: Any
) -> tuple[Tensor, list[Tensor]]:
    """Weighted mean for one token after ``state``; the few operations are cheaper than a kernel's launch."""
    k, v = to_float32(key[:, 0]), to_float32(value[:, 0])
    num, den, top = (t.to(k.dtype) for t in state)
    own, faded = k + to_float32(time_first), top - torch.exp(to_float32(time_decay))
    base, largest = torch.maximum(top, own), torch.maximum(faded, k)
    past, now, kept, weight = (torch.exp(t) for t in (top - base, own - base, faded - largest, k - largest))
    output = torch.addcmul(past * num, now, v) / torch.addcmul(now, past, den)
    after = [torch.addcmul(kept * num, weight, v), torch.addcmul(weight, kept, den), largest]
    return output[:, None].to(key.dtype), after


def _states(state: Sequence[Tensor] | None, k: Tensor, call: Call) -> tuple[Tensor, ...]:
    """num, den and max [rows, D]."""
    rows = k.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    fresh = [k.new_full((rows, k.shape[-1]), fill) for fill in (0.0, 0.0, _NOTHING)]
    if state is None:
        return tuple(fresh)
    return tuple(torch.cat([t.to(k.dtype), empty[t.shape[0] :]]) for t, empty in zip(state, fresh, strict=True))


def _before(h: Tensor, initial: Tensor, call: Call) -> Tensor:
    """Shift ``h`` [B, T, D] by one token, ``initial`` [rows, D] in front."""
    later = torch.cat([initial[: h.shape[0], None], h], 1)[:, :-1]
    if call.cu_seqlens is None:
        return later
    begins = call.cu_seqlens[1:-1]
    inside = begins < h.shape[1]
    return later.index_copy(1, begins[inside], initial[1:][inside][None])
