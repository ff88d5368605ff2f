"""What becomes of the vectors of a text's tokens: one vector, as sentence-transformers pools them, or one score.

sentence-transformers lists its modules in modules.json: the model, how its vectors are pooled, dense layers behind
that, and whether the result gets length 1, which llama.cpp's users choose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.gguf import gguf_package
from pqweights.checkpoint.gguf.tokens import read_json
from pqweights.checkpoint.header import TensorSpec, encode_header
from pqweights.checkpoint.readers import LogicalTensor, PlainTensor
from pqweights.checkpoint.source import read_header
from pqweights.checkpoint.storage import Storage, read_file
from pqweights.common.strict_json import parse_json
from pqweights.errors import ExportError, SourceError
from pqweights.models.settings import Settings

MODULES = "modules.json"
# By the key of a module's configuration that is true, in earlier versions, and by the value of pooling_mode since.
MODES = {
    "pooling_mode_mean_tokens": "MEAN", "pooling_mode_cls_token": "CLS", "pooling_mode_lasttoken": "LAST",
    "mean": "MEAN", "cls": "CLS", "lasttoken": "LAST",
}  # fmt: skip
RANK = "RANK"
POOLING = "1_Pooling"
WEIGHTS, IDENTITY = "model.safetensors", "torch.nn.modules.linear.Identity"
DENSE = re.compile(r"dense_\d\.weight")


def module_folders(storage: Storage, kind: str) -> list[str]:
    """Return the folders of the modules of a kind, such as Dense. Raises SourceError for a damaged list of modules."""
    if MODULES not in storage.files():
        return []
    try:
        modules = parse_json(read_file(storage, MODULES))
        return [str(of["path"]) for of in modules if str(of["type"]).rpartition(".")[2] == kind]
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{MODULES}: {error!r:.100}: expected a list of modules with type and path") from None


def pooling_type(storage: Storage) -> str | None:
    """Return how vectors are pooled behind a model, of gguf.PoolingType; None if that is not known.

    Raises ExportError if llama.cpp pools in no such way, SourceError for a damaged file.
    """
    path = next(iter(module_folders(storage, "Pooling")), None)
    if path is None:
        return None
    config = read_json(storage, f"{path}/config.json")
    stated = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    stated = stated or [config.get("pooling_mode")]  # type: ignore[list-item]
    if len(stated) != 1 or stated[0] not in [*MODES] or config.get("include_prompt") is False:
        raise ExportError(
            f"{path}/config.json: llama.cpp pools by mean, cls or lasttoken only, over all tokens, found {stated}"
        )
    return MODES[stated[0]]


def dense_tensors(storage: Storage, settings: Settings) -> list[LogicalTensor]:
    """Return the dense layers behind a model, if llama.cpp computes them for it.

    Raises ExportError for one with more than a matrix, SourceError if it is not there.
    """
    tensors: list[LogicalTensor] = []
    for number, path in enumerate(module_folders(storage, "Dense") if computes_dense(settings) else (), 2):
        activation, file = read_json(storage, f"{path}/config.json").get("activation_function"), f"{path}/{WEIGHTS}"
        if file not in storage.files():
            raise SourceError(f"{file}: {MODULES} names the module, but its weights are missing")
        stored = read_header(storage, file)[0]
        if len(stored) > 1 or activation not in (None, IDENTITY):
            raise ExportError(f"{path}: llama.cpp supports only a plain matrix after the model, found {activation}")
        tensors.append(PlainTensor.of(storage, stored[0])._replace(name=f"dense_{number}.weight"))
    return tensors


def module_files(mode: str, width: int, dense: Sequence[npt.NDArray[np.float32]]) -> dict[str, bytes]:
    """Return the files of sentence-transformers by their paths: the inverse of pooling_type and dense_tensors.

    mode: see pooling_type
    width: that of the vectors
    dense: the matrices behind them
    """
    modes = {key: of == mode for key, of in MODES.items() if key.startswith("pooling_mode_")}
    files = {f"{POOLING}/config.json": _json({"word_embedding_dimension": width, **modes})}
    kinds = {"": "Transformer", POOLING: "Pooling"}
    for number, matrix in enumerate(dense, 2):
        kinds[f"{number}_Dense"] = "Dense"
        shape = {"in_features": matrix.shape[1], "out_features": matrix.shape[0]}
        files[f"{number}_Dense/config.json"] = _json(shape | {"bias": False, "activation_function": IDENTITY})
        header = encode_header([TensorSpec("linear.weight", "F32", matrix.shape)], {"format": "pt"})
        files[f"{number}_Dense/{WEIGHTS}"] = header + matrix.tobytes()
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    return {MODULES: _json(modules), **files}


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=2).encode()


def computes_dense(settings: Settings) -> bool:
    """Whether llama.cpp computes dense layers behind this type of model."""
    package = gguf_package()
    return package.MODEL_TENSOR.DENSE_2_OUT in package.MODEL_TENSORS[package.MODEL_ARCH[settings.architecture.name]]


def pooling_notes(storage: Storage, settings: Settings) -> Iterator[str]:
    """Yield what is to be said of what follows a model."""
    dense = module_folders(storage, "Dense")
    if dense and not computes_dense(settings):
        yield f"llama.cpp does not compute {', '.join(dense)}: its vectors are the inputs of that layer"
    if settings.pooling == RANK and settings.model_type == "bert" and settings.number("type_vocab_size") > 1:
        yield "llama.cpp gives both texts of a pair the same token type, but BERT does not: scores of pairs differ"


def add_pooling(settings: Settings, writer: Any, tensors: tuple[LogicalTensor, ...]) -> None:
    """Write how vectors are pooled, and the names of the scores if there are several.

    writer: a GGUFWriter of the gguf package
    """
    if settings.pooling is None:
        return
    for tensor in tensors:
        if DENSE.match(tensor.name):
            writer.add_dense_features_dims(tensor.name.removesuffix(".weight"), tensor.shape[1], tensor.shape[0])
    writer.add_pooling_type(gguf_package().PoolingType[settings.pooling])
    scores = max((tensor.shape[0] for tensor in tensors if tensor.name == "cls.output.weight"), default=1)
    if settings.pooling == RANK and scores > 1:
        named = settings.get("id2label")
        named = named if isinstance(named, dict) else {}
        writer.add_classifier_output_labels([str(named.get(str(n), f"LABEL_{n}")) for n in range(scores)])
