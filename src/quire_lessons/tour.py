"""`Tour`: one prompt through the real engine, as a sequence of stops with numbers and reasons.

Times and tables are read from a recorded trace of the run that the stop describes, FLOPs and bytes from the model's own
instructions. The same prompt is prefilled at once and in chunks, decoded with the KV cache and without it, on one
loaded model.
Next to read: `quire/insight/trace.py`, `tour_work.py`, `compare/cache.py`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.engine.recorder import Recorder
from quire.errors import EngineError, PromptError
from quire.events import EventLog
from quire.insight.trace import EngineTrace, Line
from quire.outputs import RequestOutput
from quire.scheduler.scheduler import Scheduler
from quire.text.tokenizer import Tokenizer
from quire_lessons.compare.cache import RecomputingScheduler
from quire_lessons.compare.rig import SharedExecutor
from quire_lessons.tour_work import PARAMS, Figures, StepWork, operation_lines, rank_lines

if TYPE_CHECKING:
    from quire.parallel.executor import Executor

NUM_SHOWN = 48
PER_LINE = 8
UNTIMED = "no instruction was timed: this model runs operation by operation, not as a plan"


@dataclass(frozen=True, slots=True)
class TourStop:
    """A title, lines to show, and the answer to "why?". `facts`: its numbers, for programs."""

    title: str
    lines: Sequence[str]
    why: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Run:
    trace: EngineTrace
    output: RequestOutput
    work: StepWork | None

    @property
    def steps(self) -> list[Line]:
        return self.trace.steps

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self.output.outputs[0].token_ids)

    @property
    def milliseconds(self) -> float:
        return 1e3 * math.fsum(step["duration_s"] for step in self.steps)

    def share(self, step: Line) -> Line:
        """Return the request's part of a step: first position, number of tokens, sampled tokens."""
        return next(share for share in step["requests"] if share["id"] == self.output.request_id)

    def figures(self, *steps: Line) -> Figures:
        """Return the numbers of steps, added up."""
        total = Figures()
        for step in steps:
            share, seconds = self.share(step), step["duration_s"]
            one = Figures(share["count"], seconds)
            if self.work is not None:
                one = self.work.figures(seconds, share["start"], share["count"], len(share["new"]))
            total += one
        return total


def check_length(config: EngineConfig, num_tokens: int) -> None:
    """Raises: PromptError if a prompt and its answer, `num_tokens` in all, do not fit in one step."""
    budget = config.scheduler.max_num_batched_tokens
    if num_tokens > budget:
        raise PromptError(
            f"prompt and answer have {num_tokens} tokens, one step takes {budget}: shorten them, or give"
            f" --max-num-batched-tokens {num_tokens}"
        )


class Tour:
    """Stops of one prompt; each is computed when it is asked for."""

    def __init__(
        self,
        config: EngineConfig,
        executor: "Executor",
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        num_tokens: int,
        chunk: int,
        work: StepWork | None = None,
    ) -> None:
        """`num_tokens`: to generate, at least 2; `chunk`: token budget of the chunked prefill; `work`: of its steps.

        Raises: PromptError if the prompt and its answer do not fit in one step, which the naive loop needs.
        """
        check_length(config, len(prompt_token_ids) + num_tokens)
        self._config, self._executor, self._tokenizer = config, executor, tokenizer
        self._prompt, self._work = list(prompt_token_ids), work
        self._num_tokens, self._chunk = num_tokens, chunk
        self._num_runs = 0
        self._run(num_tokens=2)  # allocates memory and builds kernels, so that no stop is slower for it
        self._whole = self._run()

    def stops(self) -> Iterator[TourStop]:
        """Yield all stops, in the order in which a token meets them."""
        yield self._tokens()
        yield self._blocks()
        yield self._prefill()
        chunked = self._run(budget=self._chunk)
        yield self._chunked(chunked)
        yield self._decode()
        yield self._operations(chunked)
        yield self._naive()
        if self._work is not None and self._work.num_ranks > 1:
            yield self._ranks(self._work)

    def beside(
        self,
        name: str,
        config: EngineConfig,
        executor: "Executor",
        work: StepWork | None = None,
        memory: Callable[[], str] | None = None,
    ) -> TourStop:
        """Run the prompt on another device, `name`, beside this one. `memory`: says how much is held then."""
        other = Tour(
            config, executor, self._tokenizer, self._prompt, num_tokens=self._num_tokens, chunk=self._chunk, work=work
        )
        runs = {self._config.device: self._whole, name: other._whole}
        phases = {device: (run.figures(run.steps[0]), run.figures(*run.steps[1:])) for device, run in runs.items()}
        lines = [
            f"{device} {phase}: {line}"
            for device, figures in phases.items()
            for phase, one in zip(("prefill", "decode"), figures, strict=True)
            for line in one.shown
        ]
        faster = [mine.seconds / its.seconds for mine, its in zip(*phases.values(), strict=True)]
        lines.append(f"speed-up: prefill {faster[0]:.3g}×, decode {faster[1]:.3g}×")
        if memory is not None:
            lines.append(f"memory of {name}: {memory()}")
        lines.append(f"output: {self._same(other._whole)}")
        why = (
            "The devices round differently and may use other number types, so that tokens may differ where two are"
            " almost equally likely. A GPU has far more arithmetic, which shows in the prefill; a decode of one"
            " request is bound by memory on both."
        )
        facts = {device: {"prefill": one.facts, "decode": two.facts} for device, (one, two) in phases.items()}
        return TourStop(f"The same prompt on {name}", lines, why, facts)

    def _run(self, *, budget: int | None = None, num_tokens: int | None = None, recomputes: bool = False) -> _Run:
        config = self._config
        if budget is not None:
            config = replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=budget))
        events = EventLog()
        make: Callable[..., Scheduler] = RecomputingScheduler if recomputes else Scheduler
        scheduler = make(config.scheduler, events)
        # No tokenizer: a borrowed one may not know all tokens, and the stops show token by token.
        engine = LLMEngine(config, SharedExecutor(self._executor), None, events, scheduler=scheduler)
        recorder = Recorder(engine, op_period=1)
        params = replace(PARAMS, max_tokens=num_tokens or self._num_tokens)
        self._num_runs += 1  # the executor outlives the engines, and knows requests by their ids
        engine.add_request(f"tour-{self._num_runs}", {"prompt_token_ids": self._prompt}, params)
        outputs = [output for _ in iter(engine.has_unfinished_requests, False) for output in engine.step()]
        last = outputs[-1]
        assert isinstance(last, RequestOutput)
        if (error := last.outputs[0].error) is not None:
            raise EngineError(f"the prompt could not be answered: {error}")
        return _Run(EngineTrace.parse(recorder.take().decode()), last, self._work)

    # --- Stops ----------------------------------------------------------------------------------

    def _tokens(self) -> TourStop:
        pieces = [f"{token_id} {self._piece(token_id)}" for token_id in self._prompt]
        lines = [f"{len(pieces)} tokens, each an id and its text; the number before a line is the first one's position"]
        for at in range(0, min(NUM_SHOWN, len(pieces)), PER_LINE):
            lines.append(f"{at:4}: {'  '.join(pieces[at : at + PER_LINE])}")
        if len(pieces) > NUM_SHOWN:
            lines.append(f"      … and {len(pieces) - NUM_SHOWN} more")
        why = (
            "The model computes with token ids only. The chat template writes the roles of the messages as text"
            " with special tokens, and the tokenizer splits this text into pieces of its vocabulary."
        )
        return TourStop("Text becomes tokens", lines, why)

    def _blocks(self) -> TourStop:
        first, size = self._whole.steps[0], self._config.scheduler.block_size
        (_, table), *_ = self._whole.share(first)["tables"]
        num_tokens = len(self._prompt)
        last = num_tokens - 1
        lines = [
            f"blocks = ⌈{num_tokens} tokens / {size} per block⌉ = {len(table)}",
            "block table, index → block: " + "  ".join(f"{at} → {block}" for at, block in enumerate(table[:NUM_SHOWN])),
            f"slot of position p = table[p // {size}] · {size} + p % {size}; position {last}:"
            f" {table[last // size]} · {size} + {last % size} = {table[last // size] * size + last % size}",
            self._kv_bytes(),
            self._pool(),
        ]
        why = (
            "Keys and values are stored in blocks of fixed size. A sequence takes a block when it needs one, from"
            " anywhere in memory, and wastes less than one block. The kernels find a token's slot through the"
            " block table."
        )
        return TourStop("The scheduler admits the request and gives it KV blocks", lines, why)

    def _prefill(self) -> TourStop:
        step = self._whole.steps[0]
        n, figures = len(self._prompt), self._whole.figures(step)
        lines = [
            f"step {step['step_id']}: positions 0 … {n - 1}, T = {n} rows in one batch",
            *self._batch(self._whole, step),
            f"mask: position i attends to 0 … i, which is {n} · {n + 1} / 2 = {n * (n + 1) // 2} pairs of {n * n}",
            *self._window(),
            *figures.shown,
            *([] if self._work is None else [self._work.limits]),
            *self._kinds(step),
            "only the last position needs logits; the first new token is drawn from them, here the likeliest:",
            self._sampled(0),
        ]
        why = (
            "All prompt tokens are known, so one step computes them together. Each weight is read once for all"
            " rows, so the time goes into arithmetic rather than into reading memory."
        )
        return TourStop("Prefill", lines, why, figures.facts)

    def _chunked(self, run: _Run) -> TourStop:
        lines, chunks = [], []
        for step in run.steps:
            share = run.share(step)
            if share["start"] >= len(self._prompt):
                break
            chunks.append(step)
            end = share["start"] + share["count"]
            what = "samples the first token" if share["new"] else "samples nothing: a partial prefill"
            lines += [
                f"step {step['step_id']}: positions {share['start']} … {end - 1}, T = {share['count']},"
                f" reads the KV of {share['start']} earlier tokens; {what}",
                *(f"   {line}" for line in (*self._batch(run, step), *run.figures(step).shown)),
            ]
        total, whole = run.figures(*chunks), self._whole.figures(self._whole.steps[0])
        if len(self._prompt) <= self._chunk:
            lines.append(f"the prompt fits in one chunk: --chunk {len(self._prompt) // 2} splits it")
        lines += [f"in total: {len(chunks)} steps, {line}" for line in total.shown[:1]]
        lines += [f"in total: {line}" for line in total.shown[1:]]
        moved = f", {total.num_bytes / whole.num_bytes:.2f}× its bytes" if whole.num_bytes else ""
        lines += [
            f"chunked / whole: {total.seconds / whole.seconds:.2f}× the time{moved}",
            f"output: {self._same(run)} as after the whole prefill",
        ]
        why = (
            f"A step computes at most {self._chunk} tokens here. Decodes of other requests run beside each chunk,"
            " so that a long prompt does not stop them. A chunk's mask is some rows of the whole mask: the KV"
            " cache holds the rest. Each chunk reads all weights again."
        )
        facts = {
            "chunks": [run.figures(step).facts for step in chunks],
            "total": total.facts,
            "same_tokens": run.token_ids == self._whole.token_ids,
        }
        return TourStop(f"The same prompt as a chunked prefill, {self._chunk} tokens a step", lines, why, facts)

    def _decode(self) -> TourStop:
        lines, steps = [], self._whole.steps[1:]
        for at, step in enumerate(steps, 1):
            share = self._whole.share(step)
            lines.append(
                f"step {step['step_id']}: position {share['start']}, T = 1, {share['start'] + 1} pairs,"
                f" {step['duration_s'] * 1e3:.2f} ms: {self._sampled(at)}"
            )
        prefill, decode = self._whole.figures(self._whole.steps[0]), self._whole.figures(*steps)
        lines += [
            *(f"in the last step {line}" for line in self._batch(self._whole, steps[-1])),
            *decode.shown,
            *self._kinds(steps[-1]),
            f"prefill : decode: {_ratio(prefill, decode)}",
        ]
        why = (
            "A token can be computed only after the one before it is sampled, so a step has one row. It reads"
            " every weight, as the prefill does, for much less arithmetic: reading memory takes the time. A batch"
            " of many requests reads the weights once for all of them."
        )
        return TourStop("Decode, one token a step", lines, why, decode.facts)

    def _operations(self, chunked: _Run) -> TourStop:
        why = (
            "Weights have the same shape in every step; only the rows differ. FLOPs grow with the rows, the bytes of a"
            " weight do not: a step of few rows is bound by memory, one of many rows by arithmetic. A layer is the same"
            " few instructions each time. Types of fewer bits (q8, q4m) are quantised values."
        )
        work, title = self._work, "Operation by operation: shapes, work and times"
        if work is None:
            return TourStop(title, [UNTIMED], why)
        steps = {}
        for name, run, at in (("prefill", self._whole, 0), ("chunk", chunked, 0), ("decode", self._whole, -1)):
            share = run.share(run.steps[at])
            phase = work.phase(share["start"], share["count"], len(share["new"]))
            steps[name] = (phase, run.trace.ops_of(run.steps[at]))
        found = work.operations(steps)
        rank = f" of rank 0 of {work.num_ranks}" * (work.num_ranks > 1)
        lines = [f"instructions{rank}: work of one, and its mean time in the step", *operation_lines(found)]
        if not any(ops for _, ops in steps.values()):
            lines.append(UNTIMED)
        if len(chunked.steps) > len(self._whole.steps):
            lines.append("the first chunk samples nothing, so the product that makes logits does not run in it")
        facts = [{name: asdict(one) for name, one in rows.items()} for rows in found]
        return TourStop(title, lines, why, {"operations": facts})

    def _naive(self) -> TourStop:
        naive, cached = self._run(recomputes=True), self._whole
        n, m = len(self._prompt), self._num_tokens
        pairs = [sum(_pairs(run.share(step)) for step in run.steps) for run in (naive, cached)]
        tokens = [sum(run.share(step)["count"] for step in run.steps) for run in (naive, cached)]
        lines = [
            f"without: {n} + {n + 1} + … + {n + m - 1} = {tokens[0]} rows, {pairs[0]} attention pairs,"
            f" {naive.milliseconds:.1f} ms",
            f"with:    {n} + {m - 1} · 1 = {tokens[1]} rows, {pairs[1]} attention pairs, {cached.milliseconds:.1f} ms",
            f"without / with: {tokens[0] / tokens[1]:.1f}× the rows, {pairs[0] / pairs[1]:.1f}× the pairs,"
            f" {naive.milliseconds / cached.milliseconds:.1f}× the time; output: {self._same(naive)}",
        ]
        why = (
            "Without the cache each step computes all k tokens so far again, k (k + 1) / 2 pairs: about N³ / 6"
            " over N steps. Keys and values of earlier tokens never change. With the cache a step computes one row"
            " of k pairs: about N² / 2 over N steps."
        )
        return TourStop("Without a KV cache: the naive loop, on the same engine", lines, why)

    # --- Numbers of a step ----------------------------------------------------------------------

    def _batch(self, run: _Run, step: Line) -> list[str]:
        """Return the arrays that describe a step to the kernels, as they are for one request."""
        share, size = run.share(step), self._config.scheduler.block_size
        start, end = share["start"], share["start"] + share["count"]
        tables = run.trace.state_after(step).requests[share["id"]].tables
        lines = [f"query_start_loc = [0, {share['count']}], seq_lens = [{end}]"]
        for at, table in enumerate(tables):
            name = f" of KV cache group {at}" if len(tables) > 1 else ""
            pages = range(start // size, (end - 1) // size + 1)
            if pages.stop > len(table):  # a state of fixed size: one page for all positions
                lines.append(f"block_tables{name} = [{table}]")
                continue
            slots = [table[position // size] * size + position % size for position in range(start, end)]
            lines.append(f"block_tables{name} = [{table}], slot_mapping = [{_ranges(slots)}]")
        return lines

    def _pool(self) -> str:
        used = len(self._whole.trace.state_after(self._whole.steps[0]).references)
        blocks = self._config.scheduler.num_blocks - 1
        return f"pool: {used} of {blocks} KV blocks are in use, {used / blocks:.2%}; block 0 holds nothing"

    def _kinds(self, step: Line) -> list[str]:
        """Return the instructions that take most of a step's time."""
        ops = self._whole.trace.ops_of(step)
        if not ops:
            return [UNTIMED]
        us = sum(op["microseconds"] for op in ops)
        kinds: Counter[str] = Counter()
        for op in ops:
            kinds[op["name"].split(":")[0]] += op["microseconds"]
        most = ", ".join(f"{name} {part / us:.0%}" for name, part in kinds.most_common(3))
        return [f"{len(ops)} instructions take {us / 1e3:.2f} ms: {most}; sampling and scheduling take the rest"]

    def _sampled(self, index: int) -> str:
        completion = self._whole.output.outputs[0]
        token_id = completion.token_ids[index]
        if completion.logprobs is None:
            return f"token {token_id} {self._piece(token_id)}"
        others = sorted(completion.logprobs[index].items(), key=lambda item: -item[1].logprob)
        shown = ", ".join(
            f"{self._piece(other)} {100 * math.exp(item.logprob):.2g}%" for other, item in others[: PARAMS.logprobs]
        )
        return f"token {token_id} {self._piece(token_id)} of {shown}"

    def _same(self, run: _Run) -> str:
        is_same = run.token_ids == self._whole.token_ids
        return f"{'the same' if is_same else 'NOT the same'} {len(run.token_ids)} tokens"

    def _kv_bytes(self) -> str:
        header, num_tokens = self._whole.trace.header, len(self._prompt)
        model, per_token = header["model"], header["engine"]["kv_bytes_per_token"]
        num_values = 2 * model["num_layers"] * model["num_kv_heads"] * model["head_size"]
        formula, layers = "", f"{model['num_layers']} layer" + "s" * (model["num_layers"] > 1)
        if per_token % num_values == 0:
            formula = (
                f" = {layers} · 2 (K and V) · {model['num_kv_heads']} heads · {model['head_size']}"
                f" values · {per_token // num_values} B"
            )
        kilobytes = num_tokens * per_token / 1e3
        return f"KV cache: {num_tokens} tokens · {per_token} B = {kilobytes:.1f} kB; {per_token} B{formula}"

    def _window(self) -> list[str]:
        windows = sorted({window for window in self._whole.trace.header["engine"]["windows"] if window})
        return [f"layers with a sliding window attend to the last {window} positions only" for window in windows]

    def _piece(self, token_id: int) -> str:
        """Return the text of a token; of one that a borrowed tokenizer lacks, only that there is none."""
        if token_id >= self._tokenizer.vocab_size:
            return f"<{token_id}>"
        return repr(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def _ranks(self, work: StepWork) -> TourStop:
        """Return the stop that shows one rank: the shapes of its weights, and the sums between the ranks."""
        lines = list(rank_lines(work.rank, len(self._prompt)))
        for name, step in (("prefill", self._whole.steps[0]), ("decode", self._whole.steps[-1])):
            us = [op["microseconds"] for op in self._whole.trace.ops_of(step) if op["name"].startswith("AllReduce")]
            if us:
                part = math.fsum(us) / 1e6 / step["duration_s"]
                lines.append(
                    f"all-reduces took {math.fsum(us) / 1e3:.2f} ms of the {name}, {part:.0%}, waiting included"
                )
        why = (
            "Of two products in a row, the first is split by outputs and the second by inputs. So a rank needs the"
            " other ranks only after the second product, to sum. Times of all stops are those of rank 0, which waits"
            " in each sum for the slowest rank."
        )
        return TourStop(f"The same model on {work.num_ranks} ranks", lines, why)


def _ratio(prefill: Figures, decode: Figures) -> str:
    """Return the prefill's numbers of one token against those of a decode."""
    parts = [f"tokens/s {prefill.tokens_per_s / decode.tokens_per_s:.3g} : 1"]
    for name in ("seconds", "flops", "num_bytes"):
        one, other = (getattr(item, name) / item.num_tokens for item in (prefill, decode))
        if one:
            label = {"seconds": "time", "flops": "FLOPs", "num_bytes": "bytes"}[name]
            parts.append(f"{label} a token 1 : {other / one:.3g}")
    return ", ".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    """[32, 33, 34, 70] → "32 … 34, 70"."""
    ends = [at for at, (one, other) in enumerate(pairwise(numbers), 1) if other != one + 1]
    runs = [numbers[start:end] for start, end in pairwise([0, *ends, len(numbers)])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} … {run[-1]}" for run in runs)


def _pairs(share: Line) -> int:
    start, count = share["start"], share["count"]
    return int(count * start + count * (count + 1) // 2)
