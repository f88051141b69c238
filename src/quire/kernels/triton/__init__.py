"""Kernels for GPUs, in Triton: one module per group of operations, compiled at start, interpreted by tests."""
