"""Addresses as people write them, and whose key is sent."""

import pytest

from quire.cli.server_address import ServerUnreachableError, api_key, base_url, key_hint


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host/v1/", "http://host"),
        ("https://host:1/models/v1", "https://host:1/models"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(url: str, base: str) -> None:
    assert base_url(url) == base


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "http://host:99999", "http://[::1"])
def test_no_addresses(url: str) -> None:
    with pytest.raises(ServerUnreachableError, match="not the address"):
        base_url(url)


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    assert api_key() == ""
    assert key_hint() == "set QUIRE_API_KEY"
    monkeypatch.setenv("OPENAI_API_KEY", "second")
    assert api_key() == "second"
    assert key_hint() == "the key sent is that of OPENAI_API_KEY"
    monkeypatch.setenv("QUIRE_API_KEY", "first, other")
    assert api_key() == "first"
