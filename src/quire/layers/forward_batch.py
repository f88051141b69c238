"""`ForwardBatch`: everything a layer needs to know of a step beside the hidden states. An argument, never a global.

Built by `runtime/batch.py` from a `SchedulerOutput`; read by `layers/attention.py`.
Letters: T tokens in the step, R requests, S rows that need logits, N blocks, B tokens per block,
L layers, K KV heads, D head size, M longest block table.
"""

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class ForwardBatch:
    """One step's flat ragged batch: no padding; request r owns tokens query_start_loc[r] … query_start_loc[r+1]-1.

    Requests with one new token (decodes) come first.

    Shapes: token_ids, positions [T]; query_start_loc [R+1]; seq_lens [R]; block_tables: per KV cache group
        [R, M]; slot_mapping: per group [T]; logit_rows [S]; kv_caches: per layer [N, 2, B, K, D].
    Dtypes: token_ids, positions, slot_mapping, logit_rows int64; query_start_loc, seq_lens, block_tables int32;
        kv_caches the KV type.
    Units: seq_lens in tokens after this step; slot = block id * B + offset in the block.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slot_mapping: tuple[torch.Tensor, ...]
    logit_rows: torch.Tensor
    kv_caches: tuple[torch.Tensor, ...]
    layer_groups: tuple[int, ...]
    """Per layer: the index of its KV cache group."""
    query_lens_list: tuple[int, ...]
    """Host copy of the number of new tokens per request."""
    seq_lens_list: tuple[int, ...]
    """Host copy of seq_lens."""
    block_size: int
