"""Tiers of KV blocks where ranks share a model: each keeps its own slices, and a block comes back on all or on none."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire import cache_spec
from quire.engine.llm_engine import LLMEngine
from quire.parallel.tensor_parallel import create_executor
from quire.sampling_params import SamplingParams
from quire.scheduler.prefix_cache import PrefixChain
from tests.parallel.test_rank_processes import rank_pids
from tests.parallel.thread_ranks import ThreadRanks
from tests.test_kv_tiers import BLOCK_SIZE, PROMPTS, WRITERS, generate, one_by_one, swapping
from tests.tiny_engine import build, write_tiny_llama

SIZES = [(2, 1), (1, 2), (2, 2)]
"""Ranks of a stage, and stages."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads of this process."""

    def create(config: Any, checkpoint: Any, progress: Any = None, grammars: Any = None) -> Any:
        is_alone = config.num_ranks == 1
        return (create_executor if is_alone else lambda *_: ThreadRanks(config, checkpoint, grammars))(
            config, checkpoint, progress, grammars
        )

    monkeypatch.setattr("quire.engine.build.create_executor", create)


def build_ranks(model: Path, size: int, num_stages: int, **options: Any) -> LLMEngine:
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages}
    return build(model, block_size=BLOCK_SIZE, batch_invariant=True, **sizes, **options)


def late(read: Any, *arguments: Any, **options: Any) -> None:
    time.sleep(0.02)
    read(*arguments, **options)


def tokens(found: list[Any]) -> list[Any]:
    return [token_ids for token_ids, _ in found]


@pytest.mark.parametrize(("size", "num_stages"), SIZES)
@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.usefixtures("threads")
def test_restarted_ranks_read_prefixes_from_disk(
    kind: str, size: int, num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_spec, "CHECKPOINT_INTERVALS", (32, 32))
    model, disk = WRITERS[kind](tmp_path / "model"), str(tmp_path / "kv")
    expected, _ = one_by_one(build_ranks(model, 1, 1), PROMPTS)
    first, num_first = one_by_one(build_ranks(model, size, num_stages, kv_disk=disk), PROMPTS)
    second, num_second = one_by_one(build_ranks(model, size, num_stages, kv_disk=disk), PROMPTS)
    assert tokens(first) == tokens(second) == tokens(expected)
    assert num_first[0] == num_first[2] == 0
    interval = 32 if kind == "hybrid" else BLOCK_SIZE
    assert num_second == [(len(token_ids) - 1) // interval * interval for token_ids in PROMPTS]


@pytest.mark.usefixtures("threads")
def test_engine_that_ends_with_steps_in_flight_keeps_its_blocks(llama: Path, tmp_path: Path) -> None:
    disk = str(tmp_path / "kv")
    engine = build_ranks(llama, 1, 2, kv_disk=disk)
    generate(engine, PROMPTS[:1])
    for index in range(2):
        engine.add_request(str(index), PROMPTS[index + 1], SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(4):
        engine.step()
    assert engine._in_flight
    engine.shutdown()
    assert one_by_one(build_ranks(llama, 1, 2, kv_disk=disk), PROMPTS[:1])[1] == [80]


@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("damage", ["damaged", "gone", "gone after the start", "of rank 0", "read late"])
@pytest.mark.usefixtures("threads")
def test_block_that_one_rank_cannot_read_is_computed_by_all(
    llama: Path, tmp_path: Path, damage: str, size: int, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = {"kv_disk": str(tmp_path / "kv")}
    expected, _ = one_by_one(build_ranks(llama, size, num_stages, **disk), PROMPTS)
    folders = {path.name[-4:]: path for path in (tmp_path / "kv").iterdir()}
    assert folders.keys() == {"0of2", "1of2"}
    engine = build_ranks(llama, size, num_stages, **disk) if damage in ("gone after the start", "read late") else None
    # The third block of the first prompt, which the second prompt begins with too.
    chain = PrefixChain(("",))
    chain.extend(PROMPTS[0][: 3 * BLOCK_SIZE], BLOCK_SIZE)
    path = folders["1of2"] / f"{chain.digests[-1].hex()}-0.kv"
    num_whole = 2
    if engine is not None and damage == "read late":
        num_whole, files = 5, engine._executor.workers[1].cache.disk._files
        monkeypatch.setattr(files, "read", partial(late, files.read))
    elif damage == "damaged":
        path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    elif damage == "of rank 0":
        path.write_bytes((folders["0of2"] / path.name).read_bytes())
    else:
        path.unlink()
    found, num_cached = one_by_one(engine or build_ranks(llama, size, num_stages, **disk), PROMPTS)
    assert found == expected
    assert num_cached[0] == num_whole * BLOCK_SIZE
    # The block was written again.
    _, num_cached = one_by_one(build_ranks(llama, size, num_stages, **disk), PROMPTS)
    assert num_cached[0] == 5 * BLOCK_SIZE


@pytest.mark.parametrize(("size", "num_stages"), SIZES)
@pytest.mark.usefixtures("threads")
def test_preempted_requests_get_their_blocks_back_on_all_ranks(llama: Path, size: int, num_stages: int) -> None:
    expected = swapping(build_ranks(llama, 1, 1))()
    base = build_ranks(llama, size, num_stages, preemption_mode="swap", swap_space=0.01)
    found, num_preempted, num_host = swapping(base, num_blocks=17)()
    assert tokens(found) == tokens(expected[0])
    assert num_preempted > 0
    assert num_host > 0
    base.shutdown()


def test_processes_keep_their_blocks(llama: Path, tmp_path: Path) -> None:
    options = {"kv_disk": str(tmp_path / "kv"), "preemption_mode": "swap", "swap_space": 0.01}
    expected = swapping(build_ranks(llama, 1, 1))()
    expected_texts, _ = one_by_one(build_ranks(llama, 1, 1), PROMPTS)
    for num_cached in ([0, 64, 0], [80, 96, 32]):
        engine = build_ranks(llama, 1, 2, **options)
        found, num_preempted, num_host = swapping(engine, num_blocks=17)()
        assert tokens(found) == tokens(expected[0])
        assert num_preempted > 0
        assert num_host > 0
        texts, found_cached = one_by_one(engine, PROMPTS)
        assert tokens(texts) == tokens(expected_texts)
        assert found_cached == num_cached
        assert rank_pids() == []
