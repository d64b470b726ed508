"""The files of a recorded run, as `docs/recording.md` has them: a safetensors file a rank, and the manifest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .errors import DeclarationError

MANIFEST = "recording.json"
# Types of a safetensors file, by the name of numpy's or torch's type, and the format's name in the manifest.
TYPES = {
    "float32": ("F32", "f32"),
    "bfloat16": ("BF16", "bf16"),
    "float16": ("F16", "fp16"),
}


def type_of(array: Any) -> str:
    """Returns the name of an array's type, without its library."""
    return str(array.dtype).removeprefix("torch.")


def format_of(array: Any, what: str) -> str:
    """Returns the name of an array's format in the manifest."""
    name = type_of(array)
    if name not in TYPES:
        raise DeclarationError(f"{what} is in {name}; a recording holds bf16, fp16 and f32")
    return TYPES[name][1]


def codes(array: Any) -> bytes:
    """Returns the little-endian codes of an array of numpy or torch."""
    if type(array).__module__.partition(".")[0] == "torch":
        array = array.detach().cpu().contiguous()
        if type_of(array) == "bfloat16":
            array = array.view(__import__("torch").int16)
        array = array.numpy()
    return np.ascontiguousarray(array).tobytes()


def write_rank(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    """Writes a rank's tensors as a safetensors file, and returns its digest."""
    header: dict[str, Any] = {
        "__metadata__": {f"seamproof.{key}": str(value) for key, value in metadata.items()}
    }
    data, end = [], 0
    for name, array in tensors.items():
        data.append(codes(array))
        start, end = end, end + len(data[-1])
        form = TYPES[type_of(array)][0]
        header[name] = {"dtype": form, "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.blake2b(digest_size=32)
    with path.open("wb") as file:
        for part in (len(text).to_bytes(8, "little"), text, *data):
            file.write(part)
            digest.update(part)
        _settle(file)
    return digest.hexdigest()


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Writes the manifest: under another name, then synchronised, then renamed, so that it is whole or not there."""
    hidden = directory / ".recording.json"
    with hidden.open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=2)
        _settle(file)
    hidden.rename(directory / MANIFEST)


def _settle(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
