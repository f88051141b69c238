"""Ranks and stages on one machine: microseconds of an all-reduce, and tokens per second beside a single worker.

    python -m benchmarks.parallel --ranks 2

All engines have the same number of threads in all: one worker, `--ranks` ranks that share each layer, and as many
stages of layers. The model is a Llama with random weights in bf16, 151 million of them; the engines take turns. Prints
one JSON line per measurement. An all-reduce takes three times as long where the ranks' cores share no cache; a virtual
machine may change that from run to run.
"""

import json
import random
import statistics
from pathlib import Path

from benchmarks.command_line import make_parser
from quire.config import EngineOptions
from quire.engine.llm_engine import LLMEngine
from quire.models.registry import ModelRegistry
from quire.parallel.tensor_parallel import create_executor
from quire.resolve import resolve
from quire.runtime.hardware import detect_hardware
from quire.runtime.links import measure_all_reduce
from quire.weights.checkpoint import Checkpoint
from quire.weights.sources import ModelFiles
from quire_workshop.bench_cases import BenchCase, measure, random_prompts

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32768, "hidden_size": 768,
    "intermediate_size": 2048, "num_hidden_layers": 20, "num_attention_heads": 12, "num_key_value_heads": 4,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CASES = (BenchCase(64, 128, 1), BenchCase(64, 64, 8), BenchCase(64, 64, 32), BenchCase(512, 0), BenchCase(1984, 0))
SHAPES = ((1, 576), (32, 576), (512, 576))
SUMS_PER_STEP, STEPS = 100, 12


def show_sums(num_ranks: int) -> None:
    """Measure the all-reduces."""
    for rows, width in SHAPES:
        samples = [measure_all_reduce(num_ranks, rows, width, SUMS_PER_STEP) for _ in range(STEPS)]
        found = {"rows": rows, "width": width, "ranks": num_ranks, "median_us": statistics.median(samples)}
        print(json.dumps({"what": "all_reduce", **found, "least_us": min(samples)}), flush=True)


def build(num_ranks: int, num_stages: int) -> LLMEngine:
    """An engine without a tokenizer."""
    options = EngineOptions(
        load_format="dummy", device="cpu", tensor_parallel_size=num_ranks, max_num_seqs=32, max_model_len=2048,
        pipeline_parallel_size=num_stages, enable_prefix_caching=False,
    )  # fmt: skip
    config = resolve(options, detect_hardware("cpu"), ModelRegistry.make_model_config(LLAMA))
    files = ModelFiles(name="random", path=Path("random"), kind="hf", origin="benchmark")
    return LLMEngine(config, create_executor(config, Checkpoint(files, LLAMA)))


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__, "repetitions")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of a layer, and stages  [2]")
    parser.add_argument("--only", action="append", choices=[case.name for case in CASES], help="some of the cases")
    arguments = parser.parse_args()
    if not arguments.only:
        show_sums(arguments.ranks)
    engines = [build(*sizes) for sizes in ((1, 1), (arguments.ranks, 1), (1, arguments.ranks))]
    try:
        for case in CASES:
            if arguments.only and case.name not in arguments.only:
                continue
            prompts = random_prompts(case, LLAMA["vocab_size"], frozenset({2}), random.Random(5))
            rates: list[list[float]] = [[] for _ in engines]
            for _ in range(arguments.repetitions + 1):
                for engine, found in zip(engines, rates, strict=True):
                    found.append(measure(engine, case, prompts))
            one, ranks, stages = (statistics.median(found[1:]) for found in rates)  # the first warms up
            print(json.dumps({
                "what": case.name, "one_worker": round(one, 1), f"ranks_{arguments.ranks}": round(ranks, 1),
                f"stages_{arguments.ranks}": round(stages, 1), "ranks_ratio": round(ranks / one, 3),
                "stages_ratio": round(stages / one, 3), "threads": engines[0].config.hardware.num_threads,
            }), flush=True)  # fmt: skip
    finally:
        for engine in engines:
            engine.shutdown()


if __name__ == "__main__":
    main()
