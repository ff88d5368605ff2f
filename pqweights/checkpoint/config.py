"""What a source says of its model: its config.json, which results have edited, and licence and languages in its card.

config.json is never saved through transformers, which would rename keys. A card is README.md with YAML between two
lines of dashes at its top (https://huggingface.co/docs/hub/model-cards). It may hold anything: a field of the wrong
type is ignored.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import yaml

from pqweights.checkpoint.names import CARD_FILE
from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.checkpoint.storage import Storage, read_file
from pqweights.models import text_config, text_model
from pqweights.models.conventions import DRAFT_PARTS, DRAFTS, PARTS
from pqweights.models.names import draft_layers, predicts_further

CONFIG_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
# transformers loads the weight file that this key names; if there is no such file, it stops with the value in its
# message. Without the guard and without pqweights, it would ignore our quantization_config and load random weights.
GUARD_KEY = "transformers_weights"
GUARD = (
    "this model is a pqweights master: run `import pqweights` before loading it (pip install "
    "'pqweights[transformers]'), or convert it with `pqweights export --target bf16`"
)

# The end of an architecture's name -> the auto class of transformers that loads such models.
AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForConditionalGeneration": "AutoModelForImageTextToText",
    "ForImageTextToText": "AutoModelForImageTextToText",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
    "ForMaskedLM": "AutoModelForMaskedLM",
}


def model_dtype(config: dict[str, Any] | None, tensors: Sequence[LogicalTensor]) -> str:
    """Return the dtype of a model, BF16, F16, F32 or F64: the one in its configuration, else that of most elements."""
    names = {value: key for key, value in CONFIG_DTYPES.items()}
    for key in ("dtype", "torch_dtype"):
        named = str((config or {}).get(key, "")).removeprefix("torch.")
        if named in names:
            return names[named]
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.plain_dtype in CONFIG_DTYPES:
            counts[tensor.plain_dtype] += element_count(tensor)
    return counts.most_common(1)[0][0] if counts else "F32"


def quantization_settings(config: dict[str, Any] | None) -> dict[str, Any]:
    """Return the quantization_config of a model, or of the text part of a multi-modal model; {} if there is none."""
    if config is None:
        return {}
    if "quantization" in config:  # MLX, which repeats the key as a quantization_config without a method
        of_mlx = config["quantization"]
        return {**(of_mlx if isinstance(of_mlx, dict) else {}), "quant_method": "mlx"}
    for part in (config, text_config(config)):
        for key in QUANTIZATION_KEYS:
            if isinstance(part.get(key), dict):
                settings: dict[str, Any] = part[key]
                return settings
    return {}


def edited_config(
    config: dict[str, Any] | None,
    dtype: str,
    *,
    old_dtype: str,
    quantization: dict[str, Any] | None = None,
    tensors: Sequence[LogicalTensor] = (),
) -> dict[str, Any]:
    """Return a copy of a configuration for a result with another dtype and another quantization_config, or none.

    config: the source's configuration; None gives a new one
    dtype: the dtype of the result's model, BF16, F16, F32 or F64
    old_dtype: that of the source's model; a nested configuration that names another dtype keeps it
    quantization: the quantization_config of the result
    tensors: those of a result that declares how many of its layers predict further tokens

    The dtype is stated wherever transformers looks for it: without one, transformers takes the dtype of the first
        tensor that it meets, which would be that of our float16 norms. The key `transformers_weights` is dropped,
        because the weights get other files.
    """
    result = copy.deepcopy(config) if config is not None else {}
    for part in _parts(result):
        for key in (*QUANTIZATION_KEYS, GUARD_KEY, "quantization"):
            part.pop(key, None)
        stated = str(part.get("dtype") or part.get("torch_dtype") or CONFIG_DTYPES[old_dtype]).removeprefix("torch.")
        part["dtype"] = CONFIG_DTYPES[dtype] if stated == CONFIG_DTYPES[old_dtype] else stated
        if "torch_dtype" in part:
            part["torch_dtype"] = part["dtype"]
    if quantization is not None:
        result["quantization_config"] = quantization
    if tensors:
        declare_drafts(result, [tensor.name for tensor in tensors])
    return result


def declare_drafts(config: dict[str, Any], names: Sequence[str]) -> None:
    """State in a configuration how many layers predict further tokens. names: those of the model's tensors

    A number that it states stays, as families count differently, unless there is no such layer.
    """
    layers = text_model(config).layers
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    stated = [(part, key) for part in _parts(config) for key in DRAFTS if part.get(key)]
    if not stated and any(map(DRAFT_PARTS.search, names)) and (drafts := draft_layers(names, layers)):
        text[DRAFTS[0]] = drafts
    if not any(predicts_further(name, layers or sys.maxsize) for name in names):
        for part, key in stated:
            part[key] = type(part[key])()


def guarded_config(config: dict[str, Any], quantization: dict[str, Any]) -> dict[str, Any]:
    """Return an edited configuration as that of a master: with our quantization_config and the guard for transformers.

    Nested configurations get the guard, too: AutoModelForCausalLM loads a model of images and text by its text_config.
    """
    result = copy.deepcopy(config)
    for part in _parts(result):
        part[GUARD_KEY] = GUARD
    return {**result, "quantization_config": quantization}


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A configuration and the nested configurations in it."""
    return [config, *(value for key, value in config.items() if _is_nested(key, value))]


def _is_nested(key: str, value: Any) -> bool:
    """Whether an entry of a configuration is the configuration of a part of the model, rather than settings.

    Other entries are called `_config`, too, such as `per_layer_config`, whose keys are the numbers of layers.
    """
    if not isinstance(value, dict) or not key.endswith("_config") or key in QUANTIZATION_KEYS:
        return False
    return "model_type" in value or key in PARTS


# --- cards ---

# The fields that are text; `language` is a list of texts.
TEXT_KEYS = ("license", "license_name", "license_link", "pipeline_tag")
MAX_CARD_BYTES = 4_000_000
MAX_FRONT_MATTER = 64_000
MAX_TEXT = 300
MAX_LANGUAGES = 500
FENCE = "---"


def model_facts(storage: Storage) -> dict[str, Any]:
    """Return what is known of the model in a folder or repository; what is unknown is absent.

    id, revision: the repository on the Hub and its commit
    license, license_name, license_link, pipeline_tag, language: as in its card
    """
    facts: dict[str, Any] = {} if storage.origin is None else dict(storage.origin._asdict())
    return facts | checked_facts(_card_fields(storage))


def original_of(storage: Storage) -> str | None:
    """Return the model from which its card says that a model was made, if it names one alone."""
    named = _card_fields(storage).get("base_model")
    named = named[0] if isinstance(named, list) and len(named) == 1 else named
    return named if _is_text(named) else None


def _card_fields(storage: Storage) -> dict[str, Any]:
    """Return the YAML of a model's card; {} without one."""
    state = storage.files().get(CARD_FILE)
    if state is None or state.byte_count > MAX_CARD_BYTES:
        return {}
    return front_matter(read_file(storage, CARD_FILE).decode("utf-8", "replace"))[0]


def known_facts(model: dict[str, Any]) -> dict[str, Any]:
    """Return what may be known of a model (model_facts), as far as the types of fields are right."""
    return {key: model[key] for key in ("id", "revision") if isinstance(model.get(key), str)} | checked_facts(model)


def checked_facts(fields: dict[str, Any]) -> dict[str, Any]:
    """Return licence, languages and task from the fields of a card or manifest, as far as their types are right."""
    facts: dict[str, Any] = {key: fields[key] for key in TEXT_KEYS if _is_text(fields.get(key))}
    languages = fields.get("language")
    languages = [languages] if isinstance(languages, str) else languages
    # YAML 1.1 reads `no`, Norwegian, as false.
    languages = ["no" if name is False else name for name in languages] if isinstance(languages, list) else []
    if languages and len(languages) <= MAX_LANGUAGES and all(map(_is_text, languages)):
        facts["language"] = languages
    return facts


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT and value.isprintable()


class _YamlLoader(yaml.SafeLoader):
    """A safe loader without merges of mappings, because copies of copies could fill the memory."""

    def flatten_mapping(self, node: Any) -> None:
        """Leave `<<` a key like any other."""


class _UniqueKeysLoader(_YamlLoader):
    """One that refuses a key that is there twice; others take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping whose keys differ."""
        known = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in known:
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} is there twice", problem_mark=key.start_mark)
                known.add(key.value)
        return super().construct_mapping(node, deep)


def load_yaml(text: str, *, with_unique_keys: bool = False) -> Any:
    """Parse a YAML text. Raises YAMLError, ValueError, TypeError or RecursionError if it is none."""
    return yaml.load(text, _UniqueKeysLoader if with_unique_keys else _YamlLoader)  # SafeLoaders


def front_matter(card: str) -> tuple[dict[str, Any], str]:
    """Split a card into the YAML at its top and the text below; the YAML is empty if there is none or it is invalid."""
    lines = card.removeprefix("\ufeff").splitlines(keepends=True)
    if not lines or lines[0].rstrip() != FENCE:
        return {}, card
    end = next((n for n, line in enumerate(lines[1:], 1) if line.rstrip() == FENCE), None)
    if end is None:
        return {}, card
    body = "".join(lines[end + 1 :])
    text = "".join(lines[1:end])
    if len(text) > MAX_FRONT_MATTER:
        return {}, body
    try:
        fields = load_yaml(text)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        return {}, body
    return (fields if isinstance(fields, dict) else {}), body
