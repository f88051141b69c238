"""One file per architecture, named by `model_type`, readable top to bottom. Start at `llama.py`."""
