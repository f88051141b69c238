import hmac
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.server import keys as keys_module
from quire.server.keys import KeyRing
from quire.server.options import ServerOptions

SECRET = "sk-very-secret"


def load(path: Path | None = None, **environment: str) -> KeyRing:
    return KeyRing.load(ServerOptions(api_key_file=None if path is None else str(path)), environment)


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_keys_of_the_environment_are_named_by_their_hash() -> None:
    ring = load(QUIRE_API_KEY=f"{SECRET}, other ,")
    caller = ring.find(SECRET.encode())
    assert len(ring) == 2
    assert caller is not None
    assert caller.client_id.startswith("key-")
    assert len(caller.client_id) == 12
    assert SECRET not in caller.client_id + caller.cache_salt
    assert ring.find(b"other") not in (None, caller)


def test_keys_of_a_file_may_have_names(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"# keys\nann:{SECRET}\n\n  plain-key  \nbob: with-a-space-before\n")
    ring = load(path, QUIRE_API_KEY="from-outside")
    names = [ring.find(key).client_id for key in (SECRET.encode(), b"with-a-space-before")]
    assert names == ["ann", "bob"]
    assert len(ring) == 4


def test_wrong_tokens_find_no_key() -> None:
    ring = KeyRing({SECRET: "ann"})
    for token in (b"", SECRET[:-1].encode(), SECRET.encode() + b" ", SECRET.upper().encode(), b"\xff", b"ann"):
        assert ring.find(token) is None


def test_key_keeps_its_salt_across_restarts() -> None:
    assert KeyRing({SECRET: None}).find(SECRET.encode()) == KeyRing({SECRET: None}).find(SECRET.encode())


def test_every_key_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare = hmac.compare_digest
    monkeypatch.setattr(keys_module.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))
    ring = KeyRing({f"key-{number}": None for number in range(7)})
    for token in (b"key-0", b"key-6", b"none"):
        compared.clear()
        ring.find(token)
        assert len(compared) == 7
        assert all(len(a) == len(b) == 32 for a, b in compared), "hashes are compared, never keys"


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "bad name:key\n", "a:one\na:two\n", "a:same\nb:same\n", "two words\n"]
)
def test_wrong_file_is_refused_without_showing_a_key(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(key_file(tmp_path, text))
    assert "two words" not in str(caught.value)
    assert "same" not in str(caught.value)


def test_world_readable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chmod"):
        load(key_file(tmp_path, SECRET, 0o644))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing-here"):
        load(tmp_path / "nothing-here")
    with pytest.raises(ConfigError, match="not a file"):
        load(tmp_path)


@pytest.mark.parametrize("value", ["", " , ,"])
def test_empty_variable_is_an_error(value: str) -> None:
    with pytest.raises(ConfigError, match="empty"):
        load(QUIRE_API_KEY=value)


def test_two_keys_with_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="'ann'"):
        KeyRing({"one": "ann", "two": "ann"})
