"""From options to the codes of a calibrated master: what is calibrated, on which sample, and where it is worked on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor

from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.writer import disk_errors
from pqweights.codecs.hadamard_trellis import HadamardTrellis
from pqweights.common.threads import slow_step
from pqweights.errors import EvaluationError, RecipeError
from pqweights.inference.runtimes.folders import read_folder
from pqweights.inference.runtimes.packages import Refused, quiet
from pqweights.planning.options import SELF, QuantizeArguments
from pqweights.planning.plan import Plan
from pqweights.planning.recipe import Recipe
from pqweights.quality.calibrated import CalibratedWeight, LayerwiseCalibration, save_whole
from pqweights.quality.layered import OUTSIDE, LayeredModel
from pqweights.quality.preparation import text_windows, window_size
from pqweights.quality.sample import draw, first_token
from pqweights.rewrite.quantizing import plan_quantize, quantize
from pqweights.rewrite.ready import ReadyWeights
from pqweights.storage import Store

# Tokens of a window of the sample, unless the model takes fewer.
WINDOW = 256
FEWEST_TOKENS = 2048
# A model whose weights take more bytes in float32 is sampled from packed, from a draft master.
MOST_IN_MEMORY = 4_000_000_000
DRAFT_RECIPE = "t4"


@contextlib.contextmanager
def calibrated_codes(
    source: Path, out: Store, recipe: Recipe, asked: QuantizeArguments, *, threads: int
) -> Iterator[ReadyWeights]:
    """Calibrate a checkpoint, continuing an interrupted calibration; what it worked on goes at the end of the context.

    source: the local folder of the original checkpoint
    recipe: which weights are calibrated, those of the trellis, and about how many bits they take together
    asked: `calibrate` and the options beside it

    Raises SourceError, RecipeError, EvaluationError, OutputError or MissingDependencyError.
    """
    assert asked.calibrate is not None
    if asked.awq is not None:
        raise RecipeError("`awq`: the calibration scales channels itself; leave out `awq` or `calibrate`")
    checkpoint, _, plan = plan_quantize(source, recipe, asked)
    wanted = {
        tensor.name: 8.0 * tensor.bytes
        for tensor in plan.tensors
        if tensor.codec == HadamardTrellis.name and len(tensor.shape) == 2
    }
    if not wanted:
        raise RecipeError(
            f"recipe {recipe.name!r}: `calibrate` is for weights of the codec {HadamardTrellis.name}, and it gives it "
            "to none here; choose a recipe such as t4"
        )
    model = LayeredModel(checkpoint, source)
    work = _work_folder(out, checkpoint, recipe, asked, plan)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    ids = _sample(source, checkpoint, work, asked)
    calibration = LayerwiseCalibration(
        model=model,
        ids=ids,
        weights=_weights(model, wanted),
        work=work,
        wanted_bits=wanted,
        at_most=recipe.target is not None,
        states=recipe.effort or HadamardTrellis.efforts[0],
        threads=threads,
        progress=asked.calibration_progress or _ignore,
    )
    codes = calibration.encode()
    torch.set_num_threads(before)
    about = {
        "sample": asked.calibrate if asked.calibrate == SELF else "text",
        "tokens": ids.numel(),
        "window": ids.shape[1],
        "sample_sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest(),
    }
    yield ReadyWeights.open(codes, about=about, warnings=_warnings(wanted.keys() - calibration.reached))
    shutil.rmtree(work, ignore_errors=True)


def _warnings(left: AbstractSet[str]) -> tuple[str, ...]:
    """Return a line about the weights that a calibration could not encode."""
    if not left:
        return ()
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return (
        f"tensor {min(left)!r}{more}: not calibrated, because the sample reached no linear layer of the model that has "
        "it as it is; encoded without calibration",
    )


def _ignore(done: int, total: int, what: str) -> None:
    """Show no progress."""


def _weights(model: LayeredModel, wanted: dict[str, float]) -> dict[int, list[CalibratedWeight]]:
    """Return which weights are calibrated, by layer."""
    result: dict[int, list[CalibratedWeight]] = {}
    for layer in (OUTSIDE, *range(model.layers)):
        for tensor in model.tensors_of(layer):
            parameter = model.parameter_of(tensor.name)
            if tensor.name in wanted and parameter is not None:
                result.setdefault(layer, []).append(CalibratedWeight(name=tensor.name, parameter=parameter))
    return result


def _work_folder(out: Store, checkpoint: Checkpoint, recipe: Recipe, asked: QuantizeArguments, plan: Plan) -> Path:
    """Return the folder of this calibration beside the result; what another one left in it is removed."""
    identity = json.dumps(
        [
            checkpoint.fingerprint(),
            recipe.to_json(),
            [
                asked.calibrate if asked.calibrate == SELF else _digest(Path(str(asked.calibrate))),
                asked.calibration_tokens,
            ],
            [tensor.bytes for tensor in plan.tensors],
        ]
    )
    key = hashlib.sha256(identity.encode()).hexdigest()
    local = out.work.parent if not out.is_elsewhere else Path(tempfile.gettempdir()) / f"pqweights-{key[:16]}"
    folder = local.parent / f".{local.name}.calibration"
    stated = folder / "identity"
    with disk_errors(folder):
        if not stated.exists() or stated.read_text() != key:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            stated.write_text(key)
    return folder


def _digest(text: Path) -> str:
    return hashlib.sha256(_text(text).encode()).hexdigest()


def _text(path: Path) -> str:
    """Read a text, or all texts of a folder. Raises EvaluationError."""
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    try:
        return "\n".join(file.read_text(encoding="utf-8") for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: expected a UTF-8 text, or a folder of *.txt: {error}") from None


def _sample(source: Path, checkpoint: Checkpoint, work: Path, asked: QuantizeArguments) -> Tensor:
    """Return the token ids of the sample, [windows, tokens]; they are kept, so that no other is drawn."""
    file = work / "sample.safetensors"
    if not file.exists():
        folder = read_folder(source)
        size = window_size(folder, None, WINDOW)
        windows = max(1, asked.calibration_tokens // size)
        if asked.calibrate == SELF:
            ids = _drawn(source, checkpoint, work, windows, size).numpy()
        else:
            text = _text(Path(str(asked.calibrate)))
            cut = text_windows(
                folder,
                text,
                size=size,
                fewest=FEWEST_TOKENS // size,
                tokenizer=None,
                max_tokens=windows * size,
                bos=True,
            )
            ids = np.stack(cut.ids)
        save_whole(file, {"ids": ids})
    return torch.from_numpy(load_file(file)["ids"])


def _drawn(source: Path, checkpoint: Checkpoint, work: Path, windows: int, size: int) -> Tensor:
    """Draw the sample from the model, or, if it is large, from a draft master of it that stays packed."""
    from pqweights.integrations.transformers import load

    large = checkpoint.weight_file_bytes * 2 > MOST_IN_MEMORY
    options: dict[str, Any] = {"packed": True, "dtype": "bfloat16"} if large else {"dtype": "float32"}
    if large and not (work / "draft" / "pqweights.json").exists():
        from pqweights.planning.recipe import load_recipe

        with slow_step("making a draft from which the sample is drawn"):
            quantize(source, work / "draft", load_recipe(DRAFT_RECIPE))
    folder = work / "draft" if large else source
    with slow_step("drawing the sample"), Refused(f"{source}: transformers cannot run this model"), quiet():
        model = load(folder, **options).model.eval()
        ids = draw(model, windows=windows, tokens=size, first=first_token(model), seed=0)
    shutil.rmtree(work / "draft", ignore_errors=True)
    return ids
