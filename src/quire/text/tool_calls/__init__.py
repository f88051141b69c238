"""Calls of tools in what a model writes. Next to read: `parser.py`."""
