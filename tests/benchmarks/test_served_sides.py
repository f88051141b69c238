"""Each side answers the bodies it gets in full; commands hold nothing of the machine they ran on."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import served_sides
from benchmarks.served_sides import Offline, Recipe, Served
from benchmarks.side_specs import KINDS, Models
from quire.cli.bench_serve import Bodies
from tests.cli.stub_server import Handler, chunks, stub_server
from tests.cli.tiny_directory import make_tiny_directory


def test_offline_counts_as_clients_would(tmp_path: Path) -> None:
    model = str(make_tiny_directory(tmp_path, max_position_embeddings=2048))
    result = Offline(model).measure(2, Bodies(model, 4, 3, 0).take(5))
    assert len(result.good) == 5
    assert {answer.num_tokens for answer in result.answers} == {3}
    assert all(1 <= len(answer.chunk_times) <= 3 for answer in result.answers)
    assert result.tokens_per_s == 15 / result.duration_s


@pytest.mark.parametrize(("knows", "fields"), [(True, {}), (False, {"min_tokens": 3})])
def test_a_server_that_does_not_know_ignore_eos_is_told_otherwise(knows: bool, fields: dict[str, int]) -> None:
    with stub_server(lambda handler, body: handler.send_events(chunks("a", "b"))) as server:
        process = SimpleNamespace(url=server.url, start_s=1.0, pause=None, resume=None)
        side = Served(Recipe("peer", ["python", "-m", "peer"], knows_ignore_eos=knows), process)  # type: ignore[arg-type]
        bodies = Bodies("m", 4, 3, 0).take(2)
        assert len(side.measure(1, bodies).good) == 2
    assert [body for _, _, body in server.requests] == [{**body, **fields} for body in bodies]


def test_a_refused_request_is_a_failure_with_its_reason() -> None:
    def refuse(handler: Handler, body: object) -> None:
        handler.send_json(500, {"error": {"message": "no memory"}})

    with stub_server(refuse) as server:
        process = SimpleNamespace(url=server.url, start_s=1.0, pause=None, resume=None)
        side = Served(Recipe("peer", ["python", "-m", "peer"]), process)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match=r"peer: 2 of 2 requests failed: .*no memory"):
            side.measure(1, Bodies("m", 4, 3, 0).take(2))


@pytest.mark.parametrize("name", ["llama.cpp", "vllm"])
def test_settings_of_peers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models("m", tmp_path / "m.gguf", 8, None, bf16_directory=tmp_path / "bf16")  # type: ignore[arg-type]
    monkeypatch.setattr(served_sides, "Models", SimpleNamespace(of=lambda model: models))
    kind = KINDS[name]
    monkeypatch.setitem(KINDS, name, kind.__class__(kind.module, "json", kind.python, kind.weights))
    recipe = served_sides.RECIPES[name]("m", 2, {kind.python: sys.executable})
    assert recipe.command[0] == sys.executable
    assert recipe.url.rpartition(":")[2] in recipe.command
    assert str(models.path(kind.weights)) in recipe.command
    assert str(tmp_path) not in str(recipe.settings)
    assert "PYTHONPATH" not in str(recipe.settings)
