"""The distributions of a reference in a file, so that models are compared with it where the original is not.

A .pqref file is a safetensors file. Its `__metadata__` states in JSON which model, text and windows it is of (Facts);
`text` is as much of the text as became tokens, and `tokens` are these. Of each scored token it has the reference's loss
(`losses`) and two lists of next tokens with their log-probabilities:

- `top_tokens`, `top_logs`: the TOP likeliest ones, in falling order;
- `drawn_tokens`, `drawn_logs`: DRAWN of the others, drawn in proportion to their probabilities, whose sum is `rest`.

With p of the reference and q of a model, KL(p || q) is the sum over all tokens of g = p log(p/q) - p + q, of which no
term is negative. Its terms of the top tokens are added, and those of the others estimated from the drawn ones, each of
which stands for an equal share of `rest`. A single bucket for the others would lose several percent of the divergence
even beside a thousand top tokens; docs/evaluation.md has the measurement.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import StoredTensor, TensorSpec, build_header
from pqweights.checkpoint.source import read_header
from pqweights.checkpoint.storage import Storage
from pqweights.checkpoint.writer import disk_errors, partial_path
from pqweights.common.documents import ClosedDocument, Count, as_json, read_document
from pqweights.common.strict_json import json_bytes
from pqweights.errors import EvaluationError
from pqweights.runtime.texts import EncodedText, Ids

Doubles = npt.NDArray[np.float64]

SUFFIX = ".pqref"
METADATA_KEY = "pqweights_reference"
TOP, DRAWN = 128, 128
# Log-probabilities are stored as whole numbers of this part of a nat: the divergence of the rounding is below 1e-8.
PARTS_OF_NAT = 2048
# Stands for a probability of 0; the largest loss that is stored is a step below.
IMPOSSIBLE = 65535
# Where in its share of the rest each token is drawn moves by this from one scored token to the next.
GOLDEN_RATIO = 0.6180339887498949
_NUMPY = {"U8": "u1", "U16": "<u2", "U32": "<u4", "F32": "<f4", "F64": "<f8"}


class Facts(ClosedDocument, frozen=True, kw_only=True):
    """What a saved reference is of.

    name, fingerprint: the model's name without its folder, and its fingerprint, if that could be read
    runtime, dtype, device: what computed it
    bytes, parameters: the size of its files
    text, text_sha256: the name of the text, and the hash of all of it
    window, stride, score_first: how the text was cut into windows
    bos: the token that each window begins with; None for the text's own
    vocabulary: how many logits there were
    """

    version: Literal[1] = 1
    name: str
    fingerprint: str | None
    runtime: str
    dtype: str
    device: str | None
    bytes: Count
    parameters: Count | None
    text: str
    text_sha256: str
    window: Count
    stride: Count
    score_first: bool
    bos: Count | None
    vocabulary: Count


class SavedTokens(NamedTuple):
    """The distributions of some scored tokens.

    losses: [tokens]; top_tokens, top_logs: [tokens, TOP]; drawn_tokens, drawn_logs: [tokens, DRAWN]; rest: [tokens]
    """

    losses: Doubles
    top_tokens: Ids
    top_logs: Doubles
    drawn_tokens: Ids
    drawn_logs: Doubles
    rest: Doubles

    @staticmethod
    def of(logs: Doubles, chosen: Ids, first: int) -> SavedTokens:
        """Return the distributions of some scored tokens.

        logs: the reference's log-probabilities, [tokens, vocabulary]
        chosen: the tokens of the text, [tokens]
        first: the number of the first of them among all scored tokens
        """
        rows, vocabulary = np.arange(len(logs))[:, None], logs.shape[1]
        top_count, drawn_count = _counts(vocabulary)
        top = np.argpartition(-logs, top_count - 1, axis=1)[:, :top_count]
        top = np.take_along_axis(top, np.lexsort((top, -logs[rows, top]), axis=1), axis=1)
        others = np.exp(logs)
        others[rows, top] = 0
        reached = np.cumsum(others, axis=1)
        offsets = (first + rows) * GOLDEN_RATIO % 1
        at = (np.arange(drawn_count)[None] + offsets) / max(1, drawn_count) * reached[:, -1:]
        drawn = np.stack([np.searchsorted(sums, ats, side="right") for sums, ats in zip(reached, at, strict=True)])
        drawn = np.minimum(drawn, vocabulary - 1)
        return SavedTokens(
            losses=-logs[rows[:, 0], chosen],
            top_tokens=top,
            top_logs=logs[rows, top],
            drawn_tokens=drawn,
            drawn_logs=logs[rows, drawn],
            rest=reached[:, -1],
        )

    def part(self, rows: slice) -> SavedTokens:
        """Return those of some of the tokens."""
        return SavedTokens(**{name: values[rows] for name, values in self._asdict().items()})

    def divergences(self, logs: Doubles) -> Doubles:
        """Return an estimate of KL(reference || model) of each token. logs: the model's, [tokens, vocabulary]"""
        top = np.take_along_axis(logs, self.top_tokens, axis=1)
        likely = np.exp(self.top_logs)
        with np.errstate(invalid="ignore"):  # 0 * (-inf - ...) for a token that the reference rules out
            terms = np.where(likely > 0, likely * (self.top_logs - top), 0.0) - likely + np.exp(top)
        result: Doubles = terms.sum(axis=1)
        if self.drawn_tokens.shape[1]:
            ratios = self.drawn_logs - np.take_along_axis(logs, self.drawn_tokens, axis=1)
            result += np.where(self.rest > 0, self.rest * (ratios - 1 + np.exp(-ratios)).mean(axis=1), 0.0)
        return result

    def agreements(self, logs: Doubles) -> npt.NDArray[np.bool_]:
        """Return at which tokens the model ranks the reference's likeliest token first."""
        return np.asarray(logs.argmax(axis=1) == self.top_tokens[:, 0])


def _coded(logs: Doubles) -> Doubles:
    """Return log-probabilities as they are stored; _decoded is the inverse."""
    return np.where(np.isfinite(logs), np.minimum(np.round(-PARTS_OF_NAT * logs), IMPOSSIBLE - 1), IMPOSSIBLE)


def _decoded(codes: npt.NDArray[np.uint16]) -> Doubles:
    return np.where(codes == IMPOSSIBLE, -np.inf, codes / -PARTS_OF_NAT)


def _counts(vocabulary: int) -> tuple[int, int]:
    """Return how many top tokens and how many drawn ones there are: of a small vocabulary all are top ones."""
    return (vocabulary, 0) if vocabulary <= TOP + DRAWN else (TOP, DRAWN)


def _specs(facts: Facts, scored: int, tokens: int, text_bytes: int) -> list[TensorSpec]:
    """Return the tensors of a file. scored, tokens: how many tokens are scored, and how many there are"""
    top, drawn = _counts(facts.vocabulary)
    token = "U16" if facts.vocabulary <= 1 << 16 else "U32"
    return [
        TensorSpec("losses", "F64", (scored,)),
        TensorSpec("tokens", "U32", (tokens,)),
        TensorSpec("top_tokens", token, (scored, top)),
        TensorSpec("drawn_tokens", token, (scored, drawn)),
        TensorSpec("rest", "F32", (scored,)),
        TensorSpec("top_logs", "U16", (scored, top)),
        TensorSpec("drawn_logs", "U16", (scored, drawn)),
        TensorSpec("text", "U8", (text_bytes,)),
    ]


class ReferenceWriter:
    """A file that is being filled, under another name until it is complete.

    path: where it will be
    facts: what it is of
    text: as much of the text as became tokens
    ids: the tokens of the text, [tokens]
    scored: how many tokens are scored
    """

    def __init__(self, path: Path, facts: Facts, *, text: str, ids: Ids, scored: int) -> None:
        self._path, self._partial = path, partial_path(path)
        data = text.encode()
        specs = _specs(facts, scored, len(ids), len(data))
        header, tensors = build_header(path.name, specs, {METADATA_KEY: json_bytes(as_json(facts)).decode()})
        self._stored = {tensor.name: tensor for tensor in tensors}
        with disk_errors(path):
            self._descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            os.pwrite(self._descriptor, header, 0)
        self._write("tokens", 0, ids)
        self._write("text", 0, np.frombuffer(data, dtype=np.uint8))

    def add(self, before: int, first: int, logs: Doubles, chosen: Ids) -> None:
        """Write the distributions of scored tokens: see protocol.Save."""
        saved = SavedTokens.of(logs, chosen, before + first)
        drawn = np.minimum(_coded(saved.drawn_logs), IMPOSSIBLE - 1)
        coded = saved._asdict() | {"top_logs": _coded(saved.top_logs), "drawn_logs": drawn}
        for name, values in coded.items():
            self._write(name, before + first, values)

    def _write(self, name: str, row: int, values: npt.NDArray[Any]) -> None:
        tensor = self._stored[name]
        row_bytes = tensor.byte_count // tensor.shape[0] if tensor.shape[0] else 0
        with disk_errors(self._path):
            os.pwrite(self._descriptor, values.astype(_NUMPY[tensor.dtype]).tobytes(), tensor.offset + row * row_bytes)

    def finish(self) -> None:
        """Give the file its name."""
        with disk_errors(self._path):
            os.fsync(self._descriptor)
            os.replace(self._partial, self._path)

    def close(self) -> None:
        """Close the file, and remove it if it is not complete."""
        os.close(self._descriptor)
        self._partial.unlink(missing_ok=True)


class SavedReference:
    """A file that was written before.

    Raises EvaluationError if it is not what ReferenceWriter writes, SourceError for a damaged file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise EvaluationError(f"{path}: no such file; eval --save-reference writes one")
        self._storage = Storage(path.parent, only=[path.name])
        tensors, metadata = read_header(self._storage, path.name)
        self.facts = read_document(metadata.get(METADATA_KEY, "").encode(), Facts, self._damaged)
        self._stored = {tensor.name: tensor for tensor in tensors}
        lengths = {tensor.name: tensor.shape[0] for tensor in tensors if tensor.shape}
        rows = {name: lengths.get(name, 0) for name in ("losses", "tokens", "text")}
        specs = {spec.name: spec for spec in _specs(self.facts, *rows.values())}
        for name in specs.keys() | self._stored.keys():
            spec, held = specs.get(name), self._stored.get(name)
            if spec is None or held is None or (spec.dtype, spec.shape) != (held.dtype, held.shape):
                expected, found = ("none" if of is None else f"{of.dtype} {list(of.shape)}" for of in (spec, held))
                raise self._damaged(f"tensor {name[:80]!r}: expected {expected}, found {found}")

    def _damaged(self, problem: str) -> EvaluationError:
        return EvaluationError(f"{self.path}: not a reference that eval --save-reference wrote: {problem}")

    @property
    def text(self) -> str:
        """As much of the text as became tokens."""
        return self._read("text").tobytes().decode()

    @property
    def encoded(self) -> EncodedText:
        """The tokens of the text."""
        return EncodedText(self._read("tokens").astype(np.int64), self.facts.bos, len(self.text))

    def tokens(self, first: int, count: int) -> SavedTokens:
        """Return the distributions of scored tokens. Raises EvaluationError if there are not so many."""
        if first + count > self._stored["losses"].shape[0]:
            raise self._damaged(f"expected {first + count} scored tokens or more")
        read = {name: self._read(name, first, count) for name in SavedTokens._fields}
        return SavedTokens(
            losses=read["losses"].astype(np.float64),
            top_tokens=self._known(read["top_tokens"]),
            top_logs=_decoded(read["top_logs"]),
            drawn_tokens=self._known(read["drawn_tokens"]),
            drawn_logs=_decoded(read["drawn_logs"]),
            rest=read["rest"].astype(np.float64),
        )

    def _known(self, tokens: npt.NDArray[Any]) -> Ids:
        if tokens.max(initial=0) >= self.facts.vocabulary:
            raise self._damaged(f"token {tokens.max()} of a vocabulary of {self.facts.vocabulary}")
        return tokens.astype(np.int64)

    def _read(self, name: str, row: int = 0, count: int | None = None) -> npt.NDArray[Any]:
        tensor: StoredTensor = self._stored[name]
        rows = tensor.shape[0] if count is None else count
        row_bytes = tensor.byte_count // tensor.shape[0] if tensor.shape[0] else 0
        buffer = np.empty(rows * row_bytes, dtype=np.uint8)
        self._storage.read_into(tensor.file, tensor.offset + row * row_bytes, buffer)
        return buffer.view(_NUMPY[tensor.dtype]).reshape(rows, *tensor.shape[1:])


def is_saved_reference(path: Path) -> bool:
    """Whether a reference is a file with distributions, by its name."""
    return path.suffix == SUFFIX
