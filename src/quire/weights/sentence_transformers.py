"""`read_pooling`: the pooling that the files of sentence-transformers name, beside a model's config.json.

It must not know how vectors are computed. Next to read: `checkpoint.py`.
"""

from pathlib import Path
from typing import Any

from quire.errors import ModelFileError, UnsupportedModelError
from quire.weights.model_files import read_json, read_json_object

POOLINGS = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}


def read_pooling(directory: Path) -> dict[str, Any]:
    """Read `modules.json`'s pooling and normalisation under the names of `PoolingParams`; empty if there is none.

    Raises: ModelFileError; UnsupportedModelError for another pooling or further modules, such as a dense layer.
    """
    path = directory / "modules.json"
    if not path.is_file():
        return {}
    modules = read_json(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelFileError(f"{path}: not a list of modules; fetch it again")
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if "Pooling" not in kinds:
        return {}
    if unknown := set(kinds) - {"Transformer", "Pooling", "Normalize"}:
        raise UnsupportedModelError(f"{path}: embeddings with modules {', '.join(sorted(unknown))} are not supported")
    config = read_json_object(directory / str(modules[kinds.index("Pooling")].get("path")) / "config.json")
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        raise UnsupportedModelError(
            f"{path}: pooling by {', '.join(chosen)} is not supported, only {', '.join(POOLINGS)}"
        )
    return {"pooling": POOLINGS[chosen[0]], "normalize": "Normalize" in kinds}
