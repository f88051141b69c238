"""Readers of what the engine did and of what it would do: traces, views, comparisons. They compute no tensors."""
