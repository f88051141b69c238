"""Speed and right answers of a GPU, in one run of a few minutes: random weights, nothing to download.

    python -m benchmarks.gpu [--minutes 8] [--out FILE] [--only STAGE,STAGE] [--device cuda]

Stages, most telling first; each is skipped when its time does not fit any more, and a failing one ends only itself.
Every result is a line of JSON, which also goes to FILE at once.

    ceilings   copy, bf16 product, launch in a graph
    equal      greedy tokens and log-probabilities in fp32 of tiny models of all families, beside the CPU's plan
    long       the same of long prompts and heads of 128 values, sampled and greedy
    stream     one stream and 32 of Qwen3-0.6B's and 8B's shapes, prompts of 512 and 2,048 tokens
    profile    kernels of a decode step of one stream: time of each, and the gaps between them
    bench      nano-vllm's workload: 256 requests of 100 to 1,024 tokens that generate 100 to 1,024
    pdl        one stream without kernels that start while the one before them ends
    ablation   the same with results in step, without graphs, without Triton
    peer       Transformers' generate on the same shape

`--device cpu` runs every line in small sizes without a card: with `TRITON_INTERPRET=1` the kernels too.
Next to read: `src/quire/runtime/device/plan.py`.
"""

import contextlib
import gc
import json
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import make_parser
from quire import LLM, SamplingParams
from quire.runtime.device import plan as device_plan
from quire.runtime.device import tiles
from tests.models.tiny_configs import TINY_CONFIGS, full_config

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
SHAPES = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 16, "head_dim": 16}
EQUAL_LOGPROBS = 2e-4


class Report:
    """Results as they come, within the minutes that were given."""

    def __init__(self, minutes: float, out: str | None, device: str) -> None:
        self._end_s, self._out, self.device = time.monotonic() + 60 * minutes, out, device
        self._started_s = time.monotonic()
        self.on_card = device != "cpu"

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    def note(self, name: str, **values: Any) -> None:
        """Print a result, and append it to the file."""
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in values.items()}
        line = json.dumps({"at_s": round(time.monotonic() - self._started_s, 1), "name": name, **rounded})
        print(line, flush=True)
        if self._out is not None:
            with Path(self._out).open("a") as file:
                file.write(line + "\n")

    def stage(self, name: str, needs_s: float, run: Callable[["Report"], None]) -> None:
        """Run a stage if its time is left."""
        if self.left_s < needs_s:
            self.note(name, skipped=f"{self.left_s:.0f} s are left, it needs {needs_s:.0f}")
            return
        started = time.monotonic()
        try:
            run(self)
        except Exception as error:  # the other stages go on
            logging.getLogger("benchmarks").exception("%s", name)
            self.note(name, failed=f"{type(error).__name__}: {str(error)[:300]}")
        self.note(f"{name} took", seconds=time.monotonic() - started)
        gc.collect()
        if self.on_card:
            torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out")
    parser.add_argument("--only", default="")
    given = parser.parse_args(argv)
    stages: dict[str, tuple[float, Callable[[Report], None]]] = {
        "ceilings": (3, ceilings),
        "equal": (10, equal),
        "long": (10, long),
        "stream": (20, streams),
        "profile": (10, profile),
        "bench": (20, bench),
        "pdl": (15, pdl),
        "ablation": (40, ablation),
        "peer": (20, peer),
    }
    wanted = given.only.split(",") if given.only else list(stages)
    report = Report(given.minutes, given.out, given.device)
    report.note("versions", torch=torch.__version__, card=torch.cuda.get_device_name() if report.on_card else "none")
    for name in wanted:
        report.stage(name, *stages[name])
    return 0


def ceilings(report: Report) -> None:
    """The limits of the card that all other numbers are shares of."""
    if not report.on_card:
        report.note("ceilings", skipped="no card")
        return
    a, b = (torch.empty(1 << 31, dtype=torch.uint8, device="cuda") for _ in range(2))
    report.note("copy", tb_per_s=2 * a.numel() / _timed(lambda: b.copy_(a)) / 1e12)
    m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    report.note("bf16 product", tflops=2 * 8192**3 / _timed(lambda: torch.mm(m, m)) / 1e12)


def _timed(function: Callable[[], Any], repeats: int = 10) -> float:
    """Return the median seconds of a call by events."""
    times = []
    for _ in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


# --- The same answers as the CPU's -----------------------------------------------------------------------------


def equal(report: Report) -> None:
    """All tiny models with PyTorch's functions, and one of each kind of attention with Triton's."""
    unequal, number, largest = [], 0, 0.0
    for model_type, configs in sorted(TINY_CONFIGS.items()):
        for name, fields in configs.items():
            if report.left_s < 20:
                break
            kinds = ["reference"] + ["triton"] * (name == next(iter(configs)) and model_type in _WITH_TRITON)
            with _folder(full_config(model_type, fields)) as folder:
                expected, values = _answers(folder, device="cpu")
                for kind in kinds:
                    number += 1
                    try:
                        found, found_values = _answers(folder, device=report.device, gpu_kernels=kind)
                    except Exception as error:
                        unequal.append(f"{model_type}/{name} {kind}: {type(error).__name__}: {str(error)[:120]}")
                        continue
                    error = max(abs(a - b) for a, b in zip(values, found_values, strict=True))
                    largest = max(largest, error)
                    if found != expected or error > EQUAL_LOGPROBS:
                        unequal.append(f"{model_type}/{name} {kind}: tokens {found == expected}, {error:.1e}")
    report.note("equal", models=number, unequal=unequal, largest_difference=f"{largest:.1e}")


def long(report: Report) -> None:
    """Prompts of up to 1,500 tokens and 40 decodes with real sizes of heads, in fp32: splits, tiles, chunks."""
    config = {**QWEN3, **LONG}
    numbers = random.Random(0)
    lengths = (700, 1500, 37, 260) if report.on_card else (70, 150, 3, 26)
    prompts = [{"prompt_token_ids": [numbers.randint(0, 3000) for _ in range(n)]} for n in lengths]
    params = [SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=1) for _ in prompts]
    params.append(SamplingParams(max_tokens=40, temperature=0.7, top_p=0.9, seed=3, ignore_eos=True))
    prompts.append(prompts[2])
    found = []
    with _folder(config) as folder:
        for device, kernels in (("cpu", "auto"), (report.device, "auto" if report.on_card else "reference")):
            llm = LLM(
                folder,
                load_format="dummy",
                device=device,
                gpu_kernels=kernels,
                dtype="float32",
                max_model_len=2048 if report.on_card else 256,
                max_num_batched_tokens=512 if report.on_card else 64,
                max_num_seqs=64 if report.on_card else 8,
                kv_cache_memory_bytes=256 << 20,
                speculative="off",
            )
            found.append([list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)])
            llm.shutdown()
    same = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(*found, strict=True)]
    report.note("long", prompts=[*lengths, lengths[2]], equal_tokens=same, of=40)


LONG = {
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "vocab_size": 4000,
    "tie_word_embeddings": True,
}
_WITH_TRITON = ("llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "mistral", "phi3", "qwen2")


def _answers(folder: str, **options: Any) -> tuple[list[Any], list[float]]:
    numbers = random.Random(0)
    prompts = [{"prompt_token_ids": [numbers.randint(3, 50) for _ in range(n)]} for n in (5, 17, 40, 3)]
    params = [SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2) for _ in prompts]
    llm = LLM(
        folder,
        load_format="dummy",
        dtype="float32",
        max_model_len=96,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        kv_cache_memory_bytes=8 << 20,
        speculative="off",
        **options,
    )
    try:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    finally:
        llm.shutdown()
    values = [entry.logprob for output in outputs for place in output.logprobs or () for entry in place.values()]
    return [output.token_ids for output in outputs], values


@contextlib.contextmanager
def _folder(config: dict[str, Any]) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield folder


# --- Speed ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _engine(report: Report, shape: str, **options: Any) -> Iterator[LLM]:
    """An engine of a shape with random weights."""
    config = {**QWEN3, **SHAPES[shape]} | ({} if report.on_card else SMALL)
    settings: dict[str, Any] = {
        "load_format": "dummy",
        "device": report.device,
        "dtype": "bfloat16" if report.on_card else "float32",
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "speculative": "off",
        "gpu_kernels": "auto" if report.on_card else "reference",
    }
    if not report.on_card:
        settings |= {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        settings |= {"kv_cache_memory_bytes": 32 << 20}
    with _folder(config) as folder:
        started = time.monotonic()
        llm = LLM(folder, **settings | options)
        report.note(f"{shape} ready", seconds=time.monotonic() - started)
    try:
        yield llm
    finally:
        llm.shutdown()
        del llm
        gc.collect()
        if report.on_card:
            torch.cuda.empty_cache()


def _generate(llm: LLM, lengths: list[int], outputs: list[int], temperature: float = 0.0) -> float:
    """Return the seconds that requests of these lengths take."""
    numbers = random.Random(sum(lengths))
    prompts = [{"prompt_token_ids": [numbers.randint(0, 10000) for _ in range(length)]} for length in lengths]
    params = [SamplingParams(max_tokens=n, temperature=temperature, ignore_eos=True, seed=1) for n in outputs]
    started = time.monotonic()
    found = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.monotonic() - started
    made = [len(output.outputs[0].token_ids) for output in found]
    if made != outputs:
        raise RuntimeError(f"{sum(made)} tokens were made instead of {sum(outputs)}")
    return seconds


def streams(report: Report) -> None:
    """Decodes: the difference between two runs, so that prompts and starts cancel. Prompts: to the first token."""
    long, short = (257, 1) if report.on_card else (9, 1)
    prompt = 256 if report.on_card else 20
    for shape in SHAPES:
        with _engine(report, shape) as llm:
            for number in (1, 32) if report.on_card else (1, 4):
                for _ in range(2):  # the first makes graphs
                    base = _generate(llm, [prompt] * number, [short] * number)
                    taken = _generate(llm, [prompt] * number, [long] * number) - base
                per_step = taken / (long - short)
                report.note(f"{shape} streams", streams=number, ms=1e3 * per_step, tok_per_s=number / per_step)
            for length in (512, 2048) if report.on_card else (40,):
                taken = min(_generate(llm, [length], [1]) for _ in range(4))
                report.note(f"{shape} prompt", tokens=length, ms=1e3 * taken, tok_per_s=length / taken)


def profile(report: Report) -> None:
    """Time of each kernel of decodes of one stream and of 256, and the share in which none ran."""
    if not report.on_card:
        report.note("profile", skipped="no card")
        return
    with _engine(report, "0.6B") as llm:
        for number in (1, 256):
            for _ in range(2):
                _generate(llm, [256] * number, [20] * number)
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as taken:
                started = time.monotonic()
                _generate(llm, [256] * number, [100] * number)
                seconds = time.monotonic() - started
            rows = sorted(taken.key_averages(), key=lambda row: -row.self_device_time_total)
            busy_s = sum(row.self_device_time_total for row in rows) / 1e6
            report.note("kernels", streams=number, wall_s=seconds, busy_s=busy_s, idle_share=1 - busy_s / seconds)
            for row in rows[:14]:
                each = row.self_device_time_total / max(row.count, 1)
                report.note("kernel", streams=number, kernel=row.key[:70], count=row.count, us_each=each)


def _workload(report: Report) -> tuple[list[int], list[int]]:
    numbers = random.Random(0)
    count, low, high = (256, 100, 1024) if report.on_card else (4, 3, 9)
    lengths = [numbers.randint(low, high) for _ in range(count)]
    return lengths, [numbers.randint(low, high) for _ in range(count)]


def _bench(report: Report, llm: LLM, name: str) -> None:
    lengths, outputs = _workload(report)
    _generate(llm, lengths[:8], [4] * 8 if len(lengths) > 8 else [4] * len(lengths[:8]))
    taken = [_generate(llm, lengths, outputs, temperature=0.6) for _ in range(2)]
    for index, seconds in enumerate(taken[-1:] if name != "nano-vllm's workload" else taken):
        report.note(name, run=index, tokens=sum(outputs), seconds=seconds, tok_per_s=sum(outputs) / seconds)


def bench(report: Report) -> None:
    """nano-vllm's own benchmark. The first run makes the graphs of its sizes, the second replays them."""
    with _engine(report, "0.6B") as llm:
        _bench(report, llm, "nano-vllm's workload")


def ablation(report: Report) -> None:
    """The same workload with one thing off at a time."""
    with _engine(report, "0.6B") as llm:
        scheduler = llm.llm_engine.scheduler
        scheduler.config = replace(scheduler.config, max_in_flight=1)
        _bench(report, llm, "one step in flight")
    captures = device_plan.Steps.captures
    device_plan.Steps.captures = False
    try:
        with _engine(report, "0.6B") as llm:
            _bench(report, llm, "without graphs")
    finally:
        device_plan.Steps.captures = captures
    small = {"max_model_len": 512, "max_num_seqs": 32, "max_num_batched_tokens": 256} if report.on_card else {}
    with _engine(report, "0.6B", gpu_kernels="reference", **small) as llm:
        number = 32 if report.on_card else 4
        seconds = _generate(llm, [256 if report.on_card else 20] * number, [32] * number)
        report.note("PyTorch's functions", streams=number, tok_per_s=32 * number / seconds)


def pdl(report: Report) -> None:
    """Steps of one row without programmatic dependent launch, which all other stages use where the tiles say so."""
    if not report.on_card:
        report.note("pdl", skipped="no card")
        return
    known = dict(tiles.BY_CAPABILITY)
    tiles.BY_CAPABILITY.update({key: replace(value, pdl=False) for key, value in known.items()})
    try:
        with _engine(report, "0.6B") as llm:
            for _ in range(2):
                base = _generate(llm, [256], [1])
                taken = _generate(llm, [256], [257]) - base
            report.note("0.6B without dependent launches", streams=1, ms=1e3 * taken / 256, tok_per_s=256 / taken)
    finally:
        tiles.BY_CAPABILITY.update(known)


def peer(report: Report) -> None:
    """Transformers: one stream and 32, its own static cache left out."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**QWEN3, **SHAPES["0.6B"]} | ({} if report.on_card else SMALL)
    config = AutoConfig.for_model(**fields)
    dtype = torch.bfloat16 if report.on_card else torch.float32
    with torch.device(report.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    new = 64 if report.on_card else 4
    for number in (1, 32) if report.on_card else (1, 2):
        ids = torch.randint(0, 10000, (number, 256 if report.on_card else 20), device=report.device)
        seconds = 0.0
        for _ in range(2):
            started = time.monotonic()
            model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
            seconds = time.monotonic() - started
        report.note("Transformers", streams=number, tok_per_s=new * number / seconds)


if __name__ == "__main__":
    sys.exit(main())
