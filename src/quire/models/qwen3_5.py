"""Qwen3.5, dense, which sees images: its language model, without images.

Next to read: `hf_config.py`.
"""

from quire.models.hf_config import without_images
from quire.models.qwen3_5_text import Qwen35ForCausalLM

ARCHITECTURES = {"Qwen3_5ForConditionalGeneration": without_images(Qwen35ForCausalLM, "qwen3_5_text")}
