"""Every family in the whole engine: preempted and forked requests have the tokens of undisturbed ones."""

from pathlib import Path
from typing import Any

import pytest

from quire.events import EventKind
from tests.models.oracle import Pair
from tests.models.test_deepseek import generated
from tests.models.tiny_configs import TINY_CONFIGS
from tests.tiny_engine import VOCAB_SIZE, build, byte_tokenizer

NUM_TOKENS = 20
BLOCKS = {"mamba2": 5, "mistral": 6, "starcoder2": 6, "qwen3_5_text": 8}
"""Too few for all requests."""
FAMILIES = [
    name for name, configs in TINY_CONFIGS.items() if not any("text_config" in each for each in configs.values())
]
"""Models that see images have the language model of another family."""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_preempted_and_forked_requests_have_the_tokens_of_undisturbed_ones(tmp_path: Path, model_type: str) -> None:
    fields: dict[str, Any] = {**next(iter(TINY_CONFIGS[model_type].values())), "vocab_size": VOCAB_SIZE}
    if "vocab_size_per_layer_input" in fields:
        fields["vocab_size_per_layer_input"] = VOCAB_SIZE
    Pair(model_type, fields).oracle.save_pretrained(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    options = {"dtype": "float32", "max_model_len": 128, "num_threads": 1}
    expected = generated(build(tmp_path, **options, enable_prefix_caching=False), NUM_TOKENS)
    engine = build(tmp_path, **options, num_blocks_override=BLOCKS.get(model_type, 14), max_num_batched_tokens=40)
    assert generated(engine, NUM_TOKENS) == expected
    assert engine.events.of(EventKind.PREEMPT)
    assert all(first == second for first, second in expected)
