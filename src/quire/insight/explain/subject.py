"""`open_subject`: the name of a model to its configuration, with the headers of its weights where there are some.

A `config.json` alone is enough: its path, a directory that holds only that, a hub id, or a built-in preset.
Next to read: `rank_model.py`.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.errors import ModelError, ModelNotFoundError, nearest
from quire.files import read_json_object
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.hub import fetch_from_hub, parse_hub_id
from quire.weights.progress import Progress
from quire.weights.sources import ModelFiles, resolve_source

PRESETS: Mapping[str, Mapping[str, Any]] = json.loads((Path(__file__).parent / "presets.json").read_text())
"""Configurations by name, as the models' authors publish them."""
STORED = "quantization_config"
"""Field that says how the published weights are stored: metadata of a checkpoint without any."""
WEIGHT_SUFFIXES = (".safetensors", ".gguf")


def open_subject(name: str, progress: Progress | None = None) -> Checkpoint:
    """Return the checkpoint of a model; without weights its `tensors` are empty.

    A hub id that is not cached costs its config.json only. Raises: ModelError.
    """
    path = Path(name).expanduser()
    presets = {known.lower(): known for known in PRESETS}
    if has_config_alone(name):
        if not path.exists():
            return _of_config(name, PRESETS[presets[name.lower()]], "preset", path)
        return _of_config(name, read_json_object(path / "config.json" if path.is_dir() else path), "local", path)
    hub = None if path.exists() else parse_hub_id(name)
    if hub is not None and hub.file is None and hub.quantization is None:
        try:
            files = resolve_source(name, offline=True)
        except ModelError:
            snapshot = fetch_from_hub(replace(hub, file="config.json"))
            origin = f"hub:{hub.repository}@{snapshot.name}"
            return _of_config(name, read_json_object(snapshot / "config.json"), origin, snapshot)
        return open_checkpoint(files)
    try:
        return open_checkpoint(resolve_source(name, progress=progress))
    except ModelNotFoundError as error:
        close = nearest(name.lower(), presets)
        raise ModelNotFoundError(f"{error}; or a preset of explain: {', '.join(PRESETS)}{close}") from None


def has_config_alone(name: str) -> bool:
    """Return whether a name is that of a preset, of a `config.json`, or of a directory that has no weights."""
    path = Path(name).expanduser()
    if not path.exists():
        return name.lower() in {known.lower() for known in PRESETS}
    if path.is_dir():
        has_weights = any(item.suffix in WEIGHT_SUFFIXES for item in path.iterdir())
        return (path / "config.json").is_file() and not has_weights
    return path.suffix == ".json"


def _of_config(name: str, config: Mapping[str, Any], origin: str, path: Path) -> Checkpoint:
    # How a checkpoint is stored does not matter where none is read.
    fields = dict(config)
    stored = fields.pop(STORED, None)
    return Checkpoint(ModelFiles(name, path, "hf", origin), fields, metadata={STORED: stored} if stored else {})
