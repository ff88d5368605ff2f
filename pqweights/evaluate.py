"""What an export is worth: its logits in the runtime that it is meant for, perplexity from them, and its weights' error.

Everything runs on a CPU, in float32 arithmetic, so that what differs between two models is their weights. Where a runtime
has no CPU kernel for its own layout (torchao's tiles), the integers that it loaded are read through PyTorch's CPU kernel for
the same arithmetic. The decoders below are written from the formats' documents and share no code with exports/.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import itertools
import json
import logging
import math
import re
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import StoredTensor, parse_header
from pqweights.checkpoint.names import CONFIG_FILE
from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.source import open_local
from pqweights.checkpoint.storage import LocalStorage, read_bytes, read_file
from pqweights.dtypes import float8_table, to_float32
from pqweights.errors import MissingDependencyError, SourceError
from pqweights.manifest import read_manifest
from pqweights.plan import DECODE, INTEGER, QUANTIZE

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]

TRANSFORMERS, TORCHAO, COMPRESSED_TENSORS, MLX = "transformers", "torchao", "compressed-tensors", "mlx-lm"
NOISY = ("torchao", "torch.utils._pytree", "transformers")  # loggers that speak at import or while loading


@dataclass(frozen=True)
class Model:
    """A loaded model. runtime: what computes, in words. logits: ids [tokens] -> [tokens, vocabulary] f32."""

    runtime: str
    logits: Callable[[Ids], Floats]


@dataclass(frozen=True)
class Windows:
    """The first `count` windows of `size` tokens, `stride` apart. The first scores all its predictions, others the last `stride`."""

    size: int = 256
    stride: int = 128
    count: int = 40


class Loss(NamedTuple):
    """Of a window: the summed negative log-likelihood, in nats, of so many predicted tokens."""

    total: float
    predictions: int


class Change(NamedTuple):
    """Mean over windows of the change in loss per predicted token, in nats, and its standard error (0 for one window)."""

    mean: float
    standard_error: float


class RelativeError(NamedTuple):
    """||W - W'||^2 / ||W||^2 over all weights of a set together, and how many there are. None for an empty set."""

    relative_mse: float | None
    weights: int


class Errors(NamedTuple):
    """integers: over what the export stores as integers. master: over all that the master quantized, or would have."""

    integers: RelativeError
    master: RelativeError


def open_model(folder: Path, device: str = "cpu") -> Model:
    """Load a checkpoint, or an export for any runtime, with the library that is meant to load it.

    device: cpu, or cuda (torch's runtimes; there torchao's tensors run their own kernel, in BF16). Raises SourceError for
    a folder that is no model, is a master, or lacks tensors of the model or has others, MissingDependencyError.
    """
    config = _config(folder)
    settings = config.get("quantization_config") or {}
    method = settings.get("quant_method")
    if method == "pqweights":
        raise SourceError(f"{folder}: a master, which no runtime computes with; export it first (--target bf16)")
    if method is None and "quantization" in config:
        return _open_mlx(folder)
    if method == "torchao":
        return _open_torchao(folder, device)
    if method == "compressed-tensors":
        return _open_compressed_tensors(folder, settings, device)
    return Model(TRANSFORMERS, _logits_of(_from_pretrained(folder).to(device)))


def tokenize(folder: Path, text: str) -> Ids:
    """The ids [tokens] of a text, without special tokens.

    Raises MissingDependencyError.
    """
    ids = _tokenizer(folder)(text, add_special_tokens=False)["input_ids"]
    return np.array(ids, dtype=np.int64)


def window_losses(model: Model, ids: Ids, windows: Windows = Windows()) -> list[Loss]:
    """The loss of each window, on the same tokens for every model, so that models can be compared window by window.

    Raises SourceError where the text has too few tokens.
    """
    needed = (windows.count - 1) * windows.stride + windows.size
    if len(ids) < needed:
        raise SourceError(
            f"the text: expected at least {needed} tokens for {windows.count} windows, found {len(ids)}; give a longer one"
        )
    losses = []
    for number in range(windows.count):
        piece = ids[number * windows.stride :][: windows.size]
        scored = windows.size - 1 if number == 0 else windows.stride
        logits = model.logits(piece)[-scored - 1 : -1]
        logits -= logits.max(axis=1, keepdims=True)
        chosen = logits[np.arange(scored), piece[-scored:]]
        logarithms = np.log(np.exp(logits).sum(axis=1, dtype=np.float64))
        losses.append(Loss(float((logarithms - chosen).sum()), scored))
    return losses


def perplexity(losses: Sequence[Loss]) -> float:
    """Of all windows together: e to the loss per predicted token."""
    return math.exp(math.fsum(loss.total for loss in losses) / sum(loss.predictions for loss in losses))


def change(losses: Sequence[Loss], reference: Sequence[Loss]) -> Change:
    """How the loss per token differs from that of another model on the same windows."""
    differences = [(loss.total - other.total) / loss.predictions for loss, other in zip(losses, reference, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return Change(statistics.fmean(differences), error)


def generate(folder: Path, model: Model, prompt: str, tokens: int) -> str:
    """What the model continues a prompt with, taking the likeliest token each time; an end of text does not stop it.

    folder: where the tokenizer lies. Raises MissingDependencyError.
    """
    tokenizer = _tokenizer(folder)
    ids = list(tokenizer(prompt)["input_ids"])
    given = len(ids)
    for _ in range(tokens):
        ids.append(int(model.logits(np.array(ids, dtype=np.int64))[-1].argmax()))
    return str(tokenizer.decode(ids[given:]))


def relative_mse(original: Path, folder: Path) -> Errors:
    """The error of every weight of a master or an export that is not as in the original, measured by decoding all of them.

    A weight that config.json declares as rotated is turned back first; mlx-lm says what becomes of the original's for an
    export to it. Raises SourceError, also for a weight that the original does not have under the same name and shape,
    MasterError for a folder without manifest, MissingDependencyError.
    """
    manifest = read_manifest(folder)
    if manifest.made_by.get("target") == "mlx-q4":
        originals = _as_mlx_holds(original, _config(folder))
    else:
        originals = {tensor.name: functools.partial(_values, tensor) for tensor in open_local(original).tensors}
    decode = master_weight(folder) if manifest.kind == "master" else export_weight(folder)
    sums = {INTEGER: [0.0, 0.0, 0], QUANTIZE: [0.0, 0.0, 0], DECODE: [0.0, 0.0, 0]}  # error, energy, weights
    for tensor in manifest.tensors:
        if tensor.action not in sums:
            continue
        weight = originals[tensor.name]() if tensor.name in originals else None
        if weight is None or weight.shape != tensor.shape:
            raise SourceError(
                f"{original}: tensor {tensor.name!r}: expected shape {list(tensor.shape)} as in {folder}, found "
                f"{'none' if weight is None else list(weight.shape)}"
            )
        difference = weight - decode(tensor.name)
        for place, summand in enumerate((_squares(difference), _squares(weight), weight.size)):
            sums[tensor.action][place] += summand
    everything = [sum(column) for column in zip(*sums.values(), strict=True)]
    return Errors(_relative(*sums[INTEGER]), _relative(*everything))


def _relative(error: float, energy: float, weights: float) -> RelativeError:
    return RelativeError(error / energy if energy else None, int(weights))


def _squares(values: Floats) -> float:
    return float(np.einsum("ij,ij->", *[values.reshape(-1, values.shape[-1])] * 2, dtype=np.float64))


def _values(tensor: LogicalTensor) -> Floats:
    raw = np.empty(element_count(tensor) * 4, dtype=np.uint8)
    tensor.read(0, element_count(tensor), "F32", raw)
    return raw.view(np.float32).reshape(tensor.shape)


def _as_mlx_holds(folder: Path, config: Mapping[str, Any]) -> dict[str, Callable[[], Floats]]:
    """mlx-lm renames, stacks and splits weights as it loads them: the original's, after that, by name.

    config: the export's, in the terms that mlx-lm knows.
    """
    mx, utils = _package("mlx.core", "mlx"), _package("mlx_lm.utils", "mlx")
    with _quiet():
        plain = {key: value for key, value in config.items() if not key.startswith("quantization")}
        model, _ = utils.load_model(folder, lazy=True, strict=False, model_config=plain)
    parameters = dict(_package("mlx.utils", "mlx").tree_flatten(model.parameters()))

    def values(array: Any) -> Floats:
        return np.array(array.astype(mx.float32))

    return {name: functools.partial(values, array) for name, array in parameters.items()}


# Loading: each runtime once.


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG_FILE).is_file():
        raise SourceError(f"{folder}: expected a model folder, found no {CONFIG_FILE} in it")
    config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_bytes())
    return config


def _package(name: str, extra: str) -> Any:
    """An optional package; untyped, because the types of these would be checked with ours."""
    try:
        with _silent():
            return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise MissingDependencyError(
            f"evaluating this folder needs {package}: pip install 'pqweights[{extra}]'"
        ) from None


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Hold back warnings and remarks of the runtimes."""
    loggers = [logging.getLogger(name) for name in NOISY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """And their progress bars. Not for imports: what they import may keep the stream that it finds as standard error."""
    with _silent(), contextlib.redirect_stderr(io.StringIO()):
        yield


def _tokenizer(folder: Path) -> Any:
    transformers = _package("transformers", "transformers")
    with _quiet():
        return transformers.AutoTokenizer.from_pretrained(folder)


def _from_pretrained(folder: Path) -> Any:
    """The model in float32.

    Raises SourceError for tensors that are missing, or that the model does not have.
    """
    torch, transformers = _package("torch", "transformers"), _package("transformers", "transformers")
    with _quiet():
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
    _refuse(folder, TRANSFORMERS, missing=info["missing_keys"], unexpected=info["unexpected_keys"])
    return model.eval()


def _refuse(folder: Path, runtime: str, **names: Any) -> None:
    for kind, found in names.items():
        if found:
            raise SourceError(
                f"{folder}: {runtime} finds {len(found)} {kind} tensors, {sorted(found)[0]!r} first; the folder is incomplete "
                "or not meant for this runtime: `pqweights verify` tells which, export it again"
            )


def _logits_of(model: Any) -> Callable[[Ids], Floats]:
    torch = _package("torch", "transformers")

    def logits(ids: Ids) -> Floats:
        with torch.inference_mode():
            result = model(torch.from_numpy(ids)[None].to(model.device), use_cache=False).logits[0]
        values: Floats = result.float().cpu().numpy()
        return values

    return logits


def _open_compressed_tensors(folder: Path, settings: Mapping[str, Any], device: str) -> Model:
    """transformers drops transform_config; the library that vLLM uses applies it."""
    _package("compressed_tensors", "vllm")
    model = _from_pretrained(folder).to(device)
    runtime = f"{TRANSFORMERS}, {COMPRESSED_TENSORS}"
    transform = _package("compressed_tensors.transform", "vllm")
    logits = _logits_of(model)
    with _quiet():
        if "transform_config" in settings:
            transform.apply_transform_config(model, transform.TransformConfig(**settings["transform_config"]))
            runtime += " with its transforms"
        logits(np.zeros(1, dtype=np.int64))  # the first call decompresses, with a progress bar
    torch = _package("torch", "transformers")
    torch.nn.Module.float(
        model
    )  # stacked experts come in BF16, whatever was asked for; transformers refuses model.float()
    return Model(runtime, logits)


def _open_torchao(folder: Path, device: str) -> Model:
    """On the CPU, where torchao's tensors cannot be computed with, each is read through PyTorch's CPU kernel for INT4."""
    _package("torchao", "torchao")
    torch = _package("torch", "torchao")
    stored = _Stored(folder)
    parts = {part for name in json.loads(stored.metadata.get("tensor_names", "[]")) for part in _parts(stored, name)}
    _refuse(folder, TORCHAO, missing=parts - stored.tensors.keys())  # which transformers answers with a RuntimeError
    model = _from_pretrained(folder)
    rounded = 0
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        kind = type(weight).__name__
        if kind not in ("Int4TilePackedTo4dTensor", "Int4Tensor"):
            continue
        rounded += 1
        expected = (module.out_features, module.in_features)
        if tuple(weight.shape) != expected:
            raise SourceError(
                f"{folder}: {name}.weight: expected a tensor {list(expected)}, found {list(weight.shape)}"
            )
        if device == "cpu":
            module.weight = torch.nn.Parameter(_through_cpu_kernel(torch, weight), requires_grad=False)
    if not rounded:
        raise SourceError(f"{folder}: expected INT4 tensors, torchao loaded none; export it again")
    return Model(
        "torchao's tensors, the CPU's INT4 kernel" if device == "cpu" else TORCHAO, _logits_of(model.to(device))
    )


def _through_cpu_kernel(torch: Any, weight: Any) -> Any:
    """What aten's CPU kernel for (code - 8) * scale + zero makes of the integers: the identity times the weight, [N, K] f32.

    The kernel is slow in float32 (0.6 G multiply-adds a second), so it is asked once; in BF16 it would round.
    """
    rows, columns = weight.shape
    group_size = weight.block_size[-1]
    if type(weight).__name__ == "Int4Tensor":
        codes = unpack_nibbles(weight.qdata.numpy().view(np.uint8) ^ np.uint8(0x88))
        scales = torch.stack([weight.scale, weight.zero_point], dim=-1)
    else:
        codes = unpack_tiles(weight.qdata.numpy())
        scales = weight.scale_and_zero
    padded = -(-rows // 16) * 16  # the kernel takes whole sixteens of rows
    whole = np.zeros((padded, columns), dtype=np.int32)
    whole[:rows] = codes[:rows, :columns]
    pairs = torch.zeros(columns // group_size, padded, 2)
    pairs[:, :rows] = scales[: columns // group_size, :rows].float()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(whole), 1)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.eye(columns), packed, group_size, pairs)
    return product.T[:rows].contiguous()


def _open_mlx(folder: Path) -> Model:
    mx, utils = _package("mlx.core", "mlx"), _package("mlx_lm.utils", "mlx")
    tree_flatten = _package("mlx.utils", "mlx").tree_flatten
    with _quiet():
        model, _ = utils.load_model(folder, lazy=True, strict=False)
        there = {name for name, _ in tree_flatten(model.parameters())}
        stored = set(_Stored(folder).tensors)
        _refuse(folder, MLX, missing=there - stored, unexpected=stored - there)
        model, _ = utils.load_model(folder)
    model.set_dtype(mx.float32)

    def logits(ids: Ids) -> Floats:
        return np.array(model(mx.array(ids)[None])[0].astype(mx.float32))

    return Model(MLX, logits)


# Decoding: each format once, from its document, in numpy.


class _Stored:
    """The tensors and metadata of all safetensors files of a folder, however they are named."""

    def __init__(self, folder: Path) -> None:
        self._storage = LocalStorage(folder)
        self.tensors: dict[str, StoredTensor] = {}
        self.metadata: dict[str, str] = {}
        for file, state in self._storage.files().items():
            if file.endswith(".safetensors"):
                read = lambda at, count, file=file: read_bytes(self._storage, file, at, count)  # noqa: E731
                tensors, metadata = parse_header(file, state.byte_count, read)
                self.tensors |= {tensor.name: tensor for tensor in tensors}
                self.metadata |= metadata

    def bytes(self, name: str) -> Codes:  # as stored, flat
        if name not in self.tensors:
            raise SourceError(f"{self._storage.root}: expected the tensor {name!r}, found none; export it again")
        tensor = self.tensors[name]
        raw = np.empty(tensor.byte_count, dtype=np.uint8)
        self._storage.read_into(tensor.file, tensor.offset, raw)
        return raw

    def rows(self, name: str) -> Codes:  # [..., bytes]
        raw = self.bytes(name)
        return raw.reshape(*self.tensors[name].shape[:-1], -1)

    def floats(self, name: str) -> Floats:
        raw = self.bytes(name)
        return to_float32(raw, self.tensors[name].dtype).reshape(self.tensors[name].shape)


def master_weight(folder: Path) -> Callable[[str], Floats]:
    """What a master's weights are decoded to, by name.

    Raises SourceError, MasterError.
    """
    tensors = {tensor.name: tensor for tensor in open_local(folder).tensors}
    return lambda name: _values(tensors[name])


def export_weight(folder: Path) -> Callable[[str], Floats]:
    """What an export's weights stand for in the basis of the original, by the names of the runtime: f32, in its shape.

    Raises SourceError for a folder that is not as exports of its kind are.
    """
    storage = LocalStorage(folder)
    config = json.loads(read_file(storage, CONFIG_FILE)) if CONFIG_FILE in storage.files() else {}
    stored = _Stored(folder)
    settings = config.get("quantization_config") or {}
    if settings.get("quant_method") == "torchao":
        return lambda name: _torchao_weight(stored, name)
    if settings.get("quant_method") == "compressed-tensors":
        return lambda name: _compressed_weight(stored, settings, name)
    if "quantization" in config:
        return lambda name: _mlx_weight(stored, config["quantization"], name)
    return stored.floats


def _torchao_weight(stored: _Stored, name: str) -> Floats:
    """torchao 0.18, Int4Tensor and Int4TilePackedTo4dTensor: (code - 8) * scale + zero, codes from 0 to 15."""
    if name not in stored.metadata:
        return stored.floats(name)
    about = json.loads(stored.metadata[name])
    rows, columns = about["_data"]["shape"]
    part = _parts(stored, name)[0].removesuffix("qdata")
    if about["_type"] == "Int4Tensor":
        codes = unpack_nibbles(stored.rows(part + "qdata") ^ np.uint8(0x88))
        pairs = np.stack([stored.floats(part + "scale"), stored.floats(part + "zero_point")], axis=-1)
    else:
        words = stored.tensors[part + "qdata"].shape
        codes = unpack_tiles(stored.bytes(part + "qdata").view("<i4").reshape(words))[:rows, :columns]
        pairs = stored.floats(part + "scale_and_zero")[:, :rows]
    pairs = pairs[: columns // about["_data"]["block_size"][-1]].transpose(1, 0, 2)  # [rows, groups, 2]
    grouped = codes.reshape(rows, pairs.shape[1], -1).astype(np.float32) - 8
    weight: Floats = grouped * pairs[..., :1] + pairs[..., 1:]
    return weight.reshape(rows, columns)


def _parts(stored: _Stored, name: str) -> list[str]:
    """The stored names of what torchao holds a weight as: qdata, then its scales."""
    module, _, parameter = name.rpartition(".")
    return [f"{module}._{parameter}_{part}" for part in json.loads(stored.metadata[name])["_tensor_data_names"]]


def _compressed_weight(stored: _Stored, settings: Mapping[str, Any], name: str) -> Floats:
    """compressed-tensors pack-quantized, symmetric: (code - 2**(bits - 1)) * scale; then the rotation that it declares."""
    if f"{name}_packed" not in stored.tensors:
        return stored.floats(name)
    (group,) = settings["config_groups"].values()
    bits = group["weights"]["num_bits"]
    rows, columns = stored.bytes(f"{name}_shape").view("<i8")
    codes = unpack_stream(stored.rows(f"{name}_packed"), bits)[:, :columns].astype(np.float32)
    scales = stored.floats(f"{name}_scale")
    centred = (codes - np.float32(2 ** (bits - 1))).reshape(rows, scales.shape[1], -1)
    weight: Floats = (centred * scales[..., None]).reshape(rows, columns)
    for scheme in settings.get("transform_config", {}).get("config_groups", {}).values():
        if any(_matches(name.removesuffix(".weight"), apply["targets"]) for apply in scheme["apply"]):
            weight = turned(weight, scheme["head_dim"])
    return weight


def _matches(module: str, targets: Sequence[str]) -> bool:
    return any(re.match(t.removeprefix("re:"), module) if t.startswith("re:") else t == module for t in targets)


def _mlx_weight(stored: _Stored, settings: Mapping[str, Any], name: str) -> Floats:
    """mlx.core.quantize: code * scale + bias, or a value of a small float times a scale."""
    module = name.removesuffix(".weight")
    if f"{module}.scales" not in stored.tensors:
        return stored.floats(name)
    own = settings.get(module)
    about = {**settings, **(own if isinstance(own, dict) else {})}
    codes = unpack_stream(stored.rows(name), about["bits"])
    if about.get("mode", "affine") == "affine":
        scales, biases = stored.floats(f"{module}.scales"), stored.floats(f"{module}.biases")
        values = codes.astype(np.float32).reshape(*scales.shape, -1)
        affine: Floats = (values * scales[..., None] + biases[..., None]).reshape(codes.shape)
        return affine
    scales = float8_table("F8_E4M3" if about["mode"] == "nvfp4" else "F8_E8M0")[stored.rows(f"{module}.scales")]
    values = (FLOAT4 if about["bits"] == 4 else float8_table("F8_E4M3"))[codes].reshape(*scales.shape, -1)
    weight: Floats = (values * scales[..., None]).reshape(codes.shape)
    return weight


# OCP microscaling formats 1.0, E2M1: the lowest bit is the mantissa, the highest the sign.
FLOAT4: Floats = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def unpack_nibbles(packed: Codes) -> Codes:
    """[rows, columns / 2] bytes, the even column low -> codes [rows, columns]."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def unpack_stream(packed: Codes, bits: int) -> Codes:
    """[..., bytes] of codes end to end, the lowest bit first -> codes [..., 8 * bytes / bits]."""
    digits = np.unpackbits(packed, axis=-1, bitorder="little").reshape(*packed.shape[:-1], -1, bits)
    return np.packbits(digits, axis=-1, bitorder="little")[..., 0]


def unpack_tiles(words: npt.NDArray[np.int32]) -> Codes:
    """[rows / 8, columns / 128, 32, 4] words of PyTorch's tinygemm -> codes [rows, columns].

    aten/src/ATen/native/cuda/int4mm.cu, matrix_to_m16n8k16_Bint4_layout: lane t holds row t / 4, and of each 16 columns the
    pairs 2 (t % 4) and 2 (t % 4) + 8; a word has two such sixteens, as nibbles 0 2 4 6 1 3 5 7.
    """
    tiles, blocks = words.shape[:2]
    result = np.empty((tiles, 8, blocks, 128), dtype=np.uint8)
    for lane, word, nibble in itertools.product(range(32), range(4), range(8)):
        odd, sixteen, half = nibble >> 2, nibble >> 1 & 1, nibble & 1
        column = word * 32 + sixteen * 16 + half * 8 + lane % 4 * 2 + odd
        result[:, lane // 4, :, column] = words[:, :, lane, word] >> 4 * nibble & 15
    return result.reshape(tiles * 8, blocks * 128)


def turned(weight: Floats, size: int) -> Floats:
    """Each run of `size` weights of a row times H / sqrt(size), H being Sylvester's matrix: its own inverse."""
    index = np.arange(size)
    signs = np.where(np.bitwise_count(index[:, None] & index[None, :]) % 2, -1.0, 1.0)
    blocks = weight.reshape(-1, size).astype(np.float64) @ (signs / math.sqrt(size))
    return blocks.astype(np.float32).reshape(weight.shape)
