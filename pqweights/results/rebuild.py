"""A result made again as its manifest says, kept or only hashed, and what the two results differ in."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pqweights.checkpoint.ahead import Stop
from pqweights.checkpoint.companions import is_needed
from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.checkpoint.shard_file import Bytes, ShardFile
from pqweights.common.options import BY_MODEL, IMATRIX, MAKING, OPENING, Options
from pqweights.convert.convert import stated
from pqweights.convert.manifest import Manifest, shards_of
from pqweights.convert.plan import MASTER, Plan
from pqweights.convert.report import RewriteReport
from pqweights.convert.run import Mark, Run
from pqweights.convert.shard import make_shards
from pqweights.errors import MasterError, OptionError
from pqweights.formats.native import Native
from pqweights.planning.layout import ShardPlan
from pqweights.planning.recipe import Recipe, parse_recipe
from pqweights.storage import Store
from pqweights.storage.addresses import repository_id
from pqweights.storage.store import default_scratch, make_scratch
from pqweights.targets import get_target, gguf, target_name
from pqweights.targets.gguf_types import read_types


@dataclass(frozen=True, kw_only=True)
class Rebuilt:
    """A result that was made again from its manifest.

    report: of the run
    differences: what is not as the manifest states it, a line each
    """

    report: RewriteReport
    differences: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every byte is as the manifest states it."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """Return what `rebuild --json` prints."""
        return {"ok": self.ok, "differences": list(self.differences)} | self.report.to_json()


def options_of(manifest: Manifest, source: str | Path, given: Options) -> Options:
    """Return the options with which a result is made again.

    Raises MasterError for a manifest that does not say it as this version does, OptionError for a sample that is
    missing.
    """
    try:
        return _options_of(manifest, source, given)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # of keys whose values nobody has checked yet
        raise MasterError(f"{MANIFEST_FILE}: does not say how the result was made: {error!r}"[:200]) from None


def _options_of(manifest: Manifest, source: str | Path, given: Options) -> Options:
    opening: dict[str, Any] = {name: getattr(given, name) for name in (*OPENING, *MAKING)}
    if given.revision is None and manifest.origin is not None and repository_id(str(source)) == manifest.origin.id:
        opening["revision"] = manifest.origin.revision
    made_by = manifest.made_by
    opening |= {"leave_out": made_by.get("leave_out", []), "max_shard_size": manifest.max_shard_bytes}
    places = (made_by.get("calibrated"), made_by.get("fit", made_by).get("sensitivity"))
    if given.eval is None and any("eval_sha256" in about for about in places if about is not None):
        raise OptionError("`eval`: give the text on which `max_kl` was measured; the manifest has only its digest")
    if manifest.kind == MASTER:
        return _quantize_options(manifest, opening, given)
    return replace(_export_options(manifest, given), **opening)


def _quantize_options(manifest: Manifest, opening: dict[str, Any], given: Options) -> Options:
    if given.type is not None:
        raise OptionError("`type`: chooses among GGUF files, and the result is a master")
    made_by = manifest.made_by
    if made_by["recipe"].get("codec") == Native.codec:
        return Options(lossless=True, **opening)
    sample: dict[str, Any] = {}
    if (about := made_by.get("calibrated")) is not None:
        sample = _stated_sample("calibrate", about, given) | {"rate": about.get("rate", BY_MODEL)}
    elif "sample" in (about := made_by.get("fit", {}).get("sensitivity", {})):
        sample = _stated_sample("calibrate", about, given)
    elif (about := made_by.get("awq")) is not None:
        sample = _stated_sample("awq", about, given)
    return Options(recipe=_recipe(made_by["recipe"]), **opening, **sample)


def _export_options(manifest: Manifest, given: Options) -> Options:
    made_by = manifest.made_by
    name = target_name(made_by["target"])
    if name is None:
        raise MasterError(f"the manifest is of the target {str(made_by['target'])[:80]!r}, which this version lacks")
    if (results := made_by.get("results")) is not None:
        first, *others = results.values()
        own = ("format", "bits", "mode", "mix")
        same = {key: of for key, of in first.items() if key in own or all(other.get(key) == of for other in others)}
        shared = {key: of for key, of in made_by.items() if key != "results"}
        one = _export_options(replace(manifest, made_by=shared | same), given)
        if all(folder.endswith("bit") for folder in results):
            return replace(one, format=None, bits=",".join(folder.removesuffix("bit") for folder in results))
        return replace(one, format=",".join(results), bits=None, mode=None)
    options = {key: made_by[key] for key in get_target(name).options if key in made_by and key != "sensitivity"}
    unstated = {"rounding": None, "name": None}  # without the sample, and the types in the name
    if (mix := made_by.get("mix")) is not None:  # of MLX, which says mode and bits
        options = {key: value for key, value in options.items() if key not in ("mode", "bits")} | {"format": mix}
    size: dict[str, Any] = {key: made_by[key] for key in ("target_size", "target_bpw", "max_kl") if key in made_by}
    if size:  # which chose the bits; those of the format are stated, too
        options.pop("bits", None)
    if "group_size" in options:  # stated, whether it was asked for, so that it must divide all rows, or not
        usual = {key: value for key, value in options.items() if key != "group_size"}
        stated = get_target(name).settings(Options(**usual | unstated)).stated
        options = usual if stated["group_size"] == options["group_size"] else options
    if made_by.get("rules"):
        options |= dict.fromkeys(size) | {"recipe": _recipe({"target": name, "rules": made_by["rules"], **size})}
    if name == gguf.NAME:
        mixes, _ = read_types(get_target(name).with_recipe(Options(**options | unstated)))
        base = str(made_by["name"]).removesuffix(gguf.names_together("", mixes))
        named = manifest.model.get("id") if manifest.is_of_master else manifest.origin and manifest.origin.id
        # The source has its own name, too, perhaps with a slash.
        options["name"] = None if base == str(named).rpartition("/")[2] else base
        if given.type is not None:
            chosen = get_target(name).with_recipe(Options(**options | unstated | {"type": given.type}))
            if unknown := [label for label in read_types(chosen)[0] if label not in mixes]:
                raise OptionError(f"`type`: the manifest has {', '.join(mixes)}, not {', '.join(unknown)}")
            options["type"] = given.type
    elif given.type is not None:
        raise OptionError(f"`type`: chooses among GGUF files, and the result is of the target {name}")
    about = made_by.get("calibration") or made_by.get("sensitivity")
    if about is not None and about["sample"] == IMATRIX:
        if given.imatrix is None:
            raise OptionError("`imatrix`: give the file of importances; the manifest has only its digest")
        options["imatrix"] = given.imatrix
    elif about is not None:
        options |= _stated_sample("calibrate", about, given)
    return Options(**options)


def differences(stated: Manifest, again: Manifest, *, some: bool = False) -> list[str]:
    """Return what a result that was made again does not have as its manifest states it, and what may explain that.

    some: whether it has some of the files alone
    """
    different = list(_differences(stated, again, some=some))
    return [*different, *_explained(stated, again)] if different else []


def _differences(stated: Manifest, again: Manifest, *, some: bool) -> Iterator[str]:
    theirs, ours = ({shard.file: shard for shard in shards_of(each)} for each in (stated, again))
    digests = [{name: of for record in each.records for name, of in record.digests.items()} for each in (stated, again)]
    for name in sorted(ours.keys() - theirs.keys()):
        yield f"{name}: is not in the manifest"
    for name, shard in theirs.items():
        if name not in ours:
            if not some:
                yield f"{name}: was not made"
            continue
        made = ours[name]
        if (shard.header_bytes, shard.header_sha256) != (made.header_bytes, made.header_sha256):
            yield f"{name}: the header is another: other tensors, or other things are said of them"
            continue
        for before, after in zip(shard.stored, made.stored, strict=True):
            if digests[0][before.name] != digests[1][after.name]:
                yield f"{name}: tensor {after.name!r}: other bytes"
    for name in sorted({*stated.files, *again.files}):
        if name not in again.files:
            if not some:
                yield f"{name}: was not made"
        elif name not in stated.files and not some:
            yield f"{name}: is not in the manifest"
        elif name in stated.files and stated.files[name] != again.files[name]:
            yield f"{name}: other bytes"


def _explained(stated: Manifest, again: Manifest) -> Iterator[str]:
    """Yield what may explain differences: another source, other options, another version."""
    if stated.source_fingerprint != again.source_fingerprint:
        yield "the source is not the one that the manifest states: the fingerprint of its weights is another"
    if included := [name for name in stated.files if name not in again.files and not is_needed(name)]:
        yield f"the result was made with `include_files`, which copied {', '.join(included)}"
    for key in sorted({*stated.made_by, *again.made_by}):
        if stated.decisive.made_by.get(key) != again.decisive.made_by.get(key):
            yield f"{MANIFEST_FILE}: states another `{key}`"
    if stated.same_bytes_since != again.same_bytes_since:
        yield f"the result has the bytes of version {stated.same_bytes_since}, not those of {again.same_bytes_since}"


def _recipe(stated: dict[str, Any]) -> Recipe:
    return parse_recipe(json.dumps(stated), "the recipe of the manifest")


def _stated_sample(option: str, about: dict[str, Any], given: Options) -> dict[str, Any]:
    """Return the option that names a sample, of which a manifest has the kind, the size and the digest."""
    if given.calibrate is None and about["sample"] in ("text", "tokens"):
        raise OptionError("`calibrate`: give the file of the sample; the manifest has only its digest")
    tokens = about["tokens"] + about.get("held_back_tokens", 0)
    return {option: given.calibrate or about["sample"], "calibration_tokens": tokens, "eval": given.eval}


def made_again(plan: Plan, store: Store, options: Options) -> Manifest:
    """Make every tensor and every file of a result, hash them, and return the manifest of that result.

    store: a folder on this machine for what waits on the disk meanwhile, which the caller removes: fetched files of the
        source, columns of weights, and the files without tensors

    Raises SourceError, MasterError, OutputError or HubError.
    """
    run = _Unkept(store=store, key="again", shards={}, marks={}, journal=plan.journal)
    run.folder.mkdir(parents=True, exist_ok=True)
    plan.learn(options.progress)
    shards = plan.shards
    marks = make_shards(plan, run, shards, threads=options.thread_count, progress=options.progress)
    plan.finish_checks()
    records = tuple(record for shard in shards for record in marks[shard.file][0])
    manifest = stated(plan, run, records)
    options.check()
    return manifest


@contextlib.contextmanager
def unkept_store() -> Iterator[Store]:
    """Yield a store in a folder that goes in the end."""
    scratch = default_scratch()
    make_scratch(scratch)
    with tempfile.TemporaryDirectory(prefix="again-", dir=scratch) as folder:
        yield Store(Path(folder))


class _Unkept(Run):
    """A run that keeps no shard."""

    def begin(self, shard: ShardPlan, waiting: Callable[[], AbstractContextManager[None]]) -> ShardFile:
        """Return a file that takes bytes and keeps none."""
        path = self.folder / Path(shard.file).name  # columns are gathered beside it
        return _Hashed(path, b"", shard.stored, shard.file_bytes, shown=path, waiting=waiting)

    def add(self, shard: str, path: Path, mark: Mark, stop: Stop) -> None:
        """Keep nothing: the mark says what was made."""


class _Hashed(ShardFile):
    """A file of which nothing is written, and all is hashed."""

    def _create(self, file_bytes: int) -> None:
        """Create nothing."""

    def _write_at(self, offset: int, data: Bytes) -> None:
        """Write nothing."""

    def finish(self) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Close nothing."""
