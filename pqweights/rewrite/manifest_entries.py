"""The entries of tensors in a manifest, read back with every claim checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.codecs import CODECS, WITHDRAWN, withdrawn
from pqweights.common.dtypes import DTYPE_BITS
from pqweights.common.strict_json import Fields
from pqweights.errors import MasterError, RecipeError
from pqweights.planning.plan import DECODE, INTEGER, KEEP, QUANTIZE, TensorPlan, coder_of, stored_bytes
from pqweights.rewrite.records import TensorRecord


def parse_tensor(entry: Fields, hash_key: str) -> tuple[TensorPlan, TensorRecord]:
    """Return what became of a tensor, and what was measured of it.

    hash_key: the key of the hash of its stored tensors

    Raises MasterError for an entry that no version would have written.
    """
    name, stored = entry.text("name"), entry.objects("stored")
    specs = tuple(TensorSpec(spec.text("name"), spec.text("dtype"), spec.shape("shape")) for spec in stored)
    for spec in specs:
        if spec.dtype not in DTYPE_BITS:
            raise damaged(f"dtype of {spec.name!r}", "one of safetensors", spec.dtype)
    plan = TensorPlan(
        name=name,
        shape=entry.shape("shape"),
        dtype=entry.text("dtype"),
        role=entry.text("role"),
        action=entry.text("action"),
        codec=entry.raw("codec"),
        bits=entry.raw("bits"),
        reason=entry.text("reason"),
        bytes=stored_bytes(specs),
        stored=specs,
    )
    digests = {spec.text("name"): spec.text(hash_key) for spec in stored}
    folded = tuple(entry.defaulted("folded", entry.texts, []))
    return plan, TensorRecord(name=name, digests=digests, folded=folded, **_parse_measures(plan, entry))


def _parse_measures(plan: TensorPlan, entry: Fields) -> Mapping[str, Any]:
    """Return what an entry holds beside its plan, as fields of TensorRecord.

    Raises MasterError if the plan's action, codec and bits do not go together, or for a codec of WITHDRAWN.
    """
    wrong = damaged(
        f"action, codec and bits of {plan.name!r}", "those of a codec", (plan.action, plan.codec, plan.bits)
    )
    if plan.action == QUANTIZE:
        if plan.codec in WITHDRAWN and plan.codec not in CODECS:
            raise MasterError(
                f"{MANIFEST_FILE}: {plan.name!r}: codec: {withdrawn(plan.codec)}; quantize the model again"
            )
        return _parse_state(plan, entry, wrong) | {key: entry.number(key) for key in ("relative_mse", "energy")}
    if plan.action == INTEGER:
        if not isinstance(plan.codec, str) or type(plan.bits) is not int or not 1 <= plan.bits <= 8:
            raise wrong
        measures: dict[str, Any] = {key: entry.number(key) for key in ("relative_mse", "energy")}
        measures |= {key: entry.optional(key, entry.number, None) for key in ("total_mse", "master_mse")}
        return measures | {"rounding": entry.optional("rounding", entry.mapping, None)}
    if plan.action not in (KEEP, DECODE) or plan.codec is not None or plan.bits is not None:
        raise wrong
    return {}


def _parse_state(plan: TensorPlan, entry: Fields, wrong: MasterError) -> dict[str, Any]:
    if not isinstance(plan.codec, str) or type(plan.bits) not in (int, float):
        raise wrong
    try:
        coder = coder_of(plan)
        state = coder.parse_state(entry)
    except RecipeError:
        raise wrong from None
    except ValueError as error:
        raise damaged(f"{plan.name!r}", "a state of its codec", error) from None
    if any(key not in entry for key in state.to_json()):
        raise damaged(f"{plan.name!r}", "the state of its codec", None)
    return {"state": state.to_json()}


def damaged(what: str, expected: str, found: Any) -> MasterError:
    """Return the error for a manifest in which something is not as any version writes it."""
    return MasterError(
        f"{MANIFEST_FILE}: damaged: {what}: expected {expected}, found {str(found)[:80]!r}; restore it, or delete the "
        "folder"
    )
