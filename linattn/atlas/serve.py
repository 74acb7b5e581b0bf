"""Server of a built site, only for this machine."""

from __future__ import annotations

import posixpath
import re
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

OWN_NAME = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)  # with any port


class Handler(SimpleHTTPRequestHandler):
    """Handler of files below one resolved root; paths and links out of it are not found. No lists of folders.

    Foreign Host headers are rejected, against DNS rebinding.
    """

    def send_head(self) -> Any:
        if not OWN_NAME.fullmatch(self.headers.get("Host", "localhost")):
            self.send_error(421)
            return None
        try:
            return self._send(self._wanted())
        except (OSError, ValueError):  # including invalid paths
            self.send_error(404)
            return None

    def _wanted(self) -> Path:
        """Path of the requested file; raise OSError or ValueError if there is none."""
        root = Path(self.directory).resolve()
        wanted = (root / posixpath.normpath(unquote(urlsplit(self.path).path)).lstrip("/")).resolve()
        if wanted.is_dir():
            wanted = (wanted / "index.html").resolve()
        if not wanted.is_relative_to(root) or not wanted.is_file():
            raise FileNotFoundError(self.path)
        return wanted

    def _send(self, path: Path) -> IO[bytes]:
        content = path.open("rb")
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(str(path)))
        self.send_header("Content-Length", str(path.stat().st_size))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        return content

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class's name)
        """Suppress the log of requests."""


def server(folder: Path, port: int = 8000) -> ThreadingHTTPServer:
    """Make a server of ``folder`` on 127.0.0.1, not yet running; ``port`` 0 takes a free one.

    Raises:
        ValueError: if ``folder`` holds no index.html.
        OSError: if ``port`` is in use or not permitted.
    """
    root = folder.resolve()
    if not (root / "index.html").is_file():
        raise ValueError(f"{folder} is not an atlas; build one with linattn atlas build {folder}")
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, directory=str(root)))
    except OSError as error:
        raise OSError(f"port {port} of 127.0.0.1 is not available ({error.strerror}): name another, or 0 for a free one") from None


def serve(folder: Path, port: int = 8000) -> None:
    """Serve ``folder`` until interrupted."""
    with server(folder, port) as running:
        print(f"The atlas: http://127.0.0.1:{running.server_address[1]}/  (Ctrl-C ends it)", flush=True)
        running.serve_forever()
