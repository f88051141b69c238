"""Memory that models will use, found without loading them: `python -m quire.engine.process.sizes`, options on stdin.

A server of several models asks before it loads any. It is a process of its own because a model that was never loaded
here is described by code that the server does not import. Knows no HTTP.
Next to read: `../build.py`, `../../memory_plan.py`.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from quire.config import EngineOptions
from quire.errors import EngineDeadError, QuireError
from quire.parallel.frames import SentError

BUDGET_SHARE = 0.9
"""Share of the available memory that models get unless the user chooses: the rest is for tokenizers and requests."""
LIMIT_NAME = "--models-memory-bytes"


class Question(msgspec.Struct):
    """Models, and the memory for all of them together; None: a share of what is available."""

    models: list[EngineOptions]
    budget_bytes: int | None


class ModelSize(msgspec.Struct):
    """Memory of a loaded model: all of it, and of that the KV cache of a rank."""

    num_bytes: int
    kv_bytes: int


class Sizes(msgspec.Struct):
    """The memory for all models together, and that of each; or the first failure and the model that it is about."""

    budget_bytes: int
    models: list[ModelSize] = []
    failure: SentError | None = None


async def measure(models: Sequence[EngineOptions], budget_bytes: int | None) -> Sizes:
    """Return the budget and the memory of each model, which alone fits the budget.

    Raises: ModelError, ConfigError; MemoryCapacityError naming the model and the memory it needs if one does not fit.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", __name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        data, _ = await process.communicate(msgspec.msgpack.encode(Question(list(models), budget_bytes)))
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise EngineDeadError(f"the process that measures models exited with status {process.returncode}")
    sizes = msgspec.msgpack.decode(data, type=Sizes)
    if sizes.failure is not None:
        raise sizes.failure.revive()
    return sizes


def answer(question: Question) -> Sizes:
    """Return the sizes that a question asks for."""
    from quire.engine.build import resolve_config  # imports the kernels
    from quire.memory_plan import engine_bytes, kv_bytes
    from quire.runtime.hardware import detect_hardware
    from quire.weights.checkpoint import open_checkpoint
    from quire.weights.sources import resolve_source

    sizes = Sizes(question.budget_bytes or 0)
    try:
        hardware = detect_hardware(question.models[0].device)
        if question.budget_bytes is None:
            sizes.budget_bytes = int(BUDGET_SHARE * hardware.available_memory_bytes)
        limited = replace(hardware, available_memory_bytes=sizes.budget_bytes, memory_limit=LIMIT_NAME)
        for options in question.models:
            files = resolve_source(options.model, revision=options.revision)
            try:
                checkpoint = open_checkpoint(files, with_tensors=options.load_format != "dummy")
                config = resolve_config(options, checkpoint, limited)
            except QuireError as error:
                sizes.failure = SentError(error.code, f"{options.model}: {error.message}")
                break
            sizes.models.append(ModelSize(engine_bytes(config), kv_bytes(config)))
    except QuireError as error:
        sizes.failure = SentError.of(error)
    return sizes


if __name__ == "__main__":
    found = answer(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Question))
    sys.stdout.buffer.write(msgspec.msgpack.encode(found))
