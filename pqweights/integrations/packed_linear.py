"""The linear layer of a packed weight: few rows of inputs meet the codes, many meet rows that were decoded for them."""

from __future__ import annotations

import torch
from torch import Tensor

from pqweights.integrations.packed_products import multiplies, multiply
from pqweights.integrations.packed_rows import Matrix, buffer, decode_rows, share

# How many weights are decoded before they are multiplied. Products are fastest if they are large and shared by all
# threads; and this much memory (32 MB in BF16) is no burden.
DECODED_WEIGHTS = 1 << 24


def linear(matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias.

    matrix: W [outputs, columns]
    x: [..., columns], of the dtype and on the device of the result
    bias: [outputs], if there is one
    """
    columns, outputs = matrix[0].columns, sum(each.rows for each in matrix)
    flat = x.reshape(-1, columns)
    if not len(flat):
        return x.new_empty(*x.shape[:-1], outputs)
    if bias is not None and (bias.shape != (outputs,) or bias.device != x.device):
        bias = bias.to(x.device).expand(outputs)
    product = multiply if multiplies(matrix, flat) else _multiply_decoded
    return product(matrix, flat, bias).view(*x.shape[:-1], outputs)


def _multiply_decoded(matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias, for x [rows, columns]: decode some rows of W at a time, which torch then multiplies."""
    columns, outputs = x.shape[1], sum(each.rows for each in matrix)
    step, found = max(1, DECODED_WEIGHTS // columns), []
    decoded = buffer(x.dtype, x.device, min(step, outputs) * columns).view(-1, columns)
    for first in range(0, outputs, step):
        some = decoded[: outputs - first]

        def decode(start: int, stop: int, first: int = first, some: Tensor = some) -> None:
            decode_rows(matrix, first + start, first + stop, out=some[start:stop])

        share(decode, matrix, rows=len(some), device=x.device)
        part = None if bias is None else bias[first : first + len(some)]
        with torch.autocast(x.device.type, enabled=False):
            found.append(torch.nn.functional.linear(x, some, part))
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)
