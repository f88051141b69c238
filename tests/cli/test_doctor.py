"""`quire doctor`: healthy, unhealthy, and checks that break."""

import sys
from pathlib import Path

import pytest

from quire.cli import doctor
from quire.cli.doctor import CHECKS, NOTE, OK, PROBLEM, Finding, run_check
from quire.extras import install_command
from tests.cli.command_line import call, parsed


def test_every_check_finds_something_here() -> None:
    for name, check in CHECKS.items():
        finding = run_check(name, check)
        assert finding.name == name
        assert finding.status in (OK, NOTE, PROBLEM)
        assert finding.found
        assert finding.status == OK or finding.advice or finding.found.startswith("the check failed")


def test_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "CHECKS", {"a": lambda: Finding("a", OK, "fine"), "b": lambda: Finding("b", NOTE, "so", "do")}
    )
    result = call("doctor")
    assert result.exit_code == 0
    assert result.stdout == "✓ a  fine\n· b  so  → do\n"
    assert "no problems" in result.stderr
    assert parsed(call("doctor", "--json"))["healthy"] is True


def test_problem_exits_6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"a": lambda: Finding("a", PROBLEM, "bad", "fix it"), "b": lambda: 1 / 0})
    result = call("doctor")
    assert result.exit_code == 6
    assert "✗ a  bad  → fix it" in result.stdout
    assert "ZeroDivisionError" in result.stdout
    assert "2 problems" in result.stderr
    value = parsed(call("doctor", "--json"))
    assert (value["schema"], value["healthy"]) == ("quire.doctor/1", False)
    assert value["checks"][0] == {"name": "a", "status": "problem", "found": "bad", "advice": "fix it"}


def test_unwritable_cache_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    finding = doctor.check_cache()
    assert finding.status == PROBLEM
    assert "QUIRE_CACHE_DIR" in finding.advice


def test_missing_instruction_set_is_a_problem_and_a_failed_self_test_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire._native.isa_notes", list)
    assert doctor.check_native().status == OK
    monkeypatch.setattr("quire._native.isa_notes", lambda: ["amx is not used: its self-test failed"])
    finding = doctor.check_native()
    assert (finding.status, "amx is not used" in finding.found) == (NOTE, True)
    monkeypatch.setattr("quire._native.unbuilt_isa", "amx")
    assert "`make run` builds those of this one" in doctor.check_native().advice
    monkeypatch.setattr("quire._native.requested_isa_missing", True)
    monkeypatch.setenv("QUIRE_ISA", "mmx")
    finding = doctor.check_native()
    assert finding.status == PROBLEM
    assert "QUIRE_ISA=mmx is not available here" in finding.found
    assert "the best of scalar" in finding.advice


def test_hub_token_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    finding = doctor.check_hub()
    assert "token set" in finding.found
    assert "secret" not in finding.found
    assert finding.status == NOTE


def test_versions_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, status in (("2.13.0+cpu", OK), ("2.10.1", NOTE), ("2.14.0", NOTE)):
        monkeypatch.setattr(doctor, "package_version", lambda name, version=version: version)
        assert doctor.check_torch().status == status


@pytest.mark.parametrize(("has_driver", "status"), [(False, OK), (True, NOTE)])
def test_missing_torch_is_worth_a_note_only_beside_a_gpu(
    has_driver: bool, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("quire.runtime.hardware.has_gpu_driver", lambda: has_driver)
    finding = doctor.check_torch()
    assert finding.status == status
    assert install_command("torch") in finding.advice
