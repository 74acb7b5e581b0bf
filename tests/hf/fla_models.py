"""Run flash-linear-attention's own models on a CPU, in a separate process: ``python -m tests.hf.fla_models OUT [BACK]``.

Their classes and layers are unchanged. GPU-only functions are replaced by the package's torch references, or by formulas. Each model's
``save_pretrained`` folder, and tokens with their logits, are written to OUT. With BACK the models are read from its folders instead,
and the logits of the same tokens are written there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.oracles import wheels

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 60}
MODELS = {
    "gla": {"num_heads": 2, "expand_v": 1.5},
    "retnet": {"num_heads": 4, "tie_word_embeddings": True},
    "delta_net": {"num_heads": 2, "allow_neg_eigval": True, "hidden_ratio": 2},
    "gated_deltanet": {"num_heads": 2, "num_v_heads": 4, "head_dim": 16, "allow_neg_eigval": True},
    "kda": {"num_heads": 3, "head_dim": 16, "intermediate_size": 48, "allow_neg_eigval": True},
    "hgrn2": {"expand_ratio": 16},
    "rwkv6": {"num_heads": 2, "expand_k": 1.0, "proj_low_rank_dim": 8, "gate_low_rank_dim": 12},
    "rwkv7": {"head_dim": 32, "decay_low_rank_dim": 8, "gate_low_rank_dim": 12, "a_low_rank_dim": 16, "v_low_rank_dim": 20},
}

DEFAULT = {name: {"num_hidden_layers": 2} for name in MODELS}  # minimal changes of their default configs
DEFAULT["rwkv6"] = {"num_hidden_layers": 2, "expand_k": 1.0, "num_heads": 32}  # their defaults are not RWKV-6's


def main(out: Path, back: Path | None = None) -> None:
    sys.path.insert(0, str(wheels.path("fla-core==0.6.0")))
    import fla

    fla.__path__.append(str(wheels.path("flash-linear-attention==0.6.0") / "fla"))
    import fla.models as models

    portable()
    for name, options in MODELS.items():
        config = next(c for c in vars(models).values() if getattr(c, "model_type", None) == name and isinstance(c, type))
        of = getattr(models, config.__name__.replace("Config", "ForCausalLM"))
        if back is None:
            torch.manual_seed(0)  # one random model in ten cannot be run to 1e-5 in float32, in either library
            leave(out, name, of(config(**SMALL, **options)).eval())
            with torch.device("meta"):
                shapes = {key: list(t.shape) for key, t in of(config(**DEFAULT[name])).state_dict().items()}
            (out / f"{name}.json").write_text(json.dumps(shapes))
        else:
            ids = load_file(out / f"{name}.safetensors")["ids"]
            with torch.no_grad():
                logits = of.from_pretrained(back / name).eval()(ids, use_cache=False).logits
            save_file({"logits": logits}, back / f"{name}.safetensors")


def leave(out: Path, name: str, model: torch.nn.Module) -> None:
    """Write weights away from ones and zeros, tokens, their logits and continuations."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        ids = torch.randint(3, 60, (2, 40))
        logits, longer = model(ids, use_cache=False).logits, ids[:1]
        for _ in range(8):
            longer = torch.cat([longer, model(longer, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    model.save_pretrained(out / name)
    save_file({"ids": ids, "logits": logits, "greedy": longer}, out / f"{name}.safetensors")


def portable() -> None:
    """Replace what needs a GPU."""
    from importlib import import_module as module

    norms, gated = module("fla.modules.norm.layernorm"), module("fla.modules.norm.fused_norm_gate")
    convolution, rotary = module("fla.modules.causal_conv1d.ops"), module("fla.modules.rotary.ops")
    activations, shift = module("fla.modules.activations.ops"), module("fla.modules.token_shift")

    def normed(reference):
        return lambda self, x, residual=None, prenorm=False, residual_in_fp32=False: reference(
            x, self.weight, self.bias, residual, self.eps, prenorm
        )

    norms.LayerNorm.forward, norms.RMSNorm.forward = normed(norms.layer_norm_ref), normed(norms.rms_norm_ref)
    norms.GroupNorm.forward = lambda self, x: norms.group_norm_ref(x, self.weight, self.bias, self.num_groups, eps=self.eps)
    acts = {"sigmoid": torch.sigmoid, "swish": F.silu, "silu": F.silu}
    gated.FusedRMSNormGated.forward = lambda self, x, g: norms.rms_norm_ref(x, self.weight, None, eps=self.eps) * acts[self.activation](g)
    module("fla.modules.mlp").SwiGLULinear.forward = lambda self, x, y, weight, bias: F.linear(F.silu(x) * y, weight, bias)
    activations.ACT2FN.update(swish=F.silu, silu=F.silu, sqrelu=lambda x: x.relu().square())

    def convolved(x, weight, bias=None, activation=None, **_):
        y = F.conv1d(F.pad(x.mT, (weight.shape[1] - 1, 0)), weight[:, None], bias, groups=weight.shape[0]).mT
        return (F.silu(y) if activation else y), None

    convolution.ShortConvolution.forward = lambda self, x, **_: convolved(x, self.weight[:, 0], self.bias, self.activation)

    def rotated(self, q, k, **_):
        angles = torch.arange(q.shape[1])[:, None] * self._compute_inv_freq()
        return [rotary.rotary_embedding_ref(t, angles.cos(), angles.sin(), self.interleaved) for t in (q, k)]

    rotary.RotaryEmbedding.forward = rotated

    layers = {name: module(f"fla.layers.{name}") for name in ("gla", "hgrn2", "delta_net", "gated_deltanet", "kda", "rwkv6", "rwkv7")}
    retention = module("fla.layers.multiscale_retention")
    naive_gla = module("fla.ops.gla.naive").naive_recurrent_gla
    for layer in (layers["gla"], layers["hgrn2"]):
        layer.fused_recurrent_gla = lambda q, k, v, gk, **_: naive_gla(q, k, v, gk)
    layers["hgrn2"].swish = F.silu
    layers["hgrn2"].rms_norm_linear = lambda x, w, b, weight, bias: F.linear(norms.rms_norm_ref(x, w, b), weight, bias)
    naive_retention = module("fla.ops.retention.naive").naive_retention
    retention.fused_recurrent_retention = lambda q, k, v, **_: (heads_first(naive_retention, q, k, v), None)

    def unit(x):  # the package's formula; its own is a kernel
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

    delta = module("fla.ops.delta_rule.naive").delta_rule_recurrence
    layers["delta_net"].fused_recurrent_delta_rule = lambda q, k, v, beta, **_: (
        heads_first(lambda *t: delta(*t)[0], unit(q), unit(k), v, beta[..., None]),
        None,
    )
    naive_gated = module("fla.ops.gated_delta_rule.naive").naive_recurrent_gated_delta_rule

    def gated_rule(q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval, **_):
        q, k = (unit(t).repeat_interleave(v.shape[2] // q.shape[2], 2) for t in (q, k))
        return naive_gated(q, k, v, (1 + allow_neg_eigval) * beta.sigmoid(), -A_log.exp() * F.softplus(g + dt_bias))

    layers["gated_deltanet"].fused_recurrent_gated_delta_rule = gated_rule
    layers["gated_deltanet"].causal_conv1d = convolved
    naive_kda, gate = module("fla.ops.kda.naive").naive_recurrent_kda, module("fla.ops.kda.gate").naive_kda_gate
    layers["kda"].fused_recurrent_kda = lambda q, k, v, g, beta, A_log, dt_bias, allow_neg_eigval, **_: naive_kda(
        unit(q), unit(k), v, gate(g, A_log, dt_bias), (1 + allow_neg_eigval) * beta.sigmoid()
    )
    naive6 = module("fla.ops.rwkv6.recurrent_naive").naive_recurrent_rwkv6
    layers["rwkv6"].fused_recurrent_rwkv6 = lambda r, k, v, w, u, scale, **_: (
        heads_first(lambda *t: naive6(*t, u, scale)[0], r, k, v, w),
        None,
    )
    seven, dplr = layers["rwkv7"], module("fla.ops.generalized_delta_rule.dplr.naive").dplr_recurrence
    seven.fused_mul_recurrent_rwkv7 = lambda r, w, k, v, kk, a, **_: (
        heads_first(lambda *t: dplr(*t)[0], r * r.shape[-1] ** 0.5, k, v, -kk, kk * a, w),
        None,
    )
    seven.l2_norm = unit
    seven.fused_addcmul_rwkv7 = module("fla.ops.rwkv7.fused_addcmul").torch_addcmul_rwkv7
    seven.fused_k_rwkv7 = module("fla.ops.rwkv7.fused_k_update").k_update_ref
    seven.gate_output_correction = module("fla.ops.rwkv7.gate_output_correction").gate_output_correction_ref

    def shifted(x, cu_seqlens=None, output_cache=False, cache=None):
        delta = shift.token_shift_ref(x)
        return (delta, None) if output_cache else delta

    for users in (layers["rwkv6"], seven, module("fla.models.rwkv6.modeling_rwkv6"), module("fla.models.rwkv7.modeling_rwkv7")):
        users.token_shift = shifted


def heads_first(function, *tensors):
    """``function`` of [B, H, T, ...] for [B, T, H, ...], and back."""
    return function(*(t.transpose(1, 2) for t in tensors)).transpose(1, 2)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
