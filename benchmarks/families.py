"""Speed of every model family beside Llama's: random 8-bit weights of equal size, as a share of the roofline.

    python -m benchmarks.families [--families qwen3_next,mamba2] [--cases tg@1,tg@8] [--ops]

Each model has about 0.5 billion parameters: Llama's width and layers as far as its structure allows, with head sizes
of published models. *Share* is the time of the roofline (`quire explain`) divided by the measured time; *of Llama* is
that share divided by Llama's, which is measured by turns with each family. Next to read: `insight/explain/phases.py`.
"""

import argparse
import gc
import importlib
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.command_line import cpu_name
from quire.config import EngineOptions
from quire.engine.llm_engine import LLMEngine
from quire.events import EventKind
from quire.insight.explain.device import Device
from quire.insight.explain.measure import decode_seconds, prefill_seconds
from quire.insight.explain.phases import Phase
from quire.insight.explain.subject import trace_rank
from quire.kernels.instruction import StepShape
from quire.models.registry import ModelRegistry
from quire.parallel.executor import InProcessExecutor
from quire.resolve import resolve
from quire.runtime.hardware import detect_hardware
from quire.runtime.machine_limits import MachineLimits, measure_limits
from quire.runtime.worker import KV_FORMATS
from quire.weights.checkpoint import Checkpoint
from quire.weights.sources import ModelFiles

CONTEXT, PROMPT, STREAMS = 128, 512, (1, 8)
REFERENCE = "llama"
NUM_DECODED, ROUNDS = 32, 3
"""Tokens per stream, and turns of a case, of which the fastest counts."""
CASES = {f"tg@{count}": ((CONTEXT - 1, 1),) * count for count in STREAMS} | {f"pp{PROMPT}": ((0, PROMPT),)}
"""Per case the tokens already computed and those of the step, of each request."""
SIZES = {"vocab_size": 32000, "hidden_size": 1536, "num_hidden_layers": 16, "max_position_embeddings": 2048}
LLAMA = {
    **SIZES, "intermediate_size": 4608, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
MOE = {**LLAMA, "num_hidden_layers": 12, "num_experts_per_tok": 4, "intermediate_size": 512}
EXPERTS = {**MOE, "num_experts": 16, "moe_intermediate_size": 512}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 512}
GEMMA = {"query_pre_attn_scalar": 128, "sliding_window": 512}
DELTA_NET = {
    "num_hidden_layers": 12, "head_dim": 256, "num_attention_heads": 6, "num_key_value_heads": 2,
    "linear_num_key_heads": 16, "linear_num_value_heads": 16,
}  # fmt: skip
DEEPSEEK = {
    **{name: LLAMA[name] for name in (*SIZES, "intermediate_size", "num_attention_heads", "tie_word_embeddings")},
    "num_hidden_layers": 12, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1,
    "moe_intermediate_size": 512, "first_k_dense_replace": 1,
}  # fmt: skip
WIDE = {**SIZES, "intermediate_size": 6144, "num_attention_heads": 12, "tie_word_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": {**LLAMA, "sliding_window": 512},
    "ministral3": {**LLAMA, "rope_parameters": {"rope_theta": 1e6, "llama_4_scaling_beta": 0.1}},
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "smollm3": LLAMA,
    "phi3": {**LLAMA, "pad_token_id": None},
    "granite": {
        **LLAMA, "embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "olmo2": LLAMA,
    "olmo3": {**LLAMA, "sliding_window": 512},
    "glm4": LLAMA,
    "gemma2": {**LLAMA, **GEMMA},
    "gemma3_text": {**LLAMA, **GEMMA, "sliding_window_pattern": 6},
    "gemma4_text": {
        **LLAMA, "sliding_window": 512, "head_dim": 256, "global_head_dim": 512, "num_attention_heads": 6,
        "num_key_value_heads": 2, "num_kv_shared_layers": 6, "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 32000,
    },
    "starcoder2": {**WIDE, "num_key_value_heads": 4},
    "gpt2": {"vocab_size": 32000, "n_embd": 1536, "n_layer": 16, "n_head": 12, "n_positions": 2048},
    "gpt_neox": {**WIDE, "rotary_pct": 0.25},
    "opt": {
        **{name: WIDE[name] for name in WIDE if name != "intermediate_size"}, "ffn_dim": 6144,
        "word_embed_proj_dim": 1536,
    },
    "mixtral": {**MOE, "num_local_experts": 16},
    "olmoe": {**MOE, "num_experts": 16},
    "qwen2_moe": SHARED_EXPERT,
    "qwen3_moe": EXPERTS,
    "gpt_oss": {**MOE, "num_local_experts": 16, "head_dim": 64, "num_attention_heads": 24},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": {**DEEPSEEK, "num_key_value_heads": 12, "n_group": 1, "topk_group": 1},
    "lfm2": {**LLAMA, "layer_types": ["conv", "conv", "full_attention", "conv"] * 4,
             "block_auto_adjust_ff_dim": False},
    "mamba2": {
        "vocab_size": 32000, "hidden_size": 1536, "num_hidden_layers": 28, "num_heads": 48, "head_dim": 64,
        "n_groups": 1, "state_size": 128,
    },
    "granitemoehybrid": {
        **LLAMA, "num_hidden_layers": 12, "shared_intermediate_size": 4608, "num_local_experts": 0,
        "mamba_n_heads": 48, "mamba_d_state": 128, "layer_types": (["mamba"] * 5 + ["attention"]) * 2,
    },
    "qwen3_5_text": {**LLAMA, **DELTA_NET},
    "qwen3_5_moe_text": {**SHARED_EXPERT, **DELTA_NET, "num_hidden_layers": 8},
    "qwen3_next": {**SHARED_EXPERT, **DELTA_NET, "num_hidden_layers": 8, "linear_num_value_heads": 32},
}  # fmt: skip
"""`model_type` → config. Models that see images have the language model of another family, and are left out."""


class Family:
    """A model in the structure of a family, with an engine that stays loaded until it is closed."""

    def __init__(self, family: str) -> None:
        (architecture,) = importlib.import_module(f"quire.models.{family}").ARCHITECTURES
        fields = {"model_type": family, "architectures": [architecture], **FAMILIES[family]}
        streams, length = max(STREAMS), max(PROMPT + 1, CONTEXT + NUM_DECODED)
        options = EngineOptions.from_kwargs(
            family, load_format="dummy", device="cpu", quantization="int8", max_model_len=length, max_num_seqs=streams,
            kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False, max_num_batched_tokens=PROMPT * 2,
        )  # fmt: skip
        self._config = resolve(options, detect_hardware("cpu"), ModelRegistry.make_model_config(fields))
        checkpoint = Checkpoint(ModelFiles(family, Path(family), "hf", family), fields)
        self._rank = trace_rank(self._config, checkpoint, 1)
        self._engine = LLMEngine(self._config, InProcessExecutor.create(self._config, checkpoint))
        self.num_parameters = self._config.model.num_parameters

    def close(self) -> None:
        """Free the model."""
        self._engine.shutdown()

    def seconds(self, case: str) -> float:
        """Return the seconds of one step of a case."""
        requests = CASES[case]
        start, count = requests[0]
        if count > 1:
            return prefill_seconds(self._engine, count)
        return decode_seconds(self._engine, len(requests), start + 1 - NUM_DECODED // 2, NUM_DECODED)

    def phase(self, case: str, device: Device) -> Phase:
        """Return the work of a case's step on a device."""
        requests = CASES[case]
        step = StepShape(requests, len(requests), KV_FORMATS[self._config.kv_dtype], self._config.tile_rows)
        return Phase("", step, self._config, self._rank, device)

    def op_times(self, case: str) -> dict[str, float]:
        """Return milliseconds per kind of op of an average step: the prompt's, or one in which all requests decode."""
        wanted = len(CASES[case]), CASES[case][0][1] > 1
        seen = self._engine.events.num_recorded
        self._engine.watch(None, op_period=1)
        self.seconds(case)
        self._engine.watch(None)
        ops, totals, num_steps = dict[Any, Any](), defaultdict[str, float](float), 0
        for event in self._engine.events.since(seen):
            if event.kind is EventKind.OPS:
                ops[event.data["step_id"]] = event.data["ops"]
            elif event.kind is EventKind.STEP and (event.data["num_requests"], event.data["has_prompts"]) == wanted:
                num_steps += event.data["num_iterations"]
                for op in ops[event.data["step_id"]]:
                    totals[op.name.split(":")[0]] += op.microseconds / 1000
        by_time = sorted(totals.items(), key=lambda x: -x[1])
        return {name: round(total / max(num_steps, 1), 3) for name, total in by_time}


@dataclass(slots=True)
class Measured:
    """Seconds of a family's step, those of Llama's in the turns between, and the work of both."""

    seconds: float
    reference_seconds: float
    phase: Phase
    reference_phase: Phase

    def share(self, device: Device) -> float:
        """Return the roofline's time divided by the measured one."""
        return replace(self.phase, device=device).floor_s / self.seconds

    def of_reference(self, device: Device) -> float:
        """Return the share divided by Llama's."""
        return self.share(device) * self.reference_seconds / replace(self.reference_phase, device=device).floor_s


def measure(family: Family, reference: Family, device: Device, cases: list[str]) -> dict[str, Measured]:
    """Time each case of a family by turns with Llama's, of which the fastest count."""
    found = {}
    for case in cases:
        turns = [(reference.seconds(case), family.seconds(case)) for _ in range(ROUNDS)]
        of_reference, seconds = (min(times) for times in zip(*turns, strict=True))
        found[case] = Measured(seconds, of_reference, family.phase(case, device), reference.phase(case, device))
    return found


def measure_device() -> Device:
    """Return this machine with its limits, measured now."""
    return Device(detect_hardware("cpu"), measure_limits("cpu", ("int8", "bf16", "fp32")), "measured now")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--families", default=",".join(FAMILIES), help="separated by commas  [all]")
    parser.add_argument("--cases", default=",".join(CASES), help="separated by commas  [all]")
    parser.add_argument("--ops", action="store_true", help="print milliseconds per kind of operation too")
    arguments = parser.parse_args()
    chosen = arguments.families.split(",")
    unknown = set(chosen) - FAMILIES.keys()
    if unknown:
        parser.error(f"no family is named {', '.join(sorted(unknown))}; known are {', '.join(FAMILIES)}")
    cases = arguments.cases.split(",")
    if unknown := set(cases) - CASES.keys():
        parser.error(f"no case is named {', '.join(sorted(unknown))}; known are {', '.join(CASES)}")
    device = measure_device()
    reference = Family(REFERENCE)
    measured, num_parameters = {}, {}
    for name in chosen:
        family = Family(name)
        measured[name], num_parameters[name] = measure(family, reference, device, cases), family.num_parameters
        for case, found in measured[name].items():
            ops = family.op_times(case) if arguments.ops else ""
            print(
                f"{name} {case} {found.seconds * 1e3:.1f} ms, Llama {found.reference_seconds * 1e3:.1f} ms {ops}",
                file=sys.stderr,
                flush=True,
            )
        family.close()
        del family
        gc.collect()
    # Other programs may have disturbed the first measurement of the limits.
    again = measure_device()
    rates = {name: max(rate, again.limits.flops_per_s[name]) for name, rate in device.limits.flops_per_s.items()}
    read = max(device.limits.read_bytes_per_s, again.limits.read_bytes_per_s)
    device = replace(device, limits=MachineLimits(read, rates))
    shown = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {name}" for name, rate in rates.items())
    print(f"{cpu_name()}, {device.hardware.num_threads} cores; {read / 1e9:.1f} GB/s read; {shown}")
    for name, by_case in measured.items():
        cells = []
        for case, found in by_case.items():
            num_tokens = sum(count for _, count in CASES[case])
            cells += [f"{num_tokens / found.seconds:.4g}", f"{found.share(device):.2f}"]
            cells += [f"{found.of_reference(device):.2f}"]
        print(f"| `{name}` | {num_parameters[name] / 1e6:.0f} M | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
