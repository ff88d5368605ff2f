"""GGUF files as sources: their tensors under the names and in the order of transformers, blocks decoded.

What the gguf target would make of a model with config.json is found first, from its shapes alone: for each tensor of
the file, a view on tensors of the model. The source is the inverse of these views. So names and orders are written
once, and a file that holds anything else is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pqweights.checkpoint.blocks import BlocksTensor
from pqweights.checkpoint.companions import check_links, companions
from pqweights.checkpoint.config import model_dtype
from pqweights.checkpoint.config_schema import check_layers, model_config
from pqweights.checkpoint.config_schema import checked_config as with_values_checked
from pqweights.checkpoint.gguf import gguf_package
from pqweights.checkpoint.gguf.configurations import check_configuration, pooling_of, read_configuration
from pqweights.checkpoint.gguf.contents import GgufContents, GgufTensor, MetadataList, MetadataValue
from pqweights.checkpoint.gguf.file import (
    SUFFIX,
    TOWER_FILE,
    gguf_in,
    holds_gguf,
    is_gguf_file,
    tower_beside,
    whole_metadata,
)
from pqweights.checkpoint.gguf.inverse import AbsentTensor, Piece, absent_tensors, assembled, pieces_of
from pqweights.checkpoint.gguf.mixes import INTEGERS
from pqweights.checkpoint.gguf.model import architecture_name
from pqweights.checkpoint.gguf.pooling import DENSE, MODULES, RANK, computes_dense, module_files
from pqweights.checkpoint.gguf.rope import Factors, add_rope
from pqweights.checkpoint.gguf.settings import read_settings
from pqweights.checkpoint.gguf.tensors import gguf_tensors, with_draft_layers
from pqweights.checkpoint.gguf.tokenizer_files import tokenizer_files
from pqweights.checkpoint.gguf.tokens import FAST
from pqweights.checkpoint.gguf.towers import ARCHITECTURE as TOWER
from pqweights.checkpoint.gguf.views import ConstantTensor, RenamedTensor, SourceTensor
from pqweights.checkpoint.gguf.vocabulary import OTHERS
from pqweights.checkpoint.gguf.wholes import BREAK, processor_of, restored_tower, whole_models
from pqweights.checkpoint.header import ByteReads, StoredTensor, read_stored
from pqweights.checkpoint.names import CONFIG_FILE
from pqweights.checkpoint.promise import checked_config, tied_head, untied
from pqweights.checkpoint.readers import LogicalTensor, PlainTensor
from pqweights.checkpoint.source import Checkpoint, open_files
from pqweights.checkpoint.storage import Storage, check_not_interrupted
from pqweights.checkpoint.wrapped import ADAPTED_TYPES
from pqweights.common.dtypes import FLOAT_DTYPES
from pqweights.errors import ExportError, SourceChangedError, SourceError, SourceReadError
from pqweights.kernels.gguf_encoding import BLOCK_TYPES
from pqweights.models.description import ModelDescription
from pqweights.models.llama_cpp import JOINED
from pqweights.models.qwen import OF_IMAGES, TEXT_PARTS
from pqweights.models.settings import Settings, unused_positions
from pqweights.models.table import MODELS
from pqweights.models.tensor_names import Names
from pqweights.models.wholes import Whole

# The types of models whose files are read: those whose tensors have these names.
MODEL_TYPES = tuple(name for name, row in MODELS.items() if row.names is not None)
# Those that files alone are read as.
ALONE = {name: row for name, row in MODELS.items() if row.names is not None and row.names.class_name}
PLAIN = (*FLOAT_DTYPES, INTEGERS)
# Types that compute what others of their architecture do, by the way to split text that they alone have.
TOLD_BY_TOKENIZER = {"glm4": "glm4_moe_lite"}
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Numbers of a dense layer behind a model, which is read when a file is opened; EmbeddingGemma's have 2.4 million.
MOST_DENSE = 1 << 26
PROCESSOR = "preprocessor_config.json"
FOLLOWS = "follows from the configuration"


def open_any(
    storage: Storage, file: str = "", *, allow_pickle: bool = False, include: Sequence[str] = ()
) -> Checkpoint:
    """Open a checkpoint in safetensors or GGUF. The arguments are those of `open_files`.

    Raises what `open_files` and `open_gguf_source` raise.
    """
    if is_gguf_file(storage, file) if file else holds_gguf(storage.files()):
        return open_gguf_source(storage, file, include)
    return open_files(storage, file, allow_pickle, include=include)


def needed_of_gguf(storage: Storage, file: str) -> list[str]:
    """Return what must be fetched of a GGUF model that lies elsewhere: all parts of it first. file: see below"""
    parts = gguf_in(storage, file).files
    beside, _ = companions(storage.files(), parts)
    return [*parts, *(name for name in (CONFIG_FILE, *beside) if name in storage.files())]


def open_gguf_source(stored_in: Storage, file: str = "", include: Sequence[str] = ()) -> Checkpoint:
    """Open a GGUF file with the files beside it, or the one model of a folder; of a split model all parts.

    file: its name, or that of a part; by default it is the only one
    include: patterns of files to copy, see companions.py

    Raises SourceError for a damaged file, without the model's config.json, and for a model that cannot be read;
    MissingDependencyError without the gguf package; what the storage raises.
    """
    opened = gguf_in(stored_in, file)
    if opened.architecture == TOWER:
        raise SourceError(f"{opened.path}: it holds only an image tower: give the file of the text model beside it")
    contents, remarks = _text_part(opened)
    check_not_interrupted(stored_in)
    check_links(stored_in.broken_links, stored_in.outside_links)
    files = stored_in.files()
    made: dict[str, bytes] = {}
    if not any(name in files for name in (FAST, *OTHERS)):
        made = tokenizer_files(str(contents.path), whole_metadata(stored_in, contents), contents.context)
    if MODULES not in files:
        made |= _modules(stored_in, contents)
    others = {name for name in files if name.endswith(SUFFIX) and not TOWER_FILE.fullmatch(name)}
    without = others - {*contents.files} if file else set()
    beside = model_config(stored_in)
    if beside is None or not _describes(beside):
        made[CONFIG_FILE] = json.dumps(_configuration(stored_in, contents), indent=2).encode()
    if beside is not None:
        without |= {CONFIG_FILE} & made.keys()
        remarks += (_contradiction(stored_in, contents, beside),)
    storage = stored_in.with_made(made, without)
    config = model_config(storage)
    assert config is not None
    check_layers(config, [tensor.name for tensor in contents.tensors])
    stored = {tensor.name: _stored(tensor) for tensor in contents.tensors}
    tensors, left_out = _model_tensors(storage, contents, stored, config)
    tensors = [SourceTensor.of(tensor.name, tensor) for tensor in tensors]
    checked, differing, _ = checked_config(storage, tensors, config)
    if checked == config and (head := tied_head(tensors, config)) is not None:
        tensors = [tensor for tensor in tensors if tensor.name != head]
        left_out[head] = "the same as the embeddings"
    copied, not_copied = companions(storage.files(), contents.files, include, outside_links=storage.outside_links)
    order = {name: number for number, name in enumerate(contents.files)}
    text = Checkpoint(
        storage=storage,
        config=checked,
        stored=tuple(stored.values()),
        tensors=tuple(sorted(tensors, key=lambda t: (order[t.parts[0].file], t.parts[0].offset, t.name))),
        weight_files=contents.files,
        companions=copied,
        left_out=not_copied,
        left_out_tensors=left_out,
        remarks=(*filter(None, remarks), *differing),
    )
    beside_it = tower_beside(storage)
    return text if beside_it is None else _with_tower(text, opened, beside_it, include)


def _with_tower(text: Checkpoint, opened: GgufContents, file: str, include: Sequence[str]) -> Checkpoint:
    """Return a text model with the tower in a file beside it, as one model; with a remark if these are not one."""
    reason = ""
    try:
        contents = gguf_in(text.storage, file)
        tokens = whole_metadata(text.storage, opened).get("tokenizer.ggml.tokens")
        texts = tokens.first if isinstance(tokens, MetadataList) else ()
        for whole, config in whole_models(contents, opened, text.config or {}, texts):
            try:
                return _as_one(text, opened, contents, whole, config, include)
            except ExportError as error:
                reason = reason or f"as a model of type {whole.model_type}: {error.reason}"
    except ExportError as error:
        reason = error.reason
    except (SourceChangedError, SourceReadError):
        raise
    except SourceError as error:
        reason = str(error)
    remark = f"{file}, the image tower beside {text.weight_files[0]}, is left out: {reason}"
    return replace(text, remarks=(*text.remarks, remark), left_out=text.left_out | {file: "a tower that is not read"})


def _as_one(
    text: Checkpoint,
    opened: GgufContents,
    contents: GgufContents,
    whole: Whole,
    config: dict[str, Any],
    include: Sequence[str],
) -> Checkpoint:
    """Return the model of a text model and its tower. Raises ExportError if the two files are not of this model."""
    config = with_values_checked(config, f"{contents.path}, as a model of type {whole.model_type}")
    of_text = {**config["text_config"], "vision_config": config["vision_config"]}
    names = whole.names or MODELS[(text.config or {})["model_type"]].names
    settings, views = _views(opened, of_text, names)
    check_configuration(opened, settings, list(views.values()), _factors(text.storage, opened).__getitem__)
    stored = {tensor.name: _stored(tensor) for tensor in contents.tensors}
    dtype = "F16" if model_dtype(config, ()) == "F16" else "BF16"
    held = {tensor.name: _read_as(text.storage, tensor, stored[tensor.name], dtype) for tensor in contents.tensors}
    tower = [SourceTensor.of(of.name, of) for of in restored_tower(whole, config, contents, held)]
    of_texts: Sequence[LogicalTensor] = text.tensors
    if whole.names is not None:
        in_file = {tensor.name: _stored(tensor) for tensor in opened.tensors}
        named, _ = _model_tensors(text.storage, opened, in_file, of_text, names)
        of_texts = [tensor for tensor in named if tensor.name not in text.left_out_tensors]
    tensors = (*(SourceTensor.of(whole.name_of_text(of.name), of) for of in of_texts), *tower)
    made = {
        CONFIG_FILE: json.dumps(config, indent=2).encode(),
        PROCESSOR: json.dumps(processor_of(contents), indent=2).encode(),
    }
    storage = text.storage.with_made(made, {CONFIG_FILE})
    checked, differing, _ = checked_config(storage, tensors, config)
    files = (*text.weight_files, *contents.files)
    copied, not_copied = companions(storage.files(), files, include, outside_links=storage.outside_links)
    remark = f"{contents.path.name} is read as the image tower of {text.weight_files[0]}: a {whole.model_type}"
    if PROCESSOR not in text.storage.files():
        remark += f"; {PROCESSOR}, which says how images are prepared, has only what the file states"
    return replace(
        text,
        storage=storage,
        config=checked,
        stored=(*text.stored, *stored.values()),
        tensors=tensors,
        weight_files=files,
        companions=copied,
        left_out=not_copied,
        left_out_tensors=text.left_out_tensors | dict.fromkeys(stored.keys() & {BREAK}, "a row of the embeddings"),
        remarks=(remark, *(said for said in text.remarks if said not in _text_part(opened)[1]), *differing),
    )


def _describes(config: dict[str, Any]) -> bool:
    """Whether a config.json may be that of a file: not of a model around the text model, and not of its type alone."""
    has_sizes = any(isinstance(value, int) and not isinstance(value, bool) for value in config.values())
    of_type, parts = config.get("model_type"), ("text_config", "vision_config", "audio_config")
    wraps = of_type in ADAPTED_TYPES or any(isinstance(config.get(part), dict) for part in parts)
    return has_sizes and (of_type in MODEL_TYPES or not wraps)


def _contradiction(storage: Storage, contents: GgufContents, config: dict[str, Any]) -> str:
    """Return what a config.json beside a file does not say as the file does; "" if they agree."""
    if not _describes(config):
        return (
            f"{CONFIG_FILE} beside {contents.path.name} is ignored, and the file's metadata are used: it does not "
            f"describe the model in the file; its model_type is {config.get('model_type')!r:.40}"
        )
    try:
        settings, views = _views(contents, config)
        check_configuration(contents, settings, list(views.values()), _factors(storage, contents).__getitem__)
    except ExportError as error:
        return f"{CONFIG_FILE} beside {contents.path.name} is used, although it contradicts the file: {error}"
    return ""


def _text_part(contents: GgufContents) -> tuple[GgufContents, tuple[str, ...]]:
    """Return the text part of a model of images and text as the model that computes the same of texts, and a remark."""
    known, prefix = TEXT_PARTS.get(contents.architecture), f"{contents.architecture}."
    if known is None:
        return contents, ()
    metadata: dict[str, MetadataValue] = {"general.architecture": known}
    for key, value in contents.metadata.items():
        if key.removeprefix(prefix) not in OF_IMAGES:
            metadata.setdefault(f"{known}.{key.removeprefix(prefix)}" if key.startswith(prefix) else key, value)
    remark = (
        f"{contents.path.name} holds the text part of a {contents.architecture}: it is read as a {known}, which "
        "computes the same for texts; images need the original model"
    )
    return replace(contents, metadata=metadata), (remark,)


def _modules(storage: Storage, contents: GgufContents) -> dict[str, bytes]:
    """Return the files that say how vectors of tokens become one, if the file says it."""
    try:
        mode = pooling_of(contents)
    except ExportError as error:
        raise _refused(contents, error, "not read") from None
    dense = sorted((tensor for tensor in contents.tensors if DENSE.fullmatch(tensor.name)), key=lambda of: of.name)
    width = contents.number(f"{contents.architecture}.embedding_length")
    if mode in (None, RANK) or width is None:
        return {}
    matrices = []
    for tensor in dense:
        if len(tensor.shape) != 2 or not 0 < tensor.weights <= MOST_DENSE:
            raise SourceError(
                f"{tensor.file}: tensor {tensor.name!r}: expected a matrix of at most {MOST_DENSE} numbers, found "
                f"shape {list(tensor.shape)}"
            )
        raw = np.empty(4 * tensor.weights, dtype=np.uint8)
        _read_as(storage, tensor, _stored(tensor), "BF16").read(0, tensor.weights, "F32", raw)
        matrices.append(raw.view(np.float32).reshape(tensor.shape))
    return module_files(mode, width, matrices)


def _configuration(storage: Storage, contents: GgufContents) -> dict[str, Any]:
    """Return the config.json that the metadata state, as the first type of the architecture that has all of them."""
    names = [name for name, model in ALONE.items() if contents.architecture in _labels(model)]
    if contents.number(f"{contents.architecture}.expert_count"):
        names = [name for name in names if (of := ALONE[name].llama_cpp) is not None and of.counts_experts]
    if not names:
        known = ", ".join(sorted({label for model in ALONE.values() for label in _labels(model)}))
        raise SourceError(
            f"{contents.path}: general.architecture is {contents.architecture!r:.40}; {known} can be read: put "
            f"{CONFIG_FILE} of {_original(contents)} beside it, or give the original"
        )
    if (told := TOLD_BY_TOKENIZER.get(contents.text("tokenizer.ggml.pre") or "")) in names:
        names.sort(key=lambda name: name != told)
    factors = _factors(storage, contents)
    refused: list[ExportError] = []
    for name in names:
        try:
            stated = read_configuration(contents, name, factors)
            config = with_values_checked(stated, f"{contents.path}, as a model of type {name}")
            settings, views = _views(contents, config)
            check_configuration(contents, settings, list(views.values()), factors.__getitem__)
            if other := min({tensor.name for tensor in contents.tensors} - views.keys(), default=None):
                raise ExportError(f"tensor {other!r}: expected no such tensor")
            return config
        except ExportError as error:
            refused.append(error)
    raise _refused(contents, refused[0], f"it cannot be read as a model of type {names[0]}") from None


def _labels(model: ModelDescription) -> set[str]:
    """Return what files call the architectures of a type of model."""
    return {architecture_name(of) for of in (model.llama_cpp, *model.variants) if of is not None}


def _refused(contents: GgufContents, error: ExportError, what: str) -> SourceError:
    return SourceError(f"{contents.path}: {what}: {error.reason}")


def _factors(storage: Storage, contents: GgufContents) -> Factors:
    """Return the values of the tensors that follow from the configuration."""
    factors: Factors = {}
    rows = (row.llama_cpp for row in ALONE.values() if contents.architecture in _labels(row))
    known = {*FACTORS, *(name for row in rows if row is not None for name in row.constants)}
    for tensor in contents.tensors:
        if {tensor.name, tensor.name.split(".", 2)[-1]} & known and tensor.type == "F32" and len(tensor.shape) == 1:
            factors[tensor.name] = read_stored(storage, _stored(tensor)).view(np.float32)
    return factors


def _original(contents: GgufContents) -> str:
    """Return what messages call the model that a file was made from."""
    named = (contents.text(f"general.{key}") for key in ("base_model.0.repo_url", "source.repo_url", "basename"))
    return next((name[:200] for name in named if name and name.isprintable()), "the original model")


def _stored(tensor: GgufTensor) -> StoredTensor:
    """The place of a tensor in its file; blocks are bytes."""
    is_plain = tensor.type in PLAIN
    shape = tensor.shape if is_plain else (tensor.byte_count,)
    dtype = tensor.type if is_plain else "U8"
    return StoredTensor(tensor.name, dtype, shape, tensor.file, tensor.offset, tensor.byte_count)


def _model_tensors(
    storage: ByteReads,
    contents: GgufContents,
    stored: dict[str, StoredTensor],
    config: dict[str, Any],
    names: Names | None = None,
) -> tuple[list[LogicalTensor], dict[str, str]]:
    """Return the tensors of the model, and those of the file that are none, with reasons.

    names: what they are called; by default what the type of the configuration calls them
    """
    try:
        if names is None and config.get("model_type") not in MODEL_TYPES:
            raise ExportError(f"its model_type is {config.get('model_type')}; {', '.join(MODEL_TYPES)} can be read")
        has_head = any(tensor.name == "output.weight" for tensor in contents.tensors)
        settings, views = _views(contents, untied(config) if has_head else config, names)
    except ExportError as error:
        raise _refused(contents, error, f"it cannot be read as the model of {CONFIG_FILE}") from None
    dtype = "F16" if model_dtype(config, ()) == "F16" else "BF16"
    pieces: dict[str, dict[tuple[int, int], Piece]] = {}
    left_out = {}
    for tensor in contents.tensors:
        view = views.get(tensor.name)
        if DENSE.fullmatch(tensor.name) and view is not None:
            left_out[tensor.name] = f"in {MODULES}'s dense layers"
            continue
        if view is None or _filled(view.shape) != _filled(tensor.shape):
            expected = "no such tensor" if view is None else f"shape {list(view.shape)}"
            raise SourceError(
                f"{tensor.file}: tensor {tensor.name!r} {list(tensor.shape)}: expected {expected} in the model of "
                f"{CONFIG_FILE}; put the one of {_original(contents)} beside the file"
            )
        held = _read_as(storage, tensor, stored[tensor.name], dtype)
        if view.shape != tensor.shape:
            held = RenamedTensor.of(tensor.name, held, shape=view.shape)
        made = [*pieces_of(view, held)]
        if not made:
            left_out[tensor.name] = FOLLOWS
        for of in made:
            pieces.setdefault(of.of.name, {})[of.first, of.step] = of
    missing = min(views.keys() - stored.keys() - {"output.weight"}, default=None)
    if missing is not None and not isinstance(views[missing], ConstantTensor):
        raise SourceError(
            f"{contents.path}: tensor {missing!r} of the model of {CONFIG_FILE} is missing: fetch it again"
        )
    if settings.architecture.first_position:
        _add_unused(pieces, settings)
    return [assembled([*of.values()]) for of in pieces.values()], left_out


def _add_unused(pieces: dict[str, dict[tuple[int, int], Piece]], settings: Settings) -> None:
    """Add the rows of the embeddings of positions that no token has, and that files of a RoBERTa lack: zeros."""
    name = next(name for name in pieces if name.endswith("position_embeddings.weight"))
    (held,), count = pieces[name].values(), unused_positions(settings)
    if count > held.count:
        raise SourceError(f"{CONFIG_FILE}: expected the number of one of {held.count} positions as pad_token_id")
    values = np.zeros((count, held.held.shape[-1]), dtype=np.float32)
    zeros = ConstantTensor(name=name, shape=values.shape, values=values)
    pieces[name][0, 1] = replace(held, first=0, count=count, held=zeros, start=0)


def _filled(shape: tuple[int, ...]) -> list[int]:
    """Return the dimensions that ggml can tell: those of size 1 may be left out."""
    return [size for size in shape if size != 1]


def _views(
    contents: GgufContents, config: dict[str, Any], called: Names | None = None
) -> tuple[Settings, dict[str, LogicalTensor]]:
    """Return what the gguf target makes of the model, by names in the file, as views on tensors without values.

    called: the names of the tensors; by default those that the type of the configuration has
    """
    package, settings = gguf_package(), read_settings(config, pooling=pooling_of(contents))
    if called is not None:
        settings = replace(settings, model=replace(settings.model, names=called))
    architecture = architecture_name(settings.architecture)
    if contents.architecture != architecture:
        raise ExportError(f"it has the architecture {architecture}, but the file has {contents.architecture!r}")
    shapes = {tensor.name: tensor.shape for tensor in contents.tensors}
    if any(name.endswith(".ffn_gate_up_exps.weight") for name in shapes):  # of newer files of any architecture
        settings = replace(settings, architecture=replace(settings.architecture, gate_and_up=JOINED))
    drafts = sum(name.endswith(".nextn.eh_proj.weight") for name in shapes)
    layers = settings.number("num_hidden_layers") + drafts
    names = package.get_tensor_name_map(package.MODEL_ARCH[settings.architecture.name], layers)
    tensors = [*absent_tensors(shapes, settings, names, drafts)]
    if computes_dense(settings) and settings.pooling:
        tensors += [AbsentTensor(name=name, shape=shape) for name, shape in shapes.items() if DENSE.fullmatch(name)]
    settings = with_draft_layers(settings, tensors)
    views, _ = gguf_tensors(tensors, settings, add_rope(settings, package.GGUFWriter(None, architecture)))
    return settings, {view.name: view for view in views}


def _read_as(storage: ByteReads, tensor: GgufTensor, stored: StoredTensor, dtype: str) -> LogicalTensor:
    """Return a tensor of the file with its own shape. dtype: in which blocks are stored plainly"""
    if tensor.type in PLAIN:
        return PlainTensor.of(storage, stored)
    if tensor.type not in BLOCK_TYPES:
        raise SourceError(f"{tensor.file}: tensor {tensor.name!r}: the type {tensor.type} cannot be decoded")
    return BlocksTensor(
        storage=storage,
        stored=stored,
        name=tensor.name,
        shape=tensor.shape,
        kind=tensor.type,
        dtype=tensor.type,
        plain_dtype=dtype,
    )
