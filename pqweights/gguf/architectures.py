"""Which models llama.cpp runs, and what of their configurations and tensors it has to be told. Data only.

The facts are those of llama.cpp's loaders and graphs (src/models/*.cpp) and of its converter (conversion/*.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """A hyper-parameter of a GGUF file.

    parameter: its name in the gguf package, whose writer has a method add_{parameter}
    key: the key of the configuration that holds it
    """

    parameter: str
    key: str


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How llama.cpp runs a type of model.

    name: its name in gguf.MODEL_ARCH
    settings: the hyper-parameters that it has beside those of all models; a value that is absent is not written
    interleaved: whether the rows of q and k are to be permuted, because it rotates neighbouring channels
    gain_offset: what the model adds to the weights of its norms, and llama.cpp does not
    rope: the kinds of scaled rotary embeddings that it computes
    biases: the tensors, as in gguf.MODEL_TENSOR, of which it also takes a bias
    values: for keys of the configuration, the values with which the model computes what llama.cpp does; a key that is
        absent has the default
    defaults: the values of keys that configurations of this type leave out
    """

    name: str
    settings: tuple[Setting, ...] = ()
    interleaved: bool = False
    gain_offset: float = 0
    rope: frozenset[str] = frozenset({"default", "linear", "yarn"})
    biases: frozenset[str] = frozenset()
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


SETTINGS = (
    Setting("context_length", "max_position_embeddings"),
    Setting("embedding_length", "hidden_size"),
    Setting("block_count", "num_hidden_layers"),
    Setting("feed_forward_length", "intermediate_size"),
    Setting("head_count", "num_attention_heads"),
    Setting("head_count_kv", "num_key_value_heads"),
    Setting("key_length", "head_dim"),
    Setting("value_length", "head_dim"),
    Setting("layer_norm_rms_eps", "rms_norm_eps"),
)

QKV = frozenset({"ATTN_Q", "ATTN_K", "ATTN_V"})
SILU = {"hidden_act": ("silu", "swish")}
# Qwen's own attention over a window, for its upper layers only.
NO_WINDOW = {"use_sliding_window": (False, None)}

LLAMA = Architecture(
    name="LLAMA",
    interleaved=True,
    rope=frozenset({"default", "linear", "llama3", "yarn"}),
    biases=QKV | {"ATTN_OUT", "FFN_GATE", "FFN_UP", "FFN_DOWN"},
    values=SILU,
)
QWEN2 = Architecture(name="QWEN2", biases=QKV, values=SILU | NO_WINDOW)
QWEN3 = Architecture(name="QWEN3", biases=QKV, values=SILU | NO_WINDOW)

# By the model_type of transformers.
ARCHITECTURES = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
}
