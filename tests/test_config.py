from pathlib import Path
from typing import Any

import pytest

from quire.config import DTYPE_ALIASES, DTYPES, EngineOptions, canonical_dtype
from quire.errors import ConfigError


def test_unknown_option_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'max_num_seq' \(did you mean 'max_num_seqs'\?\)"):
        EngineOptions.from_kwargs("smollm2", max_num_seq=4)
    with pytest.raises(ConfigError, match=r"unknown option 'zzz'$"):
        EngineOptions.from_kwargs(zzz=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int3"}, "dtype='int3' is not one of auto, float32, bfloat16, float16"),
        ({"dtype": "bfloat61"}, r"did you mean 'bfloat16'\?"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy='lifo' is not one of fcfs, priority, sjf, fair"),
        ({"load_format": "pt"}, "load_format='pt' is not one of auto, dummy"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype='fp4' is not one of auto, float32, bfloat16, float16, int8, fp8,"),
        ({"quantization": "int3"}, "quantization='int3' is not one of int8, int4, fp8"),
        ({"max_num_seqs": 100_000}, "max_num_seqs=100000 is not an integer in 1 … 65536"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 is not an integer in 1 … 65536"),
        ({"max_model_len": -5}, "max_model_len=-5 is not an integer of at least 1"),
        ({"block_size": 1.5}, "block_size=1.5 is not an integer of at least 1"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens=True is not an integer of at least 1"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold=-1 is not an integer of at least 0"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization=0.0 is not a number in 0.001 … 1"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization=1.1 is not a number in 0.001 … 1"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization='0.9' is not a number in 0.001 … 1"),
        ({"sjf_ageing_tokens_per_s": float("nan")}, "sjf_ageing_tokens_per_s=nan is not a number of at least 0"),
        ({"max_logprobs": -2}, "max_logprobs=-2 is not an integer of at least -1"),
        ({"max_num_events": 10**30}, f"max_num_events={10**30} is not an integer in 1 … 2147483647"),
        ({"model": 5}, "model=5 is not text$"),
        ({"model": None}, "model=None is not text$"),
        ({"dtype": ["float32"]}, r"dtype=\['float32'\] is not text"),
        ({"dtype": None}, "dtype=None is not text"),
        ({"kv_cache_dtype": None}, "kv_cache_dtype=None is not text"),
        ({"quantization": 8}, "quantization=8 is not text or None"),
        ({"device": 0}, "device=0 is not text"),
        ({"tokenizer": 5}, "tokenizer=5 is not text or None"),
        ({"chat_template": 5}, "chat_template=5 is not text or None"),
        ({"seed": None}, "seed=None is not an integer"),
        ({"seed": 1.5}, "seed=1.5 is not an integer"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no' is not true or false"),
        ({"enforce_eager": 1}, "enforce_eager=1 is not true or false"),
        ({"long_prefill_token_threshold": 1.5}, "long_prefill_token_threshold=1.5 is not an integer"),
        ({"hf_overrides": "x"}, "hf_overrides='x' is not a mapping or None"),
        ({"hf_overrides": {1: 2}}, r"hf_overrides=\{1: 2\} must have the names of config.json's fields as keys"),
    ],
)
def test_bad_value_names_field_value_and_limit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions(**changes)


def test_paths_become_text() -> None:
    options = EngineOptions.from_kwargs(Path("/models/one"), tokenizer=Path("/models/two"))
    assert (options.model, options.tokenizer) == ("/models/one", "/models/two")


def test_every_alias_is_a_dtype() -> None:
    assert {canonical_dtype(alias) for alias in DTYPE_ALIASES} == set(DTYPES)
    assert canonical_dtype("float32") == "float32"
    assert canonical_dtype("auto") is None
