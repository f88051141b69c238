"""`Metadata`: typed access to the keys of a GGUF file. Next to read: `gguf_config.py`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ModelFileError, UnsupportedModelError, printable
from quire.weights.gguf_file import GGUFFile

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
