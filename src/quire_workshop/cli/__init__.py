"""The verbs `bench`, `diff`, `quantize` and `tune`."""
