"""Decides in integers which tokens run next and which blocks they own. Never imports torch. Start at `scheduler.py`."""
