"""The verbs `compare`, `learn` and `tour`."""
