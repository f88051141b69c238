"""Codebooks of GGUF's IQ formats: each entry is 4 or 8 values of a block.

`codebooks.json` has facts of the formats, from ggml-common.h of ggml: per format the values of an entry, the values
that indices stand for, and the entries as indices, packed lowest bits first and written in base 85.
`tests/weights/test_dequantize.py` compares what they decode to with the gguf package. Must not know how blocks refer to
entries. Next to read: `native/weights/decode.h`.
"""

import base64
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np


@functools.cache
def _tables() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("codebooks.json").read_text(encoding="ascii"))
    return found


@functools.cache
def packed_codebook(format_name: str) -> np.ndarray | None:
    """Return the entries as int8 codes of their values (`native/weights/decode.cpp`); None for other formats.

    Shapes: `[entries, 4 or 8]`.
    """
    table = _tables().get("IQ1_S" if format_name == "IQ1_M" else format_name) if format_name.startswith("IQ") else None
    if table is None:
        return None
    packed = np.frombuffer(base64.b85decode("".join(table["indices"])), np.uint8)
    bits = (len(table["values"]) - 1).bit_length()
    indices = np.unpackbits(packed, bitorder="little").reshape(-1, bits) @ (1 << np.arange(bits))
    codes = np.array([4, 0, 6] if format_name.startswith("IQ1") else range(0, 16, 2), np.int8)
    return codes[indices.reshape(-1, table["width"])]
