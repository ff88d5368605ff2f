"""The shapes that llama.cpp expects of the tensors of a layer: it does not load a file with others."""

from __future__ import annotations

from pqweights.checkpoint.readers import LogicalTensor
from pqweights.errors import ExportError
from pqweights.gguf.settings import Settings


def check_shape(tensor: LogicalTensor, kind: str, settings: Settings) -> None:
    """Raise ExportError if a tensor has other rows or columns than the configuration says.

    kind: its name in gguf.MODEL_TENSOR; those of experts are checked where they are stacked
    """
    rows, columns = _expected(kind, settings)
    found = (tensor.shape[0], tensor.shape[-1] if len(tensor.shape) > 1 else columns)
    if (rows or found[0], columns or found[1]) != found:
        asked = " and ".join(f"{size} {name}" for size, name in ((rows, "rows"), (columns, "columns")) if size)
        raise ExportError(
            f"tensor {tensor.name!r}: config.json asks for {asked}, as does llama.cpp; found shape {tensor.shape}"
        )


def _expected(kind: str, settings: Settings) -> tuple[int | None, int | None]:
    """The rows and the columns of a kind of tensor; None where nothing is expected."""
    size, hidden = settings.number("head_dim"), settings.number("hidden_size")
    queries = settings.number("num_attention_heads") * size
    keys = settings.number("num_key_value_heads") * size
    inner = settings.number("intermediate_size")
    if kind == "FFN_UP" and settings.architecture.name == "PHI3":
        return 2 * inner, hidden  # gate and up in one
    shapes: dict[str, tuple[int | None, int | None]] = {
        "ATTN_Q": (queries, hidden),
        "ATTN_K": (keys, hidden),
        "ATTN_V": (keys, hidden),
        "ATTN_QKV": (queries + 2 * keys, hidden),
        "ATTN_OUT": (hidden, queries),
        "FFN_GATE": (inner, hidden),
        "FFN_UP": (inner, hidden),
        "FFN_DOWN": (hidden, inner),
        "ATTN_NORM": (hidden, None),
        "FFN_NORM": (hidden, None),
        "OUTPUT_NORM": (hidden, None),
        "TOKEN_EMBD": (None, hidden),
        "OUTPUT": (None, hidden),
    }
    return shapes.get(kind, (None, None))
