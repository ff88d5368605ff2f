"""Transformers and UNets of image and video models: a row for each family, as ComfyUI-GGUF and diffusers load them.

A family is recognized by names of tensors in the layout of its original code, which ComfyUI loads, or by the class that
the config.json of diffusers names. The facts are those of ComfyUI-GGUF (loader.py, tools/convert.py, tools/lcpp.patch)
and of diffusers (loaders/single_file_model.py, quantizers/gguf).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

# Before the names of the original layout: in a file with all models of a pipeline, and as its training code saved it.
PREFIXES = ("model.diffusion_model.", "net.", "")
# The key of a config.json of diffusers that names the class of the model.
CLASS = "_class_name"
COMFYUI, DIFFUSERS = "ComfyUI-GGUF", "diffusers"
# Why a tensor stays plain.
OUTSIDE = "outside of the matrices of blocks"

# What the two programs decode; ComfyUI-GGUF has other types decoded by the gguf package, which takes long.
TYPES = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS")

# Roles of matrices, told by their names.
VALUES, JOINED, DOWN = "values", "queries, keys and values", "down"
_ROLES = (
    (VALUES, re.compile(r".*(\.to_v|\.add_v_proj|\.v|attn_v|\.attn\.w[12]v|_attn\.v_proj)\.weight")),
    (JOINED, re.compile(r".*(attn_|attn\.|attention\.)qkv\.weight")),
    (
        DOWN,
        re.compile(
            r".*(\.ff(_context)?\.net\.2|\.ffn\.(2|net\.2)|\.mlp\.layer2|\.(img|txt)_mlp\.net\.2"
            r"|\.feed_forward\.(w2|linear_2)|experts\..*\.w2)\.weight"
        ),
    ),
)
_NUMBER = re.compile(r"(?:^|\.)(\d+)\.")


class Family(NamedTuple):
    """A family of models.

    architecture: what general.architecture of its files is
    signature: tensors of the original layout, by which it is told from all other families
    blocks: an expression for what the names of weights begin with that are quantized, in both layouts: those of the
        repeated blocks. What is outside of them is a small part of the model, and embeds its inputs or makes its output
    classes: the classes of diffusers, whose layout has other names; `from_single_file` loads both
    comfyui: whether ComfyUI-GGUF loads files of it in the original layout
    in_comfyui: whether ComfyUI itself does
    one_layout: whether the names are the same in both layouts
    class_names: tensors that tell its models from those of other families of the same class
    parameters: an expression for matrices that are no layers of their own, so that programs cannot decode them
    reshaped: whether ComfyUI-GGUF wants weights in rows of 256 whose own rows no block divides
    unused: an expression for tensors that are no weights
    """

    architecture: str
    signature: tuple[str, ...]
    blocks: str
    classes: tuple[str, ...] = ()
    comfyui: bool = True
    in_comfyui: bool = True
    one_layout: bool = False
    class_names: tuple[str, ...] = ()
    parameters: str = ""
    reshaped: bool = False
    unused: str = ""


class Found(NamedTuple):
    """The family of a model.

    prefix: what the names of its tensors begin with
    original: whether they have the original layout
    class_name: the class of diffusers; None if it is not known
    """

    family: Family
    prefix: str
    original: bool
    class_name: str | None

    @property
    def programs(self) -> tuple[str, ...]:
        """What runs a file with its tensors."""
        comfyui = self.original and self.family.comfyui
        diffusers = self.family.classes and not (self.original and self.family.reshaped)
        return tuple(name for name, runs in ((COMFYUI, comfyui), (DIFFUSERS, diffusers)) if runs)

    def in_blocks(self, name: str) -> bool:
        """Whether a tensor is part of a block. name: without the prefix"""
        return re.match(self.family.blocks, name) is not None

    def is_matrix(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor is the weight of a linear layer, which both programs decode. name: without the prefix"""
        is_parameter = self.family.parameters and re.search(self.family.parameters, name)
        return len(shape) == 2 and name.endswith(".weight") and not is_parameter


_STREAMS = r"(double_blocks|single_blocks|(single_)?transformer_blocks)\."
_WAN = r"(vace_)?blocks\.|face_adapter\.fuser_blocks\.|face_adapter\.\d"
_UNET = r"(down|up)_blocks\.|mid_block\.|middle_block\.|output_blocks\.|input_blocks\.(?!0\.)"
_LTX_BLOCKS = r"transformer_blocks\."
# By what users call them; the first whose signature a model has, or whose class, is its family.
FAMILIES: Mapping[str, Family] = {
    "HunyuanVideo": Family(
        "hyvid",
        ("txt_in.individual_token_refiner.blocks.0.norm1.weight",),
        _STREAMS,
        ("HunyuanVideoTransformer3DModel",),
    ),
    "Chroma": Family(
        "flux",
        ("double_blocks.0.img_attn.proj.weight", "distilled_guidance_layer.in_proj.weight"),
        _STREAMS,
        ("ChromaTransformer2DModel",),
    ),
    "FLUX.2": Family(
        "flux",
        ("double_blocks.0.img_attn.proj.weight", "double_stream_modulation_img.lin.weight"),
        rf"{_STREAMS}|(double|single)_stream_modulation",
        ("Flux2Transformer2DModel",),
    ),
    "FLUX.1": Family(
        "flux",
        ("double_blocks.0.img_attn.proj.weight", "double_blocks.0.img_mod.lin.weight"),
        _STREAMS,
        ("FluxTransformer2DModel",),
    ),
    "Stable Diffusion 3, 3.5": Family(
        "sd3",
        ("joint_blocks.0.x_block.attn.qkv.weight",),
        r"(joint_blocks|transformer_blocks)\.",
        ("SD3Transformer2DModel",),
    ),
    "AuraFlow": Family(
        "aura",
        ("double_layers.0.attn.w1q.weight",),
        r"(double_layers|single_layers|joint_transformer_blocks|single_transformer_blocks)\.",
        ("AuraFlowTransformer2DModel",),
    ),
    "HiDream": Family(
        "hidream",
        ("caption_projection.0.linear.weight", "double_stream_blocks.0.block.ff_i.shared_experts.w3.weight"),
        r"(double|single)_stream_blocks\.",
        ("HiDreamImageTransformer2DModel",),
        one_layout=True,
        parameters=r"\.ff_i\.gate\.weight",
    ),
    "Cosmos Predict 2": Family(
        "cosmos",
        ("blocks.0.mlp.layer1.weight", "blocks.0.adaln_modulation_cross_attn.1.weight"),
        r"(transformer_)?blocks\.",
        ("CosmosTransformer3DModel",),
        unused=r"_extra_state|^accum_",
    ),
    "LTX-2": Family(
        "ltxv",
        ("patchify_proj.weight", "audio_patchify_proj.weight"),
        _LTX_BLOCKS,
        ("LTX2VideoTransformer3DModel",),
    ),
    "LTX-Video": Family(
        "ltxv",
        ("patchify_proj.weight", "adaln_single.emb.timestep_embedder.linear_2.weight"),
        _LTX_BLOCKS,
        ("LTXVideoTransformer3DModel",),
    ),
    "Wan 2.1, 2.2": Family(
        "wan",
        ("blocks.0.self_attn.norm_q.weight", "text_embedding.2.weight", "head.modulation"),
        _WAN,
        (
            *("WanTransformer3DModel", "WanVACETransformer3DModel", "WanAnimateTransformer3DModel"),
            *("SkyReelsV2Transformer3DModel", "ChronoEditTransformer3DModel"),
        ),
    ),
    "Qwen-Image": Family(
        "qwen_image",
        ("transformer_blocks.0.attn.add_q_proj.weight", "transformer_blocks.0.img_mod.1.weight", "txt_norm.weight"),
        r"transformer_blocks\.",
        ("QwenImageTransformer2DModel",),
        one_layout=True,
    ),
    "Z-Image": Family(
        "lumina2",
        ("cap_embedder.1.weight", "context_refiner.0.attention.qkv.weight", "layers.0.adaLN_modulation.0.weight"),
        r"layers\.",
        ("ZImageTransformer2DModel",),
    ),
    "Lumina 2": Family(
        "lumina2",
        ("cap_embedder.1.weight", "context_refiner.0.attention.qkv.weight", "layers.0.adaLN_modulation.1.weight"),
        r"layers\.",
        ("Lumina2Transformer2DModel",),
    ),
    "Mochi": Family(
        "mochi",
        ("blocks.0.attn.qkv_x.weight", "t5_yproj.weight"),
        r"(transformer_)?blocks\.",
        ("MochiTransformer3DModel",),
        comfyui=False,
    ),
    "Sana": Family(
        "sana",
        ("blocks.0.cross_attn.kv_linear.weight", "blocks.0.mlp.inverted_conv.conv.weight"),
        r"(transformer_)?blocks\.",
        ("SanaTransformer2DModel",),
        comfyui=False,
        in_comfyui=False,
    ),
    "Stable Diffusion XL": Family(
        "sdxl",
        ("input_blocks.0.0.weight", "label_emb.0.0.weight"),
        _UNET,
        ("UNet2DConditionModel",),
        class_names=("add_embedding.linear_1.weight",),
        reshaped=True,
    ),
    "Stable Diffusion 1, 2": Family(
        "sd1",
        ("input_blocks.0.0.weight", "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"),
        _UNET,
        ("UNet2DConditionModel",),
        reshaped=True,
    ),
}


def find_family(config: Mapping[str, Any] | None, names: Collection[str]) -> Found | None:
    """Return the family of a model from its config.json and the names of its tensors; None if it has none."""
    stated = (config or {}).get(CLASS)
    class_name = stated if isinstance(stated, str) else None
    here = frozenset(names)
    for prefix in PREFIXES:
        for family in FAMILIES.values():
            if all(prefix + name in here for name in family.signature):
                return Found(family, prefix, True, class_name or next(iter(family.classes), None))
    for family in FAMILIES.values():
        if class_name in family.classes and all(name in here for name in family.class_names):
            return Found(family, "", family.one_layout, class_name)
    return None


def role_of(name: str) -> str | None:
    """Return the kind of a matrix by its name; None for one that the mixes do not tell apart."""
    return next((role for role, pattern in _ROLES if pattern.fullmatch(name)), None)


def block_of(name: str) -> int:
    """Return the number of the block that a tensor is in."""
    number = _NUMBER.search(name)
    return int(number[1]) if number else 0
