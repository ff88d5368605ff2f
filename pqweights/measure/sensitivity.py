"""Measuring sensitivities: the KL divergence between a model and the same with noise in one group of weights.

Algorithm 3 of Malinovskii et al. (HIGGS, arXiv:2411.17525): Gaussian noise of several sizes, tokens drawn at random (or a text), a
line through the origin. One departure: the noise of a block of 128 weights is as large, relative to the block, as that of any
other, which is how our codec errs; noise of one size for a whole tensor would miss what outlier channels do to their block.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pqweights.checkpoint.source import open_local
from pqweights.errors import EvaluationError, RecipeError, SourceError
from pqweights.planning.plan import QUANTIZE
from pqweights.planning.recipe import Recipe
from pqweights.planning.sensitivity_file import Measured, Sensitivity, fitted_alpha, groups_of
from pqweights.quantize import Quantize
from pqweights.rewrite.manifest import coder_of
from pqweights.runtimes.folders import read_folder
from pqweights.runtimes.packages import Refused, package, quiet
from pqweights.runtimes.texts import Ids, tokenize

# Relative squared errors: about those of 5, 4 and 3 bits, and one between.
LEVELS = (0.0025, 0.0095, 0.02, 0.0345)
DEFAULT_TOKENS, DEFAULT_WINDOW = 2048, 256
SEED = 0

Progress = Callable[[int, int, str], None]  # groups done, groups in all, name


def measure_sensitivity(
    source: Path,
    recipe: Recipe,
    *,
    text: str | None = None,
    tokens: int = DEFAULT_TOKENS,
    window: int | None = None,
    tokenizer: Path | None = None,
    dtype: str = "float32",
    device_map: str | None = None,
    progress: Progress = lambda done, total, name: None,
) -> Sensitivity:
    """Run a checkpoint once for each group of weights that the recipe quantizes and each level of noise, over `tokens` tokens.

    text: read its first tokens; None: tokens drawn uniformly from the vocabulary, the same on every machine. window: tokens
    that are read together, 256 or what the model takes. Logits of all tokens stay in memory. Raises SourceError, RecipeError,
    EvaluationError, MissingDependencyError.
    """
    checkpoint = open_local(source)
    if checkpoint.is_master:
        raise SourceError(f"{source}: expected an original checkpoint, found a master; measure what it was made from")
    planned = [t for t in Quantize(recipe=recipe).plan(checkpoint) if t.action == QUANTIZE]
    if not planned:
        raise RecipeError(f"recipe {recipe.name!r}: expected a recipe that quantizes something here, found none")
    windows = _windows(source, text, tokens, window, tokenizer)
    torch: Any = package("torch", "transformers", "running the model")
    package("transformers", "transformers", "running the model")
    from pqweights.integrations.transformers import load_model
    from pqweights.measure.activations import places

    with Refused(f"{source}: transformers cannot run this model"), quiet():
        model = load_model(source, dtype=dtype, device_map=device_map, experts_implementation="eager").eval()
        where = places(model, [t.name for t in planned])
    if model.get_output_embeddings() is None:
        raise SourceError(f"{source}: {type(model).__name__}: no causal language model: it predicts no tokens")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    block_sizes = {t.name: coder_of(t).block_size for t in planned}
    groups = groups_of(checkpoint, [(t.name, t.role) for t in planned if t.name in where])
    if not groups:
        raise SourceError(f"{source}: transformers loads none of the weights that the recipe quantizes")
    with Refused(f"{source}: transformers cannot run this model"), torch.inference_mode():
        clean = [_log_probabilities(torch, model, each) for each in windows]
    if not all(torch.isfinite(each).all() for each in clean):
        raise EvaluationError(f"{source}: logits are NaN or infinite; pass --dtype float32")
    found = []
    for number, (name, names) in enumerate(groups.items()):
        progress(number, len(groups), name)
        of_group = {where[weight].place[0]: (where[weight].transposed, block_sizes[weight]) for weight in names}
        points = []
        for level, t2 in enumerate(LEVELS):
            generator = torch.Generator().manual_seed(_seed(name, level))
            with torch.inference_mode():
                saved = [(parameters[place], parameters[place].data) for place in of_group]
                for (parameter, values), (transposed, block_size) in zip(saved, of_group.values(), strict=True):
                    parameter.data = _noisy(torch, values, math.sqrt(t2), transposed, block_size, generator)
                try:
                    points.append((t2, _divergence(torch, model, windows, clean)))
                finally:
                    for parameter, values in saved:
                        parameter.data = values
        if not all(math.isfinite(kl) for _, kl in points):
            raise EvaluationError(f"{source}: {name}: with noise, logits are NaN or infinite; pass --dtype float32")
        alpha = max(0.0, fitted_alpha(points))
        found.append(Measured(name=name, weights=tuple(names), alpha=alpha, points=tuple(points)))
    progress(len(groups), len(groups), "")
    method = {
        "kind": "random tokens" if text is None else "text",
        "text_sha256": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
        "tokens": sum(len(each) for each in windows),
        "window": len(windows[0]),
        "dtype": dtype,
        "seed": SEED,
        "levels": list(LEVELS),
    }
    return Sensitivity(checkpoint=checkpoint.fingerprint(), method=method, groups=tuple(found))


def _windows(source: Path, text: str | None, tokens: int, window: int | None, tokenizer: Path | None) -> list[Ids]:
    """The ids that are read.

    Raises EvaluationError where they are too few, or not of this model.
    """
    folder = read_folder(source)
    size = window or min(DEFAULT_WINDOW, folder.context or DEFAULT_WINDOW, max(tokens, 2))
    if folder.context is not None and size > folder.context:
        raise EvaluationError(
            f"--window: expected at most the {folder.context} tokens that the model takes, found {size}"
        )
    if tokens < size:
        raise EvaluationError(f"--tokens {tokens}: expected at least one window of {size}")
    count = tokens // size
    if text is None:
        if folder.vocabulary is None:
            raise EvaluationError(f"{source}: config.json names no vocab_size; pass --text FILE")
        random = np.random.default_rng(SEED)
        return [random.integers(0, folder.vocabulary, size) for _ in range(count)]
    ids = tokenize(tokenizer or source, text, tokens)
    if len(ids) < size:
        raise EvaluationError(f"the text: expected at least one window of {size} tokens, found {len(ids)} tokens")
    if folder.vocabulary is not None and int(ids.max()) >= folder.vocabulary:
        raise EvaluationError(
            f"{tokenizer or source}: its tokenizer makes the token {int(ids.max())}, the model knows {folder.vocabulary}"
        )
    return [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]


def _log_probabilities(torch: Any, model: Any, ids: Ids) -> Any:  # [tokens, vocabulary] f32
    given = torch.from_numpy(np.ascontiguousarray(ids))[None].to(model.get_input_embeddings().weight.device)
    return torch.log_softmax(model(given, use_cache=False).logits[0].float(), dim=-1)


def _divergence(torch: Any, model: Any, windows: Sequence[Ids], clean: Sequence[Any]) -> float:
    """KL(clean || now), the mean over all tokens, in nats."""
    total = 0.0
    for ids, before in zip(windows, clean, strict=True):
        now = _log_probabilities(torch, model, ids)
        # The difference of float32 numbers; summed in float64, as most of it cancels.
        total += float((before.double().exp() * (before.double() - now.double())).sum())
    return total / sum(len(ids) for ids in windows)


def _noisy(torch: Any, values: Any, t: float, transposed: bool, block_size: int, generator: Any) -> Any:
    """values with Gaussian noise, in each block along the rows t times as large as the block. transposed: rows are columns."""
    rows = values.transpose(-1, -2).contiguous() if transposed else values
    flat = rows.reshape(-1).float()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % block_size)).view(-1, block_size)
    noise = torch.randn(blocks.shape, generator=generator).to(blocks.device)
    blocks = blocks + noise * (blocks.norm(dim=1, keepdim=True) * (t / math.sqrt(block_size)))
    result = blocks.view(-1)[: flat.numel()].view(rows.shape).to(values.dtype)
    return result.transpose(-1, -2).contiguous() if transposed else result


def _seed(name: str, level: int) -> int:
    """Of the noise of a group at a level; the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{SEED} {level} {name}".encode()).digest()[:6], "little")
