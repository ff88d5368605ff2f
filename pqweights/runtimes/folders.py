"""What a model's folder says before anything is loaded: configuration, limits, bytes, parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint.master import QUANT_METHOD
from pqweights.checkpoint.names import CONFIG_FILE, MANIFEST_FILE
from pqweights.checkpoint.readers import element_count
from pqweights.checkpoint.source import open_local, read_config
from pqweights.errors import SourceError
from pqweights.exports.target import COMPRESSED_TENSORS, MLX, TORCHAO, TRANSFORMERS
from pqweights.results.inspect import inspect

MASTER = "master"
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")  # the last is MPT's


@dataclass(frozen=True)
class Folder:
    """A model's folder. kind: master, or the runtime that it is for (exports/target.py); transformers for whatever that takes by itself.

    context: the most tokens that the model takes at once; vocabulary: how many ids it knows; None where it does not say.
    """

    path: Path
    kind: str
    config: dict[str, Any]
    context: int | None
    vocabulary: int | None


@dataclass(frozen=True)
class Size:
    """Of the files that hold the weights. None where the weights are in a format whose parameters we cannot count.

    bits_per_parameter: over everything in the files; bits_per_weight: over the weights that a manifest has as quantized.
    """

    bytes: int
    parameters: int | None
    bits_per_weight: float | None

    @property
    def bits_per_parameter(self) -> float | None:
        """All bytes over all parameters."""
        return 8 * self.bytes / self.parameters if self.parameters else None


def read_folder(path: Path) -> Folder:
    """Configuration, and what follows from it.

    Raises SourceError for a folder that is no model.
    """
    config = read_config(path)
    if config is None:
        raise SourceError(f"{path}: expected a model folder, found no {CONFIG_FILE} in it")
    settings = config.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    kinds = {QUANT_METHOD: MASTER, "torchao": TORCHAO, "compressed-tensors": COMPRESSED_TENSORS}
    kind = kinds.get(str(method), TRANSFORMERS)
    if method is None and "quantization" in config:
        kind = MLX
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    limits = [_count(text, key) for key in CONTEXT_KEYS]
    return Folder(path, kind, config, next((n for n in limits if n), None), _count(text, "vocab_size"))


def _count(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else None


def size(path: Path) -> Size:
    """Bytes and parameters, from the headers.

    Raises MasterError for a damaged manifest.
    """
    if (path / MANIFEST_FILE).is_file():
        totals = inspect(path).totals
        return Size(totals["output_bytes"], totals["weights"], totals["bits_per_weight"])
    try:
        checkpoint = open_local(path)
    except SourceError:  # pickled, or quantized by others: the runtime will tell whether it takes that
        files = list(path.glob("*.safetensors")) or list(path.glob("*.bin"))
        return Size(sum(file.stat().st_size for file in files), None, None)
    return Size(checkpoint.weight_file_bytes, sum(element_count(tensor) for tensor in checkpoint.tensors), None)
