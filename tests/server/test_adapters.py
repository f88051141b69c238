"""Adapters of a whole server: chosen by `model`, listed with their parent, loaded and unloaded while it runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters.builders import random_matrices, write_peft
from tests.cli.tiny_directory import make_tiny_directory
from tests.server.serving import Serving, serving

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_peft(tmp_path_factory.mktemp("adapters") / "one", random_matrices(directory, 1))


@pytest.fixture(scope="module")
def server(directory: Path, adapter: Path) -> Iterator[Serving]:
    with serving(directory, "--lora", f"one={adapter}") as running:
        yield running


def text(server: Serving, model: str | None) -> tuple[str, str]:
    body = {"prompt": "a quick test", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    status, answer = server.request(COMPLETIONS, {**body, "model": model} if model else body)
    assert status == 200, answer
    return answer["model"], answer["choices"][0]["text"]


def test_model_field_chooses_the_adapter(server: Serving) -> None:
    base, own = text(server, None), text(server, "one")
    assert own[0] == "one"
    assert own[1] != base[1]
    assert text(server, base[0]) == base
    cards = {card["id"]: card["parent"] for card in server.request("/v1/models")[1]["data"]}
    assert cards == {base[0]: None, "one": base[0]}
    assert server.request("/v1/models/one")[1]["parent"] == base[0]
    status, answer = server.request(COMPLETIONS, {"prompt": "a", "model": "nobody"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_adapter_is_loaded_and_unloaded_while_the_server_runs(server: Serving, adapter: Path) -> None:
    assert server.request(COMPLETIONS, {"prompt": "a", "model": "two"})[0] == 404
    body = {"lora_name": "two", "lora_path": str(adapter)}
    assert server.request("/v1/load_lora_adapter", body) == (200, {"lora_name": "two", "status": "loaded"})
    assert text(server, "two")[1] == text(server, "one")[1]
    assert server.request("/v1/unload_lora_adapter", {"lora_name": "two"})[0] == 200
    assert server.request(COMPLETIONS, {"prompt": "a", "model": "two"})[0] == 404
    assert server.request("/v1/unload_lora_adapter", {"lora_name": "two"})[0] == 404


def test_wrong_adapters_are_refused(server: Serving, adapter: Path, tmp_path: Path) -> None:
    base = server.request("/v1/models")[1]["data"][0]["id"]
    status, answer = server.request("/v1/load_lora_adapter", {"lora_name": base, "lora_path": str(adapter)})
    assert (status, answer["error"]["param"]) == (400, "lora_name")
    assert server.request("/v1/unload_lora_adapter", {"lora_name": base})[0] == 400
    status, answer = server.request("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(tmp_path / "none")})
    assert status == 400
    assert "no such adapter" in answer["error"]["message"]
    status, answer = server.request("/v1/load_lora_adapter", {"lora_name": "x"})
    assert (status, answer["error"]["param"]) == (400, "lora_path")
    assert len(server.request("/v1/models")[1]["data"]) == 2
