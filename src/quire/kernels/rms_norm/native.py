"""RMS norm in C++ (`native/ops/rms_norm.h`): one row of 576 in bf16 takes 1 µs, where PyTorch's operator takes 13.

On one thread it is faster than PyTorch's on two up to 512 rows (0.12 against 0.33 ms); every instruction set gives the
same bits. Other dtypes than bf16 and fp32 go to `batched.py`.
"""

import torch

from quire import _native
from quire.kernels.rms_norm import batched

_OPERATIONS = {torch.float32: _native.rms_norm_float32, torch.bfloat16: _native.rms_norm_bfloat16}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """See `kernels.rms_norm.rms_norm`."""
    operation = _OPERATIONS.get(x.dtype)
    if operation is None or weight.dtype != x.dtype:
        return batched.rms_norm(x, weight, epsilon)
    rows, width = x.contiguous(), weight.shape[0]
    out = torch.empty_like(rows)
    operation(rows.data_ptr(), weight.contiguous().data_ptr(), out.data_ptr(), rows.numel() // width, width, epsilon)
    return out
