"""vLLM's OpenAI server in a process of its own, for demonstrations, tests and measurements."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HOST = "127.0.0.1"
QUIET = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class Server:
    """Address of a running server, its key and its process."""

    port: int
    key: str
    process: subprocess.Popen[bytes]

    def open(self, path: str, body: bytes | None = None, *, key: str | None = None, timeout: float = 120) -> http.client.HTTPResponse:
        """Send a request and return the streaming response; ``key`` replaces the server's key."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout)
        headers = {"Authorization": f"Bearer {self.key if key is None else key}", "Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, body, headers)
        return connection.getresponse()

    def ask(self, content: Mapping[str, Any], path: str = "/v1/completions", *, key: str | None = None) -> tuple[int, Any]:
        """Send a request; returns the status and content of the response."""
        answer = self.open(path, json.dumps(content).encode(), key=key)
        text = answer.read()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text.decode(errors="replace")

    def stream(self, content: Mapping[str, Any]) -> Iterator[str]:
        """Stream the text of a completion.

        Raises:
            RuntimeError: if the server refuses.
        """
        answer = self.open("/v1/completions", json.dumps({**content, "stream": True}).encode())
        if answer.status != 200:
            raise RuntimeError(f"the server answered {answer.status}: {answer.read().decode(errors='replace')}")
        for line in answer:
            data = line.removeprefix(b"data: ").strip()
            if data and data != b"[DONE]":
                yield json.loads(data)["choices"][0]["text"]

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name, summed over their labels."""
        found: dict[str, float] = {}
        for line in self.open("/metrics").read().decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.split("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found


@contextmanager
def serving(folder: str | os.PathLike[str], *options: str, states: Path | None = None, log: IO[bytes] | None = None) -> Iterator[Server]:
    """Serve ``folder`` on a free port of this machine under the name ``model``, with a new key, until the block ends.

    Args:
        folder: folder of a model.
        options: further options of ``vllm serve``.
        states: folder of the state files that requests may name.
        log: destination of the server's output; None: that of this process.

    Raises:
        RuntimeError: if the server exits before it responds.
    """
    with socket.socket() as found:
        found.bind((HOST, 0))
        port = found.getsockname()[1]
    key = secrets.token_urlsafe(24)
    environment = {**QUIET, **os.environ, "VLLM_API_KEY": key} | ({} if states is None else {"LINATTN_STATES": str(states)})
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "model"]
    command += ["--host", HOST, "--port", str(port), *options]
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        server = Server(port, key, process)
        _wait(server)
        yield server
    finally:
        _end(process)


def _wait(server: Server, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended with {server.process.returncode} before it answered: see its output")
        try:
            if server.open("/health", timeout=5).status == 200:
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the server did not answer within {seconds:.0f} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and the processes that it started."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
            process.wait(30)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
