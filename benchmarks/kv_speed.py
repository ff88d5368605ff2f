"""What quantized caches cost in time: encoding a prompt, and each token that is generated after it.

    python benchmarks/kv_speed.py [--layers 2] [--context 4096] [--threads 2]

The model is an untrained Llama with layers of the size of a 1 B model (hidden 2048, 32 query and 8 key heads of 64
coordinates by default), in BF16, of which only a few layers are made; times are for those layers. Prompts are read in
one pass. Encoding is timed apart: keys and values of one layer are packed again, from the states of the pass. Steps are
timed in turns with those of transformers' own cache, on a cache filled with the prompt.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import kv_baselines
import torch
from harness import Cell, Document, argument_parser, machine, now, publish, table, usable_cores
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from pqweights.runtime.kv.cache import KVCache, PackedLayer, kv_cache

SPECS = (
    "none",
    "hadamard:4",
    "hadamard:3",
    "polar-rope:m4n4",
    "polar-rope:m4n2,values=2",
    "klt:4",
    "klt:3",
    "klt:2",
    "polar",
    "polar:online",
    "kivi:4",
    "absmax:4",
)
VOCABULARY = 1024


def model_of(options: Any) -> LlamaForCausalLM:
    """An untrained model with few layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.key_heads,
        head_dim=options.size,
        max_position_embeddings=1 << 20,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def seconds(call: Any) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def encoding(cache: KVCache, states: list[tuple[torch.Tensor, torch.Tensor]], rounds: int) -> float:
    """The median time of packing the states of all layers."""

    def pack() -> None:
        for layer, (keys, values) in zip(cache.layers, states, strict=True):
            assert isinstance(layer, PackedLayer)
            layer.reset()
            layer.lazy_initialization(keys, values)
            for stored, given in zip(layer.states, (keys, values), strict=True):
                stored.append(given)

    return statistics.median(seconds(pack) for _ in range(rounds))


def steps(net: LlamaForCausalLM, caches: list[Any], rounds: int) -> list[list[float]]:
    """The times of single tokens with each cache, in turns."""
    token = torch.zeros(1, 1, dtype=torch.int64)
    times: list[list[float]] = [[] for _ in caches]
    for _ in range(rounds):
        for found, cache in zip(times, caches, strict=True):
            found.append(seconds(lambda cache=cache: net(token, past_key_values=cache)))
    return times


@torch.inference_mode()
def measure(options: Any) -> list[dict[str, Any]]:
    """A row for each method."""
    net = model_of(options)
    ids = torch.randint(0, VOCABULARY, (1, options.context))
    plain = DynamicCache(config=net.config)
    net(ids[:, :64])
    prefill = statistics.median(
        seconds(lambda: net(ids, past_key_values=DynamicCache(config=net.config), logits_to_keep=1)) for _ in range(3)
    )
    net(ids, past_key_values=plain, logits_to_keep=1)
    states = [(layer.keys, layer.values) for layer in plain.layers]
    rows = []
    for spec in SPECS:
        cache = kv_cache(net, spec, on_codes=True)
        encoded = encoding(cache, states, 3)
        ours, theirs = steps(net, [cache, plain], options.rounds)
        rows.append(
            {
                "spec": cache.spec,
                "bits": cache.bits_per_coordinate(),
                "prefill_seconds": prefill,
                "encoding_seconds": encoded,
                "step_seconds": statistics.median(ours),
                "plain_step_seconds": statistics.median(theirs),
                "ratio": statistics.median(a / b for a, b in zip(theirs, ours, strict=True)),
            }
        )
        print(rows[-1], flush=True)
    return rows


HEADER = ("cache", "bits", "encoding, share of the prefill", "ms per token", "tokens/s beside the plain cache")


def sections(document: Document) -> dict[str, str]:
    """The table, in Markdown."""
    settings = document["settings"]
    rows: list[list[Cell]] = [
        [
            row["spec"],
            f"{row['bits']:.2f}",
            f"{row['encoding_seconds'] / row['prefill_seconds']:.1%}",
            f"{row['step_seconds'] * 1e3:.1f}",
            f"{row['ratio']:.2f}",
        ]
        for row in document["rows"]
    ]
    about = (
        f"{settings['layers']} layers with hidden {settings['hidden']}, {settings['heads']} query and "
        f"{settings['key_heads']} key heads of {settings['size']}, BF16, {settings['threads']} threads; a prompt of "
        f"{settings['context']} tokens; medians of {settings['rounds']} tokens in turns with transformers' own cache."
    )
    return {f"kv-speed-{settings['context']}": f"{about}\n\n" + table(HEADER, rows)}


def main() -> None:
    kv_baselines.add()
    parser = argument_parser(__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=usable_cores())
    options = parser.parse_args()
    start = now()
    torch.set_num_threads(options.threads)
    rows = measure(options)
    names = ("layers", "hidden", "heads", "key_heads", "size", "context", "rounds", "threads")
    settings = {name: getattr(options, name) for name in names}
    document = {"machine": machine(start), "settings": settings, "rows": rows}
    publish(f"kv_speed_{options.context}", document, sections(document), options, ("kv",))


if __name__ == "__main__":
    main()
