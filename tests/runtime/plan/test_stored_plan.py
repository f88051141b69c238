"""Plans in the cache: the same answers without torch, and never a program of another model, option or version."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from quire.config import EngineOptions
from quire.layers.group import SINGLE
from quire.models.registry import ModelRegistry, model_types
from quire.runtime.plan import stored_plan
from quire.runtime.plan.stored_plan import INDIFFERENT, MAX_FILES, ConfigSource, load_plan, plan_key, read, write
from tests.cli.tiny_directory import make_tiny_directory
from tests.models.oracle import make_oracle
from tests.models.test_gguf_nvfp4 import FAMILIES, Written
from tests.models.test_quantized_directories import CASES as QUANTIZED
from tests.models.test_quantized_directories import save
from tests.models.tiny_configs import LLAMA, TINY_CONFIGS, full_config
from tests.runtime.plan.harness import make_checkpoint, make_config

CONFIG = full_config("llama", {**LLAMA, "hidden_size": 64, "intermediate_size": 96})


@pytest.fixture(autouse=True)
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the directory of the plans' files."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("QUIRE_PLAN_CACHE")
    monkeypatch.setattr(ModelRegistry, "_registered", {})  # what other tests of this process may have registered
    return tmp_path / "cache" / "plans"


def write_model(path: Path, model_type: str, fields: dict[str, Any]) -> Path:
    oracle = make_oracle(model_type, fields)
    generator = torch.Generator().manual_seed(11)
    for parameter in oracle.parameters():
        scale = 1.5 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
        parameter.data.normal_(float(parameter.ndim == 1), scale, generator=generator)
    oracle.save_pretrained(path)
    write_tokenizer(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **full_config(model_type, fields)}))
    return path


def write_tokenizer(path: Path) -> None:
    vocabulary = {str(index): index for index in range(50)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "0")).save(str(path / "tokenizer.json"))


def child(cases: list[tuple[str, Path, dict[str, Any]]], **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.runtime.plan.stored_plan_child", json.dumps(cases, default=str)]
    variables = {**os.environ, **environment}
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], env=variables)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def test_every_family_answers_the_same_without_torch(tmp_path: Path, plans: Path) -> None:
    cases: list[tuple[str, Path, dict[str, Any]]] = []
    for model_type in model_types():
        fields = next(iter(TINY_CONFIGS[model_type].values()))
        cases.append((model_type, write_model(tmp_path / model_type, model_type, fields), {}))
    wide = write_model(tmp_path / "wide", "qwen3_moe", {**next(iter(TINY_CONFIGS["qwen3_moe"].values()))})
    options: list[dict[str, Any]] = [
        {"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"quantization": "int4"}, {"quantization": "fp8"},
        {"dtype": "float32"},
        {"dtype": "float16", "block_size": 32}, {"max_model_len": 64}, {"enable_prefix_caching": False},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ]  # fmt: skip
    cases += [(str(chosen), wide, chosen) for chosen in options]
    check_second_start(cases, plans)


def test_every_quantised_format_answers_the_same_without_torch(
    tmp_path: Path, plans: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, (_, written) in QUANTIZED.items():
        (tmp_path / name).mkdir()
        save(tmp_path / name, *written)
        write_tokenizer(tmp_path / name)
    cases: list[tuple[str, Path, dict[str, Any]]] = [(name, tmp_path / name, {}) for name in QUANTIZED]
    for name in FAMILIES:
        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch:
            path = Written(tmp_path / name, name, patch).open().files.path
        cases.append((f"NVFP4 in GGUF, {name}", path, {"tokenizer": str(tmp_path / "AWQ")}))
    check_second_start(cases, plans)


def check_second_start(cases: list[tuple[str, Path, dict[str, Any]]], plans: Path) -> None:
    """Check that the second start imports torch in none of its processes."""
    first = child(cases)
    assert first["has_torch"]
    num_files = len(list(plans.iterdir()))
    plans.with_name("sitecustomize.py").write_text("import sys; sys.modules['torch'] = None")
    second = child(cases, PYTHONPATH=f"{plans.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert second["answers"] == first["answers"]
    assert second["models"] == []
    assert len(list(plans.iterdir())) == num_files


def load(checkpoint: Any, **options: Any) -> Any:
    config = make_config(CONFIG, **options)
    return load_plan(config, checkpoint, (0,) * config.model.num_layers, None, SINGLE)


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    return make_checkpoint(CONFIG, make_oracle("llama", CONFIG).state_dict())


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Add an entry to a list each time that a model is traced."""
    from quire.runtime.plan import load as load_module

    found: list[None] = []
    trace: Callable[..., Any] = load_module.trace_program

    def counted(*args: Any) -> Any:
        found.append(None)
        return trace(*args)

    monkeypatch.setattr(load_module, "trace_program", counted)
    return found


def damage_checksum(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace('"rotary"', '"rotory"'))


def damage_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def damage_all(path: Path) -> None:
    path.write_bytes(b"\xff\xfe" * 40)


def damage_header(path: Path) -> None:
    path.write_text("{}\n" + path.read_text().partition("\n")[2])


def rename_other(path: Path) -> None:
    """Put a sound file that was made for another key in its place."""
    write("plan", "0" * 64, read("plan", key_of(path), stored_plan.StoredPlan))
    os.replace(path.parent / f"plan-{'0' * 32}.json", path)


def key_of(path: Path) -> str:
    return str(json.loads(path.read_text().partition("\n")[0])["key"])


@pytest.mark.parametrize("change", [damage_checksum, damage_end, damage_all, damage_header, rename_other, Path.unlink])
def test_damaged_and_foreign_files_are_made_anew(
    change: Callable[[Path], None], checkpoint: Any, traces: list[None], plans: Path
) -> None:
    ops, *_ = load(checkpoint)
    (path,) = plans.iterdir()
    before = path.read_bytes()
    load(checkpoint)
    assert len(traces) == 1
    change(path)
    found, *_ = load(checkpoint)
    assert len(traces) == 2
    assert found == ops
    assert path.read_bytes() == before


def test_file_with_another_layout_is_made_anew(checkpoint: Any, traces: list[None], plans: Path) -> None:
    load(checkpoint)
    (path,) = plans.iterdir()
    write("plan", key_of(path), {"ops": "none"})
    load(checkpoint)
    assert len(traces) == 2


def test_timed_ops_get_their_instructions_by_tracing(checkpoint: Any, traces: list[None]) -> None:
    _, _, recording = load(checkpoint)
    names = [type(item).__name__ for item in recording().instructions]
    assert len(traces) == 1
    ops, _, again = load(checkpoint)
    assert len(traces) == 1
    assert [type(item).__name__ for item in again().instructions] == names
    assert again().ops == ops


OTHER = {
    "dtype": "bfloat16", "kv_cache_dtype": "int8", "block_size": 32, "quantization": "int8", "max_model_len": 40,
    "enforce_eager": True, "tensor_parallel_size": 2, "pipeline_parallel_size": 2,
    "distributed_executor_backend": "ray",
}  # fmt: skip


def test_options_are_in_the_key_unless_they_are_listed(checkpoint: Any) -> None:
    names = EngineOptions.__dataclass_fields__.keys()
    assert names >= INDIFFERENT
    config = make_config(CONFIG)
    keys = {plan_key(config, checkpoint, (0, 0))}
    for name in names - INDIFFERENT:
        chosen = OTHER[name]
        keys.add(plan_key(replace(config, options=replace(config.options, **{name: chosen})), checkpoint, (0, 0)))
    assert len(keys) == 1 + len(names - INDIFFERENT)
    assert plan_key(make_config(CONFIG, max_model_len=40), checkpoint, (0, 0)) not in keys
    assert plan_key(make_config(CONFIG, max_num_seqs=3), checkpoint, (0, 0)) in keys
    assert plan_key(config, checkpoint, (0, 0), 1) not in keys


def test_models_formats_and_code_are_in_the_key(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(CONFIG)
    keys = {plan_key(config, checkpoint, (0, 0)), plan_key(config, checkpoint, (0, 1))}
    name, tensor = next(iter(checkpoint.tensors.items()))
    for changed in (replace(tensor, format="F16"), replace(tensor, shape=(1, *tensor.shape))):
        keys.add(plan_key(config, replace(checkpoint, tensors={**checkpoint.tensors, name: changed}), (0, 0)))
    keys.add(plan_key(make_config({**CONFIG, "rms_norm_eps": 1e-3}), checkpoint, (0, 0)))
    monkeypatch.setattr(stored_plan._native, "isa", lambda: "other")
    keys.add(plan_key(config, checkpoint, (0, 0)))
    monkeypatch.setattr(stored_plan, "code_digest", lambda: "other")
    keys.add(plan_key(config, checkpoint, (0, 0)))
    assert len(keys) == 7
    assert None not in keys


def test_variable_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plans: Path) -> None:
    monkeypatch.setenv("QUIRE_PLAN_CACHE", str(tmp_path / "own"))
    write("plan", "key", {"a": 1})
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["plan-key.json"]
    assert read("plan", "key", dict) == {"a": 1}
    assert not plans.exists()
    monkeypatch.setenv("QUIRE_PLAN_CACHE", "1")
    assert stored_plan.plan_directory() == plans


@pytest.mark.parametrize("variable", [("QUIRE_PLAN_CACHE", "0"), ("QUIRE_KERNELS", "reference")])
def test_no_plan_is_kept_where_it_is_switched_off(
    variable: tuple[str, str], checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*variable)
    assert plan_key(make_config(CONFIG), checkpoint, (0, 0)) is None


def test_random_weights_and_models_from_outside_are_traced_each_time(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, plans: Path
) -> None:
    assert plan_key(make_config(CONFIG, load_format="dummy"), checkpoint, (0, 0)) is None

    class Outside(ModelRegistry.resolve(CONFIG)):  # type: ignore[misc]
        pass

    monkeypatch.setattr(ModelRegistry, "resolve", lambda hf_config: Outside)
    load(checkpoint)
    ConfigSource(CONFIG, {}, None).make()
    assert not plans.exists()
    monkeypatch.undo()
    monkeypatch.setattr(ModelRegistry, "_registered", {"Other": "a.module:Other"})
    assert plan_key(make_config(CONFIG), checkpoint, (0, 0)) is None


def test_model_config_is_that_of_the_registry() -> None:
    generation, overrides = {"temperature": 0.3, "eos_token_id": [3, 4]}, {"rope_theta": 7.0}
    expected = ModelRegistry.make_model_config(CONFIG, generation, overrides)
    for _ in range(2):
        assert ConfigSource(CONFIG, generation, overrides).make() == expected
    assert ConfigSource(CONFIG, {}, overrides).make() != expected


def test_cache_that_cannot_be_written_is_left_alone(
    checkpoint: Any, plans: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plans.parent.write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING):
        load(checkpoint)
    assert caplog.records == []


def test_files_used_longest_ago_are_deleted(plans: Path) -> None:
    keys = [str(index).ljust(64, "x") for index in range(MAX_FILES + 1)]
    for time, key in enumerate(keys[:-1]):
        write("plan", key, {"key": key})
        os.utime(plans / f"plan-{key[:32]}.json", (time, time))
    assert read("plan", keys[0], dict) == {"key": keys[0]}
    write("plan", keys[-1], {"key": keys[-1]})
    assert [key for key in keys if read("plan", key, dict) is None] == [keys[1]]


@pytest.mark.parametrize("words", [[], ["--temperature", "1", "--structured-outputs", '{"choice": ["ab", "cd"]}']])
def test_second_run_on_the_command_line_needs_no_torch(words: list[str], tmp_path: Path) -> None:
    directory = make_tiny_directory(tmp_path / "tiny")
    answers = []
    for without in ("", "sys.modules['torch'] = None;"):
        code = f"import sys; {without} from quire.cli.main import main; main()"
        command = [sys.executable, "-c", code, "run", str(directory), "hi there", "--max-tokens", "9", "--seed", "4"]
        result = subprocess.run([*command, *words], capture_output=True, text=True, env=os.environ)
        assert result.returncode == 0, result.stderr
        answers.append(result.stdout)
    assert answers[0] == answers[1]
