"""quantize --calibrate: stacks of experts, transposed or not, each expert a matrix of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import column_decoder
import families
import language_models
import numpy as np
import pytest
import torch
from closeness import ALIKE, ORTHOGONAL, ROUNDED_ONCE_MORE, approx
from commands import done
from gguf_files import all_values, converted
from helpers import as_float32, bf16, folder_bytes, read_all
from independent_reader import to_bytes

import pqweights
from pqweights.calibrate import sample
from pqweights.checkpoint.readers import ColumnTensor
from pqweights.checkpoint.source import open_local

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
TOKENS, WINDOW = 2048, 64
# The embedding is not calibrated, and would have most of the error.
ASKED: dict[str, Any] = {"set_format": {"*embed_tokens*": 8}, "threads": 1}
CALIBRATED: dict[str, Any] = {**ASKED, "calibrate": "self", "calibration_tokens": TOKENS}
NARROW: dict[str, Any] = {"hidden_size": 128, "head_dim": 64}
LLAMA4: dict[str, Any] = {
    **families.TEXT, **NARROW, "intermediate_size": 128, "intermediate_size_mlp": 256, "num_local_experts": 4,
    "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    **NARROW, "intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32
}  # fmt: skip
MODELS = {
    "gpt_oss": families.causal("GptOss", (), float32=("mlp.router.bias",), **GPT_OSS),
    "llama4": families.Family("Llama4ForCausalLM", "Llama4TextConfig", LLAMA4, ()),
    "qwen3_5_moe": families.seeing(
        "Qwen3_5Moe", (), **families.HYBRID, **families.EXPERTS, **NARROW, shared_expert_intermediate_size=128
    ),
}
TRANSPOSED = ("gpt_oss", "llama4")


@pytest.fixture(scope="module", autouse=True)
def short_windows() -> Iterator[None]:
    """Draw short windows, which takes a quarter of the steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "WINDOW", WINDOW)
        yield


def sharpened(model: Any) -> None:
    """Make some channels matter much more than others, predictions sharp, and have experts saved as stacks."""
    zero_centered = "Qwen" in type(model).__name__
    with torch.no_grad():
        model.lm_head.weight.mul_(12)
        for name, norm in model.named_parameters():
            if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
                factors = torch.exp(torch.randn_like(norm))
                norm.copy_((1 + norm) * factors - 1 if zero_centered else norm * factors)
    save = model.save_pretrained
    model.save_pretrained = lambda folder: save(folder, save_original_format=False)


def without_the_last_expert(model: Any) -> None:
    """Have the router of the first layer give its last expert no token."""
    sharpened(model)
    with torch.no_grad():
        model.model.layers[0].mlp.router.bias[3] = -100


@dataclass(frozen=True)
class Made:
    """A model, and what was made of it."""

    name: str
    source: Path
    master: Path
    report: Any

    @property
    def stacks(self) -> dict[str, ColumnTensor]:
        """The stacks of experts of the master."""
        tensors = {tensor.name: tensor for tensor in open_local(self.master).tensors}
        result = {
            name: tensor for name, tensor in tensors.items() if name.endswith(("gate_up_proj", "experts.down_proj"))
        }
        assert result and all(isinstance(tensor, ColumnTensor) for tensor in result.values())
        return result  # type: ignore[return-value]


def make(name: str, folder: Path, change: Any = sharpened, **options: Any) -> Made:
    source = language_models.with_tokenizer(families.build(MODELS[name], folder / "source", change))
    report = pqweights.quantize(source, folder / "master", "t3", **CALIBRATED | options)
    return Made(name, source, folder / "master", report)


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Made:
    enough = 3 * TOKENS // 2  # for all experts of all models
    return make(request.param, tmp_path_factory.mktemp(request.param), calibration_tokens=enough)


def logits(folder: Path, **options: Any) -> torch.Tensor:
    ids = torch.from_numpy(np.random.default_rng(9).integers(0, 490, (8, 64)))
    with torch.no_grad():
        model = pqweights.load_model(folder, dtype="float32", experts_implementation="eager", **options).eval()
        found: torch.Tensor = model(ids).logits
    return found


def divergence(found: torch.Tensor, reference: torch.Tensor) -> float:
    expected, got = torch.log_softmax(reference, -1), torch.log_softmax(found, -1)
    return float((expected.exp() * (expected - got)).sum(-1).mean())


def independent(master: Path, name: str, transposed: bool) -> np.ndarray:
    """A stack as the format page says, from the stored tensors alone."""
    stored = read_all(master)
    parts = [stored[name + part][1] for part in ("_trellis", "_lengths", "_row_scales", "_column_scales")]
    return column_decoder.decode(parts[0].tobytes(), *parts[1:], transposed=transposed)


def test_stacks_diverge_much_less_at_the_same_size(made: Made, tmp_path: Path) -> None:
    plain = pqweights.quantize(made.source, tmp_path / "plain", "t3", **ASKED).totals
    assert pqweights.inspect(made.master).totals.bits_per_weight == approx(plain.bits_per_weight, ALIKE)
    reference = logits(made.source)
    before, found = (divergence(logits(folder), reference) for folder in (tmp_path / "plain", made.master))
    assert found < 0.5 * before
    assert pqweights.verify(made.master).ok
    config = json.loads((made.master / "config.json").read_text())["quantization_config"]
    for name, stack in made.stacks.items():
        assert len(stack.shape) == 3 and config["overrides"][name].get("transposed", False) is (made.name in TRANSPOSED)
    assert not any("experts" in line for line in made.report.warnings)


def test_stacks_are_decoded_as_the_page_says_exported_and_kept_packed(made: Made, tmp_path: Path) -> None:
    done("export", made.master, tmp_path / "out", "--target", "bf16")
    exported = read_all(tmp_path / "out")
    for name, stack in made.stacks.items():
        values = independent(made.master, name, stack.format.transposed)
        assert exported[name][1].tobytes() == to_bytes(values.reshape(-1), "BF16")
        source = as_float32(read_all(made.source)[name])
        error = np.square(source - as_float32(bf16(values))).sum() / np.square(source).sum()
        stated = next(record for record in made.report.records if record.name == name)
        assert stated.relative_mse == approx(error, ROUNDED_ONCE_MORE) and 0 < stated.weighed_mse < stated.relative_mse
    found, expected = (all_values(converted(folder)) for folder in (made.master, tmp_path / "out"))
    assert found.keys() == expected.keys() and sum(".ffn_down_exps" in name for name in found) >= 2
    for name, values in expected.items():
        assert np.array_equal(as_float32(bf16(found[name])), as_float32(bf16(values))), name
    packed = pqweights.load_model(made.master, packed=True, experts_implementation="eager")
    kept = {name for name, parameter in packed.named_parameters() if type(parameter).__name__ == "PackedTensor"}
    assert kept >= made.stacks.keys() and packed.hf_quantizer.decoded_weights == ()
    assert torch.equal(logits(made.master, packed=True), logits(made.master))


@pytest.mark.parametrize(
    "target",
    [["vllm"], ["mlx"], ["vllm", "--format", "mxfp4"], ["gguf", "--type", "q8_0", "--without-tokenizer"]],
    ids=" ".join,
)
def test_exports_round_what_stacks_decode_to(made: Made, tmp_path: Path, target: list[str]) -> None:
    if target == ["mlx"] and made.name == "llama4":  # mlx-lm has no such model of text alone
        return
    done("export", made.master, tmp_path / "out", "--target", *target)
    errors = [record.relative_mse for record in pqweights.inspect(tmp_path / "out").tensors if record.relative_mse]
    assert errors and max(errors) < 0.05


def test_an_interrupted_calibration_of_stacks_ends_with_the_same_bytes(tmp_path_factory: Any) -> None:
    whole = make("gpt_oss", tmp_path_factory.mktemp("whole"), without_the_last_expert)

    def stop(done: int, total: int, what: str) -> None:
        if what in ("layer 1 backward", "encoding layer 0"):
            raise KeyboardInterrupt

    out = whole.master.with_name("resumed")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            pqweights.quantize(whole.source, out, "t3", **CALIBRATED, calibration_progress=stop)
    pqweights.quantize(whole.source, out, "t3", **CALIBRATED)
    assert folder_bytes(out) == folder_bytes(whole.master)
    # The expert that no token reached has codes of its own, with fewer bits.
    (line,) = [line for line in whole.report.warnings if "experts" in line]
    assert "layers.0.mlp.experts.down_proj' and 1 more" in line and "1 of its 4" in line
    stored, source = read_all(whole.master), read_all(whole.source)
    for name in whole.stacks:
        values = independent(whole.master, name, transposed=True)
        errors = np.square(values - as_float32(source[name])).sum((1, 2)) / np.square(as_float32(source[name])).sum(
            (1, 2)
        )
        assert (errors < 1).all()
        scales = stored[f"{name}_column_scales"][1].astype(int)
        assert len({row.tobytes() for row in scales}) == 4
        taken = stored[f"{name}_lengths"][1].sum((1, 2)).tolist()
        assert ".0." not in name or taken[3] < min(taken[:3])


def test_stacks_keep_their_bits_if_that_is_wanted_and_plans_count_them(tmp_path: Path) -> None:
    source = families.build(MODELS["llama4"], tmp_path / "source", sharpened)
    report = pqweights.quantize(source, tmp_path / "out", "t3", rate="tensor", **CALIBRATED)
    plain = pqweights.plan(source, "t3", set_format=ASKED["set_format"])
    planned = pqweights.plan(source, "t3", calibrate="self", calibration_tokens=TOKENS, set_format=ASKED["set_format"])
    expected = {tensor.name: tensor.bytes for tensor in plain.plan.tensors}
    calibrated = [tensor for tensor, _ in report.pairs if tensor.codec == "hadamard-trellis-columns"]
    assert sum(len(tensor.shape) == 3 for tensor in calibrated) == 4
    for tensor in calibrated:
        assert tensor.bytes == approx(expected[tensor.name], ORTHOGONAL), tensor.name
    assert planned.calibration is not None and planned.calibration.weights == len(calibrated) + 1  # the embedding, too


def test_transposed_matrices_are_calibrated(tmp_path: Path) -> None:
    def change(model: Any) -> None:
        with torch.no_grad():
            model.transformer.ln_f.weight.mul_(8)
            for name, parameter in model.named_parameters():
                if name.endswith(("ln_1.weight", "ln_2.weight")):
                    parameter.mul_(torch.exp(torch.randn_like(parameter)))

    settings = {"vocab_size": 512, "n_embd": 128, "n_layer": 1, "n_head": 2, "n_positions": 512}
    family = families.Family(
        "GPT2LMHeadModel", "GPT2Config", {**settings, "bos_token_id": 501, "eos_token_id": 501}, ()
    )
    source, keep = families.build(family, tmp_path / "source", change), {"keep": ["*wte*", "*wpe*"]}
    pqweights.quantize(source, tmp_path / "out", "t3", **{**CALIBRATED, "set_format": {}}, **keep)
    pqweights.quantize(source, tmp_path / "plain", "t3", **keep)
    tensors = json.loads((tmp_path / "out/pqweights.json").read_text())["tensors"]
    transposed = {tensor["name"]: tensor.get("transposed") for tensor in tensors if tensor["codec"]}
    assert len(transposed) == 4 and set(transposed.values()) == {True}
    reference = logits(source)
    before, found = (divergence(logits(tmp_path / folder), reference) for folder in ("plain", "out"))
    assert found < 0.6 * before and pqweights.verify(tmp_path / "out").ok
