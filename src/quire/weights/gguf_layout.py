"""`file_views`: where the values of a file's tensor lie in Hugging Face's. Source: llama.cpp's converter.

Next to read: `gguf_architectures.py`; `gguf_recurrent.py` for layers with state.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from quire.errors import ModelFileError, printable
from quire.weight_map import Offset, Rows, Transpose, View
from quire.weights.gguf_architectures import Architecture
from quire.weights.gguf_names import is_rotary_projection, rotary_row_order


def file_views(name: str, num_rows: int, architecture: Architecture, config: Mapping[str, Any]) -> tuple[View, ...]:
    """Return the views of a file's tensor, by its GGUF name, that are Hugging Face's tensor.

    The elements of a rotated pair are side by side in a file, and norms have their 1. GPT-2's matrices have outputs as
    rows there, GPT-NeoX's queries lie before keys and values instead of head by head. Raises: ModelFileError.
    """
    is_fused = architecture.model_type == "gpt_neox" and ".attn_qkv." in name
    if is_fused or (architecture.reorders_pairs and is_rotary_projection(name)):
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        if num_rows % (3 * size if is_fused else size):
            raise ModelFileError(f"the rows of '{printable(name)}' are not whole heads of {size}")
        if not is_fused:
            return (Rows(rotary_row_order(num_rows, size)),)
        return (Rows(np.arange(num_rows).reshape(3, -1, size).swapaxes(0, 1).reshape(-1)),)
    if architecture.model_type == "gpt2" and name.startswith("blk."):
        return (Transpose(),)
    has_offset = architecture.norm_offset and name.endswith("norm.weight") and "ssm_norm" not in name
    return (Offset(-architecture.norm_offset),) if has_offset else ()
