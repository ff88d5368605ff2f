"""What transformers calls the class, the tensors and the keys of a type of model, which GGUF files do not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


def below(module: str, names: str) -> str:
    """Return names below a module, each behind a space."""
    return "".join(f" {module}.{name}" for name in names.split())


# Parts of layers.
NORMS = "input_layernorm post_attention_layernorm"
HEADS = below("self_attn", "q_proj k_proj v_proj o_proj")
HEAD_NORMS = below("self_attn", "q_norm k_norm")
MATRICES = "gate_proj up_proj down_proj"
MLP = below("mlp", MATRICES)
FEED_FORWARD_NORMS = " pre_feedforward_layernorm post_feedforward_layernorm"
EXPERTS = below("mlp.experts.{}", MATRICES)
SHARED_EXPERT = below("mlp.shared_expert", MATRICES) + " mlp.shared_expert_gate"
SHARED_EXPERTS = below("mlp.shared_experts", MATRICES)
W123 = below("block_sparse_moe.experts.{}", "w1 w2 w3")
ROUTER_BIAS = " mlp.gate.e_score_correction_bias"
FEED_FORWARD = below("feed_forward", MATRICES)
MAMBA = below("mamba", "A_log D conv1d dt_bias norm in_proj out_proj")
# Those of Llama, and of most.
LLAMA = NORMS + HEADS + MLP
ATTENTION = NORMS + HEADS + HEAD_NORMS
USUAL = ATTENTION + MLP + FEED_FORWARD_NORMS + " mlp.gate" + SHARED_EXPERT + EXPERTS
SHARED = USUAL + SHARED_EXPERTS
OUTSIDE = "model.embed_tokens model.norm lm_head"
# Of Qwen and EXAONE, below `mtp`.
MTP = below("mtp", "fc pre_fc_norm_embedding pre_fc_norm_hidden norm")

# Keys that say which tensors there are, and what one of these is called in the first layer of a file.
BIASED, MLP_BIASED = (("attention_bias", "attn_q.bias"),), (("mlp_bias", "ffn_up.bias"),)
# Keys of experts.
LOCAL, ROUTED = {"num_experts": "num_local_experts"}, {"num_experts": "n_routed_experts"}
NO_GROUPS = {"num_key_value_heads": ""}


@dataclass(frozen=True, kw_only=True)
class Names:
    """What transformers calls the class, the tensors and the keys of a type.

    class_name: the class of a model with its head, as which files alone are read; "" if they become another type
    layers: what parts of layers may be called; {} stands for the number of an expert
    before: what stands before these names; # is the number of the layer
    outside: what modules outside of layers may be called
    drafts: what there is beside the parts of a layer where layers predict further tokens: in such a layer, or below
        `mtp`, where numbered names are all that there is
    keys: what it calls keys that are called otherwise in most types, "" for those that it does without
    present: keys that say which tensors there are
    """

    class_name: str = ""
    layers: str = USUAL
    before: str = "model.layers.#."
    outside: str = OUTSIDE
    drafts: str = "eh_proj enorm hnorm embed_tokens shared_head.norm shared_head.head"
    keys: Mapping[str, str] = field(default_factory=dict)
    present: tuple[tuple[str, str], ...] = ()

    def in_layers(self, layers: range) -> list[str]:
        """Return what tensors of layers may be called."""
        return _numbered(self.before, _parameters(self.layers), layers)

    def of_drafts(self, layers: range) -> list[str]:
        """Return what tensors of layers that predict further tokens may be called, as published files have them.

        layers: the numbers of these layers in a GGUF file, behind those of the model
        """
        own, of_layer = _parameters(self.drafts), _parameters(self.layers)
        if own[0].startswith("mtp.layers."):
            return own
        if own[0].startswith("mtp."):
            return _numbered("mtp.layers.#.", of_layer, range(len(layers))) + own
        return _numbered(self.before, [*of_layer, *own], layers)

    def outside_layers(self) -> list[str]:
        """Return what tensors outside of layers may be called; {} stands for a number."""
        return _parameters(self.outside)


# The ends of names of parameters.
_NO_MODULE = (
    *(".weight", "_bias", "sinks", "A_log", ".D", "scale", "_scalar", ".experts.gate_up_proj", ".experts.down_proj"),
    *("_sink", "_param", ".ape", ".tid2eid", "_fn", "_base"),
)


def _numbered(before: str, names: list[str], layers: range) -> list[str]:
    return [(before + name).replace("#", str(layer)) for layer in layers for name in names]


def _parameters(modules: str) -> list[str]:
    """Return what tensors of modules may be called."""
    ends = {module: ("",) if f".{module}".endswith(_NO_MODULE) else (".weight", ".bias") for module in modules.split()}
    return [module + end for module, of in ends.items() for end in of]
