"""Models, each loaded and computed by the library that its folder is meant for.

By default they run in float32 on a CPU, so that two models differ in nothing but their weights. Where a runtime has no
CPU kernel for its own layout (torchao's tiles), the integers that it loaded go through PyTorch's CPU kernel for the
same arithmetic.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.gguf.file import open_gguf
from pqweights.checkpoint.source import read_header
from pqweights.checkpoint.storage import Storage
from pqweights.common.units import counted
from pqweights.errors import DeviceError, EvaluationError, PqweightsWarning, SourceError
from pqweights.formats.packing import unpack_tiles
from pqweights.kernels.groups import unpack_bits
from pqweights.models import described, has_trait
from pqweights.models.names import names_in_memory
from pqweights.models.traits import Trait
from pqweights.runtime.folders import LLAMA_CPP, MASTER, Folder, read_model, transformers_config
from pqweights.runtime.llama_cpp import LlamaRun
from pqweights.runtime.packages import Refused, package, quiet
from pqweights.runtime.texts import Ids
from pqweights.targets.target import COMPRESSED_TENSORS, MLX, TORCHAO

Floats = npt.NDArray[np.float32]

DTYPES = ("float32", "bfloat16", "float16")
AUTO = "auto"  # as a dtype: the model's own
# The dtype of llama.cpp, which rounds the inputs of each product to a type that suits the weights.
MIXED = "mixed precision"
INT4_TENSORS = ("Int4TilePackedTo4dTensor", "Int4Tensor")  # torchao's; they compute on a GPU only


@dataclass(frozen=True, kw_only=True)
class Model:
    """A loaded model.

    runtime: which library computes, in words.
    dtype: the dtype of the arithmetic.
    logits: takes ids [tokens] and n; returns f32 [n, vocabulary], the predictions after each of the last n tokens.
    logits_of: logits for several windows of one size, in order, where they are computed faster together.
    net: the PreTrainedModel that computes; None for models of mlx-lm and llama.cpp.
    """

    runtime: str
    dtype: str
    logits: Callable[[Ids, int], Floats]
    logits_of: Callable[[Sequence[Ids], int], Iterator[Floats]] | None = None
    net: Any = None


def open_model(
    path: Path, *, device: str = "cpu", dtype: str = "float32", packed: bool = False, threads: int | None = None
) -> Model:
    """Load a checkpoint, a master, an export or a GGUF file with the library that is meant to load it.

    device: cpu, or cuda for runtimes of torch (torchao's tensors run their own kernel there, in BF16).
    dtype: one of DTYPES, or auto for the model's own.
    packed: keep the weights of a master packed.
    threads: how many compute, in torch from now on; by default as many as torch and llama.cpp take themselves

    Of these, llama.cpp takes float32, which is about keys and values, and auto.

    Raises SourceError if the folder is not a causal language model, lacks tensors of the model or has others,
    EvaluationError for options that do not fit the folder, MissingDependencyError.
    """
    folder = read_model(path)
    check_options([folder], device=device)
    if packed:
        check_packed(folder)
    loaders: dict[str, Callable[[], Model]] = {
        MASTER: lambda: _open_master(folder, device=device, dtype=dtype, packed=packed),
        TORCHAO: lambda: _open_torchao(folder, device, dtype),
        COMPRESSED_TENSORS: lambda: _open_compressed_tensors(folder, device, dtype),
        MLX: lambda: _open_mlx(folder, dtype),
        LLAMA_CPP: lambda: _open_llama_cpp(folder, dtype, threads),
    }
    if threads is not None and folder.runtime not in APART:
        package("torch", "transformers").set_num_threads(threads)
    if folder.runtime in loaders:
        return loaders[folder.runtime]()
    return _in_torch("transformers", _from_pretrained(folder, dtype).to(device))


# How messages call the runtimes that have a device and a cache of their own.
APART = {MLX: "mlx-lm", LLAMA_CPP: "llama.cpp"}


def check_options(
    folders: Sequence[Folder], *, device: str = "cpu", dtype: str | None = None, has_kv_cache: bool = False
) -> None:
    """Raise EvaluationError for options that mean nothing to one of these folders.

    device: cpu, cuda or auto
    dtype: one of DTYPES, AUTO or None; GGUF files do not take it, other folders may
    has_kv_cache: whether keys and values are to be quantized
    """
    for folder in folders:
        runtime = APART.get(folder.runtime)
        if runtime and device == "cuda":
            how = "chooses its device itself" if folder.runtime == MLX else "runs on the CPU here"
            raise EvaluationError(f"{folder.path}: {runtime} {how}; leave out `device` {device}")
        if runtime and has_kv_cache:
            raise EvaluationError(f"{folder.path}: `kv_cache`: {runtime} has a cache of its own; leave it out")
    takes_none = all(folder.runtime == LLAMA_CPP for folder in folders)
    if takes_none and dtype not in (None, AUTO, "float32"):
        raise EvaluationError(
            f"{folders[0].path}: `dtype` {dtype}: llama.cpp computes in types of its own; leave it out"
        )


def check_packed(folder: Folder) -> None:
    """Raise EvaluationError for a folder whose weights cannot stay packed."""
    if folder.runtime != MASTER:
        raise EvaluationError(f"{folder.path}: `packed`: expected a pqweights master, found another checkpoint")


def choose_device(device: str, folders: Sequence[Folder]) -> str:
    """Return cpu or cuda. auto is cuda if there is a GPU, unless a folder is for mlx-lm or llama.cpp.

    Raises DeviceError, MissingDependencyError.
    """
    if device == "cpu" or (device == "auto" and any(folder.runtime in (MLX, LLAMA_CPP) for folder in folders)):
        return "cpu"
    torch = package("torch", "transformers", f"`device` {device}")
    if torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        raise DeviceError(f"`device` cuda: torch {torch.__version__} finds no GPU that it can use; use `device` cpu")
    return "cpu"


# transformers, and the runtimes that build on it.


def _from_pretrained(folder: Folder, dtype: str) -> Any:
    """Load a model onto the CPU with transformers.

    Raises SourceError if tensors are missing, or if the model does not have them.
    """
    transformers = package("transformers", "transformers")
    loader = loader_of(folder)
    with Refused(f"{folder.path}: transformers cannot load this model"), quiet():
        model, info = loader.from_pretrained(
            folder.path, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
    check_loaded(folder.path, type(model).__name__, missing=info["missing_keys"], unexpected=info["unexpected_keys"])
    assert isinstance(model, transformers.PreTrainedModel)
    return model.eval()


def loader_of(folder: Folder) -> Any:
    """Return the class of transformers that loads this model with a head for the next token.

    Raises SourceError if there is no such class.
    """
    transformers = package("transformers", "transformers")
    mappings = package("transformers.models.auto.modeling_auto", "transformers")
    config = transformers_config(folder.path)
    named = folder.config.get("architectures") or [config.model_type]
    is_mislabelled = has_trait(config.model_type, Trait.MISLABELLED_DECODER)
    is_encoder = getattr(config, "is_decoder", None) is False and not is_mislabelled
    if not (is_encoder or getattr(config, "is_encoder_decoder", False)):
        if type(config) in mappings.MODEL_FOR_CAUSAL_LM_MAPPING:
            return transformers.AutoModelForCausalLM
        if type(config) in mappings.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            return transformers.AutoModelForImageTextToText
    raise SourceError(
        f"{folder.path}: its architecture, {named[0]}, is not a causal language model, which predicts the next token"
    )


def check_loaded(path: Path, model: str, *, missing: Collection[str], unexpected: Collection[str]) -> None:
    """Warn of tensors that the model does not use, as transformers does.

    Raises SourceError if weights are missing: transformers initializes them at random, and what is computed with them
    says nothing about the folder.
    """
    modules = {name.rpartition(".")[0] for name in missing}
    if any(name.rpartition(".")[0] in modules for name in unexpected):  # weights in a form that nothing here reads
        _refuse(path, "transformers", missing=missing, unexpected=unexpected)
    if missing:
        raise SourceError(
            f"{path}: lacks {counted(len(missing), 'weight')} of {model}, the first is {min(missing)!r}: "
            "transformers would initialize them at random, and nothing that is computed would mean anything; give a "
            "checkpoint of the whole model"
        )
    if unexpected:
        warnings.warn(
            f"{path}: has {counted(len(unexpected), 'tensor')} without a place in {model}, the first is "
            f"{min(unexpected)!r}; left out, as transformers does",
            PqweightsWarning,
            stacklevel=2,
        )


def _refuse(path: Path, runtime: str, **names: Any) -> None:
    for problem, tensors in names.items():
        if tensors:
            raise SourceError(
                f"{path}: {runtime} finds {counted(len(tensors), f'{problem} tensor')}, the first is "
                f"{sorted(tensors)[0]!r}; the folder is incomplete or meant for another runtime: check it with "
                "`pqweights verify`, or export it again"
            )


def _stored(folder: Path) -> tuple[set[str], dict[str, str]]:
    """Return the names of all tensors in the safetensors files of a folder, and the metadata of these files."""
    names: set[str] = set()
    metadata: dict[str, str] = {}
    storage = Storage(folder)
    for file in storage.files():
        if file.endswith(".safetensors"):
            tensors, stated = read_header(storage, file)
            names |= {tensor.name for tensor in tensors}
            metadata |= stated
    return names, metadata


def _in_torch(runtime: str, model: Any) -> Model:
    torch = package("torch", "transformers")
    takes_count = "logits_to_keep" in inspect.signature(model.forward).parameters

    def logits(ids: Ids, last: int) -> Floats:
        keep = {"logits_to_keep": last} if takes_count else {}
        with torch.inference_mode(), quiet():
            given = torch.from_numpy(np.ascontiguousarray(ids))[None].to(model.device)
            result = model(given, use_cache=False, **keep).logits[0, -last:]
        values: Floats = result.float().cpu().numpy()
        return values

    dtype = str(model.dtype).removeprefix("torch.")
    return Model(runtime=runtime, dtype=dtype, logits=logits, net=model)


def _open_master(folder: Folder, *, device: str, dtype: str, packed: bool) -> Model:
    """Load a master through the integration with transformers: weights are decoded while they load, or stay packed."""
    from pqweights.runtime.loading.transformers import load

    loader_of(folder)  # raises SourceError for what is not a language model
    with Refused(f"{folder.path}: transformers cannot load this model"), quiet():
        loaded = load(folder.path, packed=packed, dtype=dtype, device_map=None)
    model = loaded.model
    if model.get_output_embeddings() is None:
        raise SourceError(f"{folder.path}: {type(model).__name__} has no head for the next token; export it first")
    check_loaded(folder.path, type(model).__name__, missing=loaded.missing, unexpected=loaded.unexpected)
    runtime = "transformers, pqweights' packed weights" if packed else "transformers, weights decoded by pqweights"
    return _in_torch(runtime, model.eval().to(device))


def _open_compressed_tensors(folder: Folder, device: str, dtype: str) -> Model:
    """Load an export for vLLM."""
    package("compressed_tensors", "vllm")
    torch = package("torch", "transformers")
    model = _from_pretrained(folder, dtype).to(device)
    own_dtype = model.dtype
    # The first call decompresses; floats of four bits become BF16 whatever was asked for, which takes autocast.
    computing = torch.autocast(torch.device(device).type, torch.bfloat16)
    with quiet(), Refused(f"{folder.path}: compressed-tensors cannot load this model"), torch.no_grad(), computing:
        model(torch.zeros(1, 1, dtype=torch.int64, device=device))
    # Stacked experts are BF16 whatever dtype was asked for, and transformers refuses model.to(dtype).
    torch.nn.Module.to(model, own_dtype)
    return _in_torch("transformers, compressed-tensors", model)


def _open_torchao(folder: Folder, device: str, dtype: str) -> Model:
    """Load an export for torchao.

    On the CPU, torchao's INT4 tensors cannot compute, and its INT8 and FP8 ones only in the dtype that they name. So
    each is decoded there: INT4 by PyTorch's CPU kernel for it. Where inputs are rounded too, torchao computes.
    """
    package("torchao", "torchao")
    torch = package("torch", "torchao")
    stored, metadata = _stored(folder.path)
    # Each weight that is listed has its description, which names the tensors that it is stored as; behind its name are
    # those that it may have in memory.
    parts, others = set[str](), set[str]()
    has_vision, known = "vision_config" in folder.config, described(folder.config.get("model_type"))
    try:
        for name in json.loads(metadata.get("tensor_names", "[]")):
            if name not in others:
                others |= {*names_in_memory(name, has_vision, known)}
                module, _, parameter = name.rpartition(".")
                parts |= {f"{module}._{parameter}_{part}" for part in json.loads(metadata[name])["_tensor_data_names"]}
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise SourceError(
            f"{folder.path}: the metadata of its files do not describe tensors of torchao ({error!r:.100}); export it "
            "again"
        ) from None
    _refuse(folder.path, "torchao", missing=parts - stored)  # transformers would raise a RuntimeError
    model = _from_pretrained(folder, dtype if device == "cpu" else "bfloat16")  # the INT4 kernel takes nothing else
    modules = _torchao_modules(folder, model)
    int4 = any(type(module.weight).__name__ in INT4_TENSORS for module in modules)
    if device != "cpu":
        return _in_torch("torchao, its INT4 kernel" if int4 else "torchao", model.to(device))
    if any(getattr(module.weight, "act_quant_kwargs", None) for module in modules):
        return _in_torch("torchao", model)
    for module in modules:
        if type(module.weight).__name__ in INT4_TENSORS:
            decoded = decode_on_cpu(module.weight).to(model.dtype)
        else:
            decoded = module.weight.dequantize(model.dtype)
        module.weight = torch.nn.Parameter(decoded, requires_grad=False)
    how = "the CPU's INT4 kernel" if int4 else "decoded"
    return _in_torch(f"torchao's tensors, {how}", model)


def _torchao_modules(folder: Folder, model: Any) -> list[Any]:
    """The modules whose weights are tensors of torchao.

    Raises SourceError if there are none, or if one has another shape than its module.
    """
    result = []
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if type(weight).__name__ not in (*INT4_TENSORS, "Int8Tensor", "Float8Tensor"):
            continue
        expected, shape = [module.out_features, module.in_features], list(weight.shape)
        if shape != expected:
            raise SourceError(f"{folder.path}: {name}.weight: expected shape {expected}, found {shape}")
        result.append(module)
    if not result:
        raise SourceError(f"{folder.path}: expected tensors of torchao, found none; export it again")
    return result


# MLX.


def _open_mlx(folder: Folder, dtype: str) -> Model:
    mx, utils = package("mlx.core", "mlx"), package("mlx_lm.utils", "mlx")
    tree_flatten = package("mlx.utils", "mlx").tree_flatten
    refused = Refused(f"{folder.path}: mlx-lm cannot load this model here")
    with refused, quiet():
        model, _ = utils.load_model(folder.path, lazy=True, strict=False)
        there = {name for name, _ in tree_flatten(model.parameters())}
    stored, _ = _stored(folder.path)
    _refuse(folder.path, "mlx-lm", missing=there - stored, unexpected=stored - there)
    with refused, quiet():
        model, _ = utils.load_model(folder.path)
        if dtype != AUTO:
            model.set_dtype(getattr(mx, dtype))
        computed = model(mx.array([[0]]))  # raises where a mode runs on Apple GPUs only
        mx.eval(computed)

    def logits(ids: Ids, last: int) -> Floats:
        return np.array(model(mx.array(ids)[None])[0, -last:].astype(mx.float32))

    computed_in = str(computed.dtype).removeprefix("mlx.core.")
    return Model(runtime="mlx-lm", dtype=computed_in, logits=logits)


# llama.cpp.


def _open_llama_cpp(folder: Folder, dtype: str, threads: int | None) -> Model:
    run = LlamaRun(open_gguf(folder.path), exact=dtype != AUTO, threads=threads)
    return Model(runtime=LLAMA_CPP, dtype=MIXED, logits=run.logits)


def decode_on_cpu(weight: Any) -> Any:
    """Decode a weight with aten's CPU kernel for (code - 8) * scale + zero: [N, K] f32.

    The kernel multiplies the identity by the weight. It is slow in float32 (0.6 G multiply-adds a second), so it runs
    once for each weight; in BF16 it would round.
    """
    torch = package("torch", "torchao")
    rows, columns = weight.shape
    group_size = weight.block_size[-1]
    if type(weight).__name__ == "Int4Tensor":
        codes = unpack_bits(weight.qdata.numpy().view(np.uint8) ^ np.uint8(0x88), 4)
        scales = torch.stack([weight.scale, weight.zero_point], dim=-1)
    else:
        codes = unpack_tiles(weight.qdata.numpy())
        scales = weight.scale_and_zero
    padded = -(-rows // 16) * 16  # the kernel takes a multiple of 16 rows
    whole = np.zeros((padded, columns), dtype=np.int32)
    whole[:rows] = codes[:rows, :columns]
    pairs = torch.zeros(columns // group_size, padded, 2)
    pairs[:, :rows] = scales[: columns // group_size, :rows].float()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(whole), 1)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.eye(columns), packed, group_size, pairs)
    return product.T[:rows].contiguous()
