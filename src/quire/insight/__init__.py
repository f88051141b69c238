"""Readers of what the engine did and of what it would do: traces, views, predictions. They compute no tensors."""
