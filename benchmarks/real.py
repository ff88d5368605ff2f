"""Language models that people use, quantized by pqweights and by other tools, at the size of whole files.

    python benchmarks/real.py MODEL_DIR [MODEL_DIR...] --text TEXT [--rows NAME...] [--again] [--environments PREFIX]

Each row is one result of the command line, or of another tool, from the same model. It is compared with the original in
float32, on the first `--max-tokens` tokens of the text, in windows of 512 without overlap. The tools that read data get
the tokens that follow; `self` is what the model writes itself. Bits are those of all files of weights, for each
parameter. Seconds, processor seconds and memory are those of the commands, interpreters and imports included; one
command makes all calibrated GGUF types that are missing. What MLX folders and other tools' folders hold is decoded, and
computed with in float32.

A tool of real_peers.py runs with PREFIX-TOOL/bin/python of --environments, which `make bench-real-env` makes; mlx-lm,
torchao and llama.cpp with this one.

A row is in the document in --out as soon as it is measured, and rows that are there are not measured again: a run that
was interrupted goes on with the next row. --again measures those that --rows names (shell patterns) anew. A row of
which nothing in the code has changed the bytes stays; tests say which were measured with other bytes.

Models that were decoded from a quantized file lie on its grid, and a type with the same grid finds them again: `grid`
of a model says so, and the tables mark the rows (see GRIDS).
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import shutil
import struct
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import gguf_types
import numpy as np
from harness import (
    PQWEIGHTS,
    Document,
    argument_parser,
    machine,
    measured_with,
    now,
    processor,
    publish,
    run_command,
    table,
    usable_cores,
)
from quality import measures, remembering
from safetensors.numpy import save_file

from pqweights.checkpoint.gguf.file import open_gguf
from pqweights.checkpoint.names import CONFIG_FILE
from pqweights.checkpoint.readers import element_count
from pqweights.checkpoint.source import open_local
from pqweights.kernels.gguf_encoding import BLOCK_TYPES
from pqweights.runtime.folders import size
from pqweights.runtime.models import Model, open_model
from pqweights.runtime.packages import give_back_memory
from pqweights.runtime.protocol import TextWindows, compare
from pqweights.runtime.texts import Ids, load_tokenizer, read_text, tokenize

HERE = Path(__file__).resolve().parent
WINDOW, CALIBRATION_TOKENS = 512, 12_288
MASTER, GGUF, MLX, VLLM, TORCHAO = "master", "GGUF", "MLX", "vllm", "torchao"
OURS, LLAMA_CPP, IK, MLX_LM = "pqweights", "llama.cpp", "ik_llama.cpp", "mlx-lm"
IN_THIS_ENVIRONMENT = ("mlx", "torchao")  # tools that the project's own environment has
SELF, TEXT = "self", "text"
TRELLIS = "hadamard-trellis"
TYPES = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "iq4_xs", "q3_k_m", "q2_k")
TYPES_WITH_TEXT = ("iq3_m", "iq3_xxs", "iq2_m", "iq2_xs")  # llama.cpp makes most of them with importances only
IK_TYPES = ("iq4_kt", "iq3_kt", "iq2_kt", "iq4_k", "iq3_k", "iq2_k")
# The types of whose grid all or most values of a source are that was decoded from a file of some type.
GRIDS = {"Q4_1": ("q4_1", "q5_k_m"), "Q4_K_M": ("q4_k_m",), "Q4_0": ("q4_0",)}

# Formats that others make, too: what a table calls them, and the fields of their rows.
EXPORTS = (
    ("INT4, symmetric, for vLLM", VLLM, "W4A16"),
    ("INT4, asymmetric, of torchao", TORCHAO, "INT4"),
    ("NVFP4, for vLLM", VLLM, "NVFP4"),
    ("MXFP4, for vLLM", VLLM, "MXFP4"),
    ("MLX, 4 bits", MLX, "4 bits"),
    ("MLX, 3 bits", MLX, "3 bits"),
)

# On Linux a command's peak is at least the memory of the process that starts it, and this one holds the original.
STARTER = """
import pathlib, resource, subprocess, sys
run = subprocess.run(sys.argv[2:], stdout=subprocess.DEVNULL)
pathlib.Path(sys.argv[1]).write_text(f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss}")
sys.exit(run.returncode)
"""

# Rows of the README.
SHORT = (
    "pqweights GGUF q4_k_m", "llama.cpp GGUF q4_k_m",
    "pqweights GGUF q4_k_m, text", "llama.cpp GGUF q4_k_m, text",
    "pqweights GGUF q3_k_m, text", "llama.cpp GGUF q3_k_m, text",
    "pqweights MLX 4 bits", "mlx-lm MLX 4 bits", "pqweights MLX 4 bits, text", "pqweights master q5",
    "pqweights master trellis 5.125, fitted", "pqweights master trellis 5.125, self",
    "pqweights master trellis 4.125, self",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table.

    format, tool: of the result
    name: of the recipe or type
    data: SELF, TEXT, or None for none
    arguments: of the command line of pqweights behind the source and the result; TEXT is replaced by the file
    codecs: those of digests.CODECS that decide its bytes
    method: of real_peers.py, if that makes it
    """

    format: str
    tool: str
    name: str
    data: str | None = None
    arguments: tuple[str, ...] = ()
    codecs: tuple[str, ...] = ()
    method: str | None = None

    @property
    def title(self) -> str:
        """What --rows names."""
        return f"{self.tool} {self.format} {self.name}{'' if self.data is None else f', {self.data}'}"


def calibrated(data: str) -> tuple[str, ...]:
    """The arguments that have a command read data."""
    return ("--calibrate", data, "--calibration-tokens", str(CALIBRATION_TOKENS))


def rows() -> Iterator[Row]:
    """All rows, those that take the least time first."""
    arguments: tuple[str, ...]
    codecs: tuple[str, ...]
    for name in ("q6", "q5", "q4", "q3"):
        arguments = ("quantize", "--recipe", name)
        yield Row(format=MASTER, tool=OURS, name=name, arguments=arguments, codecs=(name,))
    for data in (None, SELF):
        for bits in ("5.125", "4.125", "3.125", "2.125"):
            arguments = ("quantize", "--codec", TRELLIS, "--bits", bits, *([] if data is None else calibrated(data)))
            codecs = ("trellis",) if data is None else ("columns",)
            yield Row(format=MASTER, tool=OURS, name=f"trellis {bits}", data=data, arguments=arguments, codecs=codecs)
    for bits in ("5.125", "4.125", "3.125"):
        arguments = ("quantize", "--codec", TRELLIS, "--target-bpw", bits)
        yield Row(format=MASTER, tool=OURS, name=f"trellis {bits}, fitted", arguments=arguments, codecs=("trellis",))
    for data in (None, TEXT, SELF):
        more = () if data is None else calibrated(data)
        for kind in (*TYPES, *(TYPES_WITH_TEXT if data == TEXT else ())):
            arguments = ("export", "--target", "gguf", "--type", kind, *more)
            codecs = () if data is None else ("gptq blocks",)
            yield Row(format=GGUF, tool=OURS, name=kind, data=data, arguments=arguments, codecs=codecs)
            if data != SELF:
                yield Row(format=GGUF, tool=LLAMA_CPP, name=kind, data=data)
        gptq = () if data is None else ("gptq",)
        for bits in ("4", "3"):
            arguments, codecs = ("export", "--target", "mlx", "--bits", bits, *more), (f"mlx q{bits}", *gptq)
            yield Row(format=MLX, tool=OURS, name=f"{bits} bits", data=data, arguments=arguments, codecs=codecs)
        for target, name, codec, fed_back, options in (
            (VLLM, "W4A16", "vllm w4a16", "gptq", ()),
            (TORCHAO, "INT4", "torchao int4", "gptq", ("--packing", "plain")),
            (VLLM, "NVFP4", "vllm nvfp4a16", "gptq floats", ("--format", "nvfp4a16")),
            (VLLM, "MXFP4", "vllm mxfp4a16", "gptq floats", ("--format", "mxfp4a16")),
        ):
            arguments = ("export", "--target", target, *options, *more)
            codecs = (codec,) if data is None else (codec, fed_back)
            yield Row(format=target, tool=OURS, name=name, data=data, arguments=arguments, codecs=codecs)
    for data in (None, TEXT):
        yield from (Row(format=GGUF, tool=IK, name=kind, data=data) for kind in IK_TYPES)
    yield from (Row(format=MLX, tool=MLX_LM, name=f"{bits} bits") for bits in ("4", "3"))
    yield Row(format="transformers", tool="bitsandbytes", name="NF4", method="bitsandbytes")
    for name in ("W4A16", "NVFP4", "MXFP4"):
        yield Row(format=VLLM, tool="llm-compressor", name=name, method=f"llmcompressor-{name.lower()}")
    yield Row(format=TORCHAO, tool="torchao", name="INT4", method="torchao")
    yield Row(format=TORCHAO, tool="torchao HQQ", name="INT4", method="torchao-hqq")
    yield Row(format=TORCHAO, tool="torchao AWQ", name="INT4", data=TEXT, method="torchao-awq")
    for bits, (tool, method) in itertools.product(
        ("4", "3"), (("GPTQ", "gptq"), ("AWQ", "awq"), ("DWQ", "dwq-longer"))
    ):
        if (tool, bits) != ("GPTQ", "3"):  # it takes 2, 4, and 8
            yield Row(format=MLX, tool=f"{MLX_LM} {tool}", name=f"{bits} bits", data=TEXT, method=f"mlx-{method}")
    for tool, name, method in (
        ("llm-compressor GPTQ", "W4A16", "llmcompressor-w4a16-gptq"),
        ("llm-compressor GPTQ", "NVFP4", "llmcompressor-nvfp4-gptq"),
        ("llm-compressor GPTQ", "MXFP4", "llmcompressor-mxfp4-gptq"),
        ("llm-compressor AWQ", "W4A16", "llmcompressor-w4a16-awq"),
        ("llm-compressor AWQ and GPTQ", "W4A16", "llmcompressor-w4a16-awq-gptq"),
        ("GPTQModel", "W4A16", "gptqmodel"),
        ("AutoRound light", "W4A16", "autoround-light"),
        ("AutoRound", "W4A16", "autoround"),
    ):
        yield Row(format=VLLM, tool=tool, name=name, data=TEXT, method=method)


class Cost(NamedTuple):
    """What making a result takes: wall time, time of the processor, and memory, if that is known."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int | None = None

    @staticmethod
    def of(command: Sequence[str]) -> Cost:
        """Run a command. Raises SystemExit if it fails."""
        with tempfile.NamedTemporaryFile() as peak:
            run = run_command([sys.executable, "-c", STARTER, peak.name, *command])
            return Cost(run.seconds, run.user_seconds + run.system_seconds, 1024 * int(peak.read()))


class Made(NamedTuple):
    """A result: what it took, its size, what can be opened of it, and how many results the command made."""

    cost: Cost
    bytes: int
    opened: Path
    results: int = 1


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A model, and what its rows are measured on.

    model: the folder of the original
    base: the original, opened
    weights: how many it has
    ids: the tokens that are scored
    text: the file of those that follow
    work: where results are made
    rows: those that are measured
    environments: the beginning of the names of the folders of the tools' environments
    costs: of the commands that have made all calibrated GGUF types, by their data
    """

    model: Path
    base: Model
    weights: int
    ids: Ids
    text: Path
    work: Path
    rows: Sequence[Row]
    environments: str
    costs: dict[str | None, Cost] = field(default_factory=dict)

    @functools.cached_property
    def importances(self) -> list[tuple[str, Any]]:
        """What llama.cpp's quantizer gets of the text."""
        return gguf_types.importances(self.model, self.text, self.work / "importances")

    @functools.cached_property
    def plain(self) -> Path:
        """Our file in BF16, which llama.cpp and ik_llama.cpp quantize."""
        out = self.work / "plain"
        run_command([*PQWEIGHTS, "export", f"{self.model}", f"{out}", "--target", "gguf", "--type", "bf16"])
        return next(out.glob("*.gguf"))

    def group_size(self, row: Row) -> int:
        """The weights that share a scale: those of the format, or fewer if the rows of a matrix do not divide by it."""
        size = 64 if row.format == MLX else 128
        columns = {
            tensor.shape[-1] for tensor in open_local(self.model).tensors if tensor.name.endswith("_proj.weight")
        }
        while any(each % size for each in columns):
            size //= 2
        return size

    def measure(self, row: Row) -> Document:
        """Make the result of a row, and compare it with the original. Raises SystemExit if a command fails."""
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            make = by_peer if row.method is not None else MAKERS[row.tool]
            made = make(self, row, Path(folder) / "out")
            windows = TextWindows(size=WINDOW, stride=WINDOW)
            gc.collect()  # models of compressed-tensors are in cycles
            give_back_memory()
            scores = measures(compare(open_model(made.opened), self.base, ids=self.ids, windows=windows))
            types = {tensor.type for tensor in open_gguf(made.opened).tensors} if row.format == GGUF else set()
        kinds = [f"gguf {kind}" for kind in sorted(types & BLOCK_TYPES.keys())] if row.tool == OURS else []
        return {
            **scores,
            **measured_with([*row.codecs, *kinds]),
            "bytes": made.bytes,
            "bits_per_parameter": 8 * made.bytes / self.weights,
            "seconds": made.cost.seconds,
            "cpu_seconds": made.cost.cpu_seconds,
            "peak_bytes": made.cost.peak_bytes,
            "results": made.results,
        }


def ours(bench: Bench, row: Row, out: Path) -> Made:
    """A result of our command line, of an export to GGUF its file. Groups of integers are those that others use."""
    if row.format == GGUF and row.data is not None:
        return one_of_types(bench, row)
    more = ["--group-size", f"{bench.group_size(row)}"] if row.name in ("W4A16", "INT4") else []
    cost = run_ours(bench, row.arguments, out, *more)
    result = next(iter(out.glob("*.gguf")), out)
    return Made(cost, size(result).bytes, decoded(bench.model, out) if row.format == MLX else result)


def one_of_types(bench: Bench, row: Row) -> Made:
    """A GGUF file of the one command that calibrates for all those that are measured, and that command's cost."""
    kinds = [other.name for other in bench.rows if (other.tool, other.format, other.data) == (OURS, GGUF, row.data)]
    out, all_kinds = bench.work / f"types-{row.data}", ",".join(kinds)
    if row.data not in bench.costs:
        arguments = tuple(all_kinds if argument == row.name else argument for argument in row.arguments)
        bench.costs[row.data] = run_ours(bench, arguments, out)
    file = next(out.glob(f"*-{row.name.upper()}.gguf"))
    return Made(bench.costs[row.data], size(file).bytes, file, len(kinds))


def run_ours(bench: Bench, arguments: Sequence[str], out: Path, *more: str) -> Cost:
    """Run our command line with the arguments of a row."""
    command, *others = (f"{bench.text}" if argument == TEXT else argument for argument in arguments)
    return Cost.of([*PQWEIGHTS, command, f"{bench.model}", f"{out}", *others, *more])


def by_llama_cpp(bench: Bench, row: Row, out: Path) -> Made:
    """A file of llama.cpp's quantizer, from our file in BF16, and with the importances of the same text.

    Its cost is that of the quantizer alone, in this process.
    """
    plain, held = bench.plain, [] if row.data is None else bench.importances
    before = os.times()
    seconds = gguf_types.quantize_by_llama_cpp(plain, out, row.name.upper(), held)
    if seconds is None:
        raise SystemExit(f"llama.cpp does not make {row.name} without importances")
    after = os.times()
    cost = Cost(seconds, after.user + after.system - before.user - before.system)
    return Made(cost, size(out).bytes, out)


def by_ik_llama_cpp(bench: Bench, row: Row, out: Path) -> Made:
    """A file of ik_llama.cpp's quantizer, likewise, and decoded by it, as nothing else knows its types."""
    packages = Path(f"{bench.environments}-ik/lib").glob("python*/site-packages/ik_llama_cpp/bin/llama-quantize")
    quantizer = next(packages, None)
    if quantizer is None:
        raise SystemExit(f"{bench.environments}-ik does not exist: make bench-real-env")
    data: list[str] = []
    if row.data is not None:
        data = ["--imatrix", f"{out.with_name('importances')}"]
        write_importances(bench.importances, Path(data[1]))
    cost = Cost.of([f"{quantizer}", *data, f"{bench.plain}", f"{out}", row.name.upper(), f"{usable_cores()}"])
    decoded = out.with_name("decoded.gguf")
    run_command([f"{quantizer}", "--allow-requantize", f"{out}", f"{decoded}", "F32"])
    return Made(cost, out.stat().st_size, decoded)


def write_importances(importances: Sequence[tuple[str, Any]], path: Path) -> None:
    """Write importances in the older form of llama.cpp, the only one that ik_llama.cpp reads, as of one run."""
    parts = [struct.pack("<i", len(importances))]
    for name, means in importances:
        parts.append(struct.pack(f"<i{len(name)}sii", len(name), name.encode(), 1, means.size) + means.tobytes())
    path.write_bytes(b"".join(parts))


def by_mlx_lm(bench: Bench, row: Row, out: Path) -> Made:
    """A folder of mlx-lm's own converter."""
    bits = row.name.split()[0]
    command = ["mlx_lm.convert", "--hf-path", f"{bench.model}", "--mlx-path", f"{out}", "-q", "--q-bits", bits]
    cost = Cost.of([sys.executable, "-m", *command])
    return Made(cost, size(out).bytes, decoded(bench.model, out))


def by_peer(bench: Bench, row: Row, out: Path) -> Made:
    """A folder of a tool of real_peers.py, decoded."""
    tool = str(row.method).partition("-")[0]
    python = sys.executable if tool in IN_THIS_ENVIRONMENT else f"{bench.environments}-{tool}/bin/python"
    if not Path(python).exists():
        raise SystemExit(f"{python} does not exist: make bench-real-env")
    bits = next(digit for digit in row.name if digit.isdigit())
    how = {"bits": bits, "group-size": bench.group_size(row), "windows": CALIBRATION_TOKENS // WINDOW, "window": WINDOW}
    options = [text for option, value in how.items() for text in (f"--{option}", f"{value}")]
    files = [f"{bench.model}", f"{bench.text}", f"{out}"]
    cost = Cost.of([python, f"{HERE / 'real_peers.py'}", f"{row.method}", *files, *options])
    stated = out / "bytes.json"
    if stated.exists():
        return Made(cost, int(json.loads(stated.read_text())), out)
    return Made(cost, size(out).bytes, decoded(bench.model, out))


def decoded(model: Path, folder: Path) -> Path:
    """A folder with the weights that a folder of another tool holds, in float32, and the configuration of the model."""
    out = folder.with_name("decoded")
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin*"))
    config = json.loads((model / CONFIG_FILE).read_text())
    (out / CONFIG_FILE).write_text(json.dumps(config | {"dtype": "float32"}))
    tensors = {}
    for tensor in open_local(folder).tensors:
        tensors[tensor.name] = np.empty(tensor.shape, np.float32)
        tensor.read(0, element_count(tensor), "F32", tensors[tensor.name].reshape(-1).view(np.uint8))
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


MAKERS: dict[str, Callable[[Bench, Row, Path], Made]] = {
    OURS: ours,
    LLAMA_CPP: by_llama_cpp,
    IK: by_ik_llama_cpp,
    MLX_LM: by_mlx_lm,
}


# --- the document ---


def open_bench(model: Path, text: str, options: Namespace, work: Path, rows: Sequence[Row]) -> Bench:
    """A model, with the text cut into what is scored and what follows."""
    ids, tokens = tokenize(model, text), options.max_tokens
    rest = str(load_tokenizer(model).decode(ids[tokens:][: CALIBRATION_TOKENS + WINDOW].tolist()))
    file = work / f"{model.name}.txt"
    file.write_text(rest, encoding="utf-8")
    base, environments = remembering(open_model(model)), f"{options.environments.absolute()}"
    weights = sum(parameter.numel() for parameter in base.net.parameters())
    return Bench(
        model=model,
        base=base,
        weights=weights,
        ids=ids[:tokens],
        text=file,
        work=work,
        rows=rows,
        environments=environments,
    )


def wanted(model: str, document: Document, options: Namespace) -> list[Row]:
    """The rows that are to be measured of a model."""
    known = {of["row"] for of in document["rows"] if of["model"] == model and not options.again}
    named = (row for row in rows() if options.rows is None or any(fnmatch(row.title, each) for each in options.rows))
    return [row for row in named if row.title not in known]


def measured(bench: Bench, document: Document) -> Iterator[Document]:
    """Measure the rows of a model, and yield the document after each."""
    name = bench.model.name
    for row in bench.rows:
        about = {"model": name, "row": row.title, "format": row.format, "tool": row.tool, "name": row.name}
        document["rows"] = [of for of in document["rows"] if (of["model"], of["row"]) != (name, row.title)]
        document["absent"].pop(f"{name}: {row.title}", None)
        try:
            found = bench.measure(row)
        except SystemExit as error:
            document["absent"][f"{name}: {row.title}"] = " ".join(str(error).split())[-200:]
        else:
            made = {"data": row.data, "processor": processor(machine(now()))}
            document["rows"].append(about | made | found)
            print(f"{name}: {row.title}: {found['bits_per_parameter']:.3f} bits, KL {found['kl']:.4f}", flush=True)
        yield document


def sections(document: Document) -> dict[str, str]:
    """A table for each model, and one of all of them with some rows."""
    result = {f"real-{model}": model_table(document, model) for model in document["settings"]}
    result["real-short"] = short_table(document)
    result["real-exports"] = "\n\n".join(filter(None, (exports_table(document, *of) for of in EXPORTS)))
    if document["absent"]:
        lines = [f"- {name}: {why}" for name, why in sorted(document["absent"].items())]
        result["real-absent"] = "Not measured:\n\n" + "\n".join(lines)
    return result


def short_table(document: Document) -> str:
    """The rows of SHORT: bits of the whole file, and the divergence from the original, of each model."""
    found = {(row["model"], row["row"]): row for row in document["rows"]}
    models = [*document["settings"]]
    header = ["", *(f"{model}: {what}" for model in models for what in ("bits", "KL"))]
    lines: list[list[str | None]] = []
    for title in SHORT:
        cells: list[str | None] = [title]
        for model in models:
            row = found.get((model, title))
            is_alike = row is not None and row["name"] in GRIDS.get(document["settings"][model]["grid"], ())
            mark = " (grid of the source)" if is_alike else ""
            cells += [None, None] if row is None else [f"{row['bits_per_parameter']:.2f}", f"{row['kl']:.4f}{mark}"]
        if len({*cells[1:]} - {None}) > 0:
            lines.append(cells)
    return table(header, lines)


def exports_table(document: Document, title: str, format: str, name: str) -> str | None:
    """The rows of one format by everyone who makes it, the best first; None if there are none."""
    rows = [row for row in document["rows"] if (row["format"], row["name"]) == (format, name)]
    models = [model for model in document["settings"] if any(row["model"] == model for row in rows)]
    if not rows:
        return None
    found = {(row["model"], row["tool"], row["data"]): row for row in rows}
    makers = sorted(dict.fromkeys((row["tool"], row["data"]) for row in rows), key=lambda of: _first(found, models, of))
    header = [title, "data", *(f"{model}: {what}" for model in models for what in ("bits", "KL"))]
    lines: list[list[str | None]] = []
    for tool, data in makers:
        cells: list[str | None] = [tool, data]
        for model in models:
            row = found.get((model, tool, data))
            cells += [None, None] if row is None else [f"{row['bits_per_parameter']:.2f}", f"{row['kl']:.4f}"]
        lines.append(cells)
    return table(header, lines)


def _first(
    found: dict[tuple[str, str, str | None], Document], models: list[str], maker: tuple[str, str | None]
) -> float:
    """The divergence of a maker's result of the first model that has one."""
    return next(float(found[model, *maker]["kl"]) for model in models if (model, *maker) in found)


def model_table(document: Document, model: str) -> str:
    """All rows of a model, by bits."""
    about = document["settings"][model]
    header = ("", "data", "bits", "KL", "top-1", "perplexity", "CPU s", "memory")
    found = sorted(
        (row for row in document["rows"] if row["model"] == model), key=lambda row: -float(row["bits_per_parameter"])
    )
    alike, processors = GRIDS.get(about["grid"], ()), list(dict.fromkeys(row["processor"] for row in found))
    lines = [
        (
            f"{row['tool']} {row['format']} {row['name']}{' (grid of the source)' if row['name'] in alike else ''}",
            row["data"],
            f"{row['bits_per_parameter']:.2f}",
            f"{row['kl']:.4f} ± {row['kl_error']:.4f}",
            f"{row['top1']:.1%}",
            f"{row['change']:+.3f} ± {row['change_error']:.3f}",
            seconds_of(row) + "*" * processors.index(row["processor"]),
            f"{row['peak_bytes'] / 1e9:.1f} GB" if row.get("peak_bytes") else None,
        )
        for row in found
    ]
    seconds = ", ".join(f"{'*' * number}{each}" for number, each in enumerate(processors))
    of = f", decoded from {about['grid']}" if about["grid"] else ""
    title = f"{model}{of}: {about['parameters'] / 1e6:.0f} M parameters, {about['scored']} tokens of English"
    return f"{title}; perplexity {about['perplexity']:.2f}; seconds of {seconds}\n\n{table(header, lines)}"


def seconds_of(row: Document) -> str:
    """The processor seconds of the command that made a row, and of how many, if it made more."""
    made = row.get("results", 1)
    return f"{row['cpu_seconds']:.0f}{f' for {made}' if made > 1 else ''}"


def main() -> None:
    """Measure what the options ask for, row by row."""
    parser = argument_parser(str(__doc__))
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--text", type=Path, required=True, help="a text in UTF-8")
    parser.add_argument("--grid", default=None, help="the GGUF type from which the models were decoded")
    parser.add_argument("--rows", nargs="+", help="shell patterns of rows; by default all")
    parser.add_argument("--again", action="store_true", help="also measure rows that the document has")
    parser.add_argument("--max-tokens", type=int, default=2100)
    parser.add_argument("--environments", type=Path, default=Path(sys.prefix), help="PREFIX of the tools' environments")
    parser.add_argument("--folder", type=Path, help="where results are made, one at a time")
    options, start = parser.parse_args(), now()
    file = None if options.out is None else options.out / "real.json"
    document: Document = {"settings": {}, "rows": [], "absent": {}}
    if file is not None and file.exists():
        document = json.loads(file.read_text(encoding="utf-8"))
    for model in options.models:
        missing = wanted(model.name, document, options)
        if not missing:
            continue
        with tempfile.TemporaryDirectory(dir=options.folder) as work:
            bench = open_bench(model, read_text(options.text), options, Path(work), missing)
            document["settings"][model.name] = settings(bench, options.grid)
            for found in measured(bench, document):
                publish("real", found | {"machine": machine(start)}, {}, options, None)
    publish("real", document | {"machine": machine(start)}, sections(document), options, None)


def settings(bench: Bench, grid: str | None) -> Document:
    """What is said of a model, and of what it is measured on."""
    windows = TextWindows(size=WINDOW, stride=WINDOW)
    alone = compare(bench.base, None, ids=bench.ids, windows=windows)
    bench.base.net.to("meta")  # its logits are remembered, so its weights need no more memory
    return {
        "grid": grid,
        "parameters": bench.weights,
        "scored": sum(loss.predictions for loss in alone.losses),
        "window": WINDOW,
        "calibration_tokens": CALIBRATION_TOKENS,
        "perplexity": alone.perplexity.value,
    }


if __name__ == "__main__":
    main()
