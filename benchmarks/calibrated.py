"""4-bit exports beside the tools that round with calibration data: the same model, text, format and evaluation.

    python benchmarks/calibrated.py MODEL_DIR [MODEL_DIR...] --environments PREFIX [--only ours peers] [--rows NAME...]

Each model is quantized in three formats by this project's command line and by calibrated tools
(benchmarks/calibrated_peers.py, which says what is quantized), each in a process of its own. All that calibrate read
the same tokens: 64 windows of 256 tokens of MODEL_DIR/eval.txt that follow those evaluated on. What a result decodes to
is evaluated in float32 beside the original, by the protocol of `pqweights eval` (docs/evaluation.md). Bits per weight
count all that is stored for the quantized weights. Seconds and peak memory are those of whole processes, interpreters
and imports included; of several commands, the sum and the largest.

A tool runs with PREFIX-TOOL/bin/python, which `make bench-calibrated-env` makes; mlx-lm and torchao run with this one.
With --only or --rows, a document in --out keeps its other rows.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import PQWEIGHTS, Cell, Document, argument_parser, machine, measured_with, now, publish, table
from quality import measures, number, remembering
from safetensors.numpy import save_file

from pqweights.checkpoint.names import CONFIG_FILE
from pqweights.checkpoint.source import open_local
from pqweights.kernels.groups import unpack_bits
from pqweights.runtime.evaluation import choose_windows
from pqweights.runtime.folders import read_folder
from pqweights.runtime.models import Model, open_model
from pqweights.runtime.options import EvaluationOptions
from pqweights.runtime.protocol import TextWindows, compare
from pqweights.runtime.texts import Ids, load_tokenizer, read_text, tokenize

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from export_decoders import Floats, Stored, export_weight

HERE = Path(__file__).resolve().parent
WINDOWS, WINDOW = 64, 256  # of calibration; windows to evaluate on have this size, too
SPARE_TOKENS = 600  # decoding and encoding again may join a few
VLLM, TORCHAO, MLX = "vllm", "torchao", "mlx"
OURS, PEERS, ORIGINAL = "ours", "peers", "original"
IN_THIS_ENVIRONMENT = ("mlx", "torchao")  # tools that the project's own environment has


@dataclass(frozen=True, kw_only=True)
class Format:
    """What a table compares.

    title: what the integers are.
    group_size: weights per scale; of a model whose rows do not divide by it, the next smaller power of two.
    arguments: of `pqweights export`.
    """

    title: str
    group_size: int
    arguments: tuple[str, ...]


FORMATS = {
    VLLM: Format(title="INT4, symmetric", group_size=128, arguments=()),
    TORCHAO: Format(title="INT4, asymmetric", group_size=128, arguments=("--packing", "plain")),
    MLX: Format(title="MLX affine, 4 bits", group_size=64, arguments=()),
}


@dataclass(frozen=True, kw_only=True)
class Ours:
    """A row of this project.

    calibrated: whether it reads the calibration text.
    export: arguments of the command. TEXT, for the calibration text, is put in.
    master: the recipe of the master that is exported; None for the model itself
    """

    name: str
    export: tuple[str, ...] = ()
    master: str | None = None


GPTQ = ("--rounding", "gptq", "--calibrate", "TEXT", "--calibration-tokens", str(WINDOWS * WINDOW))
OUR_ROWS = (
    Ours(name="pqweights, min-max", export=("--qparams", "minmax")),
    Ours(name="pqweights"),
    Ours(name="pqweights, from a 5-bit master", master="q5"),
    Ours(name="pqweights GPTQ", export=GPTQ),
)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A row of another tool.

    method: the name that calibrated_peers.py has for it; up to the first "-" it names the environment.
    """

    name: str
    method: str
    format: str
    calibrated: bool = True
    arguments: tuple[str, ...] = ()


ASYMMETRIC = ("--asymmetric",)
PEER_ROWS = (
    Peer(name="llm-compressor, rounding", method="llmcompressor", format=VLLM, calibrated=False),
    Peer(name="llm-compressor AWQ", method="llmcompressor-awq", format=VLLM),
    Peer(name="llm-compressor GPTQ", method="llmcompressor-gptq", format=VLLM),
    Peer(name="llm-compressor AWQ and GPTQ", method="llmcompressor-awq-gptq", format=VLLM),
    Peer(name="AutoRound", method="autoround", format=VLLM),
    Peer(name="AutoRound, 1000 iterations", method="autoround-best", format=VLLM),
    Peer(name="GPTQModel", method="gptqmodel", format=VLLM),
    Peer(name="torchao, its own rule", method="torchao", format=TORCHAO, calibrated=False),
    Peer(name="torchao HQQ", method="torchao-hqq", format=TORCHAO, calibrated=False),
    Peer(name="torchao AWQ", method="torchao-awq", format=TORCHAO),
    Peer(
        name="llm-compressor, rounding", method="llmcompressor", format=TORCHAO, calibrated=False, arguments=ASYMMETRIC
    ),
    Peer(name="llm-compressor AWQ", method="llmcompressor-awq", format=TORCHAO, arguments=ASYMMETRIC),
    Peer(name="llm-compressor GPTQ", method="llmcompressor-gptq", format=TORCHAO, arguments=ASYMMETRIC),
    Peer(name="llm-compressor AWQ and GPTQ", method="llmcompressor-awq-gptq", format=TORCHAO, arguments=ASYMMETRIC),
    Peer(name="AutoRound", method="autoround", format=TORCHAO, arguments=ASYMMETRIC),
    Peer(name="mlx_lm.convert", method="mlx", format=MLX, calibrated=False),
    Peer(name="mlx_lm.awq", method="mlx-awq", format=MLX),
    Peer(name="mlx_lm.gptq", method="mlx-gptq", format=MLX),
    Peer(name="mlx_lm.dwq", method="mlx-dwq", format=MLX),
    Peer(name="mlx_lm.dwq, rate 1e-4, 4 passes", method="mlx-dwq-longer", format=MLX),
)


class Failed(Exception):
    """A command failed; the message is the last line that it said."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What commands took: wall time, and the peak resident memory of the largest."""

    seconds: float = 0.0
    peak_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(seconds=self.seconds + other.seconds, peak_bytes=max(self.peak_bytes, other.peak_bytes))


# This process is large, and Linux carries its memory over into the peak of a command that it starts. So a small one
# starts the command. Tools write logs where they are started.
STARTER = """
import dataclasses, json, sys
sys.path.insert(0, sys.argv[1])
import harness
print(json.dumps(dataclasses.asdict(harness.run_command(sys.argv[2:]))))
"""


def run(command: list[str], work: Path) -> Cost:
    """Run a command in a folder. Raises Failed."""
    starting = [sys.executable, "-c", STARTER, str(HERE), *command]
    done = subprocess.run(starting, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(done.stderr.strip().splitlines()[-1])
    measured = json.loads(done.stdout)
    return Cost(seconds=measured["seconds"], peak_bytes=measured["peak_bytes"])


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One model, and what its rows are made from and measured on.

    model: the folder of the original.
    base: the original, opened.
    ids: the tokens that are evaluated on, the first of the text.
    calibration: the file of the calibration text, of the tokens that follow.
    work: where folders are made.
    environments: the beginning of the names of the folders of the tools' environments.
    absent: receives why a row could not be measured.
    """

    model: Path
    base: Model
    ids: Ids
    windows: TextWindows
    calibration: Path
    work: Path
    environments: str
    absent: dict[str, str] = field(default_factory=dict)

    def group_size(self, form: str) -> int:
        """The weights per scale: the format's, or fewer if the rows of a linear layer do not divide by it."""
        size = FORMATS[form].group_size
        linear = [t.shape[-1] for t in open_local(self.model).tensors if t.name.endswith("_proj.weight")]
        while any(columns % size for columns in linear):
            size //= 2
        return size

    def settings(self) -> dict[str, Any]:
        """The text and the windows, for the document."""
        starts = self.windows.starts(len(self.ids))
        return {
            "tokens": len(self.ids),
            "windows": len(starts),
            "window": self.windows.size,
            "stride": self.windows.stride,
            "scored": sum(self.windows.scored(start) for start in starts),
            "calibration_tokens": WINDOWS * WINDOW,
            "group_sizes": {form: self.group_size(form) for form in FORMATS},
        }

    def measure(self, folder: Path) -> dict[str, Any]:
        """The measured fields of the row of a folder."""
        plain = self.work / "plain"
        bits = decode(self.model, folder, plain)
        found = measures(compare(open_model(plain), self.base, ids=self.ids, windows=self.windows))
        shutil.rmtree(plain)
        return {"bits_per_weight": bits, **found}


def ours(bench: Bench, row: Ours, form: str) -> tuple[Path, Cost]:
    """Make an export with the command line. Raises Failed."""
    source, out = bench.model, bench.work / "export"
    put_in = {"TEXT": str(bench.calibration)}

    def command(name: str, source: Path, result: Path, *arguments: str) -> Cost:
        named = [put_in.get(argument, argument) for argument in arguments]
        return run([*PQWEIGHTS, name, str(source), str(result), *named, "--overwrite", "--quiet"], bench.work)

    cost = Cost()
    if row.master is not None:
        source = bench.work / "master"
        cost = command("quantize", bench.model, source, "--recipe", row.master)
    target = ("--target", form, "--group-size", str(bench.group_size(form)), *FORMATS[form].arguments)
    return out, cost + command("export", source, out, *target, *row.export)


def theirs(bench: Bench, row: Peer) -> tuple[Path, Cost]:
    """Let another tool quantize the model. Raises Failed."""
    tool, out = row.method.partition("-")[0], bench.work / "peer"
    python = sys.executable if tool in IN_THIS_ENVIRONMENT else f"{bench.environments}-{tool}/bin/python"
    if not Path(python).exists():
        raise Failed(f"{python} does not exist: make bench-calibrated-env")
    shutil.rmtree(out, ignore_errors=True)
    how = ["--group-size", str(bench.group_size(row.format)), "--windows", str(WINDOWS), "--window", str(WINDOW)]
    files = [str(bench.model), str(bench.calibration), str(out)]
    command = [python, str(HERE / "calibrated_peers.py"), row.method, *files, *how, *row.arguments]
    return out, run(command, bench.work)


# What the results decode to.


def decode(model: Path, folder: Path, out: Path) -> float:
    """Write what the weights of a folder decode to, in float32 and by the original's names, with the original's config.

    Returns the bits per weight over the weights that are not stored plainly.
    """
    original, stored = open_local(model), Stored(folder)
    read, is_plain = reader(folder, stored), plainly(stored)
    out.mkdir()
    tensors = {tensor.name: np.ascontiguousarray(read(tensor.name), np.float32) for tensor in original.tensors}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    for name in (name for name in original.companions if "/" not in name):
        shutil.copy(model / name, out / name)
    config = json.loads((model / CONFIG_FILE).read_text())
    (out / CONFIG_FILE).write_text(json.dumps(config | {"dtype": "float32"}))
    known = folder / "bits.json"
    if known.exists():
        return float(json.loads(known.read_text())["bits_per_weight"])
    names = {tensor.name for tensor in original.tensors}
    parts = [tensor.byte_count for name, tensor in stored.tensors.items() if not (name in names and is_plain(name))]
    return 8 * sum(parts) / sum(values.size for name, values in tensors.items() if not is_plain(name))


def plainly(stored: Stored) -> Callable[[str], bool]:
    """Whether the weight of a name is stored as floats."""
    return lambda name: name in stored.tensors and stored.tensors[name].dtype in ("F32", "BF16", "F16")


def reader(folder: Path, stored: Stored) -> Callable[[str], Floats]:
    """A function from a name of the original to the weight in float32."""
    config = json.loads((folder / CONFIG_FILE).read_text())
    settings = config.get("quantization_config") or {}
    plain = export_weight(folder)
    if settings.get("quant_method") == "compressed-tensors":
        (group,) = settings["config_groups"].values()
        if not group["weights"]["symmetric"]:
            return lambda name: compressed_asymmetric(stored, name)
        return plain
    if any(name.endswith(".qweight") for name in stored.tensors):
        return lambda name: gptq_weight(stored, name)
    if "quantization" in config:
        return lambda name: mlx_weight(plain, stored, name)
    return plain


def compressed_asymmetric(stored: Stored, name: str) -> Floats:
    """Decode a pack-quantized weight with zero points: (code - zero) * scale, zeros packed along the rows."""
    if f"{name}_packed" not in stored.tensors:
        return stored.floats(name)
    scales = stored.floats(f"{name}_scale")  # [rows, groups]
    rows, columns = stored.bytes(f"{name}_shape").view("<i8")
    codes = unpack_bits(stored.rows(f"{name}_packed"), 4)[:, :columns].astype(np.float32)
    words = stored.bytes(f"{name}_zero_point").view("<u4").reshape(-1, scales.shape[1])
    zeros = np.ascontiguousarray(words.T).view(np.uint8)
    zeros = unpack_bits(zeros, 4).T[:rows].astype(np.float32)
    centred = codes.reshape(*scales.shape, -1) - zeros[..., None]
    weight: Floats = (centred * scales[..., None]).reshape(rows, columns)
    return weight


def gptq_weight(stored: Stored, name: str) -> Floats:
    """Decode GPTQ's first format: (code - zero - 1) * scale; codes packed along the inputs, zeros along the outputs."""
    module = name.removesuffix(".weight")
    if f"{module}.qweight" not in stored.tensors:
        return stored.floats(name)
    scales = stored.floats(f"{module}.scales").T  # [rows, groups]
    words = stored.bytes(f"{module}.qweight").view("<u4").reshape(stored.tensors[f"{module}.qweight"].shape)
    codes = unpack_bits(np.ascontiguousarray(words.T).view(np.uint8), 4).astype(np.float32)
    zeros = unpack_bits(stored.rows(f"{module}.qzeros"), 4).T.astype(np.float32)
    centred = codes.reshape(*scales.shape, -1) - (zeros[..., None] + 1)
    weight: Floats = (centred * scales[..., None]).reshape(len(scales), -1)
    return weight


def mlx_weight(plain: Callable[[str], Floats], stored: Stored, name: str) -> Floats:
    """Read a weight under mlx-lm's name: its models stack the experts of a layer."""
    expert = re.fullmatch(r"(.*\.mlp)\.experts\.(\d+)\.(\w+\.weight)", name)
    if expert is None or name in stored.tensors:
        return plain(name)
    return plain(f"{expert[1]}.switch_mlp.{expert[3]}")[int(expert[2])]


# The document and its tables.


def rows_of(bench: Bench, options: Any) -> Iterator[dict[str, Any]]:
    """The rows of one model that the options ask for."""
    alone = {"format": None, "kind": ORIGINAL, "what": "original", "calibrated": False, "bits_per_weight": None}
    scores = measures(compare(bench.base, None, ids=bench.ids, windows=bench.windows))
    yield alone | scores | {"seconds": None, "peak_bytes": None}
    for job in jobs(bench):
        asked = job.format in options.formats and job.kind in options.only
        if not asked or not (options.rows is None or any(fnmatch(job.what, name) for name in options.rows)):
            continue
        about = {"format": job.format, "kind": job.kind, "what": job.what, "calibrated": job.calibrated}
        try:
            folder, cost = job.make()
            yield about | bench.measure(folder) | {"seconds": cost.seconds, "peak_bytes": cost.peak_bytes}
        except Failed as error:
            name = f"{bench.model.name}: {job.format}: {job.what}"
            bench.absent[name] = str(error)
            print(f"{name}: {error}", flush=True)


class Job(NamedTuple):
    """A row that can be measured, and how its folder is made."""

    format: str
    what: str
    kind: str
    calibrated: bool
    make: Callable[[], tuple[Path, Cost]]


def jobs(bench: Bench) -> Iterator[Job]:
    """All rows, in the order of the tables."""
    for form in FORMATS:
        for peer in PEER_ROWS:
            if peer.format == form:
                yield Job(form, peer.name, PEERS, peer.calibrated, functools.partial(theirs, bench, peer))
        for row in OUR_ROWS:
            yield Job(form, row.name, OURS, "--calibrate" in row.export, functools.partial(ours, bench, row, form))


def open_bench(model: Path, options: Any, work: Path) -> Bench:
    """A model with its text, cut into what is evaluated on and what is calibrated on."""
    ids = tokenize(model, read_text(model / "eval.txt"))
    rest = ids[options.max_tokens :][: WINDOWS * WINDOW + SPARE_TOKENS]
    calibration = work / "calibration.txt"
    calibration.write_text(str(load_tokenizer(model).decode(rest.tolist())), encoding="utf-8")
    return Bench(
        model=model,
        base=remembering(open_model(model)),
        ids=ids[: options.max_tokens],
        windows=choose_windows([read_folder(model)], EvaluationOptions(window=WINDOW)),
        calibration=calibration,
        work=work,
        environments=str(options.environments.absolute()),
    )


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown: the KL divergence of all models, then one table for each model and format."""
    result = {"calibrated-short": "\n\n".join(short(document, form) for form in FORMATS)}
    header = ("", "calibrated", "bits/weight", "KL", "perplexity", "top-1", "s", "peak memory")
    for model, about in document["settings"].items():
        rows = [row for row in document["rows"] if row["model"] == model]
        result[f"calibrated-{model}"] = "\n\n".join(
            f"{model}, {FORMATS[form].title}, groups of {about['group_sizes'][form]}\n\n"
            + table(header, [cells(row) for row in rows if row["format"] in (form, None)])
            for form in FORMATS
        )
    if document["absent"]:
        lines = [f"- {name}: {why}" for name, why in sorted(document["absent"].items())]
        result["calibrated-absent"] = "Not measured:\n\n" + "\n".join(lines)
    return result


def short(document: Document, form: str) -> str:
    """The KL divergence of every row of a format, a column for each model."""
    models = list(document["settings"])
    found = {(row["model"], row["what"]): row for row in document["rows"] if row["format"] == form}
    calibrated = {what: row["calibrated"] for (_, what), row in found.items()}
    lines: list[list[Cell]] = []
    for what in calibrated:
        rows = [found.get((model, what)) for model in models]
        lines.append([what, "yes" if calibrated[what] else None, *(row and number(row["kl"], ".5f") for row in rows)])
    header = (FORMATS[form].title, "calibrated", *models)
    return table(header, lines)


def cells(row: Document) -> list[Cell]:
    """A line of the tables."""
    peak = row["peak_bytes"]
    return [
        row["what"],
        "yes" if row["calibrated"] else None,
        number(row["bits_per_weight"], ".3f"),
        None if row["kl"] is None else f"{row['kl']:.5f} +- {row['kl_error']:.5f}",
        number(row["perplexity"], ".3f"),
        number(row["top1"], ".2%"),
        number(row["seconds"], ".1f"),
        None if peak is None else f"{peak / 1e6:.0f} MB",
    ]


CODECS = {VLLM: "vllm w4a16", TORCHAO: "torchao int4", MLX: "mlx q4"}


def codecs_of(row: Document) -> list[str]:
    """What a row is about, by the names of digests.CODECS; nothing of originals and other tools."""
    if row["kind"] != OURS:
        return []
    more = {"5-bit master": "q5", "GPTQ": "gptq"}
    return [CODECS[row["format"]], *(codec for words, codec in more.items() if words in row["what"])]


def key(row: Document) -> tuple[str, ...]:
    """What tells a row from all others."""
    return row["model"], row["format"] or "", row["what"]


def merged(document: Document, row: Document, bench: Bench) -> Document:
    """The document with a row that was measured (anew), in the order of the tables."""
    names = ["original", *(each.name for each in (*PEER_ROWS, *OUR_ROWS))]
    rows = [each for each in document["rows"] if key(each) != key(row) and each["what"] in names]
    measured = ": ".join(key(row))
    return {
        "settings": document["settings"] | {bench.model.name: bench.settings()},
        "rows": sorted((*rows, row), key=lambda each: names.index(each["what"])),
        "absent": {name: why for name, why in document["absent"].items() if name != measured} | bench.absent,
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="folders of language models, each with eval.txt")
    parser.add_argument("--environments", type=Path, default=Path(sys.prefix), help="PREFIX of the tools' environments")
    parser.add_argument("--max-tokens", type=int, default=12_000, help="how many tokens of the text to evaluate on")
    parser.add_argument("--only", nargs="+", choices=(OURS, PEERS), default=(OURS, PEERS))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=tuple(FORMATS))
    parser.add_argument("--rows", nargs="+", help="only rows of these names; * stands for any text")
    parser.add_argument("--folder", type=Path, help="where folders are made; by default a temporary folder")
    options = parser.parse_args()
    start = now()
    path = None if options.out is None else options.out / "calibrated.json"
    document: Document = {"rows": [], "settings": {}, "absent": {}}
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = json.loads(path.read_text()) if path.is_file() else document
    for model in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder) as work:
            bench = open_bench(model.resolve(), options, Path(work).resolve())
            for row in rows_of(bench, options):
                row = {"model": model.name} | row | measured_with(codecs_of(row))
                print(f"{model.name}: {row['format']}: {row['what']}: {row['kl']} {row['perplexity']:.3f}", flush=True)
                document = {"machine": machine(start)} | merged(document, row, bench)
                if path is not None:  # a row may take minutes
                    path.write_text(json.dumps(document, indent=1) + "\n")
            document["absent"] |= bench.absent
    publish("calibrated", document, sections(document), options, None)


if __name__ == "__main__":
    main()
