"""Quantizing: the transform that turns a source checkpoint into a master."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.buffers import scratch
from pqweights.checkpoint import scales
from pqweights.checkpoint.config import edited_config, guarded_config, model_dtype
from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.master import Encoding, encoded_specs, quantization_config
from pqweights.checkpoint.model_card import model_facts
from pqweights.checkpoint.names import awq_name, codes_name, norms_name
from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.source import Checkpoint, find_non_finite
from pqweights.codecs import EncodedBlocks, get_codec
from pqweights.codecs.weight import Pass, PassResult, PassTotals, block_count, encode_chunk, first_pass, next_pass
from pqweights.dtypes import item_bytes, to_float32
from pqweights.errors import OutputError, RecipeError, SourceError
from pqweights.hub.sources import Access, open_source
from pqweights.hub.storage import HubStorage
from pqweights.kernels import BLOCK_SIZE, VALUE_DTYPES
from pqweights.planning.awq_file import AwqScales, open_awq
from pqweights.planning.fit import Fit, Widths, fit
from pqweights.planning.plan import (
    DEFAULT_MAX_SHARD_BYTES,
    DEFAULT_METADATA,
    KEEP,
    QUANTIZE,
    Plan,
    TensorPlan,
    plan_shards,
)
from pqweights.planning.recipe import Decision, Recipe, Target, decide, is_smaller
from pqweights.planning.sensitivity_file import HEURISTIC, read_sensitivity
from pqweights.rewrite.driver import Lineage, Report, make_plan, rewrite
from pqweights.rewrite.jobs import CHUNK_WEIGHTS, OUTPUTS, CopyJob, Job, Sink
from pqweights.rewrite.manifest import TensorRecord, exceeds
from pqweights.rewrite.stream import Progress
from pqweights.strict_json import rounded


@dataclass(frozen=True)
class Quantize:
    """The transform. See transform.Transform.

    strict: refuse a weight whose error exceeds the promise even when rescued. awq: scales for input channels. fit: the
    widths of a recipe with a target.
    """

    recipe: Recipe
    strict: bool = False
    awq: AwqScales | None = None
    fit: Fit | None = field(default=None, repr=False)  # what it comes to is in the plan
    kind: str = "master"

    def describe(self) -> dict[str, Any]:
        """See Transform."""
        awq = {} if self.awq is None else {"awq": self.awq.describe()}
        return {"recipe": self.recipe.to_json()} | awq | ({} if self.fit is None else {"fit": self.fit.describe()})

    def plan(self, checkpoint: Checkpoint) -> list[TensorPlan]:
        """See Transform; refuses a master as source, and scales that are not for this checkpoint."""
        decisions = decide(self.recipe, checkpoint.tensors)
        result = self.plan_with(checkpoint, decisions, {} if self.fit is None else self.fit.widths)
        if self.awq is not None:
            self.awq.check(checkpoint, result)
        return result

    def plan_with(self, checkpoint: Checkpoint, decisions: Sequence[Decision], widths: Widths) -> list[TensorPlan]:
        """The plan by the recipe's decisions, but for these widths, by name of the weight; None keeps it."""
        if checkpoint.is_master:
            raise SourceError("the source is already a pqweights master; give the original, or export it to BF16 first")
        scaled = frozenset() if self.awq is None else self.awq.searched.keys()
        result = []
        for tensor, decision in zip(checkpoint.tensors, decisions, strict=True):
            name, shape, codec, bits = tensor.name, tensor.shape, decision.codec, decision.bits
            reason = decision.reason
            if name in widths and decision.free:
                bits, reason = widths[name], f"{reason}; to keep {self.recipe.target}"
                if bits is None or not is_smaller(tensor, codec, bits):
                    codec = bits = None
            if codec is not None and bits is not None:
                stored: tuple[TensorSpec, ...] = encoded_specs(name, shape, codec, bits, name in scaled)
                reason += ", input channels scaled" if name in scaled else ""
            else:
                stored = (TensorSpec(name, tensor.plain_dtype, shape),)
            action = KEEP if codec is None else QUANTIZE
            result.append(TensorPlan(name, shape, tensor.dtype, decision.role, action, codec, bits, reason, stored))
        return result

    @property
    def metadata(self) -> dict[str, str]:
        """See Transform."""
        return DEFAULT_METADATA

    @property
    def left_out(self) -> dict[str, str]:
        """See Transform; nothing."""
        return {}

    @property
    def also_reads(self) -> dict[str, Checkpoint]:
        """See Transform: the file of the scales."""
        return {} if self.awq is None else {"--awq": self.awq.file}

    def job(self, planned: TensorPlan, tensor: LogicalTensor) -> Job:
        """See Transform."""
        if planned.action == KEEP:
            return CopyJob(planned, tensor)
        assert planned.codec is not None
        awq = self.awq.read(planned.name) if self.awq is not None and planned.is_scaled else None
        return EncodeJob(planned, tensor, awq, first_pass(get_codec(planned.codec)), ())

    def accept(self, planned: TensorPlan, record: TensorRecord) -> None:
        """See Transform."""
        if self.strict and exceeds(planned, record):
            raise SourceError(
                f"tensor {planned.name!r}: --strict: relative error {record.relative_mse} at {planned.bits} bits exceeds what "
                "the codec promises, also with the rescue rotation; keep it with a rule, or give it more bits"
            )

    def config(
        self, checkpoint: Checkpoint, tensors: Sequence[TensorPlan], records: Sequence[TensorRecord]
    ) -> dict[str, Any]:
        """See Transform."""
        dtype = model_dtype(checkpoint.config, checkpoint.tensors)
        quantization = quantization_config(encodings(tensors, records), [t.name for t in tensors if t.action == KEEP])
        return guarded_config(edited_config(checkpoint.config, dtype, dtype, None), quantization)


def encodings(tensors: Sequence[TensorPlan], records: Sequence[TensorRecord]) -> list[Encoding]:
    """How each quantized tensor of a finished plan is stored."""
    result = []
    for tensor, record in zip(tensors, records, strict=True):
        if tensor.action == QUANTIZE:
            assert tensor.codec is not None and tensor.bits is not None
            assert record.rotation is not None and record.norm_exponent is not None
            result.append(
                Encoding(
                    tensor.name, tensor.shape, tensor.dtype, tensor.codec, tensor.bits, record.rotation,
                    record.norm_exponent,
                )
            )  # fmt: skip
    return result


class EncodeJob:
    """One pass of encoding over one weight. See jobs.Job.

    awq: the scales [..., K] as float16 bit patterns, where its input channels are scaled.
    """

    def __init__(
        self,
        planned: TensorPlan,
        tensor: LogicalTensor,
        awq: npt.NDArray[np.uint8] | None,
        this_pass: Pass,
        history: tuple[PassResult, ...],
    ) -> None:
        assert planned.codec is not None and planned.bits is not None
        self._planned, self._tensor, self._pass, self._history = planned, tensor, this_pass, history
        self._codec, self._bits = get_codec(planned.codec), planned.bits
        exact = tensor.dtype in VALUE_DTYPES or tensor.dtype == "MXFP4"
        self._dtype = tensor.plain_dtype if exact and awq is None else "F32"
        self._awq = awq
        self._factors = None if awq is None else to_float32(awq, "F16")
        self._weights = element_count(tensor)
        self._totals = PassTotals(this_pass)
        self._digests = {spec.name: hashlib.sha256() for spec in planned.stored}

    @property
    def chunks(self) -> int:
        """See Job."""
        return -(-self._weights // CHUNK_WEIGHTS)

    def run(self, chunk: int, sink: Sink) -> tuple[npt.NDArray[np.uint8], EncodedBlocks]:
        """See Job; the buffer that holds the codes, and everything."""
        start = chunk * CHUNK_WEIGHTS
        count = min(CHUNK_WEIGHTS, self._weights - start)
        size = item_bytes(self._dtype)
        values = scratch("weights", block_count(count) * BLOCK_SIZE * size)
        self._tensor.read(start, count, self._dtype, values)
        if self._awq is not None and self._factors is not None:
            with np.errstate(over="ignore"):  # found by the encoder
                scales.multiply(values.view(np.float32)[:count], start, self._planned.shape, self._factors)
            if chunk == 0:
                sink.write(awq_name(self._planned.name), 0, self._awq)
        buffer = OUTPUTS.take()
        code_bytes = self._codec.code_bytes_per_block(self._bits)
        codes = buffer[: block_count(count) * code_bytes].reshape(-1, code_bytes)
        encoded = encode_chunk(self._codec, values, count, self._dtype, self._bits, self._pass, codes)
        if encoded.stats.first_bad_block >= 0:
            self._refuse_non_finite(start, count)
        first_block = start // BLOCK_SIZE
        name = self._planned.name
        sink.write(codes_name(name), first_block * code_bytes, encoded.codes.reshape(-1))
        sink.write(norms_name(name), first_block * 2, encoded.norms.view(np.uint8))
        return buffer, encoded

    def _refuse_non_finite(self, start: int, count: int) -> None:
        at = find_non_finite(self._tensor, start, count)
        if at < 0:
            raise SourceError(
                f"tensor {self._tensor.name!r}: times the scales of its input channels it leaves the range of float32; quantize it "
                "without them, or keep it with a rule"
            )
        place = [int(i) for i in np.unravel_index(at, self._tensor.shape)]
        raise SourceError(
            f"{self._tensor.parts[0].file}: tensor {self._tensor.name!r}: expected finite weights, found a NaN or an infinity "
            f"at {place}; keep the tensor with a rule (name: {self._tensor.name!r}, keep: true) or repair the checkpoint"
        )

    def collect(self, result: tuple[npt.NDArray[np.uint8], EncodedBlocks]) -> None:
        """See Job."""
        buffer, encoded = result
        self._totals.add(encoded)
        self._digests[codes_name(self._planned.name)].update(encoded.codes.data)
        self._digests[norms_name(self._planned.name)].update(encoded.norms.data)
        OUTPUTS.give(buffer)

    def finish(self) -> TensorRecord | Job:
        """See Job."""
        history = (*self._history, self._totals.result())
        following = next_pass(self._codec, self._bits, history)
        if following is not None:
            return EncodeJob(self._planned, self._tensor, self._awq, following, history)
        if self._awq is not None:
            self._digests[awq_name(self._planned.name)].update(self._awq.data)
        last = history[-1]
        return TensorRecord(
            self._planned.name,
            {name: digest.hexdigest() for name, digest in self._digests.items()},
            last.rotation,
            last.norm_exponent,
            rounded(last.relative_mse),
            rounded(last.energy),
        )


def plan_quantize(
    source: str | Path,
    recipe: Recipe,
    *,
    access: Access = Access(),  # noqa: B008  # frozen
    low_disk: bool = False,
    awq: Path | None = None,
    awq_any_codec: bool = False,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    allow_pickle: bool = False,
    strict: bool = False,
) -> tuple[Checkpoint, Quantize, Plan]:
    """Open a source and decide what quantizing it would do, from the headers alone.

    awq: a file that `calibrate` wrote. awq_any_codec: take its scales although they were searched for another codec or
    width. source, access, low_disk: see quantize. Raises SourceError, HubError, RecipeError.
    """
    checkpoint = open_source(source, access, low_disk=low_disk, allow_pickle=allow_pickle)
    transform = Quantize(recipe, strict, None if awq is None else open_awq(awq, awq_any_codec))
    if recipe.target is not None:
        transform = replace(transform, fit=_fit(checkpoint, transform, recipe, recipe.target, max_shard_bytes))
    return checkpoint, transform, make_plan(checkpoint, transform, max_shard_bytes)


def _fit(checkpoint: Checkpoint, transform: Quantize, recipe: Recipe, target: Target, max_shard_bytes: int) -> Fit:
    """The widths of a recipe with a target.

    Raises SourceError for sensitivities of another checkpoint, RecipeError for a target that cannot be kept.
    """
    if transform.awq is not None and not transform.awq.any_codec:
        raise RecipeError(
            f"--awq and a target ({target}): the widths are chosen, so scales that were searched for one width are taken for "
            "others: pass --awq-any-codec, too"
        )
    sensitivity = None
    if recipe.sensitivity not in (None, HEURISTIC):
        assert recipe.sensitivity is not None
        sensitivity = read_sensitivity(Path(recipe.sensitivity))
        found = checkpoint.fingerprint()
        if sensitivity.checkpoint != found:
            raise SourceError(
                f"{recipe.sensitivity}: expected sensitivities of this checkpoint (fingerprint {found[:12]}), found those of "
                f"another ({sensitivity.checkpoint[:12]}): measure them with pqweights sensitivity"
            )
    decisions = decide(recipe, checkpoint.tensors)
    pairs = zip(checkpoint.tensors, decisions, strict=True)
    free = [tensor.name for tensor, decision in pairs if decision.free and decision.codec is not None]

    def file_bytes(tensors: Sequence[TensorPlan]) -> int:
        return sum(shard.file_bytes for shard in plan_shards(tensors, max_shard_bytes, transform.metadata))

    def planned(widths: Widths) -> list[TensorPlan]:
        return transform.plan_with(checkpoint, decisions, widths)

    return fit(checkpoint, target, sensitivity, planned, file_bytes, free)


def quantize(
    source: str | Path,
    out: Path,
    recipe: Recipe,
    *,
    access: Access = Access(),  # noqa: B008  # frozen
    low_disk: bool = False,
    threads: int,
    device: str = "cpu",
    overwrite: bool = False,
    awq: Path | None = None,
    awq_any_codec: bool = False,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    allow_pickle: bool = False,
    strict: bool = False,
    progress: Progress = lambda done, total, name: None,
) -> Report:
    """Turn a checkpoint into a master in the folder `out`, continuing an interrupted run of the same call.

    source: a folder or file; a text may also be a repository on the Hub, used by `access`, whose files are fetched while the
    work goes on and, with low_disk, deleted once what was made of them is on the disk. device: cpu, cuda, or auto for cuda
    where there is one; the bytes are the same. awq, awq_any_codec: see plan_quantize.
    Raises SourceError, RecipeError, OutputError, DeviceError, HubError.
    """
    checkpoint, transform, plan = plan_quantize(
        source, recipe, access=access, low_disk=low_disk, awq=awq, awq_any_codec=awq_any_codec,
        max_shard_bytes=max_shard_bytes, allow_pickle=allow_pickle, strict=strict,
    )  # fmt: skip
    if isinstance(checkpoint.storage, HubStorage):
        if Path(source) == out:
            raise OutputError(
                f"{out}: expected another folder than one called like the repository, which it would be taken for"
            )
        checkpoint.storage.check_room(checkpoint.weight_files)
    return rewrite(
        checkpoint, None if checkpoint.storage.origin else Path(source), transform, plan, out,
        lineage=Lineage(model_facts(checkpoint.storage)), threads=threads, device=device, overwrite=overwrite,
        progress=progress,
    )  # fmt: skip
