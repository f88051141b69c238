"""Messages between rank 0 and the processes of the other ranks. Next to read: `frames.py`, `rank_processes.py`."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.adapter import Adapter
from quire.config import EngineConfig
from quire.parallel.frames import SentError
from quire.transfers import TransferReport
from quire.types import SchedulerOutput
from quire.weights.sources import ModelFiles

if TYPE_CHECKING:
    from quire.weights.checkpoint import Checkpoint


class StartRank(msgspec.Struct, array_like=True):
    """The first message, through the socket: the model to load, and the rank's place in the memory that ranks share.

    Fields:
        cpus: the only CPUs that the process may use; empty: any.
        num_spins: see `native/ranks/exchange.h`.
        port: where ranks that run op by op join; 0: the ranks have a plan.
        model_path, model_kind, model_name: see `ModelFiles`.
    """

    rank: int
    config: EngineConfig
    cpus: list[int]
    num_spins: int
    model_path: str
    model_kind: str
    model_name: str
    port: int = 0

    @property
    def files(self) -> ModelFiles:
        """The files of the model."""
        return ModelFiles(self.model_name, Path(self.model_path), self.model_kind, "local")

    def open_checkpoint(self) -> "Checkpoint":
        """Open the model's files. Raises: ModelFileError."""
        from quire.weights.checkpoint import Checkpoint, open_checkpoint  # NumPy, which may not start threads before

        if self.config.options.load_format == "dummy":
            return Checkpoint(self.files, self.config.model.hf_config)
        return open_checkpoint(self.files)


class Step(msgspec.Struct, array_like=True):
    """Message in shared memory: compute this step.

    `yielded`: ids and tokens of steps since the last; `wanted`: adapters to read beside the steps.
    """

    output: SchedulerOutput
    yielded: tuple[tuple[int, dict[str, tuple[int, ...]]], ...] = ()
    wanted: tuple[Adapter, ...] = ()


STOP = b"\0"
"""Sent by rank 0 before it closes the socket: write the last blocks of the disk tier, then end the process."""


class RankLoaded(msgspec.Struct, tag="loaded", array_like=True):
    """The rank has its share of the model. `stored`: cache group and digest of each block in its disk tier."""

    stored: set[tuple[int, bytes]] = set()


class BlocksMoved(msgspec.Struct, tag="moved", array_like=True):
    """Report of the rank's transfers at the end of a step."""

    step_id: int
    report: TransferReport


class RankFailed(msgspec.Struct, tag="failed", array_like=True):
    """The rank cannot load, or failed in a step; its process ends."""

    failure: SentError


FromRank = RankLoaded | RankFailed | BlocksMoved
