"""Comparisons: the same requests through the same engine with one thing switched.

`run` is the interface for the command line and for the web page's Lab. Next to read: `results.py`, `batching.py`.
"""

import importlib

from quire.errors import ConfigError, nearest
from quire_lessons.compare.results import Comparison, Progress, RunSettings
from quire_lessons.compare.rig import limited_memory

COMPARISONS = {
    "cache": "no KV cache, KV cache",
    "batching": "static, dynamic and continuous batching",
    "kv": "contiguous, buddy and paged allocation of the KV cache",
    "ladder": "one workload with one technique more at a time, from naive recomputation to 4 bits",
    "speculation": "no drafts and drafts, by workload",
    "adapters": "the base model, one LoRA adapter, and one per request",
    "attention": "KV cache of MHA, GQA, MQA, MLA and a sliding window",
}
"""Name → the modes that it compares; its module has the same name."""


def run(
    name: str, settings: RunSettings | None = None, progress: Progress = lambda stage, done, total: None
) -> Comparison:
    """Run one comparison, within a share of the memory that is available.

    Raises: ConfigError, ModelError, CapacityError; ComparisonError if outputs differ.
    """
    if name not in COMPARISONS:
        raise ConfigError(f"no comparison '{name}'{nearest(name, COMPARISONS)}: it is one of {', '.join(COMPARISONS)}")
    module = importlib.import_module(f"quire_lessons.compare.{name}")
    with limited_memory():
        comparison: Comparison = module.compare(settings or RunSettings(), progress)
    return comparison
