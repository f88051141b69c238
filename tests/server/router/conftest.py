import pytest

from quire.server.router import replica


@pytest.fixture(autouse=True)
def frequent_health_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "CHECK_EVERY_S", 0.3)
