from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from quire.config import DTYPE_ALIASES, DTYPES, EngineOptions, canonical_dtype
from quire.errors import ConfigError


def test_defaults_are_the_documented_ones() -> None:
    options = EngineOptions()
    assert (options.model, options.dtype, options.device) == ("smollm2", "auto", "auto")
    assert (options.max_num_batched_tokens, options.max_num_seqs) == (2048, 256)
    assert options.enable_prefix_caching
    assert options.enable_chunked_prefill


def test_an_unknown_option_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'max_num_seq' \(did you mean 'max_num_seqs'\?\)"):
        EngineOptions.from_kwargs("smollm2", max_num_seq=4)
    with pytest.raises(ConfigError, match=r"unknown option 'zzz'$"):
        EngineOptions.from_kwargs(zzz=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int3"}, "dtype='int3' is not one of auto, float32, bfloat16, float16"),
        ({"dtype": "bfloat61"}, r"did you mean 'bfloat16'\?"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy='lifo' is not one of fcfs, priority, sjf"),
        ({"load_format": "pt"}, "load_format='pt' is not one of auto, dummy"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' is not one of"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 is not a positive integer"),
        ({"max_model_len": -5}, "max_model_len=-5 is not a positive integer"),
        ({"block_size": 1.5}, "block_size=1.5 is not a positive integer"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens=True is not a positive integer"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold=-1 is not a number of at least 0"),
        ({"gpu_memory_utilization": 0.0}, r"gpu_memory_utilization=0.0 is not in \(0, 1\]"),
        ({"gpu_memory_utilization": 1.1}, r"gpu_memory_utilization=1.1 is not in \(0, 1\]"),
    ],
)
def test_a_bad_value_names_field_value_and_limit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions.from_kwargs(**changes)


def test_every_alias_is_a_dtype() -> None:
    assert {canonical_dtype(alias) for alias in DTYPE_ALIASES} == set(DTYPES)
    assert canonical_dtype("float32") == "float32"
    assert canonical_dtype("auto") is None


def test_options_are_never_written_again() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineOptions().model = "other"  # type: ignore[misc]
