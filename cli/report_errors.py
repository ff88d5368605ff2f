"""What the commands say of errors: of the weights of a master, and of the integers of an export."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pqweights.common.units import counted

from .report import lines_by_reason

if TYPE_CHECKING:
    from pqweights.planning.plan import TensorPlan
    from pqweights.rewrite.records import TensorRecord

    Pairs = Sequence[tuple[TensorPlan, TensorRecord]]

WORST_SHOWN = 5


def quality_lines(pairs: Pairs) -> list[str]:
    """Return the total error of quantized weights, the worst ones, and those that were rescued or exceed the promise.

    pairs: the tensors of a result, each with what was measured of it; those without an error do not count.
    """
    from pqweights.rewrite.records import exceeds, is_rescued, total_relative_mse

    measured = [(tensor, record) for tensor, record in pairs if record.relative_mse is not None]
    if not measured:
        return []
    return [
        f"relative MSE of the quantized weights: {total_relative_mse([record for _, record in pairs]):.6f}",
        *_worst_lines(measured),
        *(_rescued_line(*pair) for pair in measured if is_rescued(*pair)),
        *(_warning(*pair) for pair in measured if exceeds(*pair)),
    ]


def _worst_lines(pairs: Pairs) -> list[str]:
    """Return the weights whose errors are the largest, relative to the largest one that needs no rescue."""
    from pqweights.rewrite.records import promise

    shares = [(record.relative_mse or 0) / (promise(tensor) or 1) for tensor, record in pairs]
    worst = sorted(range(len(pairs)), key=shares.__getitem__, reverse=True)[:WORST_SHOWN]
    return [
        f"  worst: {tensor.name} at {tensor.bits} bits: {record.relative_mse:.6f} ({share:.0%} of its codec's limit)"
        for (tensor, record), share in ((pairs[number], shares[number]) for number in worst)
    ]


def _rescued_line(tensor: TensorPlan, record: TensorRecord) -> str:
    state = ", ".join(f"{key} {value}" for key, value in (record.state or {}).items() if value)
    return f"rescued: {tensor.name}: {state}, relative MSE {record.relative_mse:.6f}"


def _warning(tensor: TensorPlan, record: TensorRecord) -> str:
    from pqweights.rewrite.records import promise

    return (
        f"WARNING: {tensor.name}: relative MSE {record.relative_mse:.6f} is above the limit of {promise(tensor):.6f}, "
        "however the codec encodes it; give the tensor more bits or keep it with a rule"
    )


def integer_form_lines(pairs: Pairs, *, measured: bool) -> list[str]:
    """Return how many weights an integer export holds in which form, why others are plain, and the errors.

    pairs: the tensors of the export, each with what was measured of it
    measured: whether the error against the original was measured; else it is computed from the error of the master
    """
    tensors = [tensor for tensor, _ in pairs]
    forms: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        if tensor.bits is not None:
            rule = tensor.reason.partition(";")[0]  # without what it is folded with
            forms[f"{tensor.bits} bits, {tensor.codec}, {rule}"] += 1
    if not forms:
        return []
    plain = [tensor for tensor in tensors if tensor.bits is None and tensor.action == "decode"]
    return [
        *(f"  {form}: {counted(number, 'tensor')}" for form, number in forms.items()),
        *(f"plain: {group}" for group in lines_by_reason(plain)),
        *_rounding_lines(pairs),
        *_integer_error_lines([record for _, record in pairs], measured=measured),
    ]


def _rounding_lines(pairs: Pairs) -> list[str]:
    """Return which weights were rounded with compensation, what that gained, and why others were not."""
    accounts = [record.rounding for _, record in pairs if record.rounding is not None]
    if not accounts:
        return []
    gains = [account["gain"] for account in accounts if account.get("compensated")]
    weighed = any("weighed" in account for account in accounts)
    done = sum(account["weighed" if weighed else "compensated"] for account in accounts)
    matrices = sum(account["matrices"] for account in accounts)
    gain = (
        f"; the error of outputs on text held back falls by {sum(gains) / len(gains):.0%} on average" if gains else ""
    )
    reasons: dict[str, int] = defaultdict(int)
    for account in accounts:
        for reason, number in account["rounded_plainly"].items():
            reasons[reason] += number
    kind = "errors weighed by inputs" if weighed else "compensated rounding"
    return [
        f"{kind}: {done} of {matrices} weight matrices{gain}",
        *(f"  rounded plainly: {number}: {reason}" for reason, number in reasons.items()),
    ]


def _integer_error_lines(records: Sequence[TensorRecord], *, measured: bool) -> list[str]:
    from pqweights.rewrite.records import mean_error

    against = "relative MSE against the original"
    added, total, by_master = (mean_error(records, of) for of in ("relative_mse", "total_mse", "master_mse"))
    if measured and total is not None and by_master is not None:
        return [f"{against}: {total:.6f}; exported from the master it would be {by_master:.6f}"]
    if measured and total is not None:
        return [f"{against}: {total:.6f}"]
    if added is None:
        return []
    return [
        f"relative MSE against the master: {added:.6f}",
        f"{against}: unknown; pass --source to measure it"
        if total is None
        else f"{against}: {total:.6f}, computed from the error of the master; --source measures it",
    ]
