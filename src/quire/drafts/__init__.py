"""Drafts: guesses of a request's next tokens, which a step verifies all at once. Start with `drafting.py`."""
