"""A real Prometheus with the files of `deploy/` scrapes a real `quire serve`; skipped where there is none."""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tiny_directory import make_tiny_directory
from tests.server.serving import serving
from tests.server.test_deploy import ALERTS, DASHBOARD, DEPLOY

LIMIT_S = 60
KEY = "a-key-of-this-test"
BINARY = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(BINARY is None, reason="prometheus is not installed")


class Prometheus:
    """The HTTP API of one that runs."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            return json.load(answer)["data"]

    def series(self, query: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("query", query=query)["result"]
        return found

    def wait_for(self, query: str) -> None:
        """Until there is a series."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                if self.series(query):
                    return
            except OSError:
                pass
            assert time.monotonic() < deadline, query
            time.sleep(0.1)


@contextmanager
def prometheus(directory: Path, server_url: str) -> Iterator[Prometheus]:
    """One that reads deploy's configuration; only the target, the key's file and the intervals are this test's."""
    assert BINARY is not None
    (directory / "key").write_text(KEY)
    shutil.copy(DEPLOY / "prometheus/alerts.yaml", directory)
    text = (DEPLOY / "prometheus/prometheus.yaml").read_text()
    for shipped, here in (
        ("/run/secrets/quire_api_key", str(directory / "key")),
        ("quire:8000", server_url.removeprefix("http://")),
        ("10s", "1s"),
    ):
        assert shipped in text
        text = text.replace(shipped, here)
    (directory / "prometheus.yaml").write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [BINARY, f"--config.file={directory / 'prometheus.yaml'}", f"--storage.tsdb.path={directory / 'data'}",
             f"--web.listen-address={address}"], stdout=log, stderr=log)  # fmt: skip
    try:
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def test_every_query_of_the_dashboard_and_every_alert_works(tmp_path: Path) -> None:
    model = make_tiny_directory(tmp_path)
    with serving(model, QUIRE_API_KEY=KEY) as server, prometheus(tmp_path, server.url) as found:
        found.wait_for('up{job="quire"} == 1')
        found.wait_for("rate(quire_http_requests_total[1m])")  # two scrapes, and one before to be counted
        for panel in DASHBOARD["panels"]:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "1m")
                assert found.series(query), (panel["title"], query)
                name = target.get("legendFormat", "")
                labels = {part.split("}}")[0].strip() for part in name.split("{{")[1:]}
                assert labels <= set(found.series(query)[0]["metric"]), (query, name)
        rules = [rule for group in found.get("rules")["groups"] for rule in group["rules"]]
        assert [rule["name"] for rule in rules] == [rule["alert"] for rule in ALERTS["groups"][0]["rules"]]
        deadline = time.monotonic() + LIMIT_S
        while any(rule["health"] == "unknown" for rule in rules):
            assert time.monotonic() < deadline
            time.sleep(0.1)
            rules = [rule for group in found.get("rules")["groups"] for rule in group["rules"]]
        assert {(rule["health"], rule["state"]) for rule in rules} == {("ok", "inactive")}


def test_missing_server_raises_an_alert(tmp_path: Path) -> None:
    model = make_tiny_directory(tmp_path)
    with serving(model, QUIRE_API_KEY=KEY) as server, prometheus(tmp_path, server.url) as found:
        found.wait_for('up{job="quire"} == 1')
        server.process.terminate()
        server.wait()
        found.wait_for('ALERTS{alertname="QuireDown"}')
