"""Which weights of a master are linear layers that a runtime can hold as integers, judged by role, shape and name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.errors import ExportError
from pqweights.exports.architectures import check_architecture
from pqweights.exports.bf16 import is_encoded
from pqweights.exports.options import GroupSize
from pqweights.planning.roles import classify

# The longest row, in weights; eight rows are held in memory at once.
MOST_COLUMNS = 1 << 20


def linear_weights(
    checkpoint: Checkpoint,
    groups: GroupSize,
    *,
    experts: str | None = None,
    too_large: Callable[[tuple[int, ...]], str | None] = lambda shape: None,
) -> dict[str, str | None]:
    """Return for every weight that the master encoded why it stays plain; None for a weight that can become integers.

    experts: why single experts stay plain; None if they need not
    too_large: returns why a linear layer of a shape is not worth storing as integers; None if it is

    Raises ExportError if the target cannot hold the architecture, if a group size that the user asked for does not
    divide the rows of a weight, or if no weight can become integers.
    """
    check_architecture(groups.target, checkpoint.config)
    encoded = [tensor for tensor in checkpoint.tensors if is_encoded(tensor)]
    tokens = _vocabulary_sizes(checkpoint.config or {})
    result = {t.name: _why_plain(t, groups, experts, tokens) or too_large(t.shape) for t in encoded}
    if None not in result.values():
        found = [reason for reason in result.values() if reason]
        removable = [reason for reason in found if "--" in reason]  # by another option
        why = next(iter([*removable, *found]), "the master quantizes no linear layer")
        raise ExportError(f"no weight of this model can become integers for {groups.target}: {why}")
    return result


def _vocabulary_sizes(config: Mapping[str, Any]) -> set[object]:
    """Return how many tokens the model knows, as its configuration says."""
    return {part.get("vocab_size") for part in (config, config.get("text_config")) if isinstance(part, dict)}


def _why_plain(tensor: LogicalTensor, groups: GroupSize, experts: str | None, tokens: set[object]) -> str | None:
    reason = _not_linear(tensor, experts, tokens)
    columns = tensor.shape[-1] if tensor.shape else 1
    if reason is None and columns > MOST_COLUMNS:
        reason = f"rows of {columns} weights: only up to {MOST_COLUMNS} are held in memory"
    return reason or groups.why_not(tensor.name, columns)


def _not_linear(tensor: LogicalTensor, experts: str | None, tokens: set[object]) -> str | None:
    role = classify(tensor.name, tensor.dtype, tensor.shape).name
    if role in ("embedding", "lm_head"):
        return f"{role}: the runtime does not quantize it"
    if len(tensor.shape) != 2:
        return f"fused weights {list(tensor.shape)}: the format stores single linear layers"
    if role == "expert" and experts is not None:
        return experts
    if role not in ("attention", "mlp", "linear", "expert") or not tensor.name.endswith(".weight"):
        return f"{role}: not known to be a linear layer"
    is_numbered = any(component.isdigit() for component in tensor.name.split("."))
    if role == "linear" and tensor.shape[0] in tokens and not is_numbered:
        return "a row for each token, so an embedding or a head: the runtime does not quantize it"
    return None
