"""The base model, one adapter and one adapter per request: the same prompts on one engine, by turns.

The adapters are random, on every linear layer but the head. Each request's answer must be the one it gets alone.
Next to read: `runtime/adapter_pool.py`, which keeps the matrices.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from quire.byte_sizes import format_bytes
from quire.engine.adapters import LoRARequest
from quire.engine.llm_engine import LLMEngine
from quire.errors import ComparisonError, ConfigError, MemoryCapacityError
from quire.runtime.adapter_layout import linear_shapes, num_parameters
from quire.runtime.hardware import detect_hardware
from quire.sampling_params import SamplingParams
from quire_lessons.compare.results import FAKE_MODEL, Chart, Comparison, Progress, RunSettings, Series
from quire_lessons.compare.rig import SHARE, Size
from quire_lessons.compare.speculation import DecodeJob, decode, load_engine

NUM_REQUESTS, NUM_TOKENS, PROMPT_LEN, RANK = 8, 48, 32, 16
NUM_ROUNDS = 2
"""Each runs the modes in their order and then in the opposite one."""

SPREAD = 0.02
"""Standard deviation of A and B; models are initialised with it too."""


@dataclass(slots=True)
class Mode:
    """`chosen`: per request the number of its adapter, or None. All turns: tokens, seconds, answers of the first."""

    name: str
    chosen: list[int | None]
    num_tokens: int = 0
    seconds: float = 0.0
    answers: list[list[int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def num_adapters(self) -> int:
        """Different adapters."""
        return len(set(self.chosen) - {None})


def compare(settings: RunSettings, progress: Progress) -> Comparison:
    """Run the requests in each mode by turns, then each of them alone.

    Raises: ConfigError, ModelError, CapacityError; ComparisonError if an answer is not the one of a request alone.
    """
    model, count = settings.model or "smollm2", settings.requests or NUM_REQUESTS
    if model == FAKE_MODEL:
        raise ConfigError("compare adapters computes low-rank updates: model='fake' computes nothing")
    if len(settings.prompt_lens) > 1 or len(settings.output_lens) > 1:
        raise ConfigError("compare adapters takes one prompt length and one output length")
    rank = settings.rank or RANK
    num_tokens = settings.output_lens[0] if settings.output_lens else NUM_TOKENS
    if num_tokens < 2:
        raise ConfigError(f"output_lens={num_tokens}: compare adapters counts tokens behind the first: 2 or more fit")
    prompt_len = settings.prompt_lens[0] if settings.prompt_lens else PROMPT_LEN
    progress(f"loading {model}", 0, 1)
    engine = load_engine(
        model,
        Size("requests", count, lambda number: {"max_num_seqs": number}),
        max_model_len=settings.context or prompt_len + num_tokens,
        seed=settings.seed,
        enable_prefix_caching=False,
        batch_invariant=True,
        speculative="off",
        enable_lora=True,
    )
    everyone: list[int | None] = list(range(count))
    modes = [
        Mode("base", [None] * count),
        Mode("one adapter", [0] * count),
        Mode("an adapter each", everyone),
        Mode("every second one", [number if number % 2 else None for number in range(count)]),
    ][: 4 if count > 1 else 2]
    try:
        with tempfile.TemporaryDirectory(prefix="quire-adapters-") as folder:
            shapes = linear_shapes(engine.config.model.hf_config)
            check_files(count, rank, 2 * num_parameters(shapes, rank), shutil.disk_usage(folder).free)
            adapters = _make(Path(folder), shapes, rank, count, settings.seed, progress)
            jobs = _Jobs(engine, adapters, settings.seed, prompt_len, num_tokens)
            for turn, mode in enumerate([*modes, *reversed(modes)] * NUM_ROUNDS):
                progress("by turns", turn, 2 * NUM_ROUNDS * len(modes))
                jobs.run(mode, f"turn-{turn}")
            num_equal = jobs.check_alone(modes, progress)
    finally:
        engine.shutdown()
    shown = {"model": model, "seed": settings.seed, "requests": count, "rank": rank, "tokens": num_tokens}
    title = f"{count} requests at a time, {num_tokens} tokens each, adapters of rank {rank} on {len(shapes)} layers"
    return _result(modes, engine.config.weight_bytes, 2 * num_parameters(shapes, rank), title, shown, num_equal)


def check_files(count: int, rank: int, adapter_bytes: int, free_bytes: int) -> None:
    """Raises: MemoryCapacityError if the adapters take more than a share of the disk or of the available memory."""
    most = int(min(SHARE * free_bytes, detect_hardware("cpu").available_memory_bytes)) // adapter_bytes
    if count > most:
        raise MemoryCapacityError(
            f"{count} adapters of rank {rank} need {format_bytes(count * adapter_bytes)} of memory and of disk, more "
            f"than {SHARE:.0%} of what is available: requests={most} fits"
        )


def _make(
    folder: Path, shapes: Mapping[str, tuple[int, int]], rank: int, count: int, seed: int, progress: Progress
) -> list[LoRARequest]:
    made = []
    for number in range(count):
        progress("writing random adapters", number, count)
        path = write_random_adapter(folder / str(number), shapes, rank, seed + number)
        made.append(LoRARequest(f"adapter-{number}", str(path)))
    return made


class _Jobs:
    """The requests on one engine."""

    def __init__(
        self, engine: LLMEngine, adapters: Sequence[LoRARequest], seed: int, prompt_len: int, num_tokens: int
    ) -> None:
        self._engine, self._adapters = engine, adapters
        vocab_size, self._params = (
            engine.config.model.vocab_size,
            SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True),
        )
        self._prompts = [
            [(31 * seed + 7 * number + 3 * at) % (vocab_size - 1) + 1 for at in range(prompt_len)]
            for number in range(len(adapters))
        ]

    def _job(self, number: int, chosen: int | None) -> DecodeJob:
        adapter = None if chosen is None else self._adapters[chosen]
        return DecodeJob({"prompt_token_ids": self._prompts[number]}, self._params, adapter)

    def run(self, mode: Mode, name: str) -> None:
        """Run a mode once. Mutates: mode."""
        found = decode(self._engine, name, [self._job(number, chosen) for number, chosen in enumerate(mode.chosen)])
        mode.seconds += found.seconds
        mode.num_tokens += found.num_tokens
        mode.answers = mode.answers or found.answers
        if found.answers != mode.answers:
            raise ComparisonError(f"{mode.name}: the answers of two turns differ")

    def check_alone(self, modes: Sequence[Mode], progress: Progress) -> int:
        """Return the number of different requests, after running each alone. Raises: ComparisonError."""
        wanted: dict[tuple[int, int | None], list[int]] = {}
        for mode in modes:
            for number, (chosen, answer) in enumerate(zip(mode.chosen, mode.answers, strict=True)):
                if wanted.setdefault((number, chosen), answer) != answer:
                    raise ComparisonError(f"{mode.name}: request {number} gets another answer than in another mode")
        for at, ((number, chosen), answer) in enumerate(wanted.items()):
            progress("each alone", at, len(wanted))
            if decode(self._engine, f"alone-{at}", [self._job(number, chosen)]).answers != [answer]:
                raise ComparisonError(f"request {number} gets another answer alone than beside others")
        return len(wanted)


def _result(
    modes: Sequence[Mode], weight_bytes: int, adapter_bytes: int, title: str, shown: dict[str, object], num_equal: int
) -> Comparison:
    base, count = modes[0], len(modes[0].chosen)
    rows = tuple(
        (
            mode.name,
            mode.num_adapters,
            mode.rate,
            mode.rate / base.rate,
            1e3 * count / mode.rate,
            mode.num_adapters * adapter_bytes,
            mode.num_adapters * adapter_bytes / weight_bytes,
        )
        for mode in modes
    )
    columns = (
        ("requests use", "text"),
        ("adapters", ""),
        ("tokens/s", "number"),
        ("of base's", "share"),
        ("ms per step", "number"),
        ("bytes of A and B", "bytes"),
        ("of the weights", "share"),
    )
    explanation = (
        f"base: a decode step reads {format_bytes(weight_bytes)} of weights once for all {count} requests.",
        f"one adapter: its {format_bytes(adapter_bytes)} are read once per step for all requests.",
        "an adapter each: as many matrices are read as there are adapters, each for one row.",
        "every second one: requests of the base beside others with an adapter each; theirs are the base's answers.",
    )[: len(modes)]
    series = Series("tokens/s", tuple((float(mode.num_adapters), mode.rate) for mode in sorted(modes, key=_adapters)))
    chart = Chart("speed by the number of different adapters in a step", "adapters", "tokens/s", "line", (series,))
    return Comparison("adapters", title, shown, columns, rows, explanation, (chart,), num_equal)


def _adapters(mode: Mode) -> int:
    return mode.num_adapters


def write_random_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]], rank: int, seed: int) -> Path:
    """Write an adapter of these layers as PEFT does, in fp16. Returns: `folder`, which is made."""
    random, tensors = np.random.default_rng(seed), {}
    for module, (num_outputs, num_inputs) in shapes.items():
        for matrix, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            values = random.standard_normal(shape, np.float32) * np.float32(SPREAD)
            tensors[f"base_model.model.{module}.lora_{matrix}.weight"] = values.astype(np.float16)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
