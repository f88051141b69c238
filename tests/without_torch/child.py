"""Run Quire in a process of its own and print JSON: `python -m tests.without_torch.child KIND`, with a list on stdin.

KIND is "verbs", for command lines, or "models", for [directory, options]; "models torch" imports PyTorch first.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import psutil

PROMPTS = [[(7 * i * i + 3 * i + 11 * row) % 50 for i in range(length)] for row, length in enumerate((37, 3, 20, 1))]


def answers(directory: str, options: dict[str, Any]) -> dict[str, Any]:
    """Answer greedily, by draws and with log-probabilities, with several completions, and embed; or classify."""
    from quire import LLM, PoolingParams, SamplingParams

    settings = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "num_blocks_override": 14, "block_size": 16}
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    with LLM(directory, **{**settings, **options}) as llm:
        if llm.llm_engine.config.model.labels:
            return {"probs": [item.outputs.probs for item in llm.classify(prompts, use_tqdm=False)]}
        params = [
            SamplingParams(max_tokens=30, temperature=0),
            SamplingParams(max_tokens=12, temperature=1, seed=3, top_p=0.9, n=2),
            SamplingParams(max_tokens=8, temperature=0.7, seed=5, logprobs=3, prompt_logprobs=2),
            SamplingParams(max_tokens=40, temperature=1, seed=9, min_p=0.01, ignore_eos=True),
        ]
        found = [
            [(item.token_ids, str(item.logprobs)) for item in output.outputs]
            for output in llm.generate(prompts, params, use_tqdm=False)
        ]
        pooled = llm.embed(prompts, pooling_params=[PoolingParams(pooling="mean")] * len(prompts), use_tqdm=False)
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        mapped = [Path(f"/proc/{process.pid}/maps").read_text() for process in processes]
        return {
            "tokens": found,
            "embeddings": [item.outputs.embedding for item in pooled],
            "has_torch": ["libtorch" in text for text in mapped],
        }


def verb(words: list[str]) -> dict[str, Any]:
    """Run one command line in this process, which measures the machine only briefly."""
    from quire.runtime import machine_limits
    from tests.cli.command_line import call

    machine_limits.MIN_MEASURE_S = 0.0
    result = call(*words)
    return {"code": result.exit_code, "stdout": result.stdout, "stderr": result.stderr}


def main() -> None:
    """Run everything on stdin and print the results by name."""
    if "torch" in sys.argv[2:]:
        importlib.import_module("torch")
    run = verb if sys.argv[1] == "verbs" else lambda item: answers(*item)
    found: dict[str, Any] = {name: run(item) for name, item in json.load(sys.stdin).items()}
    print(json.dumps({"found": found, "has_torch": bool(sys.modules.get("torch"))}))


if __name__ == "__main__":
    main()
