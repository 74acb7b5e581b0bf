"""Systems named in five introductions to linear attention, and their places in this library."""

from __future__ import annotations

from dataclasses import dataclass

from linattn.mixers.registry import available, info

# Introductions, all in Chinese, by the keys that `Info.seeds` holds: author and title where they are published.
DOCUMENTS = {
    "000": "刀刀宁，简单图解一下线性注意力机制 (2024)",
    "001": "a review of linear attention and of efficient Transformers (2025, unpublished)",
    "002": "Yuanhao，每周AI观察：线性注意力 (2025)",
    "003": "notes on the paper of gated linear attention (unpublished)",
    "004": "an article on linear-time alternatives to softmax, avoid.overfit.cn/post/458a98aca6744a55af59ff65db2085e0",
}

# Systems that are not registered mixers: title, documents, and implementation.
_ELSEWHERE = (
    ("Key-value cache", "000 002", "linattn.State, of softmax"),
    ("Any similarity in place of softmax", "000 003 004", "linattn.ops.features"),
    ("The state KᵀV: one recurrence for all", "000 003", "linattn.linear_attention"),
    ("Exact attention that minds memory (FlashAttention)", "000 003", "torch's scaled_dot_product_attention, in softmax"),
    ("State spaces without time variance, and as a convolution", "000 004", "linattn.ops.lti and linattn.ops.long_conv"),
    ("HiPPO", "000 001 004", "linattn.ops.hippo, in s4"),
    ("S6, the selective state space", "000 004", "linattn.ops.selective_scan, in mamba"),
    ("Parallel scan", "000 003 004", "linattn.diagonal_scan"),
    ("State space duality and structured masked attention", "000 001", "linattn.mixing_matrix of mamba2"),
    ("Multi-head state spaces", "000", "the heads of mamba2"),
    ("Gated linear unit", "003", "the feed-forward swiglu"),
    ("The table of gates G_t", "004", "the decays of linattn.linear_attention"),
    ("Hybrids of Mamba-2 and attention", "004", 'linattn.LMConfig(mixer="mamba2*7, softmax")'),
    ("Modular linearized attention", "001", "linattn.models.Seq2SeqConfig: encoder, decoder and cross"),
    ("The original Transformer's block", "001 002", 'linattn.LMConfig.preset("transformer")'),
    ("Dictionary masks", "001", "linattn.ops.definitions"),
    ("Masked image generation (MaskGIT)", "001", "linattn.generate.masked"),
    ("KAM-BERT", "001", "not built; the documentation says why"),
    ("SR-MAG", "001", "not built; the documentation says why"),
    ("Tokenization", "002", "linattn.data.TokenizerCodec"),
    ("Embedding", "002", "linattn.models.Backbone, its embedding"),
    ("Feed-forward", "002", "linattn.ffn"),
    ("Classifier and sampling", "002", "linattn.generate.sample"),
    ("Generation until the stop token", "002", "linattn.generate.stream, linattn walkthrough"),
)

# What an introduction names in a list of links, as neighbours of its subject.
_NEIGHBOURS = (
    "Speculative decoding", "Serving of long contexts", "Disaggregated inference", "Compression of the key-value cache",
    "Heterogeneous key-value caches", "Prompt compression", "MInference", "PowerInfer-2",
    "Quantisation of caches and of diffusion models", "llama.cpp",
)  # fmt: skip


@dataclass(frozen=True)
class Named:
    """System, and the :data:`DOCUMENTS` that name it.

    ``name`` is its name for ``linattn.mixers.create``, None if it is not a mixer; ``where`` is its implementation.
    """

    name: str | None
    title: str
    documents: tuple[str, ...]
    where: str


def named() -> list[Named]:
    """List every system that an introduction names: registered mixers by name, then the others."""
    known = [info(name) for name in available()]
    ours = [Named(i.name, i.title, i.seeds, f'linattn.mixers.create("{i.name}", dim=...)') for i in known if i.seeds]
    elsewhere = [Named(None, title, tuple(documents.split()), where) for title, documents, where in _ELSEWHERE]
    neighbours = [Named(None, title, ("000",), "only linked to, as a neighbouring subject") for title in _NEIGHBOURS]
    return [*ours, *elsewhere, *neighbours]
