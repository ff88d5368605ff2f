"""What the user should know of the sizes of an export: warnings that follow from what becomes of each weight."""

from __future__ import annotations

from collections.abc import Iterator, Set

from pqweights.checkpoint.config import model_dtype
from pqweights.checkpoint.readers import EncodedTensor, LogicalTensor, element_count
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.views import View
from pqweights.common.units import counted, size_text
from pqweights.exports.bf16 import is_encoded, plain_plan
from pqweights.exports.integers import Outline, Rounding, Stays
from pqweights.exports.linear import FUSED_WITH_KEPT
from pqweights.planning.plan import stored_bytes
from pqweights.planning.roles import classify
from pqweights.rewrite.folding.folded import unfolded

# A warning is given if integers have at least this many bits more than the codes of the master, on average.
REMARKED_BITS = 0.5
PLAIN_BITS = 16


def remarks(outline: Outline, master: Checkpoint, *, from_original: bool, known: Set[str]) -> tuple[str, ...]:
    """Return warnings of the sizes of a result.

    from_original: whether the original's values are rounded
    known: the names of the weights whose error in the master is known
    """
    return (
        *_experts_warnings(outline),
        *_plain_warnings(outline, master),
        *(() if from_original else _bits_warnings(outline, known)),
    )


def _bits_warnings(outline: Outline, known: Set[str]) -> tuple[str, ...]:
    """Return a warning if the integers have clearly more bits than the codes that they are made from.

    Where all errors of the master are known, the export says in its place which part of its error they are.
    """
    if all(tensor.name in known for tensor, _ in _rounded(outline)):
        return ()
    weights = made = held = 0.0
    for tensor, decision in _rounded(outline):
        for part in tensor.sources if isinstance(tensor, View) else (tensor,):
            part = unfolded(part)
            if isinstance(part, EncodedTensor):
                count = element_count(part)
                weights, made, held = weights + count, made + count * decision.rule.bits, held + count * part.coder.bits
    if made - held < REMARKED_BITS * weights or not weights:
        return ()
    return (
        f"integers of {made / weights:.3g} bits cannot be more accurate than the {held / weights:.3g}-bit master, and "
        "take more room; --source ORIGINAL rounds the original's weights",
    )


def _experts_warnings(outline: Outline) -> tuple[str, ...]:
    """Return a warning for each reason why experts that the master encodes stay plain, with their bytes."""
    by_reason: dict[str, list[LogicalTensor]] = {}
    for tensor in outline.tensors:
        decision = outline.decisions.get(tensor.name)
        if isinstance(decision, Stays) and decision.reason != FUSED_WITH_KEPT and _is_encoded_expert(tensor):
            fused = len(tensor.shape) > 2
            by_reason.setdefault("the format stores single linear layers" if fused else decision.reason, []).append(
                tensor
            )
    return tuple(
        f"experts stay in BF16: {counted(len(tensors), 'tensor')} of {sum(map(element_count, tensors))} weights, "
        f"{size_text(sum(2 * element_count(t) for t in tensors))} in place of "
        f"{size_text(sum(part.byte_count for t in tensors for part in t.parts))} in the master: {reason}; the targets "
        "gguf and mlx round the experts of the models that they know"
        for reason, tensors in by_reason.items()
    )


def _is_encoded_expert(tensor: LogicalTensor) -> bool:
    return is_encoded(tensor) and classify(tensor.name, tensor.dtype, tensor.shape).name == "expert"


def _plain_warnings(outline: Outline, master: Checkpoint) -> tuple[str, ...]:
    """Return a warning if a result is nearer to BF16 than to its integers: it saves less than half of what it could."""
    rounded = sum(element_count(tensor) for tensor, _ in _rounded(outline))
    integer_bytes = sum(_integer_bytes(tensor, decision) for tensor, decision in _rounded(outline))
    weights = sum(element_count(t) for t in outline.tensors if t.plain_dtype in ("BF16", "F16", "F32"))
    model = model_dtype(outline.config, outline.tensors)
    plain_bytes = sum(
        plain_plan(tensor, model=model, dtype=outline.plain_dtype).bytes
        for tensor in outline.tensors
        if not isinstance(outline.decisions.get(tensor.name), Rounding)
    )
    if not rounded:
        return ()
    total, bits_of_integers = integer_bytes + plain_bytes, 8 * integer_bytes / rounded
    bits = 8 * total / weights
    if bits <= (bits_of_integers + PLAIN_BITS) / 2:
        return ()
    held = master.weight_file_bytes
    larger = f"; the master that it is made from is smaller ({size_text(held)})" if total > held else ""
    return (
        f"{bits:.3g} bits per parameter, nearer to the {PLAIN_BITS} of BF16 than to the {bits_of_integers:.3g} of its "
        f"integers: of {size_text(total)}, {size_text(plain_bytes)} are weights that stay plain{larger}",
    )


def _rounded(outline: Outline) -> Iterator[tuple[LogicalTensor, Rounding]]:
    """Yield the tensors that become integers, and how."""
    for tensor in outline.tensors:
        decision = outline.decisions.get(tensor.name)
        if isinstance(decision, Rounding):
            yield tensor, decision


def _integer_bytes(tensor: LogicalTensor, decision: Rounding) -> int:
    return stored_bytes(decision.layout.specs(tensor.name, tensor.shape, decision.rule))
