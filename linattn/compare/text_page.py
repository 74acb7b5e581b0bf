"""report.html of a comparison on text: the figures, the plots, samples, and the conditions of the measurement."""

from __future__ import annotations

from html import escape

from linattn.compare.text_charts import charts
from linattn.generate.text import printable
from linattn.report.html import document, how, machine_facts, measured_by, named, papers, plots, section, table
from linattn.report.language import Both, Words, both, markup, spoken
from linattn.report.words import figure, memory, tokens
from linattn.reproduce.variants import label

DECAYS: dict[str, Words] = {
    "none": Both("none", "无"),
    "constant": Both("fixed, per head", "固定，每头一个"),
    "head": Both("from the token, per head", "由 token 决定，每头一个"),
    "channel": Both("from the token, per channel", "由 token 决定，每通道一个"),
}
GROWS, CONSTANT = Both("a cache of all tokens", "全部 token 的缓存"), Both("a state of constant size", "大小固定的状态")
ABSENT, UNKNOWN = Both("none", "无"), "–"


def page(report: dict) -> str:
    """Render the page for ``report``, the content of report.json."""
    title = Both("Softmax and linear attention, side by side", "softmax 注意力与线性注意力并排比较")
    if len(report["mixers"]) == 1:
        name = both(report["mixers"][0]["title"])
        title = Both(f"{name.en}, measured", f"{name.zh}：实测")
    parts = (
        _opening(report), _summary(report), _differences(report), _rates(report), plots(charts(report)), _contexts(report),
        _samples(report), _how(report),
    )  # fmt: skip
    return document(title, parts, report)


def _opening(report: dict) -> str:
    o, m = report["options"], report["mixers"]
    exact = len({x["parameters"] for x in m}) == 1
    size = f"{m[0]['parameters']:,}" if exact else figure(m[0]["parameters"])
    about = Both("" if exact else "about ", "" if exact else "约 ")
    seen = o["steps"] * o["batch_size"] * o["train_context"]
    text = corpus_name(report)
    seeds = Both("", "") if o["seeds"] == 1 else Both(f", with {o['seeds']} seeds each", f"，各用 {o['seeds']} 个种子")
    same = len({x["training"]["learning_rate"] for x in m}) == 1
    rates = Both("", "") if same else Both("in the learning rate, which is each mixer's own, ", "各自的学习率，")
    shared = Both(", learning rate" if same else "", "、学习率" if same else "")
    told = Both(
        f"{len(m)} language models of {about.en}{size} parameters each, {o['layers']} layers of width {o['dim']}, trained on "
        f"{escape(text.en)}, byte by byte: {o['steps']:,} steps, {seen:,} tokens{seeds.en}. Data, order of data{shared.en} and steps are the "
        f"same for all. The models differ in the mixer with the parts that belong to it (listed below), {rates.en}and in the width of the "
        "feed-forward, which makes the sizes equal.",
        f"{len(m)} 个语言模型，参数量各{about.zh}{size}，{o['layers']} 层，宽度 {o['dim']}；逐字节学习 {escape(text.zh)}："
        f"{o['steps']:,} 步，{seen:,} 个 token{seeds.zh}。数据、数据顺序{shared.zh}与步数都相同。各模型的差别在于：混合层及其自带的部件（见下表），"
        f"{rates.zh}以及用来使参数量相等的前馈层宽度。",
    )
    return markup(told) + markup(measured_by(report), kind="soft")


def corpus_name(report: dict) -> Both:
    """Name of the text that the models were trained on."""
    return both(report["corpus"]["name"])


def _summary(report: dict) -> str:
    longest = max(c["context"] for m in report["mixers"] for c in m["contexts"])
    at = tokens(longest)
    heads = [
        Both("Mixer", "混合层"), Both("Bits per byte", "每字节比特数"), Both("Parameters", "参数量"), Both("Feed-forward width", "前馈层宽度"),
        Both("Learning rate", "学习率"), Both("Training, tokens/s", "训练，token/秒"), Both("Training, s", "训练时间（秒）"),
        Both(f"Prefill of {at}, ms", f"预填充 {at}（毫秒）"), Both(f"Decode at {at}, ms/token", f"{at} 处解码（毫秒/token）"),
        Both(f"State at {at}", f"{at} 处的状态"),
    ]  # fmt: skip
    rows = []
    for i, m in enumerate(report["mixers"]):
        t, last = m["training"], next((c for c in m["contexts"] if c["context"] == longest), None)
        ends = ["–"] * 3 if last is None else [figure(last["prefill_ms"]), figure(last["decode_ms"]), memory(last["state_bytes"])]
        bits = around(t["validation_bits_per_byte"], t["validation_bits_per_byte_spread"])
        cells = [bits, f"{m['parameters']:,}", f"{m['ffn_dim']:,}", f"{t['learning_rate']:g}"]
        rows.append((named(label(m["name"]), i), [*cells, figure(t["tokens_per_second"]), figure(t["seconds"]), *ends]))
    caption = Both(
        "Bits per byte are those of text that was not trained on; lower is better. Mean ± sample standard deviation over the seeds.",
        "每字节比特数在未参与训练的文本上测得，越低越好；数值为各种子的均值 ± 样本标准差。",
    )
    return section(Both("Figures", "数据"), table(heads, rows, caption))


def around(value: float, spread: float | None) -> str:
    """A figure with its spread, if there is one."""
    return f"{value:.3f}" if spread is None else f"{value:.3f} ± {spread:.3f}"


def _differences(report: dict) -> str:
    heads = [
        Both("Mixer", "混合层"), Both("Keeps of the past", "保留的历史"), Both("Decay", "衰减"), Both("Erases before it writes", "写入前擦除"),
        Both("Short convolution", "短卷积"), Both("Output gate", "输出门"), Both("Norm in the mixer", "混合层内的归一化"),
        Both("Rotated or shifted by position", "键随位置变化"), Both("Learning rate", "学习率"), Both("Feed-forward width", "前馈层宽度"),
    ]  # fmt: skip
    rows = []
    for i, m in enumerate(report["mixers"]):
        p = m["parts"]
        width = p["conv_width"]
        cells: list[Words] = [
            GROWS if p["grows"] else CONSTANT, UNKNOWN if p["decay"] is None else DECAYS[p["decay"]], _yes(p["erases"]),
            Both(f"{width} tokens", f"{width} 个 token") if width else ABSENT, _yes(p["gate"]), _yes(p["norm"]), _yes(p["positions"]),
            f"{m['training']['learning_rate']:g}", f"{m['ffn_dim']:,}",
        ]  # fmt: skip
        rows.append((named(label(m["name"]), i), cells))
    caption = Both(
        "The parts in which the models differ, besides the numbers and sizes of heads; the rest of the model and of the training is the same.",
        "除头的个数与大小外，各模型的部件差别；其余部分与训练方式都相同。",
    )
    return section(Both("Differences between the models", "各模型有何不同"), table(heads, rows, caption))


def _yes(value: bool | None) -> Words:
    return UNKNOWN if value is None else Both("yes", "有") if value else Both("no", "无")


def _rates(report: dict) -> str:
    """Table of bits per byte at every candidate learning rate; empty if there was no choice."""
    found = {m["name"]: _tried(m) for m in report["mixers"]}
    rates = sorted({one["learning_rate"] for tried in found.values() for one in tried})
    if len(rates) < 2:
        return ""
    rows = []
    for i, m in enumerate(report["mixers"]):
        at = {t["learning_rate"]: around(t["validation_bits_per_byte"], t["validation_bits_per_byte_spread"]) for t in found[m["name"]]}
        rows.append((named(label(m["name"]), i), [at.get(rate, "–") for rate in rates] + [f"{m['training']['learning_rate']:g}"]))
    heads: list[Words] = [Both("Mixer", "混合层"), *(f"{rate:g}" for rate in rates), Both("taken", "采用")]
    caption = Both(
        "Bits per byte of text that was not trained on at each peak learning rate, mean ± sample standard deviation over the seeds.",
        "各峰值学习率下、未参与训练的文本的每字节比特数；各种子的均值 ± 样本标准差。",
    )
    parts = [table(heads, rows, caption)]
    if sweep := report.get("sweep"):
        command, day, machine = escape(sweep["command"]), escape(sweep["created"][:10]), escape(sweep["machine"]["cpu"])
        size = f"{sweep['steps']:,}", sweep["layers"], sweep["dim"]
        told = Both(
            f"From an earlier sweep by <code>{command}</code> ({machine}, {day}; {size[0]} steps, {size[1]} layers of width {size[2]}), "
            "unless --learning-rate names others.",
            f"取自先前的扫描 <code>{command}</code>（{machine}，{day}；{size[0]} 步，{size[1]} 层，宽度 {size[2]}）；"
            "用 --learning-rate 可另行指定。",
        )
        parts.append(markup(told, kind="soft"))
    return section(Both("Learning rates", "学习率"), *parts)


def _tried(mixer: dict) -> list[dict]:
    """Results of ``mixer`` at its candidate learning rates, in this comparison or in the sweep."""
    training = mixer["training"]
    if training["learning_rate_from"] != "sweep":
        return training["tried"]
    return training["swept"]


def _contexts(report: dict) -> str:
    lengths = [c["context"] for c in report["key_value_cache"]]
    parts = []
    captions = (
        (
            "prefill_ms",
            Both("Prefill: milliseconds to read a prompt of this many tokens", "预填充：读入这么多 token 的提示所需毫秒数"),
            figure,
        ),
        (
            "decode_ms",
            Both("Decode: milliseconds per new token after this many tokens", "解码：这么多 token 之后每个新 token 的毫秒数"),
            figure,
        ),
        ("state_bytes", Both("State: bytes kept after this many tokens", "状态：这么多 token 之后保留的字节数"), memory),
    )
    for key, caption, write in captions:
        rows: list[tuple[str, list[str]]] = []
        for i, m in enumerate(report["mixers"]):
            values = {c["context"]: write(c[key]) for c in m["contexts"]}
            rows.append((named(label(m["name"]), i), [values.get(n, "–") for n in lengths]))
        if key == "state_bytes":
            cache = {c["context"]: memory(c["bytes"]) for c in report["key_value_cache"]}
            rows.append((spoken(Both("A key-value cache, for comparison", "对照：KV 缓存")), [cache.get(n, "–") for n in lengths]))
        parts.append(table([Both("Mixer", "混合层"), *(tokens(n) for n in lengths)], rows, caption))
    left = [(label(m["name"]), x["context"], x["reason"]) for m in report["mixers"] for x in m["left_out"]]
    notes = [
        markup(Both(f"{escape(name)} at {n:,} tokens: {escape(why)}", f"{escape(name)}，{n:,} 个 token：{escape(both(why).zh)}"), "li")
        for name, n, why in left
    ]
    if notes:
        parts.append(f"{markup(Both('Left out:', '略去的测量：'))}<ul>{''.join(notes)}</ul>")
    return section(Both("At each context", "各上下文长度"), *parts)


def _samples(report: dict) -> str:
    tried = report["prompts_tried"]
    chosen = Both("", "") if tried == 1 else Both(
        f" Of {tried} prompts it is the first, or the best, that every model continues with text rather than with blanks.",
        f"共试了 {tried} 个提示，取第一个（或最接近）使每个模型都写出文字而非空白的。",
    )  # fmt: skip
    told = Both(
        f"The prompt is underlined; the rest is the model's, at one temperature and seed.{chosen.en}",
        f"带下划线的是提示，其余由模型写出；温度与种子相同。{chosen.zh}",
    )
    prompt = escape(printable(report["prompt"]))
    samples = (
        f'<div><h3>{named(label(m["name"]), i)}</h3><pre><span class="soft">{prompt}</span>{escape(printable(m["sample"]))}</pre></div>'
        for i, m in enumerate(report["mixers"])
    )
    body = f'<div class="samples">{"".join(samples)}</div>'
    return section(Both("The same prompt, continued by each", "同一提示的续写"), markup(told, kind="soft"), body)


def _how(report: dict) -> str:
    o, text = report["options"], corpus_name(report)
    seeds = f"{o['seed']}" if o["seeds"] == 1 else f"{o['seed']} – {o['seed'] + o['seeds'] - 1}"
    digest = f"sha256 <code>{escape(report['corpus']['sha256'])}</code>"
    return how(
        {
            Both("Command", "命令"): f"<code>{escape(report['command'])}</code>",
            Both("Text", "文本"): f"{spoken(text)} ({digest})",
            Both("Training", "训练"): Both(
                f"{o['steps']:,} steps of {o['batch_size']} sequences of {o['train_context']:,} tokens, seeds {seeds}, float32; warm-up, then "
                "a cosine to 0; the same data in the same order for all",
                f"{o['steps']:,} 步，每步 {o['batch_size']} 条 {o['train_context']:,} 个 token 的序列，种子 {seeds}，float32；预热后按余弦降到 0；"
                "数据及其顺序都相同",
            ),
            Both("Prefill, decode", "预填充与解码"): Both(
                "the first seed's models; one sequence; a warm-up, then the median, of decoding the least of several rounds; decode continues from the "
                "state that the prefill left",
                "第一个种子的模型；单条序列；先预热，取中位数，解码取几轮中最小的；解码从预填充留下的状态继续",
            ),
            **machine_facts(report["machine"]),
            Both("Made", "生成时间"): escape(report["created"]),
            Both("Mixers", "混合层"): papers(report["mixers"]),
        }
    )
