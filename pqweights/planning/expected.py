"""What bits cost on the models that were measured, for a first idea of what they cost on another.

Small models pay more: the nearest one in size says more than the recipe. docs/quality.md has the measurement, whose
figures these are; calibrated masters were measured of fewer models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pqweights.formats.lloyd_max import LloydMax
from pqweights.formats.trellis import Trellis

# The parameters of the models.
SMOLLM2, QWEN, QWEN_1B = "SmolLM2-135M", "Qwen2.5-Coder-0.5B", "Qwen2.5-Coder-1.5B"
PARAMETERS = {SMOLLM2: 134_515_008, QWEN: 630_167_424, QWEN_1B: 1_777_088_000}
# Masters are compared whose bits per weight differ by no more than this.
ALIKE_BITS = 0.2


class Measured(NamedTuple):
    """A master that was measured.

    model: of PARAMETERS
    codec, bits: of all matrices, all overhead counted
    is_calibrated: on what the model writes and knows
    divergence: KL(original || master), in nats per token of English
    agreement: the share of tokens at which both rank the same one first
    """

    model: str
    codec: str
    bits: float
    is_calibrated: bool
    divergence: float
    agreement: float


MEASURED = (
    Measured(SMOLLM2, LloydMax.codec, 6.125, False, 0.0271, 0.904),
    Measured(SMOLLM2, LloydMax.codec, 5.125, False, 0.1132, 0.802),
    Measured(SMOLLM2, Trellis.codec, 5.125, False, 0.0393, 0.896),
    Measured(SMOLLM2, Trellis.codec, 5.125, True, 0.0091, 0.953),
    Measured(SMOLLM2, Trellis.codec, 4.125, False, 0.1867, 0.743),
    Measured(SMOLLM2, Trellis.codec, 4.125, True, 0.0342, 0.906),
    Measured(SMOLLM2, Trellis.codec, 3.125, False, 0.8627, 0.506),
    Measured(SMOLLM2, Trellis.codec, 3.125, True, 0.1385, 0.815),
    Measured(SMOLLM2, LloydMax.codec, 4.125, False, 0.4881, 0.63),
    Measured(SMOLLM2, LloydMax.codec, 3.125, False, 2.5238, 0.258),
    Measured(SMOLLM2, Trellis.codec, 2.125, False, 5.0046, 0.091),
    Measured(SMOLLM2, Trellis.codec, 2.125, True, 0.6446, 0.609),
    Measured(QWEN, LloydMax.codec, 6.125, False, 0.0054, 0.951),
    Measured(QWEN, LloydMax.codec, 5.125, False, 0.0228, 0.905),
    Measured(QWEN, Trellis.codec, 5.125, False, 0.0097, 0.936),
    Measured(QWEN, Trellis.codec, 5.125, True, 0.0022, 0.977),
    Measured(QWEN, Trellis.codec, 4.125, False, 0.0369, 0.877),
    Measured(QWEN, Trellis.codec, 4.125, True, 0.009, 0.948),
    Measured(QWEN, LloydMax.codec, 4.125, False, 0.0846, 0.813),
    Measured(QWEN, LloydMax.codec, 3.125, False, 0.3819, 0.649),
    Measured(QWEN, Trellis.codec, 3.125, False, 0.1594, 0.762),
    Measured(QWEN, Trellis.codec, 2.125, False, 0.8772, 0.511),
    Measured(QWEN_1B, LloydMax.codec, 5.125, False, 0.0145, 0.929),
    Measured(QWEN_1B, LloydMax.codec, 6.125, False, 0.0038, 0.962),
    Measured(QWEN_1B, LloydMax.codec, 4.125, False, 0.0547, 0.858),
    Measured(QWEN_1B, LloydMax.codec, 3.125, False, 0.238, 0.716),
    Measured(QWEN_1B, Trellis.codec, 5.125, False, 0.0056, 0.947),
    Measured(QWEN_1B, Trellis.codec, 4.125, False, 0.0235, 0.914),
    Measured(QWEN_1B, Trellis.codec, 3.125, False, 0.1111, 0.788),
    Measured(QWEN_1B, Trellis.codec, 2.125, False, 0.4761, 0.624),
)


def expected(parameters: int, bits_per_weight: float | None) -> tuple[Measured, ...]:
    """Return the masters of about so many bits that were measured: of each kind that of the model nearest in size."""
    if not parameters or bits_per_weight is None:
        return ()
    alike = (of for of in MEASURED if abs(of.bits - bits_per_weight) <= ALIKE_BITS)
    nearest = dict[tuple[str, bool], Measured]()
    for of in sorted(alike, key=lambda of: abs(math.log(PARAMETERS[of.model] / parameters))):
        nearest.setdefault((of.codec, of.is_calibrated), of)
    return tuple(nearest.values())


def expected_json(rows: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return the key `measured` of plan --json."""
    return [row._asdict() | {"parameters": PARAMETERS[row.model]} for row in rows]
