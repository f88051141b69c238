"""Bad input of `quire route` and of replicas elsewhere: each error names what works."""

import pytest

from quire.engine.llm import LLM
from quire.errors import ConfigError
from tests.cli.command_line import call


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["127.0.0.1:8000"], "http://127.0.0.1:8000 works"),
        (["http://h:1/v1"], "http://h:1 works"),
        (["ftp://h:1"], "http://host:port works"),
        (["http://h:1", "http://h:1/"], "named twice"),
        ([], "Missing argument"),
        (["http://h:1", "--router-policy", "fastest"], "'prefix', 'round-robin', 'least-loaded'"),
        (["http://h:1", "--host", "0.0.0.0"], "--api-key-file"),
    ],
)
def test_bad_arguments_name_what_works(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    result = call("route", "--port", "0", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_bad_upstream_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_UPSTREAM_API_KEY", "two words")
    result = call("route", "http://h:1")
    assert result.exit_code == 2
    assert "QUIRE_UPSTREAM_API_KEY is no API key" in result.stderr
    assert "two words" not in result.stderr


def test_engine_in_this_process_is_one_replica() -> None:
    with pytest.raises(ConfigError, match=r"`quire serve` starts several; data_parallel_size=1 works"):
        LLM("absent", data_parallel_size=2)
