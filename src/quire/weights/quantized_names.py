"""Join the tensors of quantised Hugging Face directories: FP8, NVFP4, GPTQ, AWQ and compressed-tensors.

Each quantised layer has several tensors, which become one `QuantizedTensor` under the name that the layer has without
quantisation. Layers that are stored as floats stay as they are, named in `modules_to_not_convert` and `ignore` or not:
their values are in the file. Only a directory without any quantised layer contradicts itself. Scales of activations and
of KV caches are not used: activations keep the compute dtype, a cache has that of `--kv-cache-dtype`. Next to read:
`quantized.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from quire._native import CodeLayout
from quire.errors import ModelFileError, UnsupportedModelError, printable
from quire.weights.quantized import (
    BLOCK,
    NVFP4_GROUP,
    Quantized,
    QuantizedTensor,
    Rows,
    StoredCodes,
    e4m3_values,
    e5m2_values,
    nvfp4,
)
from quire.weights.weight_tensor import FLOATS, WeightTensor

Tensors = Mapping[str, WeightTensor]
ADVICE = "use a GGUF file or the original model"
FLOAT8 = {"F8_E4M3": e4m3_values, "F8_E5M2": e5m2_values}
SCALES = ("weight_scale_inv", "weight_scale")
UNUSED = (
    *SCALES, "input_scale", "activation_scale", "input_zero_point", "weight_zero_point", "weight_shape",
    "weight_g_idx", "input_global_scale",
)  # fmt: skip
MAX_BLOCK = 1 << 30
"""Rows or columns with one scale."""
CACHE_SCALES = ("k_scale", "v_scale")
COMPRESSED_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "nvfp4-pack-quantized",
)  # fmt: skip


def joined_quantized(path: str, fields: Any, tensors: Tensors) -> dict[str, WeightTensor]:
    """The tensors of a directory, each quantised layer's as one. `fields`: `quantization_config` of the file `path`.

    Raises: UnsupportedModelError for a method or field that is not known; ModelFileError for tensors that are missing
    or do not fit. Both name the field or the tensor.
    """
    fields = fields if isinstance(fields, dict) else {"quant_method": fields}
    method = fields.get("quant_method")
    _choose(path, fields, "quant_method", [*_METHODS])
    make = _METHODS[str(method)](path, fields)
    found: dict[str, WeightTensor] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        layer, _, last = name.rpartition(".")
        is_codes = last in ("qweight", "weight_packed") or (last == "weight" and tensor.format in (*FLOAT8, "I8", "U8"))
        if is_codes:
            found[f"{layer}.weight"] = make(_Layer(layer, tensor, tensors, used))
        else:
            found[name] = tensor
    layers = {name.rpartition(".")[0] for name, tensor in found.items() if isinstance(tensor, QuantizedTensor)}
    return {
        name: tensor
        for name, tensor in found.items()
        for layer, _, kind in [name.rpartition(".")]
        if name not in used and kind not in CACHE_SCALES and not (layer in layers and kind in UNUSED)
    }


class _Layer:
    """The tensors of a quantised layer, and a note of those that were read. `name`: of its weight, without them."""

    def __init__(self, layer: str, codes: WeightTensor, tensors: Tensors, used: set[str]) -> None:
        self.name, self.codes = f"{layer}.weight", codes
        self._layer, self._tensors, self._used = layer, tensors, used

    def find(self, *names: str) -> WeightTensor | None:
        for name in (f"{self._layer}.{name}" for name in names):
            if name in self._tensors:
                self._used.add(name)
                return self._tensors[name]
        return None

    def get(self, *names: str) -> WeightTensor:
        found = self.find(*names)
        if found is None:
            raise ModelFileError(f"'{printable(self._layer)}' is quantised but lacks {names[0]}; fetch the model again")
        return found


Make = Callable[[_Layer], WeightTensor]


def _choose(path: str, fields: Mapping[str, Any], name: str, known: Sequence[Any], default: Any = None) -> Any:
    value = fields.get(name)
    value = default if value is None else value
    value = value.lower() if isinstance(value, str) else value
    if not any(value == item and type(value) is type(item) for item in known):
        shown = ", ".join(str(item) for item in known)
        raise UnsupportedModelError(
            f"{path}: quantization_config has {name}={printable(str(value), limit=80)}; supported are {shown}: {ADVICE}"
        )
    return value


def _group_size(path: str, fields: Mapping[str, Any], name: str) -> int:
    size = fields.get(name)
    if not isinstance(size, int) or isinstance(size, bool) or not (size == -1 or 0 < size <= MAX_BLOCK):
        raise ModelFileError(
            f"{path}: quantization_config has {name}={printable(str(size))}, not -1 or a number above 0"
        )
    return size


def _groups(name: str, num_inputs: int, size: int) -> np.ndarray:
    size = num_inputs if size == -1 else size
    if num_inputs % size:
        raise ModelFileError(
            f"'{printable(name)}' has {num_inputs} columns, no multiple of group_size={size} of quantization_config; "
            "correct the field or fetch the model again"
        )
    return np.arange(num_inputs) // size


def _check(name: str, tensor: WeightTensor, shape: tuple[int, ...], *formats: str) -> WeightTensor:
    if tensor.shape != shape or tensor.format not in formats:
        raise ModelFileError(
            f"'{printable(tensor.name)}' is {tensor.format} {list(tensor.shape)}, but {' or '.join(formats)} "
            f"{list(shape)} would fit '{printable(name)}' and quantization_config; correct bits and groups there or "
            "fetch the model again"
        )
    return tensor


ACROSS = {4: CodeLayout.across4, 8: CodeLayout.across8}
DOWN = {4: CodeLayout.down4, 8: CodeLayout.down8}


def _integers(
    layer: _Layer,
    layout: CodeLayout,
    shape: tuple[int, int],
    bits: int,
    scales: WeightTensor,
    zeros: Rows | float,
    groups: np.ndarray,
    zero: int | None,
    *,
    zeros_bytes: int = 0,
    **options: Any,
) -> QuantizedTensor:
    """Make the tensor of integers, in the format that holds them. `zero`: of all groups, or None if they differ.

    `zeros_bytes`: of stored zeros. `options`: of `Quantized`.
    """
    columns = groups[: shape[1] // BLOCK * BLOCK].reshape(-1, BLOCK)
    has_blocks = shape[1] % BLOCK == 0 and bool((columns == columns[:, :1]).all())
    direct = {(4, True): "Q4_0", (4, False): "Q4_1", (8, True): "Q8_0"}.get((bits, zero is not None))
    format_name = direct if has_blocks and direct else f"INT{bits}"
    bytes_per_value = (layer.codes.num_bytes + scales.num_bytes + zeros_bytes) / (shape[0] * shape[1])
    stored = layer.codes.stored
    quantized = Quantized(StoredCodes(layout, stored), scales, zeros, groups, bytes_per_value, **options)
    return QuantizedTensor(layer.name, shape, format_name, stored, quantized=quantized)


def _read_groups(layer: _Layer, order: WeightTensor, num_inputs: int) -> np.ndarray:
    """Return the stored group of each column. A copy: a file's header may leave int32 unaligned."""
    stored = _check(layer.name, order, (num_inputs,), "I32").stored
    return stored.copy().view("<i4").reshape(-1).astype(np.int64)


def _check_groups(order: WeightTensor, groups: np.ndarray, num_groups: int) -> np.ndarray:
    if groups.min() < 0 or groups.max() >= num_groups:
        raise ModelFileError(f"'{printable(order.name)}' names groups beyond {num_groups}; fetch the model again")
    return groups


def _zeros_across(codes: StoredCodes, num_groups: int, per_word: int) -> Rows:
    """Return a reader of zeros that are stored with outputs as columns; it reads whole words, which a part may cut."""

    def read(first: int, last: int) -> np.ndarray:
        left, right = first // per_word * per_word, -(-last // per_word) * per_word
        return codes.read(np.arange(num_groups), left, right)[:, first - left : last - left].T

    return read


def _gptq(path: str, fields: Mapping[str, Any]) -> Make:
    """qweight [I / 8, N] and qzeros [G, N / 8] int32, scales [G, N], g_idx [I]; version 1 stores zeros less one."""
    bits = _choose(path, fields, "bits", [4, 8])
    version = _choose(path, fields, "checkpoint_format", ["gptq", "gptq_v2"], "gptq")
    has_order = _choose(path, fields, "desc_act", [False, True], False)
    is_symmetric = _choose(path, fields, "sym", [False, True], False)
    size, per_word = _group_size(path, fields, "group_size"), 32 // bits
    added, mask = np.uint8(version == "gptq"), np.uint8((1 << bits) - 1)

    def make(layer: _Layer) -> WeightTensor:
        name, codes = layer.name, layer.codes
        num_inputs, num_outputs = codes.shape[0] * per_word, codes.shape[-1]
        _check(name, codes, (num_inputs // per_word, num_outputs), "I32")
        groups = _groups(name, num_inputs, size)
        num_groups = int(groups[-1]) + 1
        order = layer.get("g_idx") if has_order else layer.find("g_idx")
        if order is not None:
            stored_groups = _read_groups(layer, order, num_inputs)
            if not has_order and (np.diff(stored_groups) < 0).any():
                raise ModelFileError(
                    f"'{printable(name)}' has columns in another order, but desc_act is not true; set it"
                )
            if not has_order and (stored_groups != groups).any():
                found = int(np.bincount(stored_groups.clip(0, num_inputs)).max())
                raise ModelFileError(
                    f"'{printable(name)}' has groups of {found} columns, but quantization_config has group_size={size};"
                    " correct the field"
                )
            groups = _check_groups(order, stored_groups, num_groups)
        zeros = _check(name, layer.get("qzeros"), (num_groups, num_outputs // per_word), "I32")
        scales = _check(name, layer.get("scales"), (num_groups, num_outputs), *FLOATS).transposed()
        stored_zeros = _zeros_across(StoredCodes(ACROSS[bits], zeros.stored), num_groups, per_word)
        zero = 1 << (bits - 1) if is_symmetric else None
        return _integers(
            layer,
            DOWN[bits],
            (num_outputs, num_inputs),
            bits,
            scales,
            lambda first, last: (stored_zeros(first, last) + added) & mask,
            groups,
            zero,
            zeros_bytes=zeros.num_bytes,
            expected_zero=zero,
        )

    return make


def _awq(path: str, fields: Mapping[str, Any]) -> Make:
    """qweight [I, N / 8] and qzeros [G, N / 8] int32, scales [G, N]."""
    _choose(path, fields, "bits" if "bits" in fields else "w_bit", [4])
    _choose(path, fields, "version", ["gemm"], "gemm")
    _choose(path, fields, "zero_point", [True], True)
    size = _group_size(path, fields, "group_size" if "group_size" in fields else "q_group_size")

    def make(layer: _Layer) -> WeightTensor:
        num_inputs, num_outputs = layer.codes.shape[0], layer.codes.shape[-1] * 8
        _check(layer.name, layer.codes, (num_inputs, num_outputs // 8), "I32")
        groups = _groups(layer.name, num_inputs, size)
        num_groups = int(groups[-1]) + 1
        zeros = _check(layer.name, layer.get("qzeros"), (num_groups, num_outputs // 8), "I32")
        scales = _check(layer.name, layer.get("scales"), (num_groups, num_outputs), *FLOATS).transposed()
        of_zeros = StoredCodes(CodeLayout.awq, zeros.stored)
        return _integers(
            layer,
            CodeLayout.awq,
            (num_outputs, num_inputs),
            4,
            scales,
            lambda first, last: of_zeros.read(np.arange(first, last), 0, num_groups),
            groups,
            None,
            zeros_bytes=zeros.num_bytes,
        )

    return make


def _block_size(path: str, fields: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    size = fields.get(name)
    if size is None:
        return None
    if (
        not isinstance(size, list)
        or len(size) != 2
        or not all(type(item) is int and 0 < item <= MAX_BLOCK for item in size)
    ):
        raise ModelFileError(
            f"{path}: quantization_config has {name}={printable(str(size))}, not null or two numbers above 0"
        )
    return size[0], size[1]


def _fp8(path: str, fields: Mapping[str, Any]) -> Make:
    """weight [N, I] in 8-bit floats; weight_scale_inv or weight_scale per block of N and I, per row, or one."""
    block = _block_size(path, fields, "weight_block_size")
    return lambda layer: _scaled(layer, block)


def _scaled(layer: _Layer, block: tuple[int, int] | None) -> WeightTensor:
    """8-bit floats or integers with a scale per block, per row, or one."""
    name, codes = layer.name, layer.codes
    if len(codes.shape) != 2:
        raise UnsupportedModelError(f"'{printable(name)}' {list(codes.shape)} is quantised, but no matrix; {ADVICE}")
    num_outputs, num_inputs = codes.shape
    scales = layer.get(*SCALES)
    if block is not None and len(scales.shape) == 2 and scales.shape[1] == -(-num_inputs // block[1]):
        shape: tuple[int, ...] = (-(-num_outputs // block[0]), scales.shape[1])
        rows_per_scale, columns_per_scale = block
    elif math.prod(scales.shape) == 1:
        shape, rows_per_scale, columns_per_scale = scales.shape, num_outputs, num_inputs
    else:
        shape, rows_per_scale, columns_per_scale = (num_outputs, *scales.shape[1:2]), 1, num_inputs
    _check(name, scales, shape, *FLOATS)
    num_scales = shape[0] if shape else 1
    flat = WeightTensor(
        scales.name, (num_scales, math.prod(shape) // num_scales), scales.format, scales.stored.reshape(num_scales, -1)
    )
    if flat.shape[1] != (num_inputs - 1) // columns_per_scale + 1:
        _check(name, scales, (num_outputs, 1), *FLOATS)
    groups = np.arange(num_inputs) // columns_per_scale
    if codes.format in FLOAT8:
        bytes_per_value = (codes.num_bytes + scales.num_bytes) / (num_outputs * num_inputs)
        quantized = Quantized(
            StoredCodes(CodeLayout.across8, codes.stored),
            flat,
            0.0,
            groups,
            bytes_per_value,
            rows_per_scale,
            table=FLOAT8[codes.format](),
        )
        return QuantizedTensor(name, (num_outputs, num_inputs), "FP8", codes.stored, quantized=quantized)
    zero_points = layer.find("weight_zero_point")
    if zero_points is not None and zero_points.stored.any():
        raise UnsupportedModelError(f"'{printable(zero_points.name)}' has zero points of 8-bit integers; {ADVICE}")
    return _integers(
        layer,
        CodeLayout.across8,
        (num_outputs, num_inputs),
        8,
        flat,
        0.0,
        groups,
        0,
        rows_per_scale=rows_per_scale,
        is_signed=True,
    )


def _nvfp4(layer: _Layer) -> WeightTensor:
    """Two 4-bit floats per byte [N, I / 2], the lower bits first, and E4M3 weight_scale [N, I / 16].

    The scales are multiplied with weight_scale_2 (ModelOpt), or with 1 / weight_global_scale (compressed-tensors).
    """
    name, codes = layer.name, layer.codes
    num_outputs, num_inputs = codes.shape[0], 2 * codes.shape[-1]
    _check(name, codes, (num_outputs, num_inputs // 2), "U8")
    _groups(name, num_inputs, NVFP4_GROUP)
    scales = _check(name, layer.get("weight_scale"), (num_outputs, num_inputs // NVFP4_GROUP), "F8_E4M3")
    factor = layer.find("weight_scale_2")
    unit = (factor or layer.get("weight_global_scale")).to_numpy().reshape(-1)[0]
    return nvfp4(
        name,
        (num_outputs, num_inputs),
        StoredCodes(CodeLayout.across4, codes.stored),
        StoredCodes(CodeLayout.across8, scales.stored),
        unit if factor is not None else np.float32(1) / unit,
    )


def _modelopt(path: str, fields: Mapping[str, Any]) -> Make:
    """NVFP4, or weight [N, I] in E4M3 with one weight_scale."""
    _choose(path, fields, "quant_algo", ["nvfp4", "fp8"])
    return lambda layer: _nvfp4(layer) if layer.codes.format == "U8" else _scaled(layer, None)


def _compressed(path: str, fields: Mapping[str, Any]) -> Make:
    """weight_packed [N, I / 8] int32 of values plus 8, weight_scale [N, G], zero points packed down; or those of
    `_scaled` and `_nvfp4`.
    """
    _choose(path, fields, "format", COMPRESSED_FORMATS)
    sparsity = fields.get("sparsity_config")
    _choose(path, sparsity if isinstance(sparsity, dict) else {}, "format", ["dense"], "dense")
    if fields.get("transform_config"):
        raise UnsupportedModelError(
            f"{path}: quantization_config has transform_config, which is not supported: {ADVICE}"
        )
    block = _compressed_block(path, fields)

    def make(layer: _Layer) -> WeightTensor:
        name, codes = layer.name, layer.codes
        if codes.format == "U8":
            return _nvfp4(layer)
        if codes.format != "I32":
            return _scaled(layer, block)
        shape = _check(name, layer.get("weight_shape"), (2,), "I64")
        num_outputs, num_inputs = (int(size) for size in shape.stored.view("<i8").reshape(-1))
        bits = 8 if codes.shape[-1] * 4 == num_inputs else 4
        per_word = 32 // bits
        _check(name, codes, (num_outputs, -(-num_inputs // per_word)), "I32")
        scales = layer.get("weight_scale")
        num_groups = scales.shape[-1] if scales.shape else 1
        _check(name, scales, (num_outputs, num_groups), *FLOATS)
        if num_inputs % num_groups:
            raise ModelFileError(
                f"'{printable(scales.name)}' has {num_groups} groups, which do not divide the {num_inputs} columns of "
                f"'{printable(name)}'; fetch the model again"
            )
        groups = np.arange(num_inputs) // (num_inputs // num_groups)
        if (order := layer.find("weight_g_idx")) is not None:
            stored_groups = _read_groups(layer, order, num_inputs)
            # -1 stands for columns in order.
            groups = groups if (stored_groups < 0).all() else _check_groups(order, stored_groups, num_groups)
        zero: int | None = 1 << (bits - 1)
        zeros: Rows | float = float(1 << (bits - 1))
        if (stored_zeros := layer.find("weight_zero_point")) is not None:
            _check(name, stored_zeros, (-(-num_outputs // per_word), num_groups), "I32")
            zero, zeros = None, _zeros_across(StoredCodes(DOWN[bits], stored_zeros.stored), num_groups, per_word)
        return _integers(layer, ACROSS[bits], (num_outputs, num_inputs), bits, scales, zeros, groups, zero)

    return make


def _compressed_block(path: str, fields: Mapping[str, Any]) -> tuple[int, int] | None:
    """Check the schemes, and return the rows and columns that share a scale of 8-bit floats; None for no blocks."""
    schemes = fields.get("config_groups")
    if not isinstance(schemes, dict) or not schemes:
        raise ModelFileError(f"{path}: quantization_config lacks config_groups; fetch the model again")
    blocks: set[tuple[int, int] | None] = set()
    for scheme in schemes.values():
        weights = scheme.get("weights") if isinstance(scheme, dict) else None
        if not isinstance(weights, dict):
            raise ModelFileError(f"{path}: quantization_config has a group without weights; fetch the model again")
        _choose(path, weights, "num_bits", [4, 8])
        _choose(path, weights, "type", ["int", "float"])
        strategy = _choose(path, weights, "strategy", ["tensor", "channel", "group", "block", "tensor_group"])
        if strategy == "block":
            blocks.add(_block_size(path, weights, "block_structure"))
    if len(blocks) > 1:
        raise UnsupportedModelError(f"{path}: quantization_config has different block_structures; {ADVICE}")
    return next(iter(blocks), None)


_METHODS: dict[str, Callable[[str, Mapping[str, Any]], Make]] = {
    "fp8": _fp8, "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed,
    "modelopt": _modelopt,
}  # fmt: skip
