"""Chinese translations of the text of reports: of tasks, of studies (chinese_studies.py), and of the parts that their pages share.

Figures come from files and table cells from many places, so a text is looked up by its English, with its numbers as ``{}``.
Names (systems, papers, code, units) are not translated. Composed sentences have their Chinese where they are composed.
"""

from __future__ import annotations

import re

from linattn.report.chinese_studies import STUDIES, STUDY_PAGES

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
SHARED = {
    "the source of Python's standard library": "Python 标准库的源代码",
    "there was not enough memory": "内存不足",
    "expected to take up to {} s": "预计最多需要 {} 秒",
    "above the limit of {} s for one measurement": "超过一次测量 {} 秒的上限",
    "Command": "命令",
    "Machine": "机器",
    "Machine {}": "机器 {}",
    "Versions": "版本",
    "Versions {}": "版本 {}",
    "Made": "生成时间",
    "Begun": "开始时间",
    "Mixers": "混合层",
    "Data": "数据",
    "Training": "训练",
    "Note": "说明",
    "Settings": "设置",
    "Options": "选项",
    "Device": "设备",
    "Runs": "运行",
    "Left out": "略去",
    "Failed": "失败",
    "{} run": "{} 次运行",
    "{} runs": "{} 次运行",
    "training, s": "训练时间（秒）",
    "Small image models of equal size learn to classify handwritten digits.": "大小相同的小型图像模型学习识别手写数字。",
    "They are judged by the share of test images that they classify correctly.": "以测试图像的分类正确率衡量。",
    "Small models of equal size read the histories of users and rank all items by their probability of being next.": "大小相同的小模型读入用户的历史，按下一个出现的概率给全部物品排名。",
    "The last item of each history is the test item.": "每段历史的最后一个物品用于测试。",
    "HR@{} is the share of users for whom it is among the first ten, and NDCG@{} weighs it by {} / log2({} + rank).": "HR@{} 是它排进前十的用户比例，NDCG@{} 再按 {} / log2({} + 名次) 加权。",
    "Small encoder-decoders of equal size learn to translate short sentences.": "大小相同的小型编码器-解码器学习翻译短句。",
    "They are judged by the bits per character of test translations, given the source and the characters before.": "以测试译文在给定原文与前文时的每字符比特数衡量。",
    "Small encoder-decoders of equal size learn to write sequences of letters backwards, with lengths of {}, {}, {}, {}, {}, {}, {}, {} letters.": "大小相同的小型编码器-解码器学习反转字母序列，训练长度为 {}, {}, {}, {}, {}, {}, {}, {} 个字母。",
    "Small encoder-decoders of equal size learn to write the letters of a sequence in their order, with lengths of {}, {}, {}, {}, {}, {}, {}, {} letters.": "大小相同的小型编码器-解码器学习把序列中的字母排好序写出，训练长度为 {}, {}, {}, {}, {}, {}, {}, {} 个字母。",
    "They are judged by the share of sequences that greedy decoding writes without any error, at lengths that were not trained: {}, {}, and "
    "{}, {}.": "以贪心解码写得一字不差的比例衡量，测试长度均未训练过：{}、{} 与 {}、{}。",
    "handwritten digits of UCI": "UCI 手写数字",
    "as they come with scikit-learn": "取自 scikit-learn",
    "histories drawn from a Markov chain of second order": "由二阶马尔可夫链生成的历史",
    "random letters": "随机字母",
    "new ones for every step": "每步重新生成",
    "the Debian handbook in English and Chinese": "Debian 手册的英文与中文",
    "train": "训练",
    "users": "用户",
    "items": "物品",
    "interactions": "交互",
    "users tested": "测试用户",
    "letters": "字母",
    "sequences asked": "测试序列",
    "pairs learned from": "训练句对",
    "pairs tested": "测试句对",
    "characters of the target": "目标语言字符",
    "best that is possible": "可能的最好结果",
    "by popularity": "按热门程度",
    "parameters": "参数量",
}
CHINESE = {**STUDIES, **TASKS, **SHARED, **STUDY_PAGES}
NUMBER = re.compile(r"(?<![\w.])\d(?:[\d.,]*\d)?")
SENTENCE = re.compile(r"(?<=[.?]) ")


def chinese(text: str) -> str | None:
    """Translate ``text`` as a whole, with its numbers in place of ``{}``, or by sentences, by what stands before a colon, or by clauses.

    None if no part has Chinese.
    """
    if (whole := _known(text)) is not None:
        return whole
    if len(sentences := SENTENCE.split(text)) > 1:
        said = [chinese(one) for one in sentences]
        return "".join(one or "" for one in said) if all(said) else None
    if text.endswith("."):
        inner = chinese(text[:-1])
        return None if inner is None else f"{inner}。"
    head, colon, rest = text.partition(": ")
    if colon and (parts := (chinese(head), chinese(rest))) != (None, None):
        return f"{parts[0] or head}：{parts[1] or rest}"
    for mark, theirs in (("; ", "；"), (", ", "，")):
        clauses = text.split(mark)
        translated = [chinese(clause) for clause in clauses] if len(clauses) > 1 else []
        if any(translated):
            return theirs.join(own or clause.replace(", ", "，") for own, clause in zip(translated, clauses, strict=True))
    return None


def _known(text: str) -> str | None:
    if text in CHINESE:
        return CHINESE[text]
    found = CHINESE.get(NUMBER.sub("{}", text))
    return found and found.format(*NUMBER.findall(text))
