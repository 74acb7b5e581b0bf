"""Show a built site on this machine alone."""

from __future__ import annotations

import posixpath
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit


class Handler(SimpleHTTPRequestHandler):
    """Files below one resolved root; what leads out of it, a link too, is not there. No lists of folders."""

    def send_head(self) -> Any:
        root = Path(self.directory).resolve()
        wanted = (root / posixpath.normpath(unquote(urlsplit(self.path).path)).lstrip("/")).resolve()
        if wanted.is_dir():
            wanted = (wanted / "index.html").resolve()
        if not wanted.is_relative_to(root) or not wanted.is_file():
            self.send_error(404)
            return None
        return self._send(wanted)

    def _send(self, path: Path) -> IO[bytes]:
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        self.send_header("Content-Length", str(path.stat().st_size))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        return path.open("rb")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class's name)
        """Say nothing of what was asked for."""


def server(folder: Path, port: int = 8000) -> ThreadingHTTPServer:
    """A server of ``folder`` on 127.0.0.1, not yet running; ``port`` 0 takes a free one.

    Raises:
        ValueError: where ``folder`` holds no index.html.
    """
    root = folder.resolve()
    if not (root / "index.html").is_file():
        raise ValueError(f"{folder} holds no atlas: linattn atlas build {folder} makes one")
    return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, directory=str(root)))


def serve(folder: Path, port: int = 8000) -> None:
    """Serve ``folder`` until interrupted."""
    with server(folder, port) as running:
        print(f"The atlas: http://127.0.0.1:{running.server_address[1]}/  (Ctrl-C ends it)", flush=True)
        running.serve_forever()
