"""Descriptions of families for the site: a name and a sentence for each of :data:`linattn.mixers.taxonomy.FAMILIES`."""

from __future__ import annotations

from typing import NamedTuple

from linattn.atlas.text import Both


class Family(NamedTuple):
    """Family of systems: its name, and a sentence about what its members have in common."""

    name: Both
    about: Both

    @property
    def key(self) -> str:
        """Name as part of a URL."""
        return self.name.en.lower().replace(" ", "-").replace(",", "")


def _family(en: str, zh: str, about: str, chinese: str) -> Family:
    return Family(Both(en, zh), Both(about, chinese))


FAMILY = {
    "softmax attention": _family(
        "Softmax and its caches", "softmax 及其缓存",
        "Each query is compared with every token that it may see, and a softmax, or its hard limit, divides its weight among them.",
        "每个查询与它看得到的每个 token 比较，由 softmax（或其硬极限）分配权重。",
    ),
    "fixed patterns": _family(
        "Fixed patterns", "固定模式", "A softmax over tokens that position alone selects: a window, a stride, a block.",
        "只对位置选定的 token 做 softmax：窗口、步长或分块。",
    ),
    "combined patterns": _family(
        "Combined patterns", "组合模式", "Several fixed patterns together reach every token.", "把几种固定模式合起来，覆盖所有 token。"
    ),
    "learnable patterns": _family(
        "Learned patterns", "可学习的模式", "A softmax over tokens that their content selects: by hashing, clustering, sorting or scoring.",
        "只对内容选定的 token 做 softmax：靠哈希、聚类、排序或打分。",
    ),
    "neural memory": _family(
        "Memory tokens", "记忆 token", "A few slots stand for many tokens and are read in their place.", "用少量槽代表大量 token，读槽而不读 token。"
    ),
    "kernels": _family(
        "Kernels", "核函数", "The similarity is a product of features of the query and of the key, so that sums over the past fit into a state.",
        "相似度写成查询特征与键特征之积，过去的求和于是能放进一个状态。",
    ),
    "low rank": _family(
        "Low rank", "低秩", "The T × T matrix of weights is approximated by a product of two narrow ones.", "用两个窄矩阵之积近似 T × T 的权重矩阵。"
    ),
    "recurrence": _family(
        "Recurrence over segments", "分段递推", "Softmax within a segment, with states of earlier segments beside it.", "段内做 softmax，同时读前面各段留下的状态。"
    ),
    "down-sampling": _family(
        "Down-sampling", "下采样", "The sequence is shortened before its tokens are compared.", "先缩短序列，再让 token 相互比较。"
    ),
    "sparse": _family(
        "Experts", "专家", "A router sends each token to a few of many parts.", "由路由器把每个 token 送到众多部分中的少数几个。"
    ),
    "linear attention of images": _family(
        "Vision", "视觉", "Linear attention over the tokens of an image, which all read each other.", "用于图像 token 的线性注意力，所有 token 互相读。"
    ),
    "linear attention with decay": _family(
        "Decay", "衰减", "The state is multiplied by a factor below one before a token is written.", "写入一个 token 之前，状态先乘一个小于 1 的因子。"
    ),
    "delta rule": _family(
        "Delta rule", "delta 规则", "What the state holds under a key is erased, or solved for anew, when a value is written there.",
        "写入新值时，先擦除状态在该键上的旧值，或重新求解整个状态。",
    ),
    "memories learned at test time": _family(
        "Memories learned at test time", "测试时学习的记忆", "The state is a small model, and each token is a step of gradient descent on it.",
        "状态是一个小模型，每个 token 对它做一步梯度下降。",
    ),
    "state spaces": _family(
        "State spaces", "状态空间", "A linear system with an input, a state and an output, discretised over tokens.", "有输入、状态与输出的线性系统，按 token 离散化。"
    ),
    "RWKV": _family(
        "RWKV", "RWKV", "Token shift, a decay per channel, and a separate weight for the current token; later versions erase.",
        "token shift、逐通道衰减，当前 token 另有权重；后来的版本还会擦除。",
    ),
    "recurrent networks": _family(
        "Recurrent networks", "循环网络", "A vector is passed from token to token and rewritten at each of them, mostly by gates.", "在 token 之间传递一个向量，每个 token 改写一次，多数由门控制。"
    ),
    "convolutions": _family(
        "Convolutions", "卷积", "At the core is a weighted sum over neighbours, with the same weights at every place.", "核心是对邻近 token 的加权和，各处权重相同。"
    ),
    "feed-forwards": _family(
        "Feed-forwards", "前馈层", "Each token is transformed alone; the mixers decide which tokens read which.", "每个 token 单独变换；谁读谁由混合层决定。"
    ),
    "others": _family("Others", "其他", "Systems without a registered family.", "没有登记类别的方法。"),
}  # fmt: skip
