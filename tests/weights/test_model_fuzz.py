"""Damaged model files: each loads, or is one typed error that names a file or a key.

`python -m benchmarks.soak --only A9` tries more than the suite does, and watches time and memory.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.soak.model_cases import KINDS, make_case, make_models
from benchmarks.soak.model_fuzz import OPTIONS, judge
from quire.engine.llm_engine import LLMEngine

NUM_CASES = 60
"""Of each kind."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("models")
    make_models(path)
    return path


@pytest.fixture(scope="module")
def base(models: Path) -> Iterator[LLMEngine]:
    engine = LLMEngine.from_options(str(models / "hf"), **OPTIONS)
    yield engine
    engine.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_model_loads_or_is_a_typed_error_that_names_it(
    models: Path, base: LLMEngine, tmp_path: Path, kind: str
) -> None:
    results = []
    for number in range(NUM_CASES):
        case = make_case(models, tmp_path / f"{number}", kind, f"suite {kind} {number}")
        result, problem = judge(case, base)
        assert result != "fault", f"{case.how}: {problem}"
        results.append(result)
    assert set(results) == {"loaded", "refused"}
