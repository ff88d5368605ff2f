"""The file in which `calibrate` keeps the activations that it has recorded, beside the rows that it sampled of them.

The sha256 of everything behind it (32 bytes), a line of JSON, and the arrays: for each matrix the sums of squares (f64)
and the windows of the rows of both samples (i64). A file that is damaged, or does not fit, counts as none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.writer import disk_errors, write_whole
from pqweights.measure.activations import Activations, WeightPlace

DIGEST_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class KeptActivations:
    """The content of the file.

    number: which part of the weights the model was run for
    rows: how many rows are kept of each matrix, to search on and held back
    where: the places of all weights in the model, by name
    windows: how many windows the model had read
    records: the state of Activations
    """

    number: int
    rows: tuple[int, int]
    where: dict[str, WeightPlace]
    windows: int
    records: list[dict[str, Any]]


def save_activations(
    path: Path,
    activations: Activations,
    *,
    samples: int,
    number: int,
    rows: tuple[int, int],
    where: Mapping[str, WeightPlace],
) -> None:
    """Write what was recorded so far. samples: the open file of the sampled rows, which is flushed before."""
    with disk_errors(path):
        os.fsync(samples)
    records, arrays = [], []
    for entry in activations.state():
        arrays += [entry["squares"], *(sample["windows"] for sample in entry["samples"])]
        samples_json = [{"seen": sample["seen"], "random": sample["random"]} for sample in entry["samples"]]
        sizes = {"channels": len(entry["squares"]), "samples": samples_json}
        records.append({"place": entry["place"], "along_rows": entry["along_rows"], **sizes})
    about = {
        "number": number,
        "rows": rows,
        "where": {name: [found.place, found.transposed] for name, found in where.items()},
        "windows": activations.windows,
        "records": records,
    }
    pieces = [json.dumps(about).encode() + b"\n", *(array.tobytes() for array in arrays)]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    write_whole(path.parent, path, [digest.digest(), *pieces])


def load_activations(path: Path, samples: Path) -> KeptActivations | None:
    """Read what was recorded; None if there is nothing, or if it is damaged. samples: the file of the sampled rows."""
    if not path.is_file() or not samples.is_file():
        return None
    data = path.read_bytes()
    if hashlib.sha256(data[DIGEST_BYTES:]).digest() != data[:DIGEST_BYTES]:
        return None
    end = data.index(b"\n", DIGEST_BYTES) + 1
    about, offset = json.loads(data[DIGEST_BYTES:end]), end

    def take(dtype: str, count: int) -> npt.NDArray[Any]:
        nonlocal offset
        offset += 8 * count
        return np.frombuffer(data, dtype=dtype, count=count, offset=offset - 8 * count)

    rows = tuple(about["rows"])
    for entry in about["records"]:
        entry["squares"] = take("f8", entry["channels"])
        for sample, capacity in zip(entry["samples"], rows, strict=True):
            sample["windows"] = take("i8", capacity)
    kept = KeptActivations(
        number=about["number"],
        rows=rows,
        where={name: WeightPlace((place[0], place[1]), flipped) for name, (place, flipped) in about["where"].items()},
        windows=about["windows"],
        records=about["records"],
    )
    return kept if samples.stat().st_size >= _sampled_bytes(kept) else None


def _sampled_bytes(kept: KeptActivations) -> int:
    """Return where the last row that was sampled ends in the file of samples."""
    end = last = 0
    for entry in kept.records:
        for sample, capacity in zip(entry["samples"], kept.rows, strict=True):
            columns = entry["channels"] * 4
            if sample["seen"]:
                last = end + min(sample["seen"], capacity) * columns
            end += capacity * columns
    return last
