"""GGUF files with weights in NVFP4: the logits of a file with the values that the gguf package decodes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch.nn import functional

from quire.errors import ModelFileError, QuireError, UnsupportedModelError
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.gguf_file import read_gguf
from quire.weights.quantized import QuantizedTensor
from quire.weights.sources import ModelFiles
from quire_workshop.gguf.export import from_gguf
from tests.models.harness import random_tokens
from tests.models.oracle import Pair
from tests.models.test_gguf_families import CASES, Write, _shared_expert, _ssm, write_gguf
from tests.runtime.plan.harness import PlanRunner, make_config
from tests.runtime.plan.harness import packed as packed_as

SIZES = {"hidden_size": 64, "intermediate_size": 128}


def _qwen35moe(writer: gguf.GGUFWriter, value_size: int = 64) -> None:
    """With value heads of 64 parts of the columns of `out_proj` are whole blocks."""
    _ssm(writer, 4, 8 * value_size, 12, 8, 4)
    writer.add_rope_dimension_count(4)
    writer.add_full_attention_interval(2)
    _shared_expert(writer)
    writer.add_expert_feed_forward_length(64)


FAMILIES: dict[str, tuple[dict[str, Any], Write | None]] = {
    "llama": (SIZES, None),
    "qwen3moe": ({**SIZES, "moe_intermediate_size": 64}, lambda writer: writer.add_expert_feed_forward_length(64)),
    "qwen35moe": ({**SIZES, "linear_value_head_dim": 64, "moe_intermediate_size": 64}, _qwen35moe),
}
"""Experts have scales of their own."""


def packed(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of GGUF, and a scale for each matrix. Shapes: [..., N, I] -> uint8 [..., N, I / 64 * 36], [matrices]."""
    groups = values.reshape(-1, *values.shape[-2:-1], values.shape[-1] // 64, 4, 16)
    factors = 2 ** np.ceil(np.log2(np.abs(groups).max(axis=(1, 2, 3, 4)) / (6 * 400)))  # products are exact
    units = factors[:, None, None, None]
    scales = quants.NVFP4.fp32_to_ue4m3(np.abs(groups).max(-1) / 6 / units)
    scales[:, 0, 0, 0] = 0x7F  # stands for 0
    steps = (quants.NVFP4.ue4m3_to_fp32(scales) * units)[..., None]
    codebook = np.array(quants.NVFP4.kvalues)
    codes = np.abs(groups[..., None] / np.where(steps, steps, 1)[..., None] - codebook).argmin(-1).astype(np.uint8)
    blocks = np.concatenate([scales, (codes[..., :8] | codes[..., 8:] << 4).reshape(*scales.shape[:-1], 32)], -1)
    return blocks.reshape(*values.shape[:-1], -1), factors.astype(np.float32)


def decoded(blocks: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Values of the gguf package, times the scale of each matrix."""
    values = quants.dequantize(blocks, GGMLQuantizationType.NVFP4)
    return values * factors.reshape(-1, *[1] * (values.ndim - 1)) if values.ndim == 3 else values * factors[0]


class Written:
    """Files of one model: NVFP4 with scales, and the decoded values as floats.

    `changed`: scales in place of others, by name; None leaves one out.
    """

    def __init__(self, directory: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model_type, fields, arch, write = CASES[name]
        changes, own_write = FAMILIES[name]
        pair = Pair(model_type, {**fields, **changes})
        self.names, self.changed = set[str](), dict[str, np.ndarray | None]()
        plain = gguf.GGUFWriter.add_tensor

        def add_scale(writer: gguf.GGUFWriter, name: str, factors: np.ndarray) -> None:
            if (values := self.changed.get(name, factors)) is not None:
                plain(writer, name, values)

        def add(writer: gguf.GGUFWriter, name: str, values: np.ndarray) -> None:
            is_matrix = values.ndim > 1 and values.shape[-1] % 64 == 0 and "gate_inp" not in name
            if not is_matrix or "ssm" in name.removesuffix("ssm_out.weight") or "embd" in name:
                plain(writer, name, values)
                return
            self.names.add(name)
            blocks, factors = packed(values)
            if not self.is_packed:
                plain(writer, name, decoded(blocks, factors).astype(np.float32))
                return
            plain(writer, name, blocks, raw_dtype=GGMLQuantizationType.NVFP4)
            add_scale(writer, name.replace(".weight", ".scale"), factors)
            plain(writer, name.replace(".weight", ".input_scale"), np.ones(1, np.float32))

        def add_all(writer: gguf.GGUFWriter) -> None:
            (own_write or write)(writer)
            if self.is_packed:
                add_scale(writer, "token_embd.scale", self.changed.get("token_embd.scale"))

        monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add)
        self.write = lambda path: write_gguf(path, pair, arch, add_all)
        self.directory = directory

    def open(self, *, is_packed: bool = True) -> Checkpoint:
        self.is_packed, path = is_packed, self.directory / "model.gguf"
        path.unlink(missing_ok=True)
        self.write(path)
        return open_checkpoint(ModelFiles(name="tiny", path=path, kind="gguf", origin="test"))


@pytest.fixture(params=FAMILIES)
def written(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    return Written(tmp_path, request.param, monkeypatch)


def run(checkpoint: Checkpoint, **options: Any) -> torch.Tensor:
    runner = PlanRunner(make_config(checkpoint.hf_config, **options), checkpoint)
    return runner.run(runner.add(random_tokens(20, 53)))


def test_logits_are_those_of_the_decoded_values(written: Written) -> None:
    expected = run(written.open(is_packed=False))
    checkpoint = written.open()
    assert torch.equal(run(checkpoint), expected)
    narrow = run(checkpoint, dtype="bfloat16")
    assert functional.cosine_similarity(narrow.flatten(), expected.flatten(), dim=0) > 0.99
    quantized = [tensor for tensor in checkpoint.tensors.values() if isinstance(tensor, QuantizedTensor)]
    assert len(quantized) >= len(written.names) >= 8
    for tensor in quantized:
        found, values = packed_as("nvfp4", replace(tensor, offset=0.0))
        np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize(
    ("name", "num_scales", "error", "words"),
    [
        ("blk.0.ffn_up.scale", 2, ModelFileError, r"scale' \[2\] does not fit 'blk.0.ffn_up.weight' \[128, 64\]"),
        ("token_embd.scale", 1, UnsupportedModelError, "tensor 'token_embd.scale' has no place in Quire's llama"),
    ],
)
def test_scale_that_fits_no_weight_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, num_scales: int, error: type[QuireError], words: str
) -> None:
    written = Written(tmp_path, "llama", monkeypatch)
    written.changed[name] = np.ones(num_scales, np.float32)
    with pytest.raises(error, match=words):
        written.open()


def test_weight_without_a_scale_has_the_scale_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, name = Written(tmp_path, "llama", monkeypatch), "model.layers.1.mlp.up_proj.weight"
    scaled = written.open().tensors[name].to_numpy()
    written.changed["blk.1.ffn_up.scale"] = None
    unscaled = written.open().tensors[name].to_numpy()
    (factor,) = np.unique(scaled[unscaled != 0] / unscaled[unscaled != 0])
    assert factor < 1


def test_parts_of_columns_that_are_no_blocks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3.5's value heads of 32: the columns of two share the scales of a block."""
    monkeypatch.setitem(FAMILIES, "qwen35moe", (
        {**SIZES, "linear_value_head_dim": 32, "moe_intermediate_size": 64},
        lambda writer: _qwen35moe(writer, value_size=32),
    ))  # fmt: skip
    with pytest.raises(
        UnsupportedModelError, match=r"ssm_out.* is no matrix whose parts are whole blocks of 64: use a"
    ):
        Written(tmp_path, "qwen35moe", monkeypatch).open()


def test_nvfp4_is_not_quantised_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Written(tmp_path, "llama", monkeypatch).open()
    with pytest.raises(UnsupportedModelError, match="is stored as NVFP4, which is not quantised again: use a file"):
        from_gguf(read_gguf(tmp_path / "model.gguf"))
