"""Executors: who runs the workers."""
