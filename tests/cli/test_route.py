"""Bad input of `quire route` and of replicas elsewhere: each error names what works."""

import pytest

from quire.engine.llm import LLM
from quire.errors import ConfigError
from tests.cli.command_line import call


def test_bad_upstream_key_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_UPSTREAM_API_KEY", "two words")
    result = call("route", "http://h:1")
    assert result.exit_code == 2
    assert "QUIRE_UPSTREAM_API_KEY is no API key" in result.stderr
    assert "two words" not in result.stderr


def test_engine_in_this_process_is_one_replica() -> None:
    with pytest.raises(ConfigError, match=r"`quire serve` starts several; data_parallel_size=1 works"):
        LLM("absent", data_parallel_size=2)
