"""Open Inference Protocol, version 2, over HTTP/1.1 for local applications."""

from __future__ import annotations

from collections.abc import Mapping

BINARY_SIZE = "binary_data_size"
DATATYPES: Mapping[str, str] = {
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "int32": "INT32",
    "int64": "INT64",
    "uint8": "UINT8",
}
"""Protocol datatype by NumPy dtype."""
