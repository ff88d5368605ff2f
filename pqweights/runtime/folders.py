"""The facts about a model's folder that need no loading: configuration, limits, bytes, parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint.gguf.file import is_gguf, open_gguf
from pqweights.checkpoint.names import CONFIG_FILE, MANIFEST_FILE, QUANT_METHOD
from pqweights.checkpoint.readers import element_count
from pqweights.checkpoint.source import open_local, read_config
from pqweights.checkpoint.unfinished import describe_interrupted, is_interrupted, journal_line
from pqweights.errors import MasterError, SourceError
from pqweights.models import text_config
from pqweights.results.inspect import inspect
from pqweights.runtime.expressions import slow_expression
from pqweights.runtime.packages import Refused, package, quiet
from pqweights.targets.target import COMPRESSED_TENSORS, MLX, TORCHAO, TRANSFORMERS

MASTER = "master"
LLAMA_CPP = "llama.cpp"
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")  # the last is MPT's


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A model's folder, as its config.json describes it; or a GGUF file, as its metadata do.

    runtime: MASTER, or the runtime that loads it (targets/target.py); TRANSFORMERS for everything else.
    config: the content of config.json; empty for GGUF.
    context: the most tokens that the model takes at once; None if the files do not say.
    vocabulary: how many token ids the model knows; None if the files do not say.
    """

    path: Path
    runtime: str
    config: dict[str, Any]
    context: int | None
    vocabulary: int | None

    @property
    def stated_in(self) -> str:
        """Where its files state these limits, for messages."""
        return "metadata" if self.runtime == LLAMA_CPP else CONFIG_FILE


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


def read_model(path: Path) -> Folder:
    """Read the configuration of a model's folder, or the metadata of a GGUF file: everything that open_model loads.

    Raises SourceError if there is no language model, MasterError if a run into the folder was interrupted.
    """
    if is_interrupted(path) or not is_gguf(path):
        return read_folder(path)
    contents = open_gguf(path)
    encodes = contents.metadata.get(f"{contents.architecture}.attention.causal") is False
    if encodes or contents.number(f"{contents.architecture}.decoder_block_count") or not contents.tensors:
        raise SourceError(
            f"{path}: its model, {contents.architecture or 'without a name'}, is not a causal language model, which "
            "predicts the next token"
        )
    return Folder(path=path, runtime=LLAMA_CPP, config={}, context=contents.context, vocabulary=contents.vocabulary)


def read_folder(path: Path) -> Folder:
    """Read the configuration of a model's folder, whatever its weights are.

    Raises SourceError if the folder does not hold a model, MasterError if a run into it was interrupted.
    """
    if is_interrupted(path):
        raise MasterError(f"{path}: {describe_interrupted(journal_line(path))}")
    if not path.exists():
        raise SourceError(f"{path}: no such folder")
    config = read_config(path)
    if config is None:
        raise SourceError(f"{path}: expected a model folder, found no {CONFIG_FILE} in it")
    stated = config.get("quantization_config")
    settings = stated if isinstance(stated, dict) else {}
    method = settings.get("quant_method")
    runtimes = {QUANT_METHOD: MASTER, "torchao": TORCHAO, "compressed-tensors": COMPRESSED_TENSORS}
    runtime = runtimes.get(str(method), TRANSFORMERS)
    if runtime == COMPRESSED_TENSORS:
        refuse_transforms(path, settings)
    if runtime != MASTER and (expression := slow_expression(settings)) is not None:
        raise SourceError(
            f"{path}: {CONFIG_FILE}: quantization_config: matching names with {expression!r:.80} may take forever, or "
            "it is not a regular expression: write it without nested repetitions"
        )
    if method is None and "quantization" in config:
        runtime = MLX
    text = text_config(config)
    limits = (_positive(text, key) for key in CONTEXT_KEYS)
    return Folder(
        path=path,
        runtime=runtime,
        config=config,
        context=next((limit for limit in limits if limit), None),
        vocabulary=_positive(text, "vocab_size"),
    )


def refuse_transforms(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise SourceError if the quantization_config of a folder declares transforms, which transformers ignores."""
    if settings.get("transform_config"):
        raise SourceError(
            f"{path}: {CONFIG_FILE} has a transform_config: transformers does not transform the inputs, and computes "
            "something else; run the folder in vLLM"
        )


def transformers_config(folder: Path) -> Any:
    """Read the configuration of a folder with transformers.

    Raises SourceError if transformers refuses it, MissingDependencyError.
    """
    transformers = package("transformers", "transformers")
    with Refused(f"{folder}: transformers cannot read this configuration"), quiet():
        return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _positive(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else None


def size(path: Path) -> Size:
    """Read the bytes and parameters of a folder, or of a GGUF file, from its headers.

    Raises MasterError if the manifest is damaged.
    """
    if (path / MANIFEST_FILE).is_file():
        totals = inspect(path).totals
        return Size(totals.output_bytes, totals.weights, totals.bits_per_weight)
    if is_gguf(path):
        contents = open_gguf(path)
        return Size(contents.file_bytes, contents.weights, None)
    try:
        checkpoint = open_local(path)
    except SourceError:  # pickled, or quantized by another tool: the runtime decides whether it loads that
        files = list(path.glob("*.safetensors")) or list(path.glob("*.bin"))
        return Size(sum(file.stat().st_size for file in files), None, None)
    return Size(checkpoint.weight_file_bytes, sum(element_count(tensor) for tensor in checkpoint.tensors), None)
