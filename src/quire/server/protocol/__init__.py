"""Request and answer bodies as pydantic models: one file per group of routes; `fields.py` is shared."""
