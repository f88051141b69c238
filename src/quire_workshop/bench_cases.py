"""The cases of `quire bench`, and their measurement. Knows no tensors and prints nothing.

Prompt processing: prompt tokens per second of requests that generate one token. Generation: tokens per second
after the first token, while all streams run. Prompts are random token ids; nothing stops early.
Next to read: `cli/bench.py`.
"""

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine


@dataclass(frozen=True)
class BenchCase:
    """A row: `num_prompt` tokens in, `num_generated` out, in each of `num_streams` requests at once.

    Prompt processing has `num_generated` 0. Generation starts after `num_prompt` tokens of context.
    """

    num_prompt: int
    num_generated: int
    num_streams: int = 1

    @property
    def name(self) -> str:
        """The name in llama-bench's manner: pp512, pp2048@8, tg128, tg128@32, tg128@32+d1024."""
        streams = f"@{self.num_streams}" if self.num_streams > 1 else ""
        if self.num_generated == 0:
            return f"pp{self.num_prompt}{streams}"
        depth = f"+d{self.num_prompt}" if self.num_prompt > 1 else ""
        return f"tg{self.num_generated}{streams}{depth}"

    @property
    def len_needed(self) -> int:
        """Context length one stream needs."""
        return self.num_prompt + max(self.num_generated, 1)


def bench_cases(
    prompt_lens: Sequence[int], generation_lens: Sequence[int], concurrency: Sequence[int], depths: Sequence[int]
) -> list[BenchCase]:
    """Return the rows in order: prompts, then generation by depth, length and streams. A zero leaves its rows out."""
    prompts = [BenchCase(length, 0) for length in prompt_lens if length]
    # A prompt has at least one token: depth 0 starts from it.
    generations = [
        BenchCase(max(depth, 1), length, streams)
        for depth, length, streams in itertools.product(depths, generation_lens, concurrency)
        if length and streams
    ]
    return prompts + generations


@dataclass
class Measurement:
    """Repetitions of one case, in tokens per second."""

    case: BenchCase
    samples: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Arithmetic mean."""
        return statistics.fmean(self.samples)

    @property
    def deviation(self) -> float:
        """Sample standard deviation; 0 for a single repetition."""
        return statistics.stdev(self.samples) if len(self.samples) > 1 else 0.0


def random_prompts(
    case: BenchCase, vocab_size: int, special: frozenset[int], generator: random.Random
) -> list[list[int]]:
    """Return one prompt of random token ids, without special ones, per stream."""
    ordinary = [token_id for token_id in range(vocab_size) if token_id not in special]
    return [generator.choices(ordinary, k=case.num_prompt) for _ in range(case.num_streams)]


def measure(engine: "LLMEngine", case: BenchCase, prompts: list[list[int]]) -> float:
    """Return the tokens per second of one repetition. `prompts`: one list of token ids per stream."""
    num_generated = max(case.num_generated, 1)
    params = SamplingParams(temperature=0.0, max_tokens=num_generated, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(f"bench-{index}", {"prompt_token_ids": prompt}, params)
    if case.num_generated > 0:
        return _decode_rate(engine, len(prompts), num_generated)
    while engine.has_unfinished_requests():
        engine.step()
    return case.num_prompt * len(prompts) / (time.perf_counter() - start)


def _decode_rate(engine: "LLMEngine", num_streams: int, num_generated: int) -> float:
    """Run all streams. Returns: the rate from the last stream's first token to the first stream's end."""
    counts: dict[str, int] = {}
    start_s, start_count, rate = 0.0, -1, 0.0
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            counts[output.request_id] = len(output.outputs[0].token_ids)
        if start_count < 0 and len(counts) == num_streams and min(counts.values()) > 0:
            start_s, start_count = time.perf_counter(), sum(counts.values())
        elif start_count >= 0 and not rate and max(counts.values()) >= num_generated:
            rate = (sum(counts.values()) - start_count) / (time.perf_counter() - start_s)
    return rate
