"""`Tuning`: what `quire tune` measured on this machine for a model, kept in the cache directory.

`tuned` applies it where the engine looks at the machine. Another version of Quire, another model, data type, processor
or number of cores has none. Next to read: `quire_workshop/tuner.py`, which measures.
"""

import hashlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from quire import _native
from quire.config import EngineOptions, Hardware
from quire.files import find_own, make_directory, replace_file
from quire.models.registry import ModelRegistry
from quire.runtime.code_digest import code_digest
from quire.weights.checkpoint import Checkpoint
from quire.weights.model_cache import cache_directory

SETTINGS = ("num_threads", "tile_rows", "kv_ahead_bytes")
"""Fields of `Hardware` that `quire tune` measures."""


class Tuning(msgspec.Struct, frozen=True):
    """Settings that were faster than the defaults by more than the noise.

    num_threads: threads that compute. tile_rows, kv_ahead_bytes: see `Hardware`. found: the reasons, for people.
    model: as it was named. code: digest of the code and machine for which it holds.
    """

    num_threads: int
    tile_rows: int
    kv_ahead_bytes: int | None
    found: str
    model: str = ""
    code: str | None = None


def tuned(hardware: Hardware, options: EngineOptions, checkpoint: Checkpoint) -> Hardware:
    """Return the machine with a model's tuned settings, or as it was if there are none."""
    if hardware.device != "cpu" or not _directory().exists():  # a digest of all code takes some milliseconds
        return hardware
    path = _path(hardware, options, checkpoint)
    tuning = None if path is None else _read(path)
    if tuning is None or not 1 <= tuning.num_threads <= hardware.num_threads:
        return hardware
    settings = {name: getattr(tuning, name) for name in SETTINGS}
    return replace(hardware, **settings, tuned=tuning.found)


def keep_tuning(tuning: Tuning | None, hardware: Hardware, options: EngineOptions, checkpoint: Checkpoint) -> bool:
    """Keep a tuning, in place of the one before; None: the defaults. Returns whether it is found again."""
    path = _path(hardware, options, checkpoint)
    if path is None:
        return False
    with suppress(OSError):
        if tuning is None:
            path.unlink(missing_ok=True)
        else:
            tuning = msgspec.structs.replace(tuning, code=_digest(hardware))
            make_directory(path.parent)
            replace_file(path, [msgspec.json.encode(tuning)])
    return _read(path) == tuning


def kept_tunings(hardware: Hardware) -> list[Tuning]:
    """Return the tunings of all models that hold for this machine and this version of Quire."""
    found = [_read(path) for path in sorted(_directory().glob("*.json"))]
    return [tuning for tuning in found if tuning is not None and tuning.code == _digest(hardware)]


def _directory() -> Path:
    return cache_directory() / "tuning"


def _path(hardware: Hardware, options: EngineOptions, checkpoint: Checkpoint) -> Path | None:
    """Return the file of a model's tuning on a machine; None for models whose code is from outside."""
    if ModelRegistry.has_registered():
        return None
    tensors = [(name, item.shape, item.format) for name, item in checkpoint.tensors.items()]
    chosen = (options.dtype, options.quantization, options.kv_cache_dtype, options.tensor_parallel_size)
    with suppress(TypeError):  # a configuration that is no JSON
        return _directory() / f"{_digest(hardware, checkpoint.hf_config, tensors, chosen)[:32]}.json"
    return None


def _digest(hardware: Hardware, *parts: Any) -> str:
    """Return the digest of parts, and of what every tuning depends on."""
    always = code_digest(), _native.isa(), hardware.name, hardware.num_threads
    return hashlib.sha256(msgspec.json.encode([*always, *parts], order="sorted")).hexdigest()


def _read(path: Path) -> Tuning | None:
    """Return the tuning of a file; None if it is missing, damaged or not safe."""
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(find_own(path) or b"", type=Tuning)
    return None
