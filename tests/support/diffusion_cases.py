"""Tiny image and video models in the layout of their original code: one block of each kind, of 256 channels.

Names are those that the converters of diffusers and ComfyUI-GGUF read; what a family has for it to be told from others
is always there.
"""

from __future__ import annotations

from pathlib import Path

from helpers import Tensor, bf16, f32, gaussian, write_checkpoint

FLUX = """
    img_in.weight|final_layer.adaLN_modulation.1.weight|time_in.in_layer.weight 256 64
    double_blocks.0.img_attn.proj.weight 256 256
    double_blocks.0.img_attn.qkv.weight 768 256
    double_blocks.0.img_attn.norm.key_norm.scale 128
    double_blocks.0.img_mlp.2.weight 256 1024
    double_blocks.0.img_mlp.2.bias 256
    single_blocks.0.linear1.weight 1792 256
"""
SD3 = """
    pos_embed 1 64 256
    x_embedder.proj.weight 256 16 2 2
    final_layer.linear.weight 64 256
    joint_blocks.0.x_block.attn.qkv.weight|joint_blocks.0.context_block.attn.qkv.weight 768 256
    joint_blocks.0.x_block.attn.ln_q.weight 64
    joint_blocks.0.x_block.mlp.fc2.weight 256 1024
"""
UNET = """
    time_embed.0.weight 1280 320
    input_blocks.0.0.weight 320 4 3 3
    input_blocks.1.0.in_layers.2.weight 320 320 3 3
    input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight 320 768
    input_blocks.1.1.transformer_blocks.0.attn2.to_v.weight 320 768
    input_blocks.1.1.proj_in.weight 320 320
    input_blocks.1.1.norm.weight 320
    out.2.weight 4 320 3 3
"""
LUMINA = """
    x_embedder.weight 256 64
    cap_embedder.1.weight 256 512
    context_refiner.0.attention.qkv.weight 512 256
    layers.0.attention.qkv.weight 512 256
    layers.0.feed_forward.w2.weight 256 1024
    layers.0.attention.q_norm.weight 64
"""
# A family, by the name that it has in docs/diffusion.md, and what general.architecture of its files is.
ORIGINAL = {
    "FLUX.1": ("flux", f"{FLUX}\n double_blocks.0.img_mod.lin.weight 1536 256"),
    "FLUX.2": ("flux", f"{FLUX}\n double_stream_modulation_img.lin.weight 1536 256"),
    "Chroma": ("flux", f"{FLUX}\n distilled_guidance_layer.in_proj.weight 256 64"),
    "Stable Diffusion 3, 3.5": ("sd3", SD3),
    "AuraFlow": (
        "aura",
        """
        positional_encoding 1 64 256
        register_tokens 1 8 256
        modF.1.weight 512 256
        double_layers.0.attn.w1q.weight|double_layers.0.attn.w1v.weight 256 256
        single_layers.0.mlp.c_proj.weight 256 768
        """,
    ),
    "HiDream": (
        "hidream",
        """
        caption_projection.0.linear.weight 256 4096
        double_stream_blocks.0.block.ff_i.shared_experts.w3.weight 512 256
        double_stream_blocks.0.block.ff_i.experts.0.w2.weight 256 512
        double_stream_blocks.0.block.ff_i.gate.weight 4 256
        """,
    ),
    "Cosmos Predict 2": (
        "cosmos",
        """
        x_embedder.proj.1.weight 256 68
        blocks.0.mlp.layer1.weight 1024 256
        blocks.0.mlp.layer2.weight 256 1024
        blocks.0.adaln_modulation_cross_attn.1.weight 256 256
        """,
    ),
    "HunyuanVideo": (
        "hyvid",
        """
        img_in.proj.weight 256 16 1 2 2
        txt_in.individual_token_refiner.blocks.0.norm1.weight 256
        txt_in.individual_token_refiner.blocks.0.self_attn_qkv.weight 768 256
        double_blocks.0.img_attn_proj.weight 256 256
        double_blocks.0.img_attn_qkv.weight 768 256
        single_blocks.0.linear2.weight 256 1280
        """,
    ),
    "Wan 2.1, 2.2": (
        "wan",
        """
        patch_embedding.weight 256 16 1 2 2
        text_embedding.2.weight 256 256
        head.modulation 1 2 256
        blocks.0.modulation 1 6 256
        blocks.0.self_attn.norm_q.weight 256
        blocks.0.self_attn.q.weight|blocks.0.self_attn.v.weight 256 256
        blocks.0.ffn.2.weight 256 1024
        blocks.0.ffn.2.bias 256
        """,
    ),
    "LTX-Video": (
        "ltxv",
        """
        patchify_proj.weight 256 128
        adaln_single.emb.timestep_embedder.linear_2.weight 256 256
        scale_shift_table 2 256
        transformer_blocks.0.scale_shift_table 6 256
        transformer_blocks.0.attn1.to_v.weight 256 256
        """,
    ),
    "LTX-2": (
        "ltxv",
        """
        patchify_proj.weight|audio_patchify_proj.weight 256 128
        adaln_single.emb.timestep_embedder.linear_2.weight 256 256
        transformer_blocks.0.audio_scale_shift_table 6 256
        transformer_blocks.0.attn1.to_v.weight 256 256
        """,
    ),
    "Qwen-Image": (
        "qwen_image",
        """
        img_in.weight 256 64
        txt_norm.weight 64
        transformer_blocks.0.img_mod.1.weight 1536 256
        transformer_blocks.0.attn.add_q_proj.weight|transformer_blocks.0.attn.to_v.weight 256 256
        """,
    ),
    "Z-Image": ("lumina2", f"{LUMINA}\n layers.0.adaLN_modulation.0.weight 1024 256\n cap_pad_token 1 256"),
    "Lumina 2": ("lumina2", f"{LUMINA}\n layers.0.adaLN_modulation.1.weight 1024 256"),
    "Stable Diffusion XL": ("sdxl", f"{UNET}\n label_emb.0.0.weight 1280 2816"),
    "Stable Diffusion 1, 2": ("sd1", UNET),
    "Mochi": ("mochi", "blocks.0.attn.qkv_x.weight 768 256\n t5_yproj.weight 256 512"),
    "Sana": (
        "sana",
        """
        blocks.0.cross_attn.kv_linear.weight 512 256
        blocks.0.mlp.inverted_conv.conv.weight 1280 256 1 1
        """,
    ),
}


def tensors_of(family: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes, of lines such as `img_in.weight 256 64`; several names with a bar between them."""
    shapes = {}
    for line in ORIGINAL[family][1].split("\n"):
        names, *sizes = line.split() or [""]
        for name in filter(None, names.split("|")):
            shapes[name] = tuple(map(int, sizes))
    return shapes


def original(family: str, *, prefix: str = "", dtype: str = "BF16") -> dict[str, Tensor]:
    """The tensors of a tiny model. prefix: what names begin with"""
    stored = {"BF16": bf16, "F32": f32}[dtype]
    shapes = tensors_of(family).items()
    return {prefix + name: stored(gaussian(*shape, seed=seed)) for seed, (name, shape) in enumerate(shapes)}


def single_file(folder: Path, family: str, **of: str) -> Path:
    """Write a tiny model as one file, in an own folder. of: see `original`"""
    return write_checkpoint(folder, original(family, **of)) / "model.safetensors"
