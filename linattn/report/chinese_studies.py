"""Chinese translations of the text of the studies: their titles and headings, and their pages sentence by sentence.

See :func:`linattn.report.chinese.chinese` for how they are looked up.
"""
# ruff: noqa: E501  # a Chinese character counts twice

from __future__ import annotations

STUDIES = {
    "What can be recalled from a state": "从状态里能回忆起什么",
    "How many pairs a state returns": "一个状态能读回多少对",
    "Keeping track of a state": "跟踪状态",
    "Copying and induction at unseen lengths": "在没见过的长度上复制与归纳",
    "Texts longer than any of the training": "超过训练长度的文本",
    "How many layers must keep everything": "需要几层保留全部 token",
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
    "which is": "规模",
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
    "bits/byte there, past carried": "该处比特/字节，保留历史",
    "bits/byte there, past forgotten": "该处比特/字节，清空历史",
    "saved by the past": "历史带来的节省",
    "share of softmax": "softmax 层占比",
    "layers": "层",
    "recall": "回忆正确率",
    "bits per byte": "每字节比特数",
    "kept of the context": "为上下文保留",
    "ms per token": "毫秒/token",
    "step run as": "每步的执行",
    "CUDA graph": "CUDA 图",
    "list of calls": "调用列表",
    "operations": "逐个算子",
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
    # texts of the rows
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
    "not solved": "无法解决",
    "not solved in one layer": "一层无法解决",
    "solved": "可以解决",
    "a sum returns up to {} orthogonal keys without error": "求和最多能无误差地读回 {} 个正交键",
    "not all of more than {}": "超过 {} 个就不能全部读回",
    "no more than the state can hold": "不超过状态的容量",
    "strings far longer than its size": "远比自身容量长的字符串",
    "right up to a million tokens": "直到一百万 token 都正确",
    "right up to twice the trained length at most": "最多在训练长度的两倍以内正确",
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
    "even with {}M numbers": "即使有 {}M 个数",
    "section {}": "第 {} 节",
    "figure {}": "图 {}",
    "abstract": "摘要",
    "figure of its code": "其代码仓库中的图",
    "by numbers of state": "按状态的数的个数",
}  # fmt: skip
STUDY_PAGES = {  # questions, notes and plots of the studies, sentence by sentence
    "Models of two layers, a short convolution and a mixer, read pairs of keys and values and are asked for values by their keys.":
        "两层模型，一层短卷积，一层混合层，读入若干键值对，再按键问值。",
    "How many do they answer correctly, and how many bytes do they keep?": "能答对多少，又要保留多少字节？",
    "The bytes are everything that the two layers keep of the longest test, including the inputs of the convolution and the positions; "
    "softmax keeps every token.": "字节数是两层为最长的测试保留的全部内容，包括卷积的输入与位置；softmax 保留每个 token。",
    "For the comparison with the paper four bytes count as one number; a window's cache in bfloat16 has two numbers in them.":
        "与论文比较时四个字节算一个数；窗口的 bfloat16 缓存在四个字节里存两个数。",
    "With --quick the vocabulary has {} tokens, one learning rate is used, and a model sees {} examples of both tasks once.":
        "--quick 的词表有 {} 个 token，只用一个学习率，模型把两个任务的 {} 个样本各看一遍。",
    "The result shows how soon the models learn, not what each could learn in the end.": "结果反映学得多快，而不是最终能学到什么。",
    "gated_deltanet starts with strong decays and learns last, in some seeds not within these {} steps.":
        "gated_deltanet 初始衰减强，最晚学会，有的种子在这 {} 步内学不会。",
    "Zoology needs a vocabulary of more than a thousand to separate the models.": "Zoology 要用一千以上的词表才能区分各模型。",
    "With --full the shapes, the vocabulary, the batches and the learning rates are Zoology's.":
        "--full 的形状、词表、批大小与学习率都取自 Zoology。",
    "The learning rate that is best after {} epochs is trained for {} with each seed, instead of {} epochs for every rate; it is chosen on "
    "the tests of the first seed, which favours that seed.":
        "先各训练 {} 轮，选出最好的学习率，再用每个种子训练 {} 轮，而不是每个学习率都训练 {} 轮；学习率按第一个种子的测试选出，对该种子有利。",
    "A training ends when its loss is below {}.": "损失低于 {} 时训练结束。",
    "The forgetting variant uses the rates found for recall.": "改写后回忆沿用为回忆选出的学习率。",
    "The tasks of MAD are those of its baseline, with {} epochs after {} with each of two rates.":
        "MAD 的任务取其基准设置，训练 {} 轮，之前两个学习率各试 {} 轮。",
    "Six epochs are not enough for every model: on an H200 Mamba-{} of width {} and GLA of width {} ended at losses of {} and {} and recalled "
    "less than at half the width.":
        "六轮并非对每个模型都够：在 H200 上，宽度 {1} 的 Mamba-{0} 与宽度 {2} 的 GLA 结束时损失为 {3} 与 {4}，回忆不如一半宽度时。",
    "accuracy by bytes of state": "正确率与状态字节数",
    "MQAR": "MQAR",
    "Share of all questions that are answered correctly, over the bytes that the layers keep of the longest test.":
        "答对的比例，横轴为各层为最长的测试保留的字节数。",
    "bytes of state": "状态字节数",
    "Best": "最好",
    "Random key-value pairs are written into a K x V state by the recurrence itself, without training, and read again with the same keys.":
        "不经训练，由递推本身把随机键值对写入 K x V 的状态，再用同样的键读出。",
    "Of random values no state can return more than K exactly (K = {}, with --full {}); how many does each rule return?":
        "对随机的值，任何状态都不能精确读回多于 K 对（K = {}，--full 时为 {}）；各种规则能读回多少？",
    "No claim of a paper is compared: that a sum returns K orthonormal keys exactly (arXiv {}, section {}) and that no state returns more "
    "than K random values exactly follow from linear algebra.":
        "这里不与论文的说法比较：求和能精确读回 K 个标准正交键（arXiv {}，第 {} 节），任何状态都不能精确读回多于 K 个随机值，二者由线性代数即可推出。",
    "Of each mixer only the rule is used: a sum; a sum with the mean decay of the untrained layer's slowest channel; or the delta rule, "
    "which erases what its key reads (β = {}).":
        "每个混合层只用其规则：求和；按未训练层最慢通道的平均衰减求和；或 delta 规则，即先擦除键所读出的内容（β = {}）。",
    "Returned exactly: the largest number of pairs that all come back with a relative error of at most {}.":
        "精确读回：相对误差都不超过 {} 的最大对数。",
    "Recognised: the largest of which {}% are nearer to their own value than to any other that was written.":
        "认出：其中 {}% 离自己的值比离其他写入的值更近的最大对数。",
    "Pairs recognised, {} pass": "认出的对数，{} 遍",
    "Pairs recognised, {} passes": "认出的对数，{} 遍",
    "Pairs returned exactly, {} pass": "精确读回的对数，{} 遍",
    "Pairs returned exactly, {} passes": "精确读回的对数，{} 遍",
    "Random pairs are written into a state of {} x {}, then each key is read.": "把随机键值对写入 {} x {} 的状态，再逐个键读出。",
    "Largest number of pairs returned": "能读回的最大对数",
    "pairs written": "写入的对数",
    "share recognised": "认出的比例",
    "share returned exactly": "精确读回的比例",
    "Every token is an element of a group, and the answer is the product of all elements up to it: parity, and words of S3, A5 and S5.":
        "每个 token 是群中的一个元素，要答的是到它为止所有元素之积：奇偶，以及 S3、A5、S5 的字。",
    "The models are trained on short words and tested on long ones.": "模型在短字上训练，在长字上测试。",
    "accuracy at the end of long words": "长字末尾的正确率",
    "Share of correct answers at the last {} positions, over the length of the word; trained with up to {} tokens.":
        "最后 {} 个位置答对的比例，横轴为字长；训练时最长 {} 个 token。",
    "At {} tokens": "{} 个 token 处",
    "by chance {}": "随机猜测 {}",
    "Only the answers at the last {} positions of each word count.": "只计每个字最后 {} 个位置的答案。",
    "The delta rules have no short convolution here: it mixes the keys of neighbouring tokens, and S3 was then not learned in as many "
    "steps; parity was.": "这里的 delta 规则不带短卷积：短卷积混合相邻 token 的键，同样的步数内学不会 S3，奇偶则能学会。",
    "Eight heads of four channels learned S3 in more seeds than four heads of eight.": "八头四通道比四头八通道在更多的种子上学会 S3。",
    "With --quick deltaproduct learns parity in every seed and is correct at all positions of trained lengths; whether its two reflections "
    "are exact enough for four times the length depends on the seed and on rounding.":
        "--quick 时 deltaproduct 在每个种子上都学会奇偶，训练长度内处处正确；其两次反射能否精确到四倍长度，取决于种子与舍入。",
    "With a batch of {} and words of up to {} tokens it was correct up to {} in the one seed tried.":
        "批大小 {}、字长不超过 {} 个 token 时，所试的一个种子直到 {} 都正确。",
    "Whether training finds the solution depends on the seed: most find it or nothing, so the best seed is shown beside the mean.":
        "训练能否找到解取决于种子：多数要么找到，要么一无所获，所以均值旁边也列出最好的种子。",
    "A problem counts as solved if the best seed is correct at {}% of the positions in the longest words: the papers prove that a solution "
    "exists, or that none does.": "最好的种子在最长的字上有 {}% 的位置正确，就算解出：论文证明的是解存在或不存在。",
    "Models of two layers, a short convolution and a mixer, learn to copy short strings, and to name the token that followed the last token "
    "where it occurred before.": "两层模型，一层短卷积，一层混合层，学习复制短串，并说出末尾的 token 上次出现时后面跟的是什么。",
    "Which continue to do so at lengths that they were not trained on?": "到了没训练过的长度，哪些还能做到？",
    "whole strings copied": "整串复制正确",
    "the induction head's answer": "归纳头的答案",
    "Share of correct answers over the length; trained with lengths up to {}.": "答对的比例，横轴为长度；训练长度最长 {}。",
    "At twice the trained length": "两倍训练长度处",
    "length": "长度",
    "share right": "答对的比例",
    "Copying counts whole strings: the share that greedy decoding writes without any error.": "复制按整串计：贪心解码写得一字不差的比例。",
    "Softmax without a window is tested up to {}k tokens, because its cache and its time grow with the length.":
        "不带窗口的 softmax 只测到 {}k 个 token，因为缓存与时间都随长度增长。",
    "The state is measured after the longest trained sequence.": "状态在最长的训练序列之后测量。",
    "Does a model trained on short texts work on longer ones?": "在短文本上训练的模型，能用在更长的文本上吗？",
    "All have equal parameters, text and steps.": "各模型的参数量、文本与步数相同。",
    "Measured are the bits per byte of held-out text by position, once with the state carried from the first byte and once with the state "
    "reset after every segment as long as a training text.":
        "测量留出文本上各位置的每字节比特数：一次从首字节起一直传递状态，一次每隔一个训练文本的长度重置状态。",
    "Loss by position": "各位置的损失",
    "Bits per byte between this position and the one before, with the state of the whole past; lower is better.":
        "从上一位置到这一位置的每字节比特数，状态包含全部历史；越低越好。",
    "Training texts had {} bytes.": "训练文本长 {} 字节。",
    "Gain from the past": "历史带来的收益",
    "Bits per byte saved on the same bytes, compared with a state reset every {} bytes.": "在同样的字节上，与每 {} 字节重置一次状态相比，每字节省下的比特数。",
    "Below {} the past harms.": "低于 {} 表示历史反而有害。",
    "bits per byte saved": "每字节省下的比特数",
    "Up to byte {}": "到第 {} 字节",
    "The text is the source of Python's standard library.": "文本为 Python 标准库的源代码。",
    "The held-out text consists of blocks of {} KiB, most of several files.": "留出的文本由 {} KiB 的块组成，多数块含多个文件。",
    "The papers' models are {} to {} times as large and saw as many times more text, so their states could overfit to one length.":
        "论文的模型大 {} 到 {} 倍，读过的文本也多同样的倍数，状态可能对某个长度过拟合。",
    "Recurrent models that diverge there need not diverge here.": "在那里发散的循环模型，在这里不一定发散。",
    "A mixer diverges if the past saves less than {} bits.": "历史省下的比特数小于 {} 即为发散。",
    "A loss that is not finite in one of the seeds is shown as –.": "某个种子的损失不是有限值时记为 –。",
    "A reset also loses the few bytes just before it.": "重置也丢掉紧挨其前的几个字节。",
    "The row of a small window, which sees little else, shows what they save.": "小窗口几乎只看得到这些字节，它的那一行说明它们省下多少。",
    "{} layers of width {} have more parameters than the other models": "{} 层、宽度 {} 时，参数比其他模型多",
    "the validation text has {} bytes": "验证文本有 {} 字节",
    "however small the feed-forward": "前馈层再小也是如此",
    "but {} are needed": "但需要 {} 字节",
    "it writes no pairs of keys and values into one matrix": "它不把键值对写入一个矩阵",
    "Some of the layers are softmax, the others a mixer with a state of fixed size; all models have equally many parameters.":
        "一部分层是 softmax，其余是状态大小固定的混合层；各模型参数量相同。",
    "What does each share of softmax gain in recall and bits per byte, and what does it cost in memory and in time per token?":
        "softmax 占不同比例时，回忆与每字节比特数有何收益，内存与每 token 时间有何开销？",
    "Recall": "回忆",
    "Share of keys that are answered with their value.": "按键答对其值的比例。",
    "Text": "文本",
    "Bits per byte of text not trained on; lower is better.": "未参与训练的文本的每字节比特数，越低越好。",
    "Memory of the past": "为历史保留的内存",
    "Bytes kept of {} bytes of context, in float32.": "为 {} 字节的上下文保留的字节数，以 float32 计。",
    "Writing a token": "写出一个 token",
    "Time for a token after {} bytes of context.": "{} 字节的上下文之后每个 token 的时间。",
    "By the share of softmax": "按 softmax 的占比",
    "share of softmax layers": "softmax 层占比",
    "share answered": "答对的比例",
    "milliseconds per token": "毫秒/token",
    "Agreement is judged by recall: differences of up to {} do not count, and softmax alone must answer {}%.":
        "是否一致按回忆判断：相差不超过 {} 视为相同，且纯 softmax 须答对 {}%。",
    "The share counts layers that mix tokens.": "占比只计混合 token 的层。",
    "The paper counts feed-forwards too: its {} % of attention are {}/{} of the mixing layers.":
        "论文把前馈层也计入：其中 {} % 的注意力相当于混合层的 {}/{}。",
    "Softmax has rotary positions here; the attention in the paper's hybrid has none.": "这里的 softmax 用旋转位置编码；论文的混合模型中注意力不带位置编码。",
    "The paper predicts its factor of {} for {} billion parameters and long contexts; at this size the overhead of the host counts.":
        "论文的 {} 倍是对 {}0 亿参数与长上下文的预测；在这里的规模上，主机开销占比不小。",
    "--quick has {} layers, so it leaves out {}/{} and {}/{}.": "--quick 有 {} 层，所以不含 {}/{} 与 {}/{}。",
    "On a CPU, times per token are of one thread.": "在 CPU 上，每 token 时间用一个线程测得。",
    "A longer training may lift a low recall: --quick's is a few hundred steps.": "延长训练可能提高偏低的回忆：--quick 只训练几百步。",
    "Models that learn recall have a gated short convolution before their other layers, as in Zoology (arXiv {}).":
        "学习回忆的模型在其他层之前有一层带门的短卷积，与 Zoology（arXiv {}）相同。",
    "How large is the error of a state that is rounded after every token, or whenever it is stored between chunks, by length and decay, and "
    "how does it affect recall?": "状态在每个 token 后舍入，或只在块之间存储时舍入，误差随长度与衰减有多大，对回忆有何影响？",
    "And how long does it take to restore a key-value cache and a state from each kind of storage?": "从各种存储中恢复 KV 缓存与状态各需多久？",
    "Error, additive, rounded after every token": "误差：相加，每个 token 后舍入",
    "Error, delta, rounded after every token": "误差：delta，每个 token 后舍入",
    "Error, additive, rounded after every {} tokens": "误差：相加，每 {} 个 token 舍入",
    "Error, delta, rounded after every {} tokens": "误差：delta，每 {} 个 token 舍入",
    "Relative error of the latest {} outputs, without decay ({}) and with a decay of {} per token.":
        "最近 {} 个输出的相对误差：无衰减（{}）与每 token 衰减 {}。",
    "relative error": "相对误差",
    "Without decay at the full length": "无衰减，全长处",
    "Share of questions that a trained model answers with its state rounded after every token.": "状态在每个 token 后舍入时，训练好的模型答对的比例。",
    "bits of the significand": "有效数位数",
    "bfloat16 has {} bits, float16 {}, float32 {}.": "bfloat16 有 {} 位，float16 {} 位，float32 {} 位。",
    "Rounding costs at most {}.": "舍入最多损失 {}。",
    "Restoring": "恢复",
    "Time to copy a softmax cache, or a state instead, to the memory in which the model computes.": "把 softmax 缓存（或状态）复制到模型计算所用内存的时间。",
    "milliseconds": "毫秒",
    "Milliseconds after the longest context": "最长上下文之后（毫秒）",
    "Errors come from rounding the state alone, all other arithmetic being float64; keys and values are random.":
        "误差只来自对状态的舍入，其余运算都用 float64；键与值随机。",
    "A model that has not learned to recall loses nothing by rounding.": "没学会回忆的模型，舍入也没有损失。",
    "Bytes per second count the cache or state once; a copy within one memory reads and writes each byte, on a CPU with one thread.":
        "每秒字节数只计一次缓存或状态；同一内存内的复制对每个字节读写各一次，在 CPU 上用一个线程。",
    "The disk is read with the page cache of this system empty; the host of a virtual machine may have a cache of its own.":
        "读硬盘前清空本系统的页缓存；虚拟机的宿主机可能另有缓存。",
    "Copies from memory to an accelerator use pinned memory.": "从内存复制到加速卡用锁页内存。",
    "Caches and states are those of the bfloat16 stack in the settings.": "缓存与状态属于设置中的 bfloat16 模型。",
}  # fmt: skip
