"""`quire tour`: its numbers against their formulas, its runs against each other, its keys and its errors."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.cli.terminal import Output
from quire.config import EngineConfig, EngineOptions, Hardware
from quire.engine.tokenizer_source import load_tokenizer
from quire.errors import ConfigError, ModelError, PromptError
from quire.insight.explain.device import Device
from quire.insight.explain.subject import PRESETS, open_subject, trace_rank
from quire.models.registry import ModelRegistry
from quire.resolve import resolve
from quire.runtime.machine_limits import MachineLimits
from quire.types import StepResult
from quire.weights.checkpoint import Checkpoint
from quire_lessons.cli.tour import KEYS, Told, reason_of, step_through
from quire_lessons.compare.rig import load
from quire_lessons.tour import Tour, TourStop
from quire_lessons.tour_work import LENDER, StepWork, cut_layers, open_model, open_tokenizer
from tests.cli.command_line import call, keyboard, parsed
from tests.cli.tiny_directory import CONFIG, make_tiny_directory

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
            chunk=chunk, work=work_of(self.config, self.checkpoint),
        )  # fmt: skip


def work_of(config: EngineConfig, checkpoint: Checkpoint, num_ranks: int = 1) -> StepWork:
    """The work of steps on a machine of round limits."""
    limits = MachineLimits(1e9, {"fp32": 1e10, "bf16": 1e10, "int8": 1e10})
    rank = trace_rank(config, checkpoint, num_ranks)
    return StepWork(config, rank, Device(config.hardware, limits, "a test"), num_ranks)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    directory = str(make_tiny_directory(tmp_path_factory.mktemp("tour") / "tiny"))
    options = EngineOptions(
        model=directory, device="cpu", enable_prefix_caching=False, multi_step_decode=1, block_size=BLOCK_SIZE
    )
    _, checkpoint = open_model(options, None)
    return Loaded(directory, *load(options, checkpoint), checkpoint)


@pytest.fixture(scope="module")
def stops(loaded: Loaded) -> dict[str, TourStop]:
    return {stop.title.split(",")[0].split(":")[0]: stop for stop in loaded.tour().stops()}


def text_of(stop: TourStop) -> str:
    return "\n".join(stop.lines)


def test_every_stop_has_lines_and_a_reason(stops: dict[str, TourStop]) -> None:
    assert len(stops) == 7
    assert all(stop.lines and stop.why for stop in stops.values())


def test_blocks_and_slot_follow_the_block_size(stops: dict[str, TourStop]) -> None:
    text = text_of(stops["The scheduler admits the request and gives it KV blocks"])
    assert f"⌈{len(PROMPT)} tokens / {BLOCK_SIZE} per block⌉ = 2" in text
    table = [int(block) for _, block in re.findall(r"(\d+) → (\d+)", text)]
    assert f"= {table[1] * BLOCK_SIZE + (len(PROMPT) - 1) % BLOCK_SIZE}\n" in text
    assert "2 layers · 2 (K and V) · 2 heads · 4 values" in text


def test_decode_steps_compute_one_row_each(stops: dict[str, TourStop]) -> None:
    steps = [line for line in stops["Decode"].lines if line.startswith("step")]
    n = len(PROMPT)
    assert [re.findall(r"position (\d+), T = 1, (\d+) pairs", line) for line in steps] == [
        [(str(n + at), str(n + at + 1))] for at in range(NUM_TOKENS - 1)
    ]


def test_batch_arrays_follow_from_positions_and_block_table(stops: dict[str, TourStop]) -> None:
    title = next(title for title in stops if "chunked" in title)
    text = text_of(stops[title])
    n = len(PROMPT)
    ends = [min(start + CHUNK, n) for start in range(0, n, CHUNK)]
    assert [int(end) for end in re.findall(r"seq_lens = \[(\d+)\]", text)] == ends
    counts = [end - start for start, end in zip(range(0, n, CHUNK), ends, strict=True)]
    assert [int(count) for count in re.findall(r"query_start_loc = \[0, (\d+)\]", text)] == counts
    for start, end, (blocks, slots) in zip(
        range(0, n, CHUNK), ends, re.findall(r"block_tables = \[\[(.*)\]\], slot_mapping = \[(.*)\]", text), strict=True
    ):
        table = [int(block) for block in blocks.split(", ")]
        assert len(table) == -(-end // BLOCK_SIZE)
        wanted = {table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(start, end)}
        bounds = [[int(slot) for slot in part.split(" … ")] for part in slots.split(", ")]
        assert {slot for part in bounds for slot in range(part[0], part[-1] + 1)} == wanted


def test_pool_counts_blocks_in_use(stops: dict[str, TourStop], loaded: Loaded) -> None:
    text = text_of(stops["The scheduler admits the request and gives it KV blocks"])
    assert f"pool: 2 of {loaded.config.scheduler.num_blocks - 1} KV blocks are in use" in text


def test_operations_have_rows_of_their_step_and_a_time(stops: dict[str, TourStop]) -> None:
    operations = stops["Operation by operation"].facts["operations"]
    products = {rows["prefill"]["works"][0]["name"]: rows for rows in operations if "prefill" in rows}
    down = products["mlp.down_proj"]
    n = len(PROMPT)
    assert {step: row["works"][0]["shape"] for step, row in down.items()} == {
        "prefill": f"{n}×32×16", "chunk": f"{CHUNK}×32×16", "decode": "1×32×16",
    }  # fmt: skip
    assert [row["works"][0]["cost"]["flops"] for row in down.values()] == [2 * 32 * 16 * rows for rows in (n, CHUNK, 1)]
    assert down["prefill"]["count"] == 2
    assert all(row["seconds"] > 0 for rows in operations for row in rows.values())
    assert products["head embed_tokens"].keys() == {"prefill", "decode"}, "the first chunk samples nothing"
    assert "  2× mlp.down_proj, weight [16, 32]" in text_of(stops["Operation by operation"])


def test_chunks_add_up_to_the_whole_prefill(stops: dict[str, TourStop]) -> None:
    whole = stops["Prefill"].facts
    chunked = next(stop for title, stop in stops.items() if "chunked" in title).facts
    assert chunked["same_tokens"] is True
    assert [chunk["num_tokens"] for chunk in chunked["chunks"]] == [8, 8, 5]
    assert chunked["total"]["flops"] == whole["flops"]
    assert chunked["total"]["num_bytes"] > whole["num_bytes"]
    assert whole["tokens_per_s"] == whole["num_tokens"] / whole["seconds"]
    assert whole["share_of_limit"] == whole["floor_s"] / whole["seconds"]
    assert whole["memory_s"] == whole["num_bytes"] / 1e9


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
        self.read_adapters = executor.read_adapters

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
    assert ["NOT the same" in text for text in texts] == [False, False, False, True, False, False, False]


def test_other_device_stands_beside_the_first(loaded: Loaded) -> None:
    tour, work = loaded.tour(), work_of(loaded.config, loaded.checkpoint)
    stop = tour.beside("another", loaded.config, loaded.executor, work, lambda: "1 MiB allocated")
    heads = list(dict.fromkeys(line.split(":")[0] for line in stop.lines))
    assert heads == [
        "cpu prefill", "cpu decode", "another prefill", "another decode", "speed-up", "memory of another", "output"
    ]  # fmt: skip
    assert stop.facts["another"]["decode"]["num_tokens"] == NUM_TOKENS - 1
    assert stop.lines[-1] == f"output: the same {NUM_TOKENS} tokens"


def test_prompt_that_needs_several_steps_is_refused(loaded: Loaded) -> None:
    settings = replace(loaded.config.scheduler, max_num_batched_tokens=16)
    small = replace(loaded, config=replace(loaded.config, scheduler=settings))
    with pytest.raises(PromptError, match="26 tokens, one step takes 16"):
        small.tour()


# --- Models without weights -------------------------------------------------------------------


def test_one_layer_of_qwen3_on_two_ranks_has_the_work_of_its_shapes() -> None:
    config = cut_layers(PRESETS["Qwen3-4B"], 1)
    checkpoint = replace(open_subject("qwen3-4b"), hf_config=config)
    options = EngineOptions(model="qwen3-4b", device="cpu", load_format="dummy", dtype="bfloat16")
    resolved = resolve(options, Hardware("cpu", 1 << 40, 1 << 40, True, 2), ModelRegistry.make_model_config(config))
    work = work_of(resolved, checkpoint, 2)
    found = {one.name: one for works in work.phase(0, 128, 1).works for one in works}
    assert found["self_attn.qkv_proj"].cost.flops == 2 * 128 * 2560 * 3072 == 2_013_265_920
    assert found["QKᵀ"].uncausal_flops == 2 * 16 * 128 * 128 * 128 == 67_108_864


@pytest.mark.parametrize("name", ["config.json", "."])
def test_config_alone_is_toured_with_random_weights_and_a_borrowed_tokenizer(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    lender = make_tiny_directory(tmp_path / "lender")
    monkeypatch.setattr("quire_lessons.tour_work.LENDER", str(lender))
    result = call("tour", str(tmp_path / name), "Hi", "--max-tokens", "3", "--prompt-len", "20", "--json")
    assert result.exit_code == 0, result.stderr
    assert "with random weights" in result.stderr
    assert "borrows" in result.stderr
    stops = {stop["title"]: stop for stop in parsed(result)["stops"]}
    assert stops["Prefill"]["facts"]["num_tokens"] == 20
    operations = next(stop for title, stop in stops.items() if title.startswith("Operation"))["facts"]["operations"]
    assert {row["count"] for rows in operations for row in rows.values()} == {1}
    assert all(row["seconds"] > 0 for rows in operations for row in rows.values()), "a single layer is timed"


def test_borrowed_tokenizer_is_used_only_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_tiny_directory(tmp_path / "own")
    (directory / "model.safetensors").unlink()
    monkeypatch.setattr("quire_lessons.tour_work.LENDER", str(tmp_path / "none"))
    options, checkpoint = open_model(EngineOptions(model=str(directory)), None)
    assert (options.load_format, checkpoint.tensors) == ("dummy", {})
    tokenizer, is_borrowed = open_tokenizer(options, checkpoint, 258)
    assert (tokenizer.vocab_size, is_borrowed) == (258, False)
    options, checkpoint = open_model(EngineOptions(model="Qwen3-4B"), None)
    with pytest.raises(ModelError, match=r"Qwen3-4B has no tokenizer.* --tokenizer DIR names one"):
        open_tokenizer(options, checkpoint, 151936)


def test_cut_model_keeps_the_entries_of_its_first_layers() -> None:
    config = {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "architectures": ["X"], "hidden_size": 8}
    assert cut_layers(config, 2) == {**config, "num_hidden_layers": 2, "layer_types": ["a", "b"]}
    assert cut_layers({"text_config": {"n_layer": 2}}, 1) == {"text_config": {"n_layer": 1}}
    with pytest.raises(ConfigError, match="--num-layers 4 exceeds the 3 layers"):
        cut_layers(config, 4)
    with pytest.raises(ConfigError, match="n_layer: leave it out"):
        cut_layers({}, 1)


def test_lender_is_the_default_model() -> None:
    assert EngineOptions.model == LENDER


# --- Command line -----------------------------------------------------------------------------


def test_ranks_run_the_tour_and_have_a_stop(loaded: Loaded) -> None:
    result = call("tour", loaded.directory, "Hi there", "--max-tokens", "3", "--tp", "2", "--json")
    assert result.exit_code == 0, result.stderr
    value = parsed(result)
    assert value["schema"] == "quire.tour/1"
    assert value["prompt"] == "Hi there"
    assert [sorted(stop) for stop in value["stops"]] == [["facts", "lines", "title", "why", "whys"]] * 9
    assert [stop["title"] for stop in value["stops"][-2:]] == ["The same model on 2 ranks", "CPU and GPU"]
    lines = value["stops"][-2]["lines"]
    assert "  2× mlp.down_proj: [16, 32] in all, [16, 16] on rank 0" in lines
    assert len([line for line in lines if line.startswith("all-reduces took")]) == 2


def test_every_line_of_a_table_has_a_reason(stops: dict[str, TourStop]) -> None:
    operations = stops["Operation by operation"].lines
    assert [line for line in operations if reason_of(line) is None] == []
    assert str(reason_of(next(line for line in operations if "WriteKv" in line))).startswith("Rotates queries")


def test_keys_go_on_line_by_line_explain_and_quit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def made() -> Iterator[TourStop]:
        for name in ("A", "B", "C"):
            asked.append(name)
            yield TourStop(name, [f"line of {name}", f"blocks = {name}", f"last of {name}"], f"reason of {name}")

    with keyboard(monkeypatch) as type_keys:
        type_keys(b"\nwnx\x1b[Awq")  # all at once, as from a fast typist
        step_through(made(), Told(Output(), str))
    shown, legends = capsys.readouterr()
    unknown = [f"{key} does nothing here   {KEYS}" for key in ("x", "that key")]
    assert legends.splitlines() == [*[KEYS] * 4, *unknown, KEYS]
    assert asked == ["A", "B"]
    assert [line.strip() for line in shown.splitlines() if line] == [
        "1. A", "line of A", "blocks = A", f"why: {reason_of('blocks = A')}", "last of A", "why: reason of A",
        "2. B", "line of B", "why: reason of B",
    ]  # fmt: skip
