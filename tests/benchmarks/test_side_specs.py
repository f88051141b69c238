"""A side's name says which interpreter, weights and options; what is missing is said."""

import sys
from pathlib import Path

import pytest

from benchmarks.side_specs import KINDS, Models, Skipped, make_spec


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models("m", tmp_path / "m.gguf", 8, None, bf16_directory=tmp_path / "bf16")  # type: ignore[arg-type]


def test_options_variables_and_weights(models: Models) -> None:
    name = "quire:kv_cache_dtype=int8:max_num_seqs=8:enforce_eager=true:env.QUIRE_ISA=avx2:model=bf16"
    spec = make_spec(name, models, {})
    assert spec.name == name
    assert spec.command == (sys.executable, "-m", "benchmarks.sides.quire")
    assert spec.model == str(models.bf16_directory)
    assert spec.options == {"kv_cache_dtype": "int8", "max_num_seqs": 8, "enforce_eager": True}
    assert spec.environment == {"QUIRE_ISA": "avx2"}


def test_weights_by_kind_and_by_path(models: Models) -> None:
    assert make_spec("quire", models, {}).model == str(models.gguf)
    assert make_spec("transformers", models, {}).model == str(models.bf16_directory)
    assert make_spec("quire:model=other.gguf", models, {}).model == "other.gguf"


def test_another_interpreter_does_not_see_our_packages(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "vllm", KINDS["vllm"].__class__("m", "json", "vllm_python", "gguf"))
    spec = make_spec("vllm", models, {"vllm_python": sys.executable})
    assert spec.command[0] == sys.executable
    assert spec.environment["PYTHONPATH"] == ""


@pytest.mark.parametrize(
    ("name", "python", "reason"),
    [
        ("exllama", None, "there is no side 'exllama'; there are quire, llama.cpp"),
        ("quire:fast", None, "'fast' is not key=value"),
        ("llama.cpp", None, "set QUIRE_BENCH_LLAMA_CPP or --llama-cpp-python to a Python that has llama_cpp"),
        ("llama.cpp", "no-such-python", "there is no program no-such-python"),
    ],
)
def test_skipped_with_a_reason(models: Models, name: str, python: str | None, reason: str) -> None:
    with pytest.raises(Skipped, match=reason):
        make_spec(name, models, {"llama_cpp_python": python})


def test_an_interpreter_without_the_package(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "vllm", KINDS["vllm"].__class__("m", "no_such_package", "vllm_python", "gguf"))
    with pytest.raises(Skipped, match="has no no_such_package"):
        make_spec("vllm", models, {"vllm_python": sys.executable})
