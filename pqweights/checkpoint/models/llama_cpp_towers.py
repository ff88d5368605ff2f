"""How llama.cpp holds towers for images (mmproj files): their settings, and tensors that the gguf package lacks.

The facts are those of llama.cpp's tools/mtmd (clip.cpp and models/*.cpp) and of its converter (conversion/*.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pqweights.checkpoint.models.llama_cpp import Setting


@dataclass(frozen=True, kw_only=True)
class Tower:
    """How llama.cpp holds a type of tower.

    projector: its name in gguf.VisionProjectorType
    modules: expressions for whole names of modules without `model.`, and those that the gguf package knows, or the
        names in the file, which begin with `v.` or `mm.`
    settings: its hyper-parameters, by keys of its vision_config
    defaults: what keys mean that are left out
    values: for keys, the values with which llama.cpp computes what the model does
    joined: whether queries, keys and values are one matrix in the file, too
    interleaved: whether rows of queries and keys are permuted, as llama.cpp rotates neighbouring channels
    offset: a module that multiplies by its weight plus one
    breaks: whether the embedding of [IMG_BREAK] is in the file
    """

    projector: str
    modules: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[Setting, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    joined: bool = True
    interleaved: bool = False
    offset: str = ""
    breaks: bool = False


_PATCHES = (Setting("vision_image_size", "image_size"), Setting("vision_patch_size", "patch_size"))
_VIT = (
    *_PATCHES,
    Setting("vision_embedding_length", "hidden_size"),
    Setting("vision_feed_forward_length", "intermediate_size"),
    Setting("vision_block_count", "num_hidden_layers"),
    Setting("vision_head_count", "num_attention_heads"),
)
_GELU = Setting("vision_use_gelu", "uses_gelu", truth=True)
_SILU = Setting("vision_use_silu", "hidden_act = silu", truth=True)
_EPS = Setting("vision_attention_layernorm_eps", "layer_norm_eps", real=True)
_MERGES = Setting("vision_spatial_merge_size", "spatial_merge_size")
_ENCODER = {  # of SigLIP, as transformers 5 writes it without `vision_model`
    r"vision_tower\.(embeddings|encoder|post_layernorm)(.*)": r"vision_tower.vision_model.\1\2",
}
GEMMA3 = Tower(
    projector="GEMMA3",
    modules={**_ENCODER, r"multi_modal_projector\.mm_input_projection_weight": "mm.input_projection.weight"},
    settings=(*_VIT, _EPS, _GELU, Setting("vision_projector_scale_factor", "pooled")),
    defaults={"layer_norm_eps": 1e-6},
    offset="multi_modal_projector.mm_soft_emb_norm",
    values={"hidden_act": ("gelu_pytorch_tanh", None)},
)
_QWEN = (
    *_PATCHES,
    Setting("vision_block_count", "depth"),
    Setting("vision_head_count", "num_heads"),
    _EPS,
    _MERGES,
)
QWEN2_VL = Tower(
    projector="QWEN2VL",
    settings=(
        *_QWEN,
        Setting("vision_embedding_length", "embed_dim"),
        Setting("vision_feed_forward_length", "embed_dim * mlp_ratio"),
    ),
    defaults={
        "layer_norm_eps": 1e-6, "image_size": 560, "depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
    values={"hidden_act": ("quick_gelu", None), "temporal_patch_size": (2,), "spatial_merge_size": (2,)},
    joined=False,
)  # fmt: skip
QWEN2_5_VL = replace(
    QWEN2_VL,
    projector="QWEN25VL",
    settings=(*_QWEN, *_VIT[2:4], _SILU, Setting("vision_n_wa_pattern", "full_attention_interval")),
    defaults={**QWEN2_VL.defaults, "hidden_size": 1280, "intermediate_size": 3420, "window_size": 112},
    values={**QWEN2_VL.values, "hidden_act": ("silu",)},
)
QWEN3_VL = Tower(
    projector="QWEN3VL",
    modules={
        r"visual\.merger\.norm": "v.post_ln",
        r"visual\.merger\.linear_fc1": "mm.0",
        r"visual\.merger\.linear_fc2": "mm.2",
        r"visual\.deepstack_merger_list\.(\d+)\.norm": r"v.deepstack.\1.norm",
        r"visual\.deepstack_merger_list\.(\d+)\.linear_fc(\d)": r"v.deepstack.\1.fc\2",
    },
    settings=(*_QWEN, *_VIT[2:4], _GELU),
    defaults={
        "layer_norm_eps": 1e-6, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [], "hidden_act": "gelu_pytorch_tanh",
    },
    values={"hidden_act": ("gelu_pytorch_tanh",), "temporal_patch_size": (2,)},
)  # fmt: skip
PIXTRAL = Tower(
    projector="PIXTRAL",
    settings=(*_VIT, _EPS, _SILU, _GELU, _MERGES),
    defaults={
        "layer_norm_eps": 1e-5, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "image_size": 1024, "patch_size": 16, "spatial_merge_size": 1,
        "hidden_act": "gelu", "num_channels": 3,
    },
    values={"hidden_act": ("silu", "gelu"), "projector_hidden_act": ("gelu", None)},
    interleaved=True,
    breaks=True,
)  # fmt: skip
TOWERS = {
    "gemma3": GEMMA3, "qwen2_vl": QWEN2_VL, "qwen2_5_vl": QWEN2_5_VL, "qwen3_vl": QWEN3_VL, "qwen3_vl_moe": QWEN3_VL,
    "qwen3_5": QWEN3_VL, "qwen3_5_moe": QWEN3_VL, "mistral3": PIXTRAL,
}  # fmt: skip
