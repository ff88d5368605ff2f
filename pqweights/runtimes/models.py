"""Models as the libraries compute them that their folders are meant for: each runtime once.

In float32 on a CPU if nothing else is asked for, so that what differs between two models is their weights. Where a runtime
has no CPU kernel for its own layout (torchao's tiles), the integers that it loaded are read through PyTorch's CPU kernel for
the same arithmetic.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pqweights.errors import EvaluationError, SourceError
from pqweights.exports.target import COMPRESSED_TENSORS, MLX, TORCHAO
from pqweights.runtimes.decoders import Stored, stored_parts, unpack_nibbles, unpack_tiles
from pqweights.runtimes.folders import MASTER, Folder, read_folder
from pqweights.runtimes.packages import Refused, package, quiet
from pqweights.runtimes.texts import Ids, load_tokenizer

Floats = npt.NDArray[np.float32]

DTYPES = ("float32", "bfloat16", "float16")
AUTO = "auto"  # as a dtype: the model's own
# Their configurations say that they are no decoders, and they are.
DECODERS_ALL_THE_SAME = ("gpt_neox", "gpt_neox_japanese")


@dataclass(frozen=True)
class Model:
    """A loaded model. runtime: what computes, in words. dtype: of its arithmetic.

    logits: ids [tokens], last -> [last, vocabulary] f32, what it expects after each of the last so many tokens.
    generate: ids [tokens], count -> [count] ids, the likeliest continuation, an end of text notwithstanding.
    """

    runtime: str
    dtype: str
    logits: Callable[[Ids, int], Floats]
    generate: Callable[[Ids, int], Ids]


def open_model(path: Path, device: str = "cpu", dtype: str = "float32", packed: bool = False) -> Model:
    """Load a checkpoint, a master, or an export for any runtime, with the library that is meant to load it.

    device: cpu, or cuda (torch's runtimes; there torchao's tensors run their own kernel, in BF16). dtype: one of DTYPES, or
    auto. packed: a master's weights stay packed. Raises SourceError for a folder that is no causal language model, that
    lacks tensors of the model or has others; EvaluationError for what cannot be had together; MissingDependencyError.
    """
    folder = read_folder(path)
    check_options(folder, device, packed)
    loaders: dict[str, Callable[[], Model]] = {
        MASTER: lambda: _open_master(folder, device, dtype, packed),
        TORCHAO: lambda: _open_torchao(folder, device, dtype),
        COMPRESSED_TENSORS: lambda: _open_compressed_tensors(folder, device, dtype),
        MLX: lambda: _open_mlx(folder, dtype),
    }
    if folder.kind in loaders:
        return loaders[folder.kind]()
    return _in_torch("transformers", _from_pretrained(folder, dtype).to(device))


def check_options(folder: Folder, device: str, packed: bool) -> None:
    """Raises EvaluationError where a folder of this kind cannot be evaluated in this way."""
    if packed and folder.kind != MASTER:
        raise EvaluationError(f"{folder.path}: --packed: expected a master, found none of pqweights")
    if folder.kind == MLX and device != "cpu":
        raise EvaluationError(f"{folder.path}: mlx-lm chooses its device itself; leave out --device {device}")


def continuation(path: Path, model: Model, prompt: str, tokens: int) -> str:
    """What the model continues a prompt with. path: where the tokenizer lies.

    Raises as load_tokenizer.
    """
    tokenizer = load_tokenizer(path)
    ids = np.array(tokenizer(prompt)["input_ids"], dtype=np.int64)
    return str(tokenizer.decode(model.generate(ids, tokens).tolist()))


# transformers, and what builds on it.


def _from_pretrained(folder: Folder, dtype: str) -> Any:
    """The model, on the CPU.

    Raises SourceError for tensors that are missing, or that the model does not have.
    """
    transformers = package("transformers", "transformers")
    loader = _loader(folder)
    with Refused(f"{folder.path}: transformers does not take this model"), quiet():
        model, info = loader.from_pretrained(
            folder.path, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
    _refuse(folder, "transformers", missing=info["missing_keys"], unexpected=info["unexpected_keys"])
    assert isinstance(model, transformers.PreTrainedModel)
    return model.eval()


def _loader(folder: Folder) -> Any:
    """The class of transformers that loads this model with a head for the next token.

    Raises SourceError where there is none.
    """
    transformers = package("transformers", "transformers")
    mappings = package("transformers.models.auto.modeling_auto", "transformers")
    with Refused(f"{folder.path}: transformers does not take this configuration"), quiet():
        config = transformers.AutoConfig.from_pretrained(folder.path, trust_remote_code=False)
    named = folder.config.get("architectures") or [config.model_type]
    looks_both_ways = (
        getattr(config, "is_decoder", None) is False and config.model_type not in DECODERS_ALL_THE_SAME
    ) or getattr(config, "is_encoder_decoder", False)
    if not looks_both_ways:
        if type(config) in mappings.MODEL_FOR_CAUSAL_LM_MAPPING:
            return transformers.AutoModelForCausalLM
        if type(config) in mappings.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            return transformers.AutoModelForImageTextToText
    raise SourceError(f"{folder.path}: architecture {named[0]}: no causal language model, so it has no perplexity")


def _refuse(folder: Folder, runtime: str, **names: Any) -> None:
    for kind, found in names.items():
        if found:
            raise SourceError(
                f"{folder.path}: {runtime} finds {len(found)} {kind} tensors, {sorted(found)[0]!r} first; the folder is "
                "incomplete or not meant for this runtime: `pqweights verify` tells which, export it again"
            )


def _in_torch(runtime: str, model: Any) -> Model:
    torch, transformers = package("torch", "transformers"), package("transformers", "transformers")
    takes_count = "logits_to_keep" in inspect.signature(model.forward).parameters

    def tensor(ids: Ids) -> Any:
        return torch.from_numpy(np.ascontiguousarray(ids))[None].to(model.device)

    def logits(ids: Ids, last: int) -> Floats:
        keep = {"logits_to_keep": last} if takes_count else {}
        with torch.inference_mode(), quiet():
            result = model(tensor(ids), use_cache=False, **keep).logits[0, -last:]
        values: Floats = result.float().cpu().numpy()
        return values

    def generate(ids: Ids, count: int) -> Ids:
        given = tensor(ids)
        # Everything that a model's own generation_config.json could bring in otherwise is named.
        how = transformers.GenerationConfig(
            max_new_tokens=count, do_sample=False, num_beams=1, repetition_penalty=1.0, use_cache=True, eos_token_id=-1,
            pad_token_id=0,
        )  # fmt: skip
        with torch.inference_mode(), quiet():
            result = model.generate(given, attention_mask=torch.ones_like(given), generation_config=how)
        found: Ids = result[0, len(ids) :].cpu().numpy()
        return found

    return Model(runtime, str(model.dtype).removeprefix("torch."), logits, generate)


def _open_master(folder: Folder, device: str, dtype: str, packed: bool) -> Model:
    """Through our own integration: the weights are decoded as they are loaded, or stay packed."""
    from pqweights.integrations.transformers import load_model

    _loader(folder)  # refuses what is no language model
    with Refused(f"{folder.path}: transformers does not take this model"), quiet():
        model = load_model(folder.path, packed=packed, dtype=dtype, device_map=None)
    if model.get_output_embeddings() is None:
        raise SourceError(f"{folder.path}: {type(model).__name__} has no head for the next token; export it first")
    runtime = "transformers, pqweights' packed weights" if packed else "transformers, weights decoded by pqweights"
    return _in_torch(runtime, model.eval().to(device))


def _open_compressed_tensors(folder: Folder, device: str, dtype: str) -> Model:
    """transformers drops transform_config; the library that vLLM uses applies it."""
    package("compressed_tensors", "vllm")
    torch = package("torch", "transformers")
    model = _from_pretrained(folder, dtype).to(device)
    own_dtype = model.dtype
    runtime = "transformers, compressed-tensors"
    transform = package("compressed_tensors.transform", "vllm")
    settings: Mapping[str, Any] = folder.config["quantization_config"]
    with quiet(), Refused(f"{folder.path}: compressed-tensors does not take it"):
        if "transform_config" in settings:
            transform.apply_transform_config(model, transform.TransformConfig(**settings["transform_config"]))
            runtime += " with its transforms"
        with torch.inference_mode():
            model(torch.zeros(1, 1, dtype=torch.int64, device=device))  # the first call decompresses
    # Stacked experts come in BF16, whatever was asked for; transformers refuses model.to(dtype).
    torch.nn.Module.to(model, own_dtype)
    return _in_torch(runtime, model)


def _open_torchao(folder: Folder, device: str, dtype: str) -> Model:
    """On the CPU, where torchao's tensors cannot be computed with, each is read through PyTorch's CPU kernel for INT4."""
    package("torchao", "torchao")
    torch = package("torch", "torchao")
    stored = Stored(folder.path)
    names = json.loads(stored.metadata.get("tensor_names", "[]"))
    parts = {part for name in names for part in stored_parts(stored, name)}
    _refuse(folder, "torchao", missing=parts - stored.tensors.keys())  # which transformers answers with a RuntimeError
    model = _from_pretrained(folder, dtype if device == "cpu" else "bfloat16")  # all that its kernel takes
    rounded = 0
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if type(weight).__name__ not in ("Int4TilePackedTo4dTensor", "Int4Tensor"):
            continue
        rounded += 1
        expected = (module.out_features, module.in_features)
        if tuple(weight.shape) != expected:
            raise SourceError(
                f"{folder.path}: {name}.weight: expected a tensor {list(expected)}, found {list(weight.shape)}"
            )
        if device == "cpu":
            decoded = _through_cpu_kernel(torch, weight).to(model.dtype)
            module.weight = torch.nn.Parameter(decoded, requires_grad=False)
    if not rounded:
        raise SourceError(f"{folder.path}: expected INT4 tensors, torchao loaded none; export it again")
    runtime = "torchao's tensors, the CPU's INT4 kernel" if device == "cpu" else "torchao, its INT4 kernel"
    return _in_torch(runtime, model.to(device))


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


# MLX.


def _open_mlx(folder: Folder, dtype: str) -> Model:
    mx, utils = package("mlx.core", "mlx"), package("mlx_lm.utils", "mlx")
    steps = package("mlx_lm.generate", "mlx")
    tree_flatten = package("mlx.utils", "mlx").tree_flatten
    refused = Refused(f"{folder.path}: mlx-lm does not take this model here")
    with refused, quiet():
        model, _ = utils.load_model(folder.path, lazy=True, strict=False)
        there = {name for name, _ in tree_flatten(model.parameters())}
    stored = set(Stored(folder.path).tensors)
    _refuse(folder, "mlx-lm", missing=there - stored, unexpected=stored - there)
    with refused, quiet():
        model, _ = utils.load_model(folder.path)
        if dtype != AUTO:
            model.set_dtype(getattr(mx, dtype))
        computed = model(mx.array([[0]]))  # some modes are for Apple's GPUs alone
        mx.eval(computed)

    def logits(ids: Ids, last: int) -> Floats:
        return np.array(model(mx.array(ids)[None])[0, -last:].astype(mx.float32))

    def generate(ids: Ids, count: int) -> Ids:
        found = steps.generate_step(mx.array(ids), model, max_tokens=count)
        return np.array([int(token) for token, _ in found], dtype=np.int64)

    return Model("mlx-lm", str(computed.dtype).removeprefix("mlx.core."), logits, generate)
