"""The facts about a model's folder that need no loading: configuration, limits, bytes, parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint.interrupted import describe_interrupted, is_interrupted
from pqweights.checkpoint.master import QUANT_METHOD
from pqweights.checkpoint.names import CONFIG_FILE, MANIFEST_FILE
from pqweights.checkpoint.readers import element_count
from pqweights.checkpoint.source import open_local, read_config
from pqweights.errors import MasterError, SourceError
from pqweights.exports.target import COMPRESSED_TENSORS, MLX, TORCHAO, TRANSFORMERS
from pqweights.results.inspect import inspect

MASTER = "master"
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")  # the last is MPT's


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A model's folder, as its config.json describes it.

    kind: MASTER, or the runtime that loads it (exports/target.py); TRANSFORMERS for everything else.
    config: the content of config.json.
    context: the most tokens that the model takes at once; None if config.json does not say.
    vocabulary: how many token ids the model knows; None if config.json does not say.
    """

    path: Path
    kind: str
    config: dict[str, Any]
    context: int | None
    vocabulary: int | None


@dataclass(frozen=True)
class Size:
    """The size of a model's weight files.

    bytes: of all files that hold weights.
    parameters: all parameters; None if the format is one whose parameters pqweights cannot count.
    bits_per_weight: over the weights that the manifest lists as quantized; None without a manifest.
    """

    bytes: int
    parameters: int | None
    bits_per_weight: float | None

    @property
    def bits_per_parameter(self) -> float | None:
        """The bits of all files divided by the number of all parameters."""
        return 8 * self.bytes / self.parameters if self.parameters else None


def read_folder(path: Path) -> Folder:
    """Read the configuration of a model's folder.

    Raises SourceError if the folder does not hold a model, MasterError if a run into it was interrupted.
    """
    if is_interrupted(path):
        raise MasterError(f"{path}: {describe_interrupted(path)}")
    if not path.exists():
        raise SourceError(f"{path}: no such folder")
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
    limits = (_positive(text, key) for key in CONTEXT_KEYS)
    return Folder(
        path=path,
        kind=kind,
        config=config,
        context=next((limit for limit in limits if limit), None),
        vocabulary=_positive(text, "vocab_size"),
    )


def _positive(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else None


def size(path: Path) -> Size:
    """Read the bytes and parameters of a folder from its headers.

    Raises MasterError if the manifest is damaged.
    """
    if (path / MANIFEST_FILE).is_file():
        totals = inspect(path).totals
        return Size(totals.output_bytes, totals.weights, totals.bits_per_weight)
    try:
        checkpoint = open_local(path)
    except SourceError:  # pickled, or quantized by another tool: the runtime decides whether it loads that
        files = list(path.glob("*.safetensors")) or list(path.glob("*.bin"))
        return Size(sum(file.stat().st_size for file in files), None, None)
    return Size(checkpoint.weight_file_bytes, sum(element_count(tensor) for tensor in checkpoint.tensors), None)
