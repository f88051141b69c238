"""Model architectures: a file for each, named by `model_type`, readable top to bottom. Start at `llama.py`."""
