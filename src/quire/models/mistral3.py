"""Ministral 3, which sees images: its language model, without images.

Next to read: `hf_config.py`.
"""

from quire.models.hf_config import without_images
from quire.models.ministral3 import Ministral3ForCausalLM

ARCHITECTURES = {
    "Mistral3ForConditionalGeneration": without_images(Ministral3ForCausalLM, "ministral3", refuses_head=True)
}
