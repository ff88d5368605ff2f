"""A sample in a file: safetensors with `ids`, int64 [windows, tokens], and a digest of the tokenizer as metadata."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from pqweights.checkpoint.names import TOKENIZER_FILES
from pqweights.checkpoint.writer import write_whole
from pqweights.errors import EvaluationError
from pqweights.runtime.folders import read_folder
from pqweights.runtime.texts import check_vocabulary

Windows = npt.NDArray[np.int64]  # token ids, [windows, tokens]

TOKENS = "tokens"  # what manifests call a sample that came in a file
SUFFIX = ".safetensors"
# A file of the tokenizer that says how texts are put together, and which tokens begin them, not what tokens are.
_SETTINGS = "tokenizer_config.json"


def write_sample(path: Path, ids: Windows, folder: Path) -> None:
    """Write a sample of a model. folder: where the files of the model lie that describe it. Raises OutputError"""
    write_whole(path.parent, path, [save({"ids": ids}, {"tokenizer": _tokenizer_digest(folder)})])


def read_sample(path: Path, folder: Path) -> Windows:
    """Return the sample in a file. folder: as above, of the model that is to read it

    Raises EvaluationError for a file that is no sample, and for one that another tokenizer made.
    """
    try:
        with safe_open(path, "numpy") as stored:
            ids: Windows = stored.get_tensor("ids")
            tokenizer = (stored.metadata() or {}).get("tokenizer")
    except (OSError, SafetensorError) as error:
        raise EvaluationError(f"{path}: expected a sample that `save_sample` has written: {error}") from None
    if ids.dtype != np.int64 or ids.ndim != 2 or not ids.size or ids.min() < 0:
        raise EvaluationError(f"{path}: expected `ids`, int64 [windows, tokens], found {ids.dtype} {list(ids.shape)}")
    if tokenizer != _tokenizer_digest(folder):
        raise EvaluationError(f"{path}: the sample has the tokens of another tokenizer than that of {folder}")
    model = read_folder(folder)
    check_vocabulary(model, ids)
    if model.context is not None and ids.shape[1] > model.context:
        raise EvaluationError(f"{path}: has windows of {ids.shape[1]} tokens, and {folder} takes {model.context}")
    return ids


def _tokenizer_digest(folder: Path) -> str:
    """Return a hash of the files of a tokenizer; that of nothing if there are none."""
    digest = hashlib.sha256()
    for file in sorted({file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)}):
        if file.is_file() and file.name != _SETTINGS:
            digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()
