"""`TorchGroup`: ranks that share layers op by op, through torch.distributed: NCCL between GPUs, else gloo.

Plans have native collectives in shared memory instead. The process groups here are an engine's own, not torch's default
one, so that a process can have several engines.
Next to read: `layers/group.py` for the protocol, `ranks.py` for the steps.
"""

import datetime
import math
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray

from quire.config import EngineConfig
from quire.layers.group import share_vocabulary
from quire.runtime.links import TIMEOUT, Links, lost_rank

LOOPBACK = "127.0.0.1"
CONNECT = datetime.timedelta(seconds=20)
"""Longest wait for the connection of a rank that is there: one that dies before it connects holds up no rank longer."""
dist: Any = torch.distributed
"""Of which PyTorch types only a part."""


class TorchGroup:
    """A rank of a `Group` whose tensors are on `device`. Sums have the same bits on all ranks.

    Tokens and decisions, which the CPU has, always travel by gloo, so that no rank waits for its GPU.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        vocab_size: int,
        *,
        uses_nccl: bool | None = None,
    ) -> None:
        """Join the group; returns when all ranks have. Raises: EngineDeadError if they do not.

        `store`: where the ranks find each other. `uses_nccl`: None, if the device is a GPU; each rank must then have
        another one.
        """
        self.rank, self.size, self._vocab_size, self._keeps_shares = rank, size, vocab_size, False
        uses_nccl = device.type == "cuda" and dist.is_nccl_available() if uses_nccl is None else uses_nccl
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._devices = CONNECT, [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        with lost_rank():
            store.set(f"rank {rank}", "is there")
            store.wait([f"rank {other}" for other in range(size)], TIMEOUT)
            self._of_cpus = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, options)
            self._of_cpus._set_default_timeout(TIMEOUT)
            self._of_tensors = self._of_cpus
            if uses_nccl:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = TIMEOUT
                self._of_tensors = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        self.all_reduce(torch.zeros(1, device=device))  # NCCL connects with the first sum

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Group`. Raises: EngineDeadError if a rank is lost."""
        x = x.contiguous()
        with lost_rank():
            self._of_tensors.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Group`. Raises: EngineDeadError if a rank is lost."""
        if self._keeps_shares:
            return x
        parts = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(self.size)]
        with lost_rank():
            self._of_tensors.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, -1)

    def broadcast(self, values: NDArray[np.int32]) -> None:
        """See `TensorGroup`."""
        with lost_rank():
            self._of_cpus.broadcast(torch.from_numpy(values), 0).wait()

    def likeliest(self, head: Callable[[], torch.Tensor]) -> list[int | None] | None:
        """See `TensorGroup`: the first of the largest of what the ranks find in their shares.

        `head`: its `all_gather` keeps the rank's share [S, rows of a rank].
        """
        rows, num_rows = share_vocabulary(self._vocab_size, self)
        self._keeps_shares = True
        try:
            logits = head().float()
        finally:
            self._keeps_shares = False
        if logits.shape[1] != num_rows:
            return None
        logits[:, rows.size :] = -math.inf  # padding
        values, ids = logits.max(-1)
        best = self.all_gather(torch.stack((values.double(), ids.double() + rows.start), -1)).cpu()
        found = best.view(len(best), self.size, 2).numpy()  # [S, size, 2]
        of_best = found[np.arange(len(found)), found[..., 0].argmax(1)]  # [S, 2]; NaN counts as the largest
        return [int(token_id) if math.isfinite(value) else None for value, token_id in of_best.tolist()]

    def give_up(self) -> None:
        """End all waiting of this rank for others, which gloo does by itself when their processes end."""
        if self._of_tensors is not self._of_cpus:
            self._of_tensors.abort()


def make_store() -> Any:
    """Return the store at which all ranks of this machine join; ranks that wait there fail when it is dropped."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def join(config: EngineConfig, rank: int, port: int) -> Links:
    """Return a rank's links to the others of this machine. `port`: of the store.

    Raises: EngineDeadError if the others do not join.
    """
    size, device = config.options.tensor_parallel_size, torch.device(config.device)
    with lost_rank():
        store = dist.TCPStore(LOOPBACK, port, timeout=TIMEOUT)
    return Links(group=TorchGroup(store, rank, size, device, config.model.vocab_size))
