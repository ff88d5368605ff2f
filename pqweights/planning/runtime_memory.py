"""What a runtime takes beside weights: the share of the memory that it uses, and what it computes with.

docs/memory.md has the formula, where each number comes from, and what was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pqweights.planning.context_memory import ContextMemory, TextSizes
from pqweights.planning.options import LLAMA_CPP, MLX, TRANSFORMERS, VLLM

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How a runtime uses memory, by its defaults.

    shares: the share of the memory that it uses, by the most memory for which it does so
    base_bytes: what it takes whatever the model, such as the context of a GPU
    tokens: how many tokens it reads at a time; None for all of the context
    logit_rows: for how many of them it holds the logits, in F32
    value_bytes: the size of what it computes with
    mask_bytes: of each token that it reads at a time and each of the context
    """

    shares: tuple[tuple[float, float], ...]
    base_bytes: int
    tokens: int | None
    logit_rows: int
    value_bytes: int
    mask_bytes: int = 0

    def overhead_bytes(self, sizes: TextSizes, context: int) -> int:
        """Return what it takes beside the weights and what the model keeps of the context."""
        tokens = min(context, self.tokens or context)
        within = tokens * (3 * sizes.inner + 8 * sizes.width) * self.value_bytes
        logits = min(tokens, self.logit_rows) * (4 * sizes.vocabulary + 8 * sizes.width)
        return self.base_bytes + max(within, logits) + self.mask_bytes * tokens * context

    def context_bytes(self, kept: ContextMemory, context: int) -> int:
        """Return the size of what the model keeps of a context."""
        return kept.bytes(context, ahead=self.tokens or 0)

    def memory_for(self, used_bytes: int) -> int:
        """Return the least memory of which it uses so many bytes."""
        least = 0.0
        for most, share in self.shares:
            if (needed := max(used_bytes / share, least)) <= most:
                return math.ceil(needed)
            least = most + 1
        raise AssertionError("the last share is for any memory")


RUNTIME_MEMORY = {
    LLAMA_CPP: Runtime(
        shares=((math.inf, 1.0),), base_bytes=GIB // 2, tokens=512, logit_rows=512, value_bytes=4, mask_bytes=2
    ),
    MLX: Runtime(shares=((32 * GIB, 2 / 3), (math.inf, 3 / 4)), base_bytes=0, tokens=2048, logit_rows=1, value_bytes=2),
    VLLM: Runtime(shares=((math.inf, 0.92),), base_bytes=GIB, tokens=2048, logit_rows=256, value_bytes=2),
    TRANSFORMERS: Runtime(shares=((math.inf, 1.0),), base_bytes=3 * GIB // 4, tokens=None, logit_rows=1, value_bytes=2),
}
