"""Off and drafts: the same requests through two engines by turns, one of which verifies drafts.

Four workloads, from one that repeats a given text to one that repeats nothing. Next to read: `draft_texts.py` for the
prompts, `drafts/drafting.py` for the choice of drafts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.engine.llm_engine import LLMEngine
from quire.errors import ComparisonError, ConfigError
from quire.events import EventKind
from quire.sampling_params import SamplingParams
from quire.structured_outputs import StructuredOutputsParams
from quire_lessons.compare.decodes import DecodeJob, decode, load_engine
from quire_lessons.compare.draft_texts import WORKLOADS, prompt_of
from quire_lessons.compare.memory import Size
from quire_lessons.compare.results import FAKE_MODEL, Chart, Comparison, Progress, RunSettings, Series

NUM_TOKENS = 96
MODES = {"off": "off", "drafts": "auto"}
"""Mode → its `speculative`."""
NUM_ROUNDS = 2
"""Each has prompts of its own, because drafts come from earlier answers too; every second one begins with drafts."""
MAX_POSITIONS = 8
"""Positions of a draft whose acceptance is shown."""
Request = tuple[str, SamplingParams]


@dataclass(slots=True)
class Record:
    """All turns of one mode: decoded tokens and their seconds, and the decode steps with the drafts of each.

    `drafts`: tokens verified and right, per draft.
    """

    num_tokens: int = 0
    seconds: float = 0.0
    num_passes: int = 0
    drafts: list[tuple[int, int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds

    def acceptance(self) -> list[float]:
        """Return by position the share of right tokens among those verified behind right ones."""
        shares = []
        for at in range(MAX_POSITIONS):
            reached = [right for verified, right in self.drafts if verified > at and right >= at]
            if not reached:
                break
            shares.append(sum(right > at for right in reached) / len(reached))
        return shares


def compare(settings: RunSettings, progress: Progress) -> Comparison:
    """Run each workload in both modes by turns.

    Raises: ConfigError, ModelError, CapacityError; ComparisonError if outputs differ.
    """
    model, num_streams = settings.model or "smollm2", settings.requests or 1
    if model == FAKE_MODEL:
        raise ConfigError("compare speculation measures what a model repeats: model='fake' repeats nothing")
    num_tokens = settings.output_lens[0] if settings.output_lens else NUM_TOKENS
    if num_tokens < 2:
        raise ConfigError(
            f"output_lens={num_tokens}: compare speculation counts tokens behind the first: 2 or more fit"
        )
    engines = load_engines(model, settings, progress)
    try:
        if engines["drafts"].config.speculative == "off":
            raise ConfigError(f"compare speculation: drafts are off for {model}: `quire explain {model}` says why")
        found = {name: measure(engines, name, settings, num_tokens, progress) for name in WORKLOADS}
    finally:
        for engine in engines.values():
            engine.shutdown()
    shown = {"model": model, "seed": settings.seed, "requests": num_streams, "tokens": num_tokens}
    return _result(found, shown)


def load_engines(model: str, settings: RunSettings, progress: Progress, **options: Any) -> dict[str, LLMEngine]:
    """Load an engine per mode. `options`: of `EngineOptions`. Raises: ConfigError, ModelError, CapacityError."""
    progress(f"loading {model}", 0, 1)
    size = Size("requests", settings.requests or 1, lambda number: {"max_num_seqs": number})
    return {
        mode: load_engine(
            model,
            size,
            max_model_len=settings.context or 2048,
            seed=settings.seed,
            enable_prefix_caching=False,
            batch_invariant=True,
            speculative=value,
            **options,
        )
        for mode, value in MODES.items()
    }


def measure(
    engines: Mapping[str, LLMEngine], workload: str, settings: RunSettings, num_tokens: int, progress: Progress
) -> dict[str, Record]:
    """Run a workload in both modes by turns. Raises: ComparisonError if outputs differ; EngineError."""
    records, num_streams = {mode: Record() for mode in MODES}, settings.requests or 1
    for index in range(NUM_ROUNDS):
        progress(workload, index, NUM_ROUNDS)
        numbers = range(index * num_streams, (index + 1) * num_streams)
        requests = [_request(workload, number, num_tokens, settings.seed) for number in numbers]
        for mode in reversed(MODES) if index % 2 else MODES:
            _run(engines[mode], requests, f"{workload}-{index}", records[mode])
    if records["off"].answers != records["drafts"].answers:
        raise ComparisonError(f"{workload}: the outputs with drafts and without differ")
    return records


def _request(name: str, number: int, num_tokens: int, seed: int) -> Request:
    text, schema = prompt_of(name, number)
    params: dict[str, Any] = {"temperature": 0, "max_tokens": num_tokens}
    if name == "prose":
        params |= {"temperature": 0.8, "seed": seed + number}
    constraint = None if schema is None else StructuredOutputsParams(json=schema)
    return text, SamplingParams(ignore_eos=schema is None, structured_outputs=constraint, **params)


def _run(engine: LLMEngine, requests: Sequence[Request], name: str, record: Record) -> None:
    """Run requests to their end. Mutates: record. Raises: EngineError."""
    found = decode(engine, name, [DecodeJob(text, params) for text, params in requests])
    record.seconds += found.seconds
    record.num_tokens += found.num_tokens
    record.answers += found.answers
    for event in engine.events.since(found.first_event):
        if event.kind is EventKind.STEP:
            record.num_passes += event.data["num_iterations"]
            record.drafts += event.data["drafts"]


def _result(found: Mapping[str, Mapping[str, Record]], shown: dict[str, Any]) -> Comparison:
    rows: list[tuple[Any, ...]] = []
    explanation, series = [], []
    for name, records in found.items():
        off, on = records["off"], records["drafts"]
        num_verified, num_right = (sum(draft[at] for draft in on.drafts) for at in (0, 1))
        share = num_right / num_verified if num_verified else None
        rows.append((name, off.rate, on.rate, on.rate / off.rate, on.num_tokens / on.num_passes, num_verified, share))
        shares = on.acceptance()
        series.append(Series(name, tuple((float(at), each) for at, each in enumerate(shares, 1))))
        shares_text = ", ".join(f"{each:.0%}" for each in shares) or "no draft was verified"
        explanation.append(f"{name}: {WORKLOADS[name]}. Right by position in the draft: {shares_text}.")
    columns = (
        ("workload", "text"),
        ("off, tokens/s", "number"),
        ("drafts, tokens/s", "number"),
        ("gain", "times"),
        ("tokens per pass", "number"),
        ("verified", ""),
        ("right", "share"),
    )
    chart = Chart("right tokens by position in the draft", "position", "share", "line", tuple(series))
    num_streams = shown["requests"]
    title = f"{num_streams} at a time, up to {shown['tokens']} tokens each, {NUM_ROUNDS} turns with drafts and without"
    num_equal = num_streams * NUM_ROUNDS * len(found)
    return Comparison("speculation", title, shown, columns, tuple(rows), tuple(explanation), (chart,), num_equal)
