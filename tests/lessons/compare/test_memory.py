"""A comparison takes a share of the available memory: what would take more is refused, with the number that fits."""

import re
import resource
from dataclasses import replace

import pytest

from quire.errors import MemoryCapacityError
from quire.runtime.hardware import detect_hardware
from quire_lessons import compare
from quire_lessons.compare import adapters, kv, rig
from quire_lessons.compare.results import RunSettings
from quire_lessons.compare.rig import LIMIT, limited_memory

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def one_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let comparisons use 1 GiB, whatever this machine has."""
    share = GIB / detect_hardware("cpu").available_memory_bytes
    monkeypatch.setattr(rig, "SHARE", share)
    monkeypatch.setattr(rig, "has_gpu_driver", lambda: False)


def refused(name: str, **settings: object) -> str:
    with pytest.raises(MemoryCapacityError) as found:
        compare.run(name, RunSettings(**settings))  # type: ignore[arg-type]
    return found.value.message


@pytest.mark.parametrize(
    ("name", "settings", "fitting"),
    [
        ("attention", {"context": 1 << 17}, "context"),
        ("kv", {"requests": 10_000, "context": 1 << 17}, "requests"),
        ("batching", {"requests": 10_000, "context": 1 << 17, "slots": 1}, "requests"),
        ("batching", {"requests": 10_000, "prompt_lens": (100_000,), "output_lens": (1,)}, "requests"),
    ],
)
def test_what_needs_more_is_refused_before_it_is_there(name: str, settings: dict[str, object], fitting: str) -> None:
    message = refused(name, **settings)
    assert LIMIT in message
    assert re.search(rf": {fitting}=\d+ fits$", message), message


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "settings", "fitting"),
    [
        ("cache", {"requests": 20, "context": 4096}, "context"),
        ("batching", {"model": "smollm2", "slots": 64, "context": 4096}, "context"),
        ("kv", {"model": "smollm2", "pool_bytes": 4 * GIB}, "pool"),
    ],
)
def test_model_that_needs_more_is_refused_before_it_is_loaded(
    name: str, settings: dict[str, object], fitting: str
) -> None:
    message = refused(name, **settings)
    assert LIMIT in message
    assert re.search(rf": {fitting}=\d+ fits$", message), message


def test_context_that_is_said_to_fit_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire_lessons.compare import rig

    loaded: list[int] = []

    def note(config: object, checkpoint: object) -> None:
        loaded.append(config.scheduler.max_model_len)  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr(rig, "_load", note)
    fits = int(refused("attention", context=1 << 17).split("context=")[1].split()[0])
    assert 1024 < fits < 1 << 17
    with pytest.raises(KeyboardInterrupt):
        compare.run("attention", RunSettings(context=int(0.9 * fits)))  # memory is used by other programs meanwhile
    assert loaded == [int(0.9 * fits)]


def test_attention_computes_its_prompt_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire_lessons.compare import rig
    from quire_lessons.compare.attention import CHUNK

    counts: list[int] = []
    drive = rig.Rig.drive

    def watched(self: rig.Rig, *given: object, **options: object) -> rig.Run:
        run = drive(self, *given, **options)  # type: ignore[arg-type]
        counts.extend(item.num_tokens for step in run.steps for item in step.scheduled)
        return run

    monkeypatch.setattr(rig.Rig, "drive", watched)
    found = compare.run("attention", RunSettings(context=CHUNK + 100))
    assert max(counts) == CHUNK
    assert all(row[4] is not None for row in found.rows[:4])


def test_memory_that_no_plan_counts_ends_the_comparison_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a list would that grows: the process has a limit meanwhile, and none after it."""
    monkeypatch.setattr(kv, "compare", lambda settings, progress: bytearray(3 * GIB))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert "needs more than" in refused("kv")
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_engines_see_the_limit_as_that_of_the_machine() -> None:
    with limited_memory():
        assert detect_hardware("cpu").available_memory_bytes <= GIB
        assert "RLIMIT_DATA" in detect_hardware("cpu").memory_limit


def test_adapters_that_would_fill_the_disk_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = detect_hardware("cpu")
    monkeypatch.setattr(adapters, "detect_hardware", lambda device: replace(hardware, available_memory_bytes=GIB))
    adapters.check_files(8, 256, 40 * MIB, GIB)
    with pytest.raises(MemoryCapacityError, match=r"1000 adapters of rank 256 need 39.1 GiB.*requests=25 fits"):
        adapters.check_files(1000, 256, 40 * MIB, 100 * GIB)
    with pytest.raises(MemoryCapacityError, match="requests=1 fits"):
        adapters.check_files(8, 256, 40 * MIB, 64 * MIB)
