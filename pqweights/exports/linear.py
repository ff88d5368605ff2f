"""Which weights of a master are linear layers that a runtime can hold as integers, judged by role, shape and name."""

from __future__ import annotations

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.errors import ExportError
from pqweights.exports.bf16 import is_encoded
from pqweights.exports.options import GroupSize
from pqweights.planning.roles import classify

# The longest row, in weights; eight rows are held in memory at once.
MOST_COLUMNS = 1 << 20
# Models whose linear weights are stored transposed, [in, out] (transformers' Conv1D).
TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")


def linear_weights(checkpoint: Checkpoint, groups: GroupSize, experts: str | None) -> dict[str, str | None]:
    """Return for every weight that the master encoded why it stays plain; None for a weight that can become integers.

    experts: why single experts stay plain; None if they need not

    Raises ExportError if a group size that the user asked for does not divide the rows of a weight, or if no weight can
    become integers.
    """
    model_type = str((checkpoint.config or {}).get("model_type"))
    if model_type in TRANSPOSED:
        raise ExportError(
            f"config.json: {model_type} stores its linear weights transposed, which {groups.target} cannot hold; use "
            "--target bf16 or mlx-q4"
        )
    result = {tensor.name: _why_plain(tensor, groups, experts) for tensor in checkpoint.tensors if is_encoded(tensor)}
    if None not in result.values():
        found = [reason for reason in result.values() if reason]
        sized = [reason for reason in found if "--group-size" in reason]  # a reason that the user can remove
        why = next(iter([*sized, *found]), "the master quantizes no linear layer")
        raise ExportError(f"no weight of this model can become integers for {groups.target}: {why}")
    return result


def _why_plain(tensor: LogicalTensor, groups: GroupSize, experts: str | None) -> str | None:
    reason = _not_linear(tensor, experts)
    columns = tensor.shape[-1] if tensor.shape else 1
    if reason is None and columns > MOST_COLUMNS:
        reason = f"rows of {columns} weights: only up to {MOST_COLUMNS} are held in memory"
    return reason or groups.why_not(tensor.name, columns)


def _not_linear(tensor: LogicalTensor, experts: str | None) -> str | None:
    role = classify(tensor.name, tensor.dtype, tensor.shape).name
    if role in ("embedding", "lm_head"):
        return f"{role}: the runtime does not quantize it"
    if len(tensor.shape) != 2:
        return f"fused weights {list(tensor.shape)}: the format stores single linear layers"
    if role == "expert" and experts is not None:
        return experts
    if role not in ("attention", "mlp", "linear", "expert") or not tensor.name.endswith(".weight"):
        return f"{role}: not known to be a linear layer"
    return None
