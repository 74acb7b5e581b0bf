"""What the studies of ``linattn reproduce`` say in English, in both languages: their titles and the headings of their tables."""

from __future__ import annotations

from linattn.atlas.text import Both

CHINESE = {
    "What can be recalled from a state": "从状态里能回忆起什么",
    "How many pairs a state returns": "一个状态能读回多少对",
    "Keeping track of a state": "跟踪状态",
    "Copying and induction at unseen lengths": "在没见过的长度上复制与归纳",
    "Texts longer than any of the training": "比训练时都长的文本",
    "How many layers must keep everything": "要有几层保留全部",
    "States of half the precision, and where they lie": "半精度的状态，以及放在哪里",
    "mixer": "混合器",
    "rule or mixer": "规则或混合器",
    "rule": "规则",
    "keys": "键",
    "passes": "遍数",
    "pairs returned exactly": "精确读回的对数",
    "pairs recognised": "认出的对数",
    "exact pairs, at most": "精确对数的上限",
    "task": "任务",
    "problem": "问题",
    "width": "宽度",
    "state": "状态",
    "accuracy": "正确率",
    "in the hardest test": "最难的测试中",
    "which is": "即",
    "which has": "长度",
    "learning rate": "学习率",
    "seeds": "种子数",
    "by chance": "瞎猜",
    "at the trained length": "训练长度上",
    "at twice that": "两倍长度上",
    "at the longest": "最长处",
    "its best seed": "最好的种子",
    "bits/byte at the end of a training length": "训练长度末尾的比特/字节",
    "read up to byte": "读到第几字节",
    "bits/byte there, past carried": "该处比特/字节，带着过去",
    "bits/byte there, past forgotten": "该处比特/字节，忘掉过去",
    "saved by the past": "过去省下的",
    "share of softmax": "softmax 层占比",
    "layers": "层",
    "recall": "回忆正确率",
    "bits per byte": "每字节比特数",
    "kept of the context": "为上下文保留",
    "ms per token": "毫秒/token",
    "kept in": "存储类型",
    "rounded every": "每隔多少次舍入",
    "tokens": "token 数",
    "error without decay": "无衰减时的误差",
    "error with decay 0.99": "衰减 0.99 时的误差",
    "bytes": "字节",
    "from accelerator, ms": "从加速卡读取，毫秒",
    "from memory, ms": "从内存读取，毫秒",
    "from disk, ms": "从硬盘读取，毫秒",
    "accelerator, GB/s": "加速卡，GB/s",
    "memory, GB/s": "内存，GB/s",
    "disk, GB/s": "硬盘，GB/s",
    "paper says": "论文的说法",
    "source": "出处",
    "so here": "这里是否如此",
}


def both(english: str) -> Both:
    """``english`` in both languages; a title that was changed in a file of results stays as it is."""
    return Both(english, CHINESE.get(english, english))
