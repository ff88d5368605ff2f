"""Weights that stay packed in memory: they compute what the decoded model does, in the size of the master."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
from closeness import assert_near, deviation, rounding
from commands import raises
from families import FAMILIES
from helpers import bf16, f32, gaussian, master_weights, run_command, write_checkpoint
from restated import restate_hashes
from test_transformers import scaled_master

import pqweights
from pqweights.checkpoint.readers import EncodedTensor
from pqweights.checkpoint.source import open_local
from pqweights.errors import MasterError, OptionError, OutputError, PqweightsError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

import torch  # noqa: E402

from pqweights.runtime.loading import packed_rows as module  # noqa: E402
from pqweights.runtime.loading.packed import PackedTensor, pack  # noqa: E402

IDS = torch.tensor(families.IDS)
ROUNDED = ("llama", "mixtral", "gpt_oss", "gpt2")  # of each kind of matrix: single ones, experts, transposed ones


def open_both(folder: Path, **options: Any) -> tuple[Any, Any]:
    """Load a master packed and decoded."""
    options = {"attn_implementation": "eager", **options}
    decoded = pqweights.load_model(folder, experts_implementation="eager", **options)
    return pqweights.load_model(folder, packed=True, **options), decoded


def test_packed_experts_with_another_implementation_are_refused(base):
    folder = families.master(base, "mixtral")
    with raises(OptionError, "grouped_mm"):
        pqweights.load_model(folder, packed=True, experts_implementation="grouped_mm")
    pqweights.load_model(folder, packed=True, experts_implementation="eager")


def output(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        made = model(IDS)
    return (made.logits if hasattr(made, "logits") else made.last_hidden_state).float()


def packed_bytes(model: Any) -> int:
    return sum(p.stored_bytes for p in model.parameters() if isinstance(p, PackedTensor))


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in FAMILIES), *((name, "bfloat16") for name in ROUNDED)]
)
def test_logits_match_the_decoded_model(name, dtype, base):
    packed, decoded = open_both(families.master(base, name), dtype=dtype)
    one, other = output(packed), output(decoded)
    if dtype == "float32":
        assert_near(one, other, "torch")
    else:  # a decoded weight was rounded to BF16, a packed one was not
        exact = output(pqweights.load_model(families.master(base, name), dtype="float32", attn_implementation="eager"))
        errors = [(each - exact).square().mean(-1).sqrt().flatten() for each in (one, other)]
        # Of a mixture of experts, either may choose other experts than the exact one for a token.
        ordinary = errors[0] <= rounding("BF16", 8) * exact.square().mean().sqrt()
        assert (~ordinary).sum() <= (len(IDS[0]) // 8 if name == "mixtral" else 0)
        assert errors[0][ordinary].mean() <= 1.1 * errors[1][ordinary].mean()
    # Packed weights take the size of the master.
    encoded = {t.name: t for t in open_local(families.master(base, name)).tensors if isinstance(t, EncodedTensor)}
    stored = sum(part.byte_count for tensor in encoded.values() for part in tensor.parts)
    assert packed.hf_quantizer.decoded_weights == ()
    assert packed_bytes(packed) == stored
    assert packed.get_memory_footprint() < decoded.get_memory_footprint()


def test_tied_weights_share_one_parameter(base):
    packed, _ = open_both(families.master(base, "llama-tied"))
    assert packed.lm_head.weight is packed.model.embed_tokens.weight
    moved = packed.to(torch.float32)
    assert moved.lm_head.weight is moved.model.embed_tokens.weight
    assert moved.lm_head.weight.dtype == torch.float32
    # Converting the dtype does not touch codes and norms.
    assert moved.lm_head.weight.matrices[0][0].parts[1].dtype == torch.uint8
    exact = pqweights.load_model(families.master(base, "llama-tied"), dtype="float32", attn_implementation="eager")
    assert_near(output(moved), output(exact), "torch")


@pytest.mark.filterwarnings("ignore::pqweights.errors.PqweightsWarning")
def test_awq_scales_are_applied(base, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_WEIGHTS", 3000)
    packed, decoded = open_both(scaled_master(families.master(base, "llama"), tmp_path / "master"), dtype="float32")
    assert_near(output(packed), output(decoded), "torch")
    up = packed.model.layers[0].mlp.up_proj.weight
    assert up.matrices[0][0].awq is not None
    assert torch.equal(up.decode(), decoded.model.layers[0].mlp.up_proj.weight)


@pytest.mark.parametrize("packed", [False, True])
def test_damaged_norm_is_found_when_the_model_is_loaded(packed, base, tmp_path):
    folder = tmp_path / "master"
    shutil.copytree(families.master(base, "llama"), folder)
    weight = next(t for t in open_local(folder).tensors if t.name == "model.layers.0.mlp.up_proj.weight")
    assert isinstance(weight, EncodedTensor)
    norms = weight.encoded[1]
    with (folder / norms.file).open("r+b") as file:
        file.seek(norms.offset + 2 * 5)
        file.write(b"\xff\xff")
    restate_hashes(folder)
    with raises(MasterError, "up_proj.weight", "block 5"):
        pqweights.load_model(folder, packed=packed)


TENSORS = {
    "model.rows.weight": bf16(gaussian(40, 256, seed=1)),
    "model.odd.weight": bf16(gaussian(37, 200, seed=2)),
    "model.aligned.weight": bf16(np.full((5, 128), 0.0125, np.float32)),  # needs the signs of a rescue
    "model.large.weight": f32(gaussian(6, 128, seed=3) * np.float32(2.0**40)),
    "model.experts.up": bf16(gaussian(3, 8, 128, seed=4)),
    "model.experts.odd": bf16(gaussian(4, 32, 12, seed=5)),
    "model.experts.shared_blocks": bf16(gaussian(3, 5, 50, seed=6)),
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[PackedTensor | None, torch.Tensor]]:
    """Weights of all kinds, packed and decoded to float32."""
    folder = tmp_path_factory.mktemp("packed")
    source = write_checkpoint(folder / "model", TENSORS)
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps({"bits": 3, "rules": [{"name": "*odd*", "bits": 7}]}))
    run_command({"quantize": str(source), "recipe": str(recipe)}, folder / "master")
    exact = master_weights(folder / "master")
    tensors = {t.name: t for t in open_local(folder / "master").tensors}
    assert all(isinstance(t, EncodedTensor) for t in tensors.values())
    return {
        name: (pack(tensor, torch.float32), torch.from_numpy(np.array(exact[name])))  # type: ignore[arg-type]
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("on_torch", [False, True])
def test_packed_weights_decode_and_multiply_like_plain_ones(on_torch, weights, monkeypatch):
    """They are decoded by the CPU kernels, and by the operations of torch that other devices use."""
    if on_torch:
        rows = module.PackedRows
        monkeypatch.setattr(
            rows, "_decode_numpy", lambda self, row, *args, **keywords: rows._decode_torch(self, *args, **keywords)
        )
    for name, (packed, exact) in weights.items():
        assert torch.equal(packed.decode(), exact), name
        assert torch.equal(packed.to(torch.bfloat16).decode(), exact.to(torch.bfloat16)), name
        assert packed.shape == exact.shape
        if packed.stacked:
            for index in (0, torch.tensor(2), -1):
                assert isinstance(packed[index], PackedTensor)
                assert torch.equal(packed[index].decode(), exact[index])
            x = torch.randn(4, exact.shape[1])
            assert torch.equal(x @ packed[1], x @ exact[1])
            continue
        ids = torch.tensor([[0, 3], [len(exact) - 1, 3]])
        assert torch.equal(torch.nn.functional.embedding(ids, packed), exact[ids]), name
        x = torch.randn(2, 3, exact.shape[1])
        expected = torch.nn.functional.linear(x, exact)
        made = torch.nn.functional.linear(x, packed)
        assert_near(made, expected, "torch")
        with pytest.raises(IndexError):
            torch.nn.functional.embedding(torch.tensor([len(exact)]), packed)


def test_other_operations_decode_the_weight(weights):
    packed, exact = weights["model.rows.weight"]
    for result, expected in (
        (packed.t(), exact.t()),
        (packed + 1, exact + 1),
        (packed[3:5], exact[3:5]),
        (packed[:, 0], exact[:, 0]),
        (torch.cat([packed, exact]), torch.cat([exact, exact])),
        (torch.cat([packed, packed], dim=1), torch.cat([exact, exact], dim=1)),
        (packed.sum(), exact.sum()),
    ):
        assert type(result) is torch.Tensor
        assert torch.equal(result, expected)
    assert type(torch.nn.functional.linear(torch.randn(2, 256).double(), packed.double())) is torch.Tensor


def test_stacking_and_concatenating_stay_packed(weights):
    """transformers merges separately encoded experts in this way."""
    (one, exact_one), (other, exact_other) = weights["model.aligned.weight"], weights["model.large.weight"]
    below = torch.cat([one, other], dim=0)
    assert isinstance(below, PackedTensor)
    assert torch.equal(below.decode(), torch.cat([exact_one, exact_other]))
    assert torch.equal(below.like(), below)
    both = torch.cat([torch.stack([one, one]), torch.stack([one, one])], dim=1)
    assert isinstance(both, PackedTensor)
    exact = torch.cat([exact_one, exact_one])
    assert torch.equal(both.decode(), torch.stack([exact, exact]))
    assert torch.equal(torch.nn.functional.linear(torch.eye(128), both[1]), exact.t())
    assert torch.equal(
        torch.nn.functional.embedding(torch.tensor([4, 9]), below), torch.cat([exact_one, exact_other])[[4, 9]]
    )
    assert both.stored_bytes == 4 * one.stored_bytes


def test_packed_model_can_be_copied_and_pickled(base):
    packed, _ = open_both(families.master(base, "llama"))
    ids = torch.tensor(families.IDS)
    with torch.inference_mode():
        expected = packed(ids).logits
        for again in (pickle.loads(pickle.dumps(packed)), copy.deepcopy(packed)):
            assert repr(again) == repr(packed)
            assert torch.equal(again(ids).logits, expected)


def test_printed_model_shows_packed_layers(base):
    packed, decoded = open_both(families.master(base, "qwen3_moe"))
    assert "Packed" not in repr(decoded)
    assert "(q_proj): PackedLinear(in_features=256, out_features=256, bias=False)" in repr(packed)
    assert "(embed_tokens): PackedEmbedding(512, 256)" in repr(packed)
    assert isinstance(packed.lm_head, torch.nn.Linear)


def test_powers_of_two_are_multiplied_in_place(weights):
    """Views of a weight change with it, copies do not."""
    for name in ("model.rows.weight", "model.experts.up"):
        weight, exact = weights[name]
        packed = weight.clone()
        view, copy, wider, first = packed.detach(), packed.clone(), packed.double(), packed[0]
        packed.div_(8).mul_(2.0)
        for changed in (packed, view):
            assert torch.equal(changed.decode(), exact / 4)
        assert torch.equal(first.decode() if packed.stacked else packed[0], exact[0] / 4)
        for unchanged in (weight, copy, wider):
            assert torch.equal(unchanged.decode(), exact.to(unchanged.dtype))
        view.mul_(4)
        assert torch.equal(packed.decode(), exact)
        for change in (lambda weight: weight.mul_(3), lambda weight: weight.div_(0), lambda weight: weight.mul_(-2)):
            with pytest.raises(PqweightsError):
                change(packed)
        with pytest.raises(PqweightsError):
            packed.mul_(torch.ones(()))
        assert torch.equal(packed.decode(), exact)


def test_batched_products_with_experts_match_plain_ones(weights):
    packed, exact = weights["model.experts.up"]
    x = torch.randn(3, 5, 8)
    assert_near(torch.bmm(x, packed), torch.bmm(x, exact), "torch")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.bmm(x, packed), torch.bmm(x, exact))
    x.requires_grad_()
    torch.bmm(x, packed).sum().backward()
    assert_near(x.grad, exact.sum(2)[:, None].expand_as(x), "torch")
    with pytest.raises(RuntimeError):
        torch.bmm(torch.randn(2, 5, 8), packed)


def test_packed_model_refuses_gradients_changes_and_saving(base, tmp_path):
    packed, decoded = open_both(families.master(base, "llama"))
    assert not any(p.requires_grad for p in packed.parameters())
    assert not packed(IDS).logits.requires_grad  # without no_grad
    with raises(PqweightsError, "gradients"):
        packed(inputs_embeds=torch.randn(1, 3, 256, dtype=torch.bfloat16, requires_grad=True))
    with raises(PqweightsError, "cannot be changed"):
        packed.lm_head.weight.zero_()
    before = output(packed)
    with pytest.raises(PqweightsError):
        packed.resize_token_embeddings(packed.config.vocab_size + 8)
    assert torch.equal(output(packed), before)
    with pytest.raises(OutputError):
        packed.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    assert all(p.requires_grad for p in decoded.parameters())


@pytest.mark.parametrize("shape", [(2, 128), (4, 255), (512,), (3, 2, 128), ()])
def test_inputs_of_the_wrong_shape_raise_the_error_of_torch(shape, weights):
    weight, _ = weights["model.rows.weight"]
    with pytest.raises(RuntimeError):
        torch.nn.functional.linear(torch.zeros(shape), weight)


def test_functions_take_keyword_arguments(weights):
    weight, whole = weights["model.rows.weight"]
    x, ids = torch.randn(3, 256), torch.tensor([[5, 7]])
    linear = torch.nn.functional.linear(input=x, weight=weight, bias=torch.ones(40))
    assert_near(linear, x @ whole.T + 1, "torch")
    assert torch.equal(torch.nn.functional.embedding(input=ids, weight=weight), whole[ids])
    assert torch.nn.functional.embedding(ids[:, :0], weight).shape == (1, 0, 256)


def test_autocast_applies_in_all_threads(weights, monkeypatch):
    """Autocast is a setting of the calling thread, and chunks are decoded in others."""
    weight, _ = weights["model.rows.weight"]
    x = torch.randn(3, 256)
    for chunk in (1 << 20, 1024):
        monkeypatch.setattr(module, "CHUNK_WEIGHTS", chunk)
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.nn.functional.linear(x, weight)
            expected = torch.nn.functional.linear(x, weight.decode())
        assert found.dtype == expected.dtype == torch.bfloat16
        assert deviation(found.float(), expected.float()) <= rounding("BF16", 4)


def test_operations_on_the_storage_are_refused(weights):
    weight, _ = weights["model.rows.weight"]
    for use in (weight.share_memory_, weight.untyped_storage):
        with pytest.raises(PqweightsError):
            use()


# --- products of codes ---


def packed_linear(folder: Path, dtype: str = "float32") -> Any:
    return pqweights.load_model(families.master(folder, "llama"), packed=True, dtype=dtype).lm_head


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (1,), (3, 2), (2, 3, 4)])
def test_any_leading_dimensions(shape, dtype, base):
    layer = packed_linear(base, dtype)
    x = torch.randn(*shape, 256).to(layer.weight.dtype)
    with torch.no_grad():
        made, exact = layer(x), x.double() @ layer.weight.decode().double().t()
    assert made.shape == (*shape, 512) and made.dtype == x.dtype
    if x.numel():
        short = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype]
        assert deviation(made.double(), exact) <= rounding(short, 4 if dtype != "float32" else 16)


def test_inputs_with_strides_and_a_bias_that_is_broadcast(base):
    layer = packed_linear(base)
    x = torch.randn(256, 3).t()
    with torch.no_grad():
        plain = layer(x.contiguous())
        assert torch.equal(layer(x), plain)
        assert torch.equal(torch.nn.functional.linear(x, layer.weight, torch.ones(1)), plain + 1)
        with pytest.raises(RuntimeError):
            torch.nn.functional.linear(x, layer.weight, torch.ones(7))
    with torch.device("meta"), torch.no_grad():
        assert torch.equal(layer(x), plain)


def test_inputs_that_change_in_place_are_rotated_again(base):
    layer = packed_linear(base)
    x = torch.randn(1, 256)
    with torch.inference_mode():
        before = layer(x)
        x.mul_(2)
        assert_near(layer(x), 2 * before, "torch")
        x.data.mul_(2)
        assert_near(layer(x), 4 * before, "torch")


def test_from_pretrained_takes_packed(base, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = families.master(base, "llama")
    packed = AutoModelForCausalLM.from_pretrained(folder, packed=True)
    assert isinstance(packed.lm_head.weight, PackedTensor)
    assert "packed" not in packed.config.to_dict()
    ordinary = AutoModelForCausalLM.from_pretrained(folder, packed=False)
    assert not isinstance(ordinary.lm_head.weight, PackedTensor)
    ordinary.save_pretrained(tmp_path / "plain")
    assert "packed" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    config = AutoConfig.from_pretrained(folder)
    assert isinstance(pqweights.load_model(folder, packed=True, config=config).lm_head.weight, PackedTensor)
    assert not isinstance(pqweights.load_model(folder, config=config).lm_head.weight, PackedTensor)


@pytest.mark.parametrize("device_map", ["auto", "sequential", {"": "cpu"}])
@pytest.mark.parametrize("family", ["llama-tied", "qwen3_moe"])
def test_every_device_map_loads_packed_weights(family: str, device_map: Any, base: Path) -> None:
    """transformers measures parts of the model, whose parameters it names within the part."""
    folder, ids = families.master(base, family), torch.tensor(families.IDS)
    loaded = pqweights.load_model(folder, packed=True, device_map=device_map)
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, pqweights.load_model(folder, packed=True)(ids).logits)


def test_weights_stay_packed_when_they_are_loaded_or_moved_in_inference_mode(base: Path) -> None:
    with torch.inference_mode():
        packed = pqweights.load_model(families.master(base, "llama"), packed=True)
        assert isinstance(packed.lm_head.weight, PackedTensor)
        assert isinstance(packed.to(torch.float32).lm_head.weight, PackedTensor)
        assert packed.lm_head.weight.dtype == torch.float32


def test_state_is_taken_from_packed_weights_and_never_into_them_from_plain_ones(base: Path) -> None:
    folder = families.master(base, "llama")
    packed, other, decoded = (pqweights.load_model(folder, packed=one) for one in (True, True, False))
    other.lm_head.weight.mul_(2)
    other.load_state_dict(packed.state_dict())
    assert torch.equal(output(other), output(packed))
    assert isinstance(other.lm_head.weight, PackedTensor)
    plain = pqweights.load_model(folder)
    with torch.no_grad():
        plain.lm_head.weight.zero_()
    plain.load_state_dict(packed.state_dict())
    assert torch.equal(output(plain), output(decoded))
    with pytest.raises(RuntimeError):
        packed.load_state_dict(decoded.state_dict())


def test_device_map_counts_packed_weights_as_they_are_stored(base: Path) -> None:
    """Room for what is packed, and not for what is decoded, suffices for all of it."""
    folder = families.master(base, "llama")
    packed = pqweights.load_model(folder, packed=True)
    stored = sum(p.stored_bytes if isinstance(p, PackedTensor) else p.nbytes for p in packed.parameters())
    decoded = sum(p.numel() * p.dtype.itemsize for p in packed.parameters())
    room = {"cpu": (stored + decoded) // 2}
    loaded = pqweights.load_model(folder, packed=True, device_map="sequential", max_memory=room)
    assert "disk" not in getattr(loaded, "hf_device_map", {}).values()


@pytest.mark.filterwarnings("ignore")
def test_compiled_models_compute_the_same(base):
    """Without a code generator, which would take minutes: what counts is that torch can trace the model."""
    for name, whole, backend in (("llama", True, "aot_eager"), ("mixtral", False, "eager")):
        packed = pqweights.load_model(families.master(base, name), packed=True, dtype="float32")
        torch._dynamo.reset()
        compiled = torch.compile(packed, backend=backend, fullgraph=whole)
        with torch.no_grad():
            made, expected = compiled(IDS).logits, packed(IDS).logits
        assert_near(made, expected, "torch")
