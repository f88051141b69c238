"""Read a GGUF file: its key/value metadata and where each tensor lies. Trusts no field of the header.

Every count, length, type and offset is checked against the size of the file before it is used, so a corrupted file
is a `ModelFileError` in bounded time and memory. Must not know architectures, tensor names or torch.
Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
Next to read: `gguf_fields.py` and `gguf_config.py`, which give the contents their Hugging Face names.
"""

import logging
import math
import mmap
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from quire._native import read_strings
from quire.errors import ModelFileError, UnsupportedModelError, printable
from quire.weights.model_files import map_file, split_parts
from quire.weights.weight_tensor import BLOCK_FORMATS, GGUF_FORMATS, UNSUPPORTED_GGUF_FORMATS, BlockFormat, row_bytes

_log = logging.getLogger(__name__)

MAX_NAME_LEN = 65535
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_ITEMS = 2**22
"""Of all arrays together: the largest vocabularies and their merges have some 1.5 million. A string of two bytes takes
ten in the file and sixty in memory, so that the size of the file is no limit."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: dict[int, tuple[struct.Struct, str]] = {
    type_id: (struct.Struct("<" + code), "<" + dtype)
    for type_id, code, dtype in (
        (0, "B", "u1"),
        (1, "b", "i1"),
        (2, "H", "u2"),
        (3, "h", "i2"),
        (4, "I", "u4"),
        (5, "i", "i4"),
        (6, "f", "f4"),
        (7, "B", "u1"),
        (10, "Q", "u8"),
        (11, "q", "i8"),
        (12, "d", "f8"),
    )
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MIN_KEY_VALUE_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_INFO_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_OTHER_MAGICS = (
    (b"PK\x03\x04", "it is a zip archive, perhaps a PyTorch pickle, which Quire never loads"),
    (b"version ", "it is a Git LFS pointer; run `git lfs pull` to fetch the real file"),
    (b"<", "it is a web page, not a model; download the file itself"),
    (b"GGJT", "it is in the old GGML format; convert the model anew with llama.cpp"),
    (b"FUGG", "its bytes are reversed"),
)


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor of the file. `shape` is in torch order: rows first, the contiguous dimension last."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    offset: int
    """Of the first byte, from the start of the file."""
    num_bytes: int
    part: int = 0
    """Of a split file, from 0 on."""


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A checked GGUF file. `data` keeps the mapping alive: uint8 `[file size]`; of a split file that of the first part.

    `others`: the data of the other parts.
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    """Strings, numbers, booleans and lists of them."""
    tensors: dict[str, GGUFTensor]
    data: np.ndarray
    key_places: dict[str, slice] = field(default_factory=dict)
    """The bytes of each key with its value, to be copied to another file."""
    others: tuple[np.ndarray, ...] = ()

    @property
    def architecture(self) -> str:
        """The name of the architecture. Raises: ModelFileError for a file without one."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise ModelFileError(f"{self.path}: the metadata key general.architecture is missing, or no text")
        return name

    def integer(self, key: str, default: int) -> int:
        """The value of a key. Raises: ModelFileError for another one than an integer."""
        value = self.metadata.get(key, default)
        if type(value) is not int:
            raise ModelFileError(f"{self.path}: {key} is {printable(repr(value), limit=80)}, not an integer")
        return value

    def rows(self, tensor: GGUFTensor) -> np.ndarray:
        """The stored blocks of a tensor, without copying. Shapes: uint8 `[rows, row_bytes]`."""
        stored = (self.data, *self.others)[tensor.part][tensor.offset : tensor.offset + tensor.num_bytes]
        return stored.reshape(math.prod(tensor.shape[:-1]), -1)


def read_gguf(path: Path) -> GGUFFile:
    """Map the file and parse its header; given any part of a split file, all of them.

    Raises: ModelFileError naming the file and what is wrong, also for a missing part; UnsupportedModelError for
    big-endian files, version 1 and formats that are not decoded here.
    """
    file = _read_part(path)
    count = file.integer("split.count", 1)
    if count in (0, 1):
        return file
    names = split_parts(path.name)
    if len(names) != count:
        raise ModelFileError(
            f"{path}: split.count says one of {count} parts, and its name does not say which: "
            f"give the parts the names they were published with, …-00001-of-{count:05}.gguf"
        )
    paths = [path.with_name(name) for name in names]
    if missing := next((part for part in paths if not part.exists()), None):
        raise ModelFileError(f"{missing} is missing: {path.name} is one of {len(names)} parts; fetch all of them")
    parts = [file if part == path else _read_part(part) for part in paths]
    tensors: dict[str, GGUFTensor] = {}
    for index, part in enumerate(parts):
        if part.integer("split.no", index) != index or part.integer("split.count", 1) != len(names):
            raise ModelFileError(f"{part.path}: not part {index + 1} of {len(names)} of this model; fetch it again")
        if again := next(iter(part.tensors.keys() & tensors.keys()), None):
            raise ModelFileError(f"{part.path}: tensor '{printable(again)}' is in another part too; fetch them again")
        tensors |= {name: replace(tensor, part=index) for name, tensor in part.tensors.items()}
    expected = parts[0].integer("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise ModelFileError(f"{paths[0]}: the parts have {len(tensors)} tensors, not {expected}; fetch them again")
    return replace(parts[0], tensors=tensors, others=tuple(part.data for part in parts[1:]))


def _read_part(path: Path) -> GGUFFile:
    mapping = map_file(path)
    reader = _HeaderReader(path, mapping)
    version = reader.read_magic_and_version()
    num_tensors = reader.read_count("tensors", _MIN_TENSOR_INFO_BYTES)
    num_keys = reader.read_count("metadata keys", _MIN_KEY_VALUE_BYTES)
    metadata = reader.read_metadata(num_keys)
    tensors = reader.read_tensor_infos(num_tensors, metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    return GGUFFile(path, version, metadata, tensors, reader.data, reader.key_places)


class _HeaderReader:
    """A position in the mapped file that never moves past its end."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self.mapping = mapping
        self.data = np.frombuffer(mapping, dtype=np.uint8)
        self.position = 0
        self.size = len(mapping)
        self.key_places: dict[str, slice] = {}
        self._num_items = 0
        self._repairs = False
        """True: strings that are not UTF-8 are read nevertheless, of keys that only describe the file."""

    def fail(self, problem: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {printable(problem)}; the file is corrupted, fetch it again")

    def need(self, num_bytes: int, what: str) -> None:
        left = self.size - self.position
        if num_bytes > left:
            self.fail(f"{what} needs {num_bytes:,} bytes at offset {self.position:,}, where only {left:,} are left")

    def read_integer(self, what: str, kind: struct.Struct = _U64) -> int:
        self.need(kind.size, what)
        (value,) = kind.unpack_from(self.mapping, self.position)
        self.position += kind.size
        return int(value)

    def read_name(self, what: str) -> str:
        (name,) = self._read_strings(what, 1)
        if not 1 <= len(name) <= MAX_NAME_LEN:
            self.fail(f"{what} has {len(name):,} characters, not 1 to {MAX_NAME_LEN:,}")
        return name

    def read_magic_and_version(self) -> int:
        magic = bytes(self.mapping[:8])
        if magic[:4] != b"GGUF":
            otherwise = "pass a GGUF file, or a directory with config.json and safetensors"
            hint = next((text for start, text in _OTHER_MAGICS if magic.startswith(start)), otherwise)
            raise ModelFileError(f"{self.path}: not a GGUF file, it starts with {magic[:4]!r}: {hint}")
        self.position = 4
        version = self.read_integer("the version", _U32)
        if version & 0xFFFF == 0 and version:
            raise UnsupportedModelError(f"{self.path}: a big-endian GGUF; only little-endian files are read")
        if version not in (2, 3):
            raise UnsupportedModelError(f"{self.path}: GGUF version {version}; versions 2 and 3 are read")
        return version

    def read_count(self, what: str, min_bytes_each: int) -> int:
        count = self.read_integer(f"the number of {what}")
        if count * min_bytes_each > self.size - self.position:
            self.fail(f"{count:,} {what} cannot fit in a file of {self.size:,} bytes")
        return count

    def read_metadata(self, num_keys: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(num_keys):
            start = self.position
            key = self.read_name(f"metadata key {index}")
            if key in metadata:
                self.fail(f"metadata key '{key}' appears twice")
            type_id = self.read_integer(f"the type of '{key}'", _U32)
            self._repairs = key.startswith("general.")
            metadata[key] = self._read_array(key) if type_id == _ARRAY else self._read_values(key, type_id, 1)[0]
            self._repairs = False
            self.key_places[key] = slice(start, self.position)
        return metadata

    def _read_array(self, key: str) -> list[Any]:
        type_id = self.read_integer(f"the element type of '{key}'", _U32)
        count = self.read_integer(f"the length of '{key}'")
        if type_id == _ARRAY:
            problem = printable(f"'{key}' is an array of arrays, which no supported model has")
            raise UnsupportedModelError(f"{self.path}: {problem}")
        self._num_items += count
        if self._num_items > MAX_ARRAY_ITEMS:
            self.fail(f"with '{key}' its arrays have {self._num_items:,} items, more than {MAX_ARRAY_ITEMS:,}")
        return self._read_values(key, type_id, count)

    def _read_values(self, key: str, type_id: int, count: int) -> list[Any]:
        if type_id == _STRING:
            return self._read_strings(f"'{key}'", count)
        if type_id not in _SCALARS:
            self.fail(f"'{key}' has the unknown type {type_id}")
        item_struct, dtype = _SCALARS[type_id]
        num_bytes = count * item_struct.size
        self.need(num_bytes, f"'{key}' with {count:,} values")
        values = np.frombuffer(self.mapping, dtype, count, self.position)
        self.position += num_bytes
        if type_id == _BOOL:
            if count and values.max() > 1:
                self.fail(f"'{key}' is a boolean with the value {int(values.max())}")
            values = values.astype(bool)
        items: list[Any] = values.tolist()
        return items

    def _read_strings(self, what: str, count: int) -> list[str]:
        """Read strings in native code, because vocabularies are most of a header: Python took 50 ms for 98,000."""
        self.need(count * 8, f"{what} with {count:,} strings")
        strings, num_bytes = read_strings(
            self.data.ctypes.data + self.position, self.size - self.position, count, MAX_STRING_BYTES
        )
        self.position += num_bytes
        while len(strings) < count:
            strings.append(self._read_doubtful_string(what, len(strings)))
        return strings

    def _read_doubtful_string(self, what: str, index: int) -> str:
        """Read a string that native code refused. Raises: ModelFileError unless only its UTF-8 is wrong, and may be."""
        shown = f"{what}, string {index},"
        if self.position + 8 > self.size:
            self.fail(f"{shown} is cut off by the end of the file")
        length = self.read_integer(what)
        if self.position + length > self.size:
            self.fail(f"{shown} has {length:,} bytes, more than are left in the file")
        if length > MAX_STRING_BYTES:
            self.fail(f"{shown} has {length:,} bytes, more than {MAX_STRING_BYTES:,}")
        stored = bytes(self.mapping[self.position : self.position + length])
        self.position += length
        try:
            return stored.decode()
        except UnicodeDecodeError:
            if not self._repairs:
                self.fail(f"{shown} is not UTF-8")
            _log.warning("%s: %s is not UTF-8: its wrong bytes are replaced", self.path, printable(what))
            return stored.decode(errors="replace")

    def read_tensor_infos(self, count: int, alignment: Any) -> dict[str, GGUFTensor]:
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self.fail(f"general.alignment is {alignment!r}, not a power of two")
        relative = [self._read_tensor_info(index, alignment) for index in range(count)]
        data_start = -(-self.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        end_of_previous = data_start
        for item in sorted(relative, key=lambda item: item.offset):
            offset = data_start + item.offset
            if item.name in tensors:
                self.fail(f"tensor '{item.name}' appears twice")
            if offset + item.num_bytes > self.size:
                self.fail(
                    f"tensor '{item.name}' ends at byte {offset + item.num_bytes:,}, after the end of the file at "
                    f"{self.size:,}"
                )
            if offset < end_of_previous:
                self.fail(f"tensor '{item.name}' overlaps the tensor before it")
            end_of_previous = offset + item.num_bytes
            tensors[item.name] = GGUFTensor(item.name, item.shape, item.format, offset, item.num_bytes)
        return tensors

    def _read_tensor_info(self, index: int, alignment: int) -> GGUFTensor:
        """Read a tensor's description; its offset is relative to the start of the tensor data."""
        name = self.read_name(f"the name of tensor {index}")
        num_dimensions = self.read_integer(f"the number of dimensions of '{name}'", _U32)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            self.fail(f"tensor '{name}' has {num_dimensions:,} dimensions, not 1 to {MAX_DIMENSIONS}")
        shape = tuple(self.read_integer(f"the shape of '{name}'") for _ in range(num_dimensions))[::-1]
        block_format = self._format_of(name, self.read_integer(f"the type of '{name}'", _U32))
        offset = self.read_integer(f"the offset of '{name}'")
        if 0 in shape:
            self.fail(f"tensor '{name}' has the shape {shape}, with a zero in it")
        if shape[-1] % block_format.block_len:
            self.fail(
                f"tensor '{name}' has rows of {shape[-1]:,} weights, which are not whole {block_format.name} blocks of "
                f"{block_format.block_len}"
            )
        if offset % alignment:
            self.fail(f"tensor '{name}' is at offset {offset:,}, which is not a multiple of the alignment {alignment}")
        num_bytes = math.prod(shape[:-1]) * row_bytes(block_format, shape[-1])
        return GGUFTensor(name, shape, block_format, offset, num_bytes)

    def _format_of(self, name: str, type_id: int) -> BlockFormat:
        if type_id in GGUF_FORMATS:
            return GGUF_FORMATS[type_id]
        if type_id in UNSUPPORTED_GGUF_FORMATS:
            problem = printable(f"tensor '{name}' has the type {UNSUPPORTED_GGUF_FORMATS[type_id]}")
            raise UnsupportedModelError(f"{self.path}: {problem}; supported are {', '.join(BLOCK_FORMATS)}")
        self.fail(f"tensor '{name}' has the type {type_id}, which GGUF does not define")


# --- Typed access to the keys ---------------------------------------------------------------------

PREDICTORS = "nextn_predict_layers"
LARGEST_FP32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Metadata:
    """Typed access to the metadata, and a note of the keys that have been read.

    A value of the wrong type is a `ModelFileError`. `fields`: those of config.json that have been made of keys.
    """

    file: GGUFFile
    architecture: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)

    @property
    def path(self) -> Path:
        """The file."""
        return self.file.path

    @property
    def num_layers(self) -> int:
        """Layers without those behind the last, which predict tokens after the next."""
        num_blocks, num_predictors = self.integer("block_count"), self.num_predictors
        if num_predictors >= num_blocks:
            raise self._wrong(PREDICTORS, num_predictors, f"less than the block_count of {num_blocks}")
        return num_blocks - num_predictors

    @property
    def num_predictors(self) -> int:
        """Layers behind the last."""
        return self.integer(PREDICTORS) if self.is_set(PREDICTORS) else 0

    def is_set(self, name: str) -> bool:
        """True if the file has the key, with another value than 0."""
        return bool(self.value(name, 0) != 0)

    def key(self, name: str) -> str:
        """The whole name of a key, which begins with the architecture."""
        return f"{self.architecture}.{name}"

    def get(self, name: str, default: Any) -> Any:
        """The value of a key that is not noted as read."""
        return self.file.metadata.get(self.key(name), default)

    def has(self, name: str) -> bool:
        """True if the file has the key."""
        return self.key(name) in self.file.metadata

    def value(self, name: str, default: Any) -> Any:
        """The value of a key, which must be there if `default` is None."""
        self._read.add(self.key(name))
        value = self.get(name, default)
        if value is None:
            raise ModelFileError(f"{self.path}: the metadata key {self.key(name)} is missing")
        return value

    def _wrong(self, name: str, value: Any, expected: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {self.key(name)} is {printable(repr(value), limit=80)}, not {expected}")

    def unread(self) -> list[str]:
        """The names of the architecture's keys that were not read and are not 0 or False."""
        prefix = self.key("")
        keys = [key for key, value in self.file.metadata.items() if key.startswith(prefix) and value not in (0, False)]
        return [key.removeprefix(prefix) for key in keys if key not in self._read]

    def integer(self, name: str, default: int | None = None) -> int:
        """A count of at least 1; an array of equal counts, one per layer, is one count."""
        value = self.value(name, default)
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                raise UnsupportedModelError(f"{self.path}: {self.key(name)} differs between layers")
            value = value[0]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or value < 1:
            raise self._wrong(name, value, "a positive integer")
        return value

    def counts(self, name: str) -> list[int]:
        """A count per layer, 0 for a layer that has none; a single number is that of all layers."""
        value, num_layers = self.value(name, None), self.num_layers
        values = value if isinstance(value, list) else [value] * num_layers
        if len(values) != num_layers or any(type(item) is not int or item < 0 for item in values) or not any(values):
            raise self._wrong(name, value, f"a count for each of {num_layers} layers")
        return values

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0. float32 values get their shortest decimal form: 1e-05, not 9.99999974e-06."""
        value = self.value(name, default)
        if type(value) not in (int, float) or not 0 < value <= LARGEST_FP32:
            raise self._wrong(name, value, "a positive number")
        return float(str(np.float32(value)))

    def flag(self, name: str, default: bool) -> bool:
        """True or False, which some files have as 1 or 0."""
        value = self.value(name, default)
        if value not in (False, True):
            raise self._wrong(name, value, "true or false")
        return bool(value)

    def pattern(self, name: str, default_period: int, num_layers: int) -> list[bool]:
        """A flag per layer: an array of them, or a period whose last layer alone has none."""
        value = self.value(name, default_period)
        if type(value) is int and value > 0:
            return [(index + 1) % value != 0 for index in range(num_layers)]
        if isinstance(value, list) and len(value) == num_layers and all(item in (False, True) for item in value):
            return [bool(item) for item in value]
        raise self._wrong(name, value, f"a number or {num_layers} flags")

    def token_id(self, name: str, vocab_size: int) -> int | None:
        """A token id of the tokenizer, or None when the model has no such token.

        An id that makes no sense is none: the reader of the tokenizer warns of it.
        """
        value = self.file.metadata.get(f"tokenizer.ggml.{name}")
        return value if type(value) is int and 0 <= value < vocab_size else None
