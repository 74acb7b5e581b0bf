"""The OpenAI endpoint of a small model: keys, a full queue, disconnecting clients, state files, and a thousand requests with faults.

Runs where vLLM is installed: `make test-serve`. One server for all tests; it takes a minute or two to start.
"""

import json
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from linattn.data.codec import ByteCodec
from linattn.generate import stream
from linattn.hf import LinattnForCausalLM, LMConfig
from linattn.hf.tokenizer import tokenizer_of
from linattn.vllm import states
from linattn.vllm.server import HOST, serving

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-serve runs these in an environment of their own")
pytestmark = pytest.mark.filterwarnings("default")  # from vLLM's dependencies

ROWS, QUEUE, LENGTH = 4, 12, 512
OPTIONS = ["--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching", "--max-num-batched-tokens", "128"]
OPTIONS += ["--max-model-len", str(LENGTH), "--max-num-seqs", str(ROWS), "--max-num-queued-reqs", str(QUEUE)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LinattnForCausalLM(LMConfig(vocab_size=256, dim=32, layers=2, mixer="gated_deltanet")).eval()


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    model.save_pretrained(folder / "model")
    tokenizer_of(ByteCodec()).save_pretrained(folder / "model")
    (folder / "states").mkdir()
    with (folder / "log").open("wb") as log:
        with serving(folder / "model", *OPTIONS, states=folder / "states", log=log) as running:
            yield running
        print((folder / "log").read_text()[-2000:])


def asked(ids, count: int = 8, **more) -> dict:
    return {"model": "model", "prompt": ids, "max_tokens": count, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True, **more}


def tokens_of(answer) -> list[int]:
    return answer["choices"][0]["token_ids"]


def alone(model, ids, count: int = 8) -> list[int]:
    return list(stream(model, torch.tensor(ids), max_new_tokens=count, temperature=0.0))


def idle(server, seconds: float = 20) -> bool:
    """True once nothing runs or waits."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        now = server.metrics()
        if now["vllm:num_requests_running"] == now["vllm:num_requests_waiting"] == 0:
            return True
        time.sleep(0.1)
    return False


def test_without_the_key_nothing_is_answered(server):
    assert server.ask(asked([1, 2]), key="wrong")[0] == 401
    assert server.ask(asked([1, 2]))[0] == 200


def test_tokens_and_texts(server, model):
    status, answer = server.ask(asked(list(b"def main(")))
    assert status == 200 and tokens_of(answer) == alone(model, list(b"def main("))
    pieces = list(server.stream(asked("def main(", 8)))
    assert "".join(pieces) == answer["choices"][0]["text"] and len(pieces) > 1


def test_a_full_queue_is_503(server):
    with ThreadPoolExecutor(40) as pool:
        statuses = [status for status, _ in pool.map(server.ask, [asked([n], 200) for n in range(40)])]
    assert set(statuses) == {200, 503} and statuses.count(200) >= QUEUE
    assert idle(server)


def leave(server, ids, after: int = 1) -> None:
    """Request a stream and disconnect after a few lines."""
    body = json.dumps(asked(ids, 400, stream=True)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {server.key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((HOST, server.port), timeout=30) as connection:
        connection.sendall(head.encode() + body)
        for _ in range(after):
            connection.recv(64)


def test_clients_that_go_away_free_their_rows(server, model):
    for n in range(3 * ROWS):
        leave(server, [n])
    assert idle(server, 10)
    assert tokens_of(server.ask(asked([7, 7]))[1]) == alone(model, [7, 7])


def test_a_state_goes_out_and_comes_back(server, model):
    first, second = list(b"The quick brown fox"), list(b" jumps")
    told = tokens_of(server.ask(asked(first, vllm_xargs={states.SAVE: "fox"}))[1])
    answer = server.ask(asked([told[-1], *second], vllm_xargs={states.LOAD: "fox", states.SAVE: "fox-2"}))[1]  # at once
    assert tokens_of(answer) == alone(model, [*first, *told, *second])
    third = server.ask(asked([tokens_of(answer)[-1]], vllm_xargs={states.LOAD: "fox-2"}))[1]
    assert tokens_of(third) == alone(model, [*first, *told, *second, *tokens_of(answer)])


@pytest.mark.parametrize("name", ["nobody", "../model/model", "a/b", "/etc/passwd", "", "x" * 200])
def test_unknown_states_and_paths_are_400(server, name):
    status, answer = server.ask(asked([1], vllm_xargs={states.LOAD: name}))
    assert status == 400 and ("there is no state" in str(answer) or "a state's name must be" in str(answer))


FAULTS = {
    "long": lambda draw: asked([1] * (LENGTH + 5)),
    "token": lambda draw: asked([99_999]),
    "count": lambda draw: asked([1], -3),
    "model": lambda draw: asked([1], model="other"),
    "state": lambda draw: asked([1], vllm_xargs={states.LOAD: f"none-{draw.random()}"[:20].replace(".", "")}),
    "key": lambda draw: asked([1], vllm_xargs={"linattn_x": "1"}),
}


def test_a_thousand_requests_of_random_shape_with_faults(server, model):
    """Every valid request gets its tokens, each fault its error, and all rows are freed."""
    draw, gate, results = random.Random(0), threading.Semaphore(QUEUE), []
    wanted = {}

    def one(n: int) -> None:
        own = random.Random(n)
        with gate:
            kind = own.choice([*FAULTS, "json", "gone", *["good"] * 20])
            if kind == "gone":
                leave(server, [own.randrange(256) for _ in range(own.randrange(1, 300))], own.randrange(3))
                results.append((n, kind, 200, None))
            elif kind == "json":
                results.append((n, kind, server.open("/v1/completions", b'{"model": ').status, None))
            elif kind != "good":
                results.append((n, kind, *server.ask(FAULTS[kind](own))))
            else:
                ids, count = PROMPTS[n % len(PROMPTS)], own.randrange(1, 9)
                while True:
                    status, answer = server.ask(asked(ids, count))
                    if status != 503:  # disconnected clients may still count
                        break
                    time.sleep(0.05)
                results.append((n, kind, status, tokens_of(answer) == wanted[n % len(PROMPTS)][:count]))

    PROMPTS = [[draw.randrange(256) for _ in range(draw.choice((1, 3, 20, 150, 400)))] for _ in range(40)]
    wanted |= {i: alone(model, ids) for i, ids in enumerate(PROMPTS)}
    with ThreadPoolExecutor(2 * QUEUE) as pool:
        list(pool.map(one, range(1000)))
    assert len(results) == 1000
    assert [r for r in results if r[1] == "good" and r[2:] != (200, True)] == []
    assert {r[2] for r in results if r[1] not in ("good", "gone")} <= {400, 404, 422, 503}
    assert idle(server) and server.process.poll() is None
    assert tokens_of(server.ask(asked([1, 2, 3]))[1]) == alone(model, [1, 2, 3])
