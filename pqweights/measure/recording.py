"""The runs of the model in a calibration: for which weights each records activations, and what is kept of them.

If the rows of inputs of all weights would take too much space, the model runs several times, each time for a part of
the weights. What a run has recorded is saved in between, so that an interrupted calibration continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pqweights.measure.scale_search import FEWEST_ROWS
from pqweights.measure.unfinished import Unfinished
from pqweights.notices import slow_step
from pqweights.planning.plan import TensorPlan
from pqweights.runtimes.packages import Refused, quiet

if TYPE_CHECKING:
    from pqweights.measure.activations import Activations, Place, TextWindow, WeightPlace
    from pqweights.measure.activations_file import KeptActivations

# The most rows of inputs that are kept of each matrix, to search on and held back; fewer if the disk space is short.
MOST_ROWS = (768, 384)
# The most disk space for the rows of one run, in bytes; those of a single weight may take more.
SAMPLE_BYTES = 8_000_000_000
# The activations are saved while the model runs, for a run that continues this one: at most this often, and so that
# saving takes at most this share of the time.
SECONDS_BETWEEN_SAVES = 5.0
SAVING_SHARE = 0.05


class LoadedModel:
    """The model of a calibration, which is loaded when it is first needed: perhaps never in a run that is continued.

    source: its folder
    dtype, device_map: as in CalibrationOptions
    """

    def __init__(self, source: Path, *, dtype: str, device_map: str | None) -> None:
        self._source, self._dtype, self._device_map, self._model = source, dtype, device_map, None

    @property
    def cannot_run(self) -> str:
        """How messages about a model that transformers refuses begin."""
        return f"{self._source}: transformers cannot run this model"

    def get(self) -> Any:
        """Return the model. Raises SourceError if it lacks weights: its activations would be those of random ones."""
        from pqweights.integrations.transformers import load
        from pqweights.runtimes.models import check_loaded

        if self._model is None:
            with slow_step(f"loading {self._source}"), Refused(self.cannot_run), quiet():
                loaded = load(
                    self._source, dtype=self._dtype, device_map=self._device_map, experts_implementation="eager"
                )
            name = type(loaded.model).__name__
            check_loaded(self._source, name, missing=loaded.missing, unexpected=loaded.unexpected)
            self._model = loaded.model
        return self._model

    def places(self, names: Sequence[str]) -> dict[str, WeightPlace]:
        """Return where tensors of the checkpoint are in the model."""
        from pqweights.measure.activations import places

        model = self.get()
        with Refused(self.cannot_run), quiet():
            return places(model, names)

    def free(self) -> None:
        """Free the memory of the model."""
        self._model = None


@dataclass(frozen=True, kw_only=True)
class ModelRun:
    """A run of the model for one part of the weights.

    work: where the activations are kept
    samples: the descriptor of the file of sampled rows
    number: which part it is
    rows: how many rows are kept of each matrix
    where: the places of all weights in the model
    """

    work: Unfinished
    samples: int
    number: int
    rows: tuple[int, int]
    where: Mapping[str, WeightPlace]

    def run(
        self,
        model: LoadedModel,
        windows: Sequence[TextWindow],
        *,
        weights: Sequence[TensorPlan],
        kept: KeptActivations | None,
        progress: Callable[[int, int], None],
    ) -> Activations:
        """Return the activations of some weights; what `kept` has of this part is not computed again.

        progress: called with the windows done and the windows in all.
        """
        from pqweights.measure.activations import Activations, Sampling, watch

        wanted = {place for tensor in weights for place in places_of(tensor, self.where.get(tensor.name))}
        activations = Activations(Sampling(wanted=wanted, rows=self.rows, descriptor=self.samples))
        if kept is not None and (kept.number, kept.rows) == (self.number, self.rows):
            activations.restore(kept.windows, kept.records)
        due = time.monotonic() + SECONDS_BETWEEN_SAVES

        def after_window(done: int, total: int) -> None:
            nonlocal due
            start = time.monotonic()
            if done == total or start >= due:
                self._save(activations)
                end = time.monotonic()
                due = end + max(SECONDS_BETWEEN_SAVES, (end - start) / SAVING_SHARE)
            progress(done, total)

        if activations.windows < len(windows):
            loaded = model.get()
            with Refused(model.cannot_run):
                watch(loaded, windows, activations, progress=after_window)
        return activations

    def _save(self, activations: Activations) -> None:
        from pqweights.measure.activations_file import save_activations

        save_activations(
            self.work.state,
            activations,
            samples=self.samples,
            number=self.number,
            rows=self.rows,
            where=self.where,
        )


def places_of(planned: TensorPlan, where: WeightPlace | None) -> list[Place]:
    """Return the places of the matrices of a weight, in order.

    A stack in the file is a stack in the model; an expert that is a tensor of its own is a part of a stack there.
    """
    return [] if where is None else places_of_shape(planned.shape, where)


def places_of_shape(shape: tuple[int, ...], where: WeightPlace) -> list[Place]:
    """Return the places of the matrices of a weight of this shape, in order; see places_of."""
    name, expert = where.place
    if len(shape) == 3:
        return [(name, number) for number in range(shape[0])]
    return [(name, expert)] if len(shape) == 2 else []


def _channels(tensors: Sequence[TensorPlan], where: Mapping[str, WeightPlace]) -> int:
    """Return the number of input channels of all matrices; matrices with the same inputs count once."""
    by_place = {place: t.shape[-1] for t in tensors for place in places_of(t, where.get(t.name))}
    return sum(by_place.values())


def rows_kept(planned: Sequence[TensorPlan], where: Mapping[str, WeightPlace]) -> tuple[int, int]:
    """Return how many rows are kept of each matrix, to search on and held back: fewer if there are many matrices."""
    share = min(1.0, SAMPLE_BYTES / (4 * max(_channels(planned, where), 1) * sum(MOST_ROWS)))
    rows = [max(fewest, int(most * share)) for most, fewest in zip(MOST_ROWS, FEWEST_ROWS, strict=True)]
    return rows[0], rows[1]


def parts_of(
    planned: Sequence[TensorPlan], where: Mapping[str, WeightPlace], rows: tuple[int, int]
) -> list[list[TensorPlan]]:
    """Return the weights in parts, such that the rows of each part fit into SAMPLE_BYTES."""
    parts: list[list[TensorPlan]] = [[]]
    for tensor in planned:
        if parts[-1] and 4 * sum(rows) * _channels([*parts[-1], tensor], where) > SAMPLE_BYTES:
            parts.append([])
        parts[-1].append(tensor)
    return parts
