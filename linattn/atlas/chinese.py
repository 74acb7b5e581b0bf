"""Chinese translations of text that the rest of the library has in English only: studies, tasks, benchmarks and shared phrases of mixers.

The words of the atlas itself stand where they are used, in both languages, and those of one mixer beside its ``@register``. These come
from elsewhere, a file of results even from another day, and so they are looked up. Names (systems, papers, code, units) stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from linattn.atlas.text import Both

STUDIES = {
    "What can be recalled from a state": "从状态里能回忆起什么",
    "How many pairs a state returns": "一个状态能读回多少对",
    "Keeping track of a state": "跟踪状态",
    "Copying and induction at unseen lengths": "在没见过的长度上复制与归纳",
    "Texts longer than any of the training": "比训练时都长的文本",
    "How many layers must keep everything": "要有几层保留全部",
    "States of half the precision, and where they lie": "半精度的状态，以及放在哪里",
    "mixer": "混合层",
    "rule or mixer": "规则或混合层",
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
    "by chance": "随机猜测",
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
    "rounded every": "每隔几步舍入",
    "tokens": "token 数",
    "error without decay": "无衰减时的误差",
    "error with decay {}": "衰减 {} 时的误差",
    "bytes": "字节",
    "from accelerator, ms": "从加速卡读出（毫秒）",
    "from memory, ms": "从内存读出（毫秒）",
    "from disk, ms": "从硬盘读出（毫秒）",
    "accelerator, GB/s": "加速卡（GB/s）",
    "memory, GB/s": "内存（GB/s）",
    "disk, GB/s": "硬盘（GB/s）",
    "paper says": "论文的说法",
    "source": "出处",
    "so here": "这里是否如此",
    # what stands in the rows
    "yes": "是",
    "no": "否",
    "{} tokens": "{} 个 token",
    "{} pairs": "{} 对",
    "orthonormal": "标准正交",
    "random": "随机",
    "additive": "相加",
    "decayed additive": "衰减相加",
    "decayed delta": "衰减 delta",
    "copying": "复制",
    "induction": "归纳",
    "forgetting": "改写后回忆",
    "mqar": "多问联想回忆（MQAR）",
    "in-context recall": "上下文内回忆",
    "noisy recall": "带噪回忆",
    "fuzzy recall": "模糊回忆",
    "selective copying": "选择性复制",
    "compression": "压缩",
    "memorisation": "记忆",
    "test": "测试",
    "parity": "奇偶",
    "not solved": "解不了",
    "not solved in one layer": "一层解不了",
    "solved": "能解",
    "a sum returns up to {} orthogonal keys without error": "求和最多能无误差地读回 {} 个正交键",
    "not all of more than {}": "超过 {} 个就不能全部读回",
    "no more than the state can hold": "不超过状态装得下的",
    "strings far longer than its size": "远比自身容量长的字符串",
    "right up to a million tokens": "直到一百万 token 都对",
    "right up to twice the trained length at most": "最多到训练长度的两倍还对",
    "{}B, trained at {}k: finds passkeys up to {}k, then fewer and fewer": "{}B，训练长度 {}k：{}k 以内都找得到密钥，再长就越来越少",
    "lowest perplexity of the recurrent models, out to {}k": "循环模型中困惑度最低，直到 {}k",
    "rotary: perplexity rises soon beyond the length trained at": "用旋转位置编码：一过训练长度，困惑度很快上升",
    "trained at {}k: diverges beyond it; not if training carries states over": "训练长度 {}k：超出就发散；训练时若把状态接着传就不会",
    "trained at {}: diverges beyond it; not if training carries states over": "训练长度 {}：超出就发散；训练时若把状态接着传就不会",
    "{}B: behind the Transformer at copying and in-context learning": "{}B：复制与上下文学习不如 Transformer",
    "recall as a Transformer's with {}/{} to {}/{}; bits per byte hardly change with the share":
        "占 {}/{} 到 {}/{} 时回忆与 Transformer 相当；每字节比特数几乎不随占比变化",
    "{}B, {} of {}: ahead of the Transformer in all {} tasks, tokens up to {} times as fast":
        "{}B，{} 层（共 {} 层）：{} 项任务全部领先 Transformer，生成最快达 {} 倍",
    "what servers keep states in unless told otherwise": "推理服务默认用它存状态",
    "{} at {}k": "{1}k 个数时 {0}",
    "at most {}": "最多 {}",
    "even with {}M numbers": "哪怕有 {}M 个数",
    "section {}": "第 {} 节",
    "figure {}": "图 {}",
    "abstract": "摘要",
    "figure of its code": "其代码仓库中的图",
    "by numbers of state": "按状态的数的个数",
}  # fmt: skip
TASKS = {
    "Handwritten digits by mixers that read both ways": "用双向混合层识别手写数字",
    "What comes next, by causal mixers": "用因果混合层预测下一个物品",
    "Writing backwards, from sequence to sequence": "序列到序列：反转",
    "Sorting, from sequence to sequence": "序列到序列：排序",
    "Translating, character by character": "逐字符翻译",
    "test accuracy": "测试准确率",
    "images/s": "图像/秒",
    "users/s": "用户/秒",
    "right, lengths between": "全对的比例：长度介于学过的之间",
    "right, longer ones": "全对的比例：更长",
    "tokens written/s": "写出 token/秒",
    "bits per character": "每字符比特数",
    "characters written/s": "写出字符/秒",
}
BENCHMARKS = {
    "forward": "前向",
    "forward+backward": "前向 + 反向",
    "decode": "解码",
    "portable": "可移植形式",
    "{} thread": "{} 个线程",
    "{} threads": "{} 个线程",
}
# Of mixers: what more than one registration says. What one alone says has its Chinese there, under `chinese`.
SHARED = {
    "the paper's equations as a loop in float64": "float64 循环逐步计算论文公式",
    "the authors' equations as a loop in float64": "float64 循环逐步计算作者的公式",
    "and figures of the authors' code": "以及作者代码算出的数",
    "the authors' modules.py": "作者的 modules.py",
    "in float64": "以 float64 计算",
    "the quadratic formula in float64": "float64 下的平方形式公式",
    "written in the test from the paper's equation": "在测试中按论文公式写出",
    "written in the test with loops": "在测试中用循环写出",
    "loops over hashes, Hamming distances and keys in float64, as idiap/fast-transformers has them in C++":
        "float64 循环计算哈希、汉明距离与键，与 idiap/fast-transformers 的 C++ 实现同法",
    "its whole blocks": "整块比较",
    "the paper's recurrence": "论文的递推",
    "token by token in float64": "float64 下逐 token 计算",
    "step by step in float64": "float64 下逐步计算",
    "torch.autograd of the loss in the paper": "对论文中的损失用 torch.autograd 求导",
    "a float64 loop over tokens: the memory by torch.autograd of the loss in the paper, attention by its definition":
        "float64 逐 token 循环：记忆对论文中的损失用 torch.autograd 求导，注意力按定义计算",
    "in training its batch norm takes the mean over all rows": "训练时它的批归一化对所有行求均值",
    "an expert has a capacity for each row of tokens, and a list of tokens is one row":
        "每个专家对每行 token 有容量上限，而一串 token 就是一行",
    "all for ": "全部，若 ",
}  # fmt: skip
CHINESE = {**STUDIES, **TASKS, **BENCHMARKS, **SHARED}
NUMBER = re.compile(r"(?<![\w.])\d(?:[\d.,]*\d)?")


def both(english: str, own: Mapping[str, str] | None = None) -> Both:
    """Pair ``english`` with its Chinese, using the phrases of a registration, ``own``; text without Chinese stays."""
    return Both(english, _chinese(english, {**CHINESE, **(own or {})}) or english)


def equation(latex: str, own: Mapping[str, str]) -> Both:
    r"""Pair ``latex`` with its Chinese, which differs in the contents of ``\text{...}``, piece by piece."""
    words = {**SHARED, **own}
    return Both(latex, re.sub(r"\\text\{([^}]*)\}", lambda m: rf"\text{{{words.get(m[1], m[1])}}}", latex))


def _chinese(text: str, known: Mapping[str, str]) -> str | None:
    """Translate ``text`` as a whole, with its numbers in place of ``{}``, or clause by clause; None if no part has Chinese."""
    if text in known:
        return known[text]
    if found := known.get(NUMBER.sub("{}", text)):
        return found.format(*NUMBER.findall(text))
    for mark, theirs in (("; ", "；"), (", ", "，")):
        parts = text.split(mark)
        translated = [_chinese(part, known) for part in parts] if len(parts) > 1 else []
        if any(translated):
            return theirs.join(own or part.replace(", ", "，") for own, part in zip(translated, parts, strict=True))
    return None
