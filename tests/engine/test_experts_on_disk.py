"""Experts in a mapped file, where the weights are larger than memory: the same tokens as in memory."""

import gc
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineOptions
from quire.engine.llm_engine import LLMEngine
from quire.engine.process.statistics import Meter
from quire.errors import MemoryCapacityError
from quire.insight.explain.device import EXAMPLE_SHEET
from quire.insight.explain.explanation import explain
from quire.insight.explain.subject import Settings, open_subject
from quire.memory_plan import engine_bytes
from quire.runtime.hardware import detect_hardware
from quire.runtime.shared_file import DATA_OFFSET, finish
from quire.sampling_params import SamplingParams
from tests.tiny_engine import VOCAB_SIZE, prompt, transformers, write_tiny

OPTIONS: dict[str, Any] = {"device": "cpu", "num_blocks_override": 40, "max_num_seqs": 2, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=256, max_position_embeddings=256,
        initializer_range=0.3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return write_tiny(tmp_path_factory.mktemp("experts"), config)


def build(model: Path, missing_bytes: int, **options: Any) -> LLMEngine:
    """An engine on a machine whose memory is too small for it by this number of bytes."""
    hardware = detect_hardware("cpu")
    whole = LLMEngine.build(EngineOptions(model=str(model), load_format="dummy", **OPTIONS), hardware=hardware)
    needed = engine_bytes(whole.config)
    whole.shutdown()
    limited = replace(hardware, available_memory_bytes=needed - missing_bytes, memory_limit="cgroup")
    return LLMEngine.build(
        EngineOptions(model=str(model), **{**OPTIONS, "swap_space": 0.0, **options}), hardware=limited
    )


def tokens(engine: LLMEngine) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    for number, length in enumerate((5, 40)):
        engine.add_request(str(number), prompt(number, length), sampling)
    found: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
    return [found[key] for key in sorted(found)]


def test_model_larger_than_memory_gives_the_tokens_that_it_gives_in_memory(model: Path, tmp_path: Path) -> None:
    expected_engine = build(model, 0, weight_cache="off")
    assert not expected_engine.config.weights_on_disk
    expected = tokens(expected_engine)
    expected_engine.shutdown()
    for _ in range(2):
        engine = build(model, 1 << 20, weight_cache=str(tmp_path))
        assert engine.config.weights_on_disk
        finish()
        (path,) = tmp_path.iterdir()
        meter, before = Meter(engine), Meter(engine).take([])
        found = tokens(engine)
        after = meter.take([])
        assert after.weights_mapped_bytes == pytest.approx(path.stat().st_size - DATA_OFFSET, rel=0.05)
        assert after.weights_resident_bytes > 0
        assert 0 < after.weights_limit_bytes < after.weights_mapped_bytes
        # Each of two layers reads at least the two experts of one token, 24 times: gates, ups and downs in 16 bit.
        assert after.experts_chosen_bytes - before.experts_chosen_bytes >= 24 * 2 * 2 * (3 * 64 * 256 * 2)
        assert after.weights_read_bytes >= before.weights_read_bytes
        engine.shutdown()
        del engine, meter
        gc.collect()
        with path.open("rb") as file:  # the next engine reads from the disk
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert found == expected


def test_explain_tells_what_stays_on_disk_and_what_a_token_waits_for(model: Path, tmp_path: Path) -> None:
    def explained(memory_bytes: int) -> dict[str, float]:
        sheet_path = tmp_path / "sheet.json"
        sheet_path.write_text(json.dumps({**json.loads(EXAMPLE_SHEET), "kind": "cpu", "memory_bytes": memory_bytes}))
        settings = Settings(batches=(1,), ctx=16, dtype="bfloat16", device=str(sheet_path))
        report = explain(open_subject(str(model)), settings).report
        (section,) = [part for part in report.sections if part.title.startswith("Memory plan")]
        return {item.name: item.value for item in section.quantities}

    whole = explained(1 << 32)
    assert "weights mapped from disk" not in whole
    needed = whole["weights"] + whole["activations and overhead"]
    found = explained(int(needed) - (1 << 20))
    mapped, limit = found["weights mapped from disk"], found["of these in memory at most"]
    assert mapped == whole["weights"] > limit > found["weights"]
    of_experts = 2 * 16 * 3 * 64 * 256 * 2
    assert found["experts that a token chooses"] == pytest.approx(of_experts / 8, rel=0.01)
    missing = (mapped - limit) / of_experts
    assert found["of these read from disk"] == pytest.approx(missing * of_experts / 8, rel=0.05)


def test_weights_larger_than_memory_that_no_file_can_hold_are_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MemoryCapacityError, match="--weight-cache DIR"):
        build(model, 1 << 20, weight_cache=str(tmp_path), weight_cache_bytes=1000)
    monkeypatch.setenv("QUIRE_WEIGHT_CACHE", "off")
    with pytest.raises(MemoryCapacityError, match="weight_cache is off"):
        build(model, 1 << 20)
