"""The hub, played by a server on this machine with the few routes that a download needs; and without any network."""

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.errors import DownloadError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from quire.weights.checkpoint import open_checkpoint
from quire.weights.hub import HubSource, fetch_from_hub, is_offline, parse_hub_id
from quire.weights.model_cache import list_cached, remove_cached
from quire.weights.sources import resolve_source

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = b'{"architectures": ["LlamaForCausalLM"]}'


@dataclass
class FakeHub:
    """Files of `org/model`, and what was asked for."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    status: int = 200
    error_code: str = ""
    fetched: list[str] = field(default_factory=list)
    requests: int = 0


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        hub = self.hub
        hub.requests += 1
        path = self.path.split("?")[0]
        if hub.status != 200:
            self.reply(hub.status, b"{}", {"X-Error-Code": hub.error_code, "X-Error-Message": "refused"}, body=body)
        elif path.startswith("/api/models/org/model/tree/"):
            tree = [self.tree_entry(name, content) for name, content in hub.files.items()]
            self.reply(200, json.dumps(tree).encode(), {}, body=body)
        elif path in ("/api/models/org/model", "/api/models/org/model/revision/main"):
            siblings = [{"rfilename": name} for name in hub.files]
            info = {"id": "org/model", "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
            self.reply(200, json.dumps(info).encode(), {}, body=body)
        elif path.startswith("/api/models/org/model/revision/"):
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body=body)
        elif path.startswith("/org/model/resolve/"):
            name = path.split("/", 5)[5]
            content = hub.files[name]
            if body:
                hub.fetched.append(name)
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self.reply(200, content, {"ETag": etag, "X-Repo-Commit": COMMIT}, body=body)
        else:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)

    @staticmethod
    def tree_entry(name: str, content: bytes) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def reply(self, status: int, content: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(empty_caches: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import constants

    handler = type("BoundHandler", (Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    fake = FakeHub(f"http://127.0.0.1:{server.server_port}")
    handler.hub = fake
    monkeypatch.setattr(constants, "ENDPOINT", fake.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", fake.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield fake
    server.shutdown()
    server.server_close()
    thread.join()


def make_snapshot(cache: Path, files: dict[str, bytes], repository: str = "org/model") -> Path:
    folder = cache / ("models--" + repository.replace("/", "--"))
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    for name, content in files.items():
        (snapshot / name).write_bytes(content)
    return snapshot


def test_quantisation_chooses_a_gguf_file_of_a_repository(hub: FakeHub) -> None:
    hub.files = {"config.json": CONFIG, "model.safetensors": b"x", "m-Q4_K_M.gguf": b"a", "sub/m.q8_0.gguf": b"b"}
    assert resolve_source("org/model:q4_k_m").path.read_bytes() == b"a"
    files = resolve_source("org/model:Q8_0@main")
    assert (files.path.read_bytes(), files.kind) == (b"b", "gguf")
    assert hub.fetched == ["m-Q4_K_M.gguf", "sub/m.q8_0.gguf"]
    assert resolve_source("org/model:Q8_0", offline=True).path == files.path
    with pytest.raises(DownloadError, match="run `quire pull org/other:Q8_0` once"):
        resolve_source("org/other:Q8_0", offline=True)
    with pytest.raises(ModelNotFoundError, match=r"no GGUF file with Q5_0 in its name; it has m-Q4_K_M.gguf, sub/m"):
        resolve_source("org/model:Q5_0")


def test_only_files_that_quire_reads_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    hub.files = {
        "config.json": CONFIG, "model.safetensors": bytes(100_000), "tokenizer.json": b"{}",
        "chat_template.jinja": b"x", "generation_config.json": b"{ }", "pytorch_model.bin": b"pickle",
        "modeling_custom.py": b"code", "consolidated.safetensors": b"twice", "original/params.json": b"{}",
        "onnx/model.safetensors": b"other",
        "README.md": b"text",
    }  # fmt: skip
    seen: list[tuple[str, int, int | None]] = []
    files = resolve_source("org/model", progress=lambda *report: seen.append(report))
    assert files.kind == "hf"
    assert files.origin == f"hub:org/model@{COMMIT}"
    assert (files.path / "model.safetensors").read_bytes() == bytes(100_000)
    assert sorted(hub.fetched) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert tmp_path / "hub" in files.path.parents
    assert max(done for _, done, _ in seen) >= 100_000

    hub.fetched.clear()
    assert resolve_source("org/model").path == files.path
    assert hub.fetched == []
    hub.requests = 0
    assert resolve_source("org/model", offline=True).path == files.path
    assert hub.requests == 0

    (cached,) = list_cached()
    assert (cached.name, cached.path) == ("org/model", files.path)
    assert cached.size_bytes >= 100_000
    remove_cached("org/model")
    assert list_cached() == []


def test_only_gguf_of_a_repository(hub: FakeHub) -> None:
    hub.files = {"README.md": b"", "model-q4.gguf": b"GGUF" + bytes(500), "config.json": CONFIG}
    files = resolve_source("org/model")
    assert (files.kind, files.path.name) == ("gguf", "model-q4.gguf")
    assert hub.fetched == ["model-q4.gguf"]
    assert resolve_source("org/model", offline=True).path == files.path


def test_several_ggufs_need_a_choice(hub: FakeHub) -> None:
    hub.files = {"q4.gguf": b"GGUF4", "q8.gguf": b"GGUF8"}
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF files.*org/model/FILE: q4\.gguf, q8\.gguf"):
        resolve_source("org/model")
    files = resolve_source("org/model/q8.gguf")
    assert files.path.read_bytes() == b"GGUF8"
    assert hub.fetched == ["q8.gguf"]
    with pytest.raises(ModelNotFoundError, match=r"q9\.gguf"):
        resolve_source("org/model/q9.gguf")


def test_all_parts_of_a_split_gguf_are_fetched(hub: FakeHub) -> None:
    parts = [f"q8-0000{number}-of-00002.gguf" for number in (1, 2)]
    hub.files = {name: b"GGUF" + name.encode() for name in parts}
    assert resolve_source("org/model").path.name == parts[0]
    assert sorted(hub.fetched) == parts
    hub.files |= {"q4.gguf": b"GGUF4"}
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF files.*: q4\.gguf, q8-00001-of-00002\.gguf"):
        resolve_source("org/model")
    assert resolve_source(f"org/model/{parts[1]}").path.name == parts[1]


def test_pickles_are_not_fetched(hub: FakeHub) -> None:
    hub.files = {"config.json": CONFIG, "pytorch_model.bin": b"pickle"}
    with pytest.raises(UnsupportedModelError, match="pickles"):
        resolve_source("org/model")
    hub.files = {"README.md": b""}
    with pytest.raises(ModelNotFoundError, match="neither safetensors nor GGUF"):
        resolve_source("org/model")
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("status", "code", "error", "message"),
    [
        (404, "RepoNotFound", ModelNotFoundError, "no model 'org/model'.*no local file"),
        (401, "RepoNotFound", ModelNotFoundError, "log in"),
        (403, "GatedRepo", DownloadError, "gated.*HF_TOKEN"),
        (403, "", DownloadError, "refused"),
    ],
)
def test_refusals(hub: FakeHub, status: int, code: str, error: type[Exception], message: str) -> None:
    hub.status, hub.error_code = status, code
    with pytest.raises(error, match=message) as caught:
        resolve_source("org/model")
    assert "\n" not in str(caught.value)


def test_revisions(hub: FakeHub) -> None:
    hub.files = {"config.json": CONFIG, "model.safetensors": b"x"}
    for name, revision in (("org/model@nope", None), ("org/model", "nope")):
        with pytest.raises(ModelNotFoundError, match="no revision 'nope'"):
            resolve_source(name, revision=revision)
    assert resolve_source("org/model@main").kind == "hf"


def test_without_a_network_the_cache_is_used(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="cannot be reached") as caught:
        resolve_source("org/model")
    assert "\n" not in str(caught.value)
    snapshot = make_snapshot(tmp_path / "hub", {"config.json": CONFIG, "model.safetensors": b"x"})
    assert resolve_source("org/model").path == snapshot


class TestOffline:
    @pytest.fixture(autouse=True)
    def offline(self, empty_caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def test_cached_directory(self, tmp_path: Path) -> None:
        snapshot = make_snapshot(tmp_path / "hub", {"config.json": CONFIG, "model.safetensors": b"x"})
        for name in ("org/model", "org/model@main", f"org/model@{COMMIT}"):
            files = resolve_source(name)
            assert (files.path, files.kind, files.origin) == (snapshot, "hf", f"hub:org/model@{COMMIT}")

    def test_cached_gguf(self, tmp_path: Path) -> None:
        snapshot = make_snapshot(tmp_path / "hub", {"a.gguf": b"GGUF", "b.gguf": b"GGUF"})
        assert resolve_source("org/model/a.gguf").path == snapshot / "a.gguf"
        with pytest.raises(ModelNotFoundError, match="choose one"):
            resolve_source("org/model")

    def test_damaged_file_names_the_commands_that_fetch_it_again(self, tmp_path: Path) -> None:
        make_snapshot(tmp_path / "hub", {"config.json": CONFIG, "model.safetensors": bytes(100)})
        for name in ("org/model", f"org/model@{COMMIT}"):
            with pytest.raises(ModelFileError, match=r"`quire rm org/model`, then `quire pull org/model`$"):
                open_checkpoint(resolve_source(name))

    def test_uncached_model_names_quire_pull(self, tmp_path: Path) -> None:
        with pytest.raises(DownloadError, match=r"offline mode.*quire pull org/model") as caught:
            resolve_source("org/model")
        assert "\n" not in str(caught.value)
        make_snapshot(tmp_path / "hub", {"tokenizer.json": b"{}"})
        with pytest.raises(
            ModelFileError, match=r"'org/model' in .* holds no model: .* run `quire pull org/model` once"
        ):
            resolve_source("org/model")

    def test_environment_is_read_at_each_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert is_offline()
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        assert not is_offline()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", HubSource("org/name")),
        ("Qwen/Qwen2.5-0.5B", HubSource("Qwen/Qwen2.5-0.5B")),
        ("org/name@v1.0", HubSource("org/name", revision="v1.0")),
        ("org/name@refs/pr/1", HubSource("org/name", revision="refs/pr/1")),
        ("org/name/q4.gguf@main", HubSource("org/name", "q4.gguf", "main")),
        ("org/name-GGUF/sub/q4.gguf", HubSource("org/name-GGUF", "sub/q4.gguf")),
        ("org/name:Q4_K_M", HubSource("org/name", quantization="Q4_K_M")),
        ("org/name:q8_0@main", HubSource("org/name", revision="main", quantization="q8_0")),
        ("org/name/q4.gguf:Q4_0", None),
        ("org/name:", None),
        ("name", None),
        ("a/b/c", None),
        ("org/../x", None),
        ("org/name/../../x.gguf", None),
        ("org/na me", None),
        ("org/name@", None),
        (".org/name", None),
        ("org/name\n", None),
    ],
)
def test_forms(name: str, expected: HubSource | None) -> None:
    assert parse_hub_id(name) == expected


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("first line\nsecond line"), "first line; try again"),
        (OSError(28, "No space left on device", "blobs/x"), r"No space left on device.*HF_HUB_CACHE"),
    ],
)
def test_failure_of_a_download_is_a_typed_error(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    hub.files = {"model.safetensors": b""}
    with pytest.raises(DownloadError, match=message):
        fetch_from_hub(HubSource("org/model"))
