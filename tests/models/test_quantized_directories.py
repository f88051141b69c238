"""Hugging Face directories with quantised weights: the logits of Transformers' model of the decoded weights.

Packers and decoders here follow the formats' definitions value by value and share nothing with the package.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from quire.errors import ConfigError, ModelFileError, QuireError, UnsupportedModelError
from quire.layers.group import LocalGroup
from quire.runtime.eager import load_model
from quire.runtime.plan.packed_weights import PACKED_DIRECTLY
from quire.weight_map import Offset
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.quantized import QuantizedTensor, RoundedTensor, e4m3_values, e5m2_values, round_to_e4m3
from quire.weights.sources import ModelFiles
from tests.models.harness import random_tokens, stored
from tests.models.oracle import Pair
from tests.models.test_conformance import assert_close
from tests.models.tiny_configs import LLAMA, TINY_CONFIGS
from tests.runtime.plan.harness import PlanRunner, make_checkpoint, make_config, packed

FIELDS = {**LLAMA, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
Parts = tuple[dict[str, torch.Tensor], torch.Tensor]
Pack = Callable[[torch.Tensor], Parts]
FLOAT_LAYER = "model.layers.1.mlp.up_proj"
"""Stored as floats, as `modules_to_not_convert` and `ignore` say."""


def pack_words(codes: torch.Tensor, axis: int, bits: int, order: list[int]) -> torch.Tensor:
    """int32 words of `32 / bits` neighbours along an axis; `order[i]`: which of them has the i-th lowest bits."""
    codes = codes.movedim(axis, -1).to(torch.int64)
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] * bits // 32, dtype=torch.int64)
    for position, index in enumerate(order):
        words |= codes[..., index :: len(order)] << (bits * position)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).movedim(-1, axis).contiguous()


def integers(weight: torch.Tensor, bits: int, group_of: torch.Tensor, *, symmetric: bool, dtype: Any) -> Any:
    """Codes [N, I], scales and zeros [N, G], and the decoded values. `group_of`: of each column."""
    num_groups = int(group_of.max()) + 1
    members = [weight[:, group_of == index] for index in range(num_groups)]
    low, high = (torch.stack([pick(group, dim=1) for group in members], 1) for pick in (torch.amin, torch.amax))
    middle, top = 1 << (bits - 1), (1 << bits) - 1
    span = torch.maximum(-low, high) / (middle - 1) if symmetric else (high - low) / top
    scales = span.to(dtype).float()
    zeros = torch.full_like(scales, middle) if symmetric else (-low / scales).round().clamp(1, top)
    codes = (weight / scales[:, group_of] + zeros[:, group_of]).round().clamp(0, top)
    return codes, scales.to(dtype), zeros, (codes - zeros[:, group_of]) * scales[:, group_of]


def gptq(weight: torch.Tensor, *, bits: int, size: int, symmetric: bool, has_order: bool, added: int = 1) -> Parts:
    num_inputs = weight.shape[1]
    group_of = torch.arange(num_inputs) // (num_inputs if size == -1 else size)
    if has_order:
        group_of = group_of[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(5))]
    codes, scales, zeros, decoded = integers(weight, bits, group_of, symmetric=symmetric, dtype=torch.float16)
    order = list(range(32 // bits))
    return {
        "qweight": pack_words(codes.T, 0, bits, order), "scales": scales.T.contiguous(),
        "qzeros": pack_words(zeros.T - added, 1, bits, order), "g_idx": group_of.to(torch.int32),
        "bias": torch.zeros(len(weight)),
    }, decoded  # fmt: skip


def awq(weight: torch.Tensor) -> Parts:
    group_of, order = torch.arange(weight.shape[1]) // 64, [0, 2, 4, 6, 1, 3, 5, 7]
    codes, scales, zeros, decoded = integers(weight, 4, group_of, symmetric=False, dtype=torch.float16)
    return {
        "qweight": pack_words(codes.T, 1, 4, order), "scales": scales.T.contiguous(),
        "qzeros": pack_words(zeros.T, 1, 4, order),
    }, decoded  # fmt: skip


def compressed(weight: torch.Tensor, *, bits: int, symmetric: bool, has_order: bool = False) -> Parts:
    group_of, order = torch.arange(weight.shape[1]) // 32, list(range(32 // bits))
    group_of = group_of.flip(0).roll(7) if has_order else group_of
    codes, scales, zeros, decoded = integers(weight, bits, group_of, symmetric=symmetric, dtype=torch.bfloat16)
    others = {} if symmetric else {"weight_zero_point": pack_words(zeros, 0, bits, order)}
    others |= {"weight_g_idx": group_of.to(torch.int32)} if has_order else {}
    shape = torch.tensor(weight.shape)
    return {"weight_packed": pack_words(codes, 1, bits, order), "weight_scale": scales, "weight_shape": shape,
            **others}, decoded  # fmt: skip


def int8_channels(weight: torch.Tensor) -> Parts:
    group_of = torch.zeros(weight.shape[1], dtype=torch.int64)
    codes, scales, _, decoded = integers(weight, 8, group_of, symmetric=True, dtype=torch.bfloat16)
    return {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}, decoded


def float8(weight: torch.Tensor, *, scales: str, name: str, dtype: torch.dtype = torch.float8_e4m3fn) -> Parts:
    if scales == "block":
        rows, columns = (-(-size // 128) for size in weight.shape)
        parts = [
            [weight[128 * r : 128 * r + 128, 128 * c : 128 * c + 128] for c in range(columns)] for r in range(rows)
        ]
        scale = torch.stack([torch.stack([part.abs().max() for part in row]) for row in parts]) / 448
        codes = torch.cat([
            torch.cat([(part / scale[r, c]).to(dtype) for c, part in enumerate(row)], 1) for r, row in enumerate(parts)
        ])  # fmt: skip
        return {"weight": codes, name: scale}, _dequantize_fp8_weight(codes, scale, [128, 128], torch.float32)
    scale = weight.abs().amax(1, keepdim=True) / 448 if scales == "channel" else weight.abs().max() / 448
    codes = (weight / scale).to(dtype)
    return {"weight": codes, name: scale}, codes.float() * scale


def nvfp4(weight: torch.Tensor, *, is_modelopt: bool = False) -> Parts:
    """Codes are a sign and the index of a size; a scale per 16 columns in E4M3, and one factor for the matrix."""
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.unflatten(1, (-1, 16))
    factor = groups.abs().amax() / (6 * 448)
    scales = (groups.abs().amax(2) / 6 / factor).to(torch.float8_e4m3fn)
    real = scales.float() * factor if is_modelopt else scales.float() / (1 / factor)
    nearest = (groups.abs()[..., None] / real[..., None, None] - sizes).abs().argmin(-1)
    decoded = (sizes[nearest] * groups.sign() * real[..., None]).flatten(1)
    codes = (nearest + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    if is_modelopt:
        return {"weight": packed, "weight_scale": scales, "weight_scale_2": factor, "input_scale": factor}, decoded
    return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": (1 / factor)[None],
            "input_global_scale": factor[None]}, decoded  # fmt: skip


def with_options(pack: Callable[..., Parts], **options: Any) -> Pack:
    return lambda weight: pack(weight, **options)


def gptq_case(bits: int, size: int, symmetric: bool, has_order: bool = False, version: str | None = None) -> Any:
    fields = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric, "desc_act": has_order}
    fields |= {"checkpoint_format": version} if version else {}
    added = 0 if version == "gptq_v2" else 1
    return fields, with_options(gptq, bits=bits, size=size, symmetric=symmetric, has_order=has_order, added=added)


def compressed_case(layout: str, pack: Pack, **weights: Any) -> Any:
    fields = {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head", FLOAT_LAYER]}
    return {**fields, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}, pack


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "modules_to_not_convert": [FLOAT_LAYER]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
CASES: dict[str, tuple[str, tuple[dict[str, Any], Pack]]] = {
    "FP8 blocks": ("FP8", ({**FP8, "weight_block_size": [128, 128]},
                           with_options(float8, scales="block", name="weight_scale_inv"))),
    "FP8 tensor": ("FP8", (FP8, with_options(float8, scales="tensor", name="weight_scale"))),
    "FP8 e5m2": ("FP8", (FP8, with_options(float8, scales="channel", name="weight_scale", dtype=torch.float8_e5m2))),
    "GPTQ 4": ("Q4_0", gptq_case(4, 64, True)),
    "GPTQ 4, one group": ("Q4_0", gptq_case(4, -1, True)),
    "GPTQ 4, zeros": ("Q4_1", gptq_case(4, 32, False)),
    "GPTQ 4, version 2": ("Q4_1", gptq_case(4, 32, False, version="gptq_v2")),
    "GPTQ 4, groups of 16": ("INT4", gptq_case(4, 16, False)),
    "GPTQ 4, act-order": ("INT4", gptq_case(4, 64, True, has_order=True)),
    "GPTQ 8": ("Q8_0", gptq_case(8, 64, True)),
    "GPTQ 8, zeros and act-order": ("INT8", gptq_case(8, 64, False, has_order=True)),
    "AWQ": ("Q4_1", ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}, awq)),
    "W4A16": ("Q4_0", compressed_case("pack-quantized", with_options(compressed, bits=4, symmetric=True), **INT4)),
    "W4A16 zeros": ("Q4_1", compressed_case("pack-quantized", with_options(compressed, bits=4, symmetric=False),
                                            **INT4)),
    "W4A16 act-order": ("INT4", compressed_case(
        "pack-quantized", with_options(compressed, bits=4, symmetric=True, has_order=True), **INT4)),
    "W8A16": ("Q8_0", compressed_case("pack-quantized", with_options(compressed, bits=8, symmetric=True),
                                      **{**INT4, "num_bits": 8})),
    "W8A8 int8": ("Q8_0", compressed_case("int-quantized", int8_channels, num_bits=8, type="int", strategy="channel")),
    "W8A8 fp8": ("FP8", compressed_case("float-quantized", with_options(float8, scales="channel", name="weight_scale"),
                                        num_bits=8, type="float", strategy="channel")),
    "NVFP4": ("NVFP4", compressed_case("nvfp4-pack-quantized", nvfp4, num_bits=4, type="float",
                                       strategy="tensor_group", group_size=16)),
    "NVFP4, ModelOpt": ("NVFP4", ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [FLOAT_LAYER]},
                                  with_options(nvfp4, is_modelopt=True))),
}  # fmt: skip


def save(
    directory: Path, quantization: dict[str, Any], pack: Pack, model_type: str = "qwen2", fields: Any = FIELDS
) -> Pair:
    """Write a directory, each expert's matrices apart. Returns the oracle with the decoded weights."""
    pair = Pair(model_type, fields)
    tensors: dict[str, torch.Tensor] = {}
    for name, values in matrices(pair.oracle.state_dict()):
        layer = name.removesuffix(".weight")
        if layer.endswith(("_proj", "kv_proj_with_mqa")) and layer != FLOAT_LAYER:
            parts, decoded = pack(values.clone())
            tensors |= {f"{layer}.{part}": stored.clone() for part, stored in parts.items()}
            assert (decoded - values).abs().mean() < 0.2 * values.abs().mean()
            values.copy_(decoded)
    plain = {name: values.clone() for name, values in matrices(pair.oracle.state_dict())}
    kept = {name: values for name, values in plain.items() if not _is_packed(name, tensors)}
    # Biases of the model replace the zeros that GPTQ's tools write.
    save_file(tensors | kept, directory / "model.safetensors")
    config = {**pair.hf_config, "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    return pair


def matrices(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights by name; of stacked experts, views of each one's."""
    for name, values in state.items():
        stack, _, kind = name.rpartition(".")
        for index, matrix in enumerate(values if kind in ("gate_up_proj", "down_proj") else []):
            parts = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
            for part, view in parts if kind == "gate_up_proj" else [(kind, matrix)]:
                yield f"{stack}.{index}.{part}.weight", view
        if kind not in ("gate_up_proj", "down_proj"):
            yield name, values


def _is_packed(name: str, tensors: dict[str, Any]) -> bool:
    layer = name.rpartition(".")[0]
    return name.endswith(".weight") and any(
        f"{layer}.{part}" in tensors for part in ("weight", "qweight", "weight_packed")
    )


def open_saved(path: Path) -> Checkpoint:
    return open_checkpoint(ModelFiles(name="tiny", path=path, kind="hf", origin="test"))


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Pair, Checkpoint, str]:
    format_name, (quantization, pack) = CASES[request.param]
    return save(tmp_path, quantization, pack), open_saved(tmp_path), format_name


def test_logits_are_those_of_the_decoded_weights(case: tuple[Pair, Checkpoint, str]) -> None:
    pair, checkpoint, format_name = case
    token_ids = random_tokens(9, 53)
    expected = pair.expected(token_ids)
    exact = PlanRunner(make_config(checkpoint.hf_config), checkpoint)
    assert_close(exact.run(exact.add(token_ids)), expected)
    packed = PlanRunner(make_config(checkpoint.hf_config, dtype="bfloat16"), checkpoint)
    found = packed.run(packed.add(token_ids))
    assert functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.999
    quantized = {name: tensor for name, tensor in checkpoint.tensors.items() if isinstance(tensor, QuantizedTensor)}
    assert {tensor.format for tensor in quantized.values()} == {format_name}
    assert len(quantized) == 13
    # Scales and zeros are less than half of the codes.
    assert all(tensor.num_bytes < 1.5 * tensor.stored.size for tensor in quantized.values())


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("name", ["FP8 blocks", "W4A16 zeros"])
def test_experts_and_latents_are_those_of_the_decoded_weights(tmp_path: Path, model_type: str, name: str) -> None:
    fields = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 96}
    if name != "FP8 blocks":
        fields |= {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16}
    written = next(iter(TINY_CONFIGS[model_type].values()))
    pair = save(tmp_path, *CASES[name][1], model_type, {**written, **{k: v for k, v in fields.items() if k in written}})
    checkpoint, token_ids = open_saved(tmp_path), random_tokens(9, 53)
    for dtype in ("float32", "bfloat16"):
        runner = PlanRunner(make_config(checkpoint.hf_config, dtype=dtype), checkpoint)
        found, expected = runner.run(runner.add(token_ids)), pair.expected(token_ids)
        if dtype == "float32":
            assert_close(found, expected)
        assert functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.99


@pytest.mark.parametrize(
    ("name", "file", "tag"),
    [
        ("GPTQ 4", "quantize_config.json", None), ("AWQ", "quant_config.json", None),
        ("NVFP4, ModelOpt", "hf_quant_config.json", "quantization"),
    ],
)  # fmt: skip
def test_methods_in_files_of_their_own_are_read(tmp_path: Path, name: str, file: str, tag: str | None) -> None:
    fields, pack = CASES[name][1]
    pair = save(tmp_path, fields, pack)
    (tmp_path / "config.json").write_text(json.dumps(pair.hf_config))
    fields = {key: value for key, value in fields.items() if key != "quant_method"}
    (tmp_path / file).write_text(json.dumps({tag: fields, "producer": {}} if tag else fields))
    checkpoint, token_ids = open_saved(tmp_path), random_tokens(9, 53)
    runner = PlanRunner(make_config(checkpoint.hf_config), checkpoint)
    assert_close(runner.run(runner.add(token_ids)), pair.expected(token_ids))
    bad = {**fields, "bits": 3, "quant_algo": "W3"}
    (tmp_path / file).write_text(json.dumps({tag: bad} if tag else bad))
    with pytest.raises(UnsupportedModelError, match=f"{file}: quantization_config has"):
        open_saved(tmp_path)


@pytest.mark.parametrize("name", ["W8A8 fp8", "W4A16"])
@pytest.mark.parametrize("module", ["self_attn", "self_attn.k_proj"])
def test_scales_of_caches_do_not_change_weights(tmp_path: Path, name: str, module: str) -> None:
    fields, pack = CASES[name][1]
    pair = save(tmp_path, {**fields, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, pack)
    stored_tensors = load_file(tmp_path / "model.safetensors")
    scales = {f"model.layers.{layer}.{module}.{kind}_scale": torch.ones(1) for layer in (0, 1) for kind in "kv"}
    save_file(stored_tensors | scales, tmp_path / "model.safetensors")
    checkpoint, token_ids = open_saved(tmp_path), random_tokens(9, 53)
    runner = PlanRunner(make_config(checkpoint.hf_config), checkpoint)
    assert_close(runner.run(runner.add(token_ids)), pair.expected(token_ids))
    other = f"model.layers.0.{module}.block_scale"
    save_file(stored_tensors | {other: torch.ones(1)}, tmp_path / "model.safetensors")
    assert other in open_saved(tmp_path).tensors  # not of a cache, so that loading names it


def test_parts_and_blocks_have_the_values_of_the_whole(case: tuple[Pair, Checkpoint, str]) -> None:
    _, checkpoint, format_name = case
    tensor = checkpoint.tensors["model.layers.0.mlp.down_proj.weight"]
    whole = tensor.to_numpy()
    order = np.random.default_rng(0).permutation(128)
    for part, expected in (
        (tensor.part(slice(37, 90), slice(96, 192)), whole[37:90, 96:]),
        (
            tensor.with_rows(order).part(slice(5, 9), slice(32, 160)).viewed([Offset(0.5)]),
            whole[order][5:9, 32:160] + 0.5,
        ),
        (tensor.part(slice(64, 128), slice(None)).with_rows(order[:4] // 2), whole[64:][order[:4] // 2]),
    ):
        np.testing.assert_array_equal(part.to_numpy(), expected)
        if format_name.startswith("Q"):
            step = np.abs(whole).max() / (7 if format_name.startswith("Q4") else 127)
            without, offset = part.viewed([Offset(-part.offset)]), np.float32(part.offset)
            found = packed(PACKED_DIRECTLY[format_name].name, without)[0].numpy() + offset
            np.testing.assert_allclose(found, expected, rtol=0, atol=step / 135 if format_name == "Q4_1" else 1e-7)
        if format_name == "NVFP4":
            found, values = packed("nvfp4", part.viewed([Offset(-part.offset)]))
            np.testing.assert_array_equal(found, values)


def layer_of(model: Any) -> Any:
    return model.layers[0]


def test_ranks_hold_rows_and_columns_of_the_whole(case: tuple[Pair, Checkpoint, str]) -> None:
    _, checkpoint, _ = case
    config = make_config(checkpoint.hf_config)
    whole = layer_of(load_model(config, checkpoint))
    for rank in range(2):
        mine = layer_of(load_model(config, checkpoint, group=LocalGroup(rank, 2)))
        assert torch.equal(mine.mlp.down_proj.weight, whole.mlp.down_proj.weight.chunk(2, 1)[rank])
        gates_ups = whole.mlp.gate_up_proj.weight.view(2, 192, 128).chunk(2, 1)[rank]
        assert torch.equal(mine.mlp.gate_up_proj.weight, gates_ups.reshape(-1, 128))
    with pytest.raises(ConfigError, match=r"48 of the 192 columns of .* quantised in blocks of 32; .* 2"):
        load_model(config, checkpoint, group=LocalGroup(0, 4))


@pytest.mark.parametrize(
    ("dtype", "values"), [(torch.float8_e4m3fn, e4m3_values()), (torch.float8_e5m2, e5m2_values())]
)
def test_8_bit_floats_are_those_of_torch(dtype: torch.dtype, values: np.ndarray) -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    np.testing.assert_array_equal(values, expected)


# --- FP8 at load --------------------------------------------------------------------------------


def test_values_rounded_at_load_are_those_of_torch() -> None:
    rows = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-12, 2, 64)[:, None]
    rows[3] = 0
    rows[4, ::2] *= 2.0**-10  # most of a row's values are below the smallest normal number
    ties = torch.arange(-448, 448, 448 / 4096)  # between any two values of E4M3 lie some, and the middle
    for values in (rows, ties[None]):
        expected = float8(values, scales="channel", name="")[1].nan_to_num(0)
        found = RoundedTensor.of(stored("w", values)).to_numpy()
        np.testing.assert_array_equal(found, expected.numpy())
    np.testing.assert_array_equal(round_to_e4m3(ties.numpy()), ties.to(torch.float8_e4m3fn).float().numpy())
    assert np.isnan(RoundedTensor.of(stored("w", torch.tensor([[1.0, float("inf")]]))).to_numpy()).all()


FP8_SIZES = {"hidden_size": 64, "n_embd": 64, "n_head": 4, "moe_intermediate_size": 64, "intermediate_size": 96}
ROUNDED = re.compile(r"(_proj|\.c_attn|\.c_proj|\.c_fc|\.wpe)(\.weight)?$")
"""Names of the matrices that are rounded at load, in all of these models: all but routers, tokens' table and head."""
INPUTS_FIRST = (("gpt2", 2), ("gpt_oss", 3))
"""Models, and the dimensions of those of their matrices that have inputs as rows."""


@pytest.mark.parametrize("model_type", ["qwen2", "gpt2", "qwen3_moe", "gpt_oss"])
def test_fp8_at_load_computes_with_the_weights_that_torch_rounds(model_type: str) -> None:
    """The bits of int8 of the weights that torch rounded, and near Transformers' logits of these."""
    written = next(iter(TINY_CONFIGS[model_type].values())) if model_type != "qwen2" else FIELDS
    pair = Pair(model_type, written | {name: size for name, size in FP8_SIZES.items() if name in written})
    options, token_ids = {"dtype": "bfloat16", "kv_cache_dtype": "float32"}, random_tokens(9, 53)
    runner = pair.runner(**options, quantization="fp8")
    found, original = runner.run(runner.add(token_ids)), pair.expected(token_ids)
    for name, values in pair.oracle.state_dict().items():
        rows = values.mT if (model_type, values.ndim) in INPUTS_FIRST and "wpe" not in name else values
        if ROUNDED.search(name) and rows.shape[-1] % 32 == 0:
            rows.copy_(float8(rows.flatten(0, -2), scales="channel", name="")[1].view(rows.shape))
    pair.checkpoint = make_checkpoint(pair.hf_config, pair.oracle.state_dict())
    other = pair.runner(**options, quantization="int8")
    assert torch.equal(found, other.run(other.add(token_ids)))
    with torch.inference_mode():
        rounded = pair.oracle(torch.tensor([token_ids]), use_cache=False).logits[0]
    errors = [float((found - logits).norm() / logits.norm()) for logits in (rounded, original)]
    assert errors[0] < min(0.04, 0.6 * errors[1]), errors


# --- Errors -----------------------------------------------------------------------------------------


def load_all(path: Path) -> list[np.ndarray]:
    return [tensor.to_numpy() for tensor in open_saved(path).tensors.values()]


@pytest.mark.parametrize(
    ("case_name", "changes", "error", "message"),
    [
        ("GPTQ 4", {"quant_method": "bitsandbytes"}, UnsupportedModelError, "quant_method=bitsandbytes; supported are"),
        ("GPTQ 4", {"bits": 3}, UnsupportedModelError, "bits=3; supported are 4, 8: use a GGUF"),
        ("GPTQ 4", {"bits": 8}, ModelFileError, "96 columns, no multiple of group_size=64"),
        ("GPTQ 4", {"group_size": 40}, ModelFileError, "columns, no multiple of group_size=40"),
        ("GPTQ 4", {"group_size": 32}, ModelFileError, "groups of 64 columns, but .* group_size=32; correct"),
        (
            "GPTQ 4",
            {"group_size": 2**64},
            ModelFileError,
            "group_size=18446744073709551616, not -1 or",
        ),
        ("FP8 blocks", {"weight_block_size": [128, 2**64]}, ModelFileError, "weight_block_size=.*, not null or two"),
        ("GPTQ 4", {"group_size": 0}, ModelFileError, "group_size=0, not -1 or a number above 0"),
        ("GPTQ 4", {"checkpoint_format": "marlin"}, UnsupportedModelError, "checkpoint_format=marlin"),
        ("GPTQ 4, act-order", {"desc_act": False}, ModelFileError, "another order, but desc_act is not true"),
        ("GPTQ 4, zeros", {"sym": True}, ModelFileError, "zero points beside 8, but .* sym=true; set it"),
        ("NVFP4, ModelOpt", {"quant_algo": "W4A8_AWQ"}, UnsupportedModelError, "quant_algo=w4a8_awq; supported are"),
        ("NVFP4", {"format": "nvfp5"}, UnsupportedModelError, "format=nvfp5; supported are"),
        ("AWQ", {"version": "gemv"}, UnsupportedModelError, "version=gemv; supported are gemm"),
        ("AWQ", {"bits": 8}, UnsupportedModelError, "bits=8; supported are 4"),
        ("FP8 blocks", {"weight_block_size": [128]}, ModelFileError, r"weight_block_size=\[128\], not null or two"),
        ("FP8 blocks", {"weight_block_size": [64, 64]}, ModelFileError, "weight_scale_inv.* would fit"),
        ("W4A16", {"format": "marlin-24"}, UnsupportedModelError, "format=marlin-24"),
        ("W4A16", {"config_groups": {}}, ModelFileError, "lacks config_groups"),
        ("W4A16", {"transform_config": {"r1": {}}}, UnsupportedModelError, "has transform_config, which is not"),
        ("W4A16", {"sparsity_config": {"format": "sparse-24"}}, UnsupportedModelError, "format=sparse-24"),
    ],
)
def test_what_is_not_supported_names_the_field(
    tmp_path: Path, case_name: str, changes: dict[str, Any], error: type[QuireError], message: str
) -> None:
    quantization, pack = CASES[case_name][1]
    save(tmp_path, quantization, pack)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        load_all(tmp_path)


@pytest.mark.parametrize("name", ["GPTQ 4", "AWQ", "FP8 blocks", "W4A16", "NVFP4, ModelOpt", "MXFP4"])
def test_floats_under_the_name_of_a_format_are_an_error(tmp_path: Path, name: str) -> None:
    """Some layers of floats are no error: `FLOAT_LAYER` is one in every other test."""
    quantization = {"quant_method": "mxfp4"} if name == "MXFP4" else CASES[name][1][0]
    save(tmp_path, quantization, lambda weight: ({"weight": weight}, weight.clone()))
    method = quantization["quant_method"]
    with pytest.raises(ModelFileError, match=f"quant_method={method}, but no weight is quantised: take the field out"):
        open_saved(tmp_path)


def test_scales_of_groups_that_do_not_divide_are_named(tmp_path: Path) -> None:
    def pack(weight: torch.Tensor) -> Parts:
        parts, values = CASES["W4A16"][1][1](weight)
        return {**parts, "weight_scale": parts["weight_scale"][:, :1].repeat(1, 5)}, values

    save(tmp_path, CASES["W4A16"][1][0], pack)
    with pytest.raises(
        ModelFileError, match=r"_proj.weight_scale' has 5 groups, which do not divide the \d+ columns of"
    ):
        open_saved(tmp_path)


def test_shape_that_is_no_pair_is_named(tmp_path: Path) -> None:
    def pack(weight: torch.Tensor) -> Parts:
        parts, values = CASES["W4A16"][1][1](weight)
        return {**parts, "weight_shape": parts["weight_shape"][:1]}, values

    save(tmp_path, CASES["W4A16"][1][0], pack)
    with pytest.raises(ModelFileError, match=r"_proj.weight_shape' is I64 \[1\], but I64 \[2\] would fit"):
        open_saved(tmp_path)


@pytest.mark.parametrize("missing", ["scales", "qzeros", "g_idx"])
def test_missing_tensor_of_a_layer_is_named(tmp_path: Path, missing: str) -> None:
    quantization, pack = CASES["GPTQ 4, act-order"][1]
    save(
        tmp_path,
        quantization,
        lambda weight: ({k: v for k, v in pack(weight)[0].items() if k != missing}, pack(weight)[1]),
    )
    with pytest.raises(ModelFileError, match=f"_proj' is quantised but lacks {missing}; fetch"):
        open_saved(tmp_path)
