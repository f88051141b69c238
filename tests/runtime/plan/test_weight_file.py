"""Packed weights in a file: the same bytes as packed in memory, and never those of another model, option or version."""

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from quire.config import EngineConfig, EngineOptions
from quire.runtime import shared_file
from quire.runtime.plan import weight_file
from quire.runtime.plan.load import trace_program
from quire.runtime.plan.packed_weights import PackedWeights, Placement
from quire.runtime.plan.weight_file import LAYOUT_VERSION, fill_weights, place_of
from quire.runtime.shared_file import finish
from quire.weight_map import Offset
from quire.weights.checkpoint import Checkpoint, open_checkpoint, source_state
from quire.weights.model_cache import weight_directory
from quire.weights.model_files import Progress
from quire.weights.quantized import RoundedTensor
from quire.weights.sources import ModelFiles, resolve_source
from quire.weights.weight_tensor import WeightTensor
from tests.cli.tiny_directory import CONFIG, make_tiny_directory, tensor_shapes
from tests.hostile_files import give_away, let_others_write
from tests.kernels.native.packed_weights import FLOATS_STORED, STORED, Packed, finite_rows
from tests.runtime.plan.harness import PlanRunner, k_quants
from tests.runtime.plan.harness import make_config as config_of

GOLDEN = {
    2: {
        "F32 as f32": "16f4b5813a42ef76", "F16 as f16": "91b08104939acb0d", "BF16 as bf16": "e3363cbb7a94f017",
        "F32 as bf16": "654c21242fd9f9d6", "F32 as q4m": "907f90d5daabf9fa", "F32 as q8": "45d0a4ec129b7982",
        "IQ4_NL as iq4nl": "732b1e6e16f7d376", "IQ4_XS as iq4xs": "ad0438a2fb89dea2",
        "MXFP4 as mxfp4": "da78e35fe9af4787", "NVFP4 as nvfp4": "b2198ff1c1d8f7c8", "Q4_0 as q4": "732b1e6e16f7d376",
        "Q4_1 as q4m": "06d794df74a66f81", "Q4_K as q4k": "76d357668233acfd", "Q5_K as q5k": "519ce32189a89a94",
        "Q5_0 as q5": "d0d257fdeac7fca8", "Q5_1 as q5m": "bd0248ef90a60883",
        "Q6_K as q6k": "b54463bdbe2e9e62", "Q8_0 as q8": "d131e4d09c9cdaca",
        "Q2_K decoded": "c728026a2cf2e604", "Q3_K decoded": "36650bc7b2ca083a",
    },
}  # fmt: skip
"""By version of the layout a digest of packed bytes for each format."""


@pytest.fixture(autouse=True)
def small_weights_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_file, "MIN_BYTES", 1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    fields = {**CONFIG, "hidden_size": 64, "intermediate_size": 96}
    path = make_tiny_directory(tmp_path / "model", **fields)
    random = np.random.default_rng(1)
    weights = {name: random.standard_normal(shape, np.float32) for name, shape in tensor_shapes(fields).items()}
    save_file(weights, path / "model.safetensors")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def make_config(checkpoint: Checkpoint, cache: Any, **options: Any) -> EngineConfig:
    return config_of(checkpoint.hf_config, **{"dtype": "bfloat16", **options}, weight_cache=str(cache))


def trace(checkpoint: Checkpoint, config: EngineConfig) -> PackedWeights:
    return trace_program(config, checkpoint, config.scheduler.layer_groups)[1]


def filled(
    model: Path, cache: Any, *, rank: int = 0, progress: Progress | None = None, **options: Any
) -> PackedWeights:
    checkpoint = open_checkpoint(resolve_source(str(model)))
    config = make_config(checkpoint, cache, **options)
    weights = trace(checkpoint, config)
    fill_weights(config, checkpoint, weights, progress, rank)
    finish()
    return weights


def in_memory(model: Path, **options: Any) -> bytes:
    checkpoint = open_checkpoint(resolve_source(str(model)))
    config = make_config(checkpoint, "off", **options)
    weights = trace(checkpoint, config)
    weights.fill(weights.placements)
    return weights.memory.tobytes()


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect a number for each time that weights are packed."""
    done: list[int] = []
    fill = PackedWeights.fill

    def counted(weights: PackedWeights, *arguments: Any) -> None:
        done.append(weights.num_bytes)
        fill(weights, *arguments)

    monkeypatch.setattr(PackedWeights, "fill", counted)
    return done


# --- Bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"quantization": "int8"}, {"quantization": "fp8"}])
def test_second_start_maps_what_the_first_packed(
    model: Path, cache: Path, packs: list[int], options: dict[str, Any]
) -> None:
    expected = in_memory(model, **options)
    packs.clear()
    news: list[Any] = []
    first = filled(model, cache, **options)
    second = filled(model, cache, progress=lambda *item: news.append(item), **options)
    assert len(packs) == 1
    assert first.memory.tobytes() == second.memory.tobytes() == expected
    assert not first.memory.flags.writeable
    assert not second.memory.flags.writeable
    assert news, "the tokenizer begins with the first report"


def test_mapped_model_computes_the_same_logits(model: Path, cache: Path) -> None:
    checkpoint = open_checkpoint(resolve_source(str(model)))
    found = []
    for where in ("off", cache, cache):
        runner = PlanRunner(make_config(checkpoint, where), checkpoint)
        found.append(runner.run(runner.add([3, 1, 4, 1, 5, 9, 2, 6])))
        finish()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert len(list(cache.iterdir())) == 1


def test_packed_formats_have_the_bytes_of_their_layout_version() -> None:
    """A change here needs a higher LAYOUT_VERSION, with a row of its own: files of the old one are then made anew."""
    assert GOLDEN[LAYOUT_VERSION] == digests()


def digests() -> dict[str, str]:
    found = {}
    for name, stored in {**STORED, **FLOATS_STORED}.items():
        for target in {name, *({"q8", "q4m", "bf16"} if name == "f32" else ())}:
            rows = finite_rows(stored, 37, 512, seed=5)
            packed = Packed(target, 37, 512, fill=0).add_rows(stored, rows)
            found[f"{stored} as {target}"] = hashlib.sha256(packed.data.tobytes()).hexdigest()[:16]
    for stored in ("Q2_K", "Q3_K"):  # of those that are decoded first
        values = k_quants("w", 7, 512, stored).to_numpy()
        found[f"{stored} decoded"] = hashlib.sha256(values.tobytes()).hexdigest()[:16]
    return found


# --- Keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"}, {"quantization": "int8"}, {"quantization": "fp8"}, {"quantization": "int4"},
        {"rank": 1}, {"dtype": "float16"},
    ],
)  # fmt: skip
def test_options_that_change_the_bytes_have_files_of_their_own(
    model: Path, cache: Path, packs: list[int], options: dict[str, Any]
) -> None:
    filled(model, cache)
    filled(model, cache, **options)
    filled(model, cache)
    filled(model, cache, **options)
    assert len(packs) == 2
    assert len(list(cache.iterdir())) == 2


def test_int8_and_fp8_of_the_same_shapes_have_different_files(model: Path, cache: Path) -> None:
    int8, fp8 = (filled(model, cache, quantization=name).memory.tobytes() for name in ("int8", "fp8"))
    assert int8 != fp8
    assert filled(model, cache, quantization="int8").memory.tobytes() == int8


@pytest.mark.parametrize("options", [{"num_threads": 3}, {"block_size": 32}, {"max_num_seqs": 3}])
def test_options_that_change_no_byte_share_a_file(
    model: Path, cache: Path, packs: list[int], options: dict[str, Any]
) -> None:
    filled(model, cache)
    filled(model, cache, **options)
    assert len(packs) == 1


def touch(model: Path) -> None:
    os.utime(model / "model.safetensors", ns=(10**18, 10**18))


def replace_file(model: Path) -> None:
    path = model / "model.safetensors"
    status, data = path.stat(), path.read_bytes()
    (model / "new").write_bytes(data)
    os.utime(model / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    os.replace(model / "new", path)


def change_config(model: Path) -> None:
    path = model / "config.json"
    path.write_text(path.read_text() + "\n")


def change_in_place(model: Path) -> None:
    """Write one other value; size, inode and the time of modification stay."""
    path = model / "model.safetensors"
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(np.float32(7).tobytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [touch, replace_file, change_config, change_in_place])
def test_source_that_changes_under_the_same_name_is_packed_anew(
    model: Path, cache: Path, packs: list[int], change: Callable[[Path], None]
) -> None:
    filled(model, cache)
    change(model)
    filled(model, cache)
    filled(model, cache)
    assert len(packs) == 2
    assert len(list(cache.iterdir())) == 1, "the old file is replaced"


def write_other_values(model: Path) -> None:
    path = model / "model.safetensors"
    values = {name: tensor[:] * np.float32(2) for name, tensor in load_file(path).items()}
    save_file(values, model / "new")
    os.replace(model / "new", path)


def test_source_replaced_between_opening_and_packing_is_never_kept_under_the_state_of_the_new_one(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = in_memory(model)
    checkpoint = open_checkpoint(resolve_source(str(model)))
    config = make_config(checkpoint, cache)
    first, second = trace(checkpoint, config), trace(checkpoint, config)
    write_other_values(model)
    caplog.set_level(logging.INFO, "quire.runtime")
    fill_weights(config, checkpoint, first, None, 0)
    assert first.memory.tobytes() == old
    assert "its files changed while they were read" in caplog.text
    assert not list(cache.iterdir())
    new = in_memory(model)
    assert filled(model, cache).memory.tobytes() == new != old
    # The file of the new state is not taken for what the checkpoint opened.
    fill_weights(config, checkpoint, second, None, 0)
    assert second.memory.tobytes() == old


def test_files_of_the_opened_state_serve_although_the_source_was_replaced(
    model: Path, cache: Path, packs: list[int]
) -> None:
    filled(model, cache)
    checkpoint = open_checkpoint(resolve_source(str(model)))
    write_other_values(model)
    config = make_config(checkpoint, cache)
    weights = trace(checkpoint, config)
    fill_weights(config, checkpoint, weights, None, 0)
    assert len(packs) == 1


@pytest.mark.parametrize("name", ["LAYOUT_VERSION", "__version__"])
def test_another_version_packs_anew(
    model: Path, cache: Path, packs: list[int], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    filled(model, cache)
    monkeypatch.setattr(weight_file, name, "other")
    filled(model, cache)
    assert len(packs) == 2


def mapped_tensor(model: Path) -> tuple[Checkpoint, WeightTensor]:
    checkpoint = open_checkpoint(resolve_source(str(model)))
    return checkpoint, checkpoint.tensors["model.layers.0.mlp.up_proj.weight"]


def test_every_way_to_read_a_tensor_has_another_key(model: Path, cache: Path) -> None:
    checkpoint, tensor = mapped_tensor(model)
    weights = trace(checkpoint, make_config(checkpoint, cache))
    order = np.arange(96)[::-1].copy()
    ways = [
        (tensor, {}), (tensor.with_rows(order), {}), (tensor.with_rows(order[::-1].copy()), {}),
        (tensor.viewed([Offset(1)]), {}),
        (tensor.transposed(), {}), (tensor.part(slice(1, 96), slice(None)), {}),
        (tensor.part(slice(None), slice(0, 8)), {}), (replace(tensor, format="BF16"), {}),
        (replace(tensor, name="other"), {}), (replace(tensor, column_order=order[:2]), {}),
        (replace(tensor, scales=tensor.stored), {}), (replace(tensor, is_across=True), {}),
        (checkpoint.tensors["model.layers.1.mlp.up_proj.weight"], {}),
        (replace(tensor, stored=checkpoint.tensors["model.layers.1.mlp.up_proj.weight"].stored), {}),
        (replace(tensor, stored=np.zeros((96, 256), np.uint8)), {}),
        (replace(tensor, stored=np.ones((96, 256), np.uint8)), {}),
        (RoundedTensor.of(tensor), {}), (RoundedTensor.of(tensor.viewed([Offset(2)])), {}),
        (RoundedTensor.of(tensor).part(slice(None), slice(0, 16)), {}),
        (tensor, {"first_row": 16}), (tensor, {"parameter_name": "b"}),
    ]  # fmt: skip

    def key_of(tensor: WeightTensor, others: dict[str, Any]) -> str:
        weights.placements = [replace(Placement(tensor, "a", 0), **others)]
        return place_of(cache, checkpoint, weights, 0).header.key

    keys = [key_of(*way) for way in ways]
    assert len(set(keys)) == len(keys)
    assert keys == [key_of(*way) for way in ways]


def test_key_does_not_depend_on_where_files_are_mapped(model: Path, cache: Path) -> None:
    keys = set()
    kept = []
    for _ in range(2):
        checkpoint = open_checkpoint(resolve_source(str(model)))
        kept.append(checkpoint)
        weights = trace(checkpoint, make_config(checkpoint, cache))
        keys.add(place_of(cache, checkpoint, weights, 0).header.key)
    assert len(keys) == 1


def test_state_of_a_split_file_is_that_of_all_parts(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"m-{number:05}-of-00003.gguf").write_bytes(b"x" * number)
    files = ModelFiles("m", tmp_path / "m-00002-of-00003.gguf", "gguf", "local")
    assert [size for _, size, *_ in source_state(files)] == [1, 2, 3]


# --- Where no file is kept ------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda path: path.write_bytes(b""), lambda path: path.symlink_to("/proc/self/none")])
def test_directory_that_cannot_be_written_means_packing_in_memory(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None]
) -> None:
    make(cache)
    caplog.set_level(logging.INFO, "quire.runtime")
    weights = filled(model, cache / "below")
    assert weights.memory.tobytes() == in_memory(model)
    assert len(caplog.records) == 1
    assert f"the packed weights of {model} are not kept in {cache / 'below'}: " in caplog.text


@pytest.mark.parametrize("spoil", [let_others_write, give_away])
def test_directory_of_other_users_means_packing_in_memory_with_a_warning(
    model: Path, cache: Path, packs: list[int], caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], object]
) -> None:
    filled(model, cache)
    spoil(cache)
    weights = filled(model, cache)
    assert len(packs) == 2
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith(f"the packed weights of {model} are not kept in {cache}: ")
    assert weights.memory.tobytes() == in_memory(model)


@pytest.mark.parametrize("function", ["posix_fallocate", "replace"])
def test_disk_that_fails_means_packing_in_memory(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, function, fail)
    caplog.set_level(logging.INFO, "quire.runtime")
    weights = filled(model, cache)
    assert weights.memory.tobytes() == in_memory(model)
    assert "are not kept" in caplog.text
    assert "No space left on device" in caplog.text
    assert not list(cache.iterdir())


def test_file_system_without_mapped_files_means_packing_in_memory(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(shared_file, "COPIED_BYTES", 0)
    monkeypatch.setattr(shared_file, "map_over", fail)
    caplog.set_level(logging.INFO, "quire.runtime")
    assert filled(model, cache).memory.tobytes() == in_memory(model)
    assert "No such device" in caplog.text
    assert not list(cache.iterdir())


def test_limit_below_the_weights_means_packing_in_memory(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "quire.runtime")
    assert filled(model, cache, weight_cache_bytes=5).memory.tobytes() == in_memory(model)
    assert "more than the limit" in caplog.text
    assert not list(cache.iterdir())


def test_source_that_changes_while_it_is_read_is_not_kept(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = PackedWeights.fill

    def changing(weights: PackedWeights, *arguments: Any) -> None:
        fill(weights, *arguments)
        touch(model)

    monkeypatch.setattr(PackedWeights, "fill", changing)
    caplog.set_level(logging.INFO, "quire.runtime")
    filled(model, cache)
    assert "its files changed while they were read" in caplog.text
    assert not list(cache.iterdir())


def test_error_while_packing_leaves_no_file(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(weights: PackedWeights, *arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PackedWeights, "fill", fail)
    with pytest.raises(KeyboardInterrupt):
        filled(model, cache)
    assert not list(cache.iterdir())


def test_small_weights_are_packed_at_each_start(
    model: Path, cache: Path, packs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_file, "MIN_BYTES", filled(model, "off").num_bytes + 1)
    packs.clear()
    filled(model, cache)
    filled(model, cache)
    assert len(packs) == 2
    assert not cache.exists()


@pytest.mark.parametrize(
    ("option", "variable", "expected"),
    [
        ("auto", None, "cache/weights"), ("auto", "off", None), ("auto", "auto", "cache/weights"), ("off", "d", None),
        ("auto", "/d", "/d"), ("/e", "/d", "/e"), ("/e", "off", "/e"),
    ],
)  # fmt: skip
def test_directory_comes_from_the_option_then_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, variable: str | None, expected: str | None
) -> None:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("QUIRE_WEIGHT_CACHE", raising=False)
    if variable is not None:
        monkeypatch.setenv("QUIRE_WEIGHT_CACHE", variable)
    found = weight_directory(EngineOptions(weight_cache=option))
    assert found == (None if expected is None else tmp_path / expected)


def test_random_weights_are_not_kept() -> None:
    assert weight_directory(EngineOptions(load_format="dummy", weight_cache="/d")) is None
