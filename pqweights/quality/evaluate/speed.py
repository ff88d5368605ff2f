"""The speed and peak memory of a model that generates text.

Each model runs in a process of its own, so that its peak holds no other model. The settings are those of the tables in
arXiv:2603.29078 v1: 100 tokens, three runs after one to warm up, greedy, one sequence, with a key-value cache.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pqweights import errors
from pqweights.errors import EvaluationError, PqweightsError
from pqweights.inference.runtimes.memory import peak_bytes
from pqweights.inference.runtimes.models import open_model
from pqweights.inference.runtimes.texts import Ids

TOKENS, RUNS = 100, 3
PROMPT_TOKENS = 16
CHILD = "from pqweights.quality.evaluate.speed import main; main()"


@dataclass(frozen=True)
class Speed:
    """The speed of one model.

    tokens_per_second: the rate of each run, reading the prompt included.
    peak_bytes: the peak memory of the process, loading included; on cuda, what torch allocated on the GPU.
    dtype: the dtype of the arithmetic.
    """

    tokens_per_second: tuple[float, ...]
    peak_bytes: int
    dtype: str

    @property
    def mean(self) -> float:
        """The mean rate of all runs, in tokens per second."""
        return statistics.fmean(self.tokens_per_second)

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the speed in eval --json."""
        return {
            "tokens_per_second": self.mean,
            "runs": list(self.tokens_per_second),
            "peak_bytes": self.peak_bytes,
            "dtype": self.dtype,
        }


def measure_speed(path: Path, ids: Ids, *, device: str, dtype: str, packed: bool) -> Speed:
    """Load a model in a new process and let it continue the first tokens of a text.

    device, dtype, packed: see open_model. Raises what open_model raises, and EvaluationError if the process fails.
    """
    with tempfile.TemporaryDirectory() as temporary:
        answer = Path(temporary) / "answer.json"
        request = {
            "path": str(path.absolute()),
            "ids": ids[:PROMPT_TOKENS].tolist(),
            "device": device,
            "dtype": dtype,
            "packed": packed,
            "answer": str(answer),
        }
        command = [sys.executable, "-c", CHILD, json.dumps(request)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
        if not answer.is_file():
            last_line = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1]
            how = f"signal {-done.returncode} (9: out of memory?)" if done.returncode < 0 else f"code {done.returncode}"
            raise EvaluationError(f"{path}: the process that measures its speed ended with {how}: {last_line[:300]}")
        answered = json.loads(answer.read_text())
    if "error" in answered:
        raise getattr(errors, answered["error"])(answered["message"])
    return Speed(tuple(answered["tokens_per_second"]), answered["peak_bytes"], answered["dtype"])


def main() -> None:
    """Run in the new process: measure what the JSON argument asks for and write the answer to its file."""
    request = json.loads(sys.argv[1])
    try:
        measured = _measured(request)
    except PqweightsError as error:
        measured = {"error": type(error).__name__, "message": str(error)}
    Path(request["answer"]).write_text(json.dumps(measured))


def _measured(request: dict[str, Any]) -> dict[str, Any]:
    how = {name: request[name] for name in ("device", "dtype", "packed")}
    model = open_model(Path(request["path"]), **how)
    ids, rates = np.array(request["ids"], dtype=np.int64), []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        count = len(model.generate(ids, TOKENS))
        rates.append(count / (time.perf_counter() - start))
    return {"tokens_per_second": rates[1:], "peak_bytes": peak_bytes(request["device"]), "dtype": model.dtype}
