"""`ForwardBatch`: everything a layer reads of a step beside the hidden states. An argument, never a global.

Built by `runtime/batch.py` from a `SchedulerOutput`; read by `layers/attention.py`.
Letters: T tokens in the step, R requests, N blocks, B tokens per block, K KV heads, D head size,
M longest block table.
"""

from dataclasses import dataclass

from quire.lazy_torch import Tensor


@dataclass(slots=True)
class ForwardBatch:
    """Flat ragged batch of a step, without padding: the tokens of the requests one after another.

    Requests with one new token (decodes) come first.

    Shapes: token_ids, positions [T]; block_tables: per KV cache group [R, M]; slot_mapping: per group [T]; kv_caches:
        per layer [N, 2, B, K, D]; layer_groups: per layer the index of its KV cache group.
    Dtypes: token_ids, positions, slot_mapping int64; block_tables int32; kv_caches the KV type.
    Units: slot = block id * B + offset in the block; query_lens_list: new tokens per request; seq_lens_list: tokens
        per request after this step.
    """

    token_ids: Tensor
    positions: Tensor
    block_tables: tuple[Tensor, ...]
    slot_mapping: tuple[Tensor, ...]
    kv_caches: tuple[Tensor, ...]
    layer_groups: tuple[int, ...]
    query_lens_list: tuple[int, ...]
    seq_lens_list: tuple[int, ...]
