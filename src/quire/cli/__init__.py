"""The `quire` command: Click groups whose verbs are imported when they are used. Knows no tensors.

Importing this package imports nothing else, so that `quire --help` stays instant.
Next to read: `main.py`, then `options.py`.
"""
