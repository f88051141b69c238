"""Kernels for GPUs, in Triton: one module per group of operations, compiled at start, run in the interpreter by tests."""
