"""One file per group of routes; each has a `router` that `app.py` includes."""
