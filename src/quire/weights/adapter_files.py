"""`read_adapter`: a LoRA adapter's files, of PEFT or GGUF, under Hugging Face's names of the weights that it changes.

Must not know modules. Next to read: `runtime/adapter_layout.py`, which finds the place of each matrix in a model.
"""

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ModelFileError, UnsupportedModelError, printable
from quire.files import read_json_object, reading
from quire.weight_map import Rows
from quire.weights.checkpoint import read_safetensors
from quire.weights.gguf_architectures import ARCHITECTURES, architecture_of
from quire.weights.gguf_config import file_views
from quire.weights.gguf_file import read_gguf
from quire.weights.weight_tensor import WeightTensor

MAX_RANK = 256
LARGEST_NUMBER = 1e18
"""Of an adapter's configuration; scaled values are numbers in fp32."""
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Values of `init_lora_weights` by which PEFT takes the adapter's first values out of the base's weights."""
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PEFT_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_GGUF_NAME = re.compile(r"(.+)\.lora_([ab])")


@dataclass(frozen=True, slots=True, eq=False)
class LowRankPair:
    """An update of a weight [N, I]: scale · B A. Shapes: a [R, I]; b [N, R]. `row_order`: stored position of B's."""

    a: WeightTensor
    b: WeightTensor
    scale: float
    row_order: np.ndarray | None = None

    @property
    def rank(self) -> int:
        """R."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterFiles:
    """An adapter. Nothing of its matrices is read yet.

    Fields:
        pairs: by the name of the weight.
        files: those that were read.
        invocation_token_ids: of an activated adapter, the tokens from which on it computes; else empty.
    """

    path: Path
    pairs: Mapping[str, LowRankPair]
    files: tuple[Path, ...]
    invocation_token_ids: tuple[int, ...] = ()

    def digest(self) -> str:
        """Return the SHA-256 of the files, which takes as long as decoding them."""
        digest = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def read_adapter(path: Path, hf_config: Mapping[str, Any]) -> AdapterFiles:
    """Read an adapter's headers. `hf_config`: of the model, for the order of rows in GGUF files.

    Raises: ModelFileError naming what is missing, cut off or contradictory; UnsupportedModelError.
    """
    if not path.is_dir() and path.suffix != ".gguf":
        raise ModelFileError(f"{path}: no adapter: give a directory with {CONFIG_FILE}, or a GGUF file")
    with reading(path):
        found = _read_peft(path) if path.is_dir() else _read_gguf_adapter(path, hf_config)
    if not found.pairs:
        raise ModelFileError(f"{path}: the adapter changes no weight: train it with target_modules, or fetch it again")
    return found


def _read_peft(directory: Path) -> AdapterFiles:
    config_path, weights_path = directory / CONFIG_FILE, directory / WEIGHTS_FILE
    if not config_path.is_file():
        raise ModelFileError(f"{directory}: has no {CONFIG_FILE}; give the directory that PEFT's save_pretrained wrote")
    config = read_json_object(config_path)
    _check_peft(config, config_path)
    if not weights_path.is_file():
        raise ModelFileError(f"{directory}: has no {WEIGHTS_FILE}; save it with safe_serialization=True")
    matrices: dict[str, dict[str, WeightTensor]] = {}
    for name, tensor in read_safetensors(weights_path).items():
        match = _PEFT_NAME.fullmatch(name)
        if match is None:
            raise UnsupportedModelError(
                f"{weights_path}: tensor '{printable(name)}' is no lora_A or lora_B of a linear layer, and only"
                " these are computed: train the adapter without modules_to_save, embeddings and DoRA"
            )
        matrices.setdefault(match[1], {})[match[2]] = tensor
    ranks, alphas = (_of_patterns(config, name, config_path, matrices) for name in ("rank_pattern", "alpha_pattern"))
    pairs = {}
    for module, found in matrices.items():
        rank, alpha = ranks.get(module, config["r"]), alphas.get(module, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        pairs[f"{module}.weight"] = _pair(weights_path, module, found.get("A"), found.get("B"), scale, rank)
    tokens = config.get("alora_invocation_tokens") or ()
    return AdapterFiles(directory, pairs, (config_path, weights_path), _tokens(config_path, tokens))


def _check_peft(config: Mapping[str, Any], path: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise UnsupportedModelError(f"{path}: peft_type={config.get('peft_type')!r}; only LORA is computed")
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if not _is_number(value):
            raise ModelFileError(f"{path}: {name}={value!r} is not a number; fetch the adapter again")
    if not isinstance(config["r"], int) or not 1 <= config["r"] <= MAX_RANK:
        raise UnsupportedModelError(f"{path}: r={config['r']!r}; ranks from 1 to {MAX_RANK} are computed")
    others = ("use_dora", "modules_to_save", "lora_bias", "target_parameters", "trainable_token_indices")
    used = [name for name in others if config.get(name)]
    if config.get("bias", "none") != "none":
        used.append("bias")
    start = str(config.get("init_lora_weights")).partition("_")[0]
    if start in CHANGES_BASE:
        raise UnsupportedModelError(
            f"{path}: init_lora_weights={start!r} changes the base's weights too: save the adapter with PEFT's"
            " path_initial_model_for_weight_conversion"
        )
    if used:
        raise UnsupportedModelError(f"{path}: {', '.join(used)} of an adapter cannot be computed: train without")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST_NUMBER


def _of_patterns(config: Mapping[str, Any], name: str, path: Path, modules: Collection[str]) -> dict[str, float]:
    """Return the values that a field of patterns gives to modules."""
    given = config.get(name)
    given = given if isinstance(given, dict) else {}
    patterns = {key: float(value) for key, value in given.items() if _is_number(value) and value > 0}
    try:
        return values_of_modules(patterns, modules)
    except ModelFileError as error:
        raise ModelFileError(f"{path}: {name}: {error.message}") from None


def _pair(
    path: Path, module: str, a: WeightTensor | None, b: WeightTensor | None, scale: float, rank: float | None
) -> LowRankPair:
    shown = printable(module)
    if a is None or b is None:
        raise ModelFileError(f"{path}: {shown} has only one of its two matrices; fetch the adapter again")
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or rank not in (None, a.shape[0]):
        of_rank = "" if rank is None else f" of rank {rank:g}"
        raise ModelFileError(
            f"{path}: {shown} has A {list(a.shape)} and B {list(b.shape)}, which are no pair{of_rank}; fetch it again"
        )
    if not 1 <= a.shape[0] <= MAX_RANK:
        raise UnsupportedModelError(f"{path}: {shown} has rank {a.shape[0]}; ranks from 1 to {MAX_RANK} are computed")
    return LowRankPair(a, b, scale)


def _read_gguf_adapter(path: Path, hf_config: Mapping[str, Any]) -> AdapterFiles:
    file = read_gguf(path)
    kind, adapter_type = file.metadata.get("general.type"), file.metadata.get("adapter.type")
    if kind != "adapter" or adapter_type != "lora":
        raise ModelFileError(
            f"{path}: general.type={printable(str(kind))}, adapter.type={printable(str(adapter_type))}: not a LoRA "
            "adapter; llama.cpp's convert_lora_to_gguf.py makes one"
        )
    if (name := file.architecture) not in ARCHITECTURES:
        raise UnsupportedModelError(f"{path}: architecture {printable(name)} is not known")
    if not _is_number(alpha := file.metadata.get("adapter.lora.alpha")):
        raise ModelFileError(f"{path}: adapter.lora.alpha={alpha!r} is not a number; convert the adapter again")
    matrices: dict[str, dict[str, WeightTensor]] = {}
    for stored in file.tensors:
        match = _GGUF_NAME.fullmatch(stored)
        if match is None:
            raise UnsupportedModelError(f"{path}: tensor '{printable(stored)}' is no lora_a or lora_b")
        info = file.tensors[stored]
        tensor = WeightTensor(stored, info.shape, info.format.name, file.rows(info))
        matrices.setdefault(match[1], {})[match[2]] = tensor
    pairs = {}
    architecture = architecture_of(file.metadata)
    for stored, found in matrices.items():
        pair = _pair(path, stored, found.get("a"), found.get("b"), 1.0, None)
        own = architecture.tensor_names.huggingface(stored)
        if own is None or "*" in own or ".ssm_" in stored:
            raise UnsupportedModelError(f"{path}: adapters of '{printable(stored)}' cannot be computed: train without")
        views = file_views(stored, pair.b.shape[0], architecture, hf_config)
        order = next((view.order for view in views if isinstance(view, Rows)), None)
        pairs[own] = LowRankPair(pair.a, pair.b, alpha / pair.rank if alpha else 1.0, order)
    tokens = file.metadata.get("adapter.alora.invocation_tokens", ())
    return AdapterFiles(path, pairs, (path,), _tokens(path, tokens))


def _tokens(path: Path, values: Any) -> tuple[int, ...]:
    if not isinstance(values, list | tuple) or not all(type(value) is int and value >= 0 for value in values):
        raise ModelFileError(f"{path}: invocation tokens {json.dumps(values, default=str)[:100]} are no token ids")
    return tuple(values)


# --- Values by patterns of module names, as PEFT's `rank_pattern` has them ------------------------
# Python's `re` goes back and tries again, which takes hours for a short pattern such as `(.+)+$x`. pydantic has Rust's
# regular expressions, whose time is linear in the name.

MAX_NAME_LEN = 1000
MAX_SECONDS = 1.0
"""Processor time for all patterns of a file. Names without special characters take none of it."""
_PLAIN = re.compile(r"[\w.-]+")


def values_of_modules(patterns: Mapping[str, float], modules: Collection[str]) -> dict[str, float]:
    """Return the value of the first pattern that each module's name matches, or that the end behind a dot does.

    Raises: ModelFileError for a pattern that takes too long, or is no regular expression of Rust's.
    """
    too_long = next((module for module in modules if len(module) > MAX_NAME_LEN), None)
    if too_long is not None:
        raise ModelFileError(f"'{printable(too_long, limit=80)}' is no module: the name has {len(too_long)} characters")
    if not patterns or not modules:
        return {}
    places = {pattern: place for place, pattern in enumerate(patterns)}
    first: dict[str, int] = {}
    for module in modules:
        if named := [places[end] for end in _ends(module) if end in places]:
            first[module] = min(named)
    end_s = time.thread_time() + MAX_SECONDS
    for pattern, place in places.items():
        if _PLAIN.fullmatch(pattern):
            continue
        matches = _matcher(pattern)
        for module in modules:
            if place < first.get(module, len(places)) and matches(module):
                first[module] = place
            if time.thread_time() > end_s:
                raise ModelFileError(f"the pattern '{printable(pattern, limit=80)}' takes too long: list the modules")
    values = [*patterns.values()]
    return {module: values[place] for module, place in first.items()}


def _ends(module: str) -> Iterator[str]:
    yield module
    yield from (module[place + 1 :] for place, character in enumerate(module) if character == ".")


def _matcher(pattern: str) -> Callable[[str], bool]:
    from typing import Annotated

    from pydantic import StringConstraints, TypeAdapter, ValidationError

    refusal = ModelFileError(
        f"'{printable(pattern, limit=80)}' is no pattern of modules: it is no regular expression, is too large, or"
        " looks around or back, which takes too long: list the modules"
    )
    if len(pattern) > MAX_NAME_LEN:
        raise refusal
    try:
        checker = TypeAdapter(Annotated[str, StringConstraints(pattern=rf"^(?:.*\.)?(?:{pattern})$")])
    except Exception:  # pydantic-core's SchemaError
        raise refusal from None

    def matches(module: str) -> bool:
        try:
            checker.validate_python(module)
        except ValidationError:
            return False
        return True

    return matches
