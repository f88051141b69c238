"""Steps end to end through the real scheduler: chunked, batched, forked and preempted equal alone, bit for bit."""

import dataclasses
from typing import Any

import msgspec
import pytest
import torch

from quire.cache_spec import CacheGroup
from quire.errors import EngineError
from quire.memory_plan import PROMPT_LOGPROB_ROWS
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.forward import EagerForward
from quire.runtime.model_runner import ModelRunner
from quire.sampling.sampler import Sampler
from quire.sampling_params import PoolingParams, SamplingParams
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler
from quire.types import RequestResult, RequestSpec, SchedulerOutput, StepResult
from tests.runtime.builders import make_config
from tests.runtime.tiny_model import ONE_GROUP, TWO_GROUPS, VOCAB_SIZE, TinyModel, run_to_end, tokens_of
from tests.scheduler.integrity import check_integrity

MODEL = TinyModel()


class Runtime:
    """Scheduler and runner over the stand-in model."""

    def __init__(self, groups: tuple[CacheGroup, ...] = ONE_GROUP, **config: Any) -> None:
        self.config = make_config(kv_cache_groups=groups, vocab_size=VOCAB_SIZE, **config)
        self.scheduler = Scheduler(self.config.scheduler)
        cache = CacheEngine(self.config)
        # Unwritten memory must never reach a result.
        cache.pool.fill_(float("nan"))
        device = torch.device("cpu")
        self.forward = EagerForward(MODEL, cache, self.config.scheduler.block_size, device)
        self.runner = ModelRunner(self.config, self.forward, cache, Sampler(VOCAB_SIZE, "cpu"))
        self.runner.limit_s = 60  # so that a slow machine ends no step

    def submit(self, output: SchedulerOutput) -> None:
        self._submitted = output

    def collect(self) -> StepResult:
        return self.execute(self._submitted)

    def execute(self, output: SchedulerOutput) -> StepResult:
        return self.runner.run(output)

    def run(self, *requests: Request, **how: Any) -> dict[str, list[RequestResult]]:
        results, self.outputs = run_to_end(self.scheduler, self, list(requests), **how)
        return {name: joined(items) for name, items in results.items()}


def prompt(number: int, length: int) -> list[int]:
    return [(7 * number + 3 * i + i * i) % VOCAB_SIZE for i in range(length)]


def make_request(name: str, token_ids: list[int], max_tokens: int = 8, seed: int = 0, **params: Any) -> Request:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **params})
    reads_cache = sampling.prompt_logprobs is None
    return Request(
        RequestSpec(name, token_ids, sampling, max_tokens=max_tokens, seed=seed, reads_prefix_cache=reads_cache)
    )


def pooling_request(name: str, token_ids: list[int], **params: Any) -> Request:
    pooling = PoolingParams(**params)
    return Request(RequestSpec(name, token_ids, None, pooling, max_tokens=0, reads_prefix_cache=False))


def joined(items: list[RequestResult]) -> list[RequestResult]:
    """Split each step's results into one per token."""
    found = []
    for item in items:
        for index, token_id in enumerate(item.token_ids):
            prompt_logprobs = item.prompt_logprobs if index == 0 else ()
            found.append(RequestResult(item.request_id, (token_id,), item.logprobs[index : index + 1], prompt_logprobs))
        if not item.token_ids or item.error is not None:
            found.append(msgspec.structs.replace(item, token_ids=(), logprobs=()))
    return found


def tokens(results: dict[str, list[RequestResult]]) -> dict[str, list[int]]:
    return {name: tokens_of(items) for name, items in results.items()}


def greedy(token_ids: list[int], count: int) -> list[int]:
    """Greedy tokens without an engine."""
    known = list(token_ids)
    for _ in range(count):
        known.append(int(MODEL.compute_logits(MODEL.hidden_of(known)[-1:]).argmax()))
    return known[len(token_ids) :]


LENGTHS = (1, 5, 13, 30, 4)


@pytest.mark.parametrize("groups", [ONE_GROUP, TWO_GROUPS])
@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_chunked_and_batched_equal_no_engine(chunk: int, groups: tuple[CacheGroup, ...]) -> None:
    requests = [make_request(f"r{i}", prompt(i, length)) for i, length in enumerate(LENGTHS)]
    runtime = Runtime(groups, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 16))
    found = tokens(runtime.run(*requests, one_per_step=True))
    assert found == {f"r{i}": greedy(prompt(i, length), 8) for i, length in enumerate(LENGTHS)}


def test_beams_forked_between_steps() -> None:
    runtime = Runtime()
    token_ids = prompt(4, 6)
    parent = make_request("parent", token_ids, logprobs=3)
    parent.awaits_external_token = True
    runtime.scheduler.add_request(parent)

    def step() -> dict[str, RequestResult]:
        output = runtime.scheduler.schedule()
        result = runtime.execute(output)
        runtime.scheduler.update(output, result)
        check_integrity(runtime.scheduler)
        return {item.request_id: item for item in result.results}

    assert step()["parent"].logprobs
    children = {}
    for name, token_id in (("left", 11), ("right", 12)):
        child = make_request(name, token_ids, logprobs=3)
        child.awaits_external_token = True
        runtime.scheduler.fork("parent", child)
        runtime.scheduler.append_token(name, token_id)
        children[name] = token_id
    # The parent ends in the very step in which its children first run.
    runtime.scheduler.abort(["parent"])
    found = step()
    for name, token_id in children.items():
        assert list(found[name].token_ids) == greedy([*token_ids, token_id], 1)
        (logprobs,) = found[name].logprobs
        expected = MODEL.compute_logits(MODEL.hidden_of([*token_ids, token_id])[-1:]).log_softmax(-1)[0]
        assert logprobs.logprobs[0] == pytest.approx(float(expected.max()), abs=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("normalize", [False, True])
def test_pooling_equals_direct_computation(chunk: int, pooling: str, normalize: bool) -> None:
    runtime = Runtime(max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 16))
    lengths = (1, 9, 20)
    requests = [
        pooling_request(f"p{i}", prompt(i, n), pooling=pooling, normalize=normalize) for i, n in enumerate(lengths)
    ]
    results = runtime.run(*requests, make_request("text", prompt(5, 6)))
    for i, length in enumerate(lengths):
        hidden = MODEL.hidden_of(prompt(i, length))
        expected = hidden[-1] if pooling == "last" else hidden.mean(0)
        expected = expected / expected.norm() if normalize else expected
        (result,) = results[f"p{i}"]
        assert result.token_ids == ()
        assert result.embedding == pytest.approx(expected.tolist(), abs=1e-5)
    assert tokens(results)["text"] == greedy(prompt(5, 6), 8)


@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
def test_prompt_logprobs_do_not_depend_on_chunks(chunk: int) -> None:
    token_ids = prompt(6, 23)
    runtime = Runtime(max_num_batched_tokens=chunk, max_num_seqs=1)
    results = runtime.run(make_request("a", token_ids, 3, prompt_logprobs=2))["a"]
    found = [logprobs for item in results for logprobs in item.prompt_logprobs]
    expected = MODEL.compute_logits(MODEL.hidden_of(token_ids)).log_softmax(-1)
    assert [logprobs.token_ids[0] for logprobs in found] == token_ids[1:]
    for position, logprobs in enumerate(found):
        row = expected[position]
        assert logprobs.logprobs[0] == pytest.approx(float(row[token_ids[position + 1]]), abs=1e-5)
        assert logprobs.ranks[0] == 1 + int((row > row[token_ids[position + 1]]).sum())
        likeliest = set(row.topk(2).indices.tolist())
        assert likeliest <= set(logprobs.token_ids)
    assert tokens({"a": results})["a"] == greedy(token_ids, 3)


def test_prompt_logprobs_of_more_rows_than_a_slice() -> None:
    length = PROMPT_LOGPROB_ROWS // 2
    long = Runtime(max_model_len=200, max_num_batched_tokens=200)
    whole = long.run(make_request("a", prompt(1, length), 1, prompt_logprobs=0))["a"][0].prompt_logprobs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.runtime.model_runner.PROMPT_LOGPROB_ROWS", 50)
        sliced = Runtime(max_model_len=200, max_num_batched_tokens=200)
        found = sliced.run(make_request("a", prompt(1, length), 1, prompt_logprobs=0))["a"][0].prompt_logprobs
    assert found == whole
    assert len(whole) == length - 1


def test_prompt_of_one_token_has_no_prompt_logprobs() -> None:
    (result,) = Runtime().run(make_request("a", [3], 1, prompt_logprobs=1))["a"]
    assert result.prompt_logprobs == ()
    assert len(result.token_ids) == 1


def test_empty_step_and_unknown_request() -> None:
    runtime = Runtime()
    assert runtime.execute(SchedulerOutput(9, (), (), (), (), ())) == StepResult(9, ())
    runtime.scheduler.add_request(make_request("a", prompt(0, 4)))
    output = runtime.scheduler.schedule()
    with pytest.raises(EngineError, match="never told"):
        runtime.execute(msgspec.structs.replace(output, new_requests=()))


BREAKING_POINTS = [
    "states.apply", "states._advance", "sampler.start", "states.append", "cache.transfer", "forward.run",
    "forward.hidden", "forward.logits", "sampler.sample",
]  # fmt: skip


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("point", BREAKING_POINTS)
def test_step_that_breaks_off_anywhere_is_made_good(point: str, is_late: bool) -> None:
    """The first, eighth, 27th … call fails, before or after its work: requests that run again get the same results."""

    def requests() -> list[Request]:
        long = make_request("many", prompt(1, 13), temperature=1.0, repetition_penalty=1.2, max_tokens=6)
        long.siblings = [make_request("many/1", prompt(1, 13), temperature=1.0, seed=5, max_tokens=6)]
        vector = pooling_request("vector", prompt(4, 20), pooling="mean")
        return [long, make_request("a", prompt(2, 5), prompt_logprobs=1, max_tokens=6), vector]

    expected = Runtime(max_num_batched_tokens=9, max_num_seqs=4).run(*requests())
    runtime = Runtime(max_num_batched_tokens=9, max_num_seqs=4)
    owner = getattr(runtime.runner, point.partition(".")[0])
    name = point.partition(".")[2]
    whole = getattr(owner, name)
    num_calls = num_lost = 0

    def breaks(*arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        fails = num_calls in (1, 8, 27, 64)
        if fails and not is_late:
            raise ZeroDivisionError
        result = whole(*arguments, **options)
        if fails:
            raise ZeroDivisionError
        return result

    setattr(owner, name, breaks)
    execute = runtime.execute

    def lossy(output: SchedulerOutput) -> StepResult:
        nonlocal num_lost
        try:
            return execute(output)
        except ZeroDivisionError:
            num_lost += 1
            return StepResult(output.step_id, (), is_lost=True)

    runtime.execute = lossy  # type: ignore[method-assign]
    found = runtime.run(*requests())
    assert num_lost > 0
    assert found["vector"][0].embedding == expected["vector"][0].embedding
    # A request that comes back reports its prompt again.
    for items in (found, expected):
        items["a"] = [msgspec.structs.replace(item, prompt_logprobs=()) for item in items["a"] if item.token_ids]
    assert {**found, "vector": []} == {**expected, "vector": []}
    runtime.run(make_request("b", [1], 1))
    assert len(runtime.runner.states.by_id) == 1


class DamagedModel(TinyModel):
    """Token 49 overflows: what follows it in the same request is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding[49] = torch.inf

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack([MODEL.embedding @ row for row in hidden])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_end_their_own_request_only(temperature: float) -> None:
    def requests() -> list[Request]:
        good = [make_request(f"good {i}", prompt(i, 9 + i), temperature=temperature, logprobs=1) for i in range(2)]
        # The good requests must not sample the damaged token.
        for request in good:
            request.sampling = dataclasses.replace(request.sampling, logit_bias={49: -100.0})
        return good

    damaged = [make_request("bad", [1, 2, 49, 3], temperature=temperature), pooling_request("bad vector", [49, 5, 6])]
    runtime = Runtime()
    runtime.forward.model = DamagedModel()
    found = runtime.run(*damaged, *requests())
    expected = Runtime().run(*requests())
    assert {name: items for name, items in found.items() if name.startswith("good")} == expected
    for name in ("bad", "bad vector"):
        (result,) = found[name]
        assert result.error is not None
        assert "NaN" in result.error
        assert (result.token_ids, result.embedding) == ((), None)


def run_multi_step(most: int, *requests: Request, limit_s: float = 60, **config: Any) -> tuple[Any, list[int]]:
    """Results per request, and the number of decode iterations of each step."""
    runtime = Runtime(multi_step_decode=most, **config)
    runtime.runner.limit_s = limit_s
    iterations: list[int] = []
    execute = runtime.execute

    def counting(output: SchedulerOutput) -> StepResult:
        result = execute(output)
        iterations.append(result.num_iterations)
        return result

    runtime.execute = counting  # type: ignore[method-assign]
    return runtime.run(*requests), iterations


def test_step_ends_with_the_iteration_in_which_a_request_ends() -> None:
    drawn = tokens(Runtime().run(make_request("a", prompt(1, 9), 20, seed=3, temperature=1.0)))["a"]
    ended_after = next(i for i in range(4, 20) if drawn[i] not in drawn[:i]) + 1
    stops = make_request("stops", prompt(1, 9), 20, seed=3, temperature=1.0, stop_token_ids=[drawn[ended_after - 1]])
    found, iterations = run_multi_step(20, stops, make_request("goes on", prompt(2, 9), 20))
    assert tokens(found) == {"stops": drawn[:ended_after], "goes on": greedy(prompt(2, 9), 20)}
    assert iterations == [1, ended_after - 1, 20 - ended_after]


def test_step_ends_early_when_asked_and_when_it_takes_too_long() -> None:
    expected = {"a": greedy(prompt(1, 9), 7)}
    found, iterations = run_multi_step(6, make_request("a", prompt(1, 9), 7), limit_s=0.0)
    assert (iterations, tokens(found)) == ([1] * 7, expected)
    runtime = Runtime(multi_step_decode=6)
    run = runtime.runner.run

    def run_early(output: SchedulerOutput) -> StepResult:
        runtime.runner.end_early()  # by another thread
        return run(output)

    runtime.runner.run = run_early  # type: ignore[method-assign]
    assert tokens(runtime.run(make_request("a", prompt(1, 9), 7))) == expected
    assert len(runtime.outputs) == 7


def test_request_that_fails_in_a_later_iteration_fails_alone() -> None:
    """Other requests keep the token of that iteration and go on unchanged: with penalties and draws too."""

    def good() -> Request:
        return make_request("good", prompt(2, 9), 12, seed=3, temperature=1.0, repetition_penalty=1.5, logprobs=2)

    expected = Runtime().run(good())["good"]
    for failing_call in range(1, 9):
        runtime = Runtime(multi_step_decode=8)
        num_calls = 0
        sample = runtime.runner.sampler.sample

        def failing(logits: torch.Tensor, states: list[Any], at: int = failing_call, sample: Any = sample) -> Any:
            nonlocal num_calls
            num_calls += 1
            fails = num_calls == at
            found = zip(states, sample(logits, states), strict=True)
            return [(None, None) if fails and state.request_id == "bad" else one for state, one in found]

        runtime.runner.sampler.sample = failing  # type: ignore[method-assign]
        found = runtime.run(good(), make_request("bad", prompt(1, 9), 12))
        assert found["good"] == expected
        assert tokens(found)["bad"] == greedy(prompt(1, 9), failing_call - 1)
        assert "NaN" in (found["bad"][-1].error or "")
        assert runtime.scheduler.reset_prefix_cache(), "all blocks came home"


# --- Drafts -------------------------------------------------------------------------------------


def test_right_drafts_take_one_step_for_all_their_tokens() -> None:
    expected = greedy(prompt(1, 9), 12)
    runtime = Runtime()
    runtime.scheduler.add_request(request := make_request("a", prompt(1, 9), 12))
    num_tokens = []
    while runtime.scheduler.has_unfinished:
        request.draft_token_ids = tuple(expected[len(request.output_token_ids) :][:4])
        output = runtime.scheduler.schedule()
        runtime.scheduler.update(output, runtime.execute(output))
        check_integrity(runtime.scheduler)
        num_tokens.append(len(request.output_token_ids))
    assert request.output_token_ids == expected
    # The step that completes the prompt verifies none; a last token needs no draft behind it.
    assert num_tokens == [1, 6, 11, 12]
