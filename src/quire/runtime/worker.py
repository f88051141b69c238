"""`Worker`: one device's share of the engine: model, KV memory, sampler and the runner that ties them.

Next to read: `model_runner.py`.
"""

import torch

from quire.config import EngineConfig
from quire.runtime.cache_engine import CacheEngine
from quire.runtime.loader import load_model
from quire.runtime.model_runner import ModelRunner
from quire.sampling.sampler import Sampler
from quire.types import SchedulerOutput, StepResult
from quire.weights.checkpoint import Checkpoint
from quire.weights.progress import Progress


class Worker:
    """Loads the model onto its device and runs steps on it."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
        """Mutates: torch's number of threads and current CUDA device, once for the process.

        Raises: ConfigError, ModelFileError, UnsupportedModelError.
        """
        torch.set_num_threads(config.hardware.num_threads)
        device = torch.device(config.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.config = config
        self.model = load_model(config, checkpoint, progress)
        self.cache = CacheEngine(config)
        self.sampler = Sampler(config.model.vocab_size, device)
        self.runner = ModelRunner(config, self.model, self.cache, self.sampler)

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        """Run one step."""
        return self.runner.run(output)
