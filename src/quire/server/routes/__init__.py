"""Routes: a file per group; `app.py` includes the `router` of each."""
