"""The facts about a model's folder that need no loading: configuration, limits, bytes, parameters.

Regular expressions in a quantization_config are checked before a runtime matches them with the names of all modules:
compressed-tensors and torchao take those behind `re:`, transformers every name of a module that stays as it is. Python
tries all ways in which repetitions can share a name between them: nested ones take more than a lifetime.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]  # the only parser of what `re` compiles
from typing import Any

from pqweights.checkpoint.gguf.file import is_gguf, open_gguf
from pqweights.checkpoint.names import CONFIG_FILE, MANIFEST_FILE, QUANT_METHOD
from pqweights.checkpoint.readers import element_count
from pqweights.checkpoint.source import open_local, read_config
from pqweights.checkpoint.unfinished import describe_interrupted, is_interrupted, journal_line
from pqweights.errors import MasterError, SourceError
from pqweights.models import text_config
from pqweights.results.inspect import inspect
from pqweights.runtime.packages import Refused, package, quiet
from pqweights.targets.target import COMPRESSED_TENSORS, MLX, TORCHAO, TRANSFORMERS

MASTER = "master"
LLAMA_CPP = "llama.cpp"
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")  # the last is MPT's
PREFIX = "re:"
# Keys whose lists hold expressions without a prefix.
LISTS = ("modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers")
# Repetitions of any letters in a row; a name of 100 letters has 4 million places for four of them.
MOST_REPEATED = 4
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
_ASSERTS = (_constants.ASSERT, _constants.ASSERT_NOT)
_DIGITS = [(_constants.IN, [(_constants.CATEGORY, _constants.CATEGORY_DIGIT)])]


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
            f"{path}: {CONFIG_FILE} has a transform_config: transformers does not transform the inputs, so its "
            "results would be wrong; run the folder in vLLM"
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


def slow_expression(settings: Any) -> str | None:
    """Return an expression in a quantization_config that may take forever, or that is none; None without one."""
    return next((text for text in _expressions(settings) if not _is_quick(text)), None)


def _expressions(value: Any, *, of_modules: bool = False) -> Iterator[str]:
    """Yield all expressions in a value of JSON, keys too. of_modules: whether texts are expressions anyway"""
    if isinstance(value, str) and (of_modules or value.startswith(PREFIX)):
        yield value.removeprefix(PREFIX)
    elif isinstance(value, list):
        for item in value:
            yield from _expressions(item, of_modules=of_modules)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _expressions(key)
            yield from _expressions(item, of_modules=key in LISTS)


def _is_quick(expression: str) -> bool:
    try:
        return _repeated(_parser.parse(expression)) <= MOST_REPEATED
    except (re.error, RecursionError, OverflowError):
        return False


def _repeated(parsed: Any) -> float:
    """Return how many repetitions can share the same part of a name; infinity if they are nested."""
    in_row, apart = 0.0, 0.0
    for kind, argument in parsed:
        parts = [*_parts(argument)]
        if kind in _REPEATS and argument[1] != 1:
            if _varies(argument[2]):
                return float("inf")
            in_row += [*argument[2]] != _DIGITS
        elif kind in _ASSERTS:  # once they hold, they are not tried again
            apart = max(apart, *map(_repeated, parts))
        else:
            in_row += max(map(_repeated, parts), default=0)
    return max(in_row, apart)


def _varies(parsed: Any) -> bool:
    """Whether there is more than one way in which a part of an expression can match the same text."""
    return any(
        kind is _constants.BRANCH
        or (kind in _REPEATS and argument[0] != argument[1])
        or any(map(_varies, _parts(argument)))
        for kind, argument in parsed
    )


def _parts(argument: Any) -> Iterator[Any]:
    """Yield the expressions within an argument."""
    if isinstance(argument, _parser.SubPattern):
        yield argument
    elif isinstance(argument, tuple | list):
        for item in argument:
            yield from _parts(item)
