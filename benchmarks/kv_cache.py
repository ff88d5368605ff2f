"""What quantized caches of keys and values cost: perplexity, KL divergence and recall, for every method at its sizes.

    python benchmarks/kv_cache.py MODEL_DIR[@CONTEXT][+outliers]... [--only SPEC...] [--windows 16]

Each model is measured in float32 beside itself with its own cache, on windows of CONTEXT tokens, or of as many as it
takes: the first part of a window is read at once, as a prompt, and the last --scored tokens one by one, as in
generation, so that each sees what the cache kept of those before it. Windows are computed as the sequences of a batch.
Bits for each coordinate count all that a cache holds at the end of a window, with tokens that are not packed at 16.

A folder with a recall.jsonl (benchmarks/train_recall.py) is also asked for what stands far before; the rows then have
the share of right answers, and the mean log-probability of their tokens. A folder given as MODEL_DIR+outliers gets
outliers in two pairs of channels of each key head, and queries that are as much smaller, so that it computes the same.

transformers' own quantized caches are measured where their backends are installed (optimum-quanto, hqq).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kv_baselines
import numpy as np
import torch
from attention_error import attention_error
from harness import Cell, Document, argument_parser, machine, now, publish, table
from recall import Case, States, fill, read_cases, read_states, recalled
from transformers import AutoModelForCausalLM, AutoTokenizer, QuantizedCache

from pqweights.runtime.kv.cache import KVCache, kv_cache
from pqweights.runtime.kv.states import tensor_bytes
from pqweights.runtime.models import Model
from pqweights.runtime.protocol import Scores, TextWindows, compare
from pqweights.runtime.texts import Ids, read_text, tokenize

Floats = np.ndarray[Any, np.dtype[np.float32]]

SPECS = (
    "absmax:8",
    "absmax:4",
    "absmax:3",
    "kivi:4,residual=0",
    "kivi:2,residual=0",
    "hadamard:8",
    "hadamard:5",
    "hadamard:4",
    "hadamard:4,centred=0",
    "hadamard:4,qjl",
    "hadamard:3",
    "hadamard:3,qjl",
    "hadamard:2",
    "polar",
    "polar:online",
    "polar:rotation=0",
    "polar-rope:m4n4,values=16,residual=0",
    "polar-rope:m4n2,values=16,residual=0",
    "polar-rope:m4n4,residual=0",
    "polar-rope:m4n2,residual=0",
    "polar-rope:m4n2,values=2,residual=0",
    "klt:5",
    "klt:4",
    "klt:3.5",
    "klt:3",
    "klt:2.5",
    "klt:2",
    "klt:1.5",
    "klt:1",
)
# With the windows of recent tokens that the papers have; for contexts that are much longer than those windows.
WINDOWED = ("kivi:4", "kivi:2", "polar-rope:m4n4,values=16", "polar-rope:m4n4", "polar-rope:m4n2", "klt:2,residual=128")
LONG = 1024
# Attention is compared for the queries of a window's last tokens.
MEASURED_QUERIES = 32
BACKENDS = ("transformers quanto 4", "transformers quanto 2", "transformers hqq 4", "transformers hqq 2")
OUTLIERS, OUTLIER_PAIRS = "+outliers", ((3, 24.0), (11, 12.0))


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One model, and what its rows are measured on.

    net: the model in float32
    windows: [windows, tokens]
    scored: how many of the last tokens of each are read one by one
    plain: its predictions with its own cache, [windows, scored, vocabulary]
    cases: what it is asked for, if anything
    prompts: keys and values of what the windows have before the scored tokens, a batch of windows each
    read: those of the cases' prompts
    """

    name: str
    net: Any
    tokenizer: Any
    windows: torch.Tensor
    scored: int
    plain: Floats
    cases: list[Case]
    prompts: list[States]
    read: dict[int, States] = field(default_factory=dict)


def bench_of(path: str, options: Any) -> Bench:
    """Load a model, and compute its own predictions."""
    place, _, longest = path.removesuffix(OUTLIERS).partition("@")
    folder = Path(place)
    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if path.endswith(OUTLIERS):
        plant_outliers(net)
    size = int(longest or net.config.max_position_embeddings)
    ids = tokenize(folder, read_text(folder / "eval.txt"), size * options.windows)
    windows = torch.from_numpy(ids[: len(ids) // size * size].reshape(-1, size))
    scored = min(options.scored, size // 2)
    with torch.inference_mode():
        plain = torch.cat([net(some, logits_to_keep=scored + 1).logits[:, :-1] for some in windows.split(1)])
        prompts = [read_states(net, some[:, : size - scored - 1]) for some in windows.split(options.batch)]
    recall = folder / "recall.jsonl"
    cases = read_cases(recall)[: options.cases] if recall.exists() else []
    return Bench(
        name=folder.name + (OUTLIERS if path.endswith(OUTLIERS) else ""),
        net=net,
        tokenizer=AutoTokenizer.from_pretrained(folder),
        windows=windows,
        scored=scored,
        plain=plain.numpy(),
        cases=cases,
        prompts=prompts,
    )


def plant_outliers(net: Any) -> None:
    """Make some pairs of channels of all keys larger, and of queries smaller by the same factors."""
    size, half = net.config.head_dim, net.config.head_dim // 2
    with torch.no_grad():
        for layer in net.model.layers:
            for projection, sign in ((layer.self_attn.k_proj, 1), (layer.self_attn.q_proj, -1)):
                heads = projection.weight.view(-1, size, projection.weight.shape[1])
                for pair, factor in OUTLIER_PAIRS:
                    heads[:, [pair, pair + half]] *= factor**sign


def with_cache(bench: Bench, make: Callable[[], Any], batch: int) -> tuple[Floats, float]:
    """Predictions of all windows with caches of `make`, and the bits for each coordinate at the end of the windows."""
    found, bits = [], []
    start = bench.windows.shape[1] - bench.scored - 1
    with torch.inference_mode():
        for some, prompt in zip(bench.windows.split(batch), bench.prompts, strict=True):
            cache = make()
            fill(cache, prompt)
            steps = [bench.net(each, past_key_values=cache).logits[:, -1] for each in some[:, start:-1].split(1, dim=1)]
            found.append(torch.stack(steps, dim=1))
            bits.append(bits_of(cache, len(some)))
    return torch.cat(found).numpy(), float(np.mean(bits))


def bits_of(cache: Any, batch: int) -> float:
    """Bits for each coordinate of a cache of ours or of transformers, with tokens that are not packed at 16 bits.

    batch: how many sequences it holds

    transformers stores scales in the dtype of the model; they count as in a model of BF16, too.
    """
    if isinstance(cache, KVCache):
        return cache.bits_per_coordinate()
    bits = count = 0
    for layer in cache.layers:
        for window, packed in ((layer.keys, layer._quantized_keys), (layer.values, layer._quantized_values)):
            parts = list(tensors_of(packed))
            bits += 16 * (window.numel() + sum(part.numel() for part in parts if part.is_floating_point()))
            bits += 8 * sum(tensor_bytes(part) for part in parts if not part.is_floating_point())
        heads, size = layer.shape
        count += 2 * batch * heads * size * layer.get_seq_length()
    return bits / count


def tensors_of(packed: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a backend of transformers stores."""
    if isinstance(packed, dict):
        packed = tuple(packed.values())
    if isinstance(packed, tuple | list):
        for each in packed:
            yield from tensors_of(each)
    elif isinstance(packed, torch.Tensor):
        inner = [getattr(packed, name, None) for name in ("_data", "_scale", "_shift")]
        parts = [part for part in inner if isinstance(part, torch.Tensor)]
        for part in parts or [packed]:
            yield getattr(part, "_data", part)


def maker(bench: Bench, spec: str) -> Callable[[], Any]:
    """What makes empty caches. Raises ImportError if a backend is not installed."""
    if not spec.startswith("transformers "):
        return lambda: kv_cache(bench.net, spec)
    _, backend, bits = spec.split()
    config = bench.net.config
    size, heads = config.head_dim, config.num_key_value_heads

    def make() -> Any:
        axes = {"axis_key": 0, "axis_value": 0} if backend == "quanto" else {"axis_key": 1, "axis_value": 1}
        cache = QuantizedCache(backend, config, nbits=int(bits), q_group_size=32, residual_length=32, **axes)
        for layer in cache.layers:
            layer.shape = (heads, size)
        return cache

    make()
    return make


def row_of(bench: Bench, spec: str, batch: int) -> dict[str, Any]:
    """The row of one method."""
    make = maker(bench, spec)
    predictions, bits = with_cache(bench, make, batch)
    scores = scores_of(bench, predictions)
    assert scores.divergence is not None and scores.perplexity_change is not None
    row = {
        "model": bench.name,
        "spec": spec,
        "bits": bits,
        "attention_error": None,
        "perplexity": scores.perplexity.value,
        "change": scores.perplexity_change.value,
        "change_error": scores.perplexity_change.standard_error,
        "kl": scores.divergence.mean.value,
        "kl_error": scores.divergence.mean.standard_error,
        "kl_99": scores.divergence.percentile_99,
        "top1": scores.divergence.top1.value,
    }
    if isinstance(make(), KVCache):
        with torch.inference_mode():
            found = [attention_error(bench.net, make(), some[None], MEASURED_QUERIES) for some in bench.windows[:4]]
        errors = [error for error in found if error is not None]
        row["attention_error"] = float(np.mean(errors)) if errors else None
    if bench.cases:
        answers = recalled(bench.net, bench.tokenizer, bench.cases, make, bench.read)
        row |= {"recall": answers.share, "recall_nats": answers.log_probability}
    return row


def scores_of(bench: Bench, predictions: Floats) -> Scores:
    """Compare predictions with the model's own, window by window, as `pqweights eval` does."""
    size = bench.windows.shape[1]
    ids: Ids = bench.windows.flatten().numpy()

    def model(logits: Floats) -> Model:
        known = {window.numpy().tobytes(): number for number, window in enumerate(bench.windows)}

        def looked_up(piece: Ids, last: int) -> Floats:
            of_window = logits[known[piece.tobytes()]]
            return np.concatenate([of_window[-(last - 1) :], of_window[-1:]])

        return Model(runtime="", dtype="", logits=looked_up)

    # Windows that do not overlap, of which the last tokens are scored: compare() sees `scored` as the stride.
    class Apart(TextWindows):
        def starts(self, tokens: int, *, max_tokens: int | None = None) -> range:
            return range(0, tokens, self.size)

    windows = Apart(size=size, stride=bench.scored)
    return compare(model(predictions), model(bench.plain), ids=ids, windows=windows)


def measure(path: str, options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All rows of a model, and its settings."""
    bench = bench_of(path, options)
    specs = [*SPECS, *(WINDOWED if bench.windows.shape[1] >= LONG else ()), *BACKENDS]
    chosen = [spec for spec in specs if not options.only or spec in options.only]
    rows = [own_row(bench)]
    for spec in chosen:
        try:
            rows.append(row_of(bench, spec, options.batch))
        except ImportError as error:
            print(f"{bench.name}: {spec}: {error}", flush=True)
            continue
        shown = {key: f"{value:.5g}" for key, value in rows[-1].items() if isinstance(value, float)}
        print(bench.name, spec, shown, flush=True)
    settings = {
        "model": bench.name,
        "window": bench.windows.shape[1],
        "windows": len(bench.windows),
        "scored": bench.scored,
        "cases": len(bench.cases),
        "size": bench.net.config.head_dim,
    }
    return rows, settings


def own_row(bench: Bench) -> dict[str, Any]:
    """The row of the model with its own cache."""
    scores = scores_of(bench, bench.plain)
    row = {"model": bench.name, "spec": "its own cache", "bits": 16.0, "perplexity": scores.perplexity.value}
    if bench.cases:
        answers = recalled(bench.net, bench.tokenizer, bench.cases, None, bench.read)
        row |= {"recall": answers.share, "recall_nats": answers.log_probability}
    return row


HEADER = ("cache", "bits", "attention error", "perplexity", "change", "KL", "KL 99%", "top-1")


def cells(row: dict[str, Any], *, recall: bool) -> list[Cell]:
    """A row of a table."""

    def number(name: str, form: str) -> str | None:
        return None if row.get(name) is None else format(row[name], form)

    kl = number("kl", ".5f")
    error = row.get("kl_error")
    return [
        row["spec"],
        number("bits", ".2f"),
        number("attention_error", ".5f"),
        number("perplexity", ".3f"),
        number("change", "+.3f"),
        kl if error is None else f"{kl} ± {error:.5f}",
        number("kl_99", ".3f"),
        number("top1", ".1%"),
        *([number("recall", ".1%"), number("recall_nats", ".4f")] if recall else []),
    ]


def sections(document: Document) -> dict[str, str]:
    """One table of all models, and one for each, by the size of the caches."""
    found = {"kv-cache": overview(document)}
    for settings in document["settings"]:
        rows = [row for row in document["rows"] if row["model"] == settings["model"]]
        rows.sort(key=lambda row: (-row["bits"], row.get("kl") or 0))
        recall = bool(settings["cases"])
        about = (
            f"{settings['windows']} windows of {settings['window']} tokens, the last {settings['scored']} of each read "
            f"one by one; heads of {settings['size']} coordinates"
        )
        header: tuple[str, ...] = HEADER
        if recall:
            about += f"; {settings['cases']} questions"
            header = (*HEADER, "recall", "nats")
        name = f"kv-cache-{settings['model']}".replace(OUTLIERS, "-with-key-outliers")
        found[name] = f"{about}.\n\n" + table(header, [cells(row, recall=recall) for row in rows])
    return found


def overview(document: Document) -> str:
    """KL divergence of every method on every model; bits are those of the first model."""
    models = [settings["model"] for settings in document["settings"]]
    rows = {(row["model"], row["spec"]): row for row in document["rows"] if row.get("kl") is not None}
    specs = list(dict.fromkeys(spec for _, spec in rows))

    def bits(spec: str) -> float:
        return float(next(rows[model, spec]["bits"] for model in models if (model, spec) in rows))

    lines: list[list[Cell]] = [
        [spec, f"{bits(spec):.2f}", *(f"{rows[m, spec]['kl']:.5f}" if (m, spec) in rows else None for m in models)]
        for spec in sorted(specs, key=bits, reverse=True)
    ]
    return table(("cache", "bits", *models), lines)


def main() -> None:
    kv_baselines.add()
    parser = argument_parser(__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL_DIR")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--scored", type=int, default=128)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    start = now()
    measured: Sequence[Any] = [measure(path, options) for path in options.models]
    rows = [row for found, _ in measured for row in found]
    document = {"machine": machine(start), "settings": [settings for _, settings in measured], "rows": rows}
    publish("kv_cache", document, sections(document), options, ("kv",))


if __name__ == "__main__":
    main()
