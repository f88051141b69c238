"""Executors: where the steps of the engine are computed."""
