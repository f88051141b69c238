"""Writes the tables of `docs/models.md` from the model files, the formats, the GGUF cases and the tiny configs.

The text around the tables is written by hand. `python -m tests.models.page` writes the page; with `--check` it exits 1
if the page is stale.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import gguf
import torch

from quire.kernels.instruction import Packing
from quire.kernels.tracing import NotTraceableError
from quire.models.hf_rope import PARAMETERS
from quire.models.registry import model_types
from quire.runtime.loader import make_model
from quire.runtime.plan.lower import lower
from quire.runtime.plan.packed_weights import BY_DTYPE, PACKED_DIRECTLY
from quire.runtime.plan.trace import trace_model
from quire.weights.weight_tensor import FLOATS, GGUF_FORMATS
from tests.cli.reference import write_page
from tests.models.test_gguf_families import CASES
from tests.models.test_quantized_directories import CASES as QUANTIZED
from tests.models.tiny_configs import TINY_CONFIGS, full_config
from tests.workshop.gguf.test_export import CASES as WRITTEN

PAGE = Path("docs/models.md")
HEADER = (
    "`model_type`", "models", "architectures", "GGUF", "`quire quantize`", "planned",
    "configs compared with Transformers",
)  # fmt: skip
FORMATS_HEADER = ("weights in", "formats", "in memory, as a plan", "compared with")


def render() -> str:
    """Return the table of model files, the kinds of rotary angles, and the table of formats."""
    models, formats = _table([HEADER, *map(_row, model_types())]), _table([FORMATS_HEADER, *_format_rows()])
    kinds = ", ".join(f"`{kind}`" for kind in PARAMETERS)
    return f"\n{models}\n\nRotary angles (`rope_type`): {kinds}.\n\n{formats}\n\n"


def _table(rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (rows[0], ("---",) * len(rows[0]), *rows[1:]))


def _format_rows() -> list[tuple[str, ...]]:
    """Return the formats of weights, those of one kind of file and memory in a row."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for name in (item.name for item in GGUF_FORMATS.values()):
        held = "compute type" if name in FLOATS else "as stored" if name in PACKED_DIRECTLY else "8 bit per 32"
        found.setdefault(("GGUF", held, "values of the `gguf` package"), []).append(f"`{name}`")
    experts: dict[str, Any] = {"MXFP4": ("MXFP4", None)}  # of gpt-oss: test_experts.py
    for name, (stored, _) in (QUANTIZED | experts).items():
        held = f"as `{stored}`" if stored in PACKED_DIRECTLY else "8 bit per 32"
        key = ("Hugging Face directory", held, "Transformers' logits with the decoded weights")
        found.setdefault(key, []).append(name.replace(", ", " "))
    return [(kind, ", ".join(names), held, checked) for (kind, held, checked), names in found.items()]


def is_planned(hf_config: dict[str, Any]) -> bool:
    """Return whether a plan holds the model of this config."""
    with torch.device("meta"):
        model: Any = make_model(hf_config)
    try:
        lower(trace_model(model, (0,) * model.config.num_layers), _packing_of)
    except NotTraceableError:
        return False
    return True


def _packing_of(parameter: Any) -> Packing:
    return Packing.whole(len(parameter), BY_DTYPE["float32"])


def _row(model_type: str) -> tuple[str, ...]:
    module = importlib.import_module(f"quire.models.{model_type}")
    summary = str(module.__doc__).partition("\n")[0]
    configs = TINY_CONFIGS[model_type].values()
    formats = dict.fromkeys(gguf.MODEL_ARCH_NAMES[arch] for of, _, arch, _ in CASES.values() if of == model_type)
    is_written = model_type in {written for written, _ in WRITTEN.values()}
    planned = all(is_planned(full_config(model_type, fields)) for fields in configs)
    return (
        f"`{model_type}`", summary.rstrip("."), ", ".join(f"`{name}`" for name in module.ARCHITECTURES),
        ", ".join(f"`{name}`" for name in formats) or "–", "yes" if is_written else "–", "yes" if planned else "no",
        str(len(configs)),
    )  # fmt: skip


def main(arguments: list[str]) -> int:
    """Write the page, or check it with `--check`; returns the exit code."""
    return write_page(PAGE, render(), "tests.models.page", arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
