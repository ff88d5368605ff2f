"""T5, mT5 and UMT5, with their decoder or as encoders alone."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

from pqweights.models.description import ModelDescription as Row
from pqweights.models.description import sizes
from pqweights.models.encoders import UNUSED
from pqweights.models.llama_cpp import Architecture, Scaled, Setting, first_class
from pqweights.models.tensor_names import NO_GROUPS, Names, below

_T5 = Architecture(
    name="T5", unused={r"encoder\.embed_tokens\.weight|decoder\.embed_tokens\.weight": UNUSED}, rope=None,
    settings=(
        Setting("relative_attn_buckets_count", "relative_attention_num_buckets"),
        Setting("decoder_block_count", "num_decoder_layers"),
        Setting("decoder_start_token_id", "decoder_start_token_id", zero=True),
    ),
    scaled={r"decoder\.final_layer_norm": Scaled(("decoder_scale",))},
    needed=("enc.output_norm.weight", "dec.output_norm.weight"), uneven=r"attn_rel_b\.weight",
    equal=(("num_decoder_layers", "num_hidden_layers"),),
    values={"feed_forward_proj": ("relu", "gated-gelu"), "relative_attention_max_distance": (128, None)},
)  # fmt: skip
_ENCODER = replace(
    _T5, name="T5ENCODER", when=lambda settings: first_class(settings.values).endswith("EncoderModel"),
    settings=_T5.settings[:1], scaled={}, needed=_T5.needed[:1], equal=(), classes=("EncoderModel",), encoder=True,
)  # fmt: skip


def _restate(values: dict[str, Any]) -> None:
    """State the layers of the decoder, and how the head is scaled: the original T5 has it tied and scaled.

    Later versions of transformers always write that it is tied: what is stored decides. They scale that of every UMT5.
    """
    if not isinstance(width := values.get("d_model"), int) or width < 1:
        return
    tied = values.get("tie_word_embeddings")
    scaled = values.get("scale_decoder_outputs", tied is not False or values.get("model_type") == "umt5")
    values["decoder_scale"] = width**-0.5 if scaled else 1.0
    values["tie_word_embeddings"] = None if tied else tied
    values.setdefault("num_decoder_layers", values.get("num_layers"))


def _publish(config: dict[str, Any], held: Set[str]) -> None:
    """State whether there are gates and a decoder, and that what goes into the head is not scaled: the norm is."""
    config["feed_forward_proj"] = "gated-gelu" if "enc.blk.0.ffn_gate.weight" in held else "relu"
    if config["model_type"] == "t5":
        config |= {"is_encoder_decoder": "dec.output_norm.weight" in held, "scale_decoder_outputs": False}


_PARTS = {part: f"layer_norm {part}.q {part}.k {part}.v {part}.o" for part in ("SelfAttention", "EncDecAttention")}
_PARTS["DenseReluDense"] = "layer_norm" + below("DenseReluDense", "wi wi_0 wi_1 wo")
_STACKS = {"encoder": ("SelfAttention", "DenseReluDense"), "decoder": tuple(_PARTS)}
_LAYERS = "".join(
    below(f"{stack}.block.#.layer.{index}", _PARTS[part])
    for stack, of in _STACKS.items()
    for index, part in enumerate(of)
)
_BIASES = " {0}.block.{1}.layer.0.SelfAttention.relative_attention_bias.weight"
_OUTSIDE = "shared encoder.final_layer_norm decoder.final_layer_norm lm_head"
_NAMES = Names(
    class_name="T5ForConditionalGeneration", layers=_LAYERS, before="",
    outside=_OUTSIDE + "".join(_BIASES.format(stack, 0) for stack in _STACKS),
    keys=NO_GROUPS | {
        "hidden_size": "d_model", "intermediate_size": "d_ff", "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads", "head_dim": "d_kv", "rms_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "n_positions", "decoder_scale": "",
    },
)  # fmt: skip
_DEFAULTS = sizes(512, 1024, 8, 6, 512) | {
    "head_dim": 64, "rms_norm_eps": 1e-6, "relative_attention_num_buckets": 32, "feed_forward_proj": "gated-gelu",
    "relative_attention_max_distance": 128,
}  # fmt: skip
_ROW = Row(llama_cpp=_T5, variants=(_ENCODER,), restate=_restate, publish=_publish, names=_NAMES, defaults=_DEFAULTS)

ROWS: dict[str, Row] = {
    "t5": replace(_ROW, defaults=_DEFAULTS | sizes(512, 2048, 6, 8, 512) | {"feed_forward_proj": "relu"}),
    "mt5": replace(
        _ROW, llama_cpp=replace(_T5, scaled={}), publish=lambda config, held: None,
        names=replace(_NAMES, class_name="", keys={}),
    ),
    "umt5": replace(  # every layer has its own biases of positions
        _ROW, names=replace(
            _NAMES, class_name="UMT5ForConditionalGeneration", outside=_OUTSIDE,
            layers=_LAYERS + "".join(_BIASES.format(stack, "#") for stack in _STACKS),
        ),
    ),
}  # fmt: skip
