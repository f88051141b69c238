"""Contiguous, buddy and paged allocation: counts by hand, and blocks that add up after each step."""

import random
from typing import Any

import pytest

from quire.errors import ConfigError, MemoryCapacityError
from quire.scheduler.scheduler import Scheduler
from quire_lessons.compare import run
from quire_lessons.compare.kv import Buddy, Contiguous, RunAllocator, RunBlocks
from quire_lessons.compare.results import RunSettings
from tests.fakes import FakeExecutor
from tests.scheduler.builders import make_config, make_request
from tests.scheduler.integrity import check_integrity


def make_scheduler(allocator: RunAllocator, **changes: Any) -> tuple[Scheduler, RunBlocks]:
    config = make_config(enable_prefix_caching=False, **changes)
    blocks = RunBlocks(config, None, allocator)
    return Scheduler(config, blocks=blocks), blocks


def step(scheduler: Scheduler, executor: FakeExecutor) -> int:
    output = scheduler.schedule()
    if output.scheduled:
        scheduler.update(output, executor.execute(output))
    check_integrity(scheduler)
    return len(output.scheduled)


def test_buddy_takes_an_aligned_run_in_the_smallest_free_run_around_it() -> None:
    def free(text: str) -> bytes:
        return bytes(character == "." for character in text)

    assert Buddy().find(free("x..x...."), 2) == 4  # 1-2 are free, but no buddies
    assert Buddy().find(free("....x.xx...."), 1) == 5  # 0-3 stay whole
    assert Buddy().find(free("...x...x"), 4) is None
    assert Contiguous(3).find(free("x..x...."), 3) == 4


def test_buddy_run_grows_in_place_if_its_buddy_is_free() -> None:
    scheduler, blocks = make_scheduler(Buddy(), num_blocks=17)
    executor = FakeExecutor(scheduler.config)
    scheduler.add_request(make_request("a", 4, 12))
    lengths = []
    while step(scheduler, executor):
        lengths += [len(request.blocks.tables[0]) for request in scheduler.requests.running]
    assert lengths == [1] + [2] * 4 + [4] * 6
    assert blocks.num_moves == 0


def test_buddy_run_moves_if_its_buddy_is_taken() -> None:
    scheduler, blocks = make_scheduler(Buddy(), num_blocks=17)
    executor = FakeExecutor(scheduler.config)
    for name in "ab":
        scheduler.add_request(make_request(name, 4, 12))
    step(scheduler, executor)
    assert [request.blocks.tables for request in scheduler.requests.running] == [[[1]], [[2]]]
    step(scheduler, executor)
    assert [request.blocks.tables for request in scheduler.requests.running] == [[[3, 4]], [[5, 6]]]
    assert blocks.num_moves == 2


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["contiguous", "buddy"])
def test_blocks_add_up_after_each_step_of_random_workloads(kind: str, seed: int) -> None:
    generator = random.Random(seed)
    max_model_len = generator.choice([64, 128])
    allocator = Buddy() if kind == "buddy" else Contiguous(max_model_len // 4)
    scheduler, blocks = make_scheduler(
        allocator, max_model_len=max_model_len, num_blocks=generator.choice([34, 65, 80]), max_num_batched_tokens=48
    )
    executor, num_left = FakeExecutor(scheduler.config), 40
    while scheduler.has_unfinished or num_left:
        if num_left and generator.random() < 0.4:
            num_left -= 1
            length = generator.randint(2, max_model_len)
            prompt_len = generator.randint(1, length - 1)
            scheduler.add_request(make_request(f"r{num_left}", prompt_len, length - prompt_len))
        if scheduler.num_running and generator.random() < 0.02:
            scheduler.abort([scheduler.requests.running[0].request_id])
        step(scheduler, executor)
        for request in scheduler.requests.running:
            table = request.blocks.tables[0]
            assert table == list(range(table[0], table[0] + len(table)))
            if kind == "buddy":
                assert (table[0] - 1) % len(table) == 0
            else:
                assert len(table) == max_model_len // 4
    assert blocks.num_free == blocks.pool.num_usable


def test_request_that_can_never_fit_is_an_error() -> None:
    scheduler, _ = make_scheduler(Contiguous(64), num_blocks=60)
    with pytest.raises(MemoryCapacityError, match="reserves 64 consecutive KV blocks, the cache has 59"):
        scheduler.add_request(make_request("a", 4))


def test_windows_and_prefix_cache_are_refused() -> None:
    for changes in ({"windows": (8,)}, {"windows": (None, None)}, {"enable_prefix_caching": True}):
        config = make_config(**{"enable_prefix_caching": False, **changes})
        with pytest.raises(ConfigError, match="consecutive blocks"):
            RunBlocks(config, None, Buddy())


def test_given_lengths_are_allocated_each_way() -> None:
    comparison = run("kv", RunSettings(prompt_lens=(100, 200, 300), output_lens=(8,), pool_bytes=12 << 20))
    assert comparison.outputs_equal == 3
    assert comparison.settings["context"] == 512
    contiguous, _, paged = comparison.rows
    # 12 MiB hold 532 tokens: one reservation of 512, or all but the longest request.
    assert (contiguous[1], paged[1]) == (1, 2)
    assert run("kv", RunSettings(prompt_lens=(30,), output_lens=(1,))).rows[0][3] is None


@pytest.mark.model
def test_real_model_gives_equal_outputs_with_every_allocator(smollm2_path: object) -> None:
    comparison = run("kv", RunSettings(model="smollm2", requests=8, context=128, pool_bytes=6 << 20))
    assert comparison.outputs_equal == 8
    assert comparison.rows[1][7] > 0, "the buddy allocator copied blocks of the real KV cache"
