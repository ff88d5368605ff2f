"""Every format of the exports beside the tools that make the same one without data: bits, errors, KL divergence.

    python benchmarks/formats.py MODEL_DIR [MODEL_DIR...] --environments PREFIX [--ik LIBRARY] [--only FORMAT...]

Each format is made of the linear layers of a model, from the original: by round-to-nearest as its runtime has it
(`--qparams minmax`), by this project, and by the tools that benchmarks/format_peers.py calls. What is stored is
decoded, and transformers computes with it in float32; embeddings and the head stay as they are, also where a format
would take them, so that all formats are about the same weights. KL is KL(original || model) in nats per token on the
first tokens of MODEL_DIR/eval.txt. Bits per weight count all that is stored for these weights. Relative MSE is
||W - W'||^2 / ||W||^2 over them. Rounded inputs: compressed-tensors computes in transformers, and also rounds what
layers read.

A tool runs with PREFIX-TOOL/bin/python (`make bench-formats-env`), mlx-lm and torchao with this one. --ik is the
libggml.so of ik-llama-cpp-python. With --only, a document in --out keeps its other rows.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import peers
from harness import Cell, Document, argument_parser, machine, measured_with, now, publish, run_command, table
from quality import measures, number, remembering

import pqweights
from pqweights.checkpoint.names import CONFIG_FILE
from pqweights.checkpoint.source import open_local
from pqweights.errors import PqweightsError
from pqweights.formats import get_codec
from pqweights.kernels.gguf_encoding import BLOCK_TYPES
from pqweights.kernels.groups import unpack_bits
from pqweights.runtime.models import Model, open_model
from pqweights.runtime.protocol import TextWindows, compare
from pqweights.runtime.texts import Ids, load_tokenizer, read_text, tokenize

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from export_decoders import Floats, Stored, from_torchao, from_vllm_format, values_of
from helpers import as_float32

RTN, OURS, ROUNDED = "round-to-nearest", "ours", "ours, rounded inputs"
VLLM, MLX, TORCHAO, GGUF, TRELLIS = "vllm", "mlx", "torchao", "gguf", "master"
LLAMA_CPP, IK = "llama.cpp", "ik_llama.cpp"
# The tools of format_peers.py by what tables call them; the last two are in the project's own environment.
FREE, AUTO_ROUND, MODELOPT, MLX_LM, AO = (
    "model_free_ptq",
    "AutoRound opt_rtn (with text)",
    "ModelOpt",
    "mlx-lm",
    "torchao",
)
TOOLS = {FREE: "llmcompressor", AUTO_ROUND: "autoround", MODELOPT: "modelopt", MLX_LM: "mlx", AO: "torchao"}
BOTH = ("minmax", "best")
Weights = dict[str, Floats]


@dataclass(frozen=True)
class Format:
    """A format of a target.

    element, group, scale: how weights are stored
    seen: what was seen to compute with it, in the tests
    peers: what others call it
    rounded: the format that rounds what layers read as well
    bits: the rate of a codec of masters
    """

    target: str
    name: str
    element: str
    group: str
    scale: str
    seen: str
    peers: Mapping[str, str]
    rounded: str | None = None
    bits: float = 0

    @property
    def rules(self) -> tuple[str, ...]:
        """The values of `qparams`: FP8 has no better scale than that of the largest weight."""
        return BOTH if self.group.isdigit() or self.element == "INT8" else BOTH[:1]


HF, BOTH_RUN, OFFSET = "transformers", "vLLM, transformers", "BF16, with offset"
FP8_OPT, MX4, MX8, NV4 = "FP8_PER_CHANNEL_PER_TOKEN_CFG", "MXFP4_DEFAULT_CFG", "MXFP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG"
FORMATS = (
    Format(VLLM, "w4a16", "INT4", "128", "BF16", BOTH_RUN, {FREE: "W4A16", AUTO_ROUND: "W4A16"}),
    Format(VLLM, "w8a16", "INT8", "128", "BF16", HF, {FREE: "W8A16"}),
    Format(VLLM, "w4a16-asym", "INT4", "128", "BF16, with zero", BOTH_RUN, {FREE: "W4A16_ASYM"}),
    Format(VLLM, "awq", "INT4", "128", "F16, with zero", BOTH_RUN, {}),
    Format(VLLM, "gptq", "INT4", "128", "F16", BOTH_RUN, {}),
    Format(VLLM, "gptq-8", "INT8", "128", "F16", HF, {}),
    Format(VLLM, "w3a16", "3-bit integers", "128", "BF16", HF, {}),
    Format(VLLM, "w2a16", "2-bit integers", "128", "BF16", HF, {}),
    Format(VLLM, "int8", "INT8", "row", "BF16", BOTH_RUN, {FREE: "INT8"}, "int8"),
    Format(VLLM, "fp8", "E4M3", "row", "BF16", BOTH_RUN, {FREE: "FP8_DYNAMIC", MODELOPT: FP8_OPT}, "fp8"),
    Format(VLLM, "fp8-block", "E4M3", "128 x 128", "BF16", BOTH_RUN, {FREE: "FP8_BLOCK"}, "fp8-block"),
    Format(VLLM, "mxfp4a16", "E2M1", "32", "E8M0", HF, {FREE: "MXFP4A16", AUTO_ROUND: "MXFP4", MODELOPT: MX4}, "mxfp4"),
    Format(VLLM, "mxfp8a16", "E4M3", "32", "E8M0", HF, {FREE: "MXFP8A16", AUTO_ROUND: "MXFP8", MODELOPT: MX8}, "mxfp8"),
    Format(
        VLLM, "nvfp4a16", "E2M1", "16", "E4M3, F32", HF, {FREE: "NVFP4A16", AUTO_ROUND: "NVFP4", MODELOPT: NV4}, "nvfp4"
    ),
    *(Format(MLX, f"q{n}", f"{n}-bit integers", "64", OFFSET, "mlx-lm", {MLX_LM: f"q{n}"}) for n in (2, 3, 4, 5, 6, 8)),
    Format(MLX, "mxfp4", "E2M1", "32", "E8M0", "mlx-lm", {MLX_LM: "mxfp4"}),
    Format(MLX, "mxfp8", "E4M3", "32", "E8M0", "mlx-lm", {MLX_LM: "mxfp8"}),
    Format(MLX, "nvfp4", "E2M1", "16", "E4M3", "mlx-lm", {MLX_LM: "nvfp4"}),
    *(
        Format(MLX, name, f"{name[6]}- and {name[8]}-bit integers", "64", OFFSET, "mlx-lm", {MLX_LM: name})
        for name in ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
    ),
    Format(TORCHAO, "int4", "INT4", "128", OFFSET, "PyTorch's CPU kernel", {}),
    Format(TORCHAO, "int8", "INT8", "row", "F32", HF, {AO: "Int8WeightOnlyConfig"}),
    Format(TORCHAO, "fp8", "E4M3", "row", "F32", HF, {AO: "Float8WeightOnlyConfig"}),
    *(
        Format(GGUF, name, f"{bits} bits", group, scale, LLAMA_CPP, {LLAMA_CPP: name})
        for name, bits, group, scale in (
            ("Q8_0", 8, "32", "F16"),
            ("Q6_K", 6, "16", "INT8, F16"),
            ("Q5_K", 5, "32", "6 bits, F16, with offset"),
            ("Q4_K", 4, "32", "6 bits, F16, with offset"),
            ("IQ4_XS", 4, "32", "6 bits, F16"),
            ("Q4_0", 4, "32", "F16"),
            ("Q3_K", 3, "16", "6 bits, F16"),
            ("Q2_K", 2, "16", "4 bits, F16, with offset"),
        )
    ),
    *(
        Format(TRELLIS, f"{bits:g} bits", "trellis", "128", "F16", HF, {IK: name}, bits=bits)
        for bits, name in ((4.25, "iq4_ks"), (4.0, "iq4_kt"), (3.125, "iq3_kt"), (2.125, "iq2_kt"))
    ),
)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One model, and what its rows are made from and measured on.

    model: the folder of the original
    base: the original, opened; its logits are remembered
    copy: the same, whose weights are replaced
    originals: the weights that formats are about
    ids, windows: what is evaluated
    work: where folders are made
    absent: receives why a row could not be measured
    """

    model: Path
    base: Model
    copy: Model
    originals: Weights
    ids: Ids
    windows: TextWindows
    work: Path
    absent: list[str] = field(default_factory=list)

    def of_weights(self, weights: Weights, bits: float | None) -> Document:
        """What is measured of decoded weights."""
        import torch

        for name, weight in weights.items():
            self.copy.net.get_parameter(name).data.copy_(torch.from_numpy(np.ascontiguousarray(weight, np.float32)))
        errors = sum(np.square(weights[name] - w, dtype=np.float64).sum() for name, w in self.originals.items())
        energy = sum(np.square(w, dtype=np.float64).sum() for w in self.originals.values())
        return {"bits": bits, "mse": float(errors / energy)} | self.divergence(self.copy)

    def divergence(self, model: Model) -> Document:
        """The KL divergence of a model, and its perplexity."""
        scores = measures(compare(model, self.base, ids=self.ids, windows=self.windows))
        return {name: scores[name] for name in ("kl", "kl_error", "perplexity")}

    def of_folder(self, folder: Path) -> Document:
        """What is measured of a folder."""
        return self.of_weights(*decoded(folder, self.originals))

    def of_quantizer(self, quantizer: peers.Quantizer) -> Document:
        """What is measured of an encoder of single weights."""
        weights, bits = {}, 0
        for name, weight in self.originals.items():
            encoded = quantizer.encode(quantizer.prepare(weight))
            weights[name], bits = quantizer.decode(encoded).reshape(weight.shape), bits + quantizer.stored_bits(encoded)
        return self.of_weights(weights, bits / sum(weight.size for weight in weights.values()))

    def export(self, target: str, **options: Any) -> Path:
        """Export the original in a format."""
        out = self.work / "export"
        given = options | ({"packing": "plain"} if options["format"] == "int4" else {})
        pqweights.export(self.model, out, target, overwrite=True, **given)
        return out

    def with_rounded_inputs(self, form: Format) -> Document:
        """What is measured where compressed-tensors computes; it decodes small floats in BF16."""
        dtype = "bfloat16" if form.name.startswith(("mx", "nv")) else "float32"
        folder = self.export(form.target, format=form.rounded)
        return {"bits": None, "mse": None} | self.divergence(open_model(folder, dtype=dtype))


# --- what folders hold ---


def decoded(folder: Path, originals: Weights) -> tuple[Weights, float | None]:
    """Decode the weights of a folder, by the names of the originals.

    Returns them with their bits per weight, None where a tool saves only what it would compute with.
    """
    stored = Stored(folder)
    config = json.loads((folder / CONFIG_FILE).read_text()) if (folder / CONFIG_FILE).exists() else {}
    weights = {name: _decoded(stored, config, name, weight.shape) for name, weight in originals.items()}
    modules = tuple(name.removesuffix("weight") for name in originals)
    held = sum(tensor.byte_count for name, tensor in stored.tensors.items() if name.startswith(modules))
    bits = 8 * held / sum(weight.size for weight in weights.values())
    return weights, bits if bits < 16 else None


def _decoded(stored: Stored, config: dict[str, Any], name: str, shape: tuple[int, ...]) -> Floats:
    module, dtype = name.removesuffix(".weight"), stored.tensors[name].dtype if name in stored.tensors else None
    if "quantization" in config:
        return _of_mlx(stored, config["quantization"], module)
    if f"{module}.qweight" in stored.tensors:
        settings = config["quantization_config"]
        ours = "zero_point" in settings or "dynamic" in settings
        return from_vllm_format(stored, name, settings["bits"]) if ours else gptq_weight(stored, name)
    if f"{module}._weight_qdata" in stored.tensors:
        if stored.tensors[f"{module}._weight_qdata"].shape != shape:
            return from_torchao(stored, name, shape, False)
        parts = {name: stored[f"{module}._weight_qdata"], f"{name}_scale": stored[f"{module}._weight_scale"]}
        return from_vllm_format(parts, name)
    if dtype in ("F32", "BF16"):
        return stored.floats(name)
    groups = config["quantization_config"]["config_groups"].values()
    return from_vllm_format(stored, name, max(group["weights"]["num_bits"] for group in groups))


def _of_mlx(stored: Stored, quantization: dict[str, Any], module: str) -> Floats:
    """Decode a weight with mlx itself."""
    import mlx.core as mx

    own = quantization.get(module, quantization)
    parts: list[Any] = [mx.array(stored[f"{module}.weight"][1])]
    if f"{module}.biases" in stored.tensors:
        parts += [mx.array(as_float32(stored[f"{module}.{part}"])) for part in ("scales", "biases")]
    else:
        parts.append(mx.array(stored[f"{module}.scales"][1]))
    how: dict[str, Any] = {"group_size": own["group_size"], "bits": own["bits"], "mode": own.get("mode", "affine")}
    return np.array(mx.dequantize(*parts, **how).astype(mx.float32))


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


# --- encoders of single weights ---


def quantizers(form: Format, ik: Path | None) -> Iterator[tuple[str, peers.Quantizer]]:
    """The encoders of a format that is made weight by weight."""
    if form.target == GGUF:
        rule, plain = BLOCK_TYPES[form.name], peers.gguf_type(form.name)
        theirs = peers.GgmlType(peers.load_ggml(), form.name.lower().replace("_k", "_K"), importance=False)
        yield LLAMA_CPP, replace(plain, prepare=theirs.prepare, encode=theirs.encode, decode=theirs.decode)
        yield OURS, replace(plain, encode=lambda weight: rule.quantize(weight.reshape(-1)).codes)
        return
    if ik is not None:
        yield IK, peers.ik_llama_cpp(ik, form.peers[IK])
    codec = get_codec("hadamard-trellis")
    for states in codec.efforts:
        who = OURS if states == codec.efforts[0] else f"{OURS}, {states} states"
        yield who, peers.quantizer_of(codec.at(form.bits, states), who, "all", "trellis")


# --- the rows ---


def rows_of(bench: Bench, formats: Sequence[Format], options: Any) -> Iterator[Document]:
    """The rows of one model."""
    for form in formats:
        about = {"model": bench.model.name, "target": form.target, "format": form.name}
        if form.target in (GGUF, TRELLIS):
            for who, quantizer in quantizers(form, options.ik):
                yield about | {"who": who} | bench.of_quantizer(quantizer)
            continue
        for rule in form.rules:
            folder = bench.export(form.target, format=form.name, **({"qparams": rule} if len(form.rules) > 1 else {}))
            yield about | {"who": OURS if rule == "best" else RTN} | bench.of_folder(folder)
        if form.rounded is not None:
            try:
                yield about | {"who": ROUNDED} | bench.with_rounded_inputs(form)
            except PqweightsError as error:
                bench.absent.append(f"{form.rounded}, rounded inputs: {str(error).partition(': ')[2]}")
    for who in options.tools:
        yield from rows_of_tool(bench, who, [form for form in formats if who in form.peers], options.environments)


def rows_of_tool(bench: Bench, who: str, formats: Sequence[Format], environments: str) -> Iterator[Document]:
    """The rows of another tool, which makes all its formats in one process."""
    work, names = bench.work / TOOLS[who], [form.peers[who] for form in formats]
    work.mkdir()
    own = Path(f"{environments}-{TOOLS[who]}").absolute() / "bin" / "python"
    python = sys.executable if who in (MLX_LM, AO) else str(own)
    command = [python, str(Path(__file__).with_name("format_peers.py")), TOOLS[who], str(bench.model)]
    try:
        if names:
            run_command([*command, str(bench.work / "rest.txt"), str(work), *names])
    except SystemExit as error:
        bench.absent.append(f"{who}: {str(error).splitlines()[-1]}")
    failed = work / "failed.txt"
    lines = failed.read_text().splitlines() if failed.exists() else []
    bench.absent.extend(f"{who}: {line}" for line in lines)
    for form, name in zip(formats, names, strict=True):
        if (work / name).exists() and not any(line.startswith(f"{name}: ") for line in lines):
            about = {"model": bench.model.name, "target": form.target, "format": form.name, "who": who}
            yield about | bench.of_folder(work / name)


# --- tables ---


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown: all formats of exports, and for each model who makes them how well."""
    of_model: dict[str, dict[tuple[str, str], dict[str, Document]]] = {}
    for row in document["rows"]:
        here = of_model.setdefault(row["model"], {}).setdefault((row["target"], row["format"]), {})
        here[row["who"]] = row | {"ratio": None}
    for formats in of_model.values():
        for here in formats.values():
            base = next((here[who]["mse"] for who in (RTN, LLAMA_CPP, IK) if who in here), None)
            for row in here.values():
                row["ratio"] = row["mse"] / base if base and row["mse"] else None
    return {"formats": overview(of_model), "formats-others": comparison(of_model)}


def overview(of_model: Mapping[str, Mapping[tuple[str, str], Mapping[str, Document]]]) -> str:
    """A line for each format of an export."""
    header = ["target", "format", "element", "group", "scale", "bits", "with rounded inputs", "seen to compute with it"]
    lines = []
    for form in (form for form in FORMATS if form.target != TRELLIS):
        rows = [formats.get((form.target, form.name), {}) for formats in of_model.values()]
        best = [here.get(OURS, here.get(RTN)) for here in rows]
        bits = next((number(row["bits"], ".4g") for row in best if row), None)
        line: list[Cell] = [form.target, f"`{form.name.lower()}`", form.element, form.group, form.scale, bits]
        line += [form.rounded and f"`{form.rounded}`", form.seen]
        for row in best:
            line += [number(row[key], form) if row else None for key, form in (("ratio", ".3f"), ("kl", ".5f"))]
        lines.append(line)
    return table([*header, *(f"{what}, {model}" for model in of_model for what in ("error", "KL"))], lines)


def comparison(of_model: Mapping[str, Mapping[tuple[str, str], Mapping[str, Document]]]) -> str:
    """A line for each format that others make as well; errors as shares of round-to-nearest's."""
    columns = ("nearest", "ours", "ours, rounded inputs", "others (error)")
    lines = []
    for form in FORMATS:
        rows = [formats.get((form.target, form.name), {}) for formats in of_model.values()]
        line: list[Cell] = [form.target, f"`{form.name.lower()}`"]
        for here in rows:
            others = [_other(who, row) for who, row in here.items() if who not in (RTN, OURS, ROUNDED)]
            kls = [number(here[who]["kl"], ".5f") if who in here else None for who in (RTN, OURS, ROUNDED)]
            line += [*kls, "; ".join(others) or None]
        if any(line[5::4]):
            lines.append(line)
    return table(["target", "format", *(f"{model}: {column}" for model in of_model for column in columns)], lines)


def _other(who: str, row: Document) -> str:
    known = [form.format(row[key]) for key, form in (("ratio", "{:.3f}"), ("bits", "{:.4g} bits")) if row[key]]
    return f"{who} {row['kl']:.5f} ({', '.join(known)})"


def open_bench(model: Path, options: Any, work: Path) -> Bench:
    """Open a model, and cut its text into what is evaluated on and the rest."""
    base, ids = remembering(open_model(model)), tokenize(model, read_text(model / "eval.txt"))
    rest = load_tokenizer(model).decode(ids[options.max_tokens : 4 * options.max_tokens].tolist())
    (work / "rest.txt").write_text(str(rest), encoding="utf-8")
    linear = [t for t in open_local(model).tensors if ".layers." in t.name and len(t.shape) == 2]
    bench = Bench(
        model=model,
        base=base,
        copy=open_model(model),
        originals={tensor.name: values_of(tensor) for tensor in linear},
        ids=ids[: options.max_tokens],
        windows=TextWindows(size=options.window, stride=options.window, score_first=True),
        work=work,
    )
    compare(base, None, ids=bench.ids, windows=bench.windows)
    return bench


def main() -> None:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("models", type=Path, nargs="+", help="folders of language models with an eval.txt")
    parser.add_argument("--environments", default=".venv", metavar="PREFIX", help="of the tools' environments")
    parser.add_argument("--ik", type=Path, help="libggml.so of ik_llama.cpp")
    parser.add_argument("--only", nargs="+", help="formats to measure, by name")
    parser.add_argument(
        "--tools", nargs="*", choices=[*TOOLS], default=[*TOOLS], help="other tools; keeps rows of the rest"
    )
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=256)
    options = parser.parse_args()
    start, known = now(), (options.out or Path()) / "formats.json"
    kept = json.loads(known.read_text()) if options.out and known.exists() else {"rows": [], "absent": []}
    rows, absent = (
        {_key(row): row for row in kept["rows"]},
        kept["absent"] if options.only or options.tools != [*TOOLS] else [],
    )
    for model in options.models:
        with tempfile.TemporaryDirectory() as work:
            bench = open_bench(model, options, Path(work))
            for row in rows_of(bench, [f for f in FORMATS if not options.only or f.name in options.only], options):
                rows[_key(row)] = row | measured_with(codecs_of(row))
                print(json.dumps(row), flush=True)
            absent = [*absent, *(f"{model.name}: {line}" for line in bench.absent)]
    settings = {"tokens": options.max_tokens, "window": options.window}
    document = {"machine": machine(start), "settings": settings, "rows": [*rows.values()], "absent": sorted({*absent})}
    publish("formats", document, sections(document), options, None)


def codecs_of(row: Document) -> list[str]:
    """What a row is about, by the names of digests.CODECS; nothing of other tools."""
    if row["who"] != RTN and not row["who"].startswith(OURS):
        return []
    if row["target"] == TRELLIS:
        return ["trellis"]
    if row["format"].startswith("mixed"):
        return [f"mlx q{bits}" for bits in row["format"].split("_")[1:]]
    return [f"{row['target']} {row['format']}"]


def _key(row: Document) -> tuple[str, ...]:
    return row["model"], row["target"], row["format"], row["who"]


if __name__ == "__main__":
    main()
