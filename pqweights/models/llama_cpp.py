"""How llama.cpp runs models: what of their configurations it has to be told, and which values it computes with.

The facts of each family are in its file; they are those of llama.cpp's loaders and graphs (src/models/*.cpp) and of its
converter (conversion/*.py). Here is what they are written with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

# A whole number: itself, the key of the configuration that holds it, or what is computed from the numbers of keys. It
# is computed by a polynomial of first degree in each key, so that a file's number tells a key that is not known.
Numbers = Callable[[str], int]
Size = int | str | Callable[[Numbers], int | Fraction]
# A multiplier: as above, from numbers that need not be whole, and items of lists of such (key, place).
Factor = str | Callable[[Callable[..., float]], float]
# Rows and columns; None where nothing is expected.
Shape = tuple[Size | None, Size | None]


def keys_of(size: Size) -> list[str]:
    """Return the keys that a number is computed from."""
    keys: list[str] = []

    def read(key: str) -> int:
        keys.append(key)
        return 1

    if isinstance(size, str):
        return [size]
    if not isinstance(size, int):
        size(read)
    return keys


class Setting(NamedTuple):
    """A hyper-parameter of a GGUF file.

    parameter: its name in the gguf package, whose writer has a method add_{parameter}; of those that the package lacks,
        what its key has behind the name of the architecture, with the dot
    key: what it is
    real: whether it need not be a whole number
    optional: whether the model may do without it
    truth: whether it is true or false
    only: an expression for the kinds of layers (models.settings.layer_kinds) that have it; the file has a list for all
    other: what the other layers have, as in key
    zero: whether it is written as 0 if the configuration has none
    of: the enumeration in the gguf package that it is one of
    listed: whether the configuration lists it layer by layer, and the file, too; None is 0
    unread: whether llama.cpp does not read it, and files of other writers say something else
    items: of a list of whole numbers that the configuration has, their type, of gguf.GGUFValueType
    """

    parameter: str
    key: Size
    real: bool = False
    optional: bool = False
    truth: bool = False
    only: str = ""
    other: str = ""
    zero: bool = False
    of: str = ""
    listed: bool = False
    unread: bool = False
    items: str = ""

    @property
    def name(self) -> str:
        """The key of the configuration, of one that is not computed."""
        assert isinstance(self.key, str)
        return self.key


class Cut(NamedTuple):
    """How the rows of one module become those of several.

    parts: the modules that get them, with the numbers of the blocks that each consists of; all rows of the first block
        come first
    blocks: the sizes of blocks of rows that follow one another
    times: how often the blocks are repeated
    stacked: whether each repetition is a matrix of its own
    transposed: the modules whose matrices are transposed
    """

    parts: Mapping[str, tuple[int, ...]]
    blocks: tuple[Size, ...]
    times: Size = 1
    stacked: bool = False
    transposed: tuple[str, ...] = ()


def halved(module: str, into: str, width: str, **stack: Any) -> dict[str, Cut]:
    """Return the cut of a module with a gate above an up projection of the same width. into: what has both"""
    return {module: Cut({f"{into}.gate_proj": (0,), f"{into}.up_proj": (1,)}, (width, width), **stack)}


class Tiled(NamedTuple):
    """Rows or columns of value heads, which llama.cpp wants by their place in a group, not group by group.

    size: that of a head
    before: how many rows before them stay in their place
    columns: whether they are columns
    """

    size: Size
    before: Size = 0
    columns: bool = False


class Scaled(NamedTuple):
    """Multipliers of the model that llama.cpp expects in the weights.

    by: one for each block of rows
    blocks: the sizes of the blocks; without them, all rows are one
    """

    by: tuple[Factor, ...]
    blocks: tuple[Size, ...] = ()


class Rope(NamedTuple):
    """The rotary embeddings that llama.cpp computes for a type of model.

    kinds: of scaled ones
    rotated: how many channels of a head may be rotated
    partial: whether it can rotate a part of them
    half_rotated: whether it rotates half of them in layers with full attention, and all in those with a window
    sections: how many frequencies stand for time, height and width, if the configuration does not say
    yarn_scales_attention: whether mscale_all_dim of YaRN scales the attention
    yarn_mscale: the only mscale with which it does, if there is one
    temperature: whether it computes llama_4_scaling_beta, by which attention depends on the position
    rounds_yarn: whether the model does not round the bounds of YaRN, and users take it that llama.cpp does
    """

    kinds: frozenset[str] = frozenset({"default", "linear", "yarn"})
    rotated: Size = "head_dim"
    partial: bool = False
    half_rotated: bool = False
    sections: tuple[int, ...] = ()
    yarn_scales_attention: bool = False
    yarn_mscale: float | None = None
    temperature: bool = False
    rounds_yarn: bool = False


class Windows(NamedTuple):
    """The sliding windows that llama.cpp has in some layers of a type of model.

    period: one layer in so many has full attention, the last of each period, if the file does not say
    first_period: the same where it is the first of each period
    listed: whether the file lists the layers with windows in any case
    own_base: whether layers with a window may have a base of rotary embeddings of their own
    scaled: whether they have the same scaled rotary embeddings as others
    """

    period: int = 0
    first_period: int = 0
    listed: bool = False
    own_base: bool = True
    scaled: bool = False


# The names of transformers for kinds of layers, in layer_types.
FULL, SLIDING, LINEAR_ATTENTION = "full_attention", "sliding_attention", "linear_attention"
# How stacks of experts hold the rows of gate and up; the last: llama.cpp does so, too.
HALVES, ALTERNATING, JOINED = "halves", "alternating", "joined"
# What is asked of a configuration, as models.settings.Settings has it: why llama.cpp would compute something else, ""
# if it does not.
Check = Callable[[Any], str]


def real(parameter: str, key: str = "", **others: Any) -> Setting:
    """Return a hyper-parameter that need not be a whole number; by default, its key has the same name."""
    return Setting(parameter, key or parameter, real=True)._replace(**others)


RMS, LAYER_NORM = real("layer_norm_rms_eps", "rms_norm_eps"), real("layer_norm_eps")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How llama.cpp runs a type of model.

    name: its name in gguf.MODEL_ARCH
    label: its name in files, if the package does not have it; name is then that of one with the same tensors
    when: of one of several of a type, which models run so
    prefix: an expression for what the names of the checkpoint have before those that the gguf package knows
    unused: expressions for tensors that it does without, by their names without the prefix, and the reason
    follows: expressions for whole names of tensors of whole numbers that must be what `derived` has, and its keys
    modules: expressions for modules or parameters of a layer that the gguf package does not know, or whole names, and
        the names of those that it does
    tensors: expressions for tensors of a layer, or whole names outside of layers, that the gguf package does not know
        under any name, and their names in the file
    cuts: expressions for modules that it holds as several
    tiled: expressions for modules or parameters with value heads in another order
    scaled: expressions for modules, whole names outside of layers among them, whose weights are multiplied
    constants: tensors of each layer, by their names in the file, that the model has no weights for: one number for each
        channel of a head
    plain_norms: those that multiply by their weight alone, also where Trait.ZERO_CENTRED_NORMS holds
    norm: the setting of its norms
    settings: the hyper-parameters that it has beside those of all models, or instead of them
    shapes: the rows and columns of tensors, as in gguf.MODEL_TENSOR, where they are not those of SHAPES
    reshaped: the shapes of parameters that it holds with other dimensions
    needed: the tensors outside of layers that it needs beside the embeddings
    layer_types: the kinds of layers that it has
    uneven: an expression for tensors that not all layers of a kind have
    classes: the ends of the names of transformers' classes with what it computes
    encoder: whether tokens attend to those behind them, too
    pooling: how it makes one vector of those of all tokens, of gguf.PoolingType, whatever stands behind the model
    first_position: the key of the last row of the embeddings of positions that no token has
    interleaved: whether the rows of q and k are to be permuted, because it rotates neighbouring channels
    rope: its rotary embeddings; None if it has none
    free_head_dim: whether heads may be wider or narrower than hidden_size / num_attention_heads
    windows: its sliding windows; without them it computes the same for texts that are no longer than the model's
    no_window: what the file says of the window of a model without any, if it has to
    own_head: whether it needs a head although the embeddings are the head
    biases: the tensors, as in gguf.MODEL_TENSOR, of which it also takes a bias
    gate_and_up: how stacks of experts hold these two
    drafts: expressions for names below `mtp`, and what they are called in a layer behind the last one, if it has room
        for layers that predict further tokens; None if it has not. Without any, the names are those of a layer
    values: for keys of the configuration, the values with which the model computes what llama.cpp does
    equal: keys that must be equal
    derived: returns keys that follow from others
    checks: what else must hold
    notes: return what the user should know of its files
    """

    name: str
    label: str = ""
    when: Callable[[Any], bool] = lambda settings: True
    prefix: str = ""
    unused: Mapping[str, str] = field(default_factory=dict)
    follows: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    tiled: Mapping[str, Tiled] = field(default_factory=dict)
    scaled: Mapping[str, Scaled] = field(default_factory=dict)
    constants: Mapping[str, Factor] = field(default_factory=dict)
    plain_norms: frozenset[str] = frozenset({"SSM_NORM"})
    norm: Setting = RMS
    settings: tuple[Setting, ...] = ()
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    reshaped: Mapping[str, tuple[Size, ...]] = field(default_factory=dict)
    needed: tuple[str, ...] = ("output_norm.weight",)
    layer_types: frozenset[str] = frozenset({FULL, SLIDING})
    uneven: str = ""
    classes: tuple[str, ...] = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    encoder: bool = False
    pooling: str = ""
    first_position: str = ""
    interleaved: bool = False
    rope: Rope | None = field(default_factory=Rope)
    free_head_dim: bool = True
    windows: Windows | None = None
    no_window: Size | None = None
    own_head: bool = False
    biases: frozenset[str] = frozenset()
    gate_and_up: str = HALVES
    drafts: Mapping[str, str] | None = None
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    equal: tuple[tuple[str, str], ...] = ()
    derived: Callable[[Any], dict[str, Any]] = lambda settings: {}
    checks: tuple[Check, ...] = ()
    notes: tuple[Callable[[Any], str], ...] = ()

    @property
    def counts_experts(self) -> bool:
        """Whether its files say how many experts there are."""
        return any(setting.parameter == "expert_count" for setting in self.settings)


def query_rows(n: Numbers) -> int:
    """Return the rows of the matrix of queries."""
    return n("num_attention_heads") * n("head_dim")


def key_rows(n: Numbers) -> int:
    """Return the rows of the matrix of keys, or of values."""
    return n("num_key_value_heads") * n("head_dim")


def gate_and_up_rows(n: Numbers) -> int:
    """Return the rows of gate and up in one matrix."""
    return n("intermediate_size") * 2


SETTINGS = (
    Setting("context_length", "max_position_embeddings"),
    Setting("embedding_length", "hidden_size"),
    Setting("block_count", "block_count"),
    Setting("feed_forward_length", "intermediate_size"),
    Setting("head_count", "num_attention_heads"),
    Setting("head_count_kv", "num_key_value_heads"),
    Setting("key_length", "head_dim"),
    Setting("value_length", "head_dim"),
)
# A gated MLP of a width of its own.
SHAPES: Mapping[str, Shape] = {
    "ATTN_Q": (query_rows, "hidden_size"),
    "ATTN_K": (key_rows, "hidden_size"),
    "ATTN_V": (key_rows, "hidden_size"),
    "ATTN_QKV": (lambda n: query_rows(n) + 2 * key_rows(n), "hidden_size"),
    "ATTN_OUT": ("hidden_size", query_rows),
    "FFN_GATE": ("intermediate_size", "hidden_size"),
    "FFN_UP": ("intermediate_size", "hidden_size"),
    "FFN_DOWN": ("hidden_size", "intermediate_size"),
    "ATTN_NORM": ("hidden_size", None),
    "FFN_NORM": ("hidden_size", None),
    "OUTPUT_NORM": ("hidden_size", None),
    "TOKEN_EMBD": (None, "hidden_size"),
    "OUTPUT": (None, "hidden_size"),
}


def mlp_shapes(width: Size) -> dict[str, Shape]:
    """Return the shapes of a gated MLP of another width."""
    into: Shape = (width, "hidden_size")
    return {"FFN_GATE": into, "FFN_UP": into, "FFN_DOWN": ("hidden_size", width)}


EXPERTS = (Setting("expert_count", "num_experts"), Setting("expert_used_count", "num_experts_per_tok"))
EXPERT_WIDTH = Setting("expert_feed_forward_length", "moe_intermediate_size")
SHARED_WIDTH = Setting("expert_shared_feed_forward_length", "shared_expert_intermediate_size")
SOFTMAX, SIGMOID = (Setting("expert_gating_func", number, of="ExpertGatingFuncType") for number in (1, 2))
DENSE_FIRST = Setting("leading_dense_block_count", "first_k_dense_replace", optional=True)
SCALED = real("expert_weights_scale", "routed_scaling_factor")
NORMED = Setting("expert_weights_norm", "norm_topk_prob", truth=True)
GROUPS = (
    Setting("expert_group_count", "n_group", optional=True),
    Setting("expert_group_used_count", "topk_group", optional=True),
)
SHARED = Setting("expert_shared_count", "n_shared_experts")
ROUTER_BIAS = {r"((?:mlp|block_sparse_moe|mixer)(?:\.gate)?)\.e_score_correction_bias": r"\1.e_score_correction.bias"}
# Layers without attention have no heads of keys and values.
SOME_HEADS = Setting("head_count_kv", "num_key_value_heads", only=f"{FULL}.*")

DEFAULT, LINEAR = frozenset({"default"}), frozenset({"default", "linear"})
LLAMA3 = frozenset({"default", "llama3"})
EVERY_LLAMA = frozenset({"default", "linear", "llama3", "yarn", "longrope"})
QKV = frozenset({"ATTN_Q", "ATTN_K", "ATTN_V"})
SILU_ONLY = {"hidden_act": ("silu", "swish")}
NO_BIAS = {"attention_bias": (False, None)}
ALL_SPARSE = {"decoder_sparse_step": (1, None), "mlp_only_layers": ([], None)}
# What early configurations of Gemma call gelu is its approximation by tanh, too.
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")


def layer_count(values: Mapping[str, Any]) -> int:
    """Return how many layers a configuration states, of which none is checked yet; at most what llama.cpp has."""
    layers = values.get("num_hidden_layers")
    return min(layers, 512) if isinstance(layers, int) else 0


def list_experts(config: dict[str, Any], held: Set[str]) -> None:
    """State for each layer whether it has experts, in a configuration that was read from a file."""
    dense = config.get("first_k_dense_replace", 0)
    config["mlp_layer_types"] = ["dense" if n < dense else "sparse" for n in range(config["num_hidden_layers"])]


def first_class(values: Mapping[str, Any]) -> str:
    """Return the first of the classes that a configuration names; "" if it names none."""
    named = values.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
