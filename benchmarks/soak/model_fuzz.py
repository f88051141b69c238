"""A9: two minutes of damaged model files, of five kinds: each loads, or is one typed error that names a file or a key.

A process of its own loads them one after another, so that a crash, a hang and memory are seen.
Next to read: `model_cases.py`.
"""

import asyncio
import contextlib
import json
import logging
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.soak.model_cases import KINDS, Case, make_case, make_models
from benchmarks.soak.row import Row
from quire.engine.adapters import LoRARequest
from quire.engine.llm_engine import LLMEngine
from quire.engine.tokenizer_source import load_tokenizer
from quire.errors import QuireError, RequestError
from quire.models.registry import FALLBACK, ModelRegistry
from quire.sampling_params import SamplingParams
from quire.weights.checkpoint import open_checkpoint
from quire.weights.sources import resolve_source

COUNT = 4000
MAX_S = 5.0
MAX_GROWTH_MIB = 64.0
"""Beside twice the size of the files, which are small."""
MAX_ADDRESS_BYTES = 16 << 30
"""Of the process: a case that asks for more gets an error before the machine is out of memory."""
NOTHING = {"seconds": 0.0, "growth_mib": 0.0}
SAID = (
    "model's config", "the checkpoint lacks ", "the checkpoint has ", "architecture ", "rope parameter ", "rope_type ",
    "layer type ", "tokenizer.ggml.", "Transformers' own module for ",
)  # fmt: skip
"""Parts of errors that go on with the key or tensor, as config.json, directories and GGUF have it."""
OPTIONS: dict[str, Any] = {
    "weight_cache": "off", "num_blocks_override": 16, "max_num_seqs": 2, "enable_lora": True, "device": "cpu",
}  # fmt: skip


async def model_fuzz(*, count: int = COUNT, seed: int = 0) -> Row:
    """A9: `count` damaged models, the same ones for a seed."""
    results: Counter[str] = Counter()
    faults: list[str] = []
    slowest_s = growth_mib = 0.0
    with tempfile.TemporaryDirectory() as directory:
        for found in await asyncio.to_thread(lambda: list(_run(Path(directory), count, seed))):
            results[found["result"]] += 1
            slowest_s, growth_mib = max(slowest_s, found["seconds"]), max(growth_mib, found["growth_mib"])
            if found["result"] == "fault":
                faults.append(f"{found['seed']} ({found['how']}): {found['problem']}")
    row = Row("A9", f"{count} damaged model files of {len(KINDS)} kinds")
    row.note("loaded", results["loaded"])
    row.check("typed errors that name a file or key", results["refused"], passes=results["refused"] > count // 4)
    row.check("other ends", " | ".join([str(len(faults)), *faults[:3]]), passes=not faults)
    row.check(f"slowest s (≤ {MAX_S:g})", slowest_s, passes=slowest_s <= MAX_S)
    row.check(f"peak RSS +MiB (≤ {MAX_GROWTH_MIB:g})", growth_mib, passes=growth_mib <= MAX_GROWTH_MIB)
    return row


def _run(directory: Path, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield what came of each case. A process that crashes or hangs is replaced by one for the rest."""
    command = [sys.executable, "-m", "benchmarks.soak.model_fuzz", str(directory), str(seed)]
    number = 0
    while number < count:
        with subprocess.Popen([*command, str(number), str(count)], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = _lines(process)
            for line in lines:
                yield json.loads(line)
                number += 1
        if number < count:
            kind = KINDS[number % len(KINDS)]
            problem = f"the process ended with status {process.returncode}"
            yield {"result": "fault", "seed": f"{seed} {kind} {number}", "how": "", "problem": problem, **NOTHING}
            number += 1


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """Yield lines of a process, which is killed if none comes for a time."""
    import selectors

    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(60):
                process.kill()
                return
            line = process.stdout.readline()
            if not line:
                return
            yield line


# --- The process that loads them --------------------------------------------------------------------


def load(case: Case, base: LLMEngine) -> None:
    """Load a model and compute a token, or an adapter on the base. Raises: what is to be judged."""
    if case.kind == "adapter":
        run(base, LoRARequest(case.path.parent.name, str(case.path)))
    elif case.kind == "tokenizer":
        checkpoint = open_checkpoint(resolve_source(str(case.path)))
        tokenizer = load_tokenizer(checkpoint, model_vocab_size=258)
        tokenizer.decode(tokenizer.encode("Hello, world 123"))
    elif case.family:
        checkpoint = open_checkpoint(resolve_source(str(case.path)), with_tensors=False)
        ModelRegistry.make_model_config(checkpoint.hf_config, checkpoint.generation_config)
    else:
        engine = LLMEngine.from_options(str(case.path), **OPTIONS)
        try:
            run(engine, None)
        finally:
            engine.shutdown()


def run(engine: LLMEngine, adapter: LoRARequest | None) -> None:
    """Compute one token. Raises: the error of the request."""
    engine.add_request("case", [1, 2, 3], SamplingParams(max_tokens=1, ignore_eos=True), lora_request=adapter)
    while engine.has_unfinished_requests():
        engine.step()


def judge(case: Case, base: LLMEngine) -> tuple[str, str]:
    """Return "loaded", "refused" or "fault", and what is wrong in the last case."""
    try:
        load(case, base)
    except RequestError:
        return "loaded", ""  # the context may be too short for the request
    except QuireError as error:
        text = str(error)
        if error.http_status == 500:
            return "fault", f"{type(error).__name__}: {text}"
        if not text.isprintable() or not any(name and name in text for name in (*case.names, *SAID)):
            return "fault", f"names no file or key: {type(error).__name__}: {text}"
        return "refused", text
    except Exception as error:
        return "fault", f"{type(error).__name__}: {str(error)[:200]}"
    return "loaded", ""


def main() -> None:
    """Load cases and write a line of JSON for each."""
    directory, seed, first, count = Path(sys.argv[1]), *map(int, sys.argv[2:])
    logging.disable(logging.CRITICAL)
    models = directory / "models"
    if not models.exists():
        make_models(models)
    base = LLMEngine.from_options(str(models / "hf"), **OPTIONS)
    with contextlib.suppress(QuireError):  # a model that Quire does not have imports Transformers, if it is there
        ModelRegistry.resolve({"architectures": [FALLBACK]})
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
    for number in range(first, count):
        kind = KINDS[number % len(KINDS)]
        name = f"{seed} {kind} {number}"
        case = make_case(models, directory / f"case{number}", kind, name)
        before_mib, started_s = _peak_mib(resets=True), time.perf_counter()
        result, problem = judge(case, base)
        seconds, growth_mib = time.perf_counter() - started_s, _peak_mib() - before_mib
        found = {"result": result, "seed": name, "how": case.how[:100], "problem": problem}
        print(json.dumps(found | {"seconds": seconds, "growth_mib": growth_mib}), flush=True)
        shutil.rmtree(directory / f"case{number}")


def _peak_mib(*, resets: bool = False) -> float:
    """Return the peak memory since it was reset to what is in use. Source: proc_pid_clear_refs(5)."""
    if resets:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


if __name__ == "__main__":
    main()
