"""Damaged files of models: small real ones of five kinds, with values of other types, pieces cut off and bytes changed.

Shared by `model_fuzz.py` and the tests. Each case is made of its seed alone, so that one can be made again.
"""

import json
import math
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from quire.runtime.adapter_layout import linear_shapes
from quire.weights.gguf_file import read_gguf
from quire.weights.sources import resolve_source
from quire.weights.weight_tensor import BLOCK_FORMATS
from quire_lessons.compare.adapters import write_random_adapter
from quire_workshop.cli.quantize import open_source
from quire_workshop.gguf.quantize import quantize_gguf
from quire_workshop.gguf.writer import TensorToWrite, key_value, write_gguf
from tests.cli.tiny_directory import CONFIG, make_tiny_directory, tensor_shapes
from tests.models.tiny_configs import TINY_CONFIGS, full_config

KINDS = ("gguf", "safetensors", "tokenizer", "config", "adapter")
FIELDS = {**CONFIG, "hidden_size": 64, "intermediate_size": 96}
RANK = 4
TOKENIZER_FILES = ("special_tokens_map.json", "vocab.json", "merges.txt", "added_tokens.json")
RAW = {"@digits@": "9" * 5000, "@exponent@": "1e400", "@deep list@": "[" * 50_000, "@deep object@": '{"a":' * 50_000}
"""Texts that stand in the place of these values in JSON, and that Python's encoder does not write."""
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**30, 0.0, 0.5, -0.5,
    1.5, 1e-320, 1e-30, 1e30, 1e308, math.nan, math.inf, -math.inf, "", "x", "0", "1", "\ud800", "\x00", "\x1b[2J",
    "x" * 100_000, "\u00b2", [], {}, [None], [[]], [0], [-1], ["x"], [1, 2, 3], {"x": 1}, {"0": "x"}, {"content": 1},
    *RAW,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A damaged model.

    Fields:
        kind: of `KINDS`.
        names: files and keys, one of which an error must have.
        how: the damage.
        family: model type of a configuration without weights.
    """

    kind: str
    path: Path
    names: tuple[str, ...]
    how: str
    family: str = ""


def make_models(directory: Path) -> None:
    """Write the models that cases are made from."""
    model = make_tiny_directory(directory / "hf", **FIELDS)
    generator, shapes = np.random.default_rng(0), tensor_shapes(FIELDS)
    weights = {name: generator.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, model / "model.safetensors")
    sampling = {"eos_token_id": [257], "bos_token_id": 256, "temperature": 0.7, "top_k": 20, "max_new_tokens": 50}
    (model / "generation_config.json").write_text(json.dumps(sampling))
    _split(model, directory / "shards")
    quantize_gguf(open_source(resolve_source(str(model))), directory / "model.gguf", "Q8_0")
    adapter = write_random_adapter(directory / "adapter", linear_shapes(FIELDS), RANK, 0)
    more = {
        "target_modules": ["q_proj"], "rank_pattern": {"k_proj": RANK}, "alpha_pattern": {"v_proj": 2}, "bias": "none",
        "use_rslora": False,
    }  # fmt: skip
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | more))
    _write_gguf_adapter(directory / "adapter.gguf")


def _split(model: Path, target: Path) -> None:
    """Copy a directory, with its weights in two files and their index."""
    shutil.copytree(model, target)
    weights = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(weights)}
    for shard in set(weight_map.values()):
        save_file({name: weights[name] for name in weights if weight_map[name] == shard}, target / shard)
    index = {"metadata": {"total_size": sum(value.nbytes for value in weights.values())}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_gguf_adapter(path: Path) -> None:
    values = {
        "general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 4.0,
    }  # fmt: skip
    width, tensors = FIELDS["hidden_size"], []
    for name, shape in (("lora_a", (RANK, width)), ("lora_b", (width, RANK))):
        data = np.ones(shape, np.float32).view(np.uint8)
        tensors.append(TensorToWrite(f"blk.0.attn_q.weight.{name}", shape, BLOCK_FORMATS["F32"], [data]))
    write_gguf(path, {key: key_value(key, value) for key, value in values.items()}, tensors)


def make_case(models: Path, directory: Path, kind: str, seed: str) -> Case:
    """Write a damaged model of a kind into a directory that is not there yet."""
    choices = random.Random(seed)
    return MAKERS[kind](models, directory, choices)


# --- Kinds ----------------------------------------------------------------------------------------


def _gguf(models: Path, directory: Path, choices: random.Random) -> Case:
    directory.mkdir()
    how = damage_gguf(models / "model.gguf", directory / "model.gguf", choices)
    return Case("gguf", directory / "model.gguf", ("model.gguf", *how), " ".join(how))


def _safetensors(models: Path, directory: Path, choices: random.Random) -> Case:
    name = choices.choice(("model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"))
    shutil.copytree(models / ("hf" if name == "model.safetensors" else "shards"), directory)
    damage = damage_json_file if name.endswith(".json") else damage_safetensors
    how = damage(directory / name, choices)
    return Case("safetensors", directory, (name, directory.name, *how), f"{name}: {' '.join(how)}")


def _tokenizer(models: Path, directory: Path, choices: random.Random) -> Case:
    shutil.copytree(models / "hf", directory)
    name = choices.choice((*("tokenizer.json",) * 3, *("tokenizer_config.json",) * 2, *TOKENIZER_FILES))
    settings: dict[str, Any] = {
        "added_tokens_decoder": {"256": {"content": "<s>", "special": True}, "257": {"content": "</s>"}},
        "additional_special_tokens": ["<s>"], "add_bos_token": True, "eot_token": "</s>",
        "tokenizer_class": "LlamaTokenizer",
    }  # fmt: skip
    if name in ("vocab.json", "merges.txt", "added_tokens.json"):
        settings = {"tokenizer_class": "GPT2Tokenizer"}
        vocab = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
        (directory / "tokenizer.json").unlink()
        (directory / "vocab.json").write_text(json.dumps(vocab))
        (directory / "merges.txt").write_text("#version: 0.2\n")
        (directory / "added_tokens.json").write_text('{"<s>": 256, "</s>": 257}')
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **settings}))
    (directory / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}')
    if name == "merges.txt":
        how: tuple[str, ...] = ("bytes",)
        (directory / name).write_bytes(damage_bytes(b"#version: 0.2\na b\n\xc4\xa0 a\n", choices))
    else:
        how = damage_json_file(directory / name, choices)
    return Case("tokenizer", directory, (name, directory.name, *how), f"{name}: {' '.join(how)}")


def _config(models: Path, directory: Path, choices: random.Random) -> Case:
    shutil.copytree(models / "hf", directory)
    name = choices.choice(("config.json",) * 4 + ("generation_config.json",))
    family = choices.choice(("", *TINY_CONFIGS)) if name == "config.json" else ""
    if family:
        fields = choices.choice(list(TINY_CONFIGS[family].values()))
        (directory / name).write_text(json.dumps(full_config(family, fields)))
    how = damage_json_file(directory / name, choices)
    return Case("config", directory, (name, directory.name, *how), f"{family} {name}: {' '.join(how)}", family=family)


def _adapter(models: Path, directory: Path, choices: random.Random) -> Case:
    name = choices.choice(("adapter_config.json", "adapter_model.safetensors", "adapter.gguf"))
    if name == "adapter.gguf":
        directory.mkdir()
        how = damage_gguf(models / name, directory / name, choices)
        return Case("adapter", directory / name, (name, *how), f"{name}: {' '.join(how)}")
    shutil.copytree(models / "adapter", directory)
    damage = damage_json_file if name.endswith(".json") else damage_safetensors
    how = damage(directory / name, choices)
    return Case("adapter", directory, (name, directory.name, *how), f"{name}: {' '.join(how)}")


MAKERS: dict[str, Callable[[Path, Path, random.Random], Case]] = {
    "gguf": _gguf, "safetensors": _safetensors, "tokenizer": _tokenizer, "config": _config, "adapter": _adapter,
}  # fmt: skip


# --- Damage ---------------------------------------------------------------------------------------


def damage_bytes(data: bytes, choices: random.Random, *, most: int | None = None) -> bytes:
    """Return bytes that are cut off, changed, doubled or left out. `most`: only the first ones are changed."""
    at = choices.randrange(min(len(data), most or len(data)))
    kind = choices.randrange(5)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([data[at] ^ 1 << choices.randrange(8)]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + choices.randbytes(9) + data[at + 9 :]
    if kind == 3:
        return data[:at] + data[at + choices.randrange(1, 9) :]
    return data[:at] + data[max(at - 9, 0) :]


def damage_json_file(path: Path, choices: random.Random) -> tuple[str, ...]:
    """Damage a file of JSON. Returns: the key, and what was done."""
    if choices.random() < 0.12:
        path.write_bytes(damage_bytes(path.read_bytes(), choices))
        return ("bytes",)
    text, *how = damage_json(json.loads(path.read_text()), choices)
    path.write_bytes(text)
    return tuple(how)


def damage_json(document: Any, choices: random.Random) -> tuple[bytes, str, str]:
    """Return the text of a document with another value at one place, the key, and what was done."""
    place, key = document, _key(document, choices)
    while isinstance(place[key], dict | list) and place[key] and choices.random() < 0.6:
        place = place[key]
        key = _key(place, choices)
    kind = choices.randrange(12)
    doubled = ""
    if kind == 0:
        del place[key]
        how = "left out"
    elif kind == 1 and isinstance(place, dict):
        doubled = f"{json.dumps(str(key))}: {json.dumps(choices.choice(VALUES[:20]))}, "
        place[key], how = ["@doubled@", place[key]], "twice"
    elif kind == 2 and isinstance(place, dict):
        place[f"{key}x"], how = place.pop(key), "renamed"
    else:
        place[key] = choices.choice(VALUES)
        how = f"= {str(place[key])[:40]!r}"
    text = json.dumps(document)
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    if doubled:
        name = json.dumps(str(key)) + ": "
        text = text.replace(f'{name}["@doubled@", ', doubled + f"{name}[", 1)
    return text.encode(), str(key), how


def _key(place: Any, choices: random.Random) -> Any:
    return choices.choice(list(place)) if isinstance(place, dict) else choices.randrange(len(place))


def damage_safetensors(path: Path, choices: random.Random) -> tuple[str, ...]:
    """Damage a safetensors file: its bytes, or its header. Returns: the key, and what was done."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    if choices.random() < 0.3:
        path.write_bytes(damage_bytes(data, choices, most=8 + length))
        return ("bytes",)
    header, key, how = damage_json(json.loads(data[8 : 8 + length]), choices)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    return key, how


GGUF_ITEMS: tuple[tuple[int, str, tuple[Any, ...]], ...] = (
    (0, "<B", (0, 1, 255)), (1, "<b", (-1, 3)), (2, "<H", (0, 65535)), (3, "<h", (-1, 5)),
    (4, "<I", (0, 1, 2, 3, 7, 2**31, 2**32 - 1)), (5, "<i", (-1, 0, 4)),
    (6, "<f", (0.0, -1.0, 0.5, 1e-30, 1e30, math.nan, math.inf)), (7, "<?", (False, True)),
    (10, "<Q", (0, 1, 2**63, 2**64 - 1)), (11, "<q", (-1, 8)), (12, "<d", (0.0, 1e308, math.nan)),
)  # fmt: skip


def gguf_value(choices: random.Random) -> tuple[bytes, str]:
    """Return a value of any type as a GGUF file has it, its type first, and its text."""
    kind = choices.randrange(16)
    if kind == 0:
        text = choices.choice(("", "x", "llama", "yarn", "\x00", "\x1b[2J", "x" * 70_000))
        return struct.pack("<IQ", 8, len(text)) + text.encode(), repr(text[:20])
    if kind == 1:
        count = choices.choice((0, 1, 2, 258, 2**40))
        return struct.pack("<IIQ", 9, 8, count) + (struct.pack("<Q", 1) + b"x") * min(count, 258), "[str]"
    type_id, code, values = choices.choice(GGUF_ITEMS)
    value = choices.choice(values)
    if kind > 7:
        return struct.pack("<I", type_id) + struct.pack(code, value), repr(value)
    count = choices.choice((0, 0, 1, 2, 3, 258, 2**40))
    items = struct.pack(code, value) * min(count, 258)
    return struct.pack("<IIQ", 9, type_id, count) + items, f"[{value!r}] × {count}"


EXTRA_KEYS = (
    "split.count", "split.no", "split.tensors.count", "general.alignment", "general.file_type", "general.sampling.temp",
    "general.sampling.top_k", "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.dimension_count",
    "llama.rope.scaling.original_context_length", "llama.attention.key_length", "llama.attention.value_length",
    "llama.attention.causal", "llama.attention.sliding_window", "llama.expert_count", "llama.expert_used_count",
    "llama.nextn_predict_layers", "llama.unknown", "tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.eot_token_id", "tokenizer.chat_template.x", "adapter.alora.invocation_tokens",
)  # fmt: skip


def damage_gguf(source: Path, target: Path, choices: random.Random) -> tuple[str, ...]:
    """Write a damaged GGUF file. Returns: the key, and what was done."""
    file = read_gguf(source)
    data = source.read_bytes()
    start = min(place.start for place in file.key_places.values())
    infos = max(place.stop for place in file.key_places.values())
    first = min(tensor.offset for tensor in file.tensors.values())
    kind = choices.randrange(20)
    if kind < 5:
        regions = ((0, first), (infos, first), (infos, first), (0, len(data)))
        begin, end = choices.choice(regions)
        target.write_bytes(data[:begin] + damage_bytes(data[begin:], choices, most=end - begin))
        return ("bytes",)
    keys = {key: data[place] for key, place in file.key_places.items()}
    key = choices.choice(list(keys) if kind < 15 else EXTRA_KEYS)
    if kind == 5:
        del keys[key]
        how = "left out"
    elif kind == 6:
        keys[f"{key} again"], how = keys[key], "twice"
    else:
        value, how = gguf_value(choices)
        keys[key] = struct.pack("<Q", len(key.encode())) + key.encode() + value
    described = sum(8 + len(name.encode()) + 4 + 8 * len(item.shape) + 4 + 8 for name, item in file.tensors.items())
    header = (
        data[: start - 8] + struct.pack("<Q", len(keys)) + b"".join(keys.values()) + data[infos : infos + described]
    )
    target.write_bytes(header + bytes(-len(header) % 32) + data[first:])
    return key, how
