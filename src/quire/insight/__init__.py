"""Readers of the engine that show how inference works. They compute nothing that the engine computes."""
