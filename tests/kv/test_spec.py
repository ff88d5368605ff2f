"""What a user writes for a method, and the models that a method refuses: every message."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from caches import TEXT, made, model
from commands import raises

from pqweights.errors import OptionError
from pqweights.runtime.kv.cache import kv_cache
from pqweights.runtime.kv.schemes import SCHEMES, parse_spec

WRONG = {
    "polr": "'polr' 'polar' klt, hadamard, polar-rope, polar, none",
    "": "'' klt",
    "polar rope": "'polar-rope'",
    "hadamard:9": "hadamard '9' bits=N, keys=N, values=N, centred=N, residual=N",
    "hadamard:bit=4": "hadamard 'bit' 'bits'",
    "hadamard:bits": "bits 2 to 8 ''",
    "hadamard:bits=3.5": "bits 2 to 8 '3.5'",
    "hadamard:centred=2": "centred '2'",
    "hadamard:3,bits=4": "bits twice",
    "polar:residual=-1": "residual 1048575 '-1'",
    "polar:4": "polar '4' residual=N",
    "polar-rope:m4n7": "polar-rope 'm4n7' 'm4n",
    "polar-rope:values=3": "values 2 4 16 '3'",
    "klt:7": "klt '7' bits=N",
    "klt:bits=2.1": "bits 0.25 '2.1'",
    "kivi:4": "'kivi' klt",
    "none:residual=3": "none 'residual'",
}


@pytest.mark.parametrize("spec", WRONG)
def test_wrong_specs_are_refused_by_name(spec):
    with raises(OptionError, "KV cache", spec.partition(":")[0], *WRONG[spec].split()):
        parse_spec(spec)


@pytest.mark.parametrize("name", SCHEMES)
def test_written_specs_mean_the_same_again(name):
    """Each value of each option alone, and all options with their first or last values."""
    choices = {key: list(values)[:: max(1, len(values) // 40)] for key, values in SCHEMES[name].choices.items()}
    given: list[dict[str, Any]] = [{key: value} for key, values in choices.items() for value in values]
    given += [{key: values[end] for key, values in choices.items()} for end in (0, -1)]
    for options in given:
        scheme = SCHEMES[name](**options)
        written = name + ":" * bool(options) + ",".join(f"{key}={value}" for key, value in options.items())
        assert parse_spec(str(scheme)) == parse_spec(written) == scheme


@pytest.mark.parametrize("name", SCHEMES)
def test_words_are_shorthands(name):
    for word, options in SCHEMES[name].words.items():
        scheme = parse_spec(f"{name}:{word}")
        assert scheme == SCHEMES[name](**options) == parse_spec(str(scheme))  # type: ignore[arg-type]
    assert parse_spec(name) == SCHEMES[name]()


def test_spaces_after_commas_and_equal_repetitions_are_taken():
    assert parse_spec("hadamard:3, keys=4") == parse_spec("hadamard:bits=3,keys=4,3")


# --- models ---


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (transformers.DeepseekV2Config(num_hidden_layers=2), "latent"),
        (transformers.DeepseekV3Config(), "latent"),
        (transformers.MambaConfig(num_hidden_layers=1), "decoder"),
        (transformers.T5Config(), "decoder"),
        (transformers.BartConfig(), "decoder"),
        (transformers.MistralConfig(sliding_window=16, num_hidden_layers=2), "sliding_attention"),
        (transformers.FalconH1Config(num_hidden_layers=2), "hybrid"),
        (transformers.LlamaConfig(**{**TEXT, "head_dim": 24}), 24),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_models_that_a_method_does_not_fit_are_refused(config, named):
    for spec in ("polar", "none", "klt") if named == "decoder" else ("polar",):
        with raises(OptionError, named):
            kv_cache(config, spec)


def test_heads_must_fit_the_method():
    kv_cache(transformers.LlamaConfig(**{**TEXT, "head_dim": 24}), "hadamard:3")
    config = transformers.LlamaConfig(**{**TEXT, "head_dim": 20})
    for spec in set(SCHEMES) - {"none", "polar"}:
        with raises(OptionError, 8, 20):
            kv_cache(config, spec)
    kv_cache(config, "none")


def test_models_without_what_a_method_rests_on_are_refused():
    for spec, net, named in (
        ("polar-rope", model("gpt2").config, "rotary"),
        ("klt", model("llama").config, "the model itself"),
        ("klt", model("gpt2"), "layer 0"),
        ("klt", model("gpt_neox"), "layer 0"),
    ):
        with raises(OptionError, named):
            kv_cache(net, spec)


def test_sizes_are_checked_layer_by_layer_as_well():
    import torch

    cache = kv_cache(made("llama").config, "polar")
    with raises(OptionError, 16, 8):
        cache.layers[0].update(torch.zeros(1, 2, 3, 32), torch.zeros(1, 2, 3, 8))
