"""Packing the matrices of a GGUF file from the page cache: gigabytes of file per second, and memory beside the weights.

    python -m benchmarks.loading [--model qwen3-1.7b:Q4_K_M] [--threads 2]

The first run gets memory that the system may have to take from its host; the best one does not. Next to read:
`native/weights/pack.h`.
"""

import argparse
import resource
import time

import torch
from torch import nn

from benchmarks.model_files import generated
from quire._native import WeightFormat
from quire.kernels.instruction import Packing
from quire.runtime.hardware import count_threads
from quire.runtime.plan.packed_weights import PACKED_DIRECTLY, PackedWeights, Placement
from quire.weights.checkpoint import open_checkpoint
from quire.weights.sources import resolve_source
from quire.weights.weight_tensor import FLOATS

REPETITIONS = 3


def peak_bytes() -> int:
    """The most memory that this process has held, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="qwen3-1.7b:Q4_K_M", help="as of benchmarks.peers  [%(default)s]")
    parser.add_argument("--threads", type=int, default=count_threads(), help="[physical cores]")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    checkpoint = open_checkpoint(resolve_source(generated(arguments.model)))
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2}
    parameters = {name: nn.Parameter(torch.empty(tensor.shape, device="meta")) for name, tensor in tensors.items()}
    formats = {
        name: WeightFormat.bf16 if tensor.format in FLOATS else PACKED_DIRECTLY.get(tensor.format, WeightFormat.q8)
        for name, tensor in tensors.items()
    }
    packings = {name: Packing.whole(tensors[name].shape[0], each) for name, each in formats.items()}
    file_bytes, before = sum(tensor.num_bytes for tensor in tensors.values()), peak_bytes()
    rates, beside = [], 0
    for index in range(REPETITIONS):
        start = time.perf_counter()
        weights = PackedWeights(parameters, packings, arguments.threads)
        weights.fill([Placement(tensor, name, 0) for name, tensor in tensors.items()])
        rates.append(file_bytes / (time.perf_counter() - start) / 1e9)
        if index == 0:
            beside = peak_bytes() - before - weights.num_bytes
        num_bytes = weights.num_bytes
        del weights
    print(f"file {file_bytes / 1e6:.0f} MB, packed {num_bytes / 1e6:.0f} MB ({num_bytes / file_bytes:.3f} x)")
    print(f"first {rates[0]:.2f} GB/s of file, best {max(rates):.2f}; at most {beside / 1e6:.0f} MB beside the weights")


if __name__ == "__main__":
    main()
