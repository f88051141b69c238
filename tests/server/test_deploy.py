"""Metrics, routes, options and variables that `deploy/` names exist. No server is started here."""

import configparser
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from quire.config import EngineOptions
from quire.engine.process.messages import Statistics
from quire.server.gate import OPEN_PATHS
from quire.server.options import ServerOptions
from tests.server.served import make_state
from tests.server.test_gate import ROUTES

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana/quire.json").read_text())
ALERTS = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUBERNETES = list(yaml.safe_load_all((DEPLOY / "kubernetes/quire.yaml").read_text()))
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
UNIT = (DEPLOY / "systemd/quire.service").read_text()
OPTIONS = {item.name for kind in (EngineOptions, ServerOptions) for item in fields(kind)}


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for group in ALERTS["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def sample_lines() -> list[str]:
    """Return /metrics after an event of every kind."""
    state = make_state()
    client = state.engines.client
    client.statistics = Statistics(num_finished={"stop": 1})
    state.admission.num_refused["queue_full"] += 1
    state.metrics.http_request("GET", "/version", 200, 0.1)
    return [line for line in state.metrics.render().decode().splitlines() if not line.startswith("#")]


def names_in(query: str) -> set[str]:
    return set(re.findall(r"\bquire_\w+", query))


def labels_in(query: str) -> set[str]:
    return {name.strip() for group in re.findall(r"by \(([^)]*)\)", query) for name in group.split(",")}


@pytest.mark.parametrize("query", list(queries()))
def test_queries_name_metrics_and_labels_that_exist(query: str) -> None:
    lines = sample_lines()
    assert query.count("(") == query.count(")")
    assert names_in(query)
    labels: set[str] = set()
    for name in names_in(query):
        found = [line for line in lines if re.match(rf"{name}[ {{]", line)]
        assert found, name
        labels |= set(re.findall(r'(\w+)="', found[0]))
    assert labels_in(query) <= labels


def test_every_mounted_file_is_there() -> None:
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
            else:
                assert source in COMPOSE["volumes"]
    assert (DEPLOY / COMPOSE["services"]["quire"]["build"]["context"] / "deploy/Dockerfile").exists()


def test_compose_opens_ports_to_this_machine_only() -> None:
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_prometheus_scrapes_with_the_key_that_compose_gives_it() -> None:
    scrape = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())["scrape_configs"][0]
    assert ("GET", scrape["metrics_path"]) in ROUTES
    secret = Path(scrape["authorization"]["credentials_file"]).name
    assert secret in COMPOSE["secrets"]
    assert secret in COMPOSE["services"]["prometheus"]["secrets"]
    host, port = scrape["static_configs"][0]["targets"][0].split(":")
    assert host in COMPOSE["services"]
    assert f"EXPOSE {port}" in DOCKERFILE


def test_probes_ask_for_routes_that_need_no_key() -> None:
    containers = [
        item["spec"]["template"]["spec"]["containers"][0] for item in KUBERNETES if item["kind"] == "Deployment"
    ]
    paths = {containers[0][f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    paths |= set(re.findall(r"/health/\w+", DOCKERFILE))
    assert paths
    assert paths <= OPEN_PATHS
    assert {("GET", path) for path in paths} <= set(ROUTES)


def test_no_service_of_kubernetes_sets_the_servers_options() -> None:
    """Each Service becomes variables such as QUIRE_PORT=tcp://10.0.0.1:80 in the containers beside it."""
    names = {item["metadata"]["name"].upper().replace("-", "_") for item in KUBERNETES if item["kind"] == "Service"}
    clash = {f"{name}_PORT" for name in names} & {f"QUIRE_{name.upper()}" for name in OPTIONS}
    pod = next(item for item in KUBERNETES if item["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert clash
    assert pod["enableServiceLinks"] is False


def test_kuberay_starts_a_stage_per_worker_and_one_beside_the_server() -> None:
    items = {item["kind"]: item for item in yaml.safe_load_all((DEPLOY / "kubernetes/kuberay.yaml").read_text())}
    cluster = items["RayCluster"]["spec"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    arguments = pods[0]["containers"][1]["args"]
    num_stages = int(arguments[arguments.index("--pipeline-parallel-size") + 1])
    assert num_stages == 1 + cluster["workerGroupSpecs"][0]["replicas"]
    assert arguments[arguments.index("--distributed-executor-backend") + 1] == "ray"
    for pod in pods:
        volumes = {item["name"]: item for item in pod["volumes"]}
        assert {mount["name"] for item in pod["containers"] for mount in item["volumeMounts"]} == volumes.keys()
        claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
        assert claim == items["PersistentVolumeClaim"]["metadata"]["name"]
    assert items["Service"]["spec"]["selector"]["ray.io/cluster"] == items["RayCluster"]["metadata"]["name"]


def test_kubernetes_names_fit_together() -> None:
    by_kind = {item["kind"]: item for item in KUBERNETES}
    pod = by_kind["Deployment"]["spec"]["template"]
    container = pod["spec"]["containers"][0]
    assert by_kind["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert by_kind["Deployment"]["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    claim = next(item for item in pod["spec"]["volumes"] if "persistentVolumeClaim" in item)
    assert claim["persistentVolumeClaim"]["claimName"] == by_kind["PersistentVolumeClaim"]["metadata"]["name"]
    assert {item["name"] for item in container["volumeMounts"]} == {item["name"] for item in pod["spec"]["volumes"]}
    assert pod["spec"]["terminationGracePeriodSeconds"] > ServerOptions().drain_timeout_s


@pytest.mark.parametrize(
    "path", [path for path in sorted(DEPLOY.rglob("*")) if path.is_file()], ids=lambda path: path.name
)
def test_options_and_variables_are_known(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"\bQUIRE_([A-Z_]+)", text):
        assert name.lower() in OPTIONS | {"api_key", "cache_dir"}, name
    commands = [line for line in text.splitlines() if re.search(r"quire serve|args: |ENTRYPOINT", line)]
    for line in commands:
        for flag in re.findall(r"--([a-z][a-z-]+)", line):
            assert flag.replace("-", "_") in OPTIONS, flag


def test_image_is_not_root_and_serves() -> None:
    lines = DOCKERFILE.splitlines()
    last_stage = lines[max(at for at, line in enumerate(lines) if line.startswith("FROM")) :]
    users = [line.split()[1] for line in last_stage if line.startswith("USER")]
    assert users == ["10001"]
    assert any(line.startswith("HEALTHCHECK") for line in last_stage)
    assert last_stage[-1] == 'ENTRYPOINT ["quire", "serve"]'
    for copied in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, flags=re.MULTILINE):
        # Wheels are built: tests/release/test_container.py has their name.
        assert all((DEPLOY.parent / name).exists() for name in copied.split() if not name.startswith("dist/"))


def test_unit_file(tmp_path: Path) -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read_string(UNIT)
    service = parser["Service"]
    assert service["DynamicUser"] == service["NoNewPrivileges"] == "yes"
    assert float(service["TimeoutStopSec"]) > ServerOptions().drain_timeout_s
    assert service["Type"] == "notify", "the server says READY=1 once the model is loaded"
    credential = service["LoadCredential"].split(":")[0]
    assert f"${{CREDENTIALS_DIRECTORY}}/{credential}" in service["ExecStart"]
    if shutil.which("systemd-analyze") is None:
        return
    # The command has to exist for the check, and is not installed where it will be.
    path = tmp_path / "quire.service"
    path.write_text(re.sub(r"ExecStart=\S+", f"ExecStart={sys.executable}", UNIT))
    command = ["systemd-analyze", "verify", "--man=no", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if "quire.service" in line]
    assert complaints == []
