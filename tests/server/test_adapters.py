"""Adapters of a whole server: chosen by `model`, listed with their parent, loaded and unloaded while it runs."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server_process import children_of
from tests.adapters.builders import random_matrices, write_peft
from tests.cli.tiny_directory import make_tiny_directory
from tests.processes import wait_for_end, wait_until
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


MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [("/v1/chat/completions", MESSAGES, "choices"), ("/v1/messages", MESSAGES, "content"),
     ("/v1/responses", {"input": "hi", "max_output_tokens": 4, "temperature": 0}, "output"),
     ("/v1/embeddings", {"input": "hi"}, "data"), ("/score", {"text_1": "hi", "text_2": "ho"}, "data")],
)  # fmt: skip
def test_answer_has_the_name_and_the_values_of_the_adapter(
    server: Serving, path: str, body: dict[str, Any], part: str
) -> None:
    (_, base), (_, own) = (server.request(path, {**body, "model": name}) for name in ("tiny", "one"))
    assert own["model"] == "one" != base["model"]
    without_ids = [re.sub(r'"id": "[^"]*"', "", json.dumps(item[part])) for item in (own, base)]
    assert without_ids[0] != without_ids[1]


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
    status, answer = server.request("/v1/load_lora_adapter", {"lora_name": "x"})
    assert (status, answer["error"]["param"]) == (400, "lora_path")
    assert len(server.request("/v1/models")[1]["data"]) == 2


UNUSABLE = "its files are missing, changed or none of an adapter of this model"


def damaged_adapters(directory: Path, adapter: Path) -> dict[str, str]:
    """Return `lora_path`s of the kinds that cannot be an adapter."""
    (directory / "pipe.gguf").unlink(missing_ok=True)
    os.mkfifo(directory / "pipe.gguf")
    (directory / "text.gguf").write_text("a" * 5000)
    (directory / "folder").mkdir(exist_ok=True)
    (directory / "loop").symlink_to("loop")
    configs = {
        "rank": '{"peft_type": "LORA", "r": 1%s, "lora_alpha": 4}' % ("0" * 400),
        "digits": '{"peft_type": "LORA", "r": %s, "lora_alpha": 4}' % ("9" * 5000),
        "scale": '{"peft_type": "LORA", "r": 4, "lora_alpha": 1%s}' % ("0" * 400),
        "nesting": "[" * 100_000,
        "pattern": json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4, "rank_pattern": {"(" * 5000: 4}}),
        "groups": json.dumps(
            {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "rank_pattern": {"(" * 5000 + ")" * 5000: 4}}
        ),
        "type": '{"peft_type": ["LORA"], "r": 4, "lora_alpha": 4}',
    }
    for name, config in configs.items():
        shutil.copytree(adapter, directory / name)
        (directory / name / "adapter_config.json").write_text(config)
    names = ("none", "pipe.gguf", "text.gguf", "folder", "loop", *configs)
    return {name: str(directory / name) for name in names} | {
        "long": "a" * 5000, "deep": "a/" * 5000, "device": "/dev/null", "root": "/", "account": "/etc/passwd", "": "",
    }  # fmt: skip


def test_answer_tells_nothing_about_files_of_the_server(server: Serving, adapter: Path, tmp_path: Path) -> None:
    told = set()
    for name, path in damaged_adapters(tmp_path, adapter).items():
        status, answer = server.request("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (400, "adapter_unusable", "lora_path"), (name, answer)
        told.add(error["message"])
    (message,) = told
    assert UNUSABLE in message
    assert str(tmp_path) in server.stderr, "the log has the reason"
    assert "Traceback" not in server.stderr
    assert names(server) == {"one"}


@pytest.mark.parametrize(
    ("seed", "path", "body"),
    [
        (7, COMPLETIONS, {"prompt": "a"}),
        (8, "/v1/chat/completions", {**MESSAGES, "stream": True}),
        (9, "/v1/embeddings", {"input": "a"}),
    ],
)
def test_request_with_an_adapter_whose_files_changed_is_refused_without_a_path(
    server: Serving, directory: Path, tmp_path: Path, seed: int, path: str, body: dict[str, Any]
) -> None:
    files = tmp_path / "changing"
    config = files / "adapter_config.json"
    for damage in (
        lambda: config.write_text('{"peft_type": "LORA", "lora_alpha": 4, "r": 1%s}' % ("0" * 400)),
        lambda: shutil.rmtree(files),
    ):
        write_peft(files, random_matrices(directory, seed))
        load = {"lora_name": "changing", "lora_path": str(files)}
        assert server.request("/v1/load_lora_adapter", load)[0] == 200
        damage()
        status, answer = server.request(path, {**body, "model": "changing"})
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "adapter_unusable", "model"), answer
        assert UNUSABLE in answer["error"]["message"]
        assert str(files) in server.stderr
    assert server.request("/v1/unload_lora_adapter", {"lora_name": "changing"})[0] == 200
    assert text(server, "one")[0] == "one"


def names(server: Serving) -> set[str]:
    return {card["id"] for card in server.request("/v1/models")[1]["data"] if card["parent"]}


def test_adapter_survives_the_death_of_the_engine(directory: Path, adapter: Path) -> None:
    with serving(directory, "--enable-lora") as server:
        body = {"lora_name": "two", "lora_path": str(adapter)}
        assert server.request("/v1/load_lora_adapter", body)[0] == 200
        wanted = text(server, "two")
        (engine,) = children_of(server.process.pid, "quire.engine.process.child")
        engine.kill()
        server.wait_for_other_engine(engine.pid)
        assert text(server, "two") == wanted
        assert names(server) == {"two"}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines need two cores")
def test_adapter_is_loaded_for_all_engines_and_for_one_that_is_started_again(directory: Path, adapter: Path) -> None:
    options = ("--data-parallel-size", "2", "--lora", f"one={adapter}")
    with serving(directory, *options) as server:
        wanted = text(server, "one")[1]
        body = {"lora_name": "two", "lora_path": str(adapter)}
        assert server.request("/v1/load_lora_adapter", body) == (200, {"lora_name": "two", "status": "loaded"})
        assert names(server) == {"one", "two"}
        assert [text(server, "two")[1] for _ in range(4)] == [wanted] * 4
        assert server.request("/v1/unload_lora_adapter", {"lora_name": "one"})[0] == 200
        first, second = children_of(server.process.pid, "quire.engine.process.child")
        first.kill()
        wait_for_end(first)
        ups = [f'quire_engine_up{{engine="{rank}"}}' for rank in range(2)]
        wait_until(lambda: "starting another" in server.stderr)
        wait_until(lambda: [server.metric(up) for up in ups] == [1, 1])
        assert second.is_running()
        assert names(server) == {"two"}
        assert [text(server, "two")[1] for _ in range(4)] == [wanted] * 4
        for _ in range(2):
            status, answer = server.request(COMPLETIONS, {"prompt": "a", "model": "one"})
            assert (status, answer["error"]["code"]) == (404, "model_not_found")
        status, answer = server.request("/v1/unload_lora_adapter", {"lora_name": "one"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        status, answer = server.request("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/none"})
        assert (status, answer["error"]["param"]) == (400, "lora_path")
        assert server.request("/v1/load_lora_adapter", {"lora_name": "x"})[0] == 400
        assert names(server) == {"two"}
