"""Sleep, and several models in one server, with real engines."""

import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server_process import ServerProcess, quire_serve
from tests.cli.tiny_directory import make_tiny_directory
from tests.processes import wait_for_end
from tests.server.serving import CHAT, LIMIT_S, RunningChat, Serving, serving
from tests.server.test_run import engines

SLOW = {"QUIRE_FAULTS": "slow-step:ms=30"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_directory(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def several(directory: Path) -> Iterator[Serving]:
    """Serve two names of one model, with memory for one at a time."""
    server = Several(directory, "--models-memory-bytes", "100MiB", "--kv-cache-memory-bytes", "1MiB")
    yield server
    server.kill()


class Several(Serving):
    def __init__(self, model: Path, *arguments: str, **environment: str) -> None:
        models = f"a={model}", f"b={model}"
        ServerProcess.__init__(self, [*quire_serve(*models, *arguments, name=None)], environment)

    def text(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=LIMIT_S) as response:
            return response.read().decode()

    def states(self) -> dict[str, str]:
        """Return the status of each model: "loaded", "unloaded" …"""
        return {card["id"]: card["status"]["value"] for card in self.request("/v1/models")[1]["data"]}


def test_asleep_server_has_no_engine_and_names_wake_up(directory: Path) -> None:
    with serving(directory, **SLOW) as server:
        running = RunningChat(server, 40)
        assert server.request("/sleep?level=3", {})[1]["error"]["param"] == "level"
        assert server.request("/is_sleeping")[1] == {"is_sleeping": False}
        assert server.request("/sleep?level=2", {}) == (200, {"is_sleeping": True})
        assert running.events()[-1]["usage"]["completion_tokens"] == 40, "running requests end first"
        assert engines(server.process.pid) == []
        assert server.request("/is_sleeping")[1] == {"is_sleeping": True}
        status, body = server.chat(1)
        assert (status, body["error"]["code"]) == (503, "model_asleep")
        assert "/wake_up" in body["error"]["message"]
        assert (server.get("/health/live"), server.get("/health/ready")) == (200, 503)
        assert server.request("/tokenize", {"prompt": "hi"})[1]["count"] == 2
        assert server.request("/v1/models")[1]["data"][0]["status"] == {"value": "sleeping"}
        assert server.request("/sleep", {}) == (200, {"is_sleeping": True})
        assert server.request("/wake_up?tags=weights", {})[1]["error"]["param"] == "tags"
        for _ in range(2):
            assert server.request("/wake_up", {}) == (200, {"is_sleeping": False})
        assert server.chat(3)[1]["usage"]["completion_tokens"] == 3
        killed = server.engine()
        killed.kill()
        killed.wait()
        server.wait_for_other_engine(killed.pid)  # an engine that woke up is watched too
        assert server.chat(1)[0] == 200


def test_refused_request_loads_no_model(several: Several) -> None:
    wrong, long = {**CHAT, "model": "b", "max_tokens": -1}, {"model": "b", "prompt": "x" * 5000, "max_tokens": 1}
    assert several.request("/v1/chat/completions", wrong)[1]["error"]["param"] == "max_tokens"
    assert several.states() == {"a": "loaded", "b": "unloaded"}
    assert several.request("/tokenize", {"model": "b", "prompt": "x"})[0] == 200  # needs its tokenizer, which stays
    assert several.request("/wake_up?model=a", {})[0] == 200
    assert several.request("/v1/completions", long)[1]["error"]["code"] == "context_length_exceeded"
    assert several.states() == {"a": "loaded", "b": "unloaded"}
    assert several.stderr.count(": loaded b") == 1


def test_model_of_a_request_is_loaded_within_the_budget(several: Several) -> None:
    assert several.states() == {"a": "loaded", "b": "unloaded"}
    for name, loaded in (("b", "b"), ("a", "a"), ("a", "a")):
        status, body = several.request("/v1/chat/completions", {**CHAT, "model": name, "max_tokens": 2})
        assert (status, body["model"]) == (200, name)
        assert several.states() == {"a": "unloaded", "b": "unloaded"} | {loaded: "loaded"}
        assert len(engines(several.process.pid)) == 1
    body = several.request("/v1/embeddings", {"input": "hi"})[1]
    assert body["model"] == "a", "the first model is the default"


def test_unknown_model_is_a_404_that_lists_the_models(several: Several) -> None:
    status, body = several.request("/v1/chat/completions", {**CHAT, "model": "c"})
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert body["error"]["message"] == 'the model "c" does not exist; this server has "a", "b"'
    assert several.request("/v1/chat/completions", {"model": 1})[1]["error"]["param"] == "model"


def test_health_and_metrics_tell_models_apart(several: Several) -> None:
    several.request("/v1/completions", {"model": "b", "prompt": "x", "max_tokens": 1})
    assert several.get("/health?model=b") == 200
    assert several.get("/health?model=a") == 503
    text = several.text("/metrics")
    up = dict(re.findall(r'quire_engine_up\{model="(.)"\} (\S+)', text))
    assert up == {"a": "0.0", "b": "1.0"}
    assert 'quire_requests_running{model="b"}' in text


def test_live_view_is_that_of_the_model_it_names(several: Several) -> None:
    several.request("/v1/completions", {"model": "b", "prompt": "x", "max_tokens": 1})
    with urllib.request.urlopen(several.url + "/xray/events?model=b", timeout=LIMIT_S) as events:
        assert b'"quire_trace":1' in events.readline()
    for name, status, code in (("a", 503, "model_not_loaded"), ("c", 404, "model_not_found")):
        found, body = several.request(f"/xray/events?model={name}")
        assert (found, body["error"]["code"]) == (status, code)


def test_keep_alive_and_sleep_unload_and_the_next_request_loads(several: Several) -> None:
    body = {"model": "a", "prompt": "x", "max_tokens": 1}
    assert several.request("/v1/completions", {**body, "keep_alive": "soon"})[1]["error"]["param"] == "keep_alive"
    several.request("/v1/completions", {**body, "keep_alive": 0})
    several.wait_until("/health?model=a", 503)
    assert several.request("/tokenize", {"model": "a", "prompt": "hi"})[1]["count"] == 2
    assert several.states()["a"] == "unloaded", "its tokenizer stays"
    assert several.request("/wake_up", {})[1]["error"]["param"] == "model"
    assert several.request("/wake_up?model=a", {})[0] == 200
    assert several.states()["a"] == "loaded"
    assert several.request("/sleep?model=a", {})[0] == 200
    assert several.request("/is_sleeping")[1] == {"is_sleeping": True}
    assert several.get("/health") == 200, "requests wake it up"
    assert several.request("/v1/completions", body)[0] == 200


def test_served_alone_with_keep_alive_a_model_is_loaded_on_demand(directory: Path) -> None:
    with serving(directory, "--keep-alive", "0") as server:
        assert server.chat(1)[0] == 200
        server.wait_until("/health?model=tiny", 503)
        wait_for_end(*engines(server.process.pid))
        assert engines(server.process.pid) == []
        assert server.chat(1)[0] == 200
        server.wait_until("/health?model=tiny", 503)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "Traceback" not in server.stderr
