"""From options to the codes of a calibrated master: what is calibrated, on which sample, and where it is worked on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor

from pqweights import __version__
from pqweights.checkpoint.names import MANIFEST_FILE
from pqweights.checkpoint.readers import PlainTensor, element_count
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.storage import LocalStorage
from pqweights.checkpoint.writer import DiskNeed, check_room, disk_errors
from pqweights.codecs.hadamard_trellis import HadamardTrellis
from pqweights.common.threads import slow_step
from pqweights.common.units import size_text
from pqweights.errors import EvaluationError, OutputError, RecipeError, SourceError
from pqweights.inference.runtimes.folders import read_folder
from pqweights.inference.runtimes.packages import Refused, quiet
from pqweights.inference.runtimes.texts import check_vocabulary, encode, with_bos
from pqweights.planning.calibration import FEWEST_ROWS, wanted_bits, work_bytes
from pqweights.planning.options import SELF, QuantizeArguments, QuantizeOptions
from pqweights.planning.plan import Plan
from pqweights.planning.recipe import Recipe, load_recipe
from pqweights.quality.calibrated import FEWEST_INPUTS, CalibratedWeight, Encoded, LayerwiseCalibration, save_whole
from pqweights.quality.layered import OUTSIDE, LayeredModel
from pqweights.quality.preparation import window_size
from pqweights.quality.sample import draw, first_token
from pqweights.rewrite.identity import is_under_way
from pqweights.rewrite.manifest import parse_manifest
from pqweights.rewrite.quantizing import plan_quantize, quantize
from pqweights.rewrite.ready import FinishedWeights, ReadyWeights
from pqweights.rewrite.task import RunOptions
from pqweights.storage import Store
from pqweights.storage.local import locked

# Tokens of a window of the sample, unless the model takes fewer.
WINDOW = 256
FEWEST_TOKENS = 2048
SEED = 0
# Of the trellis, unless the effort says otherwise: beside the rest of a calibration 64 cost nothing.
STATES = 64
# A weight whose outputs have this share of their energy as error is nearly gone.
LOST = 0.3
# A model whose weights take more bytes in float32 is sampled from packed, from a draft master; so is one that is
# already quantized or pickled, which transformers may not compute as it is.
MOST_IN_MEMORY = 4_000_000_000
DRAFT_RECIPE = "t4"


@contextlib.contextmanager
def calibrated_codes(
    source: Path, out: Store, recipe: Recipe, asked: QuantizeArguments, *, threads: int
) -> Iterator[ReadyWeights | FinishedWeights]:
    """Calibrate a checkpoint, continuing an interrupted calibration, and yield the codes.

    source: the local folder of the original checkpoint
    out: where the result is made; if it holds a result of the same calibration, that of its codes is yielded
    recipe: which weights are calibrated, those of the trellis, and about how many bits they take together
    asked: `calibrate` and the options beside it

    What it worked on goes when the context is left without an error. Raises SourceError, RecipeError, OptionError,
    EvaluationError, OutputError or MissingDependencyError.
    """
    if not source.is_dir():
        raise SourceError(f"{source}: expected the folder of a model for `calibrate`, found a file")
    out.check_apart(source)
    checkpoint, _, plan = plan_quantize(source, recipe, asked)
    wanted = wanted_bits(recipe, plan.tensors)
    states = recipe.effort or STATES
    key = _identity(checkpoint, [tensor.bytes for tensor in plan.tensors], recipe, asked, states)
    if not asked.overwrite and MANIFEST_FILE in out.names() and not is_under_way(out):
        yield _finished(out, key)
        return
    model = LayeredModel(checkpoint, source)
    before = torch.get_num_threads()
    with _worked_on_in(out, key) as work:
        try:
            torch.set_num_threads(threads)
            ids = _sample(source, checkpoint, work, asked, threads)
            _check_space(work, checkpoint, ids.numel(), wanted, out, plan.output_bytes)
            weights = _weights(model, wanted)
            calibration = LayerwiseCalibration(
                model=model,
                ids=ids,
                weights=weights,
                work=work,
                wanted_bits=wanted,
                states=states,
                at_most=recipe.target is not None,
                threads=threads,
                seed=SEED,
                progress=asked.calibration_progress or _ignore,
            )
            encoded = calibration.encode()
        finally:
            torch.set_num_threads(before)
        about = {
            "sample": asked.calibrate if asked.calibrate == SELF else "text",
            "tokens": ids.numel(),
            "window": ids.shape[1],
            "seed": SEED,
            "states": states,
            "sample_sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
            "identity": key,
        }
        ready = ReadyWeights.open(encoded.folder, about=about)
        yield ready.with_warnings(
            (*_missed(encoded), *_warnings(_of_the_trellis(plan) - ready.weights.keys(), wanted, weights, ready))
        )


def _ignore(done: int, total: int, what: str) -> None:
    """Show no progress."""


def _finished(out: Store, key: str) -> FinishedWeights:
    """Return the codes that a finished result has of the same calibration. Raises OutputError for another result."""
    data = out.read(MANIFEST_FILE)
    manifest = None if data is None else parse_manifest(data)
    calibrated = None if manifest is None else manifest.identity.made_by.get("calibrated")
    if manifest is None or not isinstance(calibrated, dict) or calibrated.get("identity") != key:
        raise OutputError(
            f"{out}: holds another result, which this calibration did not make; pass `overwrite` to replace it, or "
            "choose another folder"
        )
    return FinishedWeights(stated=calibrated, tensors={tensor.name: tensor for tensor, _ in manifest.pairs})


def _of_the_trellis(plan: Plan) -> set[str]:
    return {tensor.name for tensor in plan.tensors if tensor.codec == HadamardTrellis.name}


def _warnings(
    left: AbstractSet[str],
    wanted: Mapping[str, float],
    weights: Mapping[int, Sequence[CalibratedWeight]],
    ready: ReadyWeights,
) -> tuple[str, ...]:
    """Return lines about the weights that a calibration did not encode, and those of which it left little.

    left: those of the trellis that it did not encode
    wanted: those that it was to encode
    weights: those that the model has as they are, by layer
    """
    lines = []
    outside = left & {weight.name for weight in weights.get(OUTSIDE, ())}
    inside = left & {weight.name for layer, own in weights.items() if layer != OUTSIDE for weight in own}
    for names, why in (
        (left - wanted.keys(), f"it is not a matrix of {FEWEST_ROWS} rows or more"),
        (left & wanted.keys() - outside - inside, "the model has it in another form than the checkpoint"),
        (outside, "no linear layer multiplies by it"),
        (inside, f"fewer than {FEWEST_INPUTS} tokens of the sample reached it in a linear layer, or it does nothing"),
    ):
        if names:
            lines.append(
                f"tensor {min(names)!r}{_more(names)}: not calibrated, because {why}; encoded without calibration"
            )
    lost = {name for name, weight in ready.weights.items() if (weight.weighed_mse or 0) > LOST}
    if lost:
        lines.append(
            f"tensor {min(lost)!r}{_more(lost)}: so few bits leave little of what it does, since the calibration gave "
            "them to weights that matter more; give more bits"
        )
    return tuple(lines)


def _missed(encoded: Encoded) -> tuple[str, ...]:
    """Return a line about a size that was missed."""
    if encoded.is_met:
        return ()
    taken, wanted = (round(bits / 8) for bits in (encoded.bits, encoded.wanted_bits))
    return (
        f"`calibrate`: the calibrated weights take {taken} bytes after the last attempt, {taken / wanted:.1%} of the "
        f"{wanted} that they were to take; ask for other bits, or another size",
    )


def _more(names: AbstractSet[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _weights(model: LayeredModel, wanted: dict[str, float]) -> dict[int, list[CalibratedWeight]]:
    """Return which weights are calibrated, by layer."""
    result: dict[int, list[CalibratedWeight]] = {}
    for layer in (OUTSIDE, *range(model.layers)):
        own = model.parameters_of(layer)
        for tensor in model.tensors_of(layer):
            place = model.place_of(tensor.name)
            if tensor.name in wanted and place is not None and place.matrix.parameter in own:
                result.setdefault(layer, []).append(CalibratedWeight(name=tensor.name, place=place))
    return result


def _identity(checkpoint: Checkpoint, sizes: list[int], recipe: Recipe, asked: QuantizeArguments, states: int) -> str:
    """Return a digest of everything on which the result of a calibration depends."""
    files = checkpoint.storage.files()
    assert isinstance(checkpoint.storage, LocalStorage)
    small = {
        name: hashlib.sha256((checkpoint.storage.root / name).read_bytes()).hexdigest()
        for name in sorted(files)
        if name.endswith(".json") and "/" not in name
    }
    weights = [(name, files[name].byte_count, files[name].modified) for name in checkpoint.weight_files]
    text = SELF if asked.calibrate == SELF else hashlib.sha256(_text(asked).encode()).hexdigest()
    stated = [__version__, checkpoint.fingerprint(), small, weights, recipe.to_json(), sizes, states, text]
    return hashlib.sha256(json.dumps([*stated, asked.calibration_tokens, WINDOW, SEED]).encode()).hexdigest()


@contextlib.contextmanager
def _worked_on_in(out: Store, key: str) -> Iterator[Path]:
    """Yield a locked folder for a calibration, which goes at the end, or after an error that trying again repeats."""
    if out.is_elsewhere:
        folder = Path(tempfile.gettempdir()) / f"pqweights-{os.getuid()}-{key[:16]}.calibration"
    else:
        local = out.work.parent
        folder = local.parent / f".{local.name}.calibration"
    with locked(folder, out):
        stated = folder / "identity"
        with disk_errors(folder):
            if not stated.exists() or stated.read_text() != key:
                _clear(folder)
                stated.write_text(key)
        try:
            yield folder
        except (SourceError, RecipeError, EvaluationError):
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "lock":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check_space(
    work: Path, checkpoint: Checkpoint, tokens: int, wanted: Mapping[str, float], out: Store, result_bytes: int
) -> None:
    """Raise OutputError if there is no room for what a calibration works on, and a result on the same disk."""
    needed = work_bytes(checkpoint.config, tokens, wanted)
    present = sum(path.stat().st_size for path in work.rglob("*.safetensors"))
    what = f"{work}: a calibration needs {size_text(needed)}"
    needs = [
        DiskNeed(folder=work, byte_count=needed, present=present, what=what, remedy="take fewer `calibration_tokens`")
    ]
    if not out.is_elsewhere:
        what = f"{out}: the result needs {size_text(result_bytes)}"
        needs.append(DiskNeed(folder=out.work, byte_count=result_bytes, what=what, remedy="choose another disk"))
    check_room(needs)


def _text(asked: QuantizeArguments) -> str:
    """Read a text, or all texts of a folder. Raises EvaluationError."""
    path = Path(str(asked.calibrate))
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise EvaluationError(f"{path}: expected *.txt in the folder, found none")
    try:
        return "\n".join(file.read_text(encoding="utf-8") for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: expected a UTF-8 text, or a folder of *.txt: {error}") from None


def _sample(source: Path, checkpoint: Checkpoint, work: Path, asked: QuantizeArguments, threads: int) -> Tensor:
    """Return the token ids of the sample, [windows, tokens]; they are kept, so that no other is drawn."""
    file = work / "sample.safetensors"
    if not file.exists():
        folder = read_folder(source)
        size = window_size(folder, None, WINDOW)
        windows = max(1, asked.calibration_tokens // size)
        if asked.calibrate == SELF:
            ids = _drawn(source, checkpoint, work, asked, (windows, size), threads).numpy()
        else:
            ids = _cut(source, _text(asked), windows, size)
        save_whole(file, {"ids": ids})
    return torch.from_numpy(load_file(file)["ids"])


def _cut(source: Path, text: str, windows: int, size: int) -> Any:
    """Cut the first windows of a text. Raises EvaluationError for a text that is too short."""
    encoded = encode(source, text, windows * size, bos=True)
    check_vocabulary(read_folder(source), *encoded)
    count = len(encoded.ids) // size
    if count * size < FEWEST_TOKENS:
        raise EvaluationError(
            f"the text: expected at least {FEWEST_TOKENS} tokens to calibrate on, found {len(encoded.ids)}; give a "
            "longer text, or `calibrate` on self"
        )
    pieces = encoded.ids[: count * size].reshape(count, size)
    return np.stack([with_bos(piece, encoded.bos) for piece in pieces])


def _drawn(
    source: Path, checkpoint: Checkpoint, work: Path, asked: QuantizeArguments, shape: tuple[int, int], threads: int
) -> Tensor:
    """Draw the sample from the model, or from a draft master of it that stays packed. shape: windows, and tokens."""
    from pqweights.inference.loading.transformers import load

    weights = sum(element_count(tensor) for tensor in checkpoint.tensors)
    quantized = not all(isinstance(tensor, PlainTensor) for tensor in checkpoint.tensors)
    with_draft = 4 * weights > MOST_IN_MEMORY or quantized or asked.allow_pickle
    options: dict[str, Any] = {"packed": True, "dtype": "bfloat16"} if with_draft else {"dtype": "float32"}
    folder = work / "draft" if with_draft else source
    with slow_step("drawing the sample"):
        if with_draft:
            pickled = QuantizeOptions(allow_pickle=asked.allow_pickle)
            quantize(source, folder, load_recipe(DRAFT_RECIPE), options=pickled, run=RunOptions(threads=threads))
        with Refused(f"{source}: transformers cannot run this model"), quiet():
            model = load(folder, **options).model.eval()
        ids = draw(model, windows=shape[0], tokens=shape[1], first=first_token(model), seed=SEED)
    shutil.rmtree(work / "draft", ignore_errors=True)
    return ids
