"""`LLM.sleep` and `wake_up`: memory is freed, and the model answers as before."""

import gc
import mmap
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.errors import EngineDeadError, RequestError
from quire.runtime import shared_file
from quire.runtime.plan import weight_file
from quire.runtime.shared_file import finish
from quire.sampling_params import SamplingParams
from tests.cli.tiny_directory import make_tiny_directory


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> Iterator["weakref.WeakSet[mmap.mmap]"]:
    """Memory of files, weights and KV cache that is held; Python collects no reference cycles by itself."""
    found: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    class Noted(mmap.mmap):
        __hash__ = object.__hash__

        def __new__(cls, *arguments: Any, **settings: Any) -> "Noted":
            made = super().__new__(cls, *arguments, **settings)
            found.add(made)
            return made

    monkeypatch.setattr(mmap, "mmap", Noted)
    gc.collect()
    gc.disable()
    yield found
    gc.enable()


@pytest.mark.parametrize("block_size", [16, 4], ids=["plan", "op by op"])
def test_model_that_slept_gives_the_same_tokens(
    tmp_path: Path, mappings: "weakref.WeakSet[mmap.mmap]", block_size: int
) -> None:
    params = SamplingParams(max_tokens=8, temperature=0)
    directory = make_tiny_directory(tmp_path)
    with LLM(str(directory), dtype="float32", num_blocks_override=64, block_size=block_size) as llm:
        assert len(mappings) >= (3 if block_size == 16 else 2), "the file, weights of a plan, and the KV cache"
        (before,) = llm.generate("hello", params, use_tqdm=False)
        with pytest.raises(RequestError, match="level must be 1 or 2"):
            llm.sleep(level=3)
        tokenizer = llm.llm_engine.tokenizer
        for _ in range(2):
            llm.sleep()
            assert llm.is_sleeping()
        assert len(mappings) == 0
        with pytest.raises(EngineDeadError, match="wake_up"):
            llm.generate("hello", params, use_tqdm=False)
        for _ in range(2):
            llm.wake_up()
        (after,) = llm.generate("hello", params, use_tqdm=False)
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        assert not llm.is_sleeping()
        assert llm.llm_engine.tokenizer is tokenizer, "it is not read again"


SHARER = """
import sys
from quire.runtime.plan import weight_file
weight_file.MIN_BYTES = 1
from quire import LLM
from tests.engine.test_llm_sleep import mapped_weights
with LLM(sys.argv[1], dtype="float32", num_blocks_override=64, weight_cache=sys.argv[2]):
    print(*mapped_weights(sys.argv[2]))
"""


def mapped_weights(directory: str) -> list[str]:
    """Return device and inode of each file of packed weights in a directory that this process maps."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return sorted({f"{words[3]}-{words[4]}" for words in lines if words[-1].startswith(directory)})


def test_sleep_unmaps_packed_weights_that_other_processes_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_file, "MIN_BYTES", 1)
    monkeypatch.setattr(shared_file, "COPIED_BYTES", 0)
    directory, cache = make_tiny_directory(tmp_path / "model"), str(tmp_path / "weights")
    with LLM(str(directory), dtype="float32", num_blocks_override=64, weight_cache=cache) as llm:
        finish()
        (mapped,) = mapped_weights(cache)
        command = [sys.executable, "-c", SHARER, str(directory), cache]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == [mapped]
        llm.sleep()
        assert mapped_weights(cache) == []
        llm.wake_up()
        assert mapped_weights(cache) == [mapped]
