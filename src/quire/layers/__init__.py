"""Layers that at least three models share: linear, attention, rotary, norms, embedding, head, and groups of ranks."""
