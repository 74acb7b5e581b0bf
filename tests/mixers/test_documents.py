"""Systems named by the documents, and their lists and kinds in `linattn list`."""

from dataclasses import replace

import pytest

from linattn import mixers
from linattn.mixers.documents import DOCUMENTS, named
from linattn.mixers.taxonomy import FAMILIES, families

# Systems named by each document: registered names, or a part of the title without a mixer.
INVENTORY = {
    "000": """
        softmax | key-value cache | linear_transformer | linear | similarity in place of softmax | the state KᵀV | rnn | lstm |
        gru | retnet | gla | s4 | s4d | hippo | without time variance | s6 | parallel scan | mamba | mamba2 | state space
        duality | multi-head state spaces | rwkv4 | rwkv5 | rwkv6 | rwkv7 | rwkv_channel | minds memory | efficient_attention |
        taylor | speculative decoding | minference | powerinfer | disaggregated | prompt compression | long contexts |
        compression of the key-value cache | heterogeneous | quantisation | llama.cpp
    """,
    "001": """
        bahdanau | original transformer | kam-bert | sr-mag | dictionary mask | masked image generation | ca-stream | van |
        linear_transformer | efficient_attention | taylor | cosformer | focused | agent | mobile | efficientvit | modular
        linearized attention | slab | linrec | based | retnet | gla | mamba | mamba2 | state space duality | hippo | rwkv4 |
        rwkv_channel | blockwise | local | local_2d | sparse_transformer | longformer | memory_compressed | axial | clustered |
        improved_clustered | cluster_former | reformer | routing | sinkhorn | set_transformer | etc | linformer | performer |
        rfa | gated_rfa | transformer_xl | perceiver | funnel | swin | charformer | nystromformer | switch | st_moe | gshard |
        product_key_memory | topk | gaussian | linear | polynomial | relu_attention | conformer | rnn | lstm | softmax
    """,
    "002": """
        tokenization | embedding | original transformer | softmax | hard attention | feed-forward | mixture of experts |
        classifier | stop token | key-value cache | linear
    """,
    "003": """
        softmax | minds memory | similarity in place of softmax | linear_transformer | linear | the state KᵀV | gated linear
        unit | retnet | mamba | mamba2 | gla | parallel scan | lstm | rwkv4
    """,
    "004": """
        softmax | hard attention | linear_transformer | similarity in place of softmax | table of gates | gla | retnet |
        gated_retnet | gated_rfa | mlstm | dfw | gateloop | hgrn2 | rwkv6 | mamba | mamba2 | without time variance | h3 | s6 |
        parallel scan | hybrids
    """,
}


def listed(document: str, what: str) -> list[str]:
    """Titles of the systems in ``document`` of the kind ``what``."""
    return [s.title for s in named() if document in s.documents and (s.name == what or what.lower() in s.title.lower())]


def test_every_system_of_every_document_is_listed():
    missing = [
        (document, what)
        for document, names in INVENTORY.items()
        for what in " ".join(names.split()).split(" | ")
        if not listed(document, what)
    ]
    assert missing == []


def test_registered_names_and_their_documents():
    systems = named()
    ours = {s.name: s for s in systems if s.name}
    assert list(ours) == [name for name in mixers.available() if mixers.info(name).seeds]
    for name, system in ours.items():
        assert (system.title, system.documents) == (mixers.info(name).title, mixers.info(name).seeds)
    assert all(set(s.documents) <= set(DOCUMENTS) and s.documents and s.where for s in systems)
    assert len({s.title for s in systems}) == len(systems), "nothing is listed twice"


@pytest.mark.parametrize("name", mixers.available())
def test_every_mixer_has_a_kind(name):
    kinds = families(mixers.info(name))
    assert set(kinds) <= set(FAMILIES) and kinds != ("others",)


def test_kinds():
    assert families(mixers.info("performer")) == ("kernels", "low rank")
    assert families(mixers.info("longformer")) == ("fixed patterns", "combined patterns", "neural memory")
    assert families(mixers.info("gla")) == ("linear attention with decay",)
    assert families(replace(mixers.info("gla"), cls=type("Mine", (), {"__module__": "elsewhere.mine"}))) == ("others",)
