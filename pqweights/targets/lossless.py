"""Masters without loss: weights in the source's own numbers, coded by their entropy where that makes them smaller.

A weight whose numbers were decoded from blocks of llama.cpp's, all of them to the bit, is stored as these blocks. So a
few numbers of each weight of a plain checkpoint say on which grids the weights lie, which `plan` tells.

How small a chunk becomes is known once it is coded. So the source is read twice: `measure` codes every chunk and notes
its bytes, from which the plan knows the whole result, and the run codes it again and writes it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pqweights.checkpoint.blocks import BlocksTensor, grid_spec
from pqweights.checkpoint.header import ByteReads, StoredTensor, TensorSpec
from pqweights.checkpoint.names import CONFIG_FILE
from pqweights.checkpoint.native import SourceTensor, coded_specs
from pqweights.checkpoint.readers import LogicalTensor, PlainTensor
from pqweights.checkpoint.shard_file import ShardFile
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.dtypes import from_float32, item_bytes, to_float32
from pqweights.common.options import Options
from pqweights.common.threads import Progress
from pqweights.convert.jobs import CopyJob, Job
from pqweights.convert.master_config import master_config
from pqweights.convert.plan import MASTER, Plan
from pqweights.convert.records import TensorRecord
from pqweights.errors import SourceChangedError, SourceError
from pqweights.formats.native import Native, bits_of, item_width
from pqweights.formats.packed import QuantizedTensor
from pqweights.formats.packing import RoundingRule
from pqweights.kernels import VALUE_DTYPES, lossless
from pqweights.kernels.gguf_encoding import BLOCK_TYPES, decode_blocks, encode_blocks
from pqweights.kernels.groups import GroupRule
from pqweights.kernels.lossless import CHUNK_ITEMS, Bytes, Lengths
from pqweights.kernels.recovery import RECOVERED_TYPES, recover_blocks
from pqweights.kernels.workers import scratch
from pqweights.models import text_model
from pqweights.models.description import ModelDescription
from pqweights.planning.layout import KEEP, QUANTIZE, TensorPlan, stored_bytes
from pqweights.planning.roles import classify
from pqweights.targets.carried import recovered_groups

# What the manifest states in the place of a recipe.
RECIPE = {
    "name": "lossless",
    "description": "Every weight in the source's own numbers, coded by their entropy where that makes it smaller.",
    "codec": Native.codec,
    "rules": [],
}
RUN_CHUNKS = 16  # of a stored tensor that are coded at once
FEWEST_BYTES = 1024  # of a stored tensor that is coded
# Of so many weights, spread over the model, so many numbers are read, of one row.
SAMPLED_WEIGHTS, SAMPLED_NUMBERS = 256, 2048
OFF_GRID = "none"


class ChunkRun(NamedTuple):
    """Neighbouring chunks of a stored tensor of the source.

    storage: where it lies
    first: the first of them
    """

    storage: ByteReads
    stored: StoredTensor
    first: int

    def code(self) -> tuple[Bytes, Lengths]:
        """Read and code them; see kernels.lossless.encode."""
        width = item_width(self.stored.dtype)
        begin = self.first * CHUNK_ITEMS * width
        values = scratch("items", min(RUN_CHUNKS * CHUNK_ITEMS * width, self.stored.byte_count - begin))
        self.storage.read_into(self.stored.file, self.stored.offset + begin, values)
        return lossless.encode(values, width)

    def lengths(self) -> Lengths:
        """Return the bytes of each."""
        return self.code()[1]


def runs_of(storage: ByteReads, stored: StoredTensor) -> list[ChunkRun]:
    """Return the chunks of a stored tensor in runs."""
    chunks = lossless.chunk_count(stored.byte_count // item_width(stored.dtype))
    return [ChunkRun(storage, stored, first) for first in range(0, chunks, RUN_CHUNKS)]


class OffGridError(SourceChangedError):
    """Weights that are not decoded from blocks: of another grid, or changed since."""


class RecoveredBlocks(NamedTuple):
    """The blocks that a weight was decoded from, found again where they are read: ByteReads of one stored tensor.

    kind: the name of their type
    """

    tensor: PlainTensor
    kind: str

    def read_into(self, file: str, offset: int, buffer: Bytes) -> None:
        """Fill the buffer with bytes of the blocks. Raises OffGridError if they do not decode to the very weights."""
        kind, dtype = BLOCK_TYPES[self.kind], self.tensor.dtype
        first, last = offset // kind.block_bytes, -(-(offset + len(buffer)) // kind.block_bytes)
        count = (last - first) * kind.group_size
        stored = scratch("weights of blocks", count * item_bytes(dtype))
        self.tensor.read(first * kind.group_size, count, dtype, stored)
        values = to_float32(stored, dtype)
        blocks, _ = recover_blocks(self.kind, values, dtype)
        zeros = (values == 0).reshape(-1, kind.group_size).all(axis=1)  # which any scale is good for
        blocks[zeros] = encode_blocks(self.kind, np.zeros((1, kind.group_size), dtype=np.float32), None).codes
        if not np.array_equal(from_float32(decode_blocks(self.kind, blocks).reshape(-1), dtype), stored):
            name = self.tensor.name
            raise OffGridError(f"{file}: tensor {name!r} changed while it was read; run the same command again")
        skipped = offset - first * kind.block_bytes
        buffer[:] = blocks.reshape(-1)[skipped : skipped + len(buffer)]


def on_grid(tensor: PlainTensor, kind: str) -> BlocksTensor:
    """Return a weight as the blocks that it was decoded from. kind: the name of their type"""
    spec = grid_spec(tensor.name, tensor.shape, kind)
    return BlocksTensor(
        storage=RecoveredBlocks(tensor, kind),
        stored=StoredTensor(*spec, tensor.stored.file, 0, spec.byte_count),
        name=tensor.name,
        shape=tensor.shape,
        kind=kind,
        dtype=tensor.dtype,
        plain_dtype=tensor.dtype,
    )


def source_tensor(tensor: LogicalTensor, model: ModelDescription, kind: str | None) -> SourceTensor | None:
    """Return a tensor whose numbers are stored by their entropy, if that pays; None for what is kept as it is.

    kind: the type from whose blocks its numbers were decoded
    """
    if isinstance(tensor, QuantizedTensor):
        return tensor
    if not isinstance(tensor, PlainTensor) or classify(tensor.name, tensor.dtype, tensor.shape, model).structural:
        return None
    return tensor if kind is None else on_grid(tensor, kind)


def measure(checkpoint: Checkpoint, threads: int, progress: Progress) -> tuple[dict[str, str], dict[str, Lengths]]:
    """Look for weights on grids, and code every chunk.

    Returns the types from whose blocks weights were decoded, by their names, and the bytes of each chunk of the stored
    tensors that get smaller when they are coded, by theirs.
    """
    model, grids = text_model(checkpoint.config), block_grids()
    for tensor in checkpoint.tensors:
        if not isinstance(tensor, PlainTensor | QuantizedTensor):
            raise SourceError(
                f"{tensor.parts[0].file}: lossless takes checkpoints in safetensors, as published; expected one, found "
                "a GGUF file or a master, whose weights would be decoded: keep it as it is"
            )
        if isinstance(tensor, QuantizedTensor):
            tensor.check_scales()
    kinds = {
        tensor.name: kind
        for tensor in checkpoint.tensors
        if isinstance(tensor, PlainTensor) and tensor.dtype in VALUE_DTYPES and 0 not in tensor.shape
        if isinstance(source_tensor(tensor, model, None), PlainTensor)
        if (kind := grid_of(tensor, grids)) is not None
    }
    total = sum(part.byte_count for tensor in checkpoint.tensors for part in tensor.parts)
    done, lengths = 0, dict[str, Lengths]()
    with ThreadPoolExecutor(threads, "pqweights") as pool:
        for tensor in checkpoint.tensors:
            try:
                lengths |= _lengths(source_tensor(tensor, model, kinds.get(tensor.name)), pool, 2 * threads)
            except OffGridError:
                del kinds[tensor.name]
                lengths |= _lengths(source_tensor(tensor, model, None), pool, 2 * threads)
            done += sum(part.byte_count for part in tensor.parts)
            progress(done, total, tensor.name)
    return kinds, lengths


def _lengths(source: SourceTensor | None, pool: ThreadPoolExecutor, most: int) -> dict[str, Lengths]:
    """Return the bytes of each chunk of a weight's stored tensors that get smaller. most: chunk runs under way"""
    parts = [part for part in (() if source is None else source.parts) if part.byte_count >= FEWEST_BYTES]
    lengths = {
        part.name: np.concatenate([*_in_order(pool, runs_of(source.storage, part), most)])
        for part in parts
        if source is not None
    }
    sizes = {part.name: part.byte_count for part in parts}
    return {name: of for name, of in lengths.items() if of.sum(dtype=np.int64) + of.nbytes < sizes[name]}


def _in_order(pool: ThreadPoolExecutor, runs: Sequence[ChunkRun], most: int) -> Iterator[Lengths]:
    """Yield the bytes of each chunk of runs, of which only some are under way at a time."""
    under_way: deque[Future[Lengths]] = deque()
    for run in runs:
        under_way.append(pool.submit(run.lengths))
        if len(under_way) > most:
            yield under_way.popleft().result()
    yield from (future.result() for future in under_way)


def plan_lossless(checkpoint: Checkpoint, max_shard_bytes: int, options: Options) -> Plan:
    """Plan a master of the codec `native` by coding every weight once.

    options: with how many threads, and how to show progress

    Raises SourceError for a source that would be decoded.
    """
    checkpoint.storage.keep(checkpoint.weight_files, options.progress)
    kinds, lengths = measure(checkpoint, options.thread_count, options.progress)
    model = text_model(checkpoint.config)
    tensors = [_planned(tensor, model, kinds.get(tensor.name), lengths) for tensor in checkpoint.tensors]
    return Plan(
        kind=MASTER,
        made_by={"recipe": RECIPE},
        checkpoint=checkpoint,
        tensors=tuple(tensors),
        encode=partial(encode, kinds=kinds, lengths=lengths),
        configs={CONFIG_FILE: master_config},
        max_shard_bytes=max_shard_bytes,
    )


def _stored(part: StoredTensor, lengths: Mapping[str, Lengths]) -> tuple[TensorSpec, ...]:
    """Return what a stored tensor of the source becomes."""
    spec, of_part = TensorSpec(*part[:3]), lengths.get(part.name)
    return (spec,) if of_part is None else coded_specs(spec, int(of_part.sum(dtype=np.int64)))


def _planned(
    tensor: LogicalTensor, model: ModelDescription, kind: str | None, lengths: Mapping[str, Lengths]
) -> TensorPlan:
    """Plan a tensor by what was measured. kind: the type from whose blocks it was decoded"""
    role, source = classify(tensor.name, tensor.dtype, tensor.shape, model), source_tensor(tensor, model, kind)
    is_coded = source is not None and any(part.name in lengths for part in source.parts)
    if source is None or not math.prod(tensor.shape) or (isinstance(source, PlainTensor) and not is_coded):
        reason = role.keep if source is None and role.keep else "coding would not make it smaller"
        stored: tuple[TensorSpec, ...] = (TensorSpec(tensor.name, tensor.plain_dtype, tensor.shape),)
        action, codec, bits = KEEP, None, None
    else:
        stored = tuple(spec for part in source.parts for spec in _stored(part, lengths))
        action, codec, bits = QUANTIZE, Native.codec, bits_of(stored_bytes(stored), math.prod(tensor.shape))
        reason = f"lossless{'' if kind is None else f', on the grid of {kind}'}"
        reason += ", coded by its entropy" if is_coded else ", as it is stored"
    return TensorPlan.of(tensor, stored, role=role.name, action=action, reason=reason, codec=codec, bits=bits)


def encode(
    planned: TensorPlan, tensor: LogicalTensor, *, kinds: Mapping[str, str], lengths: Mapping[str, Lengths]
) -> Job:
    """Return the pass that codes a weight, or copies a tensor that is kept. kinds, lengths: see `measure`"""
    if planned.action == KEEP:
        return CopyJob(planned, tensor)
    assert isinstance(tensor, PlainTensor | QuantizedTensor)
    if isinstance(tensor, PlainTensor) and (kind := kinds.get(tensor.name)) is not None:
        tensor = on_grid(tensor, kind)
    return LosslessJob(planned, tensor, lengths)


class LosslessJob:
    """The job that stores a weight in the source's own numbers."""

    reads = None

    def __init__(self, planned: TensorPlan, tensor: SourceTensor, lengths: Mapping[str, Lengths]) -> None:
        self._name, self._lengths = planned.name, lengths
        coded = [part for part in tensor.parts if part.name in lengths]
        self._ends = {part.name: np.append(0, np.cumsum(lengths[part.name], dtype=np.int64)) for part in coded}
        self._runs = [run for part in coded for run in runs_of(tensor.storage, part)]
        others = [part for part in tensor.parts if part.name not in lengths]
        self._copied = CopyJob(
            planned._replace(stored=tuple(TensorSpec(*part[:3]) for part in others)),
            *(PlainTensor.of(tensor.storage, part) for part in others),
        )
        self.chunks = len(self._runs) + self._copied.chunks  # runs of chunks, and chunks of what is copied

    def read(self, chunk: int, file: ShardFile) -> Any:
        """Read and code one, or read what is copied."""
        copied = chunk - len(self._runs)
        return self._runs[chunk].code() if copied < 0 else self._copied.read(copied, file)

    def write(self, chunk: int, values: Any, file: ShardFile) -> None:
        """Write one. Raises SourceChangedError if chunks are not as they were when they were measured."""
        if (copied := chunk - len(self._runs)) >= 0:
            self._copied.write(copied, values, file)
            return
        run, (coded, lengths) = self._runs[chunk], values
        name, first, last = run.stored.name, run.first, run.first + len(lengths)
        if not np.array_equal(lengths, self._lengths[name][first:last]):
            raise SourceChangedError(f"{run.stored.file}: tensor {name!r} changed while it was read; run it again")
        stream, table = (spec.name for spec in coded_specs(TensorSpec(*run.stored[:3]), 0))
        file.write(stream, int(self._ends[name][first]), coded)
        file.write(table, 4 * first, lengths.view(np.uint8))

    def collect(self, result: None) -> None:
        """Do nothing: nothing is measured."""

    def finish(self) -> TensorRecord:
        """Return the record of a weight without an error."""
        return TensorRecord(name=self._name, state={}, relative_mse=0.0)


def block_grids() -> dict[str, RoundingRule]:
    """Return the grids of types of GGUF, those of the fewest bits first: many lie on that of a wider type, too."""
    types = sorted(RECOVERED_TYPES, key=lambda name: BLOCK_TYPES[name].bits_per_weight)
    return {name: BLOCK_TYPES[name] for name in types}


def grids_by_name() -> dict[str, RoundingRule]:
    """Return all grids, those of the fewest bits first."""
    blocks = block_grids()
    groups: dict[str, RoundingRule] = {}
    for size, dtype in itertools.product((128, 64), ("BF16", "F16")):
        of_size: dict[str, Any] = {"bits": 4, "group_size": size, "scale_dtype": dtype}
        name = f"INT4 in groups of {size} ({dtype})"
        groups[name] = GroupRule(symmetric=True, middle=True, **of_size)
        groups[f"{name} with zeros"] = GroupRule(symmetric=False, middle=False, zeros=True, **of_size)
        groups[f"{name} with offsets"] = GroupRule(symmetric=False, middle=False, **of_size)
    narrow = [name for name in blocks if BLOCK_TYPES[name].bits < 4]
    return {name: blocks[name] for name in narrow} | groups | blocks


def sampled_grids(checkpoint: Checkpoint) -> dict[str, int]:
    """Return how many weights lie on which grid, and how many on none, by a row of each; nothing if none lie on any.

    Only files on this machine are read, and of a large model only some of the weights.
    """
    if checkpoint.storage.local_folder() is None:
        return {}
    model = text_model(checkpoint.config)
    weights = [
        tensor
        for tensor in checkpoint.tensors
        if isinstance(tensor, PlainTensor)
        and tensor.dtype in VALUE_DTYPES
        and 0 not in tensor.shape
        and classify(tensor.name, tensor.dtype, tensor.shape, model).keep is None
    ]
    grids = grids_by_name()
    chosen = weights if len(weights) <= SAMPLED_WEIGHTS else weights[:: -(-len(weights) // SAMPLED_WEIGHTS)]
    counts = Counter(grid_of(tensor, grids) or OFF_GRID for tensor in chosen)
    return dict(counts.most_common()) if counts.keys() - {OFF_GRID} else {}


def grid_of(tensor: PlainTensor, grids: Mapping[str, RoundingRule]) -> str | None:
    """Return the first grid on which the middle row of a weight lies, by up to SAMPLED_NUMBERS of it."""
    width, rows = tensor.shape[-1], int(np.prod(tensor.shape[:-1]))
    count = min(width, SAMPLED_NUMBERS)
    raw = np.empty(count * item_bytes("F32"), dtype=np.uint8)
    tensor.read(rows // 2 * width, count, "F32", raw)
    values = raw.view(np.float32)
    if not np.isfinite(values).all() or not values.any():
        return None
    for name, rule in grids.items():
        if width % rule.group_size == 0:
            recovered = recovered_groups(rule, values, tensor.dtype)
            if recovered is not None and (recovered[1] | ~values.reshape(-1, rule.group_size).any(axis=1)).all():
                return name
    return None
