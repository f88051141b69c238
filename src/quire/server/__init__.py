"""The OpenAI-compatible server: HTTP in this process, the engine in a child. Start at `run.py`."""
