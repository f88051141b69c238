"""Tools around the engine: measuring, comparing with Transformers, tuning, writing models. Next to read: `verbs.py`."""
