"""`load_engine`, and `decode`: requests that start at once on an engine, and the speed of their decode steps.

Next to read: `speculation.py` and `adapters.py`, which compare engines and adapters by it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.config import EngineOptions
from quire.engine.adapters import LoRARequest
from quire.engine.build import resolve_config
from quire.engine.llm_engine import LLMEngine
from quire.errors import EngineError, MemoryCapacityError
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.weights.checkpoint import open_checkpoint
from quire.weights.sources import resolve_source
from quire_lessons.compare.memory import Size


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """A request of `decode`."""

    prompt: Any
    params: SamplingParams
    adapter: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class Decodes:
    """The tokens of each request. Behind the first tokens: tokens, seconds and the number of the first event."""

    answers: list[list[int]]
    num_tokens: int
    seconds: float
    first_event: int


def load_engine(model: str, size: Size, **options: Any) -> LLMEngine:
    """Load an engine. `options`: of `EngineOptions`, beside those of the setting `size`.

    Raises: ConfigError, ModelError, CapacityError.
    """
    try:
        return LLMEngine.from_options(model, **options, **size.options(size.value))
    except MemoryCapacityError as error:
        checkpoint = open_checkpoint(resolve_source(model))
        raise size.refusal(
            error, lambda more: resolve_config(EngineOptions(model=model, **options, **more), checkpoint)
        ) from None


def decode(engine: LLMEngine, name: str, jobs: Sequence[DecodeJob]) -> Decodes:
    """Run requests to their end; time counts from the step that gives the last of them its first token on.

    Raises: EngineError for a request that failed.
    """
    for index, job in enumerate(jobs):
        engine.add_request(f"{name}-{index}", job.prompt, job.params, lora_request=job.adapter)
    answers: dict[str, list[int]] = {}
    seen, started, num_first = engine.events.num_recorded, 0.0, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            if output.outputs[0].finish_reason == "error":
                raise EngineError(f"{name}: {output.outputs[0].error}")
            answers[output.request_id] = list(output.outputs[0].token_ids)
        if not started and len(answers) == len(jobs):
            started, num_first = time.perf_counter(), sum(map(len, answers.values()))
            seen = engine.events.num_recorded
    seconds = time.perf_counter() - started
    ordered = [answers[f"{name}-{index}"] for index in range(len(jobs))]
    return Decodes(ordered, sum(map(len, ordered)) - num_first, seconds, seen)
