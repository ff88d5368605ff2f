"""GGUF files of ours beside those of llama.cpp's own quantizer, type by type.

    python benchmarks/gguf_types.py [MODEL_DIR...] [--only blocks models] [--types Q4_K_M ...]

`blocks`: squared error and rate of the encoders alone, beside ggml_quantize_chunk of the same library, on the linear
weights of all-MiniLM-L6-v2 whose rows 256 divides, on Gaussian weights and on Student-t weights with 4 degrees of
freedom; without importances, and with the same random ones on both sides. Types that llama.cpp makes with importances
only get the same for all columns from it. Rates are those of Gaussian weights.

`models`: each model as a BF16 file is quantized by llama_model_quantize; ours are exported from the same weights,
with the second moments of text or without, and from masters. llama.cpp computes all of them, on the CPU; divergences
are from the original in transformers, in float32. Both sides store the same types in the same tensors, so files have
the same size. The importance matrix of llama.cpp's quantizer is made of the same inputs, of which all count alike;
types that it makes with one only have no figure without. --types measures some again.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import peers
import quality
import torch
from harness import Document, argument_parser, keep_rates, machine, measured_with, now, publish, table

import pqweights
from pqweights.calibrate import layer_statistics
from pqweights.calibrate.sampled_inputs import inputs_of
from pqweights.checkpoint.gguf.mixes import MIXES, OUTPUTS
from pqweights.checkpoint.gguf.model import gguf_model
from pqweights.checkpoint.source import open_local
from pqweights.checkpoint.views import View
from pqweights.common.options import Options
from pqweights.common.threads import usable_cores
from pqweights.kernels.gguf_encoding import BLOCK_TYPES, decode_blocks, encode_blocks
from pqweights.runtime.models import Model, open_model
from pqweights.runtime.protocol import TextWindows, compare
from pqweights.runtime.texts import Ids, load_tokenizer, read_text, tokenize
from pqweights.storage import open_store

BLOCKS, MODELS = "blocks", "models"
TYPES = (
    "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q4_0", "Q3_K_M", "IQ3_M", "IQ3_XXS", "Q2_K", "IQ2_M", "IQ2_XXS",
    "IQ1_M", "IQ1_S",
)  # fmt: skip
ROUNDS, ROWS, COLUMNS = 3, 512, 2048
THREADS = 2
THEIRS, THEIRS_WITH_DATA = "llama.cpp", "llama.cpp, imatrix"
OURS: dict[str, tuple[str, ...]] = {
    "ours": ("source",),
    "ours, imatrix": ("source", "calibrate"),
    "ours, from the master": (),
}
# The vectors of calibration, of the text behind the tokens that are scored.
CALIBRATION_TOKENS = 16_384


# --- the encoders alone ---


def weights() -> dict[str, np.ndarray]:
    """Matrices of float32 with rows of whole blocks of 256."""
    generator = np.random.default_rng(21)
    real = [weight for weight in peers.linear_weights(peers.default_model()) if weight.shape[1] % 256 == 0]
    return {
        "MiniLM": np.concatenate(real),
        "Gaussian": generator.standard_normal((ROWS, COLUMNS), dtype=np.float32),
        "Student-t(4)": generator.standard_t(4, (ROWS, COLUMNS)).astype(np.float32),
    }


def in_threads(encode: Callable[[np.ndarray], Any], values: np.ndarray, threads: int) -> float:
    """Seconds that threads take, each for its share of the rows."""
    parts = np.array_split(values, threads)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(encode, [part[:1] for part in parts]))  # threads and kernels are there
        start = time.perf_counter()
        list(pool.map(encode, parts))
        return time.perf_counter() - start


def block_rows(types: Iterable[str], rounds: int) -> Iterator[Document]:
    """A row for each type, kind of weights, and with or without importances. rounds: of rates"""
    ggml = peers.load_ggml()
    for name in types:
        theirs = _Ggml(ggml, name)
        for kind, values in weights().items():
            for importance in (None, _importance(values.shape[1])):
                about = {"type": name, "weights": kind, "importance": importance is not None}
                measured = _measured(name, theirs, values, importance, rounds if kind == "Gaussian" else 0)
                yield about | measured | measured_with([f"gguf {name}"])


class _Ggml:
    """ggml's encoder of a type."""

    def __init__(self, ggml: ctypes.CDLL, name: str) -> None:
        self._ggml, self.kind = ggml, gguf.GGMLQuantizationType[name]
        ggml.ggml_quantize_init(int(self.kind))
        ggml.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
        self._wants_importance = ggml.ggml_quantize_requires_imatrix(int(self.kind))

    def encode(self, values: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        rows, columns = values.shape
        if importance is None and self._wants_importance:
            importance = np.ones(columns, dtype=np.float32)
        out = np.empty((rows, BLOCK_TYPES[self.kind.name].row_bytes(columns)), dtype=np.uint8)
        given = None if importance is None else importance.ctypes.data
        self._ggml.ggml_quantize_chunk(int(self.kind), values.ctypes.data, out.ctypes.data, 0, rows, columns, given)
        return out


def _importance(columns: int) -> np.ndarray:
    return np.exp(np.random.default_rng(3).standard_normal(columns)).astype(np.float32)


def _measured(name: str, theirs: _Ggml, values: np.ndarray, importance: np.ndarray | None, rounds: int) -> Document:
    """Relative errors, weighed if there are importances, and rates with one thread and two, alternately measured."""
    factors = np.ones(values.shape[1], dtype=np.float32) if importance is None else importance

    def error(data: np.ndarray) -> float:
        decoded = decode_blocks(name, data.reshape(-1, BLOCK_TYPES[name].block_bytes)).reshape(values.shape)
        return float((np.square(values - decoded, dtype=np.float64) * factors).sum() / (values**2.0 * factors).sum())

    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for threads in (1, THREADS):
            for who, encode in (
                ("ours", lambda part: encode_blocks(name, part, importance)),
                ("theirs", lambda part: theirs.encode(part, importance)),
            ):
                seconds.setdefault((who, threads), []).append(in_threads(encode, values, threads))
    rates = {f"{who}_{threads}": values.size / statistics.median(found) for (who, threads), found in seconds.items()}
    return {
        "ours_mse": error(encode_blocks(name, values, importance).codes),
        "theirs_mse": error(theirs.encode(values, importance)),
        "rates": rates,
    }


# --- whole models ---


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A model, what it is scored on, and the files that are made of it.

    model: the folder of the original
    base: the original, opened
    ids: the tokens that are scored
    windows: how they are cut
    work: where files are made
    """

    model: Path
    base: Model
    ids: Ids
    windows: TextWindows
    work: Path

    def figures(self, file: Path) -> Document:
        """Perplexity, divergence, top-1 agreement and the size of a file."""
        scores = compare(open_model(file), self.base, ids=self.ids, windows=self.windows)
        return quality.measures(scores) | {"bytes": file.stat().st_size}

    def export(self, out: str, kind: str, uses: tuple[str, ...], **options: Any) -> tuple[Path, float]:
        """Export the master, or the model if `source` is used, and return the file and the seconds that it took."""
        start = time.perf_counter()
        folder, source = self.work / out, self.model if "source" in uses else self.work / "master"
        text = self.work / "calibration.txt" if "calibrate" in uses else None
        pqweights.export(source, folder, "gguf", type=kind, overwrite=True, calibrate=text, **options)
        return next(folder.glob("*.gguf")), time.perf_counter() - start


def prepared(model: Path, work: Path, *, tokens: int, window: int) -> Bench:
    """Make the master, the text to calibrate on and the BF16 file of a model."""
    text = read_text(model / "eval.txt")
    tokenizer = load_tokenizer(model)
    ids = tokenize(model, text)
    pqweights.quantize(model, work / "master", "q6")
    rest = str(tokenizer.decode(ids[tokens : tokens + CALIBRATION_TOKENS].tolist()))
    (work / "calibration.txt").write_text(rest, encoding="utf-8")
    bench = Bench(
        model=model,
        base=quality.remembering(open_model(model)),
        ids=ids[:tokens],
        windows=TextWindows(size=window, stride=window // 2, score_first=True),
        work=work,
    )
    bench.export("plain", "bf16", ("source",))
    return bench


def model_rows(bench: Bench, types: tuple[str, ...], ways: tuple[str, ...]) -> Iterator[Document]:
    """A row for the BF16 file, and for each type and way to make it."""
    plain = next((bench.work / "plain").glob("*.gguf"))
    yield {"model": bench.model.name, "type": "BF16", "what": "ours"} | bench.figures(plain)
    text, work = bench.work / "calibration.txt", bench.work / "importances"
    known = importances(bench.model, text, work) if THEIRS_WITH_DATA in ways else []
    for name in types:
        for what, held in ((THEIRS, []), (THEIRS_WITH_DATA, known)):
            if what not in ways:
                continue
            out = bench.work / "theirs.gguf"
            seconds = quantize_by_llama_cpp(plain, out, name, held)
            if seconds is None:
                continue
            row = {"model": bench.model.name, "type": name, "what": what, "seconds": seconds}
            yield row | bench.figures(out)
        for what, uses in OURS.items():
            if what not in ways:
                continue
            out, seconds = bench.export("ours", name, uses)
            row = {"model": bench.model.name, "type": name, "what": what, "seconds": seconds}
            yield row | bench.figures(out)


def quantize_by_llama_cpp(plain: Path, out: Path, name: str, held: list[tuple[str, np.ndarray]]) -> float | None:
    """Quantize a file with llama.cpp's own quantizer, and return the seconds that it took. held: importances

    Returns None if it does not make the type without.
    """
    from llama_cpp import llama_cpp as library

    settings = library.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = int(gguf.LlamaFileType[f"MOSTLY_{name}"]), THREADS
    data = (library.llama_model_imatrix_data * (len(held) + 1))()
    for place, (tensor, means) in enumerate(held):
        data[place].name, data[place].size = tensor.encode(), means.size
        data[place].data = means.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if held:
        settings.imatrix = data
    start = time.perf_counter()
    if library.llama_model_quantize(os.fsencode(plain), os.fsencode(out), ctypes.byref(settings)):
        if not held:
            return None
        raise SystemExit(f"error: llama.cpp could not quantize {plain} to {name}")
    return time.perf_counter() - start


def importances(model: Path, text: Path, work: Path) -> list[tuple[str, np.ndarray]]:
    """The mean squares of the inputs of matrices, by name in a GGUF file: llama.cpp's importance matrix.

    All tokens count alike there, which ours do not.
    """
    held, options = [], Options(calibrate=text)
    checkpoint, out = open_local(model), open_store(work)
    alike = patch.object(layer_statistics, "counts_of", lambda gradients: torch.ones(len(gradients)))
    with alike, inputs_of(model, checkpoint, out, options, usable_cores()) as inputs:
        inputs.prepare(lambda *_: None)
        for tensor in gguf_model(checkpoint, name=None).tensors:
            sources = tensor.sources if isinstance(tensor, View) else ()
            name = sources[0].name if sources and tensor.name != "token_embd.weight" else ""
            known = inputs.weights.get(name)
            matrices = [] if known is None else [n for n, vector in enumerate(known.vectors) if vector is not None]
            if matrices:
                held.append((tensor.name, np.concatenate([inputs.mean_squares(name, matrix) for matrix in matrices])))
    return held


# --- tables ---


def sections(document: Document) -> dict[str, str]:
    """The tables of both parts."""
    result: dict[str, str] = {}
    if document.get(BLOCKS):
        result["gguf-errors"] = _block_table(document[BLOCKS])
    if document.get(MODELS):
        result["gguf-models"] = _model_table(document[MODELS])
    return result


def _models(rows: list[Document]) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in rows))


def _block_table(rows: list[Document]) -> str:
    """Relative errors, ours and as a share of llama.cpp's, and M weights/s with one thread on Gaussian weights."""
    kinds = list(dict.fromkeys((row["weights"], row["importance"]) for row in rows))
    found = {(row["type"], row["weights"], row["importance"]): row for row in rows}
    header = ["type", "bits", *(f"{kind}{', weighed' if weighed else ''}" for kind, weighed in kinds)]
    lines: list[list[str | None]] = []
    for name in dict.fromkeys(row["type"] for row in rows):
        cells = [found[name, *kind] for kind in kinds]
        shares = [f"{each['ours_mse']:.3g} ({each['ours_mse'] / each['theirs_mse']:.2f})" for each in cells]
        rates = [_rate_cell(found[name, "Gaussian", weighed]["rates"]) for weighed in (False, True)]
        lines.append([name, f"{BLOCK_TYPES[name].bits_per_weight:g}", *shares, *rates])
    return table([*header, "M weights/s", "M weights/s, weighed"], lines)


def _rate_cell(rates: dict[str, float]) -> str | None:
    """Ours, and in parentheses llama.cpp's; rates of earlier bytes are left out."""
    ours, theirs = rates.get("ours_1"), rates.get("theirs_1")
    return f"{ours / 1e6:.0f} ({theirs / 1e6:.3g})" if ours and theirs else None


def _model_table(rows: list[Document]) -> str:
    """KL divergence by type, model and way."""
    ways = [THEIRS, *(way for way in OURS if way.count("imatrix") == 0), THEIRS_WITH_DATA]
    ways += [way for way in OURS if "imatrix" in way]
    columns = [(model, way) for model in _models(rows) for way in ways]
    found = {(row["type"], row["model"], row["what"]): row for row in rows}
    lines = []
    for name in sorted({row["type"] for row in rows} - {"BF16"}, key=list(MIXES).index):
        cells = [found.get((name, *column)) for column in columns]
        size = next(cell["bytes"] for cell in cells if cell)
        lines.append([name, f"{size / 1e6:.2f}", *(None if cell is None else f"{cell['kl']:.5f}" for cell in cells)])
    return table(["type", "MB", *(f"{model}: {way}" for model, way in columns)], lines)


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("models", type=Path, nargs="*", help="folders of language models with an eval.txt")
    parser.add_argument("--only", nargs="+", choices=(BLOCKS, MODELS), default=(BLOCKS, MODELS))
    parser.add_argument("--types", nargs="+", help="those of blocks or models to measure again")
    parser.add_argument("--ways", nargs="+", default=(THEIRS, THEIRS_WITH_DATA, *OURS), help="columns to measure again")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the rates of blocks; 0 keeps those of --out")
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=256)
    options = parser.parse_args()
    document = _kept(options.out) | {"settings": {"tokens": options.max_tokens, "window": options.window}}
    start = now()
    if BLOCKS in options.only:
        known = gguf.GGMLQuantizationType.__members__  # not Q2_0
        types = [name for name in BLOCK_TYPES if name in (options.types or known)]
        kept = [row for row in document.get(BLOCKS, []) if row["type"] not in types]
        measured = [*kept, *block_rows(types, options.rounds)]
        document[BLOCKS] = sorted(measured, key=lambda row: list(BLOCK_TYPES).index(row["type"]))
        if not options.rounds:
            keep_rates(
                document,
                _kept(options.out),
                BLOCKS,
                "rates",
                lambda row: (row["type"], row["weights"], row["importance"]),
            )
    if MODELS in options.only:
        rows = {_key(row): row for row in document.get(MODELS, [])}
        for model in options.models:
            with tempfile.TemporaryDirectory() as work:
                bench = prepared(model, Path(work), tokens=options.max_tokens, window=options.window)
                for row in model_rows(bench, tuple(options.types or TYPES), tuple(options.ways)):
                    rows[_key(row)] = row | measured_with(codecs_of(row))
                    print(row["model"], row["type"], row["what"], f"{row['kl']:.5f}", row["bytes"], flush=True)
        document[MODELS] = list(rows.values())
    publish("gguf_types", document | {"machine": machine(start)}, sections(document), options, None)


def codecs_of(row: Document) -> list[str]:
    """The types of blocks of a file of ours, by the names of digests.CODECS."""
    most, others = MIXES[row["type"]]
    types = {most, OUTPUTS[row["type"]], *(kind for _, _, kind in others)} if row["what"] in OURS else set()
    return [f"gguf {kind}" for kind in BLOCK_TYPES if kind in types]


def _key(row: Document) -> tuple[str, str, str]:
    return row["model"], row["type"], row["what"]


def _kept(out: Path | None) -> Document:
    """The document of an earlier run, of which --only leaves the other part, and --types and --ways the other rows."""
    path = None if out is None else out / "gguf_types.json"
    return json.loads(path.read_text()) if path is not None and path.exists() else {}


if __name__ == "__main__":
    main()
