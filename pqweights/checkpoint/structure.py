"""Which layers and shapes config.json promises of a text model, compared with the names and shapes of its tensors.

Only headers are looked at. Each difference is a sentence that says what transformers makes of it; a configuration that
does not state something is taken to promise nothing of it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pqweights.checkpoint.positions import windows
from pqweights.common.units import counted, first_names
from pqweights.models import described, has_trait, text_config
from pqweights.models.conventions import DRAFT_PARTS, DRAFTS, LM_HEAD, TEXT_LAYERS
from pqweights.models.llama_cpp import first_class
from pqweights.models.names import is_embedding, tower_of
from pqweights.models.optional_parts import missing_parts, unused_parts
from pqweights.models.traits import Trait

Config = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
# What configurations call the number of layers, and of experts.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_NUMBER = re.compile(r"\.\d+\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
REFUSED = "transformers does not load that"
RANDOM = "transformers computes with random values instead"
_PREDICTING = ("ForCausalLM", "LMHeadModel")
TOWERS = {"vision_config": "images", "audio_config": "sound"}


def differences(shapes: Shapes, config: Config) -> Iterator[str]:
    """Yield where the tensors of a model, by name, are not those that its configuration promises."""
    text = text_config(config)
    if any(has_trait(part.get("model_type"), Trait.OTHER_SIZES) for part in (config, text)):
        return
    layers: dict[int, set[str]] = defaultdict(set)
    for name in shapes:
        if (match := TEXT_LAYERS.match(name)) is not None:
            layers[int(match[1])].add(name[match.end() :])
    count = next((n for key in LAYERS if _is_count(n := text.get(key))), None)
    if layers and count is not None:
        yield from _of_layers(layers, count, config, any(map(DRAFT_PARTS.search, shapes)))
        yield from _within_layers(layers, count, text)
        yield from _across_layers(shapes, count, text)
        yield from _of_windows(text)
        yield from _of_optional_parts(layers, count, text)
        yield from _of_heads(shapes, config)
        yield from _of_parts(shapes, layers, text)
    yield from _of_experts(layers, text)
    yield from _of_shapes(shapes, text)
    yield from _of_towers(shapes, config)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def counts_drafts(names: Sequence[str], config: Config) -> bool:
    """Whether layers behind the last one predict further tokens: by the configuration, or by what they hold."""
    stated = any(_is_count(part.get(key)) for part in (config, text_config(config)) for key in DRAFTS)
    return stated or any(DRAFT_PARTS.search(name) for name in names)


def unused_tensors(names: Sequence[str], config: Config) -> dict[str, str]:
    """Return which tensors of a text model its class has no place for, with reasons: biases, norms and whole layers."""
    text = text_config(config)
    count = next((n for key in LAYERS if _is_count(n := text.get(key))), None)
    unused = {name: f"config.json: {key}" for name, key in unused_parts(names, text).items()}
    layers = {name: int(match[1]) for name in names if (match := TEXT_LAYERS.match(name))}
    behind = [name for name, layer in layers.items() if count is not None and layer >= count]
    if not counts_drafts(behind, config):
        unused |= dict.fromkeys(behind, f"after the {count} layers that config.json states")
    return unused


def _of_layers(layers: Mapping[int, set[str]], count: int, config: Config, has_drafts: bool) -> Iterator[str]:
    """Yield which layers are missing, and which are more than the configuration counts."""
    missing = count - sum(number < count for number in layers)
    if missing > 0:
        first = next(number for number in range(len(layers) + 1) if number not in layers)
        absent = f"layer {first} is" if missing == 1 else f"{missing} of them, from layer {first} on, are"
        yield f"config.json states {count} layers, but {absent} not stored: {RANDOM}"
    behind = sorted(number for number in layers if number >= count)
    stated = next((key for part in (config, text_config(config)) for key in DRAFTS if _is_count(part.get(key))), None)
    if stated is not None and not behind and not has_drafts:
        yield f"config.json states {stated}, but no layer that predicts further tokens is stored: results have none"
    if behind and not counts_drafts([name for number in behind for name in layers[number]], config):
        yield (
            f"the files hold {counted(len(behind), 'layer')} more than the {count} that config.json states (from "
            f"{behind[0]} on): transformers computes without them"
        )
    types = text_config(config).get("layer_types")
    if isinstance(types, list) and len(types) != count:
        yield (
            f"config.json names {len(types)} layer_types for {count} layers: transformers does not load the model; "
            "give as many as there are layers"
        )


def _within_layers(layers: Mapping[int, set[str]], count: int, text: Config) -> Iterator[str]:
    """Yield what single layers lack that others of their kind have."""
    if _is_count(text.get("num_kv_shared_layers")):
        return
    kinds = _kinds(layers, count, text)
    alike: dict[tuple[str, frozenset[str]], list[int]] = defaultdict(list)
    for number, names in layers.items():
        if number < len(kinds):
            alike[str(kinds[number]), frozenset(re.sub(r"\.\d+\.", ".*.", name) for name in names)].append(number)
    for (kind, held), numbers in alike.items():
        for (other, more), fuller in alike.items():
            if other == kind and held < more and len(numbers) <= len(fuller):
                lacking = sorted(more - held)
                yield f"layer {numbers[0]} lacks {first_names(lacking)}, which layer {fuller[0]} has: {RANDOM}"
                return


def _kinds(layers: Iterable[int], count: int, text: Config) -> list[Any]:
    """Return the kinds of layers, of as many as are stored; None where the configuration does not say."""
    listed = [types for key, types in text.items() if key.endswith("_types") and isinstance(types, list)]
    listed = [types for types in listed if len(types) == count]
    return list(zip(*listed, strict=True)) if listed else [None] * min(count, max(layers) + 1)


def _across_layers(shapes: Shapes, count: int, text: Config) -> Iterator[str]:
    """Yield what has another shape in one layer than in all others of its kind."""
    if any(isinstance(size, list) and len(size) == count and all(map(_is_count, size)) for size in text.values()):
        return  # sizes layer by layer
    numbered = [(name, int(match[1])) for name in shapes if (match := TEXT_LAYERS.match(name))]
    kinds = _kinds([number for _, number in numbered], count, text)
    alike: dict[tuple[str, str], dict[tuple[int, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, number in numbered:
        if number < len(kinds):
            alike[str(kinds[number]), re.sub(r"\.\d+\.", ".*.", name)][shapes[name]].append(name)
    for by_shape in alike.values():
        few, *more = sorted(by_shape.values(), key=len)
        if len(few) == 1 and len(more) == 1 and len(more[0]) > 1:
            yield (
                f"{few[0]} is of {_times(shapes[few[0]])} and {more[0][0]} of {_times(shapes[more[0][0]])}, which "
                f"config.json does not say: {REFUSED}"
            )
            return


def _of_windows(text: Config) -> Iterator[str]:
    """Yield if layers have a window of no tokens."""
    window = text.get("sliding_window")
    if isinstance(window, int) and window <= 0 and any(windows({**text, "sliding_window": 1})):
        yield (
            f"config.json says sliding_window {window}, with which transformers cannot compute: results are made as "
            "for a model without windows; set it to null if there are none"
        )


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _of_optional_parts(layers: Mapping[int, set[str]], count: int, text: Config) -> Iterator[str]:
    """Yield which biases and norms are there and not promised, or promised and not there."""
    names = [f"layers.{number}.{name}" for number, held in layers.items() if number < count for name in held]
    for key in missing_parts(names, text):
        what = "norm: transformers computes with ones" if "norm" in key else "bias: transformers computes with zeros"
        yield f"config.json says {key}, but no layer has such a {what}"
    unused = unused_parts(names, text)
    for key in dict.fromkeys(unused.values()):
        having = sorted({_NUMBER.split(name, 1)[1] for name, of in unused.items() if of == key})
        stated = f"says {key} {str(text[key]).lower()}" if key in text else f"does not state {key}"
        yield f"config.json {stated}, but layers have {first_names(having)}: transformers ignores them"


def _of_shapes(shapes: Shapes, text: Config) -> Iterator[str]:
    """Yield what has another shape than the configuration says: transformers does not load it."""
    embeddings = [name for name, shape in shapes.items() if len(shape) == 2 and is_embedding(name)]
    for axis, key in enumerate(("vocab_size", "hidden_size")):
        size = text.get(key)
        if len(embeddings) == 1 and _is_count(size) and shapes[embeddings[0]][axis] != size:
            found, what = shapes[embeddings[0]][axis], ("rows", "columns")[axis]
            yield f"config.json says {key} {size}, and {embeddings[0]} has {found} {what}: {REFUSED}"
    # Kinds of layers may differ, and have keys of their own.
    widths = {size for key, size in text.items() if re.search("intermediate|ffn|mlp", key) and _is_count(size)}
    down = next((n for n in shapes if n.endswith(".mlp.down_proj.weight") and TEXT_LAYERS.match(n)), None)
    if down is not None and _is_count(width := text.get("intermediate_size")) and shapes[down][-1] not in widths:
        yield f"config.json says intermediate_size {width}, but {down} has {shapes[down][-1]} columns: {REFUSED}"
    heads, width = text.get("num_attention_heads"), text.get("head_dim")
    groups = text.get("num_key_value_heads", text.get("num_attention_groups", heads))
    if _is_count(heads) and _is_count(text.get("hidden_size")) and width is None:
        width = text["hidden_size"] // heads
    for last, size in (("k_proj", width), ("v_proj", text.get("v_head_dim") or width)):
        names = [name for name in shapes if name.endswith(f".self_attn.{last}.weight") and TEXT_LAYERS.match(name)]
        rows = {shapes[name][0] for name in names if len(shapes[name]) == 2}
        # Kinds of layers may differ in their heads, and the configuration states those of one kind.
        if rows and size is not None and _is_count(groups) and groups * size not in rows and not _is_linear(text):
            wrong = f"{names[0]} has {shapes[names[0]][0]} rows"
            yield f"config.json says {groups} heads of {size} for keys, but {wrong}: {REFUSED}"
            return


def _is_linear(text: Config) -> bool:
    """Whether layers have linear attention, whose heads have sizes of their own under the same names."""
    return any(key.startswith("linear_") for key in text)


def _of_experts(layers: Mapping[int, set[str]], text: Config) -> Iterator[str]:
    """Yield if other numbers of experts are stored, one by one, than the configuration counts."""
    count = next((n for key in EXPERTS if _is_count(n := text.get(key))), None)
    for number, names in layers.items() if count is not None else ():
        experts = {int(match[1]) for match in map(_EXPERT.search, names) if match}
        if experts and len(experts) != count:
            yield f"config.json states {count} experts, but layer {number} has {len(experts)}: {REFUSED}"
            return


def _of_heads(shapes: Shapes, config: Config) -> Iterator[str]:
    """Yield if there are no embeddings; or no head, and it is not to be the same as these."""
    tokens, text_class = text_config(config).get("vocab_size"), first_class(config)
    outside = {name: shape for name, shape in shapes.items() if len(shape) == 2 and not _NUMBER.search(name)}
    of_tokens = [name for name, shape in outside.items() if shape[0] == tokens and "per_layer" not in name]
    heads = [name for name in shapes if name.endswith(".weight") and LM_HEAD.fullmatch(name.split(".")[-2])]
    has_embeddings = any(map(is_embedding, shapes)) or any(name not in heads for name in of_tokens)
    if _is_count(tokens) and not has_embeddings and text_class.endswith((*_PREDICTING, "ForConditionalGeneration")):
        yield f"the embeddings of tokens are not stored: {RANDOM}"
    predicts = text_class.endswith(_PREDICTING)
    other_head = any(not is_embedding(name) for name in of_tokens)
    if predicts and not heads and not other_head and config.get("tie_word_embeddings") is False:
        yield f"config.json says that the head has weights of its own, but none are stored: {RANDOM}"


def _of_parts(shapes: Shapes, layers: Mapping[int, set[str]], text: Config) -> Iterator[str]:
    """Yield what no layer has of that which models of this type have, and whether the last norm is missing."""
    kind = text.get("model_type")
    always = described(kind).always.split()
    if not always:
        return
    held = {name for names in layers.values() for name in names if not name.endswith(".bias")}
    absent = [part for part in always if not any(name.startswith(f"{part}.") for name in held)]
    if absent:
        yield f"no layer has {first_names(absent)}, which a model of the type {kind} has: {RANDOM}"
    if not any(
        f".{name}".endswith(".norm.weight") and not TEXT_LAYERS.match(name) and not tower_of(name) for name in shapes
    ):
        yield f"the norm behind the last layer is not stored: {RANDOM}"


def _of_towers(shapes: Shapes, config: Config) -> Iterator[str]:
    """Yield the towers that are described and not stored."""
    if not first_class(config).endswith(("ForConditionalGeneration", "ForImageTextToText")):
        return
    for key, what in TOWERS.items():
        has_tower = any(tower_of(name) or (_NUMBER.search(name) and not TEXT_LAYERS.match(name)) for name in shapes)
        if isinstance(config.get(key), Mapping) and not has_tower:
            yield f"config.json describes a tower for {what} ({key}), but none is stored: {RANDOM}"
