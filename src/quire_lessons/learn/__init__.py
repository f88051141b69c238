"""Exercises of docs/learn: each answer is computed by the engine, each program runs in it. Start with `exercise.py`."""
