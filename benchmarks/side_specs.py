"""From a side's name to the process that runs it: which interpreter, which model format, which options.

    quire · parent (another Quire) · llama.cpp · ik_llama.cpp · vllm · transformers, each with `:key=value` any number
    of times. model=gguf|bf16|PATH chooses the weights, env.NAME=VALUE sets a variable, all else is its own option.

Next to read: `sides/`, where the options are described.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.dequantise import dequantised
from benchmarks.model_files import generated
from benchmarks.side_process import ROOT, SideSpec
from quire.engine.tokenizer_source import load_tokenizer
from quire.text.tokenizer import Tokenizer
from quire.weights.checkpoint import open_checkpoint
from quire.weights.sources import resolve_source

DEFAULT_SIDES = ("quire", "llama.cpp", "ik_llama.cpp", "vllm", "transformers")
IMPORT_TIMEOUT_S = 120


class Skipped(Exception):
    """A side cannot be measured here, and why."""


@dataclass(frozen=True)
class Kind:
    """A kind of side. `package` must be importable; `python` names the argument with its interpreter, None: ours."""

    module: str
    package: str
    python: str | None
    weights: str


KINDS = {
    "quire": Kind("benchmarks.sides.quire", "quire", None, "gguf"),
    "parent": Kind("benchmarks.sides.quire", "quire", "parent_python", "gguf"),
    "llama.cpp": Kind("benchmarks.sides.llama_cpp", "llama_cpp", "llama_cpp_python", "gguf"),
    "ik_llama.cpp": Kind("benchmarks.sides.ik_llama_cpp", "ik_llama_cpp", "ik_llama_cpp_python", "gguf"),
    "vllm": Kind("benchmarks.sides.vllm", "vllm", "vllm_python", "bf16"),
    "transformers": Kind("benchmarks.sides.transformers", "transformers", None, "bf16"),
}


@dataclass(frozen=True)
class Models:
    """The model under test in the formats sides want."""

    name: str
    gguf: Path
    vocab_size: int
    tokenizer: Tokenizer
    bf16_directory: Path | None = None

    @classmethod
    def of(cls, name: str, bf16: Path | None = None) -> "Models":
        """Fetch or generate the model if need be, and read what prompts depend on."""
        files = resolve_source(generated(name))
        checkpoint = open_checkpoint(files, with_tensors=False)
        return cls(name, files.path, checkpoint.hf_config["vocab_size"], load_tokenizer(checkpoint), bf16)

    def path(self, weights: str) -> Path:
        """The file or directory for "gguf", "bf16" or a path."""
        if weights == "gguf":
            return self.gguf
        if weights == "bf16":
            return self.bf16_directory or dequantised(str(self.gguf))
        return Path(weights).expanduser()


def make_spec(name: str, models: Models, interpreters: Mapping[str, Any]) -> SideSpec:
    """Return the command of a side. Raises: Skipped."""
    base, *settings = name.split(":")
    kind = KINDS.get(base)
    if kind is None:
        raise Skipped(f"there is no side {base!r}; there are {', '.join(KINDS)}")
    options: dict[str, Any] = {}
    # Packages of this environment are not for another interpreter.
    environment: dict[str, str] = {"PYTHONPATH": ""} if kind.python else {}
    weights = kind.weights
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise Skipped(f"{setting!r} is not key=value")
        if key == "model":
            weights = value
        elif key.startswith("env."):
            environment[key.removeprefix("env.")] = value
        else:
            options[key] = _value(value)
    command = (interpreter(base, kind, interpreters), "-m", kind.module)
    return SideSpec(name, command, str(models.path(weights)), options, environment)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def interpreter(base: str, kind: Kind, interpreters: Mapping[str, Any]) -> str:
    """The Python that has a kind's package. Raises: Skipped."""
    if kind.python is None:
        if importlib.util.find_spec(kind.package) is None:
            raise Skipped(f"{kind.package} is not installed here")
        return sys.executable
    chosen = interpreters.get(kind.python)
    variable = f"QUIRE_BENCH_{kind.python.removesuffix('_python').upper()}"
    if not chosen:
        raise Skipped(f"set {variable} or --{kind.python.replace('_', '-')} to a Python that has {kind.package}")
    python = shutil.which(str(Path(chosen).expanduser()))
    if python is None:
        raise Skipped(f"{variable}: there is no program {chosen}")
    # In a process of its own: some of these packages take seconds to import and change the process.
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({kind.package!r}) is None)"
    if subprocess.run([python, "-c", code], cwd=ROOT, timeout=IMPORT_TIMEOUT_S, check=False).returncode:
        raise Skipped(f"{python} has no {kind.package}")
    return python
