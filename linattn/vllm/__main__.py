"""``python -m linattn.vllm FOLDER [PROMPT]``: serve a model by vLLM on this machine, stream the answer to one prompt, and stop."""

from __future__ import annotations

import argparse
import time

from linattn.vllm.server import serving


def main() -> None:
    """Start the server, stream one answer, stop the server."""
    parser = argparse.ArgumentParser(prog="python -m linattn.vllm", description=__doc__)
    parser.add_argument("folder", help="of a model, as save_pretrained, export and train write it")
    parser.add_argument("prompt", nargs="?", default="def main(")
    parser.add_argument("--tokens", type=int, default=120, help="tokens of the answer")
    given = parser.parse_args()
    print(f"vllm serve {given.folder} is starting, which takes a minute or two ...", flush=True)
    begun = time.monotonic()
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--uvicorn-log-level", "warning"]
    with serving(given.folder, *options) as server:
        print(f"http://127.0.0.1:{server.port}/v1 answers after {time.monotonic() - begun:.0f} s; without its key: ", end="")
        print(server.ask({"model": "model", "prompt": "x", "max_tokens": 1}, key="none")[0], flush=True)
        print(given.prompt, end="", flush=True)
        asked = {"model": "model", "prompt": given.prompt, "max_tokens": given.tokens, "temperature": 0.7, "seed": 1}
        for piece in server.stream(asked):
            print(piece, end="", flush=True)
        print()


if __name__ == "__main__":
    main()
