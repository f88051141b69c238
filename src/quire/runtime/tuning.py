"""`Tuning`: what `quire tune` measured on this machine for a model, kept in the cache directory.

`tuned` applies it where the engine looks at the machine. It is keyed as stored plans are: another version of Quire,
another model, data type, processor or number of cores has none.
Next to read: `insight/tune.py`, which measures.
"""

from dataclasses import replace

import msgspec

from quire.config import EngineOptions, Hardware
from quire.runtime.plan.stored_plan import forget, make_key, read, write
from quire.weights.checkpoint import Checkpoint


class Tuning(msgspec.Struct, frozen=True):
    """Settings that were faster than the defaults by more than the noise.

    num_threads: threads that compute. tile_rows: see `Hardware`. found: the reasons, for people.
    """

    num_threads: int
    tile_rows: int
    found: str


def tuned(hardware: Hardware, options: EngineOptions, checkpoint: Checkpoint) -> Hardware:
    """Return the machine with a model's tuned settings, or as it was if there are none."""
    key = tuning_key(hardware, options, checkpoint)
    tuning = None if key is None or hardware.device != "cpu" else read("tuning", key, Tuning)
    if tuning is None or not 1 <= tuning.num_threads <= hardware.num_threads:
        return hardware
    return replace(hardware, num_threads=tuning.num_threads, tile_rows=tuning.tile_rows, tuned=tuning.found)


def keep_tuning(tuning: Tuning | None, hardware: Hardware, options: EngineOptions, checkpoint: Checkpoint) -> bool:
    """Keep a tuning, in place of the one before; None: the defaults. Returns whether it is found again."""
    key = tuning_key(hardware, options, checkpoint)
    if key is None:
        return False
    if tuning is None:
        forget("tuning", key)
    else:
        write("tuning", key, tuning)
    return read("tuning", key, Tuning) == tuning


def tuning_key(hardware: Hardware, options: EngineOptions, checkpoint: Checkpoint) -> str | None:
    """Return the key of a model's tuning on a machine; None where nothing is kept."""
    tensors = [(name, item.shape, item.format) for name, item in checkpoint.tensors.items()]
    chosen = (options.dtype, options.quantization, options.kv_cache_dtype, options.tensor_parallel_size)
    return make_key(checkpoint.hf_config, tensors, chosen, hardware.name, hardware.num_threads)
