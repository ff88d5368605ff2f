"""The fold of one model: its tensors with factors that one pass over the source finds."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.names import FACTORS_FILE
from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.writer import disk_errors
from pqweights.common.advice import instead
from pqweights.common.dtypes import from_float32, to_float32
from pqweights.common.threads import ProcessLock
from pqweights.errors import OptionError, SourceError
from pqweights.planning.inputs import KnownInputs
from pqweights.planning.plan import TensorPlan
from pqweights.rewrite.folding.folded import FoldedTensor, TensorFactors, digest_of
from pqweights.rewrite.folding.links import COLUMNS, Link, Side
from pqweights.rewrite.folding.search import find_links
from pqweights.rewrite.folding.sizes import (
    SMALLEST_GAIN,
    FoldedGain,
    Progress,
    Sizes,
    SizesPass,
    factors_of,
    folded_gain,
    keeping_bits,
    mean_squares,
)

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

EQUALIZE = "equalize"
# The factors of this many tensors are kept at hand.
KEPT_TENSORS = 16


def check_fold(fold: str | None) -> None:
    """Raise OptionError for a fold that does not exist. fold: None for none."""
    if fold not in (None, EQUALIZE):
        raise OptionError(f"`fold` {fold}: {instead(fold, [EQUALIZE])}")


def _record(number: int, columns: Floats | None) -> list[Any]:
    """Return the entry of vector `number` in the journal of factors: how many matrices, and their factors as BF16."""
    if columns is None:
        return [number, 0, ""]
    raw = from_float32(np.ascontiguousarray(columns).reshape(-1), "BF16")
    return [number, len(columns), base64.b64encode(raw.tobytes()).decode()]


def _recorded(matrices: int, stored: str) -> Floats | None:
    """Return what an entry of the journal says of its vector."""
    raw = np.frombuffer(base64.b64decode(stored), dtype=np.uint8)
    return to_float32(raw, "BF16").reshape(matrices, -1) if matrices else None


class Fold:
    """The fold of one checkpoint. `measure` must be called before a tensor is read."""

    def __init__(self, original: Checkpoint, *, plain: Collection[str], inputs: KnownInputs | None = None) -> None:
        """Find what can be folded.

        original: the checkpoint
        plain: the tensors that the result stores plainly
        inputs: those of the weights of the checkpoint, if they are known

        Raises SourceError if norms are missing.
        """
        self.original, self._inputs = original, inputs
        self._plain = frozenset(plain)
        self._tensors = {tensor.name: tensor for tensor in original.tensors}
        self.structure = find_links(original.config, original.tensors, plain=plain)
        self._sides: dict[str, list[tuple[int, Side, bool]]] = {}  # by tensor: link, side, and whether it reads
        for number, link in enumerate(self.structure.links):
            for side in (*link.writers, *link.vectors):
                self._sides.setdefault(side.tensor, []).append((number, side, False))
            for side in link.readers:
                self._sides.setdefault(side.tensor, []).append((number, side, True))
        self._norms = {link.norm: number for number, link in enumerate(self.structure.links) if link.norm}
        # By the number of a link: by what its readers' columns are multiplied, [matrices, channels]; None for nothing.
        self._known: dict[int, Floats | None] = {}
        self._gains: dict[str, Floats] = {}  # the weights of norms
        self._biases: dict[str, Floats] = {}
        self._cached: dict[str, TensorFactors] = {}  # of the tensors that were read last
        self._lock = ProcessLock()

    def describe(self) -> dict[str, Any]:
        """Return the manifest's account of the fold."""
        data = {} if self._inputs is None else {"calibration": self._inputs.identity}
        return {"kind": EQUALIZE, "vectors": len(self.structure.links)} | data

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why nothing is folded, if nothing is."""
        return (f"`fold` {EQUALIZE}: {self.structure.unfolded}",) if self.structure.unfolded else ()

    def to_json(self) -> dict[str, Any]:
        """Return the key `fold` of the JSON of quantize and plan: the vectors, and what is left as it is."""
        left = {reason: list(names) for reason, names in self.structure.left.items()}
        names = [link.name for link in self.structure.links]
        return {"kind": EQUALIZE, "vectors": names, "left": left, "warnings": list(self.warnings)}

    def noted(
        self, planned: list[TensorPlan], sources: Mapping[str, tuple[str, ...]] | None = None
    ) -> list[TensorPlan]:
        """Add to the reasons of tensors what they may be folded with.

        sources: for tensors that are made of others, the names of those
        """
        result = []
        for tensor in planned:
            names = (sources or {}).get(tensor.name, (tensor.name,))
            notes = dict.fromkeys(note for name in names if (note := self.structure.notes.get(name)) is not None)
            result.append(tensor._replace(reason="; ".join([tensor.reason, *notes])) if notes else tensor)
        return result

    @property
    def memory_bytes(self) -> int:
        """The memory that the factors and the weights of norms take."""
        factors = sum(4 * link.matrices * link.channels for link in self.structure.links)
        return factors + sum(4 * element_count(self._tensors[name]) for name in [*self._norms_read, *self._biases_read])

    @property
    def _norms_read(self) -> list[str]:
        """The norms with weights that factors depend on."""
        links = self.structure.links
        read = [norm for link in links for norm in (link.norm, link.input_norm and link.input_norm[0]) if norm]
        return list(dict.fromkeys(read))

    @property
    def _biases_read(self) -> list[str]:
        """The biases that factors must keep the bits of."""
        return list(dict.fromkeys(side.tensor for link in self.structure.links for side in link.vectors))

    @property
    def disk_bytes(self) -> int:
        """The room that the file of factors takes while a run is under way: in base64, with names and digests."""
        return 3 * self.memory_bytes // 2 + 200 * len(self.structure.links)

    @property
    def folded(self) -> Checkpoint:
        """The checkpoint with folded tensors."""
        return self.over(self.original)

    def over(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint with tensors of the same names, folded with the same factors."""
        tensors = tuple(
            FoldedTensor(tensor, self.factors) if self._touches(tensor.name) else tensor
            for tensor in checkpoint.tensors
        )
        return replace(checkpoint, tensors=tensors)

    def _touches(self, tensor: str) -> bool:
        """Whether a tensor may be changed."""
        return tensor in self._sides or tensor in self._norms

    @property
    def is_measured(self) -> bool:
        """Whether all factors are known."""
        return len(self._known) == len(self.structure.links)

    def links_of(self, tensor: str) -> tuple[str, ...]:
        """Return the names of the vectors through which a tensor was folded."""
        numbers = [number for number, _, _ in self._sides.get(tensor, [])]
        if tensor in self._norms:
            numbers.append(self._norms[tensor])
        links = self.structure.links
        return tuple(dict.fromkeys(links[n].name for n in numbers if self._known[n] is not None))

    def measure(self, folder: Path, *, fetched: Path, threads: int, progress: Progress) -> None:
        """Find the factors, with one pass over the weights that they depend on.

        folder: the work folder, in which what is found is kept for a run that continues this one
        fetched: where fetched files lie
        threads: how many threads read
        progress: see Progress

        Raises SourceError if the source cannot deliver them, OutputError for a disk error.
        """
        path = folder / FACTORS_FILE
        self._read_gains()
        self._known |= {number: _recorded(matrices, stored) for number, matrices, stored in read_journal(path)}
        missing = {n: link for n, link in enumerate(self.structure.links) if n not in self._known}
        if not missing:
            return
        if self._inputs is not None:
            self._inputs.prepare(progress)
        run = SizesPass(
            storage=self.original.storage, fetched=fetched, threads=threads, gain=self._gain, progress=progress
        )
        for number, sizes in run.run(self.original.tensors, missing, plain=self._plain):
            self._known[number] = known = self._decided(self.structure.links[number], sizes)
            self.original.storage.check_read()  # what is kept must be of the files that the run's journal states
            _append_line(path, _record(number, known))

    def digest(self) -> str:
        """Return the digest of all factors, see digest_of. `measure` must have been called."""
        names = (tensor.name for tensor in self.original.tensors if self._touches(tensor.name))
        digest = digest_of((name, self.factors(name)) for name in names)
        self._cached.clear()  # it would travel to other machines with the fold
        return digest

    def check_master(self, digest: str | None) -> None:
        """Check that a master was folded with the factors of this fold, which was found again for its original.

        digest: that of the master's factors; None for a master of a version that did not write it

        Raises SourceError if its factors may be others: the values of the original would not fit to its plain tensors.
        """
        if digest != self.digest():
            raise SourceError(
                "`source`: its factors are not those that the master was folded with, by another version of "
                "pqweights; leave out `source`, or quantize again"
            )

    def _read_gains(self) -> None:
        """Read norms and biases before files are fetched: others would wait for room that nothing frees.

        In a process that was sent this fold, they are known.
        """
        if self._gains or self._biases:
            return
        self._gains = {norm: self._norm_weight(norm) for norm in self._norms_read}
        self._biases = {name: _values(self._tensors[name]) for name in self._biases_read}

    def _decided(self, link: Link, sizes: Sizes) -> Floats | None:
        measured = None if self._inputs is None else mean_squares(link, self._inputs)
        inputs = sizes.inputs if measured is None else np.where(np.isnan(measured), sizes.inputs, measured)
        columns, gain = factors_of(np.sqrt(inputs), np.sqrt(sizes.weights), powers_of_two=link.exact)
        if gain < SMALLEST_GAIN:
            return None
        if link.exact and link.matrices == 1:
            return keeping_bits(columns[0], self._plain_vectors(link))[None]
        return columns

    def _plain_vectors(self, link: Link) -> list[tuple[Floats, str]]:
        """Return the gain and the biases of a link, [channels], each with the dtype that it is stored in."""
        vectors = [(self._biases[s.tensor][s.first : s.first + s.count], s.tensor) for s in link.vectors]
        vectors += [] if link.norm is None else [(self._gains[link.norm], link.norm)]
        return [(values, self._tensors[name].plain_dtype) for values, name in vectors]

    def _gain(self, norm: str, zero_centred: bool) -> Doubles:
        """Return the absolute gain of a norm, [channels]."""
        return np.abs(self._gains[norm].astype(np.float64) + zero_centred)

    def _norm_weight(self, norm: str) -> Floats:
        tensor = self._tensors[norm]
        values = _values(tensor)
        if not np.isfinite(values).all():
            raise SourceError(
                f"{tensor.parts[0].file}: tensor {norm!r}: expected finite gains, found a NaN or infinity"
            )
        return values

    def factors(self, tensor: str) -> TensorFactors:
        """Return what a tensor is multiplied by."""
        with self._lock:
            if tensor not in self._cached:
                if len(self._cached) >= KEPT_TENSORS:
                    self._cached.clear()
                self._cached[tensor] = self._new_factors(tensor)
            return self._cached[tensor]

    def factors_of_inputs(self, tensor: str) -> Floats | None:
        """Return the factors along the inputs of a weight, [matrices or 1, K]; None if it has none."""
        sides = [side for _, side, reads in self._sides.get(tensor, []) if reads]
        if not sides:
            return None
        factors = self.factors(tensor)
        if sides[0].axis == COLUMNS:
            return factors.columns
        return None if factors.rows is None else factors.rows.reshape(-1, self._tensors[tensor].shape[-2])

    def _new_factors(self, tensor: str) -> TensorFactors:
        if tensor in self._norms:
            number = self._norms[tensor]
            folded = self._folded_gain(number)
            return TensorFactors() if folded is None else TensorFactors(values=folded.stored)
        shape = self._tensors[tensor].shape
        by_axis: dict[int, Floats] = {}
        for number, side, reads in self._sides[tensor]:
            columns = self._columns(number)
            if columns is None:
                continue
            factors = columns if reads else 1 / columns
            matrices = shape[0] if len(shape) == 3 else 1
            along = by_axis.get(side.axis)
            if along is None:
                along = by_axis[side.axis] = np.ones((matrices, shape[side.axis]), dtype=np.float32)
            by_head = factors.reshape(len(factors), -1, 1, side.width)
            expanded = np.repeat(by_head, side.repeats, axis=2).reshape(len(factors), -1)
            along[:, side.first : side.first + side.count] *= expanded.astype(np.float32, copy=False)
        rows = by_axis.get(-2)
        return TensorFactors(rows=None if rows is None else rows.reshape(-1), columns=by_axis.get(COLUMNS))

    def _columns(self, number: int) -> Floats | None:
        """Return by what the columns of a link's readers are multiplied, [matrices, channels]; None for nothing."""
        if self.structure.links[number].norm is not None:
            folded = self._folded_gain(number)
            return None if folded is None else folded.columns[None]
        return self._known[number]

    def _folded_gain(self, number: int) -> FoldedGain | None:
        link, columns = self.structure.links[number], self._known[number]
        if columns is None or link.norm is None:
            return None
        return folded_gain(
            self._gains[link.norm],
            columns[0],
            zero_centred=link.zero_centred,
            exact=link.exact,
            dtype=self._tensors[link.norm].plain_dtype,
        )


def _values(tensor: LogicalTensor) -> Floats:
    """Read a whole small tensor, flat."""
    count = element_count(tensor)
    raw = np.empty(count * 4, dtype=np.uint8)
    tensor.read(0, count, "F32", raw)
    return raw.view(np.float32)


# The journal of factors: what a run has found, for a run that continues it. A line is the sha256 of its JSON, a space,
# and the JSON. FACTORS_FILE has a new name whenever entries change, so that entries of another version are never read.


def _append_line(path: Path, value: Any) -> None:
    """Add a line to a journal, which is created if it does not exist. Raises OutputError."""
    content = json.dumps(value).encode()
    with disk_errors(path), open(path, "ab") as stream:
        stream.write(b"%s %s\n" % (hashlib.sha256(content).hexdigest().encode(), content))


def read_journal(path: Path) -> list[Any]:
    """Return the values of a journal, in order, and cut off a line that a kill cut short, with all behind it."""
    values: list[Any] = []
    valid = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        digest, _, content = line.removesuffix(b"\n").partition(b" ")
        if not line.endswith(b"\n") or hashlib.sha256(content).hexdigest().encode() != digest:
            os.truncate(path, valid)
            break
        values.append(json.loads(content))
        valid += len(line)
    return values
