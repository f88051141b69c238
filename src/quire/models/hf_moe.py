"""`read_experts`: the fields of a mixture of experts in a `config.json`.

Next to read: `qwen3_moe.py`; `layers/experts.py` for the layer.
"""

from typing import Any

from quire.errors import ModelFileError
from quire.models.hf_config import HFConfigReader

TRAINING_FIELDS = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
"""Of losses and noise, which are not used."""


def read_experts(reader: HFConfigReader, count: str = "num_experts") -> dict[str, Any]:
    """Read `num_experts`, in the config's field `count`, and `top_k`.

    Raises: ModelFileError where a token cannot use so many of the experts.
    """
    for name in TRAINING_FIELDS:
        reader.raw(name)
    num_experts, top_k = reader.integer(count), reader.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise ModelFileError(
            f"the model's config has num_experts_per_tok={top_k}, more than {count}={num_experts}: "
            f"set num_experts_per_tok to at most {num_experts}"
        )
    return {"num_experts": num_experts, "top_k": top_k}
