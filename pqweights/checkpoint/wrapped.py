"""Weights that were saved from inside something else: prefixes of wrappers come off, adapters and the like are refused.

torch.compile, DistributedDataParallel, FSDP, activation checkpoints, accelerate and Lightning put components into the
names of weights (`_orig_mod.model.norm.weight`), under which no runtime looks for them. PEFT and kohya's scripts save
matrices beside weights, which are not a model (peft/tuners, `adapter_config.json`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.storage import Storage, read_json_object
from pqweights.common.units import first_names
from pqweights.errors import SourceError
from pqweights.models.names import without_numbers

ADAPTER_CONFIG = "adapter_config.json"
# How the files are called that PEFT, mlx-lm and diffusers write.
ADAPTER_FILE = re.compile(r"(adapter_model|adapters|\d+_adapters|pytorch_lora_weights)\.(safetensors|bin|pt)")
# Components that no model of transformers has there: wrappers put them anywhere into a name, but for `module`.
WRAPPERS = re.compile(
    r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module|_fpw_module)\."
    r"|(?:^|(?<=model\.)|(?<=_orig_mod\.))module\."
)
# What a name begins with if a whole model is an attribute of something else.
OWNERS = re.compile(
    r"(?:base_model\.model|(?:model_)?ema(?:_model)?|(?:student|teacher|policy|actor)(?:_model)?|pretrained_model|"
    r"hf_model|wrapped_model|inner_model|_model|(?:model_)?state_dict)\."
)
# The same under any other name, by what follows.
WHOLE_MODEL = re.compile(
    r"(?!(?:backbone|language_model|text_model|radio_model)\.)\w+\."
    r"(?=(?:model|transformer|gpt_neox|backbone)\.(?:\w+\.)?(?:layers|h|blocks?)\.\d+\.|lm_head\.)"
)
# Whole components of the names that adapters have, by the method (peft 0.17, kohya-ss/sd-scripts, LyCORIS).
ADAPTERS = {
    "LoRA": r"lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector|lora_(?:up|down)|lora_[ab]|lora_E|vera_lambda_[bd]|"
    r"randlora_\w+|lora_ga_\w+|trainable_tokens_\w+",
    "IA3": r"ia3_l",
    "LoHa, LoKr or another of LyCORIS": r"hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2)|oft_(?:r|R|s|blocks)|"
    r"boft_[Rs]|hra_u|bone_\w+|miss_\w+|fourierft_spectrum|poly_lora_[AB]|road_\w+|c3a_kernel|shira_\w+|ln_tuning_\w+",
    "prompt tuning": r"prompt_embeddings|adaption_prompt|adaption_gate|prompt_tokens",
    "PEFT (a base layer)": r"base_layer|original_module|modules_to_save",
    "FSDP (flattened parameters)": r"_flat_param|flat_param(?:_\d+)?",
}  # fmt: skip
# Types whose published checkpoints have adapters for images and sound around the weights of the text model.
ADAPTED_TYPES = ("phi4mm", "phi4_multimodal")
ANY_ADAPTER = re.compile(rf"(?:^|\.)({'|'.join(ADAPTERS.values())})(?![^.])")


def check_adapter_files(storage: Storage, weight_files: Iterable[str]) -> None:
    """Raise SourceError if all files that a folder has for weights are called as those of an adapter are."""
    files = list(weight_files)
    if files and all(ADAPTER_FILE.fullmatch(file.rpartition("/")[2]) for file in files):
        raise SourceError(f"{files[0]}: {_not_a_model(storage, None)}")


def unwrapped(
    storage: Storage, stored: Mapping[str, StoredTensor], model_type: object = None
) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Return the stored tensors under the names that the model gives them, and what is to be said of their names.

    model_type: as config.json states it

    Raises SourceError for an adapter, or parts of one beside weights; for several models in one checkpoint, and if two
    tensors would have one name.
    """
    firsts = [*{without_numbers(name): name for name in reversed([*stored])}.values()][::-1]  # of alike experts one
    if model_type not in ADAPTED_TYPES:
        _refuse_adapters(storage, {name: stored[name] for name in firsts})
    if not any(map(WRAPPERS.search, firsts)) and not _owner(firsts):
        return dict(stored), ()
    plain = {name: WRAPPERS.sub("", name) for name in stored}
    owner = _owner(plain.values())
    result: dict[str, StoredTensor] = {}
    for old, name in plain.items():
        name = name.removeprefix(owner)
        if name in result:
            old = next(other for other, of in plain.items() if other != name == of.removeprefix(owner))
            raise SourceError(
                f"{stored[old].file}: tensor {old!r}: without the prefix of its wrapper it would be called {name!r}, "
                "like another tensor: save the state of the model itself, without the wrapper"
            )
        result[name] = stored[old] if name == old else stored[old]._replace(name=name)
    renamed = [old for old, name in plain.items() if name.removeprefix(owner) != old]
    if not renamed:
        return result, ()
    taken = dict.fromkeys([*(part for old in renamed for part in WRAPPERS.findall(old)), *filter(None, [owner])])
    return result, (
        f"{', '.join(taken)}: removed from the names of {len(renamed)} of {len(stored)} tensors, where a wrapper of "
        f"the training had put them ({first_names(renamed)})",
    )


def _owner(names: Iterable[str]) -> str:
    """Return what all names begin with that is not the model's; empty if there is no such prefix.

    Raises SourceError if only some of them begin with it, so that the others are of something else.
    """
    rests, owner = [*names], ""
    while match := next(filter(None, (OWNERS.match(rest) or WHOLE_MODEL.match(rest) for rest in rests)), None):
        others = [rest for rest in rests if not rest.startswith(match[0])]
        if others:
            if not OWNERS.match(match[0]):
                break
            raise SourceError(
                f"tensor {owner + others[0]!r} does not begin with {owner + match[0]!r} as others do, so they belong "
                "to several models, or to more than a model: save the state of the model to be quantized alone"
            )
        rests, owner = [rest.removeprefix(match[0]) for rest in rests], owner + match[0]
    return owner


def _refuse_adapters(storage: Storage, stored: Mapping[str, StoredTensor]) -> None:
    """Raise SourceError for the matrices of an adapter, and for weights that one was put around."""
    for name in stored:
        match = ANY_ADAPTER.search(name)
        if match is not None:
            method = next(method for method, names in ADAPTERS.items() if re.fullmatch(names, match[1]))
            raise SourceError(f"{stored[name].file}: tensor {name!r}: {_not_a_model(storage, method)}")


def _not_a_model(storage: Storage, method: str | None) -> str:
    """Say what an adapter is of, and what to do. method: by the name of a tensor; None if only the file tells"""
    if method is not None and method.startswith("FSDP"):
        return f"a part of {method}, not a weight: save the full state of the model (accelerate merge-weights)"
    named: dict[str, Any] = {}
    if ADAPTER_CONFIG in storage.files():
        with contextlib.suppress(SourceError):
            named = read_json_object(storage, ADAPTER_CONFIG)
    kind = next((named[key] for key in ("peft_type", "fine_tune_type") if isinstance(named.get(key), str)), method)
    keys = ("base_model_name_or_path", "model")
    base = next((named[key] for key in keys if isinstance(named.get(key), str) and named[key].isprintable()), None)
    return (
        f"part of an adapter{f' ({kind[:40]})' if kind else ''} of {base[:200] if base else 'another model'}, not of a "
        "whole model: give that model as the source, and this folder as `adapter`"
    )
