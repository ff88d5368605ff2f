"""What models of images and text are called by transformers whose text model and tower are two GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pqweights.models import tensor_names as parts
from pqweights.models.tensor_names import Names, below
from pqweights.models.towers import TOWERS


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A model of images and text.

    model_type, class_name: those of its config.json
    texts: the types as which its text model is read, and the type that its text_config then has, "" for the same
    vision_type: that of its vision_config
    text_names: what names of the text model begin with alone, and in the model
    in_layers: names of modules of the tower in layers, of which # is the number
    outside: its other modules; those of tensors that are no module end with an exclamation mark
    sizes: keys of config.json, or of its vision_config, and a tensor of the file with the axis of which it is the size;
        without an axis it is whether there is such a tensor
    needs: a tensor of the tower without which it is another model
    tokens: keys of config.json, and the tokens of which it is the id
    stated: what else the vision_config says
    keys: for keys of the tower, those of its vision_config where they are others
    names: what tensors of the text model are called in the model, if not only what they begin with differs
    """

    model_type: str
    class_name: str
    texts: Mapping[str, str]
    vision_type: str
    text_names: tuple[str, str]
    in_layers: str
    outside: str
    sizes: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    needs: str = "v.patch_embd.weight"
    tokens: Mapping[str, str] = field(default_factory=dict)
    stated: Mapping[str, object] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    names: Names | None = None

    @property
    def tower(self) -> str:
        """Its row in TOWERS."""
        of_both = f"{self.model_type} {self.vision_type}"
        return of_both if of_both in TOWERS else self.model_type

    def name_of_text(self, name: str) -> str:
        """Return what a tensor of the text model is called in the model."""
        alone, inside = self.text_names
        return inside + name.removeprefix(alone) if name.startswith(alone) else name


_ALL = ("", "language_model.")
_INNER = ("model.", "model.language_model.")
_SAME = ("", "")
_HEADLESS = {"vision_use_head": False}
_SIGLIP = "layer_norm1 layer_norm2 mlp.fc1 mlp.fc2" + below("self_attn", "q_proj k_proj v_proj out_proj")
_SIGLIP_OUTSIDE = "embeddings.patch_embedding embeddings.position_embedding"
_LLAMAS = ("llama", "qwen2", "qwen3", "mistral", "ministral3")
_GEMMA3 = Whole(
    model_type="gemma3",
    class_name="Gemma3ForConditionalGeneration",
    texts={"gemma3_text": ""},
    vision_type="siglip_vision_model",
    text_names=_ALL,
    in_layers=below("vision_tower.encoder.layers.#", _SIGLIP),
    outside=below("vision_tower", f"{_SIGLIP_OUTSIDE} post_layernorm")
    + below("multi_modal_projector", "mm_input_projection_weight! mm_soft_emb_norm"),
    tokens={
        "image_token_index": "<image_soft_token>",
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
    },
    stated=_HEADLESS,
)
_QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_QWEN2_VL = Whole(
    model_type="qwen2_vl",
    class_name="Qwen2VLForConditionalGeneration",
    texts={"qwen2": "qwen2_vl_text"},
    vision_type="qwen2_vl_vision",
    text_names=_SAME,
    in_layers=below("visual.blocks.#", "attn.proj attn.qkv mlp.fc1 mlp.fc2 norm1 norm2"),
    outside=below("visual", "merger.ln_q merger.mlp.0 merger.mlp.2 patch_embed.proj"),
    sizes={"vision_config.hidden_size": ("mm.2.weight", 0)},
    tokens=_QWEN_TOKENS,
)
_QWEN2_5_VL = replace(
    _QWEN2_VL,
    model_type="qwen2_5_vl",
    class_name="Qwen2_5_VLForConditionalGeneration",
    texts={"qwen2": "qwen2_5_vl_text"},
    vision_type="qwen2_5_vl_vision",
    in_layers=below("visual.blocks.#", "attn.proj attn.qkv mlp.gate_proj mlp.up_proj mlp.down_proj norm1 norm2"),
    sizes={"vision_config.out_hidden_size": ("mm.2.weight", 0)},
)
_QWEN3_VL = replace(
    _QWEN2_5_VL,
    model_type="qwen3_vl",
    class_name="Qwen3VLForConditionalGeneration",
    texts={"qwen3": "qwen3_vl_text"},
    vision_type="qwen3_vl_vision",
    text_names=_INNER,
    in_layers=below("model.visual.blocks.#", "attn.proj attn.qkv mlp.linear_fc1 mlp.linear_fc2 norm1 norm2")
    + below("model.visual.deepstack_merger_list.#", "linear_fc1 linear_fc2 norm"),
    outside=below("model.visual", "merger.linear_fc1 merger.linear_fc2 merger.norm patch_embed.proj pos_embed"),
)
_QWEN3_VL_MOE = replace(
    _QWEN3_VL,
    model_type="qwen3_vl_moe",
    class_name="Qwen3VLMoeForConditionalGeneration",
    texts={"qwen3_moe": "qwen3_vl_moe_text"},
    vision_type="qwen3_vl_moe_vision",
    names=Names(layers=parts.ATTENTION + parts.MLP + " mlp.gate mlp.experts.gate_up_proj mlp.experts.down_proj"),
)
_QWEN3_5 = replace(
    _QWEN3_VL,
    model_type="qwen3_5",
    class_name="Qwen3_5ForConditionalGeneration",
    texts={"qwen3_5_text": ""},
    vision_type="qwen3_5_vision",
    in_layers=below("model.visual.blocks.#", "attn.proj attn.qkv mlp.linear_fc1 mlp.linear_fc2 norm1 norm2"),
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    model_type="qwen3_5_moe",
    class_name="Qwen3_5MoeForConditionalGeneration",
    texts={"qwen3_5_moe_text": ""},
    vision_type="qwen3_5_moe_vision",
)
_PIXTRAL = "attention.k_proj attention.o_proj attention.q_proj attention.v_proj attention_norm ffn_norm" + below(
    "feed_forward", "gate_proj up_proj down_proj"
)
_MISTRAL3 = Whole(
    model_type="mistral3",
    class_name="Mistral3ForConditionalGeneration",
    texts=dict.fromkeys(_LLAMAS, ""),
    vision_type="pixtral",
    text_names=_ALL,
    in_layers=below("vision_tower.transformer.layers.#", _PIXTRAL),
    outside=below("vision_tower", "ln_pre patch_conv")
    + below("multi_modal_projector", "linear_1 linear_2 norm patch_merger.merging_layer"),
    sizes={"multimodal_projector_bias": ("mm.1.bias", None)},
    needs="mm.patch_merger.weight",
    tokens={"image_token_index": "[IMG]"},
)
_LLAVA_PIXTRAL = replace(
    _MISTRAL3,
    model_type="llava",
    class_name="LlavaForConditionalGeneration",
    outside=below("vision_tower", "ln_pre patch_conv") + below("multi_modal_projector", "linear_1 linear_2"),
    needs="mm.1.weight",
)
_LLAVA = replace(
    _LLAVA_PIXTRAL,
    vision_type="clip_vision_model",
    in_layers=below("vision_tower.encoder.layers.#", _SIGLIP),
    outside=below("vision_tower", f"{_SIGLIP_OUTSIDE} embeddings.class_embedding! pre_layrnorm")
    + below("multi_modal_projector", "linear_1 linear_2"),
    sizes={"multimodal_projector_bias": ("mm.0.bias", None)},
    needs="mm.0.weight",
    tokens={"image_token_index": "<image>"},
)
_LFM2_VL = Whole(
    model_type="lfm2_vl",
    class_name="Lfm2VlForConditionalGeneration",
    texts={"lfm2": ""},
    vision_type="siglip2_vision_model",
    text_names=_INNER,
    in_layers=below("model.vision_tower.encoder.layers.#", _SIGLIP),
    outside=below("model.vision_tower", f"{_SIGLIP_OUTSIDE} post_layernorm")
    + below("model.multi_modal_projector", "layer_norm linear_1 linear_2"),
    sizes={"projector_hidden_size": ("mm.1.weight", 0), "projector_bias": ("mm.1.bias", None)}
    | {"projector_use_layernorm": ("mm.input_norm.weight", None)},
    tokens={"image_token_id": "<image>"},
    stated=_HEADLESS,
)
_IDEFICS3 = Whole(
    model_type="idefics3",
    class_name="Idefics3ForConditionalGeneration",
    texts={"llama": "", "mistral": ""},
    vision_type="idefics3_vision",
    text_names=("model.", "model.text_model."),
    in_layers=below("model.vision_model.encoder.layers.#", _SIGLIP),
    outside=below("model.vision_model", f"{_SIGLIP_OUTSIDE} post_layernorm")
    + " model.connector.modality_projection.proj",
    tokens={"image_token_id": "<image>"},
)
_INTERNVL = Whole(
    model_type="internvl",
    class_name="InternVLForConditionalGeneration",
    texts=dict.fromkeys((*_LLAMAS, "qwen3_moe"), ""),
    vision_type="internvl_vision",
    text_names=_ALL,
    in_layers=below(
        "vision_tower.encoder.layer.#",
        "attention.q_proj attention.k_proj attention.v_proj attention.projection_layer lambda_1! lambda_2! "
        "layernorm_before layernorm_after mlp.fc1 mlp.fc2",
    ),
    outside=below("vision_tower.embeddings", "cls_token! patch_embeddings.projection position_embeddings!")
    + below("multi_modal_projector", "layer_norm linear_1 linear_2"),
    sizes={"vision_config.attention_bias": ("v.blk.0.attn_q.bias", None)},
    tokens={"image_token_id": "<IMG_CONTEXT>"},
)
_CLIPPED = "input_min! input_max! output_min! output_max! linear"
_GEMMA4 = Whole(
    model_type="gemma4",
    class_name="Gemma4ForConditionalGeneration",
    texts={"gemma4_text": ""},
    vision_type="gemma4_vision",
    text_names=_INNER,
    in_layers=below(
        "model.vision_tower.encoder.layers.#",
        "input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm "
        "self_attn.q_norm self_attn.k_norm"
        + "".join(below(f"self_attn.{name}_proj", _CLIPPED) for name in "qkvo")
        + "".join(below(f"mlp.{name}_proj", _CLIPPED) for name in ("gate", "up", "down")),
    ),
    outside=" model.embed_vision.embedding_projection"
    + below("model.vision_tower.patch_embedder", "input_proj position_embedding_table!")
    + below("model.vision_tower", "std_bias! std_scale!"),
    sizes={
        "vision_config.position_embedding_size": ("v.position_embd.weight", 1),
        "vision_config.head_dim": ("v.blk.0.attn_q_norm.weight", 0),
        "vision_config.use_clipped_linears": ("v.blk.0.attn_q.input_min", None),
        "vision_config.standardize": ("v.std_bias", None),
    },
    tokens={"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>"},
)
_LLAMA4 = Whole(
    model_type="llama4",
    class_name="Llama4ForConditionalGeneration",
    texts={"llama4_text": ""},
    vision_type="llama4_vision_model",
    text_names=_ALL,
    in_layers=below(
        "vision_model.model.layers.#",
        "input_layernorm post_attention_layernorm mlp.fc1 mlp.fc2" + below("self_attn", "q_proj k_proj v_proj o_proj"),
    ),
    outside=below(
        "vision_model",
        "class_embedding! layernorm_post layernorm_pre patch_embedding.linear positional_embedding_vlm! "
        "vision_adapter.mlp.fc1 vision_adapter.mlp.fc2",
    )
    + " multi_modal_projector.linear_1",
    sizes={
        "vision_config.projector_input_dim": ("mm.model.mlp.1.weight", 0),
        "vision_config.projector_output_dim": ("mm.model.mlp.2.weight", 0),
        "vision_config.vision_output_dim": ("mm.model.fc.weight", 1),
    },
    tokens={"image_token_index": "<|patch|>", "boi_token_index": "<|image_start|>"}
    | {"eoi_token_index": "<|image_end|>"},
)
_KIMI_K25 = Whole(
    model_type="kimi_k25",
    class_name="Kimi_K25ForConditionalGeneration",
    texts={"deepseek_v3": ""},
    vision_type="kimi_k25_vision",
    text_names=_ALL,
    in_layers=below("vision_tower.encoder.blocks.#", "mlp.fc0 mlp.fc1 norm0 norm1 wo wqkv"),
    outside=below("vision_tower", "encoder.final_layernorm patch_embed.proj patch_embed.pos_emb")
    + below("mm_projector", "pre_norm proj.0 proj.2"),
    sizes={"projection_hidden_size": ("mm.input_norm.weight", 0)},
    tokens={
        "image_token_id": "<|media_pad|>",
        "vision_start_token_id": "<|media_begin|>",
        "vision_end_token_id": "<|media_end|>",
    },
)
# Its class is not in transformers, but in the model's own code.
_KIMI_VL = replace(
    _KIMI_K25,
    model_type="kimi_vl",
    class_name="KimiVLForConditionalGeneration",
    vision_type="moonvit",
    outside=below("vision_tower", "encoder.final_layernorm patch_embed.proj patch_embed.pos_emb")
    + below("multi_modal_projector", "pre_norm linear_1 linear_2"),
    sizes={},
    tokens={"media_placeholder_token_id": "<|media_pad|>"},
    keys={f"pos_emb_{side}": f"init_pos_emb_{side}" for side in ("height", "width")},
)
_STEP3P7 = Whole(
    model_type="step3p7",
    class_name="Step3p7ForConditionalGeneration",
    texts={"step3p5": ""},
    vision_type="step3p5_vision",
    text_names=_SAME,
    in_layers=below(
        "vision_model.transformer.resblocks.#",
        "attn.in_proj_weight! attn.in_proj_bias! attn.out_proj ln_1 ln_2 ls_1.gamma! ls_2.gamma! mlp.c_fc mlp.c_proj",
    ),
    outside=below("vision_model", "conv1 ln_pre positional_embedding! vit_downsampler1 vit_downsampler2")
    + " vit_large_projector",
    sizes={
        "projector_bias": ("mm.model.fc.bias", None),
        "vision_config.max_position_embeddings": ("v.position_embd.weight", 0),
    },
    tokens={"image_token_id": "<im_patch>"},
)
_MINIMAX_M3 = Whole(
    model_type="minimax_m3_vl",
    class_name="MiniMaxM3SparseForConditionalGeneration",
    texts={"minimax_m3_vl_text": ""},
    vision_type="minimax_m3_vl_vision",
    text_names=_ALL,
    in_layers=below("vision_tower.vision_model.encoder.layers.#", _SIGLIP),
    outside=below("vision_tower.vision_model", "embeddings.patch_embedding pre_layrnorm")
    + below("multi_modal_projector", "linear_1 linear_2")
    + below("patch_merge_mlp", "linear_1 linear_2"),
    sizes={"projector_hidden_size": ("mm.1.weight", 0)},
    names=Names(
        layers=parts.ATTENTION
        + below("self_attn", "index_q_proj index_k_proj index_q_norm index_k_norm")
        + parts.MLP
        + below("block_sparse_moe", "gate e_score_correction_bias")
        + parts.W123
        + below("block_sparse_moe.shared_experts", parts.MATRICES),
    ),
)
# In the order in which they are tried.
WHOLES = (
    *(_GEMMA3, _QWEN2_VL, _QWEN2_5_VL, _QWEN3_VL, _QWEN3_VL_MOE, _QWEN3_5, _QWEN3_5_MOE, _MISTRAL3, _LLAVA_PIXTRAL),
    *(_LLAVA, _LFM2_VL, _IDEFICS3, _INTERNVL, _GEMMA4, _LLAMA4, _KIMI_K25, _KIMI_VL, _STEP3P7, _MINIMAX_M3),
)


def names_of_tower(whole: Whole, layers: int, deepest: int) -> list[str]:
    """Return what tensors of a tower may be called.

    layers: how many it has
    deepest: of how many the vectors go into layers of the text model
    """
    modules = [
        name.replace("#", str(layer))
        for name in whole.in_layers.split()
        for layer in range(deepest if ".deepstack_" in name else layers)
    ]
    modules += whole.outside.split()
    ends = {module: ("",) if module.endswith("!") else (".weight", ".bias") for module in modules}
    return [module.rstrip("!") + end for module, of in ends.items() for end in of]
