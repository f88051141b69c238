"""The bodies of requests and answers, as pydantic models: one file per group of routes; `fields.py` is shared."""
