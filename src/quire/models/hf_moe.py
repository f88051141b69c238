"""`read_experts` and `read_sparse_layers`: the fields of a mixture of experts in a `config.json`.

Next to read: `qwen3_moe.py`; `layers/experts.py` for the layer.
"""

from collections.abc import Sequence
from typing import Any

from quire.errors import ModelFileError
from quire.models.hf_config import HFConfigReader

TRAINING_FIELDS = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")
"""Of losses and noise, which are not used."""
MAX_EXPERTS = 10_000
"""A config with more is corrupted; building as many would look like a hang."""


def read_sparse_layers(reader: HFConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Read which layers have experts instead of an MLP. Raises: ModelFileError for layers that are not there."""
    period, dense = reader.integer("decoder_sparse_step", 1), reader.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(index) is int and 0 <= index < num_layers for index in dense):
        raise ModelFileError(
            f"the model's config has mlp_only_layers={str(dense)[:60]}, which is not a list of layers from 0 to "
            f"{num_layers - 1}"
        )
    return tuple(index not in dense and (index + 1) % period == 0 for index in range(num_layers))


def read_experts(reader: HFConfigReader, names: Sequence[str] = ("num_experts", "num_local_experts")) -> dict[str, Any]:
    """Read `num_experts`, under one of its `names`, and `top_k`.

    Raises: ModelFileError where the names disagree, or a token cannot use as many of the experts.
    """
    for name in TRAINING_FIELDS:
        reader.raw(name)
    found = {name: reader.optional_integer(name, maximum=MAX_EXPERTS) for name in names}
    counts = {name: value for name, value in found.items() if value is not None}
    if len(set(counts.values())) > 1:
        shown = " and ".join(f"{name}={value}" for name, value in counts.items())
        raise ModelFileError(f"the model's config has {shown}, two names of one number: remove the wrong one")
    count = next(iter(counts), names[0])
    num_experts, top_k = reader.integer(count), reader.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise ModelFileError(
            f"the model's config has num_experts_per_tok={top_k}, more than {count}={num_experts}: "
            f"set num_experts_per_tok to at most {num_experts}"
        )
    return {"num_experts": num_experts, "top_k": top_k}
