"""The report of a plan: what quantize would do with each tensor, and what that takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any

from pqweights.checkpoint.readers import file_uses, most_fetched
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.storage import LOW_DISK_FILES
from pqweights.common.options import Options
from pqweights.common.strict_json import LIST_ITEM, JsonText, json_pieces, json_text
from pqweights.convert.needs import ResourceNeeds, resource_needs
from pqweights.convert.plan import Plan
from pqweights.planning.calibration import PlannedCalibration, check_calibration, planned_calibration
from pqweights.planning.expected import Measured, expected, expected_json
from pqweights.planning.fit import Fit
from pqweights.planning.layout import TensorPlan, Totals
from pqweights.planning.recipe import Recipe
from pqweights.storage import Store
from pqweights.targets.lossless import sampled_grids
from pqweights.targets.master import Learned, plan_quantize
from pqweights.targets.memory import MemoryAdvice, PossibleExport, advise, possible_exports

# How an entry of plan --json begins.
BEFORE_NAME = f'{{{LIST_ITEM}  "name": '


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanReport:
    """What quantizing a checkpoint would do.

    plan: every output tensor and byte
    needs: disk space and memory
    hub: what is fetched of a source on the Hub: `repository`, `revision`, the commit of the plan, `source_bytes`, the
        size of the weight files, and `low_disk_bytes`, the most of them that `low_disk` keeps at a time; else empty
    exports: what the result can be exported to
    expected: what about so many bits cost on the nearest models that were measured; empty if nothing alike was
    grids: how many weights lie on the grid of which format, and how many on none, by a sample; empty if none do
    memory: which exports a memory has room for; None if nobody asked
    calibration: what `calibrate` would do, with which the bytes of its weights are about those; None without it
    """

    plan: Plan
    needs: ResourceNeeds
    hub: dict[str, Any]
    exports: tuple[PossibleExport, ...]
    expected: tuple[Measured, ...]
    grids: dict[str, int]
    memory: MemoryAdvice | None = None
    calibration: PlannedCalibration | None = None

    @property
    def tensors(self) -> tuple[TensorPlan, ...]:
        """What becomes of each tensor, in the order of the checkpoint."""
        return self.plan.tensors

    @property
    def totals(self) -> Totals:
        """Sizes, counts and bits per weight of the whole result."""
        return self.plan.totals

    @property
    def fit(self) -> Fit | None:
        """How bit widths were chosen for a target; None without one."""
        return self.plan.fit

    def __repr__(self) -> str:
        return f"<PlanReport: {self.totals}>"

    def to_json(self) -> dict[str, Any]:
        """Return the document of plan --json."""
        return self._document([tensor.to_json() for tensor in self.tensors])

    def to_pieces(self) -> Iterator[bytes]:
        """Return the text of plan --json, in pieces, in a quarter of the time that to_json and json_bytes take."""
        return json_pieces(self._document(_entries(self.tensors)))

    def _document(self, tensors: list[dict[str, Any]] | Iterator[JsonText]) -> dict[str, Any]:
        return {
            "totals": self.totals.to_json() | self.needs.to_json(),
            "tensors": tensors,
            "shards": [{"file": shard.file, "bytes": shard.file_bytes} for shard in self.plan.shards],
            "copied_files": list(self.plan.companions),
            "left_out_files": self.plan.left_out,
            "exports": [export.to_json() for export in self.exports],
            "left_out_tensors": self.plan.left_out_tensors,
            "warnings": list(self.plan.remarks),
            **self.plan.quantized_before(),
            **({"measured": expected_json(self.expected)} if self.expected else {}),
            **({"grids": self.grids} if self.grids else {}),
            **({} if self.memory is None else {"memory": self.memory.to_json()}),
            **({} if self.calibration is None else {"calibration": asdict(self.calibration)}),
            **({} if self.fit is None else {"fit": self.fit.to_json()}),
            **({"hub": self.hub} if self.hub else {}),
        }


def _entries(tensors: Sequence[TensorPlan]) -> Iterator[JsonText]:
    """Yield the text of each tensor's entry in plan --json.

    Thousands of tensors differ in their names alone, so the rest of an entry is written once for all of them.
    """
    rests: dict[tuple[object, ...], str] = {}
    for tensor in tensors:
        rest = rests.get(tensor.kind)
        if rest is None:
            nameless = json_text(tensor._replace(name="").to_json(), LIST_ITEM)
            rest = rests[tensor.kind] = nameless.removeprefix(f'{BEFORE_NAME}""')
        yield JsonText(f"{BEFORE_NAME}{encode_basestring(tensor.name)}{rest}")


def report_plan(
    source: str | Path,
    recipe: Recipe,
    options: Options,
    out: Store | None = None,
    *,
    learned: Learned = Learned(),
) -> PlanReport:
    """Plan what quantizing a source would do, from its headers alone, and say on which grids a few of its numbers lie.

    options: `threads` of which the memory is estimated
    out: where the result is to be written; by default a local folder
    learned: the sensitivities that were measured, if the plan depends on any

    Raises SourceError, RecipeError, OptionError or HubError.
    """
    plan = plan_quantize(source, recipe, options, learned)
    checkpoint = plan.checkpoint
    calibration = None
    if options.calibrate is not None or options.awq is not None:
        check_calibration(options)
        calibration = planned_calibration(recipe, plan.tensors, checkpoint.config, options)
    is_elsewhere = out is not None and out.is_elsewhere
    exports, advice = possible_exports(checkpoint), None
    if options.memory is not None:
        advice = advise(checkpoint, plan.tensors, exports, options)
    needs = resource_needs(
        plan,
        options.thread_count,
        storages=[checkpoint.storage],
        is_elsewhere=is_elsewhere,
        calibration_bytes=0 if calibration is None else calibration.disk_bytes,
    )
    return PlanReport(
        plan=plan,
        needs=needs,
        hub=_traffic(checkpoint),
        exports=exports,
        expected=() if options.lossless else expected(plan.totals.weights, plan.totals.bits_per_weight),
        grids=sampled_grids(checkpoint),
        memory=advice,
        calibration=calibration,
    )


def _traffic(checkpoint: Checkpoint) -> dict[str, Any]:
    storage = checkpoint.storage
    if storage.origin is None:
        return {}
    return {
        "repository": storage.origin.id,
        "revision": storage.origin.revision,
        "source_bytes": checkpoint.weight_file_bytes,
        "low_disk_bytes": most_fetched(file_uses(checkpoint.tensors), storage.files(), LOW_DISK_FILES),
    }
