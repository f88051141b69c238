"""Plans: a model's forward, traced once and replayed by one native call per step. Next to read: `trace.py`."""
