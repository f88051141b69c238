"""`EagerForward`: a model run op by op in PyTorch: the reference, and the way of GPUs.

Next to read: `forward.py` for the protocol, `kernels/paged_attention/` for what the batch's tables are.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.config import EngineConfig
from quire.events import OpTime
from quire.layers.forward_batch import ForwardBatch
from quire.runtime.batch import RequestStates, StepLayout
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.loader import load_model
from quire.weights.checkpoint import Checkpoint
from quire.weights.progress import Progress


def make_eager_forward(
    config: EngineConfig, checkpoint: Checkpoint, cache: CacheEngine, progress: Progress | None
) -> "EagerForward":
    """Load the model onto its device. Raises: as `load_model`. Mutates: torch's threads and current CUDA device."""
    device = torch.device(config.device)
    torch.set_num_threads(config.threads_per_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return EagerForward(load_model(config, checkpoint, progress), cache, config.scheduler.block_size, device)


class EagerForward:
    """The model itself, on any device."""

    def __init__(self, model: Any, cache: CacheEngine, block_size: int, device: torch.device) -> None:
        self.model = model
        self._cache = cache
        self._block_size = block_size
        self._device = device
        self._hidden = torch.empty(0)
        self.times_ops = False  # only a plan has instructions

    @torch.inference_mode()
    def run(self, layout: StepLayout, states: RequestStates, *, only_likeliest: bool) -> list[int | None] | None:
        """See `Forward`."""
        batch = build_batch(layout, states, self._cache, self._block_size, self._device)
        self._hidden = self.model(batch.token_ids, batch)
        return None

    def hidden(self, first: int, last: int) -> Any:
        """See `Forward`."""
        return self._as_given(self._hidden[first:last].float())

    def take_op_times(self) -> tuple[OpTime, ...]:
        """See `Forward`."""
        return ()

    @torch.inference_mode()
    def logits(self, rows: NDArray[np.int32]) -> Any:
        """See `Forward`."""
        index = torch.from_numpy(rows.astype(np.int64)).to(self._device)
        return self._as_given(self.model.compute_logits(self._hidden.index_select(0, index)).float())

    def _as_given(self, values: torch.Tensor) -> Any:
        return values.numpy() if self._device.type == "cpu" else values


def build_batch(
    layout: StepLayout, states: RequestStates, cache: CacheEngine, block_size: int, device: torch.device
) -> ForwardBatch:
    """Return the tensors that a model reads op by op."""
    rows = layout.rows.astype(np.int64)
    starts, query_lens = layout.starts.astype(np.int64), layout.counts.astype(np.int64)
    seq_lens = starts + query_lens

    token_rows = np.repeat(rows, query_lens)
    positions = np.arange(len(token_rows)) + np.repeat(seq_lens - np.cumsum(query_lens), query_lens)
    block_columns, offsets = np.divmod(positions, block_size)
    longest_table = -(-int(seq_lens.max()) // block_size)

    def place(array: NDArray[np.integer]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

    return ForwardBatch(
        token_ids=place(states.tokens[token_rows, positions].astype(np.int64)),
        positions=place(positions),
        block_tables=tuple(place(table[rows, :longest_table]) for table in states.block_tables),
        slot_mapping=tuple(
            place(table[token_rows, block_columns] * np.int64(block_size) + offsets) for table in states.block_tables
        ),
        kv_caches=cache.kv_caches,
        layer_groups=cache.layer_groups,
        query_lens_list=tuple(query_lens.tolist()),
        seq_lens_list=tuple(seq_lens.tolist()),
    )
