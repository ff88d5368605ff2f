"""The error of the weights of a master or an export against those of the original, measured by decoding both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from export_decoders import Floats, export_weight, master_weight, values_of

from pqweights.checkpoint.source import open_local, read_config
from pqweights.convert.manifest import read_manifest
from pqweights.errors import SourceError
from pqweights.planning.layout import DECODE, INTEGER, QUANTIZE
from pqweights.runtime.packages import package, quiet
from pqweights.targets import get_target, target_name
from pqweights.targets.target import MLX


class RelativeError(NamedTuple):
    """||W - W'||^2 / ||W||^2 over a set of weights, and how many weights it has; the error of an empty set is None."""

    relative_mse: float | None
    weights: int


class Errors(NamedTuple):
    """The errors of a folder.

    integers: over the weights that an export stores as integers.
    master: over all weights that the master quantizes.
    """

    integers: RelativeError
    master: RelativeError


def relative_mse(original: Path, folder: Path) -> Errors:
    """Measure the error of all weights of a master or an export that differ from the original, by decoding them.

    For an export to MLX, mlx-lm renames and reshapes the original's weights first.

    Raises SourceError for a weight that the original does not have under the same name and shape.
    """
    manifest = read_manifest(folder)
    target = target_name(manifest.made_by.get("target"))
    if target is not None and get_target(target).runtime == MLX:
        originals = mlx_weights(original, read_config(folder) or {})
    else:
        originals = {tensor.name: functools.partial(values_of, tensor) for tensor in open_local(original).tensors}
    decode = master_weight(folder) if manifest.kind == "master" else export_weight(folder)
    sums = {INTEGER: [0.0, 0.0, 0], QUANTIZE: [0.0, 0.0, 0], DECODE: [0.0, 0.0, 0]}  # error, energy, weights
    for tensor in manifest.tensors:
        if tensor.action not in sums:
            continue
        weight = originals[tensor.name]() if tensor.name in originals else None
        if weight is None or weight.shape != tensor.shape:
            raise SourceError(
                f"{original}: tensor {tensor.name!r}: expected shape {list(tensor.shape)} as in {folder}, found "
                f"{'none' if weight is None else list(weight.shape)}"
            )
        difference = weight - decode(tensor.name)
        for place, summand in enumerate((_squares(difference), _squares(weight), weight.size)):
            sums[tensor.action][place] += summand
    everything = [sum(column) for column in zip(*sums.values(), strict=True)]
    return Errors(_relative(*sums[INTEGER]), _relative(*everything))


def _relative(error: float, energy: float, weights: float) -> RelativeError:
    return RelativeError(error / energy if energy else None, int(weights))


def _squares(values: Floats) -> float:
    return float(np.einsum("ij,ij->", *[values.reshape(-1, values.shape[-1])] * 2, dtype=np.float64))


def mlx_weights(folder: Path, config: Mapping[str, Any]) -> dict[str, Callable[[], Floats]]:
    """Return the weights of an original, by the names that mlx-lm gives them when it renames, stacks and splits them.

    config: the configuration of the export, which mlx-lm understands.
    """
    mx, utils = package("mlx.core", "mlx"), package("mlx_lm.utils", "mlx")
    with quiet():
        plain = {key: value for key, value in config.items() if not key.startswith("quantization")}
        model, _ = utils.load_model(folder, lazy=True, strict=False, model_config=plain)
    parameters = dict(package("mlx.utils", "mlx").tree_flatten(model.parameters()))

    def values(array: Any) -> Floats:
        return np.array(array.astype(mx.float32))

    return {name: functools.partial(values, array) for name, array in parameters.items()}
