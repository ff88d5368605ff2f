"""Masters that stay packed: they compute what the decoded model computes, in the size of the codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from building import computed
from known_architectures import Architecture

import pqweights
from pqweights.checkpoint.readers import EncodedTensor
from pqweights.checkpoint.source import open_local

# transformers cuts or joins some of their weights as it loads them; these are decoded.
REARRANGED = ("GteConfig", "NomicBertConfig", "JinaEmbeddingsV3Config", "HrmTextConfig")


def open_master(folder: Path, **options: Any) -> Any:
    """Load a master with the only implementation of experts that packed weights have."""
    return pqweights.load_model(folder, experts_implementation="eager", **options).eval()


def memory(model: Any) -> tuple[int, int]:
    """Return the bytes of packed and of ordinary parameters and buffers."""
    from pqweights.integrations.packed import PackedTensor

    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}.values()
    packed = sum(tensor.stored_bytes for tensor in tensors if isinstance(tensor, PackedTensor))
    plain = sum(tensor.numel() * tensor.element_size() for tensor in tensors if not isinstance(tensor, PackedTensor))
    return packed, plain


def stored_bytes(folder: Path) -> int:
    """Return the bytes of the codes and norms of a master."""
    return sum(
        part.byte_count
        for tensor in open_local(folder).tensors
        if isinstance(tensor, EncodedTensor)
        for part in tensor.parts
    )


def check_packed(about: Architecture, folder: Path) -> None:
    """Every quantized weight stays packed, and the output is that of the decoded model."""
    from pqweights.integrations.packed import PackedTensor

    decoded, packed = (open_master(folder, dtype="float32", packed=each) for each in (False, True))
    in_codes, plain = memory(packed)
    expected = computed(about, decoded)
    # The matrices are the same, but torch may add up products in another order for fewer rows.
    assert np.abs(computed(about, packed) - expected).max() <= 1e-5 * np.abs(expected).max()
    if about.config in REARRANGED:
        assert packed.hf_quantizer.decoded_weights != () and in_codes < stored_bytes(folder)
        return
    assert packed.hf_quantizer.decoded_weights == ()
    assert in_codes == stored_bytes(folder)
    quantized = {name for name, tensor in packed.named_parameters() if isinstance(tensor, PackedTensor)}
    kept = {
        id(tensor): tensor.numel() * tensor.element_size()
        for name, tensor in [*decoded.named_parameters(remove_duplicate=False), *decoded.named_buffers()]
        if name not in quantized
    }
    assert plain <= sum(kept.values())
