"""`quire tour`: its numbers against their formulas, its runs against each other, its keys and its errors."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from quire.cli.output import Output
from quire.cli.show import open_model
from quire.cli.tour import step_through
from quire.config import EngineConfig, EngineOptions
from quire.engine.tokenizer_source import load_tokenizer
from quire.errors import PromptError
from quire.insight.compare.rig import load
from quire.insight.explain.rank_model import trace_rank
from quire.insight.tour import Stop, Tour
from quire.insight.tour_reasons import reason_of
from quire.types import StepResult
from quire.weights.checkpoint import Checkpoint
from tests.cli.command_line import call, parsed
from tests.cli.tiny_directory import make_tiny_directory

PROMPT = tuple(range(40, 61))
NUM_TOKENS, CHUNK, BLOCK_SIZE = 5, 8, 16


@dataclass(frozen=True)
class Loaded:
    directory: str
    config: EngineConfig
    executor: Any
    checkpoint: Checkpoint

    def tour(self, prompt: tuple[int, ...] = PROMPT, *, executor: Any = None, chunk: int = CHUNK) -> Tour:
        return Tour(
            self.config, executor or self.executor, load_tokenizer(self.checkpoint), prompt, num_tokens=NUM_TOKENS,
            chunk=chunk, roles=trace_rank(self.config, self.checkpoint, 1),
        )  # fmt: skip


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    directory = str(make_tiny_directory(tmp_path_factory.mktemp("tour") / "tiny"))
    options = EngineOptions(
        model=directory, device="cpu", enable_prefix_caching=False, multi_step_decode=1, block_size=BLOCK_SIZE
    )
    checkpoint = open_model(directory, None, Output())
    return Loaded(directory, *load(options, checkpoint), checkpoint)


@pytest.fixture(scope="module")
def stops(loaded: Loaded) -> dict[str, Stop]:
    return {stop.title.split(",")[0].split(":")[0]: stop for stop in loaded.tour().stops()}


def text_of(stop: Stop) -> str:
    return "\n".join(stop.lines)


def test_every_stop_has_lines_and_a_reason(stops: dict[str, Stop]) -> None:
    assert len(stops) == 8
    assert all(stop.lines and stop.why for stop in stops.values())


def test_blocks_and_slot_follow_the_block_size(stops: dict[str, Stop]) -> None:
    text = text_of(stops["The scheduler admits the request and gives it KV blocks"])
    assert f"⌈{len(PROMPT)} tokens / {BLOCK_SIZE} per block⌉ = 2" in text
    table = [int(block) for _, block in re.findall(r"(\d+) → (\d+)", text)]
    assert f"= {table[1] * BLOCK_SIZE + (len(PROMPT) - 1) % BLOCK_SIZE}\n" in text
    assert "2 layers · 2 (K and V) · 2 heads · 4 values" in text


def test_decode_steps_compute_one_row_each(stops: dict[str, Stop]) -> None:
    steps = [line for line in stops["Decode"].lines if line.startswith("step")]
    n = len(PROMPT)
    assert [re.findall(r"position (\d+), T = 1, (\d+) pairs", line) for line in steps] == [
        [(str(n + at), str(n + at + 1))] for at in range(NUM_TOKENS - 1)
    ]


def test_products_have_rows_of_their_step(stops: dict[str, Stop]) -> None:
    text = text_of(stops["What each matrix product's shape becomes"])
    products = re.findall(r"(prefill|chunk|decode) +\[(\d+), (\d+)\] · \[(\d+), (\d+)\] → \[(\d+), (\d+)\]", text)
    rows = {"prefill": str(len(PROMPT)), "chunk": str(CHUNK), "decode": "1"}
    assert {name for name, *_ in products} == set(rows)
    for name, given, inner, same_inner, outer, kept, same_outer in products:
        assert (given == kept) & (inner == same_inner) & (outer == same_outer)
        assert given == ("1" if outer == "258" else rows[name])
    assert "2× mlp.down_proj, weight [16, 32]" in text


@pytest.mark.parametrize(("length", "chunk"), [(1, 16), (16, 1), (33, 16)])
def test_whole_chunked_and_naive_runs_give_same_tokens(loaded: Loaded, length: int, chunk: int) -> None:
    lines = [line for stop in loaded.tour(tuple(range(30, 30 + length)), chunk=chunk).stops() for line in stop.lines]
    assert len([line for line in lines if f"output: the same {NUM_TOKENS} tokens" in line]) == 2


class Changing:
    """Passes steps on, and changes the tokens of one request."""

    max_in_flight = 1

    def __init__(self, executor: Any, request_id: str) -> None:
        self._executor, self._request_id = executor, request_id
        self.submit, self.end_step_early = executor.submit, executor.end_step_early

    def collect(self) -> StepResult:
        result = self._executor.collect()
        changed = [
            msgspec.structs.replace(item, token_ids=tuple(token_id ^ 1 for token_id in item.token_ids))
            if item.request_id == self._request_id
            else item
            for item in result.results
        ]
        return msgspec.structs.replace(result, results=tuple(changed))


def test_different_tokens_are_said(loaded: Loaded) -> None:
    stops = loaded.tour(executor=Changing(loaded.executor, "tour-3")).stops()
    texts = [text_of(stop) for stop in stops]
    assert ["NOT the same" in text for text in texts] == [False, False, False, True, False, False, False, False]


def test_other_device_stands_beside_the_first(loaded: Loaded) -> None:
    stop = loaded.tour().beside("another", loaded.config, loaded.executor)
    assert [line.split(":")[0] for line in stop.lines] == ["cpu", "another", "output"]
    assert stop.lines[-1] == f"output: the same {NUM_TOKENS} tokens"


def test_prompt_that_needs_several_steps_is_refused(loaded: Loaded) -> None:
    settings = replace(loaded.config.scheduler, max_num_batched_tokens=16)
    small = replace(loaded, config=replace(loaded.config, scheduler=settings))
    with pytest.raises(PromptError, match="26 tokens, one step takes 16"):
        small.tour()


# --- Command line -----------------------------------------------------------------------------


def test_json_has_all_stops(loaded: Loaded) -> None:
    value = parsed(call("tour", loaded.directory, "Hi there", "--max-tokens", "3", "--tp", "2", "--json"))
    assert value["schema"] == "quire.tour/1"
    assert value["prompt"] == "Hi there"
    assert [sorted(stop) for stop in value["stops"]] == [["lines", "title", "why", "whys"]] * 10
    assert value["stops"][8]["title"] == "The same model on 2 ranks"
    assert value["stops"][9]["title"] == "CPU and GPU"


def test_keys_go_on_line_by_line_explain_and_quit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def made() -> Iterator[Stop]:
        for name in ("A", "B", "C"):
            asked.append(name)
            yield Stop(name, [f"line of {name}", f"blocks = {name}", f"last of {name}"], f"reason of {name}")

    keys = iter("\rwnxwq")
    monkeypatch.setattr("click.getchar", lambda: next(keys))
    step_through(made(), Output())
    shown = capsys.readouterr().out
    assert asked == ["A", "B"]
    assert [line.strip() for line in shown.splitlines() if line] == [
        "1. A", "line of A", "blocks = A", f"why: {reason_of('blocks = A')}", "last of A", "why: reason of A",
        "2. B", "line of B", "why: reason of B",
    ]  # fmt: skip
