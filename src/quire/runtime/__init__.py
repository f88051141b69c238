"""Tensors: KV memory, batches, the model runner, the worker. Start at `model_runner.py`."""
