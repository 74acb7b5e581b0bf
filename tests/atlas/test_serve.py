"""The server shows the site on 127.0.0.1 and nothing else."""

import http.client
import threading
from contextlib import contextmanager

import pytest

from linattn.atlas.serve import server
from linattn.cli.main import main


@contextmanager
def running(folder):
    with server(folder, 0) as s:
        thread = threading.Thread(target=s.serve_forever)
        thread.start()
        try:
            yield s.server_address
        finally:
            s.shutdown()
            thread.join()


def get(address, path, method="GET", host=None):
    connection = http.client.HTTPConnection(*address)
    connection.putrequest(method, path, skip_host=host is not None)
    if host:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.getheader("Content-Type"), body


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    root = tmp_path / "site"
    (root / "systems").mkdir(parents=True)
    (root / "index.html").write_text("first")
    (root / "systems" / "index.html").write_text("systems")
    (root / "link.txt").symlink_to(tmp_path / "secret.txt")
    (root / "up").symlink_to(tmp_path)
    (root / "bare").mkdir()
    return root


def test_pages_are_served_on_this_machine_alone(folder):
    with running(folder) as address:
        assert address[0] == "127.0.0.1"
        assert get(address, "/") == (200, "text/html", b"first")
        assert get(address, "/systems/?lang=zh")[2] == b"systems"
        assert get(address, "/", "HEAD")[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/../secret.txt", "/%2e%2e/secret.txt", "/systems/../../secret.txt", "/link.txt", "/up/secret.txt", "//secret.txt", "/bare/", "/none",
     "/%00", "/" + "x" * 5000, "/systems/index.html/..%2f..%2f..%2fsecret.txt", "/..%5csecret.txt", "*"],
)  # fmt: skip
def test_nothing_outside_is_there(folder, path):
    with running(folder) as address:
        status, _, body = get(address, path)
        assert status == 404 and b"secret" not in body.replace(path.encode(), b"")


def test_only_this_machine_s_own_names_are_answered(folder):
    with running(folder) as address:
        for host in ("localhost", "LOCALHOST:9000", f"127.0.0.1:{address[1]}", "[::1]:8000", ""):
            assert get(address, "/", host=host)[2] == b"first"
        for host in ("elsewhere.example", "localhost.elsewhere.example", "127.0.0.1.elsewhere.example:8000", "a@localhost", "localhost:x"):
            status, _, body = get(address, "/", host=host)
            assert status == 421 and b"first" not in body


def test_a_folder_without_an_atlas_is_refused(tmp_path, capsys):
    assert main(["atlas", "serve", str(tmp_path)]) == 2
    assert "is not an atlas" in capsys.readouterr().err
    assert main(["atlas", "build"]) == 2
    assert "needs a folder" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(folder, capsys):
    with running(folder) as (_, port):
        assert main(["atlas", "serve", str(folder), "--port", str(port)]) == 2
    assert f"port {port} of 127.0.0.1 is not available (Address already in use)" in capsys.readouterr().err


def test_the_door_builds(tmp_path, capsys):
    assert main(["atlas", "build", str(tmp_path / "x"), "--systems", "lstm"]) == 0
    told = capsys.readouterr()
    assert told.out.strip() == str(tmp_path / "x" / "index.html")
    assert told.err.splitlines() == ["inspecting 1 system", "a page for 1 system", "the cost of 1 system"]
    assert (tmp_path / "x" / "systems" / "lstm.html").is_file()
