"""Sensitivity: the KL divergence between a model and the same model with noise in one group of its weights.

The method is algorithm 3 of Malinovskii et al. (HIGGS, arXiv:2411.17525): Gaussian noise of several sizes, tokens drawn
at random (or a text), and a line through the origin. There is one difference: the noise of a block is relative to the
size of that block, which is how the codecs here err. Noise of one size for a whole tensor would hide what channels of
outliers do to their blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.writer import check_free
from pqweights.common.threads import slow_step
from pqweights.errors import EvaluationError, MissingDependencyError, SourceError
from pqweights.inference.runtimes.folders import read_folder
from pqweights.inference.runtimes.packages import Refused, package
from pqweights.inference.runtimes.texts import Ids, has_tokenizer, load_tokenizer, token_before_texts, with_bos
from pqweights.planning.options import path_of
from pqweights.planning.plan import TensorPlan, coder_of
from pqweights.planning.recipe import Recipe
from pqweights.planning.sensitivity_file import (
    Measured,
    Sensitivity,
    fitted_alpha,
    groups_of,
    read_sensitivity,
    write_sensitivity,
)
from pqweights.quality.options import SensitivityOptions
from pqweights.quality.preparation import (
    TextWindows,
    load_model,
    locate_weights,
    plan_original,
    text_windows,
    window_size,
)

# Relative squared errors: about those of 5, 4 and 3 bits, and one in between.
LEVELS = (0.0025, 0.0095, 0.02, 0.0345)
DEFAULT_WINDOW = 256
SEED = 0

Progress = Callable[[int, int, str], None]  # called with the groups done, the groups in all, and the name of a group


@dataclass(frozen=True)
class _Noise:
    """How noise is put into one parameter: whether its rows are columns in the model, and the codec's block size."""

    transposed: bool
    block_size: int


class _Runner:
    """A loaded model, the tokens that it reads, and its predictions without noise.

    Raises SourceError if transformers cannot run the model, EvaluationError if its logits are not finite.
    """

    def __init__(self, source: Path, model: Any, windows: Sequence[Ids]) -> None:
        self._torch = _torch()
        self._source, self._model, self._windows = source, model, windows
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        with Refused(f"{source}: transformers cannot run this model"), self._torch.inference_mode():
            self._clean = [_log_probabilities(self._torch, model, ids) for ids in windows]
        if not all(self._torch.isfinite(log_probabilities).all() for log_probabilities in self._clean):
            raise EvaluationError(f"{source}: logits are NaN or infinite; pass `dtype` float32")

    def divergences(self, group: str, noise: Mapping[str, _Noise]) -> list[tuple[float, float]]:
        """Return (t^2, KL in nats per token) for each level of noise in the parameters of a group."""
        points = []
        for level, t2 in enumerate(LEVELS):
            generator = self._torch.Generator().manual_seed(_seed(group, level))
            with self._torch.inference_mode(), self._with_noise(noise, math.sqrt(t2), generator):
                points.append((t2, _divergence(self._torch, self._model, self._windows, clean=self._clean)))
        if not all(math.isfinite(kl) for _, kl in points):
            raise EvaluationError(
                f"{self._source}: {group}: with noise, logits are NaN or infinite; pass `dtype` float32"
            )
        return points

    @contextlib.contextmanager
    def _with_noise(self, noise: Mapping[str, _Noise], t: float, generator: Any) -> Iterator[None]:
        saved = [(self._parameters[name], self._parameters[name].data, how) for name, how in noise.items()]
        for parameter, values, how in saved:
            parameter.data = _noisy(self._torch, values, t, how=how, generator=generator)
        try:
            yield
        finally:
            for parameter, values, _ in saved:
                parameter.data = values


def measure_sensitivity(
    source: Path,
    recipe: Recipe,
    options: SensitivityOptions = SensitivityOptions(),
    *,
    out: Path,
    text: str | None = None,
    progress: Progress = lambda done, total, name: None,
) -> Sensitivity:
    """Run a checkpoint once for each level of noise in each group of the weights that a recipe quantizes.

    text: what the model reads; by default tokens are drawn uniformly from the vocabulary, the same on every machine.
    out: the file for the sensitivities

    The logits of all tokens stay in memory. Raises SourceError, RecipeError, EvaluationError, OutputError,
    MissingDependencyError.
    """
    checkpoint, planned = plan_original(source, recipe)
    check_free(out, options.overwrite, kind="sensitivities", read=read_sensitivity)
    with slow_step("loading transformers"):
        _torch()
    windows = _windows(source, options, text)
    groups = tuple(_measure(source, checkpoint, planned, windows=windows, options=options, progress=progress))
    checkpoint.check_unchanged()
    result = Sensitivity(checkpoint=checkpoint.fingerprint(), method=_method(text, windows, options), groups=groups)
    write_sensitivity(out, result)
    return result


def _measure(
    source: Path,
    checkpoint: Checkpoint,
    planned: Sequence[TensorPlan],
    *,
    windows: TextWindows,
    options: SensitivityOptions,
    progress: Progress,
) -> Iterator[Measured]:
    """Yield what was measured for each group."""
    model = load_model(source, dtype=options.dtype, device_map=options.device_map).eval()
    where = locate_weights(source, model, [tensor.name for tensor in planned])
    if model.get_output_embeddings() is None:
        raise SourceError(
            f"{source}: {type(model).__name__}: it is not a causal language model, so it predicts no tokens"
        )
    groups = groups_of(checkpoint, [(tensor.name, tensor.role) for tensor in planned if tensor.name in where])
    if not groups:
        raise SourceError(f"{source}: transformers loads none of the weights that the recipe quantizes")
    runner = _Runner(source, model, windows.ids)
    block_sizes = {tensor.name: coder_of(tensor).block_size for tensor in planned}
    for number, (name, weights) in enumerate(groups.items()):
        progress(number, len(groups), name)
        noise = {
            where[weight].matrix_id[0]: _Noise(where[weight].transposed, block_sizes[weight]) for weight in weights
        }
        points = tuple(runner.divergences(name, noise))
        yield Measured(name=name, weights=tuple(weights), alpha=max(0.0, fitted_alpha(points)), points=points)
    progress(len(groups), len(groups), "")


def _torch() -> Any:
    torch = package("torch", "transformers", "measuring sensitivities")
    package("transformers", "transformers", "measuring sensitivities")
    return torch


def _method(text: str | None, windows: TextWindows, options: SensitivityOptions) -> dict[str, Any]:
    """Return how sensitivities were measured, as JSON."""
    return {
        "kind": "random tokens" if text is None else "text",
        "text_sha256": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
        "tokens": sum(len(ids) for ids in windows.ids),
        "window": len(windows.ids[0]),
        **windows.about,
        "dtype": options.dtype,
        "seed": SEED,
        "levels": list(LEVELS),
    }


def _windows(source: Path, options: SensitivityOptions, text: str | None = None) -> TextWindows:
    """Return the windows of token ids that the model reads.

    Raises EvaluationError if there are too few tokens, or if the model does not know one of them.
    """
    folder, tokens = read_folder(source), options.tokens
    size = window_size(folder, options.window, min(DEFAULT_WINDOW, max(tokens, 2)))
    if tokens < size:
        raise EvaluationError(f"`tokens` {tokens}: expected at least one window of {size}")
    if text is not None:
        return text_windows(
            folder, text, size=size, tokenizer=path_of(options.tokenizer), max_tokens=tokens, bos=not options.no_bos
        )
    if folder.vocabulary is None:
        raise EvaluationError(f"{source}: config.json names no vocab_size; pass `text`")
    random = np.random.default_rng(SEED)
    pieces = (random.integers(0, folder.vocabulary, size) for _ in range(tokens // size))
    folder_of_tokenizer = path_of(options.tokenizer) or source
    bos = None
    if not options.no_bos and has_tokenizer(folder_of_tokenizer):
        # Random tokens need no tokenizer; what the windows begin with is stated with the result.
        with contextlib.suppress(SourceError, MissingDependencyError):
            bos = token_before_texts(load_tokenizer(folder_of_tokenizer))
    return TextWindows([with_bos(piece, bos) for piece in pieces], bos is not None)


def _log_probabilities(torch: Any, model: Any, ids: Ids) -> Any:
    """Return the log-probabilities that a model predicts after each token: [tokens, vocabulary] f32."""
    given = torch.from_numpy(np.ascontiguousarray(ids))[None].to(model.get_input_embeddings().weight.device)
    return torch.log_softmax(model(given, use_cache=False).logits[0].float(), dim=-1)


def _divergence(torch: Any, model: Any, windows: Sequence[Ids], *, clean: Sequence[Any]) -> float:
    """Return KL(clean || now), the mean over all tokens, in nats.

    clean: the log-probabilities of each window without noise.
    """
    total = 0.0
    for ids, before in zip(windows, clean, strict=True):
        now = _log_probabilities(torch, model, ids)
        # The sum is in float64, because most of it cancels.
        total += float((before.double().exp() * (before.double() - now.double())).sum())
    return total / sum(len(ids) for ids in windows)


def _noisy(torch: Any, values: Any, t: float, *, how: _Noise, generator: Any) -> Any:
    """Return values with Gaussian noise that is, in each block along the rows, t times as large as the block."""
    transposed, block_size = how.transposed, how.block_size
    rows = values.transpose(-1, -2).contiguous() if transposed else values
    flat = rows.reshape(-1).float()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % block_size)).view(-1, block_size)
    noise = torch.randn(blocks.shape, generator=generator).to(blocks.device)
    blocks = blocks + noise * (blocks.norm(dim=1, keepdim=True) * (t / math.sqrt(block_size)))
    result = blocks.view(-1)[: flat.numel()].view(rows.shape).to(values.dtype)
    return result.transpose(-1, -2).contiguous() if transposed else result


def _seed(name: str, level: int) -> int:
    """Return the seed of the noise in a group at a level, which is the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{SEED} {level} {name}".encode()).digest()[:6], "little")
