"""Where a mixer stands: the kinds of the survey of efficient Transformers (arXiv 2009.06732), and those of what came after it."""

from __future__ import annotations

from linattn.mixers.registry import Info

# Every kind with its names; some belong to several, as in the survey's figure 2, and are listed under the first. Names may stand here
# before they are registered. One that is nowhere here has the kind of the folder that its code lies in, see _HOMES.
FAMILIES: dict[str, tuple[str, ...]] = {
    "softmax attention": ("cross_softmax", "topk"),
    "fixed patterns": (
        "blockwise", "etc", "local", "local_2d", "longformer", "memory_compressed", "sparse_transformer", "swin",
    ),
    "combined patterns": ("axial", "etc", "longformer", "sparse_transformer"),
    "learnable patterns": ("cluster_former", "clustered", "improved_clustered", "reformer", "routing", "sinkhorn"),
    "neural memory": ("etc", "longformer", "memory_compressed", "perceiver", "perceiver_io", "pma", "set_transformer"),
    "kernels": ("linear_transformer", "performer"),
    "low rank": ("linear_transformer", "linformer", "nystromformer", "performer"),
    "recurrence": ("compressive_transformer", "transformer_xl"),
    "down-sampling": (
        "agent", "ca_stream", "charformer", "funnel", "memory_compressed", "nystromformer", "perceiver", "perceiver_io", "swin",
    ),
    "sparse": ("experts", "gshard", "product_key_memory", "st_moe", "switch", "topk"),
    "linear attention of images": (),
    "linear attention with decay": (),
    "delta rule and learning in the state": (),
    "state spaces": ("mamba2", "mamba3", "mamba3_mimo"),
    "RWKV": (),
    "recurrent networks": ("hgrn",),
    "convolutions": ("base_conv", "conformer", "mbconv", "van"),
    "feed-forwards": (),
    "others": (),
}  # fmt: skip

_HOMES = {
    "linattn.mixers.attention": "softmax attention",
    "linattn.mixers.cross": "kernels",
    "linattn.mixers.kernel": "kernels",
    "linattn.mixers.pattern": "fixed patterns",
    "linattn.mixers.memory": "neural memory",
    "linattn.mixers.vision": "linear attention of images",
    "linattn.mixers.decay": "linear attention with decay",
    "linattn.mixers.delta": "delta rule and learning in the state",
    "linattn.mixers.ssm": "state spaces",
    "linattn.mixers.rwkv": "RWKV",
    "linattn.mixers.recurrent": "recurrent networks",
    "linattn.ffn": "feed-forwards",
}


def families(info: Info) -> tuple[str, ...]:
    """The kinds that a mixer belongs to, in the order of :data:`FAMILIES`; it is listed under the first."""
    named = tuple(family for family, names in FAMILIES.items() if info.name in names)
    return named or (_HOMES.get(info.cls.__module__.rpartition(".")[0], "others"),)
