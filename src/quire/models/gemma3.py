"""Gemma 3 of 4, 12 and 27 B parameters, which see images: their language model, without images.

Next to read: `hf_config.py`.
"""

from typing import Any

from quire.models.gemma3_text import Gemma3ForCausalLM
from quire.models.hf_config import without_images

DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
}  # fmt: skip
"""Of Gemma 3; the configs name what differs."""
ARCHITECTURES = {"Gemma3ForConditionalGeneration": without_images(Gemma3ForCausalLM, "gemma3_text", **DEFAULTS)}
