"""Time per token of the samplers of one row of logits: `python -m benchmarks.samplers [VOCABULARY]`.

Logits are random with a few likely tokens, as a model's are; the prompt has 2,000 tokens. Prints a line per sampler:
the median and the fastest of 200 tokens, in milliseconds.
"""

import statistics
import sys
import time
from typing import Any

import numpy as np

from quire.sampling.sampler import Sampler
from quire.sampling_params import SamplingParams
from quire.types import NewRequest

NUM_TOKENS, PROMPT_LEN = 200, 2000
DRY = {"dry_multiplier": 0.8, "dry_sequence_breakers": []}
CASES: dict[str, dict[str, Any]] = {
    "native: plain": {},
    "native: top_p 0.9": {"top_p": 0.9},
    "native: top_k 40, top_p 0.9": {"top_k": 40, "top_p": 0.9},
    "native, with a function": {"logits_processors": [lambda token_ids, logits: logits]},
    "top_n_sigma 1": {"top_n_sigma": 1.0},
    "typical_p 0.9": {"typical_p": 0.9},
    "XTC, min_p 0.05": {"xtc_probability": 0.5, "min_p": 0.05},
    "DRY": DRY,
    "DRY, top_k 40": {**DRY, "top_k": 40},
    "mirostat 2": {"mirostat": 2},
    "dynamic temperature": {"dynatemp_range": 0.5},
}


def main() -> None:
    """Measure every sampler."""
    vocab_size = int(sys.argv[1]) if len(sys.argv) > 1 else 49152
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((1, vocab_size)).astype(np.float32) * 2
    logits[0, generator.integers(0, vocab_size, 50)] += np.linspace(4, 12, 50, dtype=np.float32)
    prompt = tuple(generator.integers(0, vocab_size, PROMPT_LEN).tolist())
    sampler = Sampler(vocab_size, "cpu")
    for name, fields in CASES.items():
        state = sampler.start(NewRequest("r", prompt, PROMPT_LEN, SamplingParams(**fields), None, (), seed=3))
        assert state is not None
        times = []
        for _ in range(NUM_TOKENS):
            started = time.perf_counter()
            ((token_id, _),) = sampler.sample(logits, [state])
            times.append(1e3 * (time.perf_counter() - started))
            assert token_id is not None
            state.append(token_id)
        print(f"{name:<28} median {statistics.median(times):7.3f} ms, least {min(times):7.3f} ms", flush=True)


if __name__ == "__main__":
    main()
