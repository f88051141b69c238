"""`describe_apart` and `plan_apart`: a model is traced in a process of its own, so that no rank needs PyTorch.

PyTorch takes more memory than a rank of a small model. The process traces every rank's share and keeps the plans in the
cache directory, where the ranks read them, as they do on a later start. Where plans are not kept each rank traces.
Next to read: `runtime/plan/stored_plan.py` for the files, `rank_processes.py` for the ranks.
"""

import logging
import os
import signal
import subprocess
import sys

import msgspec

from quire.config import EngineConfig, EngineOptions
from quire.errors import QuireError
from quire.parallel.frames import Failure
from quire.parallel.rank_child import end_with
from quire.parallel.rank_messages import StartRank
from quire.runtime.links import RankMemory
from quire.runtime.plan.stored_plan import ConfigSource, missing_plans, plan_directory, store_plan
from quire.runtime.ranks import make_group
from quire.weights.checkpoint import Checkpoint

logger = logging.getLogger("quire.parallel")
_NOT_KEPT = (
    "the plans of %d ranks cannot be kept in %s: each rank imports PyTorch and traces the model, which takes some"
    " 200 MB of memory more per rank; QUIRE_CACHE_DIR chooses another directory"
)


class PlanRanks(msgspec.Struct, tag="plan", array_like=True):
    """Keep the plans of these ranks. `start`: the message with which one of them would start."""

    start: StartRank
    ranks: list[int]


def describe_apart(options: EngineOptions, checkpoint: Checkpoint) -> None:
    """Keep the model's description, if it is to be kept and is not, without a model's code in this process.

    Raises: as `ConfigSource.make`.
    """
    task = ConfigSource.of(options, checkpoint)
    if task.lacks_model():
        _run(task)


def plan_apart(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Keep the plans of all ranks that are to be kept and are not. Raises: as `trace_program`."""
    if not (missing := missing_plans(config, checkpoint)):
        return
    files = checkpoint.files
    start = StartRank(0, config, [], 0, str(files.path.absolute()), files.kind, files.name)
    if _run(PlanRanks(start, missing)) and (missing := missing_plans(config, checkpoint)):
        logger.warning(_NOT_KEPT, len(missing), plan_directory())


def _run(message: ConfigSource | PlanRanks) -> bool:
    """Run a task in a process of its own, and wait for it. Returns: True if it ended well. Raises: its QuireError.

    After a process that was killed, or failed otherwise, the ranks do the work, and raise what it raised.
    """
    command = [sys.executable, "-P", "-m", "quire.parallel.plan_process", str(os.getpid())]
    done = subprocess.run(command, input=msgspec.msgpack.encode(message), stdout=subprocess.PIPE, check=False)
    if done.returncode:
        logger.warning("the process that traces the model ended with status %d: each rank traces it", done.returncode)
    elif done.stdout:
        raise msgspec.msgpack.decode(done.stdout, type=Failure).revive()
    return not done.returncode


def main() -> int:
    """Entry point: run the task on stdin; write a `Failure` to stdout if it raises. Returns: the exit code."""
    end_with(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller gets it too, and ends this process
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    task = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=ConfigSource | PlanRanks)
    try:
        task.make() if isinstance(task, ConfigSource) else _keep_plans(task)
    except QuireError as error:
        answer.write(msgspec.msgpack.encode(Failure.of(error)))
        answer.flush()
    except Exception:
        return 1
    return 0


def _keep_plans(task: PlanRanks) -> None:
    config, checkpoint = task.start.config, task.start.open_checkpoint()
    memory = RankMemory.of(config)
    for rank in task.ranks:
        links = memory.links(rank, 0)
        group = make_group(config.model.vocab_size, links.exchange)
        store_plan(config.on_rank(rank), checkpoint, config.scheduler.layer_groups, group, links)


if __name__ == "__main__":
    sys.exit(main())
