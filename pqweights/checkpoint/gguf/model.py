"""A checkpoint as llama.cpp holds it: the metadata of a GGUF file, its tensors as views on the checkpoint, its header.

No weight is read here.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pqweights.checkpoint.config import model_facts
from pqweights.checkpoint.gguf import gguf_package
from pqweights.checkpoint.gguf.contents import TYPE_NUMBERS
from pqweights.checkpoint.gguf.pooling import add_pooling, dense_tensors, pooling_notes, pooling_type
from pqweights.checkpoint.gguf.rope import add_rope, own_betas, rope_parameters
from pqweights.checkpoint.gguf.settings import ignored_window, read_settings, settings_of, value_of
from pqweights.checkpoint.gguf.tensors import gguf_tensors, with_draft_layers
from pqweights.checkpoint.gguf.tokenizer_files import SAMPLING
from pqweights.checkpoint.gguf.tokens import Vocabulary
from pqweights.checkpoint.gguf.towers import gguf_tower
from pqweights.checkpoint.gguf.vocabulary import ENDS, add_vocabulary, model_name, read_vocabulary
from pqweights.checkpoint.header import aligned
from pqweights.checkpoint.names import GENERATION_CONFIG
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.storage import Storage, read_json_object
from pqweights.checkpoint.views import sources_of
from pqweights.errors import ExportError
from pqweights.models.diffusion import Found
from pqweights.models.llama_cpp import Architecture, Setting
from pqweights.models.settings import Settings, windowed_layers

TEMPLATES = "tokenizer.chat_template"
# What llama.cpp assumes unless a file says otherwise.
ALIGNMENT = 32


@dataclass(frozen=True, eq=False, kw_only=True)
class GgufModel:
    """What a GGUF file of a checkpoint holds, whatever the types of its weights.

    architecture: the name that llama.cpp has for it
    metadata: gguf.GGUFValue by key; all but general.file_type, general.quantization_version and split.*
    tensors: under their names in the file and with their shapes in torch's order
    left_out: the tensors of the checkpoint that the file does not hold, each with the reason
    notes: what the user should know of the file
    tower_metadata, tower: the same of a file for its tower for images, if it has one
    diffusion: the family of a model of images or video, which other programs run
    """

    architecture: str
    metadata: dict[str, Any]
    tensors: tuple[LogicalTensor, ...]
    left_out: dict[str, str]
    notes: tuple[str, ...] = ()
    tower_metadata: dict[str, Any] = field(default_factory=dict)
    tower: tuple[LogicalTensor, ...] = ()
    diffusion: Found | None = None

    @property
    def has_vocabulary(self) -> bool:
        """Whether it has a tokenizer."""
        return "tokenizer.ggml.tokens" in self.metadata

    def with_tower(self, checkpoint: Checkpoint) -> GgufModel:
        """Return the model with its tower, or with a note why it is left out."""
        try:
            tower = gguf_tower(checkpoint)
        except ExportError as error:
            return replace(self, notes=(*self.notes, f"the image tower is left out: {error}"))
        if tower is None:
            return self
        writer, tensors, remark = tower
        held = {source.name for tensor in tensors for source in sources_of(tensor)}
        return replace(
            self,
            notes=(*self.notes, *filter(None, [remark])),
            left_out={name: reason for name, reason in self.left_out.items() if name not in held},
            tower_metadata=writer.kv_data[0],
            tower=tensors,
        )


def gguf_model(checkpoint: Checkpoint, *, name: str | None) -> GgufModel:
    """Return the GGUF model of a checkpoint. name: what the file calls the model.

    Raises ExportError if llama.cpp cannot run it as transformers does, MissingDependencyError without the gguf package.
    """
    settings, of_rope, tensors, left_out = _read(checkpoint)
    architecture = architecture_name(settings.architecture)
    writer = gguf_package().GGUFWriter(None, architecture)
    rows = _rows(tensors)
    vocabulary = read_vocabulary(checkpoint.storage, rows=rows)
    add_general(checkpoint, tensors, writer, name=model_name(name, vocabulary))
    add_hyper_parameters(settings, writer, tensors)
    writer.kv_data[0].update(of_rope.kv_data[0])
    missed = add_vocabulary(checkpoint.storage, settings.values, writer, vocabulary=vocabulary)
    # The package finds templates in the order in which a folder lists them.
    metadata = sorted(writer.kv_data[0].items(), key=lambda item: item[0] if item[0].startswith(TEMPLATES) else "")
    for listed in (value for key, value in metadata if key == f"{TEMPLATES}s"):
        listed.value = sorted(listed.value)
    return GgufModel(
        architecture=architecture,
        metadata=dict(metadata),
        tensors=tensors,
        left_out=left_out,
        notes=tuple(_notes(checkpoint.storage, settings, vocabulary, missed)),
    ).with_tower(checkpoint)


def _rows(tensors: tuple[LogicalTensor, ...]) -> int:
    """Return the number of tokens for which there is an embedding."""
    return next(tensor.shape[0] for tensor in tensors if tensor.name == "token_embd.weight")


def model_tensors(checkpoint: Checkpoint) -> tuple[LogicalTensor, ...]:
    """Return the tensors of the GGUF model of a checkpoint, whatever its tokenizer. Raises what gguf_model raises."""
    return _read(checkpoint)[2]


def gives_vectors(checkpoint: Checkpoint) -> bool:
    """Whether the file of a checkpoint gives vectors of texts, or scores. Raises what gguf_model raises."""
    return _read(checkpoint)[0].embeds


def _read(checkpoint: Checkpoint) -> tuple[Settings, Any, tuple[LogicalTensor, ...], dict[str, str]]:
    """Return the settings, a GGUFWriter with those of rotary embeddings, the tensors, and those that are left out."""
    settings = read_settings(checkpoint.config, pooling=pooling_type(checkpoint.storage))
    settings = with_draft_layers(settings, checkpoint.tensors)
    # No file is written: the writer knows the keys and the types of values.
    writer = gguf_package().GGUFWriter(None, architecture_name(settings.architecture))
    tensors = (*checkpoint.tensors, *dense_tensors(checkpoint.storage, settings))
    return settings, writer, *gguf_tensors(tensors, settings, add_rope(settings, writer))


def architecture_name(architecture: Architecture) -> str:
    """Return what files call an architecture."""
    package = gguf_package()
    return architecture.label or str(package.MODEL_ARCH_NAMES[package.MODEL_ARCH[architecture.name]])


def _notes(
    storage: Storage, settings: Settings, vocabulary: Vocabulary | None, missed: tuple[str, ...]
) -> Iterator[str]:
    """Yield what is to be said of the file. missed: tokens at which llama.cpp does not end what it generates."""
    window = ignored_window(settings)
    if window is not None:
        yield (
            f"llama.cpp attends to the whole context, but the model only to the last {window} tokens: results differ "
            "from those of transformers for longer texts"
        )
    parameters = rope_parameters(settings)
    if parameters["rope_type"] == "longrope":
        yield (
            "llama.cpp chooses between the short and the long factors of LongRoPE by the size of its context, but "
            "transformers by the length of the text: with a long context, results for short texts differ"
        )
    if parameters["rope_type"] == "yarn" and parameters.get("truncate") is False:
        yield (
            "llama.cpp rounds the bounds between which YaRN interpolates, but transformers does not: some frequencies "
            "differ slightly, as they do in every GGUF file of this model"
        )
    if parameters["rope_type"] == "yarn" and (betas := own_betas(settings, parameters)):
        flags = " ".join(f"--yarn-{key.replace('_', '-')} {value:g}" for key, value in betas.items())
        yield f"llama.cpp needs these options to compute the YaRN of this model correctly: {flags}"
    yield from filter(None, (note(settings) for note in settings.architecture.notes))
    yield from pooling_notes(storage, settings)
    for texts in () if vocabulary is None else vocabulary.differs:
        yield f"llama.cpp and the model's tokenizer make different tokens of {texts}"
    if missed:
        yield (
            f"llama.cpp does not stop at {', '.join(map(repr, missed))}, at which the model does: a GGUF file can name "
            f"only {len(ENDS)} tokens that end a text"
        )


def add_general(checkpoint: Checkpoint, tensors: tuple[LogicalTensor, ...], writer: Any, *, name: str | None) -> None:
    """Write what the file says of the model: its name, size, licence, languages, and how to sample from it."""
    writer.add_type(gguf_package().GGUFType.MODEL)
    if name:
        writer.add_name(name)
    total = sum(math.prod(tensor.shape) for tensor in tensors)
    stacked = [tensor.shape for tensor in tensors if "_exps." in tensor.name]
    experts = sum(math.prod(shape[1:]) for shape in stacked)
    count = stacked[0][0] if stacked else 0
    writer.add_size_label(gguf_package().size_label(total, total - count * experts, experts, count))
    facts = model_facts(checkpoint.storage)
    for key in ("license", "license_name", "license_link"):
        if key in facts:
            getattr(writer, f"add_{key}")(facts[key])
    if "pipeline_tag" in facts:
        writer.add_tags([facts["pipeline_tag"]])
    if "language" in facts:
        writer.add_languages(facts["language"])
    sampling = sampling_settings(checkpoint)
    for key, setting in SAMPLING.items():
        if setting == "top_k" and setting in sampling:
            writer.add_int32(f"general.sampling.{key}", int(sampling[setting]))
        elif setting in sampling:
            writer.add_float32(f"general.sampling.{key}", sampling[setting])


def sampling_settings(checkpoint: Checkpoint) -> dict[str, int | float]:
    """Return how the makers of a model sample from it, under the names of GENERATION_CONFIG."""
    stated: dict[str, Any] = {}
    if GENERATION_CONFIG in checkpoint.companions:
        stated = read_json_object(checkpoint.storage, GENERATION_CONFIG)
    known = {name: stated.get(name) for name in SAMPLING.values()}
    return {
        name: value for name, value in known.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }


def add_hyper_parameters(settings: Settings, writer: Any, tensors: tuple[LogicalTensor, ...]) -> None:
    """Write the shape of the model."""
    architecture = settings.architecture
    for setting in settings_of(architecture):
        absent = (setting.zero or setting.optional) and not settings.get(setting.name)
        if setting.zero and absent:
            _add(writer, setting, 0)
        elif not absent:
            _add(writer, setting, value_of(setting, settings))
    if architecture.encoder:
        writer.add_causal_attention(False)
    add_pooling(settings, writer, tensors)
    writer.add_vocab_size(_rows(tensors))
    if settings.draft_layers:
        writer.add_nextn_predict_layers(settings.draft_layers)
    layers, windows = windowed_layers(settings), architecture.windows
    layers += [bool(settings.get("draft_layer_types"))] * settings.draft_layers
    if windows is not None and any(layers):
        writer.add_sliding_window(settings.number("sliding_window"))
        if windows.listed or layers != [(layer + 1) % windows.period != 0 for layer in range(len(layers))]:
            writer.add_sliding_window_pattern(layers)
    elif architecture.no_window is not None:
        writer.add_sliding_window(settings.number(architecture.no_window))


def _add(writer: Any, setting: Setting, value: Any) -> None:
    """Write a hyper-parameter."""
    if not setting.parameter.startswith("."):
        getattr(writer, f"add_{setting.parameter}")(value)
        return
    key, types = f"{writer.arch}{setting.parameter}", gguf_package().GGUFValueType
    if setting.items:
        writer.add_key_value(key, value, types.ARRAY, types[setting.items])
        return
    add = {bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32}.get(type(value), writer.add_array)
    add(key, value)


def tensor_info(shape: tuple[int, ...], type_name: str, byte_count: int) -> Any:
    """Return what a header says of a tensor besides its name, a gguf.TensorInfo. shape: in the order of torch"""
    return gguf_package().gguf_writer.TensorInfo(shape, TYPE_NUMBERS[type_name], byte_count)


def encode_header(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    *,
    number: int = 0,
    parts: int = 1,
    tensors_of_all: int = 0,
) -> bytes:
    """Return the bytes before the data of a file, padded to ALIGNMENT.

    metadata: gguf.GGUFValue by key, all but what says which part this is; a file of several has it only in the first
    tensors: what `tensor_info` returns of each, by name
    number, parts: which file this is, of how many
    tensors_of_all: of several files, how many tensors they have together
    """
    gguf = gguf_package()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "header"
        writer = gguf.GGUFWriter(path, "")
        writer.kv_data[0] = dict(metadata) if number == 0 else {}
        if parts > 1:
            split, types = gguf.Keys.Split, gguf.GGUFValueType
            writer.add_key_value(split.LLM_KV_SPLIT_NO, number, types.UINT16)
            writer.add_key_value(split.LLM_KV_SPLIT_COUNT, parts, types.UINT16)
            writer.add_key_value(split.LLM_KV_SPLIT_TENSORS_COUNT, tensors_of_all, types.INT32)
        writer.tensors[0] = dict(tensors)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        content = path.read_bytes()
    return content + bytes(aligned(len(content), ALIGNMENT) - len(content))
