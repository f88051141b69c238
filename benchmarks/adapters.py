"""Speed of requests with adapters beside the base model, on one engine that takes turns, and the time of a first use.

    python -m benchmarks.adapters [--model smollm2] [--streams 8,32] [--adapters 8] [--rank 16] [--repetitions 5]
    python -m benchmarks.adapters --model qwen3-1.7b:Q4_K_M --streams 8  # random weights in the shape of a larger model

Adapters are random, on all projections. Streams take them in turn. Counted are the tokens behind the first one of each
stream. "first": the time to the first token of a short prompt with an adapter that is not in memory, less that of the
same prompt with the adapter in memory; "read": hashing and decoding its files alone. Results: `README.md`.
"""

import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.command_line import Table, make_parser
from benchmarks.model_files import generated
from quire.engine.adapters import LoRARequest
from quire.engine.llm_engine import LLMEngine
from quire.runtime.adapter_layout import linear_shapes
from quire.sampling_params import SamplingParams
from quire.weights.adapter_files import read_adapter
from quire_lessons.compare.adapters import write_random_adapter
from quire_lessons.compare.speculation import DecodeJob, decode

NUM_NEW, PROMPT_TOKENS = 96, 32
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
TITLES = {"streams": "d", "adapters": "d", "base, tok/s": ".0f", "adapters, tok/s": ".0f", "ratio": ".2f"}


def run(engine: LLMEngine, chosen: list[LoRARequest | None], turn: int) -> float:
    """Tokens per second behind the first token of each stream."""
    engine.reset_prefix_cache()
    prompts = [[(7 * index + 3 * i) % 1000 + 100 for i in range(PROMPT_TOKENS)] for index in range(len(chosen))]
    jobs = [
        DecodeJob({"prompt_token_ids": prompt}, PARAMS, adapter)
        for prompt, adapter in zip(prompts, chosen, strict=True)
    ]
    found = decode(engine, str(turn), jobs)
    return found.num_tokens / found.seconds


def first_token_s(engine: LLMEngine, name: str, adapter: LoRARequest) -> float:
    """Seconds to the end of a request for one token."""
    engine.reset_prefix_cache()
    started = time.perf_counter()
    prompt = {"prompt_token_ids": list(range(100, 100 + PROMPT_TOKENS))}
    engine.add_request(name, prompt, dataclasses.replace(PARAMS, max_tokens=1), lora_request=adapter)
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - started


def main() -> None:
    """Entry point."""
    parser = make_parser(__doc__, "model", "repetitions", "json")
    parser.add_argument("--streams", default="8,32")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    args = parser.parse_args()
    engine = LLMEngine.from_options(
        generated(args.model), device="cpu", enable_lora=True, speculative="off", max_num_seqs=64
    )
    table = Table(TITLES, as_json=args.json)
    with tempfile.TemporaryDirectory() as folder:
        shapes = linear_shapes(engine.config.model.hf_config)
        paths = [
            write_random_adapter(Path(folder) / str(number), shapes, args.rank, number)
            for number in range(args.adapters)
        ]
        adapters = [LoRARequest(f"adapter-{number}", str(path)) for number, path in enumerate(paths)]
        size = sum(item.stat().st_size for item in paths[0].iterdir())
        firsts, reads = [], []
        for number, adapter in enumerate(adapters):
            engine.input_processor.adapters.load(adapter.lora_name, adapter.lora_path)
            cold, warm = (first_token_s(engine, f"first-{number}-{again}", adapter) for again in range(2))
            firsts.append(cold - warm)
            started = time.perf_counter()
            files = read_adapter(Path(adapter.lora_path), engine.config.model.hf_config)
            files.digest()
            for pair in files.pairs.values():
                pair.a.to_numpy(), pair.b.to_numpy()
            reads.append(time.perf_counter() - started)
        turn = 0
        for streams in map(int, args.streams.split(",")):
            speeds: dict[bool, list[float]] = {False: [], True: []}
            for repetition in range(args.repetitions):
                for with_adapters in (False, True) if repetition % 2 else (True, False):
                    chosen = [adapters[index % len(adapters)] if with_adapters else None for index in range(streams)]
                    speeds[with_adapters].append(run(engine, chosen, turn))
                    turn += 1
            base, own = statistics.median(speeds[False]), statistics.median(speeds[True])
            table.row(streams, len(adapters), base, own, own / base)
    first, read = statistics.median(firsts), statistics.median(reads)
    print(f"an adapter of {size / 1e6:.1f} MB: first {1e3 * first:.0f} ms, read {1e3 * read:.0f} ms")
    engine.shutdown()


if __name__ == "__main__":
    main()
