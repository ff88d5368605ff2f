"""What a user writes for a method, and the models that a method refuses: every message."""

from __future__ import annotations

import re
from typing import Any

import pytest
import transformers
from caches import TEXT, made, model

from pqweights.errors import OptionError
from pqweights.runtime.kv.cache import kv_cache
from pqweights.runtime.kv.schemes import SCHEMES, parse_spec

WRONG = {
    "polr": "no method is called 'polr'; the nearest is 'polar'; expected klt, hadamard, polar-rope, polar, none",
    "": "no method is called ''; expected klt",
    "polar rope": "the nearest is 'polar-rope'",
    "hadamard:9": "hadamard has no option '9'; expected 2 to 8, bits=N, keys=N, values=N, centred=N, residual=N",
    "hadamard:bit=4": "hadamard has no option 'bit'; the nearest is 'bits'",
    "hadamard:bits": "bits: expected a whole number from 2 to 8, found ''",
    "hadamard:bits=3.5": "bits: expected a whole number from 2 to 8, found '3.5'",
    "hadamard:centred=2": "centred: expected 0 or 1, found '2'",
    "hadamard:3,bits=4": "bits is given twice",
    "polar:residual=-1": "residual: expected a whole number from 0 to 1048575, found '-1'",
    "polar:4": "polar has no option '4'; expected residual=N",
    "polar-rope:m4n7": "polar-rope has no option 'm4n7'; the nearest is 'm4n",
    "polar-rope:values=3": "values: expected 2 or 4 or 16, found '3'",
    "klt:7": "klt has no option '7'; expected 1 to 6, bits=N",
    "klt:bits=2.1": "bits: expected a multiple of 0.25 from 1 to 6, found '2.1'",
    "kivi:4": "no method is called 'kivi'",
    "none:residual=3": "none has no option 'residual'; expected none",
}


@pytest.mark.parametrize("spec", WRONG)
def test_wrong_specs_are_refused_by_name(spec):
    with pytest.raises(OptionError, match=re.escape(WRONG[spec])) as found:
        parse_spec(spec)
    assert "\n" not in str(found.value) and str(found.value).startswith("KV cache")
    assert spec.partition(":")[0] in str(found.value)


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


def refused(spec: str, config: Any) -> str:
    with pytest.raises(OptionError) as found:
        kv_cache(config, spec)
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (transformers.DeepseekV2Config(num_hidden_layers=2), "multi-head latent attention"),
        (transformers.DeepseekV3Config(), "multi-head latent attention"),
        (transformers.MambaConfig(num_hidden_layers=1), "a decoder with attention"),
        (transformers.T5Config(), "a decoder with attention"),
        (transformers.BartConfig(), "a decoder with attention"),
        (transformers.MistralConfig(sliding_window=16, num_hidden_layers=2), "sliding_attention"),
        (transformers.FalconH1Config(num_hidden_layers=2), "hybrid"),
        (transformers.LlamaConfig(**{**TEXT, "head_dim": 24}), "multiple of 16 coordinates, found 24"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_models_that_a_method_does_not_fit_are_refused(config, said):
    assert said in refused("polar", config)
    if said == "a decoder with attention":
        assert said in refused("none", config) and said in refused("klt", config)


def test_heads_must_fit_the_method():
    kv_cache(transformers.LlamaConfig(**{**TEXT, "head_dim": 24}), "hadamard:3")
    config = transformers.LlamaConfig(**{**TEXT, "head_dim": 20})
    for spec in set(SCHEMES) - {"none", "polar"}:
        assert "multiple of 8 coordinates, found 20" in refused(spec, config)
    kv_cache(config, "none")


def test_models_without_what_a_method_rests_on_are_refused():
    assert "rotary position embedding" in refused("polar-rope", model("gpt2").config)
    assert "the model itself" in refused("klt", model("llama").config)
    for name in ("gpt2", "gpt_neox"):
        assert "layer 0: " in refused("klt", model(name))


def test_sizes_are_checked_layer_by_layer_as_well():
    import torch

    cache = kv_cache(made("llama").config, "polar")
    with pytest.raises(OptionError, match="expected heads of a multiple of 16 coordinates, found 8"):
        cache.layers[0].update(torch.zeros(1, 2, 3, 32), torch.zeros(1, 2, 3, 8))
