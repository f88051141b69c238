"""The real sides on a small model; those of other interpreters where they are named."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.side_process import SideProcess
from benchmarks.side_specs import KINDS, Models, make_spec
from tests.cli.tiny_directory import make_tiny_directory

PEERS = ("llama.cpp", "vllm", "openvino")


def request(model: Path, **options: Any) -> dict[str, Any]:
    return {"model": str(model), "num_threads": 2, "max_num_seqs": 4, "max_model_len": 64, "options": options}


@pytest.mark.slow
def test_quire_and_transformers_measure_and_agree(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from benchmarks.sides.quire import QuireSide
    from benchmarks.sides.transformers import TransformersSide

    model = make_tiny_directory(tmp_path / "tiny")
    options: dict[str, Any] = {"dtype": "float32"}
    ours = QuireSide(request(model, num_blocks_override=32, max_num_batched_tokens=16, **options))
    theirs = TransformersSide(request(model, **options))
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12]]
    timings = [side.measure(prompts, 4) for side in (ours, theirs)]
    assert all(timing.tokens == 6 and timing.seconds > 0 for timing in timings)
    assert timings[0].token_ids == timings[1].token_ids
    assert all(side.measure(prompts, 0).tokens == 8 for side in (ours, theirs))
    text = [int(value) for value in np.random.default_rng(0).integers(0, 256, 40)]
    reference = theirs.logits(text)
    assert reference.shape == (40, 258)
    # In three steps of 16 tokens.
    np.testing.assert_allclose(ours.logits(text), reference, atol=1e-4)
    limits = ours.limits([[4, 0, 1], [4, 4, 2]])
    assert len(limits["tokens_per_s"]) == 2
    assert min(*limits["tokens_per_s"], *limits["machine"].values()) > 0


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_peers_measure_where_they_are_named(name: str, tmp_path: Path) -> None:
    python = KINDS[name].python
    assert python is not None
    variable = f"QUIRE_BENCH_{python.removesuffix('_python').upper()}"
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no interpreter")
    spec = make_spec(name, Models.of("smollm2"), {python: os.environ[variable]})
    with SideProcess(spec, tmp_path / "log") as side:
        side.load(timeout_s=600, num_threads=2, max_num_seqs=2, max_model_len=64)
        answer = side.request("measure", timeout_s=120, prompts=[[504, 3575, 282], [504, 2260, 314]], num_generated=5)
        assert answer["tokens"] == 8
        assert [len(text) for text in answer["token_ids"]] == [5, 5]
