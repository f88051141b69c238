"""`Checkpoint`: the configuration and the named weights of a model on disk, the same for GGUF and Hugging Face.

Must not know modules, devices or tensor parallelism. The safetensors library checks each header
against the file's length. Next to read: `gguf_file.py`, then `runtime/loader.py`, which consumes this.
"""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire._native import CodeLayout
from quire.errors import ModelFileError, UnsupportedModelError, printable
from quire.files import FileState, file_state, read_json, read_json_object, reading
from quire.weights.gguf_architectures import architecture_of
from quire.weights.gguf_config import file_views, translate_config, translate_generation_config
from quire.weights.gguf_fields import predicts_further
from quire.weights.gguf_file import GGUFFile, GGUFTensor, Metadata, read_gguf
from quire.weights.gguf_recurrent import RecodedTensor, StateSizes, as_huggingface
from quire.weights.model_cache import list_cached
from quire.weights.model_files import map_file, split_parts
from quire.weights.quantized import QuantizedTensor, StoredCodes, nvfp4
from quire.weights.quantized_names import joined_quantized
from quire.weights.sources import ModelFiles
from quire.weights.weight_tensor import NVFP4, WeightTensor

SCALE = re.compile(r"(.*)\.(?:input_)?scale")
"""Names of scales beside weights in NVFP4."""
SEPARATE_QUANTIZATION = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files in which older tools write what `quantization_config` says, and their methods."""
POOLINGS = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
"""Poolings of sentence-transformers, and those of `PoolingParams`."""


NUM_TRIES = 3
"""Times that files are opened which another process replaces meanwhile."""
SourceState = tuple[FileState, ...]
"""Of each file that weights depend on."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The files of a model except its tokenizer. Each weight is read when the loader asks for it."""

    files: ModelFiles
    hf_config: Mapping[str, Any]
    """config.json, or its translation from GGUF metadata; always has "architectures" or "model_type"."""
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    """generation_config.json, or its translation; may be empty."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """GGUF keys and values; empty for Hugging Face directories."""
    tensors: Mapping[str, WeightTensor] = field(default_factory=dict)
    """Weights by Hugging Face name, in the layout of Hugging Face's modules."""
    state: SourceState = ()
    """Of the files from before they were opened until after."""

    @property
    def num_parameters(self) -> int:
        """Weights in the files; a tied head counts once."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        """Size of the weights as stored."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def open_checkpoint(files: ModelFiles, *, with_tensors: bool = True) -> Checkpoint:
    """Read configuration and headers; no weight is decoded yet.

    `with_tensors=False` leaves `tensors` empty, for models with random weights: a directory then needs no weight files.

    Raises: ModelFileError for missing, truncated or contradictory files; UnsupportedModelError for models that Quire
    would compute wrongly.
    """
    open_files = _open_gguf if files.kind == "gguf" else _open_directory
    try:
        for _ in range(NUM_TRIES):
            with reading(files.path):
                state, checkpoint = source_state(files), open_files(files, with_tensors=with_tensors)
            if source_state(files) == state:
                return replace(checkpoint, state=state)
        raise ModelFileError(f"{files.path}: changes while it is read; start again when it is complete")
    except ModelFileError as error:
        cached = [] if files.origin == "local" else list_cached()
        for name in (model.name for model in cached if model.path.parent in files.path.parents):
            raise ModelFileError(f"{error}: `quire rm {name}`, then `quire pull {name}`") from error
        raise


def source_state(files: ModelFiles) -> SourceState:
    """Return the state of a model's files now. Those that are gone, or cannot be asked, are left out."""
    if files.kind == "gguf":
        paths = [files.path.with_name(name) for name in split_parts(files.path.name)]
    else:
        paths = sorted(path for path in files.path.glob("*") if path.suffix in (".json", ".safetensors"))
    found = []
    for path in paths:
        with suppress(OSError):
            found.append(file_state(path))
    return tuple(found)


def _open_gguf(files: ModelFiles, *, with_tensors: bool) -> Checkpoint:
    file = read_gguf(files.path)
    config = translate_config(file)
    generation_config = {**files.recommended_sampling, **translate_generation_config(file, config["vocab_size"])}
    tensors = _named_tensors(file, config) if with_tensors else {}
    return Checkpoint(files, config, generation_config, file.metadata, tensors)


def _named_tensors(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, WeightTensor]:
    """The tensors by Hugging Face name. Raises: ModelFileError; UnsupportedModelError for a name that is not known."""
    architecture = architecture_of(file.metadata)
    metadata = Metadata(file, file.architecture)
    num_layers, num_experts = metadata.num_layers, metadata.value("expert_count", 0)
    sizes = StateSizes.read(metadata) if architecture.has_value_heads_in_turns else None
    tensors: dict[str, WeightTensor] = {}
    nvfp4_names = {stored.name for stored in file.tensors.values() if stored.format is NVFP4}
    for stored in file.tensors.values():
        name, shown = architecture.tensor_names.huggingface(stored.name), printable(stored.name)
        is_left_out = not architecture.predictors and predicts_further(stored.name, num_layers)
        if stored.name in architecture.factor_tensors or is_left_out:
            continue
        scaled = SCALE.fullmatch(stored.name) if name is None else None
        if scaled and f"{scaled[1]}.weight" in nvfp4_names:
            continue  # `_nvfp4` reads the scale of the weight; those of activations are not used
        if name is None:
            raise UnsupportedModelError(f"{file.path}: tensor '{shown}' has no place in Quire's {config['model_type']}")
        views = file_views(stored.name, stored.shape[0], architecture, config)
        tensor = WeightTensor(name, stored.shape, stored.format.name, file.rows(stored)).viewed(views)
        tensor = as_huggingface(tensor, sizes)
        if name.endswith("shared_expert_gate.weight") and len(tensor.shape) == 1:  # as old files have it
            tensor = replace(tensor, shape=(1, *tensor.shape))
        if "*" in name and tensor.shape[0] != num_experts:
            raise ModelFileError(f"{file.path}: '{shown}' is {tensor.shape}, which are not {num_experts} experts")
        matrices = tensor.unstacked() if "*" in name else [tensor]
        for index, matrix in enumerate(matrices):
            part = replace(matrix, name=name.replace("*", str(index)))
            if stored.format is NVFP4:
                part = _nvfp4(part, file, stored, index)
            if part.name in tensors:
                raise ModelFileError(f"{file.path}: '{shown}' and another tensor are both {part.name}")
            tensors[part.name] = part
    for name in [name for name in tensors if name.endswith(".k_b_proj.weight")]:
        other = tensors.pop(name.replace("k_b_proj", "v_b_proj"), None)
        if other is None:
            raise ModelFileError(f"{file.path}: {name} lacks the projection to values beside it")
        joined_tensor = joined_latents(tensors.pop(name), other)
        tensors[joined_tensor.name] = joined_tensor
    return tensors


def _nvfp4(tensor: WeightTensor, file: GGUFFile, whole: GGUFTensor, index: int) -> WeightTensor:
    """A matrix of which `stored` are blocks of 64: four scales, then for each 8 bytes, byte i with inputs i and i + 8.

    `index`: of the matrix in the `whole` stack. The tensor `….scale` has the scale of the whole, or of each matrix;
    without it, that is 1. Raises: ModelFileError; UnsupportedModelError.
    """
    if len(tensor.shape) != 2 or tensor.shape[1] % NVFP4.block_len or isinstance(tensor, RecodedTensor):
        raise UnsupportedModelError(
            f"{file.path}: '{printable(whole.name)}' {list(whole.shape)} is stored as NVFP4, but is no matrix whose "
            f"parts are whole blocks of {NVFP4.block_len}: use a file of another format"
        )
    factor, scale = np.float32(1), file.tensors.get(whole.name.removesuffix("weight") + "scale")
    if scale is not None:
        values = WeightTensor(scale.name, scale.shape, scale.format.name, file.rows(scale)).to_numpy().reshape(-1)
        if len(values) not in (1, math.prod(whole.shape[:-2])):
            raise ModelFileError(
                f"{file.path}: '{printable(scale.name)}' {list(scale.shape)} does not fit "
                f"'{printable(whole.name)}' {list(whole.shape)}; fetch the model again"
            )
        factor = values[index % len(values)]
    blocks = tensor.stored.reshape(len(tensor.stored), -1, 4 + 32)
    blocks = blocks if tensor.column_order is None else blocks[:, tensor.column_order]

    rows = blocks.reshape(len(blocks), -1)
    found = nvfp4(
        tensor.name,
        (len(rows), tensor.shape[1]),
        StoredCodes(CodeLayout.nvfp4, rows),
        StoredCodes(CodeLayout.nvfp4_scales, rows),
        factor,
    )
    return replace(found, shape=tensor.shape, row_order=tensor.row_order)


def joined_latents(keys: WeightTensor, values: WeightTensor) -> WeightTensor:
    """The projection of latents to the keys and values of each head, as Hugging Face has it: decoded, in fp16 unless
    both are floats of one type.

    Shapes: keys [H, R, N], values [H, V, R] -> [H * (N + V), R], R the latents' size.
    Raises: ModelFileError for others.
    """
    name = keys.name.replace("k_b_proj", "kv_b_proj")
    if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[:2] != values.shape[::2]:
        raise ModelFileError(f"{keys.name} {keys.shape} and {values.name} {values.shape} do not belong together")
    kinds = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
    if keys.format == values.format and keys.format in kinds:
        stored_format, parts = keys.format, [part.raw.view(kinds[part.format]) for part in (keys, values)]
    else:
        stored_format, parts = "F16", [part.to_numpy().astype(np.float16) for part in (keys, values)]
    of_keys, of_values = (part.reshape(tensor.shape) for part, tensor in zip(parts, (keys, values), strict=True))
    rows = np.concatenate([of_keys.swapaxes(1, 2), of_values], axis=1).reshape(-1, values.shape[-1])
    return WeightTensor(name, rows.shape, stored_format, np.ascontiguousarray(rows).view(np.uint8))


def _open_directory(files: ModelFiles, *, with_tensors: bool) -> Checkpoint:
    config_path = files.path / "config.json"
    config = read_json_object(config_path)
    architectures = config.get("architectures") or [config.get("model_type")]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise ModelFileError(
            f"{config_path}: neither 'architectures' nor 'model_type' names the model to run; fetch it again"
        )
    quantization = config.get("quantization_config") or config.get("compression_config")
    own_path = config_path
    for name, known in SEPARATE_QUANTIZATION.items():
        if not quantization and (files.path / name).is_file():
            own_path, found = files.path / name, read_json_object(files.path / name)
            quantization = {"quant_method": known, **found.get("quantization", found)}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    generation_path = files.path / "generation_config.json"
    generation_config = read_json_object(generation_path) if generation_path.is_file() else {}
    tensors: Mapping[str, WeightTensor] = joined(read_directory(files.path)) if with_tensors else {}
    if quantization and method != "mxfp4":
        tensors = joined_quantized(str(own_path), quantization, tensors)
        # The tensors' formats tell the rest.
        config = {name: value for name, value in config.items() if value is not quantization}
    is_quantized = any(isinstance(item, QuantizedTensor) or item.format == "MXFP4" for item in tensors.values())
    if quantization and tensors and not is_quantized:
        raise ModelFileError(
            f"{own_path}: quantization_config has quant_method={printable(str(method))}, but no weight is quantised:"
            " take the field out if the weights are floats, or fetch the model again"
        )
    return Checkpoint(files, config, generation_config, tensors=tensors)


def read_pooling(directory: Path) -> dict[str, Any]:
    """Read `modules.json`'s pooling and normalisation under the names of `PoolingParams`; empty if there is none.

    Raises: ModelFileError; UnsupportedModelError for another pooling or further modules, such as a dense layer.
    """
    path = directory / "modules.json"
    if not path.is_file():
        return {}
    modules = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelFileError(f"{path}: not a list of modules; fetch it again")
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if "Pooling" not in kinds:
        return {}
    if unknown := set(kinds) - {"Transformer", "Pooling", "Normalize"}:
        raise UnsupportedModelError(f"{path}: embeddings with modules {', '.join(sorted(unknown))} are not supported")
    config = read_json_object(directory / str(modules[kinds.index("Pooling")].get("path")) / "config.json")
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        raise UnsupportedModelError(
            f"{path}: pooling by {', '.join(chosen)} is not supported, only {', '.join(POOLINGS)}"
        )
    return {"pooling": POOLINGS[chosen[0]], "normalize": "Normalize" in kinds}


def joined(tensors: Mapping[str, WeightTensor]) -> dict[str, WeightTensor]:
    """The tensors of a directory, MXFP4's nibbles `[…, rows, blocks, 16]` and scales `[…, rows, blocks]` as one each.

    Raises: ModelFileError for nibbles without their scales.
    """
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name, nibbles in tensors.items():
        whole, _, suffix = name.rpartition("_")
        scales = tensors.get(f"{whole}_scales")
        if suffix == "blocks":
            if scales is None or (*scales.shape, 16) != nibbles.shape or {scales.format, nibbles.format} != {"U8"}:
                raise ModelFileError(
                    f"tensor '{printable(name)}' {list(nibbles.shape)} lacks bytes '{printable(whole)}_scales' "
                    f"{list(nibbles.shape[:-1])}; fetch the model again"
                )
            shape, num_rows = (*scales.shape[:-1], 32 * scales.shape[-1]), math.prod(scales.shape[:-1])
            stored = nibbles.stored.reshape(num_rows, -1)
            found[whole] = WeightTensor(whole, shape, "MXFP4", stored, scales=scales.stored)
        elif suffix == "scales" and f"{whole}_blocks" not in tensors:
            found[name] = scales if scales is not None else nibbles
    return found


# --- Safetensors: one file or several shards, as views of the mapped files; never pickles ---------

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
MAX_NAME_LEN = 200
_PICKLE_PATTERNS = ("pytorch_model*.bin", "*.pt", "*.pth", "consolidated*.pth")


def read_directory(directory: Path) -> dict[str, WeightTensor]:
    """All tensors of a Hugging Face directory, from `model.safetensors` or from the shards of its index.

    Raises: ModelFileError naming a missing shard or what is wrong; UnsupportedModelError when there are only pickles.
    """
    if (directory / INDEX_FILE).is_file():
        return _read_shards(directory)
    if (directory / SINGLE_FILE).is_file():
        return read_safetensors(directory / SINGLE_FILE)
    if shards := sorted(directory.glob("model-*.safetensors")):
        raise ModelFileError(f"{directory}: has {shards[0].name} but not {INDEX_FILE}; fetch the missing file")
    if any(next(directory.glob(pattern), None) for pattern in _PICKLE_PATTERNS):
        raise UnsupportedModelError(
            f"{directory}: has only PyTorch pickles, which can run code and are never loaded; convert them with "
            "transformers' `save_pretrained`, which writes safetensors"
        )
    raise ModelFileError(f"{directory}: has no weights, neither {SINGLE_FILE} nor {INDEX_FILE}")


def _read_shards(directory: Path) -> dict[str, WeightTensor]:
    index_path = directory / INDEX_FILE
    index = read_json_object(index_path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index_path}: has no 'weight_map'; fetch it again")
    shards: dict[str, dict[str, WeightTensor]] = {}
    tensors = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", "..") or len(shard) > MAX_NAME_LEN:
            shown = printable(repr(shard), limit=80)
            raise ModelFileError(f"{index_path}: {shown} of '{name}' is no name of a file in this directory")
        if shard not in shards:
            path = directory / shard
            if not path.is_file():
                raise ModelFileError(f"{directory}: the shard {printable(shard)} is missing; fetch the model again")
            shards[shard] = read_safetensors(path)
        if name not in shards[shard]:
            raise ModelFileError(f"{directory / shard}: tensor '{printable(name)}' of the index is missing")
        tensors[name] = shards[shard][name]
    return tensors


def read_safetensors(path: Path) -> dict[str, WeightTensor]:
    """The tensors of one file, as views of the mapped file.

    Raises: ModelFileError naming the file and what is wrong; UnsupportedModelError for a dtype that is not known here.
    """
    from safetensors import SafetensorError, safe_open

    mapping = map_file(path)
    try:
        with safe_open(path, framework="numpy") as file:
            headers = {name: file.get_slice(name) for name in file.offset_keys()}
            described = [(name, header.get_dtype(), tuple(header.get_shape())) for name, header in headers.items()]
    except (SafetensorError, OSError) as error:
        problem = printable(str(error).removeprefix("Error while deserializing header: "), limit=200)
        raise ModelFileError(f"{path}: truncated or corrupted ({problem}); fetch it again") from error
    data = np.frombuffer(mapping, dtype=np.uint8)
    # The library has checked that the tensors follow the header without gaps, to the end of the file.
    position = 8 + int.from_bytes(mapping[:8], "little")
    tensors = {}
    for name, dtype, shape in described:
        if dtype not in _ITEM_BYTES:
            raise UnsupportedModelError(f"{path}: tensor '{printable(name)}' has the dtype {dtype}, which is not read")
        num_rows, row_bytes = math.prod(shape[:-1]), (shape[-1] if shape else 1) * _ITEM_BYTES[dtype]
        stored = data[position : position + num_rows * row_bytes].reshape(num_rows, row_bytes)
        tensors[name] = WeightTensor(name, shape, dtype, stored)
        position += stored.size
    return tensors
