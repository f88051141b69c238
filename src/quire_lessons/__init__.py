"""Lessons on the engine: comparisons, exercises, the tour of a prompt. Next to read: `verbs.py`, docs/learn."""
