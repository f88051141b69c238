"""`Tour`: one prompt through the real engine, as a sequence of stops with numbers and reasons.

Every number is read from a recorded trace of the run that the stop describes. The same prompt is prefilled at once and
in chunks, decoded with the KV cache and without it, on one loaded model.
Next to read: `trace.py`, `compare/cache.py`, `explain/rank_model.py`.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.engine.recorder import Recorder
from quire.errors import EngineError, PromptError
from quire.events import EventLog
from quire.insight.compare.cache import RecomputingScheduler
from quire.insight.compare.rig import SharedExecutor
from quire.insight.trace import Line, Trace
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.insight.explain.rank_model import RankModel, Weight
    from quire.parallel.executor import Executor

NUM_SHOWN = 48
PER_LINE = 8
UNTIMED = "no instruction was timed: this model runs operation by operation, not as a plan"
NUM_LIKELIEST = 5
_PRODUCT = re.compile(r"^(Gemm|Likeliest): x \[(\d+), (\d+)\].*weight \[(\d+), (\d+)\] ?(\w*)")


@dataclass(frozen=True, slots=True)
class Stop:
    """A title, lines to show, and the answer to "why?"."""

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
        return 1e3 * math.fsum(step["duration_s"] for step in self.steps)

    @property
    def prefill_and_decode(self) -> str:
        """Time of the first step, and of the median one after it."""
        decode_s = statistics.median(step["duration_s"] for step in self.steps[1:])
        return f"prefill {self.steps[0]['duration_s'] * 1e3:.2f} ms, decode {decode_s * 1e3:.2f} ms a token"

    def share(self, step: Line) -> Line:
        """Return the request's part of a step: first position, number of tokens, sampled tokens."""
        return next(share for share in step["requests"] if share["id"] == self.output.request_id)


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
        """`num_tokens`: to generate, at least 2; `chunk`: token budget of the chunked prefill; `roles`: weights' names.

        Raises: PromptError if the prompt and its answer do not fit in one step, which the naive loop needs.
        """
        budget, most = config.scheduler.max_num_batched_tokens, len(prompt_token_ids) + num_tokens
        if most > budget:
            raise PromptError(
                f"prompt and answer have {most} tokens, one step takes {budget}: shorten them, or raise"
                f" max_num_batched_tokens to {most}"
            )
        self._config, self._executor, self._tokenizer = config, executor, tokenizer
        self._prompt = list(prompt_token_ids)
        self._num_tokens, self._chunk = num_tokens, chunk
        self._roles: dict[tuple[int, ...], list[str]] = {}
        for weight in () if roles is None else roles.weights:
            names, role = self._roles.setdefault(weight.shape, []), _role(weight)
            names += [] if role in names else [role]
        self._num_runs = 0
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
        yield self._layer()
        yield self._naive()

    def beside(self, name: str, config: EngineConfig, executor: "Executor") -> Stop:
        """Run the prompt on another device, called `name`, and put its times beside this one's."""
        other = Tour(
            config, executor, self._tokenizer, self._prompt, num_tokens=self._num_tokens, chunk=self._chunk
        )  # fmt: skip
        lines = [
            f"{self._config.device}: {self._whole.prefill_and_decode}",
            f"{name}: {other._whole.prefill_and_decode}",
            f"output: {self._same(other._whole)}",
        ]
        why = (
            "The devices round differently and may use other number types, so that tokens may differ where two are"
            " almost equally likely. A GPU has far more arithmetic, which shows in the prefill; a decode of one"
            " request is bound by memory on both."
        )
        return Stop(f"The same prompt on {name}", lines, why)

    def _run(self, *, budget: int | None = None, num_tokens: int | None = None, recomputes: bool = False) -> _Run:
        config = self._config
        if budget is not None:
            config = replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=budget))
        events = EventLog()
        make: Callable[..., Scheduler] = RecomputingScheduler if recomputes else Scheduler
        scheduler = make(config.scheduler, events)
        engine = LLMEngine(config, SharedExecutor(self._executor), self._tokenizer, events, scheduler=scheduler)
        recorder = Recorder(engine, op_period=1, with_text=True)
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens or self._num_tokens, ignore_eos=True, logprobs=NUM_LIKELIEST
        )  # fmt: skip
        self._num_runs += 1  # the executor outlives the engines, and knows requests by their ids
        engine.add_request(f"tour-{self._num_runs}", {"prompt_token_ids": self._prompt}, params)
        outputs = [output for _ in iter(engine.has_unfinished_requests, False) for output in engine.step()]
        last = outputs[-1]
        assert isinstance(last, RequestOutput)
        if (error := last.outputs[0].error) is not None:
            raise EngineError(f"the prompt could not be answered: {error}")
        return _Run(Trace.parse(recorder.take().decode()), last)

    # --- Stops ----------------------------------------------------------------------------------

    def _tokens(self) -> Stop:
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
        return Stop("Text becomes tokens", lines, why)

    def _blocks(self) -> Stop:
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
        ]
        why = (
            "Keys and values are stored in blocks of fixed size. A sequence takes a block when it needs one, from"
            " anywhere in memory, and wastes less than one block. The kernels find a token's slot through the"
            " block table."
        )
        return Stop("The scheduler admits the request and gives it KV blocks", lines, why)

    def _prefill(self) -> Stop:
        step = self._whole.steps[0]
        n = len(self._prompt)
        lines = [
            f"step {step['step_id']}: positions 0 … {n - 1}, T = {n} rows in one batch,"
            f" {step['duration_s'] * 1e3:.2f} ms",
            f"mask: position i attends to 0 … i, which is {n} · {n + 1} / 2 = {n * (n + 1) // 2} pairs of {n * n}",
            *self._window(),
            *self._work(step),
            "only the last position needs logits; the first new token is drawn from them, here the likeliest:",
            *self._sampled(0),
        ]
        why = (
            "All prompt tokens are known, so one step computes them together. Each weight is read once for all"
            " rows, so the time goes into arithmetic rather than into reading memory."
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
        if len(self._prompt) <= self._chunk:
            lines.append(f"the prompt fits in one chunk: --chunk {len(self._prompt) // 2} splits it")
        lines.append(f"output: {self._same(run)} as after the whole prefill")
        why = (
            f"A step computes at most {self._chunk} tokens here. Decodes of other requests run beside each chunk,"
            " so that a long prompt does not stop them. A chunk's mask is some rows of the whole mask: the KV"
            " cache holds the rest."
        )
        return Stop(f"The same prompt as a chunked prefill, {self._chunk} tokens a step", lines, why)

    def _decode(self) -> Stop:
        lines = []
        for at, step in enumerate(self._whole.steps[1:], 1):
            share = self._whole.share(step)
            lines.append(
                f"step {step['step_id']}: position {share['start']}, T = 1, {share['start'] + 1} pairs,"
                f" {step['duration_s'] * 1e3:.2f} ms: {self._sampled(at)[0]}"
            )
        lines += self._work(self._whole.steps[-1])
        why = (
            "A token can be computed only after the one before it is sampled, so a step has one row. It reads"
            " every weight, as the prefill does, for much less arithmetic: reading memory takes the time. A batch"
            " of many requests reads the weights once for all of them."
        )
        return Stop("Decode, one token a step", lines, why)

    def _shapes(self, chunked: _Run) -> Stop:
        steps = {"prefill": self._whole.steps[0], "chunk": chunked.steps[0], "decode": self._whole.steps[-1]}
        traces = {"prefill": self._whole.trace, "chunk": chunked.trace, "decode": self._whole.trace}
        found = {name: self._products(traces[name], step) for name, step in steps.items()}
        lines = []
        for key, (count, _, _, _) in found["decode"].items():
            lines.append(f"{count:3}× {key[0]}, weight [{key[1]}, {key[2]}]")
            for name, products in found.items():
                if key in products:
                    _, rows, flops, num_bytes = products[key]
                    lines.append(
                        f"      {name:8} [{rows}, {key[2]}] · [{key[2]}, {key[1]}] → [{rows}, {key[1]}],"
                        f" {flops / max(1, num_bytes):.3g} FLOPs per byte of the weight"
                    )
        if not lines:
            lines = [UNTIMED]
        elif len(chunked.steps) > len(self._whole.steps):
            lines.append("the first chunk samples nothing, so the product that makes logits does not run in it")
        why = (
            "A weight has the same shape in every step; only the rows of x change. FLOPs grow with the rows, the"
            " bytes of the weight do not: a step of few rows is bound by memory, one of many rows by arithmetic."
        )
        return Stop("What each matrix product's shape becomes", lines, why)

    def _layer(self) -> Stop:
        timed = [self._whole.trace.ops_of(step) for step in (self._whole.steps[0], self._whole.steps[-1])]
        names = [op["name"] for op in timed[0]]
        at = [index for index, name in enumerate(names) if name.startswith("Attend")]
        lines = []
        if len(at) > 1 and len(timed[0]) == len(timed[1]):
            period, num_layers = at[1] - at[0], len(at)
            start = next(index for index, name in enumerate(names) if name == names[index + period])
            for index in range(start, start + period):
                us = [math.fsum(op["microseconds"] for op in ops[index::period][:num_layers]) for ops in timed]
                lines.append(f"{us[0] / num_layers:8.1f} µs  {us[1] / num_layers:8.1f} µs  {names[index]}")
            lines.insert(0, f"  prefill       decode   instruction, mean of {num_layers} layers; shapes of the prefill")
        why = (
            "A layer is the same few instructions each time; only T, the first number of each shape, differs"
            " between steps. Types of fewer bits (q8, q4m) are quantised values. Attention reads the KV cache, all"
            " else works on rows."
        )
        return Stop("Inside one layer", lines or [UNTIMED], why)

    def _naive(self) -> Stop:
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
        return Stop("Without a KV cache: the naive loop, on the same engine", lines, why)

    # --- Numbers of a step ----------------------------------------------------------------------

    def _work(self, step: Line) -> list[str]:
        ops = self._whole.trace.ops_of(step)
        if not ops:
            return [UNTIMED]
        flops, num_bytes = (sum(op[name] for op in ops) for name in ("flops", "num_bytes"))
        us = sum(op["microseconds"] for op in ops)
        kinds: Counter[str] = Counter()
        for op in ops:
            kinds[op["name"].split(":")[0]] += op["microseconds"]
        most = ", ".join(f"{name} {part / us:.0%}" for name, part in kinds.most_common(3))
        return [
            f"{len(ops)} instructions take {us / 1e3:.2f} ms of it: {most}; sampling and scheduling take the rest",
            f"they compute {flops / 1e9:.3g} GFLOP and read {num_bytes / 1e6:.1f} MB:"
            f" {flops / us / 1e3:.1f} GFLOP/s, {num_bytes / us / 1e3:.1f} GB/s",
        ]

    def _products(self, trace: Trace, step: Line) -> dict[tuple[str, int, int], tuple[int, int, int, int]]:
        """Products by role and weight shape: how many, and one's rows, FLOPs and bytes."""
        found: dict[tuple[str, int, int], tuple[int, int, int, int]] = {}
        for op in trace.ops_of(step):
            if match := _PRODUCT.match(op["name"]):
                rows, outputs, inputs = int(match[2]), int(match[4]), int(match[5])
                role = " or ".join(self._roles.get((outputs, inputs), ["product"]))
                count = found.get((role, outputs, inputs), (0,))[0] + 1
                found[role, outputs, inputs] = (count, rows, op["flops"], op["num_bytes"])
        return found

    def _sampled(self, index: int) -> list[str]:
        completion = self._whole.output.outputs[0]
        token_id = completion.token_ids[index]
        if completion.logprobs is None:
            return [f"token {token_id} {self._piece(token_id)}"]
        others = sorted(completion.logprobs[index].items(), key=lambda item: -item[1].logprob)
        shown = ", ".join(
            f"{self._piece(other)} {math.exp(item.logprob):.1%}" for other, item in others[:NUM_LIKELIEST]
        )
        return [f"token {token_id} {self._piece(token_id)} of {shown}"]

    def _same(self, run: _Run) -> str:
        is_same = run.token_ids == self._whole.token_ids
        return f"{'the same' if is_same else 'NOT the same'} {len(run.token_ids)} tokens"

    def _kv_bytes(self) -> str:
        header, num_tokens = self._whole.trace.header, len(self._prompt)
        model, per_token = header["model"], header["engine"]["kv_bytes_per_token"]
        num_values = 2 * model["num_layers"] * model["num_kv_heads"] * model["head_size"]
        formula = ""
        if per_token % num_values == 0:
            formula = (
                f" = {model['num_layers']} layers · 2 (K and V) · {model['num_kv_heads']} heads · {model['head_size']}"
                f" values · {per_token // num_values} B"
            )
        kilobytes = num_tokens * per_token / 1e3
        return f"KV cache: {num_tokens} tokens · {per_token} B = {kilobytes:.1f} kB; {per_token} B{formula}"

    def _window(self) -> list[str]:
        windows = sorted({window for window in self._whole.trace.header["engine"]["windows"] if window})
        return [f"layers with a sliding window attend to the last {window} positions only" for window in windows]

    def _piece(self, token_id: int) -> str:
        return repr(self._tokenizer.decode([token_id], skip_special_tokens=False))


def rank_stop(rank: "RankModel", tp: int, num_tokens: int) -> Stop:
    """Return the stop that shows one rank of `tp`: the shapes of its weights, and the sums between them."""
    from quire.insight.explain.rank_model import split_name

    rows: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
    for weight in rank.weights:
        if len(weight.shape) == 2:
            key = (_role(weight), weight.whole_shape, weight.shape)
            rows[key] = rows.get(key, 0) + 1
    lines = [
        f"{count:3}× {role}: {list(whole)} in all, {list(mine)} on rank 0"
        for (role, whole, mine), count in rows.items()
    ]
    sums = [item.collective for item in rank.body if item.collective]
    order = []
    for item in rank.body:
        weight = item.named_weight
        if item.collective:
            order.append("all-reduce")
        elif weight is not None and len(weight.shape) == 2:
            order.append(split_name(rank.names[id(weight)])[1].removesuffix(".weight"))
        if len(order) > 1 and order.count("all-reduce") > 2:
            break
    lines.append(f"order in the first layer: {', '.join(order)}, …")
    if sums:
        row_bytes = sums[0].width * sums[0].value_bytes
        lines.append(
            f"{len(sums)} all-reduces in a step, each of T · {sums[0].width} values · {sums[0].value_bytes} B:"
            f" {num_tokens * row_bytes / 1e3:.3g} kB in the prefill, {row_bytes / 1e3:.3g} kB in a decode"
        )
    gathers = [item.collective for item in rank.head if item.collective and not item.collective.is_sum]
    if gathers:
        lines.append(f"{len(gathers)} all-gather of the logits, {gathers[0].width} values a row")
    why = (
        "Of two products in a row, the first is split by outputs and the second by inputs. So a rank needs the"
        " other ranks only after the second product, to sum. These shapes are what rank 0 would load; one process"
        " ran the stops above."
    )
    return Stop(f"The same model on {tp} ranks", lines, why)


def _role(weight: "Weight") -> str:
    return weight.layer_and_role[1].removesuffix(".weight")


def _pairs(share: Line) -> int:
    start, count = share["start"], share["count"]
    return int(count * start + count * (count + 1) // 2)
