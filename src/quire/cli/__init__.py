"""The `quire` command: Click, lazy groups. Knows no tensors. Start at `main.py`."""
