"""The real scheduler with an executor that has no model: exercises run requests through it in milliseconds.

Next to read: `numbers.py` and `queue_checks.py`, which use it; `../compare/rig.py` for the executor.
"""

from collections.abc import Callable, Sequence
from typing import Any

from quire.config import EngineConfig, EngineOptions, Hardware
from quire.resolve import resolve
from quire.sampling_params import SamplingParams
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.types import RequestSpec
from quire_lessons.compare.results import FAKE_MODEL
from quire_lessons.compare.rig import FakeExecutor, fake_model

MEMORY_BYTES = 1 << 36


def make_config(**options: Any) -> EngineConfig:
    """Return a configuration of an engine without a model. `options`: of `EngineOptions`."""
    chosen = EngineOptions(model=FAKE_MODEL, **{"multi_step_decode": 1, "speculative": "off", **options})
    return resolve(chosen, Hardware("cpu", MEMORY_BYTES, MEMORY_BYTES, True, 1), fake_model())


def make_request(name: str, prompt: Sequence[int], num_tokens: int, *, n: int = 1, salt: str = "") -> Request:
    """Return a request that generates exactly `num_tokens` tokens, `n` times."""
    sampling = SamplingParams(n=n, temperature=0, max_tokens=num_tokens, ignore_eos=True)
    extras = (salt,) if salt else ()
    names = [name, *(f"{name}.{at}" for at in range(1, n))]
    first, *others = [
        Request(RequestSpec(it, list(prompt), sampling, max_tokens=num_tokens, hash_extras=extras)) for it in names
    ]
    first.siblings = others
    return first


class FakeEngine:
    """A scheduler and its executor. `num_rows`: tokens computed in each step; `most_blocks`: most in use at once."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler | None = None) -> None:
        self.scheduler = Scheduler(config.scheduler) if scheduler is None else scheduler
        self.num_rows: list[int] = []
        self.most_blocks = 0
        self._executor = FakeExecutor(config)

    def step(self) -> bool:
        """Run one step. Returns: False if nothing was scheduled."""
        output = self.scheduler.schedule()
        if not output.scheduled:
            return False
        pool = self.scheduler.blocks.pool
        self.most_blocks = max(self.most_blocks, pool.num_usable - pool.num_free)
        self.num_rows.append(output.num_tokens)
        self._executor.submit(output)
        self.scheduler.update(output, self._executor.collect())
        return True

    def serve(self, *requests: Request, between: Callable[[], None] = lambda: None) -> None:
        """Add the requests and run steps until all have ended. `between`: called before each step."""
        for request in requests:
            self.scheduler.add_request(request)
        between()
        while self.step():
            between()
