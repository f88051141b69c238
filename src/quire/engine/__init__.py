"""Joins scheduler, executor and text: `LLMEngine.step`. Start at `llm_engine.py`."""
