"""The one verb: a plan becomes a result. Quantizing and every export run through it.

What is planned is made shard by shard in the work folder of a store, published, and stated by the manifest, which is
written last: a folder with a manifest is a finished result, and in a folder without one, every file with a final name
is complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

from pqweights.checkpoint.writer import check_room
from pqweights.common.options import Options
from pqweights.convert.finished import finished_result
from pqweights.convert.journal import is_under_way
from pqweights.convert.manifest import Manifest
from pqweights.convert.needs import result_need
from pqweights.convert.plan import Plan
from pqweights.convert.records import TensorRecord
from pqweights.convert.report import RewriteReport
from pqweights.convert.run import Mark, Run, open_run
from pqweights.convert.shard import make_shards
from pqweights.errors import ClusterError, MasterError, OutputError, SourceChangedError, SourceError, SourceReadError
from pqweights.planning.layout import ShardPlan
from pqweights.storage import Store


def convert(plan: Plan, store: Store, options: Options = Options()) -> RewriteReport:
    """Make a result in a store, continuing what an interrupted run of the same plan left there.

    Raises SourceError, OutputError or HubError; after any of them every file under a final name is complete.
    """
    assert not plan.checkpoint.unproven
    if not options.overwrite and (manifest := finished_result(plan, store)) is not None:
        return _report(plan, manifest.records, already_done=True, resumed=len(manifest.records))
    with open_run(plan, store, overwrite=options.overwrite) as run, _changes_explained(run):
        with _unusable_work_discarded(run):
            if options.engine is None:
                check_room([result_need(plan, run), *plan.fetch_needs])
            else:
                options.engine.check(plan, run)
            resumed = _take_up(plan, run.marks)
            run.send(run.marks)
            plan.learn(options.progress)
            marks = dict(run.marks)
            missing = [shard for shard in plan.shards if shard.file not in marks]
            if options.engine is not None:
                marks |= options.engine.make_shards(plan, run, missing, options.progress)
            else:
                for shards in _together(missing, run.store):
                    marks |= make_shards(
                        plan, run, shards, threads=options.thread_count, progress=options.progress, made=marks
                    )
            plan.finish_checks()
        plan.check_sources()
        options.check()
        run.publish()
        records = tuple(record for shard in plan.shards for record in marks[shard.file][0])
        run.complete(stated(plan, run, records).to_pieces())
    return _report(plan, records, already_done=False, resumed=resumed)


def _take_up(plan: Plan, marks: Mapping[str, Mark]) -> int:
    """Take up the shards that an interrupted run has finished, and return how many tensors they hold."""
    plans = {planned.name: planned for planned in plan.tensors}
    for records, fingerprints in marks.values():
        plan.checkpoint.restore_fingerprints(fingerprints)
        for record in records:
            plan.accept(plans[record.name], record)
    return sum(len(records) for records, _ in marks.values())


def _together(shards: list[ShardPlan], store: Store) -> list[list[ShardPlan]]:
    """Return which shards are made together: all, or of what is sent one by one, since the disk holds one."""
    return [shards] if store.sending is None else [[shard] for shard in shards]


def stated(plan: Plan, run: Run, records: tuple[TensorRecord, ...]) -> Manifest:
    """Write the files without tensors, and return the manifest of the result."""
    storage, companions = plan.checkpoint.storage, plan.companions
    with storage.fetching(run.fetched, dict.fromkeys(companions, 1)):
        contents = plan.contents(records)
        files = {name: run.store.write(name, pieces()) for name, pieces in contents.items()}
        fingerprint = plan.checkpoint.fingerprint()
        plan.check_sources()  # after everything was read, and before anything states what it was
    return replace(plan.manifest, source_fingerprint=fingerprint, records=records, files=files)


def unmeasured(plan: Plan) -> RewriteReport:
    """Return the report of a result that is planned, and not made."""
    records = tuple(TensorRecord(name=tensor.name) for tensor in plan.tensors)
    return _report(plan, records, already_done=False, resumed=0)


def _report(plan: Plan, records: tuple[TensorRecord, ...], *, already_done: bool, resumed: int) -> RewriteReport:
    return RewriteReport(
        plan=plan,
        records=records,
        already_done=already_done,
        resumed=resumed,
        source_bytes_read=plan.bytes_read,
        unchecked=plan.checkpoint.is_master and plan.checkpoint.checked is None,
    )


@contextlib.contextmanager
def _unusable_work_discarded(run: Run) -> Iterator[None]:
    """Remove what the run has written if it fails, and no run can use it.

    Content that no run can use is found again by every run over the same files, so a run that began here removes what
    it wrote. One that continues another leaves that, and a read that failed leaves what was finished before.
    """
    try:
        yield
    except (SourceError, MasterError, ClusterError, OutputError) as error:
        may_pass = not isinstance(error, SourceError | MasterError) or isinstance(
            error, SourceReadError | SourceChangedError
        )
        if not (run.holds_work() if may_pass else run.marks):
            run.discard()
        raise


@contextlib.contextmanager
def _changes_explained(run: Run) -> Iterator[None]:
    """Say what becomes of the shards that are finished when a source has changed.

    What has changed is checked before a shard is recorded, so those that are finished were all made of the files that
    the journal states, and count as long as the files are those.
    """
    try:
        yield
    except SourceChangedError as error:
        if not is_under_way(run.store):
            raise
        raise SourceChangedError(
            f"{error}, with `overwrite` to use the files as they are now; the finished tensors were made from the "
            "earlier files, and are kept for them"
        ) from None
