"""Adapters are merged as PEFT computes with them, by every command, and what does not fit is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from closeness import assert_near, each_near, rounding
from commands import done, invoke, raises, refused
from helpers import f32, folder_bytes, gaussian, read_safetensors, safetensors_bytes
from language_models import with_tokenizer
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model
from peft import LoraConfig, TrainableTokensConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
)

import pqweights
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.options import Options
from pqweights.errors import OutputError
from pqweights.storage.sources import merged, open_source

LAYERS = ["q_proj", "v_proj", "up_proj", "down_proj"]
SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
}
CONV1D = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
# The model, and what PEFT is asked for.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("llama", {"lora_alpha": 9}),
    "rank 1": ("llama", {"r": 1, "lora_alpha": 9}),
    "rsLoRA": ("llama", {"use_rslora": True}),
    "DoRA": ("llama", {"use_dora": True}),
    "patterns": ("llama", {"rank_pattern": {r"layers\.1\.mlp\.up_proj": 3}, "alpha_pattern": {"v_proj": 30}}),
    "saved modules": ("llama", {"modules_to_save": ["lm_head", "embed_tokens", "norm"]}),
    "embeddings": ("llama", {"target_modules": [*LAYERS, "embed_tokens", "lm_head"]}),
    "DoRA of embeddings": ("llama", {"use_dora": True, "target_modules": ["embed_tokens", "lm_head"]}),
    "tokens": ("llama", {"trainable_token_indices": [3, 7, 299]}),
    "not transposed": ("llama", {"fan_in_fan_out": True}),
    "tied": ("tied", {}),
    "tied tokens": ("tied", {"trainable_token_indices": [3, 7, 299]}),
    "tied embeddings": ("tied", {"target_modules": [*LAYERS, "embed_tokens"]}),
    "tied head": ("tied", {"target_modules": [*LAYERS, "lm_head"]}),
    "tied, embeddings saved": ("tied", {"modules_to_save": ["embed_tokens"]}),
    "tied, both saved": ("tied", {"modules_to_save": ["lm_head", "embed_tokens"]}),
    "tied on purpose": ("tied", {"target_modules": [*LAYERS, "embed_tokens"], "ensure_weight_tying": True}),
    "transposed": ("gpt2", CONV1D),
    "transposed DoRA": ("gpt2", {**CONV1D, "use_dora": True}),
    "biases": ("gpt2", {**CONV1D, "bias": "all", "lora_bias": True}),
}
# Where head and embeddings are one weight, `merge_and_unload` changes both, unlike the model with the adapter.
MERGED_OTHERWISE = {"tied embeddings", "tied head", "tied on purpose"}
# PEFT warns of tied weights, and calls what transformers deprecates.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*:UserWarning:peft",
    "ignore:.*gradient_checkpointing:FutureWarning",
    "ignore:.*rank_pattern:RuntimeWarning:peft",
)
SAME = rounding("F32", 16)  # below 1e-6, of weights of about 1
TOKENS = torch.arange(20)[None]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of MODELS, in float32."""
    base = tmp_path_factory.mktemp("models")

    def made(name: str) -> Path:
        if not (base / name).exists():
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.float32).save_pretrained(base / name)
        return base / name

    return made


def trained(model: Path, out: Path, config: Any, seed: int = 1) -> Any:
    """The model with an adapter whose every parameter is random, which is also written."""
    torch.manual_seed(seed)
    result = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
    for parameter in result.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    result.save_pretrained(out)
    return result.eval()


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": LAYERS, **settings})


def opened(model: Path, *adapters: str | Path) -> Checkpoint:
    return merged(open_source(model), [str(adapter) for adapter in adapters], Options())


def values(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """All tensors in float32; each is read as a whole, and from an element in the middle of a row on."""
    result = {}
    for tensor in checkpoint.tensors:
        count = math.prod(tensor.shape)
        whole, rest = (np.empty((count - start) * 4, dtype=np.uint8) for start in (0, count // 3))
        tensor.read(0, count, "F32", whole)
        tensor.read(count // 3, count - count // 3, "F32", rest)
        assert (whole[count // 3 * 4 :] == rest).all()
        result[tensor.name] = torch.from_numpy(whole.view(np.float32).reshape(tensor.shape))
    return result


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(TOKENS).logits
    return result


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_merged_model_computes_what_peft_does(name: str, model_of: Callable[[str], Path], tmp_path: Path) -> None:
    kind, settings = ADAPTERS[name]
    model = trained(model_of(kind), tmp_path / "adapter", lora(**settings))
    expected = logits(model)
    checkpoint = opened(model_of(kind), tmp_path / "adapter")
    ours = values(checkpoint)
    config = AutoConfig.from_pretrained(model_of(kind))
    assert checkpoint.config is not None
    config.tie_word_embeddings = checkpoint.config["tie_word_embeddings"]
    own = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert not own.load_state_dict(ours, strict=False).unexpected_keys
    if config.tie_word_embeddings:
        own.tie_weights()
    assert_near(logits(own), expected, "torch")
    if name in MERGED_OTHERWISE:
        return
    theirs = model.merge_and_unload().state_dict()
    for tensor, found in ours.items():
        if name == "rank 1":  # there is one order to sum in
            assert torch.equal(found, theirs[tensor])
        else:
            assert (found - theirs[tensor]).abs().max() <= SAME


EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
# Stored one by one under two names, stacked, and stacked with outputs in the columns.
WITH_EXPERTS = {
    "one by one": Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=4),
    "w1 w2 w3": MixtralConfig(**SMALL, num_local_experts=3),
    "stacked": Qwen3_5MoeTextConfig(
        **SMALL,
        **EXPERTS,
        num_experts=4,
        shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"],
    ),
    "transposed": GptOssConfig(**SMALL | {"intermediate_size": 64}, num_local_experts=4, head_dim=16),
}


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_parameters_of_experts_are_merged_as_peft_does(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(WITH_EXPERTS[name], dtype=torch.float32).save_pretrained(tmp_path / "model")
    if name == "stacked":
        stack_experts(tmp_path / "model" / "model.safetensors")
    settings = {"target_modules": ["q_proj"], "lora_alpha": 9, "rank_pattern": {"experts.down_proj": 3}}
    config = lora(target_parameters=["experts.gate_up_proj", "experts.down_proj"], **settings)
    model = trained(tmp_path / "model", tmp_path / "adapter", config)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    theirs, base = load_file(tmp_path / "merged" / "model.safetensors"), load_file(tmp_path / "model/model.safetensors")
    ours = values(opened(tmp_path / "model", tmp_path / "adapter"))
    assert ours.keys() == theirs.keys()
    for tensor, found in ours.items():
        assert (found - theirs[tensor]).abs().max() <= SAME, tensor
        changes = tensor.endswith(("q_proj.weight", "down_proj", "gate_up_proj")) or ".experts." in tensor
        assert torch.equal(found, base[tensor]) != changes or "bias" in tensor or "shared" in tensor, tensor
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    cut = next(key for key in adapter if "experts" in key and "lora_A" in key)
    damaged(tmp_path / "adapter", **{cut: adapter[cut][1:].clone()})
    line = refused("plan", tmp_path / "model", "--adapter", tmp_path / "adapter")
    assert cut in line and "rank" in line


def stack_experts(file: Path) -> None:
    """Write experts that are stored one by one as transformers stacks them."""
    tensors = load_file(file)
    singles = [key for key in tensors if re.search(r"\.experts\.\d+\.", key)]
    of = {key: tensors.pop(key) for key in singles}
    for layer in {key.partition(".experts.")[0] for key in singles}:
        parts = [
            {p: of[f"{layer}.experts.{e}.{p}_proj.weight"] for p in ("gate", "up", "down")}
            for e in range(len(singles) // (3 * SMALL["num_hidden_layers"]))
        ]
        tensors[f"{layer}.experts.gate_up_proj"] = torch.stack([torch.cat([p["gate"], p["up"]]) for p in parts])
        tensors[f"{layer}.experts.down_proj"] = torch.stack([p["down"] for p in parts])
    save_file(tensors, file, metadata={"format": "pt"})


def test_trained_tokens_alone(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    config = TrainableTokensConfig(token_indices=[3, 7, 299], target_modules=["embed_tokens"])
    model = trained(model_of("llama"), tmp_path / "adapter", config)
    theirs = model.merge_and_unload().state_dict()
    assert all(
        torch.equal(found, theirs[name])
        for name, found in values(opened(model_of("llama"), tmp_path / "adapter")).items()
    )


def test_several_adapters_with_weights(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    base = load_file(model_of("llama") / "model.safetensors")
    wanted = {name: tensor.clone() for name, tensor in base.items()}
    for number, weight in enumerate((0.5, -2.0, 1.0)):
        trained(model_of("llama"), tmp_path / str(number), lora(use_rslora=number == 1), seed=number)
        alone = values(opened(model_of("llama"), tmp_path / str(number)))
        for name, tensor in alone.items():
            wanted[name] += weight * (tensor - base[name])
    names = [f"{tmp_path}/0:0.5", f"{tmp_path}/1:-2", f"{tmp_path}/2"]
    for name, found in values(opened(model_of("llama"), *names)).items():
        assert (found - wanted[name]).abs().max() <= SAME


def both(model_of: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path, Path]:
    """A model, an adapter of rank 1, and the folder into which PEFT has merged it, to the last bit as we do."""
    model = trained(model_of("llama"), tmp_path / "adapter", lora(r=1))
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    return with_tokenizer(model_of("llama")), tmp_path / "adapter", with_tokenizer(tmp_path / "merged")


@pytest.mark.parametrize(
    "command",
    [
        ["quantize"],
        ["quantize", "--recipe", "t4"],
        ["quantize", "--recipe", "t3", "--calibration-tokens", "2048", "--calibrate", "mixture"],
        ["export", "--target", "gguf", "--type", "f32", "--without-tokenizer"],
        ["export", "--target", "vllm", "--group-size", "32"],
        ["export", "--target", "bf16"],
    ],
    ids=lambda command: command[-1],
)
def test_results_have_the_weights_of_the_merged_model(
    command: list[str], model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    model, adapter, merged_model = both(model_of, tmp_path)
    done(command[0], model, tmp_path / "ours", *command[1:], "--adapter", adapter)
    done(command[0], merged_model, tmp_path / "theirs", *command[1:])
    weights = [
        {name: data for name, data in folder_bytes(tmp_path / out).items() if name.endswith((".safetensors", ".gguf"))}
        for out in ("ours", "theirs")
    ]
    assert len(weights[0]) == len(weights[1]) == 1
    if "gguf" in command:  # which names the model in the file
        weights = [{"": data[-(1 << 18) :]} for of in weights for data in of.values()]
    assert list(weights[0].values()) == list(weights[1].values())
    manifest = json.loads((tmp_path / "ours" / "pqweights.json").read_text())
    (stated,) = manifest["adapters"]
    assert stated["weight"] == 1 and len(stated["fingerprint"]) == 64
    assert str(tmp_path) not in json.dumps(manifest)
    done("verify", tmp_path / "ours")
    done("inspect", tmp_path / "ours")
    done("card", tmp_path / "ours")
    assert stated["fingerprint"] in (tmp_path / "ours" / "README.md").read_text()


def test_a_result_of_another_adapter_is_another_result(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    model, out = model_of("llama"), tmp_path / "out"
    for name in "ab":
        trained(model, tmp_path / name, lora(), seed=ord(name))
    pqweights.quantize(model, out, adapter=str(tmp_path / "a"))
    assert pqweights.quantize(model, out, adapter=str(tmp_path / "a")).already_done
    for other in ((), str(tmp_path / "b"), f"{tmp_path / 'a'}:0.5"):
        with raises(OutputError, "`overwrite`"):
            pqweights.quantize(model, out, adapter=other)


def test_bases_that_are_quantized_are_decoded_first(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    trained(model_of("llama"), tmp_path / "adapter", lora())
    done("quantize", model_of("llama"), tmp_path / "master")
    done("export", model_of("llama"), tmp_path / "int4", "--target", "vllm", "--group-size", "32")
    for base in (tmp_path / "master", tmp_path / "int4"):
        decoded, changed = values(open_source(base)), values(opened(base, tmp_path / "adapter"))
        plain, with_adapter = values(opened(model_of("llama"))), values(opened(model_of("llama"), tmp_path / "adapter"))
        for name, found in changed.items():
            assert (found - decoded[name] - (with_adapter[name] - plain[name])).abs().max() <= SAME


def test_plan_says_what_is_merged(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    trained(model_of("tied"), tmp_path / "mine", lora(target_modules=["lm_head"]))
    shown = json.loads(done("plan", model_of("tied"), "--adapter", tmp_path / "mine", "--json").stdout)
    assert any("mine" in line and "lm_head.weight" in line for line in shown["warnings"])
    assert "lm_head.weight" in {tensor["name"] for tensor in shown["tensors"]}


def test_memory_does_not_grow_with_the_weight(tmp_path: Path) -> None:
    """Rows of B are read with the rows of the weight; of a weight of 64 times the rows no more is read at once."""
    rank, inputs, outputs = 4, 64, 1 << 14
    weight = {"layer.weight": f32(gaussian(outputs, inputs))}
    parts = {"layer.lora_A.weight": f32(gaussian(rank, inputs)), "layer.lora_B.weight": f32(gaussian(outputs, rank))}
    for folder, file, tensors in (("base", "model", weight), ("adapter", "adapter_model", parts)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{file}.safetensors").write_bytes(safetensors_bytes(tensors))
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    checkpoint = opened(tmp_path / "base", tmp_path / "adapter")
    storage = checkpoint.adapters[0].files.storage
    checkpoint.tensors[0].read(0, inputs, "F32", out := np.empty(inputs * 4, dtype=np.uint8))
    before = storage.bytes_read
    checkpoint.tensors[0].read(inputs * 100, inputs, "F32", out)
    assert storage.bytes_read - before == rank * 4


MLX_LAYERS = ["self_attn.q_proj", "mlp.down_proj"]
# The model, whether it is DoRA, and which layers.
OF_MLX: dict[str, tuple[str, bool, list[str]]] = {
    "LoRA": ("llama", False, MLX_LAYERS),
    "DoRA": ("llama", True, MLX_LAYERS),
    "embeddings": ("llama", False, [*MLX_LAYERS, "model.embed_tokens"]),
    "DoRA of embeddings": ("llama", True, ["model.embed_tokens"]),
    "tied embeddings": ("tied", False, ["model.embed_tokens"]),
}


def trained_by_mlx(model: Path, out: Path, layers: list[str], *, is_dora: bool = False) -> dict[str, torch.Tensor]:
    """Write an adapter of mlx-lm whose every parameter is random, and return the weights that its own fuse gives."""
    out.mkdir()
    mx.random.seed(3)
    own, parameters = load_model(model)[0], {"rank": 3, "scale": 1.7, "dropout": 0.0, "keys": layers}
    linear_to_lora_layers(own, 2, dict(parameters, keys=set(layers)), use_dora=is_dora)
    parts = {
        name: value + 0.05 * mx.random.normal(value.shape)
        for name, value in tree_flatten(own.parameters())
        if name.rpartition(".")[2] in ("lora_a", "lora_b", "m")
    }
    own.load_weights([*parts.items()], strict=False)
    mx.save_safetensors(str(out / "adapters.safetensors"), parts)
    kind = "dora" if is_dora else "lora"
    settings = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters}
    (out / "adapter_config.json").write_text(json.dumps(settings))
    assert load_adapters(load_model(model)[0], str(out)) is not None
    fused = {name: module.fuse() for name, module in own.named_modules() if hasattr(module, "fuse")}
    return {f"{name}.weight": torch.from_numpy(np.array(module.weight)) for name, module in fused.items()}


@pytest.mark.parametrize("name", OF_MLX)
def test_adapters_of_mlx_are_merged_as_mlx_fuses_them(
    name: str, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    kind, is_dora, layers = OF_MLX[name]
    fused = trained_by_mlx(model_of(kind), tmp_path / "mine", layers, is_dora=is_dora)
    base, checkpoint = values(open_source(model_of(kind))), opened(model_of(kind), tmp_path / "mine")
    ours = values(checkpoint)
    assert checkpoint.config is not None and checkpoint.config["tie_word_embeddings"] == (kind == "tied")
    assert fused and ours.keys() == base.keys()
    for tensor, value in ours.items():
        assert each_near(value, fused.get(tensor, base[tensor]), 0, SAME)
        assert torch.equal(value, base[tensor]) == (tensor not in fused)
    if not is_dora:
        half = values(opened(model_of(kind), f"{tmp_path / 'mine'}:0.5"))
        for tensor in fused:
            assert each_near(half[tensor], (base[tensor] + fused[tensor]) / 2, 0, SAME)


def test_adapters_of_mlx_that_cannot_be_merged_are_refused_by_name(
    model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    trained_by_mlx(model_of("llama"), tmp_path / "mine", MLX_LAYERS)
    path = tmp_path / "mine" / "adapter_config.json"
    settings, own = json.loads(path.read_text()), load_file(tmp_path / "mine" / "adapters.safetensors")
    a, experts = next(name for name in own if name.endswith("lora_a")), "model.layers.0.mlp.switch_mlp.up_proj.lora_a"
    for change, tensors, named in (
        ({"fine_tune_type": "full"}, own, "fine_tune_type"),
        ({"lora_parameters": {"rank": 3}}, own, "lora_parameters"),
        ({"lora_parameters": {"rank": 4, "scale": 1.0}}, own, "lora_a"),
        ({"fine_tune_type": "dora"}, own, "lora_magnitude_vector"),
        ({}, own | {a: torch.zeros(5, 3)}, "lora_a"),
        ({}, own | {experts: torch.zeros(4, 3)}, "switch_mlp"),
        ({}, own | {"model.norm.weight": torch.zeros(64)}, "model.norm.weight"),
    ):
        path.write_text(json.dumps(settings | change))
        save_file(tensors, tmp_path / "mine" / "adapters.safetensors")
        line = refused("plan", model_of("llama"), "--adapter", tmp_path / "mine")
        assert "mine" in line and named in line


def damaged(adapter: Path, settings: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> None:
    """Change settings and tensors of an adapter in place; None removes a tensor."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (settings or {})))
    file = adapter / "adapter_model.safetensors"
    kept = load_file(file) | tensors
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, file)


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
REFUSED: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor | None], list[str]]] = {
    "another method": ({"peft_type": "LOHA"}, {}, ["LOHA"]),
    "no method": ({"peft_type": None}, {}, ["peft_type"]),
    "a changed base": ({"init_lora_weights": "pissa_niter_4"}, {}, ["init_lora_weights", "pissa"]),
    "a rank that is none": ({"r": "four"}, {}, ["`r`"]),
    "another rank": ({"r": 8}, {}, ["lora_A", "rank"]),
    "a pattern without end": ({"rank_pattern": {"(a+)+$": 3}}, {}, ["rank_pattern"]),
    "no expression": ({"alpha_pattern": {"(": 3}}, {}, ["alpha_pattern"]),
    "half a product": ({}, {A: None}, ["q_proj", "lora_A", "lora_B"]),
    "another width": ({}, {A: torch.zeros(4, 65)}, [A, "[64, 64]", "[64, 65]"]),
    "integers": ({}, {A: torch.zeros(4, 64, dtype=torch.int32)}, [A, "I32"]),
    "a module that is not there": ({}, {A.replace("q_proj", "w_proj"): torch.zeros(4, 64)}, ["w_proj"]),
    "part of another method": ({}, {A.replace("lora_A", "hada_w1_a"): torch.zeros(4, 64)}, ["hada_w1_a"]),
    "a resized vocabulary": ({}, {"base_model.model.model.embed_tokens.weight": torch.zeros(301, 64)}, ["[301, 64]"]),
    "DoRA without norms": ({"use_dora": True}, {}, ["use_dora", "lora_magnitude_vector"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_merged_is_refused_by_name(name: str, model_of: Callable[[str], Path], tmp_path: Path) -> None:
    settings, tensors, named = REFUSED[name]
    trained(model_of("llama"), tmp_path / "mine", lora())
    damaged(tmp_path / "mine", settings, **tensors)
    for command in (["plan"], ["quantize", tmp_path / "out"], ["export", tmp_path / "out", "--target", "mlx"]):
        line = refused(command[0], model_of("llama"), *command[1:], "--adapter", tmp_path / "mine")
        assert all(word in line for word in ["mine", *named])
    assert not (tmp_path / "out").exists()


def test_what_has_no_weight_is_not_weighed(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    for name, settings in (("saved", {"modules_to_save": ["norm"]}), ("dora", {"use_dora": True})):
        trained(model_of("llama"), tmp_path / name, lora(**settings))
        assert name in refused("plan", model_of("llama"), "--adapter", f"{tmp_path / name}:0.5")


def test_folders_that_are_no_adapters_are_refused(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    model = model_of("llama")
    assert "adapter_config.json" in refused("plan", model, "--adapter", model)
    assert "absent" in refused("plan", model, "--adapter", tmp_path / "absent")
    trained(model, tmp_path / "mine", lora())
    answer = invoke("quantize", model, tmp_path / "out", "--lossless", "--adapter", tmp_path / "mine")
    assert answer.exit_code == 2 and "--adapter" in answer.stderr
    shown = refused("plan", tmp_path / "mine")
    assert "adapter" in shown and not read_safetensors(model / "model.safetensors").keys() & {"out"}
