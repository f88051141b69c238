"""Files that `quire quantize` writes beside those of llama.cpp's own tool: size, time and mean KL to the source.

    python -m benchmarks.quantize [--types Q4_K_M,Q4_0] [--text FILE …] [--imatrix-text FILE]

Both tools quantise the same F32 file, made of the model if that is stored otherwise. Quire computes the logits of
every file in float32, so that only the weights' error counts: mean over positions of KL(source ‖ file), in nats, on
the text of `benchmarks.quality`. With `--imatrix-text` both tools get the importance matrix that Quire measures.
Next to read: `quality.py`.
"""

import argparse
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command_line import Table, add_shared_options, finish_arguments, write_result
from benchmarks.quality import WINDOW_LEN, Comparison, cut_windows, default_texts
from benchmarks.side_specs import KINDS, Models, Skipped, interpreter
from benchmarks.sides.quire import prompt_logits
from quire.engine.llm_engine import LLMEngine
from quire.weights.sources import ModelFiles
from quire_workshop.cli.quantize import open_source
from quire_workshop.gguf.quantize import quantize_gguf
from quire_workshop.importance import measure_importance

TYPES = "Q8_0,Q6_K,Q5_K_M,Q5_K_S,Q5_1,Q5_0,Q4_K_M,Q4_K_S,Q4_1,Q4_0,Q3_K_L,Q3_K_M,Q3_K_S,Q2_K"
FORMATS = {"type and tool": "", "MB": ".1f", "s": ".1f", "mean KL": ".6f", "top-1": ".2%", "ratio": ".3f"}
LLAMA_CPP = """
import ctypes, sys, numpy, llama_cpp as lib
source, target, file_type, threads, importance = sys.argv[1:]
params = lib.llama_model_quantize_default_params()
kind = "ALL" if file_type == "F32" else "MOSTLY"
params.ftype, params.nthread = getattr(lib, f"LLAMA_FTYPE_{kind}_{file_type}"), int(threads)
values = dict(numpy.load(importance)) if importance else {}
items = (lib.llama_model_imatrix_data * (len(values) + 1))()
for item, (name, array) in zip(items, values.items()):
    item.name, item.size = name.encode(), array.size
    item.data = array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
if values:
    params.imatrix = items
sys.exit(lib.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)))
"""
"""llama.cpp's quantiser, in the interpreter that has llama-cpp-python."""


def logits_of(path: Path, windows: list[list[int]], num_threads: int) -> list[np.ndarray]:
    """Logits in float32 of the weights of a file. Shapes: [T, V] each."""
    engine = LLMEngine.from_options(
        str(path),
        device="cpu",
        dtype="float32",
        max_num_seqs=1,
        max_model_len=WINDOW_LEN + 1,
        enable_prefix_caching=False,
    )
    found = [prompt_logits(engine, window) for window in windows]
    engine.shutdown()
    return found


def local(path: Path) -> ModelFiles:
    """A GGUF file as a model."""
    return ModelFiles(str(path), path, "gguf", "local")


def ours(source: Path, target: Path, file_type: str, importance: Path | None) -> None:
    """Quantise with Quire."""
    values = None if importance is None else dict(np.load(importance))
    quantize_gguf(open_source(local(source)), target, file_type, values)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, printing rows as they are known."""
    models = Models.of(arguments.model)
    text = "\n".join(path.read_text() for path in arguments.text or default_texts())
    windows = cut_windows(models.tokenizer.encode(text), arguments.windows, WINDOW_LEN)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="quire-quantize-", dir=arguments.scratch) as scratch:
        source, target, importance = Path(scratch) / "source.gguf", Path(scratch) / "target.gguf", None
        ours(models.gguf, source, "F32", None)
        if arguments.imatrix_text:
            importance = Path(scratch) / "importance.npz"
            opened = local(source)
            measured = measure_importance(opened, open_source(opened).tensors, arguments.imatrix_text.read_text())
            np.savez(importance, **measured[0])

        def llama_cpp(source: Path, target: Path, file_type: str, importance: Path | None) -> None:
            python = interpreter("llama.cpp", KINDS["llama.cpp"], vars(arguments))
            command = [python, "-c", LLAMA_CPP, str(source), str(target), file_type, str(arguments.threads)]
            command.append(str(importance or ""))
            environment = {**os.environ, "PYTHONPATH": ""}
            subprocess.run(command, check=True, capture_output=True, env=environment)

        reference = logits_of(source, windows, arguments.threads)
        table = Table(FORMATS)
        for file_type in arguments.types.split(","):
            first = 0.0
            for name, tool in (("quire", ours), ("llama.cpp", llama_cpp)):
                started = time.perf_counter()
                try:
                    tool(source, target, file_type, importance)
                except (Skipped, subprocess.CalledProcessError) as error:
                    print(f"without {name}: {error}")
                    continue
                seconds, comparison = time.perf_counter() - started, Comparison()
                for window, p, q in zip(windows, reference, logits_of(target, windows, 1), strict=True):
                    comparison.add(p, q, window)
                row = {"type": file_type, "tool": name, "seconds": seconds, "num_bytes": target.stat().st_size}
                rows.append(row | comparison.as_json())
                kl, equal = rows[-1]["mean_kl_nats"], rows[-1]["top1_agreement"]
                table.row(
                    f"{file_type} {name}", row["num_bytes"] / 1e6, seconds, kl, equal, first / kl if first else None
                )
                first = first or kl
    return {"schema": "quire.bench.quantize/1", "model": models.name, "num_windows": len(windows), "results": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_shared_options(parser, ("quire", "llama.cpp"), what="quantize")
    parser.add_argument("--types", default=TYPES, help="separated by commas  [%(default)s]")
    parser.add_argument("--windows", type=int, default=6, help="windows of 1,024 tokens at most  [6]")
    parser.add_argument("--text", type=Path, nargs="+", help="files  [the licences of Quire and Python]")
    parser.add_argument("--imatrix-text", type=Path, help="text to measure an importance matrix on  [none]")
    parser.add_argument("--scratch", type=Path, help="where 1 GB fits for a while  [the system's]")
    arguments = finish_arguments(parser, None)
    write_result(run(arguments), arguments)


if __name__ == "__main__":
    main()
