"""`quantize`: fp32 values to stored weights, GGUF's quantised blocks and plain floats: the opposite of `decode`.

Must not know files or models. Next to read: `dequantize.py`; `native/weights/quantize.h` for the blocks.
"""

import numpy as np

from quire._native import quantize_rows
from quire.errors import ModelFileError
from quire.weights.block_formats import BLOCK_FORMATS, row_bytes
from quire.weights.weight_tensor import to_bf16

PLAIN = {"F32": np.float32, "F16": np.float16}
LARGEST_SCALE = 65504.0


def quantize(
    values: np.ndarray, format_name: str, importance: np.ndarray | None = None, *, num_threads: int = 1
) -> np.ndarray:
    """Encode fp32 rows, `importance` weighting the squared errors of each column.

    Shapes: values `[rows, columns]`, importance `[columns]` -> uint8 `[rows, row_bytes]`.
    Raises: ModelFileError for NaN, infinity or values too large for a scale in fp16.
    """
    values = np.ascontiguousarray(values, np.float32)
    largest = float(np.abs(values).max(initial=0.0))
    if not largest <= LARGEST_SCALE and format_name not in ("F32", "BF16"):
        raise ModelFileError(f"a weight is {largest}, more than the {LARGEST_SCALE} that {format_name} can hold")
    if format_name in PLAIN:
        return values.astype(PLAIN[format_name]).view(np.uint8).reshape(len(values), -1)
    if format_name == "BF16":
        return to_bf16(values).view(np.uint8).reshape(len(values), -1)
    out = np.empty((len(values), row_bytes(BLOCK_FORMATS[format_name], values.shape[1])), np.uint8)
    num_rows, num_columns = values.shape
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    quantize_rows(
        format_name,
        values.ctypes.data,
        num_rows,
        num_columns,
        out.ctypes.data,
        0 if weights is None else weights.ctypes.data,
        num_threads,
    )
    return out
