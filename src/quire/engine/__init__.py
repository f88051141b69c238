"""Joins scheduler, executor and text: `LLMEngine.step`. Start at `llm_engine.py`."""

from quire.runtime.openmp import limit_spinning

# Here, because nothing of the engine imports torch before this line.
limit_spinning()
