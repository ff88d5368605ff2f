"""Caches in files: what is loaded is what was saved, and files that are damaged or of another model are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cached_models import causal, hybrid_model, layer_states, one_by_one, read, tokens
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import pqweights
from pqweights.errors import OptionError, OutputError, SourceError
from pqweights.inference.kv.cache import KVCache, kv_cache
from pqweights.inference.kv.files import KEY, load_kv_cache, save_kv_cache

SPECS = (
    "klt:3",
    "hadamard:3",
    "hadamard:3,residual=16",
    "hadamard:keys=5,values=2,centred=0",
    "polar-rope",
    "polar-rope:m4n2,values=2,residual=0",
    "polar-rope:values=16",
    "polar",
    "polar:online",
    "none",
)
PROMPT, NEXT = 150, 5
Tensors = dict[str, Tensor]
About = dict[str, Any]


@pytest.fixture(scope="module")
def llama() -> Any:
    return causal()


def filled(net: Any, spec: str, batch: int = 1, count: int = PROMPT) -> KVCache:
    cache = kv_cache(net, spec)
    read(net, cache, tokens(batch, count))
    return cache


def check_continues_alike(net: Any, cache: KVCache, found: KVCache, batch: int = 1) -> None:
    """What follows is the same to the bit, also when further tokens are packed."""
    following = tokens(batch, NEXT + 40, seed=8)
    for ids in (following[:, :NEXT], following[:, NEXT:]):
        assert torch.equal(one_by_one(net, found, ids), one_by_one(net, cache, ids))


# --- round trips ---


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_a_loaded_cache_predicts_the_same(spec: str, batch: int, llama: Any, tmp_path: Path) -> None:
    cache, ids = filled(llama, spec, batch), tokens(batch, PROMPT)
    save_kv_cache(cache, tmp_path / "cache.safetensors", ids=ids)
    found, known = load_kv_cache(tmp_path / "cache.safetensors", llama)
    assert known is not None and torch.equal(known, ids)
    assert (found.spec, found.get_seq_length()) == (cache.spec, PROMPT)
    assert found.bits_per_coordinate() == pytest.approx(cache.bits_per_coordinate(), rel=0.05)
    check_continues_alike(llama, cache, found, batch)


def test_ids_are_not_needed(llama: Any, tmp_path: Path) -> None:
    save_kv_cache(filled(llama, "hadamard:4"), tmp_path / "cache")
    assert load_kv_cache(str(tmp_path / "cache"), llama)[1] is None
    assert pqweights.load_kv_cache is load_kv_cache and pqweights.save_kv_cache is save_kv_cache


@pytest.mark.parametrize("spec", ["hadamard:3", "polar-rope:residual=0", "klt:2.5", "none"])
def test_cropped_and_chosen_caches_are_saved(spec: str, llama: Any, tmp_path: Path) -> None:
    cache = filled(llama, spec, batch=2)
    cache.crop(-45)
    cache.batch_select_indices(torch.tensor([1]))
    one_by_one(llama, cache, tokens(1, 40, seed=5))  # there are several chunks then
    save_kv_cache(cache, tmp_path / "cache")
    check_continues_alike(llama, cache, load_kv_cache(tmp_path / "cache", llama)[0])


@pytest.mark.parametrize("count", [10, 31, 32, 200])
def test_sliding_layers_are_saved_beside_packed_ones(count: int, tmp_path: Path) -> None:
    net = causal("Gemma2", sliding_window=32)
    cache = filled(net, "hadamard:4", count=count)
    save_kv_cache(cache, tmp_path / "cache")
    found, _ = load_kv_cache(tmp_path / "cache", net)
    assert {type(layer).__name__ for layer in found.layers} == {"PackedLayer", "DynamicSlidingWindowLayer"}
    check_continues_alike(net, cache, found)


def test_a_sliding_layer_that_records_its_past_is_cut(tmp_path: Path) -> None:
    net = causal("Gemma2", sliding_window=32)
    cache = kv_cache(net, "hadamard:4")
    for layer in cache.layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    read(net, cache, tokens(1, PROMPT))
    save_kv_cache(cache, tmp_path / "cache")
    check_continues_alike(net, filled(net, "hadamard:4"), load_kv_cache(tmp_path / "cache", net)[0])


def test_a_loaded_cache_may_attend_on_codes(llama: Any, tmp_path: Path) -> None:
    cache, ids = filled(llama, "hadamard:4"), tokens(1, NEXT, seed=8)
    save_kv_cache(cache, tmp_path / "cache")
    found, _ = load_kv_cache(tmp_path / "cache", llama, on_codes=True)
    assert torch.allclose(one_by_one(llama, found, ids), one_by_one(llama, cache, ids), atol=1e-3)
    assert not torch.equal(one_by_one(llama, found, ids), one_by_one(llama, cache, ids))


def test_recent_tokens_take_the_dtype_of_the_model(tmp_path: Path) -> None:
    net = causal().to(torch.bfloat16)
    save_kv_cache(filled(net, "hadamard:4,residual=16"), tmp_path / "cache")
    plain = causal()
    found, _ = load_kv_cache(tmp_path / "cache", plain)
    assert {states.window.dtype for states in layer_states(found)} == {torch.float32}
    assert one_by_one(plain, found, tokens(1, 2)).dtype == torch.float32


def test_a_configuration_is_enough_for_methods_without_weights(llama: Any, tmp_path: Path) -> None:
    cache = filled(llama, "polar-rope")
    save_kv_cache(cache, tmp_path / "cache")
    check_continues_alike(llama, cache, load_kv_cache(tmp_path / "cache", llama.config)[0])


# --- writing ---


def test_what_cannot_be_saved_is_refused(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="expected a cache that has read tokens, found an empty one"):
        save_kv_cache(kv_cache(llama, "hadamard"), tmp_path / "cache")
    emptied = filled(llama, "hadamard")
    emptied.reset()
    with pytest.raises(OptionError, match="found an empty one"):
        save_kv_cache(emptied, tmp_path / "cache")
    for ids in (tokens(1, 5)[0], tokens(2, 5)):
        with pytest.raises(OptionError, match="ids: expected tokens of 1 sequences"):
            save_kv_cache(filled(llama, "hadamard"), tmp_path / "cache", ids=ids)
    hybrid = hybrid_model()
    with pytest.raises(OptionError, match="a cache with recurrent states cannot be saved: layer 0"):
        save_kv_cache(filled(hybrid, "hadamard"), tmp_path / "cache")
    assert not list(tmp_path.iterdir())


def test_a_file_appears_when_it_is_complete(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pqweights.inference.kv import files

    cache = filled(llama, "hadamard")
    (tmp_path / "cache").write_text("before")

    raised: list[BaseException] = []

    def broken(tensors: Tensors, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise raised[-1]

    monkeypatch.setattr(files, "save_file", broken)
    for error, expected in ((OSError(28, "No space left"), OutputError), (KeyboardInterrupt(), KeyboardInterrupt)):
        raised.append(error)
        with pytest.raises(expected):
            save_kv_cache(cache, tmp_path / "cache")
        assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_a_place_that_takes_no_file_is_refused(llama: Any, tmp_path: Path) -> None:
    cache = filled(llama, "hadamard")
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for place in ("nowhere/cache", "file/cache", "folder"):
        with pytest.raises(OutputError, match=rf"{place}: cannot write the cache"):
            save_kv_cache(cache, tmp_path / place)
    with pytest.raises(OutputError, match="expected the name of a file"):
        save_kv_cache(cache, "/")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


# --- other models ---


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("model_type", {"name": "Mistral", "sliding_window": None}),
        ("num_hidden_layers", {"num_hidden_layers": 3}),
        ("num_key_value_heads", {"num_key_value_heads": 4}),
        ("head_dim", {"head_dim": 16}),
        ("vocab_size", {"vocab_size": 130}),
        ("rope_parameters", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    ],
)
def test_the_cache_of_another_model_is_refused(name: str, changed: Any, llama: Any, tmp_path: Path) -> None:
    save_kv_cache(filled(llama, "hadamard"), tmp_path / "cache")
    with pytest.raises(SourceError, match=rf"cache: it is the cache of another model: {name} is .*, that of this "):
        load_kv_cache(tmp_path / "cache", causal(**changed))


def test_other_weights_are_noticed_where_the_method_follows_from_them(llama: Any, tmp_path: Path) -> None:
    save_kv_cache(filled(llama, "klt:3"), tmp_path / "cache")
    with pytest.raises(SourceError, match="another model: weights is"):
        load_kv_cache(tmp_path / "cache", causal(seed=2))
    with pytest.raises(OptionError, match="expected the model itself"):
        load_kv_cache(tmp_path / "cache", llama.config)


def test_a_method_that_the_model_cannot_have_is_refused(llama: Any, tmp_path: Path) -> None:
    save_kv_cache(filled(llama, "hadamard"), tmp_path / "cache")
    latent = transformers.DeepseekV3Config(num_hidden_layers=2, kv_lora_rank=16)
    with pytest.raises(OptionError, match="latent attention"):
        load_kv_cache(tmp_path / "cache", latent)


# --- damaged files ---


def damaged(file: Path, change: Callable[[Tensors, About], Any]) -> None:
    """Change the tensors or the metadata of a file."""
    with safe_open(file, framework="pt") as opened:
        about = json.loads(opened.metadata()[KEY])
        held = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(held, about)
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, file, metadata={KEY: json.dumps(about)})


def check_refused(file: Path, net: Any, *fragments: str) -> None:
    with pytest.raises(SourceError) as caught:
        load_kv_cache(file, net)
    said = str(caught.value)
    assert said.startswith(f"{file}: ") and "\n" not in said and len(said) < 600 + len(str(file))
    for fragment in fragments:
        assert fragment in said, said


def without(name: str) -> Callable[[Tensors, About], Any]:
    return lambda held, about: held.pop(name)


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors, About], Any]:
    return lambda held, about: held.update({name: change(held[name])})


def said(**values: Any) -> Callable[[Tensors, About], Any]:
    return lambda held, about: about.update(values)


def layer_says(value: Any, number: int = 1) -> Callable[[Tensors, About], Any]:
    def change(held: Tensors, about: About) -> None:
        about["layers"][number] = value

    return change


CODES, FACTOR, MEAN = "1.keys.0.rows.codes", "1.keys.0.rows.factor", "1.keys.0.shared.mean"
HUGE = 10**30
DAMAGE: dict[str, tuple[Callable[[Tensors, About], Any], str]] = {
    "window-missing": (without("0.values.window"), "no tensor 0.values.window"),
    "rows-missing": (without(CODES), f"no tensor {CODES}"),
    "shared-missing": (without(MEAN), f"no tensor {MEAN}"),
    "codes-too-few": (changed(CODES, lambda part: part[:, :, :-1]), CODES),
    "codes-too-many": (changed(CODES, lambda part: part.repeat(1, 1, 2, 1)), CODES),
    "codes-narrow": (changed(CODES, lambda part: part[..., :-1]), CODES),
    "codes-of-other-heads": (changed(CODES, lambda part: part[:, :1]), CODES),
    "codes-flat": (changed(CODES, lambda part: part.flatten()), CODES),
    "codes-of-other-dtype": (changed(CODES, lambda part: part.float()), CODES),
    "factor-of-other-dtype": (changed(FACTOR, lambda part: part.float()), FACTOR),
    "factor-nan": (changed(FACTOR, lambda part: part.index_fill(2, torch.tensor([3]), torch.nan)), "found NaN"),
    "factor-infinite": (changed(FACTOR, lambda part: part.index_fill(2, torch.tensor([3]), -torch.inf)), "found NaN"),
    "factor-erased": (changed(FACTOR, lambda part: (part.view(torch.int16) | -1).view(part.dtype)), "found NaN"),
    "mean-nan": (changed(MEAN, lambda part: part * torch.nan), MEAN),
    "mean-of-other-shape": (changed(MEAN, lambda part: part[..., :1]), MEAN),
    "window-flat": (changed("1.keys.window", lambda part: part.flatten()), "1.keys.window"),
    "window-of-integers": (changed("1.keys.window", lambda part: part.int()), "1.keys.window"),
    "window-of-other-size": (changed("1.keys.window", lambda part: part[..., :24]), "1.keys.0"),
    "window-of-no-size": (changed("1.keys.window", lambda part: part[..., :0]), "1.keys.window"),
    "window-of-odd-size": (changed("1.keys.window", lambda part: part[..., :5]), "multiple of 8"),
    "window-of-other-heads": (changed("1.keys.window", lambda part: part[:, :1]), "layer 1"),
    "window-longer": (changed("1.keys.window", lambda part: part.repeat(1, 1, 2, 1)), "layer 1"),
    "window-of-other-dtype": (changed("1.keys.window", lambda part: part.double()), "1.keys.window"),
    "window-huge-and-empty": (
        changed("1.keys.window", lambda part: torch.empty(1 << 20, 1 << 20, 0, 32)),
        "the file has no states",
    ),
    "layers-missing": (lambda held, about: about["layers"].pop(), "expected 2 layers, found 1"),
    "layers-all-empty": (said(layers=[None, None]), "expected tokens, found none"),
    "chunks-missing": (layer_says({}), "layer 1"),
    "chunks-of-keys-alone": (layer_says({"chunks": [[144]]}), "layer 1"),
    "chunks-not-numbers": (layer_says({"chunks": [["144"], ["144"]]}), "1.keys"),
    "chunks-of-true": (layer_says({"chunks": [[True], [True]]}), "1.keys"),
    "chunks-negative": (layer_says({"chunks": [[-144], [-144]]}), "1.keys"),
    "chunks-fractions": (layer_says({"chunks": [[144.0], [144.0]]}), "1.keys"),
    "chunks-fewer-tokens": (layer_says({"chunks": [[143], [143]]}), CODES),
    "chunks-huge": (layer_says({"chunks": [[HUGE], [HUGE]]}), CODES),
    "chunks-of-other-lengths": (layer_says({"chunks": [[144], []]}), "layer 1"),
    "chunks-more": (layer_says({"chunks": [[144, 1], [144, 1]]}), "no tensor 1.keys.1.shared.mean"),
    "layer-a-list": (layer_says([1]), "layer 1"),
    "layer-tokens": (layer_says({"tokens": 150}), "layer 1"),
    "spec-of-kivi": (said(spec="kivi:2,residual=32"), "kivi:2,residual=32, and pqweights no longer has kivi; read"),
    "spec-of-absmax": (said(spec="absmax"), "pqweights no longer has absmax"),
    "spec-of-qjl": (said(spec="hadamard:4,qjl"), "hadamard:4,qjl, and pqweights no longer has qjl"),
    "spec-nonsense": (said(spec="no\nsense"), "no method is called"),
    "spec-option": (said(spec="hadamard:99"), "hadamard"),
    "spec-of-other-codes": (said(spec="hadamard:4,residual=6"), "0.keys.0.rows.codes: expected"),
    "spec-number": (said(spec=3), "spec: expected a str, found 3"),
    "version-new": (said(version=2), "it has version 2; this pqweights reads 1"),
    "version-huge": (said(version="9" * 5000), "it has version"),
    "model-a-list": (said(model=[]), "model: expected a dict"),
    "model-empty": (said(model={}), "another model: model_type is None"),
    "model-with-lines": (said(model={"model_type": "a\nb"}), "another model: model_type is a b, that"),
    "ids-of-other-dtype": (lambda held, about: held.update(ids=torch.zeros(1, 5)), "ids"),
    "ids-of-more-sequences": (lambda held, about: held.update(ids=torch.zeros(2, 5, dtype=torch.int64)), "ids"),
}


@pytest.fixture(scope="module")
def saved(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("saved") / "cache"
    save_kv_cache(filled(llama, "hadamard:3,residual=6"), file, ids=tokens(1, PROMPT))
    return file.read_bytes()


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_one_line(name: str, saved: bytes, llama: Any, tmp_path: Path) -> None:
    file = tmp_path / "cache"
    file.write_bytes(saved)
    change, fragment = DAMAGE[name]
    damaged(file, change)
    check_refused(file, llama, fragment)


def test_layers_of_different_lengths_are_refused(saved: bytes, llama: Any, tmp_path: Path) -> None:
    file = tmp_path / "cache"
    file.write_bytes(saved)

    def shorter(held: Tensors, about: About) -> None:
        held |= {name: tensor[:, :, :-1] for name, tensor in held.items() if name.startswith("1.") and "window" in name}

    damaged(file, shorter)
    check_refused(file, llama, "expected as many tokens in all layers")


def test_a_file_that_is_cut_off_or_another_file_is_refused(saved: bytes, llama: Any, tmp_path: Path) -> None:
    file = tmp_path / "cache"
    for content in (b"", saved[:5], saved[:200], saved[:-1], b"\xff" * 100, b"PK\x03\x04" + bytes(1000)):
        file.write_bytes(content)
        check_refused(file, llama, "cannot read the cache")
    save_file({"weight": torch.zeros(3)}, file)
    check_refused(file, llama, "expected a cache that save_kv_cache wrote, found another file")
    for text in ("[]", "3", "null"):
        save_file({"weight": torch.zeros(3)}, file, metadata={KEY: text})
        check_refused(file, llama, "found another file")
    for text in ("{", "[" * 100_000, "9" * 5000):
        save_file({"weight": torch.zeros(3)}, file, metadata={KEY: text})
        check_refused(file, llama)
    check_refused(tmp_path / "nowhere", llama, "No such file")
    check_refused(tmp_path, llama)


KLT = {
    "order-out-of-range": changed("1.keys.0.shared.order", lambda part: part.fill_(200)),
    "widths-larger": changed("1.keys.0.shared.widths", lambda part: part + 1),
    "widths-zero": changed("1.keys.0.shared.widths", lambda part: part * 0),
    "widths-huge": changed("1.keys.0.shared.widths", lambda part: part.fill_(200)),
    "widths-nine": changed("1.keys.0.shared.widths", lambda part: part.fill_(9)),
    "codes-narrow": changed(CODES, lambda part: part[..., :-1]),
    "spread-of-other-shape": changed("1.values.0.shared.spread", lambda part: part[..., :8]),
}


@pytest.mark.parametrize("name", KLT)
def test_damage_of_what_is_measured_is_found(name: str, llama: Any, tmp_path: Path) -> None:
    save_kv_cache(filled(llama, "klt:3"), tmp_path / "cache")
    damaged(tmp_path / "cache", KLT[name])
    check_refused(tmp_path / "cache", llama, "damaged: 1.")


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (changed("0.keys", lambda part: part[:, :, :-1]), "layer 0"),
        (changed("0.values", lambda part: part[:, :1]), "layer 0"),
        (changed("0.values", lambda part: part.int()), "0.values"),
        (without("0.keys"), "no tensor 0.keys"),
        (layer_says({"tokens": 20}, 0), "layer 0"),
        (layer_says({"tokens": -1}, 0), "layer 0"),
        (layer_says({"tokens": "150"}, 0), "layer 0"),
        (layer_says({"tokens": HUGE}, 0), "as many tokens in all layers"),
        (layer_says({}, 0), "layer 0"),
        (layer_says([], 0), "layer 0"),
    ],
)
def test_damage_of_sliding_layers_is_found(change: Any, fragment: str, tmp_path: Path) -> None:
    net = causal("Gemma2", sliding_window=32)
    save_kv_cache(filled(net, "hadamard:4"), tmp_path / "cache")
    damaged(tmp_path / "cache", change)
    check_refused(tmp_path / "cache", net, fragment)
