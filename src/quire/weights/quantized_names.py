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
from quire.weights.block_formats import FLOATS
from quire.weights.quantized import (
    BLOCK,
    NVFP4_GROUP,
    Quantized,
    QuantizedTensor,
    StoredCodes,
    e4m3_values,
    e5m2_values,
    nvfp4,
)
from quire.weights.weight_tensor import WeightTensor

Tensors = Mapping[str, WeightTensor]
ADVICE = "use a GGUF file or the original model"
FLOAT8 = {"F8_E4M3": e4m3_values, "F8_E5M2": e5m2_values}
SCALES = ("weight_scale_inv", "weight_scale")
UNUSED = (
    *SCALES,
    "input_scale",
    "activation_scale",
    "input_zero_point",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "input_global_scale",
)
CACHE_SCALES = ("k_scale", "v_scale")


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
            found[f"{layer}.weight"] = make(f"{layer}.weight", tensor, _Parts(layer, tensors, used))
        else:
            found[name] = tensor
    layers = {name.rpartition(".")[0] for name, tensor in found.items() if isinstance(tensor, QuantizedTensor)}
    return {
        name: tensor for name, tensor in found.items()
        for layer, _, kind in [name.rpartition(".")]
        if name not in used and kind not in CACHE_SCALES and not (layer in layers and kind in UNUSED)
    }  # fmt: skip


class _Parts:
    """The other tensors of a layer, and a note of those that were read."""

    def __init__(self, layer: str, tensors: Tensors, used: set[str]) -> None:
        self.layer, self._tensors, self._used = layer, tensors, used

    def find(self, *names: str) -> WeightTensor | None:
        for name in (f"{self.layer}.{name}" for name in names):
            if name in self._tensors:
                self._used.add(name)
                return self._tensors[name]
        return None

    def get(self, *names: str) -> WeightTensor:
        found = self.find(*names)
        if found is None:
            raise ModelFileError(f"'{printable(self.layer)}' is quantised but lacks {names[0]}; fetch the model again")
        return found


Make = Callable[[str, WeightTensor, _Parts], WeightTensor]


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
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
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


def _words(tensor: WeightTensor) -> np.ndarray:
    """int32 as stored; a copy where the file's header leaves them unaligned."""
    stored = tensor.stored if tensor.stored.ctypes.data % 4 == 0 else tensor.stored.copy()
    return stored.view("<u4")


ACROSS = {4: CodeLayout.across4, 8: CodeLayout.across8}
DOWN = {4: CodeLayout.down4, 8: CodeLayout.down8}


def _integers(
    name: str, stored: np.ndarray, shape: tuple[int, int], bits: int, zero: int | None, quantized: Quantized
) -> QuantizedTensor:
    """Choose the format. `zero`: of all groups, or None if they differ."""
    columns = quantized.groups[: shape[1] // BLOCK * BLOCK].reshape(-1, BLOCK)
    has_blocks = shape[1] % BLOCK == 0 and bool((columns == columns[:, :1]).all())
    direct = {(4, True): "Q4_0", (4, False): "Q4_1", (8, True): "Q8_0"}.get((bits, zero is not None))
    format_name = direct if has_blocks and direct else f"INT{bits}"
    return QuantizedTensor(name, shape, format_name, stored, quantized=quantized)


def _gptq(path: str, fields: Mapping[str, Any]) -> Make:
    """qweight [I / 8, N] and qzeros [G, N / 8] int32, scales [G, N], g_idx [I]; version 1 stores zeros less one."""
    bits = _choose(path, fields, "bits", [4, 8])
    version = _choose(path, fields, "checkpoint_format", ["gptq", "gptq_v2"], "gptq")
    has_order = _choose(path, fields, "desc_act", [False, True], False)
    is_symmetric = _choose(path, fields, "sym", [False, True], False)
    size, per_word, middle = _group_size(path, fields, "group_size"), 32 // bits, 1 << (bits - 1)
    added = 1 if version == "gptq" else 0

    def make(name: str, codes: WeightTensor, parts: _Parts) -> WeightTensor:
        num_inputs, num_outputs = codes.shape[0] * per_word, codes.shape[-1]
        _check(name, codes, (num_inputs // per_word, num_outputs), "I32")
        groups = _groups(name, num_inputs, size)
        num_groups = int(groups[-1]) + 1
        order = parts.find("g_idx")
        if order is not None:
            stored_groups = _words(_check(name, order, (num_inputs,), "I32")).reshape(-1).astype(np.int64)
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
            if stored_groups.max() >= num_groups:
                raise ModelFileError(
                    f"'{printable(order.name)}' names groups beyond {num_groups}; fetch the model again"
                )
            groups = stored_groups
        elif has_order:
            parts.get("g_idx")
        zeros = _check(name, parts.get("qzeros"), (num_groups, num_outputs // per_word), "I32")
        scales = _check(name, parts.get("scales"), (num_groups, num_outputs), *FLOATS).transposed()
        by_output, all_groups = StoredCodes(ACROSS[bits], zeros.stored), np.arange(num_groups)

        def read_zeros(first: int, last: int) -> np.ndarray:
            # Whole words, which a part may cut.
            left, right = first // per_word * per_word, -(-last // per_word) * per_word
            stored = by_output.read(all_groups, left, right)[:, first - left : last - left].T
            return (stored + np.uint8(added)) & np.uint8((1 << bits) - 1)

        zero = middle if is_symmetric else None
        size_bytes = codes.num_bytes + zeros.num_bytes + scales.num_bytes
        quantized = Quantized(
            StoredCodes(DOWN[bits], codes.stored),
            scales,
            read_zeros,
            groups,
            size_bytes / (num_outputs * num_inputs),
            expected_zero=zero,
        )
        return _integers(name, codes.stored, (num_outputs, num_inputs), bits, zero, quantized)

    return make


def _awq(path: str, fields: Mapping[str, Any]) -> Make:
    """qweight [I, N / 8] and qzeros [G, N / 8] int32, scales [G, N]."""
    names = {
        "bits": "bits" if "bits" in fields else "w_bit",
        "size": "group_size" if "group_size" in fields else "q_group_size",
    }
    _choose(path, fields, names["bits"], [4])
    _choose(path, fields, "version", ["gemm"], "gemm")
    _choose(path, fields, "zero_point", [True], True)
    size = _group_size(path, fields, names["size"])

    def make(name: str, codes: WeightTensor, parts: _Parts) -> WeightTensor:
        num_inputs, num_outputs = codes.shape[0], codes.shape[-1] * 8
        _check(name, codes, (num_inputs, num_outputs // 8), "I32")
        groups = _groups(name, num_inputs, size)
        num_groups = int(groups[-1]) + 1
        zeros = _check(name, parts.get("qzeros"), (num_groups, num_outputs // 8), "I32")
        scales = _check(name, parts.get("scales"), (num_groups, num_outputs), *FLOATS).transposed()
        size_bytes = codes.num_bytes + zeros.num_bytes + scales.num_bytes
        of_zeros = StoredCodes(CodeLayout.awq, zeros.stored)
        quantized = Quantized(
            StoredCodes(CodeLayout.awq, codes.stored),
            scales,
            lambda first, last: of_zeros.read(np.arange(first, last), 0, num_groups),
            groups,
            size_bytes / (num_outputs * num_inputs),
        )
        return _integers(name, codes.stored, (num_outputs, num_inputs), 4, None, quantized)

    return make


def _block_size(path: str, fields: Mapping[str, Any], name: str) -> tuple[int, int] | None:
    size = fields.get(name)
    if size is None:
        return None
    if not isinstance(size, list) or len(size) != 2 or not all(type(item) is int and item > 0 for item in size):
        raise ModelFileError(
            f"{path}: quantization_config has {name}={printable(str(size))}, not null or two numbers above 0"
        )
    return size[0], size[1]


def _fp8(path: str, fields: Mapping[str, Any]) -> Make:
    """weight [N, I] in 8-bit floats; weight_scale_inv or weight_scale per block of N and I, per row, or one."""
    block = _block_size(path, fields, "weight_block_size")
    return lambda name, codes, parts: _scaled(name, codes, parts, block)


def _scaled(name: str, codes: WeightTensor, parts: _Parts, block: tuple[int, int] | None) -> WeightTensor:
    """8-bit floats or integers with a scale per block, per row, or one."""
    if len(codes.shape) != 2:
        raise UnsupportedModelError(f"'{printable(name)}' {list(codes.shape)} is quantised, but no matrix; {ADVICE}")
    num_outputs, num_inputs = codes.shape
    scales = parts.get(*SCALES)
    if block is not None and len(scales.shape) == 2 and scales.shape[1] == -(-num_inputs // block[1]):
        shape: tuple[int, ...] = (-(-num_outputs // block[0]), scales.shape[1])
        rows_per_scale, columns_per_scale = block
    elif math.prod(scales.shape) == 1:
        shape, rows_per_scale, columns_per_scale = scales.shape, num_outputs, num_inputs
    else:
        shape, rows_per_scale, columns_per_scale = (num_outputs, *scales.shape[1:2]), 1, num_inputs
    _check(name, scales, shape, *FLOATS)
    num_scales = shape[0] if shape else 1
    flat = WeightTensor(scales.name, (num_scales, math.prod(shape) // num_scales), scales.format,
                        scales.stored.reshape(num_scales, -1))  # fmt: skip
    if flat.shape[1] != (num_inputs - 1) // columns_per_scale + 1:
        _check(name, scales, (num_outputs, 1), *FLOATS)
    groups, size_bytes = np.arange(num_inputs) // columns_per_scale, codes.num_bytes + scales.num_bytes
    if codes.format in FLOAT8:
        table = FLOAT8[codes.format]()
        quantized = Quantized(
            StoredCodes(CodeLayout.across8, codes.stored), flat, 0.0, groups, size_bytes / (num_outputs * num_inputs),
            rows_per_scale, table=table,
        )  # fmt: skip
        return QuantizedTensor(name, (num_outputs, num_inputs), "FP8", codes.stored, quantized=quantized)
    zero_points = parts.find("weight_zero_point")
    if zero_points is not None and zero_points.stored.any():
        raise UnsupportedModelError(f"'{printable(zero_points.name)}' has zero points of 8-bit integers; {ADVICE}")
    quantized = Quantized(
        StoredCodes(CodeLayout.across8, codes.stored),
        flat,
        0.0,
        groups,
        size_bytes / (num_outputs * num_inputs),
        rows_per_scale,
        is_signed=True,
    )
    return _integers(name, codes.stored, (num_outputs, num_inputs), 8, 0, quantized)


def _nvfp4(name: str, codes: WeightTensor, parts: _Parts) -> WeightTensor:
    """Two 4-bit floats per byte [N, I / 2], the lower bits first, and E4M3 weight_scale [N, I / 16].

    The scales are multiplied with weight_scale_2 (ModelOpt), or with 1 / weight_global_scale (compressed-tensors).
    """
    num_outputs, num_inputs = codes.shape[0], 2 * codes.shape[-1]
    _check(name, codes, (num_outputs, num_inputs // 2), "U8")
    _groups(name, num_inputs, NVFP4_GROUP)
    scales = _check(name, parts.get("weight_scale"), (num_outputs, num_inputs // NVFP4_GROUP), "F8_E4M3")
    factor = parts.find("weight_scale_2")
    stored = factor or parts.get("weight_global_scale")
    unit = stored.to_numpy().reshape(-1)[0]
    return nvfp4(
        name, (num_outputs, num_inputs), StoredCodes(CodeLayout.across4, codes.stored),
        StoredCodes(CodeLayout.across8, scales.stored), unit if factor is not None else np.float32(1) / unit,
    )  # fmt: skip


def _modelopt(path: str, fields: Mapping[str, Any]) -> Make:
    """NVFP4, or weight [N, I] in E4M3 with one weight_scale."""
    _choose(path, fields, "quant_algo", ["nvfp4", "fp8"])
    return lambda name, codes, parts: (
        _nvfp4(name, codes, parts) if codes.format == "U8" else _scaled(name, codes, parts, None)
    )


def _compressed(path: str, fields: Mapping[str, Any]) -> Make:
    """weight_packed [N, I / 8] int32 of values plus 8, weight_scale [N, G], zero points packed down; or those of
    `_scaled` and `_nvfp4`.
    """
    known = ["pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"]
    known.append("nvfp4-pack-quantized")
    _choose(path, fields, "format", known)
    sparsity = fields.get("sparsity_config")
    _choose(path, sparsity if isinstance(sparsity, dict) else {}, "format", ["dense"], "dense")
    if fields.get("transform_config"):
        raise UnsupportedModelError(
            f"{path}: quantization_config has transform_config, which is not supported: {ADVICE}"
        )
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
    block = next(iter(blocks), None)

    def make(name: str, codes: WeightTensor, parts: _Parts) -> WeightTensor:
        if codes.format == "U8":
            return _nvfp4(name, codes, parts)
        if codes.format != "I32":
            return _scaled(name, codes, parts, block)
        num_outputs, num_inputs = (int(size) for size in parts.get("weight_shape").stored.view("<i8").reshape(-1))
        bits = 8 if codes.shape[-1] * 4 == num_inputs else 4
        _check(name, codes, (num_outputs, -(-num_inputs // (32 // bits))), "I32")
        scales = parts.get("weight_scale")
        num_groups = scales.shape[-1] if scales.shape else 1
        _check(name, scales, (num_outputs, num_groups), *FLOATS)
        if num_inputs % num_groups:
            raise ModelFileError(
                f"'{printable(scales.name)}' has {num_groups} groups, which do not divide the {num_inputs} columns of "
                f"'{printable(name)}'; fetch the model again"
            )
        groups = np.arange(num_inputs) // (num_inputs // num_groups)
        if (order := parts.find("weight_g_idx")) is not None:
            stored_groups = _words(_check(name, order, (num_inputs,), "I32")).reshape(-1).view("<i4").astype(np.int64)
            # -1 stands for columns in order.
            groups = groups if (stored_groups < 0).all() else stored_groups
            if groups.min() < 0 or groups.max() >= num_groups:
                raise ModelFileError(
                    f"'{printable(order.name)}' names groups beyond {num_groups}; fetch the model again"
                )
        zero_tensor, middle = parts.find("weight_zero_point"), 1 << (bits - 1)
        size_bytes = codes.num_bytes + scales.num_bytes
        zeros: Any = middle
        if zero_tensor is not None:
            _check(name, zero_tensor, (-(-num_outputs // (32 // bits)), num_groups), "I32")
            down, per_word, all_groups = StoredCodes(DOWN[bits], zero_tensor.stored), 32 // bits, np.arange(num_groups)

            def zeros(first: int, last: int) -> np.ndarray:
                left, right = first // per_word * per_word, -(-last // per_word) * per_word
                return down.read(all_groups, left, right)[:, first - left : last - left].T

        quantized = Quantized(
            StoredCodes(ACROSS[bits], codes.stored), scales, zeros, groups, size_bytes / (num_outputs * num_inputs)
        )
        zero = middle if zero_tensor is None else None
        return _integers(name, codes.stored, (num_outputs, num_inputs), bits, zero, quantized)

    return make


_METHODS: dict[str, Callable[[str, Mapping[str, Any]], Make]] = {
    "fp8": _fp8, "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed,
    "modelopt": _modelopt,
}  # fmt: skip
