"""The linear layer of a packed weight: few rows of inputs meet the codes, many meet rows that were decoded for them."""

from __future__ import annotations

import torch
from torch import Tensor

from pqweights.integrations.packed_products import multiplies, multiply
from pqweights.integrations.packed_rows import Matrix, buffer, decode_rows, share


def linear(matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias.

    matrix: W [outputs, columns]
    x: [..., columns], of the dtype and on the device of the result
    bias: [outputs], if there is one
    """
    columns, outputs = matrix[0].columns, sum(each.rows for each in matrix)
    flat = x.reshape(-1, columns)
    product = multiply if multiplies(matrix, flat) else _multiply_decoded
    return product(matrix, flat, bias).view(*x.shape[:-1], outputs)


def _multiply_decoded(matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias, for x [rows, columns]: decode rows of W that fit a cache, and multiply them there."""
    out = x.new_empty(len(x), sum(each.rows for each in matrix))

    def multiply_some(start: int, stop: int) -> None:
        with torch.inference_mode():  # set for each thread
            chunk = buffer(x.dtype, x.device, (stop - start) * x.shape[1]).view(-1, x.shape[1])
            decode_rows(matrix, start, stop, out=chunk)
            some = None if bias is None else bias[start:stop]
            with torch.autocast(x.device.type, enabled=False):
                out[:, start:stop] = torch.nn.functional.linear(x, chunk, some)

    share(multiply_some, matrix, device=x.device)
    return out
