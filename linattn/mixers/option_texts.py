"""Texts of the constructors' options, for ``linattn show`` and the documentation.

:data:`TEXTS` has options with the same meaning in several mixers, :data:`ALONE` those of one; options in a class's Args need neither.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

from linattn.mixers.registry import Info

TEXTS = {
    "heads": "number of heads",
    "head_dim": "channels of a head",
    "head_size": "channels of a head; None: 64, or 32 where 64 does not divide dim",
    "key_ratio": "channels of all keys together, as a share of dim",
    "value_ratio": "channels of all values together, as a share of dim",
    "key_size": "channels of a key; None: dim / heads",
    "value_size": "channels of a value; None: those of a key",
    "value_heads": "heads of the values, a multiple of heads; None: 2 * heads",
    "kv_heads": "heads of keys and values, shared by equal groups of the queries' heads; None: as many as heads",
    "size": "channels of a head's keys and values; None: dim / heads",
    "feature_dim": "channels of a head's queries and keys before the feature map",
    "random_features": "number of random features of a head; None: d ln d for d channels",
    "state_size": "size N of the state of a channel or, in Mamba-2 and later, channels of a key",
    "groups": "heads of B and C (keys and queries), each shared by as many heads of x",
    "expand": "inner channels, as a multiple of dim",
    "width": "inner channels; None: dim",
    "hidden": "inner channels; None: the mixer's own multiple of dim",
    "widening": "inner channels of the feed-forwards, as a multiple of dim",
    "rank": "rank of the low-rank map that makes the decays",
    "mix_rank": "rank of the map that mixes in the token before",
    "decay_rank": "rank of the map that makes the decays",
    "tau": "the decay is a sigmoid to the power 1 / tau: larger values forget more slowly",
    "squash": "the preconditioner lies between 1 / squash and squash; from 1 to 2",
    "levels": "buckets of the past, of 1, 1, 2, 4, ... tokens; enough for 2^(levels - 1) tokens",
    "substeps": "keys and values that a token writes one after the other",
    "negative_eigenvalues": "let β reach 2 instead of 1, so that a token can reverse what its key holds",
    "conv_width": "tokens of the short convolution",
    "kernel_size": "side of the convolution of the values, in tokens",
    "causal": "False: every token reads the whole sequence",
    "rotary": "turn queries and keys by their positions",
    "base": "base of the rotary frequencies",
    "bias": "biases in the linear maps",
    "norm": "layer norms inside the block",
    "qk_norm": "normalise queries and keys",
    "eps": "epsilon of the norm",
    "layer": "place of the layer in its stack, from 0",
    "layers": "number of layers of the stack",
    "dt_min": "smallest time step at the start of the training",
    "dt_max": "largest time step at the start of the training",
    "r_min": "smallest |λ| at the start of the training",
    "r_max": "largest |λ| at the start of the training",
    "max_phase": "largest phase of λ at the start of the training, in radians",
    "slots": "number of slots of the memory",
    "segment": "tokens of a segment",
    "memory": "tokens before the segment that it still reads",
    "compressed": "slots of compressed memory",
    "block": "tokens of a block",
    "batch": "tokens of a mini-batch",
    "persistent": "learned tokens that every query reads",
    "depth": "layers of the memory's network",
    "rate": "learning rate of the memory",
    "clusters": "number of clusters of the queries",
    "iterations": "iterations of the clustering",
    "bits": "signs that a query is hashed to",
    "cross_heads": "heads that read the input",
    "grid": "height and width of the tables of position biases, in tokens",
    "sigma": "width of the kernel",
    "constant": "c, added to the product of query and key; at least 0",
    "count": "number of experts",
    "scores": "'softmax' or 'sigmoid': how the router scores experts",
    "redraw_every": "training steps between two draws of the random features; None: never drawn again",
    "group": "channels that the maps to queries, keys and values take together",
}


ALONE = {
    "axial": {"causal": "True: only tokens before, in the order of rows (the paper's decoder)"},
    "blockwise": {
        "block": "tokens of a block",
        "shifts": "for each of as many equal groups of heads, how many blocks further on it reads; 0: its own",
    },
    "charformer": {
        "block": "largest block, in characters",
        "downsample": "characters that become one token",
        "kernel_size": "characters of the convolution before; 0: none",
        "calibrated": "calibrate the blocks' weights by all positions; the cost then grows with n²",
    },
    "cluster_former": {"clusters": "number of clusters", "chunk": "most tokens that attend to each other within a cluster"},
    "clustered": {
        "clusters": "number of clusters of the queries",
        "iterations": "iterations of the clustering",
        "bits": "signs that a query is hashed to",
    },
    "comba": {"correction": "how much of the key is taken from the query at the start of the training"},
    "compressive_transformer": {"rate": "tokens that become one slot"},
    "cosformer": {"length": "longest sequence"},
    "cross_cosformer": {"ratio": "estimated length of the target, as a multiple of the context's"},
    "deltaproduct": {"negative_eigenvalues": "let β reach 2 instead of 1"},
    "etc": {
        "global_tokens": "tokens at the start that are the global input",
        "radius": "tokens to each side that a token of the long input reads",
        "distance": "largest distance that has a position label of its own",
        "segment": "tokens of the long input that belong to one global token; None: none do",
        "hard": "a global token reads its own segment of the long input alone",
    },
    "experts": {
        "hidden": "inner channels of each expert; None: 8/3 of dim, rounded up to a multiple of 32",
        "active": "experts of a token",
        "renormalize": "the weights of a token add up to 1",
        "scale": "factor of the experts' weights",
        "shared": "inner channels of an expert that every token uses; 0: none",
        "shared_gate": "weigh the shared expert by a sigmoid of the token",
    },
    "fox": {"pro": "the paper's larger block: shifted keys and values, norms and an output gate"},
    "funnel": {
        "separate_cls": "the first token is not pooled",
        "spacing": "distance between neighbouring tokens of the input, in tokens of the first layer",
    },
    "gated_deltanet2": {"negative_eigenvalues": "let the gate that erases reach 2 instead of 1"},
    "gated_deltaproduct": {"negative_eigenvalues": "let β reach 2 instead of 1"},
    "gated_rfa": {
        "random_features": "number of random directions of a head",
        "tau": "random directions are divided by it",
        "floor": "least value of the denominator",
    },
    "gaussian": {"eps": "added to each random feature"},
    "geglu": {"hidden": "inner channels; None: 3 times dim"},
    "gsa": {"slots": "slots of a head's memory"},
    "h3": {"head_dim": "channels of a head", "state_size": "keys that the shift system holds"},
    "hgrn": {
        "lower_bound": "smallest decay factor; a model gives later layers larger ones",
        "complex_valued": "a complex state, as in the paper; False: a real one, as in fla",
    },
    "hgrn2": {
        "lower_bound": "smallest decay factor; a model gives later layers larger ones",
        "head_dim": "channels of a head; None: 128 where it divides dim",
    },
    "improved_clustered": {"top": "keys of highest score that a query attends to itself"},
    "kda": {"gate_bias": "a bias in the second map of the output gate, as in fla"},
    "lightnet": {"head_dim": "channels of a head; None: 128 where it divides dim", "rank": "rank of the map that makes the output gate"},
    "lightning": {"head_dim": "channels of a head; None: dim / heads"},
    "linformer": {
        "slots": "tokens that keys and values are projected to",
        "length": "longest sequence",
        "shared": "one projection for keys and values",
    },
    "linrec": {"key_norm": "'row': keys are normalised over channels; 'column': over tokens"},
    "local": {"block": "tokens of a block", "memory": "tokens before the block that it reads too"},
    "local_2d": {
        "causal": "True: only tokens before, in the order of rows (the paper's decoder)",
        "rows": "rows of a block",
        "columns": "columns of a block",
        "memory": "rows and columns around the block that it reads too",
    },
    "longformer": {
        "window": "tokens to each side that a token reads",
        "dilations": "for each of as many equal groups of heads, the distance between the tokens that it reads",
        "global_tokens": "tokens at the start that read all and are read by all; None: 1 without causality, else 0",
    },
    "lru": {"state_size": "complex numbers of state; None: dim"},
    "mamba": {
        "rank": "rank of the map that makes the time step; None: dim / 16, rounded up",
        "norms": "RMS norms on B, C and the low-rank time step, as in Falcon Mamba",
    },
    "mamba2": {
        "pattern": "which tensors have heads of their own: 'mva' or 'mvs' x, 'mqa' C, 'mka' B, 'mha' all",
        "step_limits": "lowest and highest time step; None: no limits",
    },
    "mamba3_mimo": {"rank": "keys and values that a token writes, and queries that it reads with"},
    "memory_compressed": {"rate": "tokens that become one slot"},
    "mesanet": {"steps": "steps of conjugate gradients", "ridge": "least value of the ridge, which is learned"},
    "mla": {
        "rank": "channels of the latent that is kept of a token; None: dim / 2",
        "head_dim": "channels of a head's query and key that come from the latent; None: dim / heads",
        "shared": "channels of key that all heads have in common; None: half of head_dim",
        "value_dim": "channels of a head's value; None: dim / heads",
    },
    "mlp": {"hidden": "inner channels; None: 4 times dim", "activation": "'gelu' or 'relu'"},
    "mlstm": {"eps": "added to the denominator", "soft_cap": "gates' inputs are limited to this size by a tanh"},
    "mlstm_block": {"eps": "added to the denominator", "factor": "inner channels, as a multiple of dim"},
    "nystromformer": {
        "landmarks": "number of landmarks",
        "iterations": "iterations of the pseudo-inverse",
        "kernel_size": "tokens of the convolution of the values that is added; 0: none",
    },
    "path": {"rank": "rank of the map that makes the reflections", "forget": "add forget gates, as in PaTH-FoX"},
    "perceiver": {
        "latents": "number of latents",
        "layers": "layers of self-attention among the latents, in each block",
        "blocks": "number of blocks, each of which reads the input",
        "cross_heads": "heads that read the input",
    },
    "perceiver_io": {
        "latents": "number of latents",
        "layers": "layers of self-attention among the latents",
        "blocks": "how often these layers are applied",
        "residual": "add the tokens to what the last attention gives",
    },
    "performer": {"eps": "added to each random feature; None: 1e-4 for softmax, 1e-3 for relu", "kernel": "'softmax' (FAVOR+) or 'relu'"},
    "pma": {"seeds": "number of learned queries, and of the tokens that come out"},
    "polynomial": {"feature_dim": "channels of a head's queries and keys"},
    "raven": {"slots": "slots of each head"},
    "reformer": {"chunk": "tokens of a chunk of the sorted sequence", "buckets": "buckets of a hash", "rounds": "number of hashes"},
    "retnet": {
        "affine": "weights in the norm",
        "interleaved": "rotary positions of neighbouring channels; False: of channels i and i + K / 2, as in Llama",
    },
    "rfa": {
        "random_features": "number of random directions of a head",
        "tau": "random directions are divided by it",
        "floor": "least value of the denominator",
    },
    "rodimus": {
        "expand": "channels of the values, as a multiple of dim",
        "state_size": "channels of a key",
        "rank": "rank of the map that makes the input gate; None: dim / 64, at least 16",
    },
    "routing": {"clusters": "number of clusters of a head", "least": "fewest tokens of a cluster"},
    "rwkv7": {
        "rank": "rank of the low-rank maps, or a dict of those called w, a, g and v",
        "value_residual": "mix in the values of the stack's first layer; a model sets it",
    },
    "rwkv_channel": {"gated": "a gate (the receptance) on the output; False: none, as in RWKV-7"},
    "s4d": {"init": "eigenvalues at the start of the training: 'lin' or 'inv'"},
    "s5": {"state_size": "real numbers of state for all channels", "blocks": "blocks of the state"},
    "set_transformer": {
        "inducing": "number of inducing points; None: every element attends to all",
        "norm": "layer norms inside the block",
    },
    "sinkhorn": {
        "block": "tokens of a block",
        "iterations": "iterations of Sinkhorn's normalisation",
        "temperature": "temperature of the sorting",
        "sortcut": "sorted blocks at the start that every query reads instead of its own; 0: off",
        "noise": "add Gumbel noise to the sorting while training",
    },
    "softmax": {
        "window": "last tokens that a token reads, itself included; None: all",
        "head_dim": "channels of a head; None: dim / heads",
        "rotated": "channels of a head that are turned by positions; 0: none; None: all",
        "norm_eps": "epsilon of norms on queries and keys; None: no norms",
        "gated": "a sigmoid gate on the output",
        "bias": "biases in the maps to queries, keys and values",
        "out_bias": "a bias in the output map",
        "norm": "kind of the norms on queries and keys",
        "scale": "factor of the scores; None: K ** -0.5",
        "scaling": "scaling of the rotary frequencies, as in transformers' rope_scaling; None: none",
        "conv_width": "tokens of a short convolution on queries, keys and values; None: none",
    },
    "sparse_transformer": {
        "kind": "'strided': the last tokens and every stride-th; 'fixed': the block and the ends of all blocks",
        "stride": "tokens of a block, or between two that are read",
        "summary": "last tokens of every block that all read, with kind='fixed'",
        "merged": "every head reads both patterns; False: half of the heads each",
    },
    "swiglu": {"hidden": "inner channels; None: 8/3 of dim, rounded up to a multiple of 32"},
    "swin": {"window": "side of a window, in tokens", "shifted": "windows begin half a window further on"},
    "titans": {
        "depth": "layers of the memory's network",
        "block": "tokens of a block, within which gradients are taken at one memory",
        "rate": "learning rate of the memory",
    },
    "titans_mac": {"segment": "tokens of a segment"},
    "titans_mag": {"window": "last tokens that a token reads"},
    "titans_mal": {"window": "last tokens that a token reads"},
    "transformer_xl": {"segment": "tokens of a segment", "memory": "tokens before the segment that it still reads"},
}  # mixer: option: text


@dataclass(frozen=True)
class Option:
    """An option of a mixer's constructor: its name, type and default as in Python, and its text."""

    name: str
    type: str
    default: str
    text: str


def options(info: Info) -> list[Option]:
    """Options of a mixer's constructor besides ``dim``, in order; the text is "" if there is none."""
    found = []
    for p in inspect.signature(info.cls).parameters.values():
        if p.name != "dim" and p.kind is not p.VAR_KEYWORD:
            kind = p.annotation if isinstance(p.annotation, str) else inspect.formatannotation(p.annotation)
            found.append(Option(p.name, kind, repr(p.default), text(info, p.name)))
    return found


def text(info: Info, name: str) -> str:
    """Text of one option: of this mixer alone, from its docstring's Args, or the one shared by several mixers."""
    if (alone := ALONE.get(info.name, {}).get(name)) is not None:
        return alone
    argument = re.search(rf"^    {name}: (.+(?:\n {{8,}}.+)*)", inspect.getdoc(info.cls) or "", re.M)
    return " ".join(argument[1].split()).rstrip(".") if argument else TEXTS.get(name, "")
