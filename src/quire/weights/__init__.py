"""Checkpoint sources and formats to named tensors. Start at `checkpoint.py`."""
