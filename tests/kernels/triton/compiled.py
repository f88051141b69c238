"""Compile what `TritonOps` launches for a card that need not be here, and print what each kernel takes.

    python -m tests.kernels.triton.compiled 90 [--pdl]

The launches are recorded with tensors that have shapes alone, so that the tiles and constants are those of the table.
"""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire._native import Activation
from quire.config import SchedulerConfig
from quire.runtime.device.memory import StepMemory
from quire.runtime.device.ops import KvView
from quire.runtime.device.plan import DeviceCall, RowsView
from quire.runtime.device.tiles import tiles_of
from quire.runtime.device.triton_ops import TritonOps

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {"width": 1024, "inner": 3072, "heads": 16, "kv_heads": 8, "size": 128, "normed": True},
    "Qwen3-8B": {"width": 4096, "inner": 12288, "heads": 32, "kv_heads": 8, "size": 128, "normed": True},
    "SmolLM2": {"width": 576, "inner": 1536, "heads": 9, "kv_heads": 3, "size": 64},
    "gpt-oss": {"width": 2880, "inner": 2880, "heads": 64, "kv_heads": 8, "size": 64, "window": 128, "sinks": True},
    "Gemma 4": {"width": 2560, "inner": 10240, "heads": 8, "kv_heads": 2, "size": 512, "normed": True},
    "Gemma": {"width": 1152, "inner": 6912, "heads": 4, "kv_heads": 1, "size": 256, "window": 512, "cap": 50.0},
}


class Recorded(TritonOps):
    """Launches that are noted by their source and constants instead of made."""

    def __init__(self, step: StepMemory, **given: Any) -> None:
        super().__init__(step, **given)
        self.launches: dict[str, tuple[Any, list[str], dict[str, Any], dict[str, Any]]] = {}

    def _launch(
        self, kernel: Any, grid: Any, *tensors: Any, num_warps: int = 4, stages: int = 1, **constants: Any
    ) -> None:
        types = [TYPES[tensor.dtype] for tensor in tensors]
        options = {
            "num_warps": num_warps,
            "num_stages": stages,
            "enable_fp_fusion": True,
            "launch_pdl": bool(constants.get("PDL")),
        }
        key = repr((kernel.__name__, types, constants, options))
        self.launches[key] = kernel, types, constants, options


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def record(arch: int, model: dict[str, Any], *, pdl: bool, has_drafts: bool) -> Recorded:
    """Return the launches of a layer of a model, of steps of one row and of many, and of the start of a step."""
    config = SchedulerConfig(
        block_size=32,
        num_blocks=64,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=40960,
        kv_cache_groups=(None,),
    )
    step = StepMemory(config, 2048, 256, torch.device("meta"))
    ops = Recorded(step, has_drafts=has_drafts, tiles=dataclasses.replace(tiles_of(arch), pdl=pdl))
    width, inner, heads, kv_heads, size = (model[name] for name in ("width", "inner", "heads", "kv_heads", "size"))
    half, window = size // 2, model.get("window", 0)
    kv = KvView(tensor(64, 2, kv_heads, 32, size, dtype=torch.bfloat16).transpose(2, 3), 0)
    none = Activation.none
    for num_rows in (1, 8):
        x, qkv = tensor(num_rows, width), tensor(num_rows, (heads + 2 * kv_heads) * size)
        q, k, v = qkv.split([heads * size, kv_heads * size, kv_heads * size], 1)
        normed, out = (tensor(num_rows, n, dtype=torch.bfloat16) for n in (width, heads * size))
        cos, sin, weight = tensor(num_rows, half), tensor(num_rows, half), tensor(width)
        of_heads = tensor(size) if model.get("normed") else None
        attend = {
            "q": q, "stride": 0, "out": out, "num_heads": heads, "window": window, "scale": 0.1, "kv": kv,
            "soft_cap": model.get("cap", 0.0), "sinks": tensor(heads) if model.get("sinks") else None,
        }  # fmt: skip
        ops.prepare([DeviceCall("attend", ops.attend, {**attend, "out": RowsView(out)})])
        ops.gather(num_rows)
        ops.rotary(step, tensor(half), cos, sin, half)
        ops.embed(step, tensor(1000, width, dtype=torch.bfloat16), x, 0, False)
        ops.write_kv(
            step, q=q, k=k, v=v, num_heads=heads, q_norm=of_heads, k_norm=of_heads, epsilon=1e-6, cos=cos, sin=sin,
            half=half, q_cos=None, q_sin=None, kv=kv,
        )  # fmt: skip
        step.has_prompts = num_rows > 1
        ops.attend(step, **attend)
        if num_rows > 1:
            both, gated = tensor(num_rows, 2 * inner), tensor(num_rows, inner, dtype=torch.bfloat16)
            ops.norm(
                step, x=x, out=normed, weight=weight, bias=None, width=width, epsilon=1e-6, subtract_mean=False,
                groups=1, add=False, gates=None, activation=none, gates_first=False, weight_per_group=False,
            )  # fmt: skip
            ops.activate(step, both, gated, inner, activation=Activation.silu, gated=True)
            ops.activate(step, x, normed, width, from_logit_rows=True)
            continue
        rows = {n: tensor(1, n, dtype=torch.bfloat16) for n in {heads * size, inner}}
        for n, i, is_normed, gated, add in (
            (qkv.shape[1], width, True, False, False), (width, heads * size, False, False, True),
            (inner, width, True, True, False), (width, inner, False, False, True),
        ):  # fmt: skip
            ops.linear_row(
                step, tensor(2 * n if gated else n, i, dtype=torch.bfloat16), None, weight if is_normed else None,
                x if is_normed else rows[i], rows[inner] if gated else tensor(1, n), 1e-6,
                Activation.silu if gated else none, gated, add,
            )  # fmt: skip
    return ops


def compile_one(
    arch: int, kernel: Any, types: list[str], constants: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Return what one launch takes."""
    names = list(kernel.arg_names)
    tensors = [name for name in names if name not in constants]
    assert len(tensors) == len(types), (kernel.__name__, tensors, types)
    signature = {name: "constexpr" if name in constants else types[tensors.index(name)] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in tensors}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, attributes)
    done = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(done.asm["cubin"])
        file.flush()
        told = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", told)}
    kind = {True: "decodes", False: "prompts"}[bool(constants["SPLIT"])] if kernel.__name__ == "attend" else ""
    return {
        "kernel": f"{kernel.__name__} {kind}".strip(),
        "registers": usage["REG"],
        "spilled_bytes": usage["STACK"],
        "shared_bytes": done.metadata.shared,
        "wgmma": len(re.findall(r"wgmma\.mma_async", done.asm["ptx"])),
        "waits": len(re.findall(r"griddepcontrol\.wait", done.asm["ptx"])),
    }


def main() -> None:
    arch, pdl = int(sys.argv[1]), "--pdl" in sys.argv
    seen = set()
    for name, model in MODELS.items():
        for has_drafts in (False, True) if name == "Qwen3-8B" else (False,):
            for key, launch in record(arch, model, pdl=pdl, has_drafts=has_drafts).launches.items():
                if key not in seen:
                    seen.add(key)
                    print(json.dumps({"model": name, **compile_one(arch, *launch)}), flush=True)


if __name__ == "__main__":
    main()
