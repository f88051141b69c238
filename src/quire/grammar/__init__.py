"""Structured outputs: grammars as masks of tokens. Next to read: `compiler.py`."""
