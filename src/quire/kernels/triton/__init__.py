"""Kernels for GPUs in Triton. Only `runtime/device/` imports them: Triton is installed where PyTorch for a GPU is.

No kernel takes an integer at run time. Sizes and strides are constants of the model, lengths lie in device memory, and
no grid depends on them. So nothing is compiled during a request, and any step fits a captured graph.
"""
