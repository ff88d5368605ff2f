"""mlx's floating modes (mxfp4, mxfp8, nvfp4): small floats with a byte of scale per group, rounded by mlx itself.

Formats: OCP microscaling specification 1.0; NVIDIA's nvfp4 without its scale per tensor, as mlx_lm.convert writes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pqweights.dtypes import from_float32, to_float32
from pqweights.kernels.groups import Groups

# mlx takes up to 76 bytes of temporary memory for a weight.
WEIGHTS_AT_ONCE = 1 << 17


@dataclass(frozen=True)
class FloatRule:
    """A mode of mlx. `Groups.scales` are the bytes of the scales, as numbers."""

    kind: str
    bits: int
    group_size: int
    name: str = "mlx"

    def quantize(self, values: npt.NDArray[np.float32]) -> Groups:
        """See integers.Rule."""
        groups = values.reshape(-1, self.group_size)
        codes = np.empty(groups.shape, dtype=np.uint8)
        scales = np.empty(len(groups), dtype=np.float32)
        energies, errors = np.empty(len(groups)), np.empty(len(groups))
        for first in range(0, len(groups), WEIGHTS_AT_ONCE // self.group_size):
            part = slice(first, first + WEIGHTS_AT_ONCE // self.group_size)
            raw = from_float32(groups[part].reshape(-1), "BF16").view(np.uint16).reshape(groups[part].shape)
            weights = mx.array(raw).view(mx.bfloat16)
            packed, found = mx.quantize(weights, group_size=self.group_size, bits=self.bits, mode=self.kind)[:2]
            as_bytes = np.array(packed).view(np.uint8)
            if self.bits == 4:
                as_bytes = np.stack([as_bytes & 15, as_bytes >> 4], axis=-1)
            codes[part] = as_bytes.reshape(codes[part].shape)
            scales[part] = np.array(found).reshape(-1)
            difference = groups[part] - self._decoded(packed, found)
            energies[part] = np.einsum("ij,ij->i", groups[part], groups[part], dtype=np.float64)
            errors[part] = np.einsum("ij,ij->i", difference, difference, dtype=np.float64)
        return Groups(codes, scales, np.zeros(len(groups), dtype=np.float32), energies, errors)

    def decode(self, groups: Groups) -> npt.NDArray[np.float32]:
        """See integers.Rule."""
        codes = groups.codes
        if self.bits == 4:
            codes = codes[:, ::2] | (codes[:, 1::2] << np.uint8(4))
        packed = mx.array(np.ascontiguousarray(codes).view(np.uint32))
        return self._decoded(packed, mx.array(groups.scales.astype(np.uint8)[:, None]))

    def _decoded(self, packed: mx.array, scales: mx.array) -> npt.NDArray[np.float32]:
        values = mx.dequantize(packed, scales, group_size=self.group_size, bits=self.bits, mode=self.kind)
        raw = np.array(values.astype(mx.bfloat16).view(mx.uint16))
        return to_float32(raw.view(np.uint8).reshape(-1), "BF16").reshape(raw.shape)
