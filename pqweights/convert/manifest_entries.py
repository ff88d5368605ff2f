"""The entries of tensors in a manifest: written, and read back with every claim checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import msgspec

from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.common.documents import Damaged, Number, Size, as_document
from pqweights.common.dtypes import DTYPE_BITS
from pqweights.common.strict_json import MAX_ELEMENTS
from pqweights.convert.records import TensorRecord
from pqweights.errors import MasterError, RecipeError
from pqweights.formats.master import exact_rate
from pqweights.formats.native import Native
from pqweights.planning.layout import DECODE, INTEGER, KEEP, QUANTIZE, TensorPlan, format_of, stored_bytes


class _StoredTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A stored tensor, with its hash of pieces (checkpoint/digests.py)."""

    name: str
    dtype: str
    shape: tuple[Size, ...]
    blake3_of_pieces: str


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a tensor. Its entry also has the fields of TensorRecord, and the state of a quantized one."""

    name: str
    shape: tuple[Size, ...]
    dtype: str
    role: str
    action: Literal["quantize", "keep", "decode", "integer"]
    codec: str | None
    bits: Number | None
    reason: str
    stored: tuple[_StoredTensor, ...]


def tensor_json(tensor: TensorPlan, record: TensorRecord) -> dict[str, Any]:
    """Return the entry of a tensor."""
    measured = {"relative_mse": record.relative_mse, "energy": record.energy}
    entry = tensor.to_json()
    if tensor.action == INTEGER:
        entry |= measured | {"total_mse": record.total_mse, "master_mse": record.master_mse}
        entry |= {} if record.rounding is None else {"rounding": record.rounding}
    elif record.relative_mse is not None:
        entry |= (record.state or {}) | measured
        entry |= {} if record.weighed_mse is None else {"weighed_mse": record.weighed_mse}
    entry["stored"] = [
        {
            "name": spec.name,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "bytes": spec.byte_count,
            "blake3_of_pieces": record.digests[spec.name],
        }
        for spec in tensor.stored
    ]
    return entry


def parse_tensor(entry: TensorEntry, stated: Mapping[str, Any]) -> tuple[TensorPlan, TensorRecord]:
    """Return what became of a tensor, and what was measured of it.

    stated: the entry as it stands in the file, with the state of a quantized weight

    Raises MasterError for an entry that no version would have written.
    """

    def wrong(problem: str) -> MasterError:
        return damaged(f"tensor {entry.name!r}: {problem}")

    specs, digests = [], {}
    for part in entry.stored:
        if part.dtype not in DTYPE_BITS:
            raise wrong(f"{part.name!r}: expected a dtype of safetensors, found {part.dtype!r}")
        specs.append(TensorSpec(part.name, part.dtype, part.shape))
        digests[part.name] = part.blake3_of_pieces
    if max(math.prod(shape) for shape in (entry.shape, *(spec.shape for spec in specs))) > MAX_ELEMENTS:
        raise wrong(f"shape: expected at most {MAX_ELEMENTS} elements")
    plan = TensorPlan(
        name=entry.name,
        shape=entry.shape,
        dtype=entry.dtype,
        role=entry.role,
        action=entry.action,
        codec=entry.codec,
        bits=None if entry.bits is None else exact_rate(entry.bits),
        reason=entry.reason,
        bytes=stored_bytes(specs),
        stored=tuple(specs),
    )
    record = as_document(stated, TensorRecord, wrong)
    is_measured = plan.action in (QUANTIZE, INTEGER) and plan.codec != Native.codec
    if is_measured and (record.relative_mse is None or record.energy is None):
        raise wrong("expected relative_mse and energy, found none")
    if plan.codec == Native.codec and (record.relative_mse, record.energy) != (0, None):
        raise wrong("expected a relative_mse of 0 and no energy of a weight without loss")
    return plan, replace(record, digests=digests, state=_checked_state(plan, stated, wrong))


def _checked_state(plan: TensorPlan, stated: Mapping[str, Any], wrong: Damaged) -> dict[str, Any] | None:
    """Return the state of a quantized weight; None for another tensor.

    Raises MasterError if action, codec and bits do not go together.
    """
    mismatch = f"action, codec and bits: expected those of a codec, found {(plan.action, plan.codec, plan.bits)}"
    if plan.action == INTEGER and plan.codec is not None and plan.bits in range(1, 9):
        return None
    if plan.action in (KEEP, DECODE) and plan.codec is None and plan.bits is None:
        return None
    if plan.action != QUANTIZE or plan.codec is None or plan.bits is None:
        raise wrong(mismatch)
    try:
        format = format_of(plan)
        own = {key: stated[key] for key in format.settings if key in stated}
        state = format.with_settings(own).stated()
    except RecipeError:
        raise wrong(mismatch) from None
    except ValueError as error:
        raise wrong(str(error)) from None
    for key in state.keys() - own.keys():
        raise wrong(f"missing key {key!r}")
    return state


def damaged(problem: str) -> MasterError:
    """Return the error for a manifest in which something is not as any version writes it."""
    return MasterError(f"{MANIFEST_FILE}: damaged: {problem}; restore it, or delete the folder")
