"""Exporting: any checkpoint into what a runtime loads. Of a source weights are read, of a master decoded.

What is rounded, how, and where each number goes is the target's decision (ExportSettings.assign); here that becomes a
plan. Warnings of the sizes of a result follow from these decisions. docs/exports.md has the rules, and what the
errors mean.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pqweights.checkpoint.companions import is_included, is_needed
from pqweights.checkpoint.config import CONFIG_DTYPES, model_dtype, model_facts
from pqweights.checkpoint.header import byte_count
from pqweights.checkpoint.names import CONFIG_FILE, file_stem
from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.source import Checkpoint, proven
from pqweights.checkpoint.storage import Storage
from pqweights.checkpoint.views import sources_of
from pqweights.common.options import Options
from pqweights.common.units import counted, size_text
from pqweights.convert.jobs import CopyJob, Job
from pqweights.convert.listed_files import open_result
from pqweights.convert.manifest import Manifest, find_manifest
from pqweights.convert.plan import EXPORT, MASTER, Plan, no_files, nothing_to_learn
from pqweights.convert.records import mean_error
from pqweights.errors import OptionError
from pqweights.formats.packing import PackedFormat
from pqweights.models import text_model
from pqweights.planning.decisions import open_planned, with_weights
from pqweights.planning.inputs import KnownInputs
from pqweights.planning.layout import (
    INTEGER,
    Container,
    Safetensors,
    TensorPlan,
    format_of,
    stored_bytes,
    total,
)
from pqweights.planning.roles import role_of
from pqweights.storage import Store
from pqweights.storage.addresses import is_repository_id
from pqweights.storage.sources import place_apart
from pqweights.targets import get_target
from pqweights.targets.architectures import unexamined_warnings
from pqweights.targets.bf16 import is_weight, plain_plan, stored_dtype
from pqweights.targets.carried import carried_unit
from pqweights.targets.compensation import Compensation, job_of
from pqweights.targets.integers import Assignment, IntegerJob
from pqweights.targets.linear import FUSED_WITH_KEPT
from pqweights.targets.several import one_by_one, together
from pqweights.targets.target import PLAIN, ExportSettings, ExportTarget
from pqweights.targets.units import UnitJob, fused_weights, of_unit, reading_together, with_unit

IN_WEIGHT_FILES = "the weight files already contain what the runtime needs"
PLAIN_BITS = 16
# The next tensor is begun while the last chunks of one are computed.
TENSORS_AT_ONCE = 2
# Names of folders that say what is in them, and not which model.
UNNAMED = ("checkpoint", "hf", "master", "masters", "model", "models", "original", "source", "src")
# What diffusers calls the folders of a pipeline that hold what becomes a GGUF file.
PARTS_OF_PIPELINE = ("transformer", "unet")
# How the name of a file of weights ends: with the type in it, which part it is, and its format.
WEIGHT_FILE = re.compile(
    r"(?:[-._](?:I?Q\d_\w+|TQ\d_0|BF16|FP?(?:16|32)|MXFP4(?:_MOE)?|NVFP4|UD)(?:-mixed)?)*(?:-\d{5}-of-\d{5})?"
    r"\.(?:gguf|safetensors)$",
    re.IGNORECASE,
)
AS_IT_IS = Options()


def open_exported(source: str | Path, options: Options = AS_IT_IS) -> tuple[Checkpoint, Manifest | None]:
    """Open whatever is to be exported: a local model, one on the Hub or at an address, in safetensors or GGUF.

    Returns the checkpoint, with the weights that may be rounded, and the manifest of a master, if it has one. A master
    is read through its manifest, with every byte checked. Of any other checkpoint those weights may be rounded that
    `quantize` encodes by default.

    Raises SourceError, RecipeError, HubError, StorageError; MasterError for a damaged master.
    """
    manifest: Manifest | None = None

    def open_master(storage: Storage) -> Checkpoint | None:
        nonlocal manifest
        manifest = find_manifest(storage)
        if manifest is None or manifest.kind != MASTER:
            return None
        return open_result(storage, manifest)

    checkpoint = open_planned(source, options, open_master)
    return with_weights(checkpoint), manifest if checkpoint.is_master else None


def settings_of(target: ExportTarget, options: Options) -> ExportSettings:
    """Return a target with its options, of one format or of several.

    Raises OptionError for an option or a value that the target does not have, RecipeError for what is wrong in a file.
    """
    options = target.with_recipe(options)
    if "type" in target.options:  # GGUF files of several types lie in one folder
        return target.read_options(options)
    each = {folder: target.read_options(of) for folder, of in one_by_one(options).items()}
    return each[""] if "" in each else together(each)


def readable(target: ExportTarget, options: Options) -> Options:
    """Return the options of a result with the same numbers that can be read again, as torchao's tiles cannot."""
    is_tiled = "packing" in settings_of(target, options).stated
    return replace(options, packing="plain") if is_tiled else options


def plan_export(
    source: str | Path,
    opened: tuple[Checkpoint, Manifest | None],
    out: Store,
    target: str,
    *,
    options: Options = Options(),
    inputs: KnownInputs | None = None,
) -> Plan:
    """Plan what a target loads, of a checkpoint or a master.

    source: where it lies
    opened: see open_exported
    target: a key of EXPORTS, or of ALIASES
    inputs: what is known of the inputs of its weights

    Raises SourceError, MasterError, ExportError, OptionError, OutputError, StorageError or MissingDependencyError.
    """
    to = get_target(target)
    settings = settings_of(to, options)
    checkpoint, manifest = with_weights(proven(opened[0], options.progress)), opened[1]
    place = place_apart(source, checkpoint, out)
    where = str(place.resolve() if isinstance(place, Path) else source)
    model = model_facts(checkpoint.storage) if manifest is None else manifest.model
    assignment = settings.assign(checkpoint, _model_name(checkpoint, {} if manifest is None else model, where))
    parts = assignment.parts or {"": assignment}
    master_errors = {} if manifest is None else _known_errors(assignment, checkpoint, manifest)
    compensation = None if inputs is None else _compensation(settings, inputs, assignment)
    known: dict[str, Any] = {"is_original": not checkpoint.is_master, "master_errors": master_errors}
    fused = fused_weights(assignment.tensors, assignment.decisions)
    read = replace(checkpoint, tensors=reading_together(assignment.tensors, fused))
    if assignment.companions is not None:
        read = _with_companions(read, assignment.companions, options.include_files)
    tensors = [_planned(tensor, read, assignment) for tensor in read.tensors]
    most = options.max_shard_size or to.max_shard_bytes
    by_columns = sorted(how.column_bytes(tensor.shape) for tensor, how in assignment.rounded)
    about = _about_rounding(settings, inputs, **known) if assignment.decisions else {}
    return Plan(
        kind=EXPORT,
        made_by=settings.stated | dict(assignment.stated) | about,
        checkpoint=read,
        tensors=tuple(tensors),
        container=_container(assignment, tensors, most),
        max_shard_bytes=most,
        not_held=assignment.left_out,
        encode=partial(_encode, assignment=assignment, fused=fused, compensation=compensation, **known),
        configs={
            f"{folder}{CONFIG_FILE}": partial(_stated, part.config)
            for folder, part in parts.items()
            if part.config is not None
        },
        small_files=assignment.small_files or no_files,
        learn=nothing_to_learn if inputs is None else inputs.prepare,
        warnings=_warnings(parts, checkpoint, to.name),
        memory_bytes=0 if compensation is None else compensation.memory_bytes,
        disk_bytes=sum(by_columns[-TENSORS_AT_ONCE:]),
        model=model,
        master={} if manifest is None else _about_master(manifest),
    )


def _compensation(settings: ExportSettings, inputs: KnownInputs, assignment: Assignment) -> Compensation | None:
    """Return what rounding knows of the inputs of weights; None if only the choice of formats for a goal uses them.

    Raises OptionError if nothing does.
    """
    if settings.rounding == PLAIN and settings.recipe.goal is None:
        raise OptionError(
            "`calibrate`, `imatrix`: expected an option that uses them as well: `rounding` gptq, `rounding` importance "
            "or `target_size`"
        )
    if settings.rounding == PLAIN:
        return None
    rules = [(tensor, how.rule) for tensor, how in assignment.rounded]
    return Compensation(inputs, rules, settings.rounding)


def _container(assignment: Assignment, tensors: Sequence[TensorPlan], max_shard_bytes: int) -> Container:
    """Return the format of the files: safetensors, unless the target has another."""
    if assignment.container is not None:
        return assignment.container(tensors, max_shard_bytes)
    parts = assignment.parts or {"": assignment}
    by_folder = {folder: part.metadata for folder, part in parts.items()}
    return Safetensors(by_folder, assignment.stated.get("file"))


def _model_name(checkpoint: Checkpoint, model: Mapping[str, Any], where: str) -> str | None:
    """Return the repository of a model, else the name of its folder or file, if that names a model.

    model: what the manifest of a master says of it
    where: the path, the address or the repository of the checkpoint
    """
    # The manifest of a master may say anything; the name stands in names of files and in the Modelfile.
    model_id = model.get("id", "")
    if is_repository_id(model_id, namespace=False):
        return str(model_id)
    origin, parts = checkpoint.storage.origin, where.rstrip("/").split("/")
    if parts[-1] in PARTS_OF_PIPELINE and len(parts) > 1:
        parts.pop()
    name = WEIGHT_FILE.sub("", parts[-1])
    if origin is not None and (name == parts[-1] or name.lower() in UNNAMED):
        return origin.id
    return None if name.lower() in UNNAMED else file_stem(name)


def _about_master(manifest: Manifest) -> dict[str, Any]:
    """Return what the manifest of an export states about its master."""
    about: dict[str, Any] = {
        key: manifest.made_by[key] for key in ("recipe", "calibrated", "awq", "fit") if key in manifest.made_by
    }
    about["bits_per_weight"] = total(manifest.tensors, source_bytes=0, output_bytes=0).bits_per_weight
    about["relative_mse"] = mean_error(manifest.records, "relative_mse")
    return about


def _stated(config: dict[str, Any], *about: object) -> dict[str, Any]:
    """Return a configuration that does not depend on what was measured."""
    return config


def _warnings(parts: Mapping[str, Assignment], checkpoint: Checkpoint, target: str) -> tuple[str, ...]:
    """Return what is known of a result; what not all of several formats have, with their names."""
    of: dict[str, list[str]] = {}
    for folder, part in parts.items():
        unexamined = unexamined_warnings(target, part.config)
        for warning in (*part.warnings, *remarks(part, checkpoint), *unexamined):
            of.setdefault(warning, []).append(folder.rstrip("/"))
    return tuple(
        warning if len(folders) == len(parts) else f"{', '.join(folders)}: {warning}" for warning, folders in of.items()
    )


def _planned(tensor: LogicalTensor, checkpoint: Checkpoint, assignment: Assignment) -> TensorPlan:
    """Plan a tensor by the decision of an assignment."""
    known, decision = text_model(checkpoint.config), assignment.decisions.get(tensor.name)
    if not isinstance(decision, PackedFormat):
        return plain_plan(
            tensor,
            known,
            weights=checkpoint.weights,
            model=model_dtype(checkpoint.config, checkpoint.tensors),
            dtype=assignment.plain_dtype,
            reason=decision,
            forced=assignment.dtypes.get(tensor.name),
        )
    return TensorPlan.of(
        tensor,
        decision.specs(tensor.name, tensor.shape),
        role=role_of(tensor, known),
        action=INTEGER,
        reason=decision.reason or f"{decision.rule.name} rule",
        codec=decision.codec,
        bits=decision.rule.bits,
    )


def _about_rounding(
    settings: ExportSettings, inputs: KnownInputs | None, *, is_original: bool, master_errors: Mapping[str, float]
) -> dict[str, Any]:
    """Return what manifests say of it: a digest of the errors of the master, and the sample of the inputs."""
    stated: dict[str, Any] = {}
    if not is_original:
        errors = json.dumps(master_errors, sort_keys=True).encode() if master_errors else None
        stated["master_errors"] = None if errors is None else hashlib.sha256(errors).hexdigest()
    if inputs is not None:
        stated |= {"rounding": settings.rounding, "calibration": inputs.about}
    return stated


def _encode(
    planned: TensorPlan,
    tensor: LogicalTensor,
    *,
    assignment: Assignment,
    fused: Mapping[str, tuple[LogicalTensor, ...]],
    compensation: Compensation | None,
    is_original: bool,
    master_errors: Mapping[str, float],
) -> Job:
    """Return the job that rounds a weight or copies another tensor.

    assignment: what the target makes of the model
    fused: for each weight whose scales have a unit, the weights that share it, by name
    compensation: what is known of the inputs, if rounding is compensated by it
    is_original: whether the weights are those of the source, and not decoded from a master
    master_errors: relative errors of a master's weights by name, where they are known and add up with those of rounding
    """
    decision = assignment.decisions.get(tensor.name)
    if not isinstance(decision, PackedFormat):
        return CopyJob(planned, tensor)
    about: dict[str, Any] = {"master_error": master_errors.get(tensor.name), "is_original": is_original}
    kind: type[IntegerJob] = IntegerJob
    if compensation is not None:
        kind = job_of(decision.rule, compensation.rounding)
        about["compensation"] = compensation

    def rounding(format: PackedFormat) -> Job:
        return kind(planned, tensor, format, **about)

    if decision.unit_of is None:
        return rounding(decision)
    unit = carried_unit(decision.rule, fused[tensor.name])
    if unit is not None:
        return rounding(of_unit(decision, unit))
    return UnitJob(fused[tensor.name], lambda largest: rounding(with_unit(decision, largest)))


def remarks(assignment: Assignment, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return warnings of the sizes of a result."""
    return (*_experts_warnings(assignment, checkpoint), *_plain_warnings(assignment, checkpoint))


def _experts_warnings(assignment: Assignment, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return a warning for each reason why experts stay plain, with their bytes."""
    model = text_model(checkpoint.config)
    by_reason: dict[str, list[LogicalTensor]] = {}
    for tensor in assignment.tensors:
        reason = assignment.decisions.get(tensor.name)
        if not isinstance(reason, str) or tensor.name in assignment.dtypes or reason == FUSED_WITH_KEPT:
            continue  # of a type that was asked for, or said elsewhere
        if is_weight(tensor, checkpoint.weights) and role_of(tensor, model) == "expert":
            by_reason.setdefault(reason, []).append(tensor)
    return tuple(
        f"experts stay in BF16: {counted(len(tensors), 'tensor')} of {sum(map(element_count, tensors))} weights, "
        f"{size_text(sum(2 * element_count(t) for t in tensors))} in place of "
        f"{size_text(sum(part.byte_count for t in tensors for part in t.parts))} in the {_kind(checkpoint)}: {reason}; "
        "the targets gguf and mlx round the experts of the models that they know"
        for reason, tensors in by_reason.items()
    )


def _kind(checkpoint: Checkpoint) -> str:
    return "master" if checkpoint.is_master else "source"


def _plain_warnings(assignment: Assignment, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return a warning if a result has more than half of the bits of BF16, and its integers have less.

    For integers of more bits the half way between the two counts.
    """
    integers = {tensor.name: rounding for tensor, rounding in assignment.rounded}
    rounded = sum(element_count(tensor) for tensor, _ in assignment.rounded)
    if not rounded:
        return ()
    integer_bytes = sum(stored_bytes(rounding.specs(t.name, t.shape)) for t, rounding in assignment.rounded)
    weights = sum(element_count(t) for t in assignment.tensors if t.plain_dtype in CONFIG_DTYPES)
    model, dtype = model_dtype(assignment.config, assignment.tensors), assignment.plain_dtype
    plain_bytes = sum(
        byte_count(stored_dtype(tensor, checkpoint.weights, model=model, dtype=dtype), tensor.shape)
        for tensor in assignment.tensors
        if tensor.name not in integers
    )
    total, bits_of_integers = integer_bytes + plain_bytes, 8 * integer_bytes / rounded
    bits = 8 * total / weights
    half = PLAIN_BITS / 2 if bits_of_integers < PLAIN_BITS / 2 else (bits_of_integers + PLAIN_BITS) / 2
    if bits <= half:
        return ()
    held = checkpoint.weight_file_bytes
    larger = f"; the {_kind(checkpoint)} that it is made from is smaller ({size_text(held)})" if total > held else ""
    return (
        f"{bits:.3g} bits per parameter, more than half of the {PLAIN_BITS} of BF16, although integers take "
        f"{bits_of_integers:.3g}: of {size_text(total)}, {size_text(plain_bytes)} are weights that stay plain{larger}",
    )


def _with_companions(checkpoint: Checkpoint, kept: Collection[str], include: Collection[str]) -> Checkpoint:
    """Return a checkpoint of which only these files are copied, and those that were asked for, here or of a master.

    include: patterns of paths or names
    """
    companions = tuple(
        name for name in checkpoint.companions if name in kept or not is_needed(name) or is_included(name, include)
    )
    left_out = dict.fromkeys((name for name in checkpoint.companions if name not in companions), IN_WEIGHT_FILES)
    return replace(checkpoint, companions=companions, left_out=dict(sorted((checkpoint.left_out | left_out).items())))


def _known_errors(assignment: Assignment, master: Checkpoint, manifest: Manifest) -> dict[str, float]:
    """Return the relative errors of a master's weights that are known and add up with those of rounding, by name.

    A weight whose input channels were scaled is left out, because its error is that of the scaled weight. So is a
    weight of a codec whose errors are not orthogonal to its weights: the sum would not hold.
    """
    errors = {
        tensor.name: record.relative_mse
        for tensor, record in manifest.pairs
        if record.relative_mse is not None and not tensor.is_scaled and format_of(tensor).orthogonal_error
    }
    return {t.name: error for t in assignment.tensors if (error := _error(t, master.weights, errors)) is not None}


def _error(tensor: LogicalTensor, weights: frozenset[str], errors: dict[str, float]) -> float | None:
    """Return the relative error of a tensor, or None if it is not known.

    A tensor that the master keeps has none. One that is put together from several has their mean, weighted by size.
    """
    parts = sources_of(tensor) or (tensor,)
    if any(is_weight(part, weights) and part.name not in errors for part in parts):
        return None
    counts = [math.prod(part.shape) for part in parts]
    total = sum(errors.get(part.name, 0.0) * count for part, count in zip(parts, counts, strict=True))
    return total / sum(counts) if total else 0.0
