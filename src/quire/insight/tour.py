"""`Tour`: one prompt through the real engine, stop by stop: what happened, its numbers, and why.

Every number is read from a recorded trace of the run that the stop describes. The same prompt is prefilled at once and
in chunks, decoded with the KV cache and without it, on one loaded model.
Next to read: `trace.py`, `compare/cache.py`, `rank_model.py`.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.engine.recorder import Recorder
from quire.events import EventLog
from quire.insight.compare.cache import RecomputingScheduler
from quire.insight.compare.rig import SharedExecutor
from quire.insight.trace import Line, Trace
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.insight.rank_model import RankModel
    from quire.parallel.executor import Executor

REQUEST = "tour"
NUM_SHOWN = 24
_PRODUCT = re.compile(r"^(Gemm|Likeliest): x \[(\d+), (\d+)\].*weight \[(\d+), (\d+)\] ?(\w*)")


@dataclass(frozen=True, slots=True)
class Stop:
    """One stop: a title, lines to show, and the answer to "why?"."""

    title: str
    lines: Sequence[str]
    why: str


@dataclass(frozen=True, slots=True)
class _Run:
    trace: Trace
    output: RequestOutput

    @property
    def steps(self) -> list[Line]:
        return self.trace.steps

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self.output.outputs[0].token_ids)

    @property
    def milliseconds(self) -> float:
        return sum(step["duration_s"] for step in self.steps) * 1e3

    def share(self, step: Line) -> Line:
        """What the request computed in a step."""
        return next(share for share in step["requests"] if share["id"] == REQUEST)


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
        roles: "RankModel | None" = None,
    ) -> None:
        """`chunk`: token budget of the chunked prefill; `roles`: names of the weights."""
        self._config, self._executor, self._tokenizer = config, executor, tokenizer
        self._prompt = list(prompt_token_ids)
        self._num_tokens, self._chunk = num_tokens, chunk
        self._roles = {} if roles is None else {
            weight.shape: weight.layer_and_role[1].removesuffix(".weight") for weight in roles.weights
        }  # fmt: skip
        self._run(num_tokens=1)  # allocates memory, so that no stop is slower for it
        self._whole = self._run()

    def stops(self) -> Iterator[Stop]:
        """Yield all stops, in the order in which a token meets them."""
        yield self._tokens()
        yield self._blocks()
        yield self._prefill()
        chunked = self._run(budget=self._chunk)
        yield self._chunked(chunked)
        yield self._decode()
        yield self._shapes(chunked)
        yield self._naive()

    def _run(self, *, budget: int | None = None, num_tokens: int | None = None, recomputes: bool = False) -> _Run:
        config = self._config
        if budget is not None:
            config = replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=budget))
        events = EventLog()
        make: Callable[..., Scheduler] = RecomputingScheduler if recomputes else Scheduler
        scheduler = make(config.scheduler, events)
        engine = LLMEngine(config, SharedExecutor(self._executor), self._tokenizer, events, scheduler=scheduler)
        recorder = Recorder(engine, op_period=0 if recomputes else 1, with_text=True)
        params = SamplingParams(
            temperature=0,
            max_tokens=num_tokens or self._num_tokens,
            ignore_eos=True,
            logprobs=None if recomputes else 5,
        )
        engine.add_request(REQUEST, {"prompt_token_ids": self._prompt}, params)
        outputs = [output for _ in iter(engine.has_unfinished_requests, False) for output in engine.step()]
        last = outputs[-1]
        assert isinstance(last, RequestOutput)
        return _Run(Trace.parse(recorder.take().decode()), last)

    # --- Stops ----------------------------------------------------------------------------------

    def _tokens(self) -> Stop:
        pieces = [f"{token_id} {self._piece(token_id)}" for token_id in self._prompt]
        lines = [f"{len(self._prompt)} tokens: {'  '.join(pieces[:NUM_SHOWN])}{' …' * (len(pieces) > NUM_SHOWN)}"]
        why = "The model knows only token ids: the chat template writes the roles as text, the tokenizer splits it."
        return Stop("Text becomes tokens", lines, why)

    def _blocks(self) -> Stop:
        first, size = self._whole.steps[0], self._config.scheduler.block_size
        (_, table), *_ = self._whole.share(first)["tables"]
        bytes_per_token = self._whole.trace.header["engine"]["kv_bytes_per_token"]
        num_tokens = len(self._prompt)
        lines = [
            f"blocks = ⌈{num_tokens} / {size}⌉ = {len(table)}; block table: "
            + "  ".join(f"{at}→{block}" for at, block in enumerate(table[:NUM_SHOWN])),
            f"slot of position p = table[p // {size}] · {size} + p % {size}; position {num_tokens - 1} is slot"
            f" {table[(num_tokens - 1) // size] * size + (num_tokens - 1) % size}",
            f"KV cache: {num_tokens} · {bytes_per_token} B = {num_tokens * bytes_per_token / 1e3:.1f} kB",
        ]
        why = (
            "Keys and values are kept in blocks of fixed size, so that a sequence wastes at most one partly filled"
            " block, wherever its blocks lie. The table is the only thing that knows."
        )
        return Stop("The scheduler admits the request and gives it KV blocks", lines, why)

    def _prefill(self) -> Stop:
        step = self._whole.steps[0]
        n = len(self._prompt)
        lines = [
            f"step {step['step_id']}: positions 0 … {n - 1}, T = {n} rows in one batch, {step['duration_s'] * 1e3:.2f} ms",
            f"mask: token i attends to 0 … i, so {n} · {n + 1} / 2 = {n * (n + 1) // 2} pairs of {n * n}",
            *self._work(step),
            "only the last row needs logits: it gives the first new token",
            *self._sampled(0),
        ]
        why = (
            "All prompt tokens are known, so one pass computes them together: each weight is read once for all rows, and"
            " arithmetic, not memory, takes the time."
        )
        return Stop("Prefill", lines, why)

    def _chunked(self, run: _Run) -> Stop:
        lines = []
        for step in run.steps:
            share = run.share(step)
            if share["start"] >= len(self._prompt):
                break
            end = share["start"] + share["count"]
            what = "samples the first token" if share["new"] else "samples nothing: a partial prefill"
            lines.append(
                f"step {step['step_id']}: positions {share['start']} … {end - 1}, T = {share['count']},"
                f" reads the KV of {share['start']} earlier tokens, {step['duration_s'] * 1e3:.2f} ms; {what}"
            )
        same = "the same" if run.token_ids == self._whole.token_ids else "NOT the same"
        lines.append(f"{same} {len(run.token_ids)} tokens as with one prefill")
        why = (
            f"With a budget of {self._chunk} tokens a step, decodes of other requests fit in beside each chunk, and a long"
            " prompt does not make them wait. The chunks' masks are slices of the whole mask."
        )
        return Stop(f"The same prompt as a chunked prefill, {self._chunk} tokens a step", lines, why)

    def _decode(self) -> Stop:
        lines = []
        for at, step in enumerate(self._whole.steps[1:], 1):
            share = self._whole.share(step)
            lines.append(
                f"step {step['step_id']}: position {share['start']}, T = 1, {step['duration_s'] * 1e3:.2f} ms:"
                f" {self._sampled(at)[0]}"
            )
        lines += self._work(self._whole.steps[-1])
        why = (
            "The next token is known only after this one is sampled, so a step has one row: every weight is read for one"
            " row, and memory, not arithmetic, takes the time. Batching many requests shares that reading."
        )
        return Stop("Decode, one token a step", lines, why)

    def _shapes(self, chunked: _Run) -> Stop:
        steps = {"prefill": self._whole.steps[0], "chunk": chunked.steps[0], "decode": self._whole.steps[-1]}
        traces = {"prefill": self._whole.trace, "chunk": chunked.trace, "decode": self._whole.trace}
        found = {name: self._products(traces[name], step) for name, step in steps.items()}
        lines = []
        for key, (count, _, _, _) in found["decode"].items():
            shown = []
            for name, products in found.items():
                if key in products:
                    _, rows, flops, num_bytes = products[key]
                    shown.append(
                        f"{name} [{rows}, {key[2]}]·[{key[2]}, {key[1]}] {flops / max(1, num_bytes):.3g} FLOP/B"
                    )
            lines.append(f"{count:3}× {key[0]}: {';  '.join(shown)}")
        why = (
            "A product's weight has the same shape in every step; only the rows change. FLOPs grow with the rows, bytes"
            " hardly do: few rows are bound by memory, many by arithmetic."
        )
        return Stop("What each matrix product's shape becomes", lines, why)

    def _naive(self) -> Stop:
        naive, cached = self._run(recomputes=True), self._whole
        n, m = len(self._prompt), self._num_tokens
        pairs = [sum(_pairs(run.share(step)) for step in run.steps) for run in (naive, cached)]
        tokens = [sum(run.share(step)["count"] for step in run.steps) for run in (naive, cached)]
        same = "the same" if naive.token_ids == cached.token_ids else "NOT the same"
        lines = [
            f"without: {n} + {n + 1} + … + {n + m - 1} = {tokens[0]} rows, {pairs[0]} attention pairs,"
            f" {naive.milliseconds:.1f} ms",
            f"with:    {n} + 1 + … + 1 = {tokens[1]} rows, {pairs[1]} attention pairs, {cached.milliseconds:.1f} ms",
            f"{tokens[0] / tokens[1]:.1f}× the rows, {pairs[0] / pairs[1]:.1f}× the pairs,"
            f" {naive.milliseconds / cached.milliseconds:.1f}× the time; {same} {m} tokens",
        ]
        why = (
            "Without the cache, token n is computed anew with all before it: Σ n² ≈ n³/3 attention pairs in all. Keys and"
            " values of earlier tokens never change, so keeping them leaves Σ n ≈ n²/2."
        )
        return Stop("Without a KV cache: the naive loop, on the same engine", lines, why)

    # --- Numbers of a step ----------------------------------------------------------------------

    def _work(self, step: Line) -> list[str]:
        ops = self._whole.trace.ops_of(step)
        if not ops:
            return ["instructions were not timed: the model runs op by op"]
        flops, num_bytes = (sum(op[name] for op in ops) for name in ("flops", "num_bytes"))
        us = sum(op["microseconds"] for op in ops)
        kinds: Counter[str] = Counter()
        for op in ops:
            kinds[op["name"].split(":")[0]] += op["microseconds"]
        most = ", ".join(f"{name} {part / us:.0%}" for name, part in kinds.most_common(3))
        return [
            f"{len(ops)} instructions, {us / 1e3:.2f} ms ({most}): {flops / 1e9:.3g} GFLOP, {num_bytes / 1e6:.1f} MB"
            f" = {flops / us / 1e3:.1f} GFLOP/s, {num_bytes / us / 1e3:.1f} GB/s"
        ]

    def _products(self, trace: Trace, step: Line) -> dict[tuple[str, int, int], tuple[int, int, int, int]]:
        """Products by role and weight shape: how many, and one's rows, FLOPs and bytes."""
        found: dict[tuple[str, int, int], tuple[int, int, int, int]] = {}
        for op in trace.ops_of(step):
            if match := _PRODUCT.match(op["name"]):
                rows, outputs, inputs = int(match[2]), int(match[4]), int(match[5])
                role = self._roles.get((outputs, inputs), "product")
                count = found.get((role, outputs, inputs), (0,))[0] + 1
                found[role, outputs, inputs] = (count, rows, op["flops"], op["num_bytes"])
        return found

    def _sampled(self, index: int) -> list[str]:
        completion = self._whole.output.outputs[0]
        token_id = completion.token_ids[index]
        if completion.logprobs is None:
            return [f"token {token_id} {self._piece(token_id)}"]
        others = sorted(completion.logprobs[index].items(), key=lambda item: -item[1].logprob)
        shown = ", ".join(f"{self._piece(other)} {math.exp(item.logprob):.1%}" for other, item in others[:5])
        return [f"token {token_id} {self._piece(token_id)}, the likeliest of: {shown}"]

    def _piece(self, token_id: int) -> str:
        return repr(self._tokenizer.decode([token_id], skip_special_tokens=False))


def rank_stops(rank: "RankModel", tp: int, num_tokens: int) -> Iterator[Stop]:
    """Yield the stop that shows one rank of `tp`: the shapes of its weights, and the sums between them."""
    rows: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
    for weight in rank.weights:
        if len(weight.shape) == 2:
            key = (weight.layer_and_role[1].removesuffix(".weight"), weight.whole_shape, weight.shape)
            rows[key] = rows.get(key, 0) + 1
    lines = [
        f"{count:3}× {role}: {list(whole)} whole, {list(mine)} on a rank" for (role, whole, mine), count in rows.items()
    ]
    sums = [item for item in rank.body if type(item).__name__ == "AllReduce"]
    if sums:
        width, value_bytes = sums[0].out.width, sums[0].value_bytes  # type: ignore[attr-defined]
        lines.append(
            f"{len(sums)} all-reduces of {num_tokens} · {width} · {value_bytes} B ="
            f" {num_tokens * width * value_bytes / 1e6:.3g} MB in the prefill, {width * value_bytes / 1e3:.3g} kB in a decode"
        )
    why = (
        "Columns of the first product of a pair and rows of the second are split, so that a rank needs the others only"
        " once per pair: to sum. These shapes are those that rank 0 would load; one process runs them here."
    )
    yield Stop(f"The same model on {tp} ranks", lines, why)


def _pairs(share: Line) -> int:
    start, count = share["start"], share["count"]
    return int(count * start + count * (count + 1) // 2)
