"""Qwen3.5, with experts, which sees images: its language model, without images.

Next to read: `hf_config.py`.
"""

from quire.models.hf_config import without_images
from quire.models.qwen3_5_moe_text import Qwen35MoeForCausalLM

ARCHITECTURES = {"Qwen3_5MoeForConditionalGeneration": without_images(Qwen35MoeForCausalLM, "qwen3_5_moe_text")}
