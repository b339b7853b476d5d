"""Safetensors files, written straight from tensors and hashed on the way.

The library's own writer copies all tensors once more and holds the interpreter's lock until the disk has them: beside
training, the lock must be free.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

TYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
CHUNK_BYTES = 1 << 24


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[str, int]:
    """Write contiguous CPU tensors as a safetensors file; returns its SHA-256 (hex) and size when it is on disk.

    Raises:
        OSError: it could not be written.
    """
    # Large elements first, so that each tensor lies at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": TYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for data in chain([memoryview(start)], (_bytes(tensor) for _, tensor in ordered)):
            for position in range(0, len(data), CHUNK_BYTES):
                part = data[position : position + CHUNK_BYTES]
                digest.update(part)
                file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest(), len(start) + offset


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
