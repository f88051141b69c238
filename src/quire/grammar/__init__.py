"""Forms of text as masks of tokens. Next to read: `compiler.py`."""
