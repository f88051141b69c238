"""Answers of models in a process of its own, as JSON: `python -m tests.runtime.plan.stored_plan_child`.

Argument: the models, as JSON a list of [name, directory, options].
"""

import json
import sys
from typing import Any

PROMPTS = [[(7 * i * i + 3 * i + 11 * row) % 50 for i in range(length)] for row, length in enumerate((37, 3, 20, 1))]


def answers(directory: str, options: dict[str, Any]) -> list[Any]:
    """Greedy, sampled, with log-probabilities, several completions, a cached prefix, preempted, embedded."""
    from quire import LLM
    from quire.sampling_params import PoolingParams, SamplingParams

    settings = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "num_blocks_override": 14, "block_size": 16}
    params = [
        SamplingParams(max_tokens=30, temperature=0),
        SamplingParams(max_tokens=12, temperature=1, seed=3, top_p=0.9, n=2),
        SamplingParams(max_tokens=8, temperature=0.7, seed=5, logprobs=3, prompt_logprobs=2, repetition_penalty=1.2),
        SamplingParams(max_tokens=40, temperature=1, seed=9, min_p=0.01, ignore_eos=True),
    ]
    with LLM(directory, **{**settings, **options}) as llm:
        found: list[Any] = []
        for _ in range(2):  # the second time with cached prefixes
            for output in llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False):
                found.append([
                    (item.token_ids, str(item.logprobs), item.cumulative_logprob, item.finish_reason)
                    for item in output.outputs
                ])  # fmt: skip
                found.append(str(output.prompt_logprobs))
        pooling = [PoolingParams(pooling=kind) for kind in ("last", "mean", "mean", "last")]
        for item in llm.embed([{"prompt_token_ids": ids} for ids in PROMPTS], pooling_params=pooling, use_tqdm=False):
            found.append(item.outputs.embedding)
    return found


def main() -> None:
    cases = json.loads(sys.argv[1])
    found = {name: answers(directory, options) for name, directory, options in cases}
    models = [name for name in sys.modules if name.startswith("quire.models.") and name != "quire.models.registry"]
    print(json.dumps({"answers": found, "has_torch": bool(sys.modules.get("torch")), "models": models}))


if __name__ == "__main__":
    main()
