"""How llama.cpp holds towers for images (mmproj files): their settings, and tensors that the gguf package lacks.

The facts are those of llama.cpp's tools/mtmd (clip.cpp and models/*.cpp) and of its converter (conversion/*.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pqweights.models.llama_cpp import Setting, Size, query_rows


@dataclass(frozen=True, kw_only=True)
class Tower:
    """How llama.cpp holds a type of tower.

    projector: its name in gguf.VisionProjectorType, or in the file
    modules: expressions for whole names of modules without `model.`, and those that the gguf package knows, or the
        names in the file, which begin with `v.` or `mm.`
    settings: its hyper-parameters, by keys of its vision_config
    defaults: what keys mean that are left out
    values: for keys, the values with which llama.cpp computes what the model does
    equal: numbers that llama.cpp takes for equal
    joined: whether queries, keys and values are one matrix in the file, too
    interleaved: whether rows of queries and keys are permuted, as llama.cpp rotates neighbouring channels
    by_axis: whether they are permuted, as llama.cpp rotates the channels of one axis before those of the other
    three_axes: whether they are permuted, as it rotates the channels of time, height and width one after another
    colors_last: whether the weights of patches are a matrix, and its columns run over the colors of each pixel
    flat_positions: whether positions, a grid in the checkpoint, are a list
    class_first: whether the first position is that of the class token, which llama.cpp puts last
    offset: a module that multiplies by its weight plus one
    breaks: whether the embedding of [IMG_BREAK] is in the file
    resizes: whether the longest side that images are resized to is in the file
    unused: an expression for whole names of modules that vectors of images do without
    remark: what llama.cpp does otherwise
    """

    projector: str
    modules: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[Setting, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    equal: tuple[tuple[Size, Size], ...] = ()
    joined: bool = True
    interleaved: bool = False
    by_axis: bool = False
    three_axes: bool = False
    colors_last: bool = False
    flat_positions: bool = False
    class_first: bool = False
    offset: str = ""
    breaks: bool = False
    resizes: bool = False
    unused: str = r"vision_tower\.(vision_model\.)?head\..*"  # of SigLIP, which no model of images and text reads
    remark: str = ""


_PATCHES = (Setting("vision_image_size", "image_size"), Setting("vision_patch_size", "patch_size"))
_VIT = (
    *_PATCHES,
    Setting("vision_embedding_length", "hidden_size"),
    Setting("vision_feed_forward_length", "intermediate_size"),
    Setting("vision_block_count", "num_hidden_layers"),
    Setting("vision_head_count", "num_attention_heads"),
)
_GELU = Setting("vision_use_gelu", "uses_gelu", truth=True)
_SILU = Setting("vision_use_silu", "uses_silu", truth=True)
_EPS = Setting("vision_attention_layernorm_eps", "layer_norm_eps", real=True)
_MERGES = Setting("vision_spatial_merge_size", "spatial_merge_size")
_SCALE = Setting("vision_projector_scale_factor", "scale")
_THETA = {"rope_theta": (10000, None)}
_ENCODER = {  # of SigLIP, as transformers 5 writes it without `vision_model`
    r"vision_tower\.(embeddings|encoder|post_layernorm)(.*)": r"vision_tower.vision_model.\1\2",
}
GEMMA3 = Tower(
    projector="GEMMA3",
    modules={**_ENCODER, r"multi_modal_projector\.mm_input_projection_weight": "mm.input_projection.weight"},
    settings=(*_VIT, _EPS, _GELU, _SCALE),
    defaults={"layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"},
    offset="multi_modal_projector.mm_soft_emb_norm",
    values={"hidden_act": ("gelu_pytorch_tanh",)},
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
        Setting("vision_feed_forward_length", lambda n: n("embed_dim") * n("mlp_ratio")),
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
    defaults={
        **QWEN2_VL.defaults, "hidden_size": 1280, "intermediate_size": 3420, "window_size": 112, "hidden_act": "silu",
    },
    values={**QWEN2_VL.values, "hidden_act": ("silu",), "window_size": (112,)},
)  # fmt: skip
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
    values=_THETA | {
        "hidden_act": ("silu", "gelu"), "projector_hidden_act": ("gelu", None), "vision_feature_layer": (-1, None),
        "vision_feature_select_strategy": ("full", None),
    },
    interleaved=True,
    breaks=True,
)  # fmt: skip
MISTRAL3 = replace(PIXTRAL, defaults={**PIXTRAL.defaults, "spatial_merge_size": 2})
GEMMA4 = Tower(
    projector="GEMMA4V",
    modules={
        r"vision_tower\.encoder\.(layers\.\d+\..*?)(\.linear)?": r"vision_model.model.\1",
        r"vision_tower\.patch_embedder\.position_embedding_table": "v.position_embd.weight",
    },
    settings=(*_VIT, Setting("vision_attention_layernorm_eps", "rms_norm_eps", real=True), _GELU, _SCALE),
    defaults={
        "image_size": 224,  # of no meaning: it is not used
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
        "num_key_value_heads": 12, "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh", "pooling_kernel_size": 3, "patch_size": 16,
    },
    values={"hidden_activation": ("gelu_pytorch_tanh",), "rope_theta": (100, None), "attention_bias": (False, None)},
    equal=((query_rows, "hidden_size"), ("num_key_value_heads", "num_attention_heads")),
    colors_last=True,
)  # fmt: skip
LLAMA4 = Tower(
    projector="LLAMA4",
    modules={
        # The gguf package takes it for Gemma 4's norm behind the attention.
        r"vision_model\.model\.layers\.(\d+)\.post_attention_layernorm": r"v.blk.\1.ln2",
        r"vision_model\.positional_embedding_vlm": "v.position_embd.weight",
        r"multi_modal_projector\.linear_1": "mm.model.fc",
    },
    settings=(*_VIT, Setting("vision_attention_layernorm_eps", "norm_eps", real=True), _GELU, _SCALE),
    defaults={
        "hidden_size": 768, "intermediate_size": 5632, "num_hidden_layers": 34, "num_attention_heads": 16,
        "image_size": 448, "patch_size": 14, "norm_eps": 1e-5, "hidden_act": "gelu", "pixel_shuffle_ratio": 0.5,
    },
    values=_THETA | {"hidden_act": ("gelu",)},
    remark="llama.cpp passes the vectors of an image to the text model column by column, the model row by row",
)  # fmt: skip
KIMI_K25 = Tower(
    projector="KIMIK25",
    modules={r"mm_projector\.proj\.0": "mm.1", r"mm_projector\.proj\.2": "mm.2"},
    settings=(*_VIT, Setting("vision_attention_layernorm_eps", "projection_layer_norm_eps", real=True), _GELU, _SCALE),
    defaults={
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "patch_size": 14, "pos_emb_height": 64, "pos_emb_width": 64, "merge_kernel_size": [2, 2],
        "hidden_act": "gelu_pytorch_tanh", "projection_layer_norm_eps": 1e-5,
    },
    values=_THETA | {"hidden_act": ("gelu_pytorch_tanh",)},
    equal=(("pos_emb_height", "pos_emb_width"),),
    by_axis=True,
    unused=r"vision_tower\.patch_embed\.pos_emb\.time_weight",  # of videos
)  # fmt: skip
KIMI_VL = replace(
    KIMI_K25,
    projector="KIMIVL",
    modules={r"multi_modal_projector\.linear_(\d)": r"mm.\1"},
    flat_positions=True,
    remark="llama.cpp fits positions to the size of an image by linear interpolation, the model by cubic interpolation",
)
LFM2_VL = Tower(
    projector="LFM2",
    modules={**_ENCODER, r"multi_modal_projector\.linear_(\d)": r"mm.\1"},
    settings=(*_VIT, _EPS, _GELU, _SCALE),
    defaults={
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_patches": 256, "patch_size": 16, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh",
        "downsample_factor": 2, "vision_feature_layer": -1, "projector_hidden_act": "gelu",
    },
    values={
        "hidden_act": ("gelu_pytorch_tanh",), "projector_hidden_act": ("gelu",), "vision_feature_layer": (-1,),
    },
    colors_last=True,
)  # fmt: skip
IDEFICS3 = Tower(
    projector="IDEFICS3",
    settings=(*_VIT, _EPS, _GELU, _SCALE),
    defaults={
        "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
        "image_size": 224, "patch_size": 32, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh",
        "scale_factor": 2,
    },
    values={"hidden_act": ("gelu_pytorch_tanh",)},
    resizes=True,
)  # fmt: skip
INTERNVL = Tower(
    projector="INTERNVL",
    modules={
        r"multi_modal_projector\.layer_norm": "mm.model.mlp.0",
        r"multi_modal_projector\.linear_1": "mm.model.mlp.1",
        r"multi_modal_projector\.linear_2": "mm.model.mlp.3",
        r"vision_tower\.encoder\.layer\.(\d+)\.lambda_(\d)": r"v.blk.\1.ls\2.weight",
        r"vision_tower\.embeddings\.position_embeddings": "v.position_embd.weight",
    },
    settings=(*_VIT, _EPS, _GELU, _SCALE),
    defaults={
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "image_size": [448, 448], "patch_size": [14, 14], "layer_norm_eps": 1e-6, "hidden_act": "gelu",
        "downsample_ratio": 0.5, "norm_type": "layer_norm", "use_qk_norm": False, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu",
    },
    values={
        "hidden_act": ("gelu",), "norm_type": ("layer_norm",), "use_qk_norm": (False,), "vision_feature_layer": (-1,),
        "vision_feature_select_strategy": ("default",), "projector_hidden_act": ("gelu",),
    },
    class_first=True,
)  # fmt: skip
LLAVA = Tower(
    projector="mlp",
    modules={
        r"vision_tower\.(embeddings|encoder|pre_layrnorm)(.*)": r"vision_tower.vision_model.\1\2",
        r"multi_modal_projector\.linear_1": "mm.0",
        r"multi_modal_projector\.linear_2": "mm.2",
    },
    settings=(*_VIT, _EPS, _GELU),
    defaults={
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 224, "patch_size": 32, "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu",
        "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu",
    },
    values={
        "model_type": ("clip_vision_model",), "hidden_act": ("quick_gelu", "gelu"), "vision_feature_layer": (-2,),
        "vision_feature_select_strategy": ("default",), "projector_hidden_act": ("gelu",),
    },
    class_first=True,
    unused=r"vision_tower\.(vision_model\.)?post_layernorm",
    remark="llama.cpp omits the first patch of an image, and appends the vector of the class token",
)  # fmt: skip
STEP3P7 = Tower(
    projector="STEP3VL",
    modules={
        r"vision_model\.positional_embedding": "v.position_embd.weight",
        r"vision_model\.transformer\.resblocks\.(\d+)\.ls_(\d)\.gamma": r"v.blk.\1.ls\2.weight",
        r"vision_model\.transformer\.resblocks\.(\d+)\.attn\.in_proj_(weight|bias)": r"v.blk.\1.attn_qkv.\2",
        r"vision_model\.vit_downsampler1": "mm.0",
        r"vision_model\.vit_downsampler2": "mm.1",
        r"vit_large_projector": "mm.model.fc",
    },
    settings=(*_VIT, _EPS, _SCALE),
    defaults={
        "hidden_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 16, "image_size": 728, "patch_size": 14,
        "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu", "mlp_ratio": 8960 / 1536,
        "scale": 4,  # two convolutions
    },
    values=_THETA | {"hidden_act": ("quick_gelu",), "understand_projector_stride": (2, None)},
    remark="llama.cpp smooths positions when it fits them to parts of images below image_size; the model does not",
)  # fmt: skip
MINIMAX_M3 = Tower(
    projector="minimax_m3",
    modules={r"multi_modal_projector\.linear_(\d)": r"mm.\1", r"patch_merge_mlp\.linear_(\d)": r"mm.merger.fc\1"},
    settings=(*_VIT, _EPS, _GELU, _MERGES),
    defaults={
        "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
        "image_size": 2016, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
    },
    values=_THETA | {"hidden_act": ("gelu",), "temporal_patch_size": (2,), "spatial_merge_size": (2,)},
    three_axes=True,
)  # fmt: skip
# By the type of a model, or that and the type in its vision_config.
TOWERS = {
    "gemma3": GEMMA3, "gemma4": GEMMA4, "qwen2_vl": QWEN2_VL, "qwen2_5_vl": QWEN2_5_VL, "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL, "qwen3_5": QWEN3_VL, "qwen3_5_moe": QWEN3_VL, "mistral3": MISTRAL3, "llama4": LLAMA4,
    "kimi_k25": KIMI_K25, "kimi_vl": KIMI_VL, "lfm2_vl": LFM2_VL, "idefics3": IDEFICS3, "smolvlm": IDEFICS3,
    "internvl": INTERNVL, "step3p7": STEP3P7, "minimax_m3_vl": MINIMAX_M3, "llava": LLAVA, "llava pixtral": PIXTRAL,
}  # fmt: skip
