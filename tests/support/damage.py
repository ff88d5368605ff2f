"""Damage to finished results: one bit of a stored tensor is another."""

from __future__ import annotations

from pathlib import Path

from pqweights.checkpoint.header import StoredTensor, parse_header


def stored_in(folder: Path) -> dict[str, StoredTensor]:
    """The stored tensors of the safetensors files of a folder."""
    found = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        tensors, _ = parse_header(path.name, len(data), lambda at, count, data=data: data[at : at + count])
        found |= {tensor.name: tensor for tensor in tensors}
    return found


def flip(folder: Path, name: str, at: int = 0) -> str:
    """Change the lowest bit of byte `at` of a stored tensor, and return what messages say of it.

    at: may be negative, from the end of the tensor
    """
    tensor = stored_in(folder)[name]
    path = folder / tensor.file
    data = bytearray(path.read_bytes())
    data[tensor.offset + at % tensor.byte_count] ^= 1
    path.write_bytes(data)
    return f"{tensor.file}: tensor '{name}'"
