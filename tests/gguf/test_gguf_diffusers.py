"""GGUF files of tiny image and video models in diffusers: it computes with them what it computes with the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from commands import done
from safetensors.torch import save_file

# Of what diffusers itself does: deprecated modules, and autocast on a CPU.
pytestmark = pytest.mark.filterwarnings("ignore")

HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 128}
MORE_HEADS: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 64}
IMAGE: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "patch_size": 2, "sample_size": 8}
WAN: dict[str, Any] = (
    HEADS
    | {"patch_size": [1, 2, 2], "in_channels": 4, "out_channels": 4, "text_dim": 64, "freq_dim": 64, "ffn_dim": 512}
    | {"num_layers": 1, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32}
)
# What a tiny model of each class is made of: 256 channels, so that blocks of 256 divide its rows.
MODELS: dict[str, dict[str, Any]] = {
    "FluxTransformer2DModel": HEADS
    | {"patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 256}
    | {"pooled_projection_dim": 64, "axes_dims_rope": [16, 56, 56], "guidance_embeds": True},
    "Flux2Transformer2DModel": HEADS
    | {"patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 256}
    | {"timestep_guidance_channels": 64, "axes_dims_rope": [32, 32, 32, 32]},
    "ChromaTransformer2DModel": HEADS
    | {"patch_size": 1, "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 256}
    | {"axes_dims_rope": [16, 56, 56], "approximator_num_channels": 64, "approximator_hidden_dim": 64}
    | {"approximator_layers": 1},
    "SD3Transformer2DModel": MORE_HEADS
    | IMAGE
    | {"num_layers": 2, "joint_attention_dim": 256, "caption_projection_dim": 256, "pooled_projection_dim": 64}
    | {"pos_embed_max_size": 8, "qk_norm": "rms_norm"},
    "AuraFlowTransformer2DModel": MORE_HEADS
    | IMAGE
    | {"num_mmdit_layers": 1, "num_single_dit_layers": 1, "joint_attention_dim": 256, "caption_projection_dim": 256}
    | {"pos_embed_max_size": 16},
    "HiDreamImageTransformer2DModel": HEADS
    | {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1}
    | {"caption_channels": [256, 256], "text_emb_dim": 64, "num_routed_experts": 2, "num_activated_experts": 1}
    | {"axes_dims_rope": [64, 32, 32], "max_resolution": [8, 8], "llama_layers": [0, 0]},
    "LTXVideoTransformer3DModel": MORE_HEADS
    | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 256, "num_layers": 1, "caption_channels": 256},
    "LTX2VideoTransformer3DModel": MORE_HEADS
    | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 256, "num_layers": 1, "caption_channels": 256}
    | {"audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2, "audio_attention_head_dim": 32}
    | {"audio_cross_attention_dim": 64},
    "HunyuanVideoTransformer3DModel": HEADS
    | {"in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1}
    | {"patch_size": 2, "patch_size_t": 1, "guidance_embeds": True, "text_embed_dim": 64, "pooled_projection_dim": 64}
    | {"rope_axes_dim": [16, 56, 56]},
    **dict.fromkeys(("WanTransformer3DModel", "SkyReelsV2Transformer3DModel", "ChronoEditTransformer3DModel"), WAN),
    "WanVACETransformer3DModel": WAN | {"vace_layers": [0], "vace_in_channels": 8},
    "CosmosTransformer3DModel": HEADS
    | {"in_channels": 4, "out_channels": 4, "num_layers": 1, "mlp_ratio": 2, "text_embed_dim": 256}
    | {"adaln_lora_dim": 32, "max_size": [4, 32, 32], "patch_size": [1, 2, 2], "extra_pos_embed_type": None}
    | {"concat_padding_mask": False},
    "QwenImageTransformer2DModel": HEADS
    | {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 1, "joint_attention_dim": 64}
    | {"axes_dims_rope": [16, 56, 56]},
    "ZImageTransformer2DModel": {"all_patch_size": [2], "all_f_patch_size": [1], "in_channels": 16, "dim": 256}
    | {"n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 64}
    | {"axes_dims": [32, 48, 48], "axes_lens": [64, 64, 64]},
    "Lumina2Transformer2DModel": {"sample_size": 16, "patch_size": 2, "in_channels": 4, "hidden_size": 256}
    | {"num_layers": 1, "num_refiner_layers": 1, "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 16}
    | {"axes_dim_rope": [16, 24, 24], "cap_feat_dim": 64},
    "MochiTransformer3DModel": HEADS
    | {"patch_size": 2, "num_layers": 1, "pooled_projection_dim": 64, "in_channels": 4, "text_embed_dim": 64}
    | {"time_embed_dim": 16, "max_sequence_length": 16},
    "SanaTransformer2DModel": MORE_HEADS
    | {"in_channels": 4, "out_channels": 4, "num_layers": 1, "num_cross_attention_heads": 4, "sample_size": 8}
    | {"cross_attention_head_dim": 64, "cross_attention_dim": 256, "caption_channels": 64},
    "UNet2DConditionModel": {"block_out_channels": [64, 128], "layers_per_block": 1, "sample_size": 8}
    | {"down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"]}
    | {"up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"], "cross_attention_dim": 64, "attention_head_dim": 16},
}


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def positions(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


STEP = torch.tensor([5])
IMAGES: dict[str, Any] = {"hidden_states": numbers(1, 4, 8, 8), "encoder_hidden_states": numbers(1, 3, 64)}
FRAMES: dict[str, Any] = {"hidden_states": numbers(1, 4, 1, 8, 8), "encoder_hidden_states": numbers(1, 3, 64)}
TOKENS: dict[str, Any] = {"hidden_states": numbers(1, 4, 16), "encoder_hidden_states": numbers(1, 3, 256)}
TEXT: dict[str, Any] = {"encoder_hidden_states": numbers(1, 3, 256)}
MASK = torch.ones(1, 3)
# What they are given.
INPUTS: dict[str, dict[str, Any]] = {
    "FluxTransformer2DModel": TOKENS
    | {"pooled_projections": numbers(1, 64), "guidance": torch.ones(1)}
    | {"img_ids": positions(4, 3), "txt_ids": positions(3, 3)},
    "Flux2Transformer2DModel": TOKENS
    | {"guidance": torch.ones(1), "img_ids": positions(1, 4, 4), "txt_ids": positions(1, 3, 4)},
    "ChromaTransformer2DModel": TOKENS | {"img_ids": positions(4, 3), "txt_ids": positions(3, 3)},
    "SD3Transformer2DModel": IMAGES | TEXT | {"pooled_projections": numbers(1, 64)},
    "AuraFlowTransformer2DModel": IMAGES | TEXT,
    "HiDreamImageTransformer2DModel": {"hidden_states": numbers(1, 4, 8, 8), "pooled_embeds": numbers(1, 64)}
    | {"encoder_hidden_states_t5": numbers(1, 3, 256), "encoder_hidden_states_llama3": numbers(1, 1, 3, 256)}
    | {"timesteps": STEP},
    "LTXVideoTransformer3DModel": TEXT
    | {"hidden_states": numbers(1, 8, 4), "encoder_attention_mask": MASK, "num_frames": 2, "height": 2, "width": 2},
    "LTX2VideoTransformer3DModel": TEXT
    | {"hidden_states": numbers(1, 8, 4), "audio_hidden_states": numbers(1, 4, 4), "num_frames": 2, "height": 2}
    | {"audio_encoder_hidden_states": numbers(1, 3, 256), "width": 2, "audio_num_frames": 4},
    "HunyuanVideoTransformer3DModel": FRAMES
    | {"encoder_attention_mask": MASK, "pooled_projections": numbers(1, 64), "guidance": torch.ones(1)},
    **dict.fromkeys(("WanTransformer3DModel", "SkyReelsV2Transformer3DModel", "ChronoEditTransformer3DModel"), FRAMES),
    "CosmosTransformer3DModel": FRAMES | TEXT,
    "WanVACETransformer3DModel": FRAMES | {"control_hidden_states": numbers(1, 8, 1, 8, 8)},
    "QwenImageTransformer2DModel": TOKENS
    | {"encoder_hidden_states": numbers(1, 3, 64), "encoder_hidden_states_mask": MASK, "img_shapes": [(1, 2, 2)]},
    "ZImageTransformer2DModel": {"x": [numbers(16, 1, 8, 8)], "t": STEP, "cap_feats": [numbers(3, 64)]},
    "Lumina2Transformer2DModel": IMAGES | {"encoder_attention_mask": MASK.bool()},
    "MochiTransformer3DModel": FRAMES
    | {"encoder_hidden_states": numbers(1, 16, 64), "encoder_attention_mask": torch.ones(1, 16)},
    "SanaTransformer2DModel": IMAGES,
    "UNet2DConditionModel": {"sample": numbers(1, 4, 8, 8), "encoder_hidden_states": numbers(1, 3, 64)},
}
# Of the sum of squares of outputs. Weights in Q4_K_M have errors of 0.005 of theirs.
MOST = {"bf16": 1e-9, "q4_k_m": 0.02}


def outputs(model: Any) -> torch.Tensor:
    """What a model computes."""
    name = type(model).__name__
    given = INPUTS[name] if {"timesteps", "t"} & INPUTS[name].keys() else INPUTS[name] | {"timestep": STEP}
    with torch.no_grad():
        (first, *_) = model.eval()(**given, return_dict=False)
    return first[0] if isinstance(first, list) else first


def made(name: str) -> Any:
    """A tiny model, whose weights are numbers of BF16."""
    torch.manual_seed(0)
    return getattr(diffusers, name)(**MODELS[name]).to(torch.bfloat16)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).square().sum() / expected.square().sum())


def in_diffusers(name: str, file: Path, config: Path) -> Any:
    """Load a file of GGUF."""
    quantization = diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32)
    loader = getattr(diffusers, name).from_single_file
    return loader(str(file), config=str(config), quantization_config=quantization, torch_dtype=torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_export_of_a_folder_computes_what_the_model_does(name, tmp_path):
    made(name).save_pretrained(tmp_path / "source")
    expected = outputs(getattr(diffusers, name).from_pretrained(tmp_path / "source", torch_dtype=torch.float32))
    done("export", tmp_path / "source", tmp_path / "out", "-t", "gguf", "--type", ",".join(MOST), "--name", "tiny")
    for kind, most in MOST.items():
        model = in_diffusers(name, tmp_path / f"out/tiny-{kind.upper()}.gguf", tmp_path / "out")
        assert error(outputs(model), expected) < most, kind


# What original layouts call the tensors of diffusers, in this order.
WAN_NAMES = {
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "attn1": "self_attn",
    "attn2": "cross_attn",
    ".to_out.0.": ".o.",
    ".to_q.": ".q.",
    ".to_k.": ".k.",
    ".to_v.": ".v.",
    "proj_out": "head.head",
    ".scale_shift_table": ".modulation",
    "scale_shift_table": "head.modulation",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    ".norm2.": ".norm3.",
}
Z_IMAGE = {
    "all_final_layer.2-1.": "final_layer.",
    "all_x_embedder.2-1.": "x_embedder.",
    ".to_out.0.": ".out.",
    ".norm_k.": ".k_norm.",
    ".norm_q.": ".q_norm.",
}
SD3 = {
    "pos_embed.pos_embed": "pos_embed",
    "pos_embed.proj": "x_embedder.proj",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
    "transformer_blocks": "joint_blocks",
    "attn.to_out.0": "x_block.attn.proj",
    "attn.to_add_out": "context_block.attn.proj",
    "attn.norm_added_q": "context_block.attn.ln_q",
    "attn.norm_added_k": "context_block.attn.ln_k",
    "attn.norm_q": "x_block.attn.ln_q",
    "attn.norm_k": "x_block.attn.ln_k",
    "norm1.linear": "x_block.adaLN_modulation.1",
    "norm1_context.linear": "context_block.adaLN_modulation.1",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
}
# The names; and for queries, keys and values that are joined, what those of each are called.
ORIGINAL: dict[str, tuple[dict[str, str], dict[str, tuple[str, str, str]]]] = {
    "WanTransformer3DModel": (WAN_NAMES, {}),
    "ZImageTransformer2DModel": (Z_IMAGE, {"attention.qkv": ("attention.to_q", "attention.to_k", "attention.to_v")}),
    "SD3Transformer2DModel": (
        SD3,
        {
            "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
            "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        },
    ),
}


def in_original_layout(name: str) -> dict[str, torch.Tensor]:
    """The tensors of a tiny model under the names of the original code."""
    names, joined = ORIGINAL[name]
    tensors, result = made(name).state_dict(), {}
    for joint, parts in joined.items():
        for first in [of for of in tensors if parts[0] in of]:
            whole = torch.cat([tensors.pop(first.replace(parts[0], part)) for part in parts])
            tensors[first.replace(parts[0], joint)] = whole
    for old, tensor in tensors.items():
        new = old
        for theirs, own in names.items():
            new = new.replace(theirs, own)
        result[new] = tensor.contiguous()
    return result


@pytest.mark.parametrize("name", ORIGINAL)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_export_of_the_original_layout_computes_what_diffusers_makes_of_it(name, prefix, tmp_path):
    source, config = tmp_path / "source/model.safetensors", tmp_path / "config"
    source.parent.mkdir()
    save_file({prefix + of: tensor for of, tensor in in_original_layout(name).items()}, source)
    made(name).save_config(config)
    loader = getattr(diffusers, name).from_single_file
    expected = outputs(loader(str(source), config=str(config), torch_dtype=torch.float32))
    done("export", source, tmp_path / "out", "-t", "gguf", "--type", ",".join(MOST), "--name", "tiny")
    for kind, most in MOST.items():
        model = in_diffusers(name, tmp_path / f"out/tiny-{kind.upper()}.gguf", config)
        assert error(outputs(model), expected) < most, kind
