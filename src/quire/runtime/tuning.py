"""`Tuning`: what `quire tune` measured on this machine for a model, kept in the cache directory.

`tuned` applies it where the engine looks at the machine. It is keyed as stored plans are: another version of Quire,
another model, data type, processor or number of cores has none.
Next to read: `cli/tuner.py`, which measures.
"""

from dataclasses import replace

import msgspec

from quire.config import EngineOptions, Hardware
from quire.runtime.plan.stored_plan import forget, make_key, read, read_all, write
from quire.weights.checkpoint import Checkpoint

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
    key = tuning_key(hardware, options, checkpoint)
    tuning = None if key is None or hardware.device != "cpu" else read("tuning", key, Tuning)
    if tuning is None or not 1 <= tuning.num_threads <= hardware.num_threads:
        return hardware
    settings = {name: getattr(tuning, name) for name in SETTINGS}
    return replace(hardware, **settings, tuned=tuning.found)


def keep_tuning(tuning: Tuning | None, hardware: Hardware, options: EngineOptions, checkpoint: Checkpoint) -> bool:
    """Keep a tuning, in place of the one before; None: the defaults. Returns whether it is found again."""
    key = tuning_key(hardware, options, checkpoint)
    if key is None:
        return False
    if tuning is None:
        forget("tuning", key)
    else:
        tuning = msgspec.structs.replace(tuning, code=_code(hardware))
        write("tuning", key, tuning)
    return read("tuning", key, Tuning) == tuning


def kept_tunings(hardware: Hardware) -> list[Tuning]:
    """Return the tunings of all models that hold for this machine and this version of Quire."""
    return [tuning for tuning in read_all("tuning", Tuning) if tuning.code == _code(hardware)]


def _code(hardware: Hardware) -> str | None:
    return make_key(hardware.name, hardware.num_threads)


def tuning_key(hardware: Hardware, options: EngineOptions, checkpoint: Checkpoint) -> str | None:
    """Return the key of a model's tuning on a machine; None where nothing is kept."""
    tensors = [(name, item.shape, item.format) for name, item in checkpoint.tensors.items()]
    chosen = (options.dtype, options.quantization, options.kv_cache_dtype, options.tensor_parallel_size)
    return make_key(checkpoint.hf_config, tensors, chosen, hardware.name, hardware.num_threads)
