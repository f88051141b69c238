"""`load_reference`: a model as Hugging Face Transformers computes it, beside which Quire's is put.

Next to read: `models/registry.py`.
"""

from pathlib import Path
from typing import Any

from quire.errors import ConfigError, UnsupportedModelError
from quire.extras import install_command
from quire.lazy_torch import torch


def load_reference(path: Path) -> Any:
    """Return the model of Transformers in fp32, from a directory or a GGUF file.

    Raises: ConfigError without Transformers; UnsupportedModelError if it cannot load the model.
    """
    try:
        import transformers
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise ConfigError(f"--ref hf needs Transformers: {install_command('hf')}") from error
    disable_progress_bar()  # type: ignore[no-untyped-call]
    place: dict[str, Any] = {"gguf_file": path.name} if path.is_file() else {}
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent if path.is_file() else path, dtype=torch.float32, attn_implementation="eager", **place
        )
    except (OSError, ValueError, KeyError, NotImplementedError, ImportError) as error:
        reason = str(error).partition(". ")[0]  # its advice on installations follows
        raise UnsupportedModelError(f"Transformers cannot load {path.name}: {reason}") from error
    return model.eval()
