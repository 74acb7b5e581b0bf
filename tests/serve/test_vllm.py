"""vLLM's greedy tokens against generation here: every mixer, random arrivals, prompts in pieces, preemption, cached prefixes.

Runs where vLLM is installed: `make test-serve`. One process serves a small model of each mixer in turn.
"""

import gc
import random

import pytest
import torch

from linattn import mixers
from linattn.generate import stream
from linattn.hf import LinattnForCausalLM, LMConfig, export
from linattn.vllm import register, states

vllm = pytest.importorskip("vllm", reason="vLLM is not installed here: make test-serve runs these in an environment of their own")
pytestmark = pytest.mark.filterwarnings("default")  # of vLLM and what it imports

RECURRENT = [n for n in mixers.available() if mixers.info(n).resumable and mixers.info(n).recurrent]
HYBRIDS = ["gated_deltanet*3, softmax", "mamba2, softmax"]
GROUPS = [", ".join(RECURRENT[i::9]) for i in range(9)]  # one model has several mixers, since an engine takes half a minute to start
MIXED = ["gla, mamba2, rwkv7, softmax", "rwkv7, rwkv_channel"]
PUBLISHED = ["rwkv", "rwkv6", "rwkv7", "gla", "retnet", "delta_net", "gated_deltanet", "kda", "hgrn2", "xlstm", "recurrent_gemma"]
VOCABULARY, NEW = 64, 12


def made(mixer: str, seed: int = 0, **options) -> LinattnForCausalLM:
    torch.manual_seed(seed)
    layers = options.pop("layers", max(2, 4 * ("softmax" in mixer), mixer.count(",") + 1))
    return LinattnForCausalLM(LMConfig(vocab_size=VOCABULARY, dim=32, layers=layers, mixer=mixer, **options)).eval()


def alone(model, ids: list[int], count: int = NEW) -> list[int]:
    return list(stream(model, torch.tensor(ids), max_new_tokens=count, temperature=0.0))


def greedy(count: int = NEW, **extra) -> vllm.SamplingParams:
    return vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, extra_args=extra or None)


@pytest.fixture
def serve(tmp_path):
    """Engines of folders, one at a time."""
    register()
    engines = []

    def start(folder, **options) -> vllm.LLM:
        engines.append(vllm.LLM(str(folder), **{
            "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64,
            "enforce_eager": True, "enable_prefix_caching": False, "disable_log_stats": False, **options,
        }))  # fmt: skip
        return engines[-1]

    yield start
    for llm in engines:
        llm.llm_engine.engine_core.shutdown()
    engines.clear()
    gc.collect()


def saved(model, folder) -> str:
    model.save_pretrained(folder)
    return str(folder)


def run(llm: vllm.LLM, prompts: list[list[int]], draw: random.Random, cancel: set[int] = frozenset()) -> dict[int, list[int]]:
    """Tokens of each prompt, with random arrivals; those in ``cancel`` are aborted after three tokens."""
    engine, waiting, found = llm.llm_engine, list(range(len(prompts))), {}
    while waiting or engine.has_unfinished_requests():
        while waiting and draw.random() < 0.5:
            n = waiting.pop(0)
            engine.add_request(str(n), {"prompt_token_ids": prompts[n]}, greedy())
        for out in engine.step():
            n = int(out.request_id.split("-")[0])
            found[n] = list(out.outputs[0].token_ids)
            if n in cancel and len(found[n]) >= 3 and not out.finished:
                engine.abort_request([str(n)])
    return found


def told(llm: vllm.LLM, prompt) -> dict[tuple[int, int], float]:
    """Logarithms of the probabilities of each new token, by its place."""
    asked = vllm.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=0)
    out = llm.generate([prompt], asked, use_tqdm=False)[0].outputs[0]
    return {(i, token): place[token].logprob for i, (token, place) in enumerate(zip(out.token_ids, out.logprobs, strict=True))}


def given(seed: int = 0, sizes=(1, 5, 150, 40, 3, 90, 17, 64, 65, 2)) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(n)] for n in sizes]


def metric(llm: vllm.LLM, name: str) -> float:
    return sum(m.value for m in llm.get_metrics() if m.name == name)


@pytest.mark.parametrize("mixer", [*GROUPS, *HYBRIDS, *MIXED])
def test_tokens_equal_generation(mixer, serve, tmp_path):
    """Four rows for ten prompts, two of them aborted; pieces of at most 64 tokens of all prompts."""
    model, prompts = made(mixer), given()
    found = run(serve(saved(model, tmp_path / "model")), prompts, random.Random(1), cancel={2, 4})
    for n, ids in enumerate(prompts):
        assert found[n] == alone(model, ids)[: len(found[n])] and (len(found[n]) == NEW or n in (2, 4))


@pytest.mark.parametrize("mixer", ["gla", "gated_deltanet", "rwkv7", "mamba2", "gated_deltanet*3, softmax"])
def test_cached_prefixes_change_no_token(mixer, serve, tmp_path):
    model, draw = made(mixer), random.Random(3)
    llm = serve(saved(model, tmp_path / "model"), enable_prefix_caching=True, block_size=32)
    head = given(5, (160,))[0]
    prompts = [head + rest for rest in given(6, (1, 30, 9, 40))]
    for ids in (prompts[0], *prompts, *prompts):
        out = llm.generate([{"prompt_token_ids": ids}], greedy(), use_tqdm=False)[0]
        assert list(out.outputs[0].token_ids) == alone(model, ids)
    assert metric(llm, "vllm:prefix_cache_hits") >= 128
    before = metric(llm, "vllm:prefix_cache_hits")
    salted = {"prompt_token_ids": given(7, (180,))[0], "cache_salt": "one"}
    for salt, hits in (("one", False), ("two", False), ("one", True)):  # users do not share cached prefixes
        llm.generate([salted | {"cache_salt": salt}], greedy(), use_tqdm=False)
        now = metric(llm, "vllm:prefix_cache_hits")
        assert (now > before) == hits
        before = now
    for n, ids in enumerate(prompts):
        cold, warm = (told(llm, {"prompt_token_ids": ids, "cache_salt": salt}) for salt in (f"cold {n}", f"cold {n}"))
        assert cold.keys() == warm.keys() and max(abs(cold[key] - warm[key]) for key in cold) <= 1e-5
    assert run(llm, prompts, draw) == {n: alone(model, ids) for n, ids in enumerate(prompts)}


@pytest.mark.parametrize("mixer", ["gla", "gated_deltanet*3, softmax"])
def test_preempted_sequences_have_equal_tokens(mixer, serve, tmp_path):
    model, prompts = made(mixer), given(2, (20, 25, 28, 30, 22, 27))
    blocks = 4 if mixer == "gla" else 24
    llm = serve(saved(model, tmp_path / "model"), enable_prefix_caching=True, block_size=32, num_gpu_blocks_override=blocks)
    outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy(100), use_tqdm=False)
    assert metric(llm, "vllm:num_preemptions") > 0
    for ids, out in zip(prompts, outs, strict=True):
        assert list(out.outputs[0].token_ids) == alone(model, ids, 100)


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_families_that_vllm_does_not_know(model_type, serve, tmp_path):
    """Folders in the published format, as written by `linattn export`, of a new model of the family."""
    model, prompts = published(model_type), given(3, (1, 40, 7, 90))
    export(model, model_type, tmp_path / "model")
    found = run(serve(tmp_path / "model"), prompts, random.Random(2))
    assert found == {n: alone(model, ids) for n, ids in enumerate(prompts)}


def published(model_type: str) -> LinattnForCausalLM:
    from tests.serve.families import small

    return small(model_type)


def test_a_state_continues_where_another_request_ended(serve, tmp_path, monkeypatch):
    monkeypatch.setenv(states.VARIABLE, str(tmp_path))
    model, (first, second) = made("gated_deltanet"), given(4, (37, 5))
    llm = serve(saved(model, tmp_path / "model"))

    def ask(ids, **extra):
        return list(llm.generate([{"prompt_token_ids": ids}], greedy(**extra), use_tqdm=False)[0].outputs[0].token_ids)

    told = ask(first, **{states.SAVE: "one"})
    llm.llm_engine.step()
    again = ask([told[-1], *second], **{states.LOAD: "one", states.SAVE: "two"})
    assert told == alone(model, first) and again == alone(model, [*first, *told, *second])
    assert ask([told[-1], *second]) != again
    llm.llm_engine.step()
    states.ROWS.remove(0)
    two = states.read("two")
    read = torch.tensor([[*first, *told, *second, *again[:-1]]])
    with torch.no_grad():
        wanted = model.model(read, return_state=True)[1]
    for a, b in zip(two.layers, wanted.layers, strict=True):
        assert all(torch.allclose(a[k], b[k], atol=1e-5) for k in a)
    with pytest.raises(Exception, match="there is no state 'three'"):  # vLLM's own class
        ask(second, **{states.LOAD: "three"})


def test_states_beside_a_prefix_cache_are_refused(serve, tmp_path, monkeypatch):
    monkeypatch.setenv(states.VARIABLE, str(tmp_path))
    with pytest.raises(ValueError, match="needs --no-enable-prefix-caching"):
        serve(saved(made("gla"), tmp_path / "model"), enable_prefix_caching=True)
    with pytest.raises(ValueError, match="softmax layers"):
        serve(saved(made(HYBRIDS[0]), tmp_path / "hybrid"))
