"""Names of compute types → torch's types. The names and their sizes are in `config.DTYPES`."""

import torch

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Every name of `config.DTYPES`."""
