"""Gemma 4, which sees images and hears: its language model, without images and sound.

Next to read: `hf_config.py`.
"""

from quire.models.gemma4_text import Gemma4ForCausalLM
from quire.models.hf_config import without_images

ARCHITECTURES = {"Gemma4ForConditionalGeneration": without_images(Gemma4ForCausalLM, "gemma4_text")}
