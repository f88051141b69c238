"""Logits to tokens. Start at `sampler.py`."""
