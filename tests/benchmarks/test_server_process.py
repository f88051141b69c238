"""Starting, watching, stopping and ending a server. The servers are small scripts."""

import sys
import textwrap
import time

import psutil
import pytest

from benchmarks.server_process import ServerProcess

SERVER = """
    import http.server, os, sys
    server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler)
    print("key", os.environ.get("QUIRE_API_KEY"), os.environ.get("MINE"), file=sys.stderr)
    print(f"listening at http://127.0.0.1:{server.server_port}", file=sys.stderr, flush=True)
    server.serve_forever()
"""


def command(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *arguments]


def wait_until_stopped(server: ServerProcess, stopped: bool) -> None:
    """Signals take effect a moment later."""
    end_s = time.monotonic() + 60
    while (psutil.Process(server.process.pid).status() == psutil.STATUS_STOPPED) != stopped:
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_an_address_within_json() -> None:
    code = """
        import sys, time
        print('{"message": "serving m at http://127.0.0.1:80", "level": "INFO"}', file=sys.stderr, flush=True)
        print('{"message": "http://127.0.0.1:81"}', file=sys.stderr, flush=True)
        time.sleep(600)
    """
    server = ServerProcess(command(code))
    try:
        assert server.url == "http://127.0.0.1:80"
    finally:
        server.kill()


def test_a_server_that_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "the user's")
    server = ServerProcess(command(SERVER, "0"), {"MINE": "given"})
    try:
        assert server.is_running
        assert server.url.startswith("http://127.0.0.1:")
        assert server.stderr.startswith("key None given\n")
        assert server.start_s > 0
        server.pause()
        wait_until_stopped(server, True)
        server.resume()
        wait_until_stopped(server, False)
    finally:
        server.kill()
    assert not server.is_running
    assert server.processes() == []


def test_a_server_that_is_asked_whether_it_is_ready() -> None:
    first = ServerProcess(command(SERVER, "0"))
    url = first.url
    first.kill()
    server = ServerProcess(command(SERVER, url.rpartition(":")[2]), url=url, ready_path="/")
    server.kill()
    assert server.url == url


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:9"])
def test_a_server_that_ends_is_reported_with_its_last_words(url: str) -> None:
    with pytest.raises(RuntimeError, match=r"did not start(.|\n)*no such model"):
        ServerProcess(command("import sys; sys.exit('no such model')"), url=url)


def test_a_server_that_is_never_ready() -> None:
    with pytest.raises(RuntimeError, match="did not start"):
        ServerProcess(command("import time; time.sleep(60)"), start_s=0.2)
