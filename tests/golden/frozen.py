"""The bytes of results, as digests: masters of every codec, and exports of every format and of a dozen families.

    PYTHONPATH=tests:tests/support python -m golden.frozen

writes `frozen.json` anew, which tests/test_frozen_bytes.py compares. A digest is over names, dtypes, shapes and bytes
of the stored tensors, by name; the order of tensors, shards and the configuration are free to change. The weights come
from numpy, not from torch, whose random numbers differ between processors. What a calibration learns depends on a
library's arithmetic: of calibrated masters, the encoder is frozen, with given moments (tests/golden/columns, stacks).
"""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import helpers
import numpy as np
import tokenizers
import trained_tokenizers
from shared import made_once

import pqweights

FILE = Path(__file__).parent / "frozen.json"
MAIN = "qwen3"  # the family that gets every format
TARGETS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "gguf": {"type": "q4_k_m"},
    "mlx": {},
    "vllm": {"group_size": 32},
    "torchao": {"packing": "plain"},
}
# The formats of each target, by name of the option.
FORMATS: dict[str, tuple[str, str]] = {
    "vllm": (
        "format",
        "w4a16 w8a16 w3a16 w2a16 w4a16-asym int8 fp8 fp8-block mxfp4 mxfp4a16 mxfp8 mxfp8a16 nvfp4 nvfp4a16 "
        "fp8-deepseek awq gptq gptq-8 nvfp4-modelopt",
    ),
    "mlx": ("format", "q2 q3 q4 q5 q6 q8 mxfp4 mxfp8 nvfp4 mixed_2_6 mixed_4_6"),
    "torchao": ("format", "int4 int8 int8-dynamic fp8"),
    "gguf": (
        "type",
        "f32 f16 bf16 q8_0 q6_k q5_k_m q5_1 q5_0 q4_k_s q4_1 q4_0 iq4_nl nvfp4 mxfp4_moe iq4_xs q3_k_m iq3_s iq3_xxs "
        "q2_k iq2_s iq2_xs tq2_0 iq2_xxs iq1_m tq1_0 iq1_s",
    ),
}
RECIPES: dict[str, dict[str, Any]] = {
    **{f"scalar-{bits}": {"bits": bits} for bits in range(2, 9)},
    **{f"trellis-{bits}": {"recipe": "t4", "bits": bits} for bits in (1.5, 2.125, 3, 4.0, 5.375)},
    "trellis-64-states": {"recipe": "t4", "effort": 64},
    "lossless": {"lossless": True},
}


@dataclass(frozen=True)
class Result:
    """A result whose bytes are frozen. make: writes it into a folder"""

    name: str
    make: Callable[[Path], object]


def source(family: str, base: Path) -> Path:
    """The checkpoint of a family, with weights of numpy in place of those of torch."""

    def restate(folder: Path) -> None:
        made = families.build(families.FAMILIES[family], folder)
        tensors = {}
        for number, (name, (dtype, values)) in enumerate(sorted(helpers.read_all(made).items())):
            normal = np.random.default_rng([2026, number]).standard_normal(values.shape)
            scale = np.random.default_rng([2027, number]).lognormal(0, 0.5, values.shape[-1:])  # uneven columns
            floats = normal * scale * 0.04 if values.ndim > 1 else 1 + 0.1 * normal
            tensors[name] = {"BF16": helpers.bf16, "F32": helpers.f32}[dtype](floats.astype(np.float32))
        for file in made.glob("*.safetensors*"):
            file.unlink()
        helpers.write_checkpoint(made, tensors)
        trained_tokenizers.save(_bytes(), made)  # which GGUF knows

    return made_once(base / "frozen" / family, restate)


def _bytes() -> tokenizers.Tokenizer:
    """A tokenizer of single bytes, and of one pair of them."""
    tokens = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "th"]
    model = tokenizers.models.BPE({token: index for index, token in enumerate(tokens)}, [("t", "h")])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([trained_tokenizers.BEGIN, trained_tokenizers.END])
    return made


def master(family: str, base: Path) -> Path:
    """A master of that checkpoint, at 6 bits."""
    return made_once(
        base / "frozen-masters" / family,
        lambda out: pqweights.quantize(source(family, base), out, recipe="q6", threads=2),
    )


def masters(base: Path) -> Iterator[Result]:
    """One of every codec and of several widths."""
    for name, options in RECIPES.items():
        yield Result(
            f"master/{name}",
            lambda out, options=options: pqweights.quantize(source(MAIN, base), out, threads=2, **options),
        )
    for family in families.FAMILIES:
        yield Result(
            f"master/{family}", lambda out, family=family: pqweights.quantize(source(family, base), out, threads=2)
        )


def exports(base: Path) -> Iterator[Result]:
    """Every format of one family and every target of all of them, each from the source and from a master."""
    for family in families.FAMILIES:
        for target, options in TARGETS.items():
            yield from _both(f"{family}/{target}", family, target, options, base)
    for target, (option, names) in FORMATS.items():
        for name in names.split():
            yield from _both(f"{MAIN}/{target}-{name}", MAIN, target, {option: name}, base)


def _both(name: str, family: str, target: str, options: dict[str, Any], base: Path) -> Iterator[Result]:
    def export(made: Callable[[str, Path], Path], out: Path) -> None:
        with helpers.narrow_layers_packed():
            pqweights.export(made(family, base), out, target=target, threads=2, **options)

    yield Result(f"from-master/{name}", functools.partial(export, master))
    if target != "bf16":  # which from the source is the source
        yield Result(f"from-source/{name}", functools.partial(export, source))


def digest(folder: Path) -> str:
    """The digest of all tensors of a result."""
    whole = hashlib.sha256()
    for name, dtype, shape, data in sorted(_tensors(folder), key=lambda tensor: tensor[0]):
        whole.update(json.dumps([name, dtype, list(shape)]).encode())
        whole.update(hashlib.sha256(data).digest())
    return whole.hexdigest()[:32]


def _tensors(folder: Path) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
    for name, (dtype, values) in helpers.read_all(folder).items():
        yield name, dtype, values.shape, values.tobytes()
    for file in folder.glob("*.gguf"):
        import gguf

        for tensor in gguf.GGUFReader(file).tensors:
            shape = tuple(int(extent) for extent in tensor.shape)
            yield tensor.name, tensor.tensor_type.name, shape, tensor.data.tobytes()


def results(base: Path) -> list[Result]:
    """All results whose bytes are frozen."""
    return [*masters(base), *exports(base)]


def state(result: Result, folder: Path) -> str:
    """The digest of a result, or the kind of the error with which it is refused."""
    try:
        result.make(folder)
    except pqweights.PqweightsError as error:
        return type(error).__name__
    return digest(folder)


def main() -> None:
    """Write the digests of today."""
    states = {}
    with tempfile.TemporaryDirectory() as temporary:
        for number, result in enumerate(results(Path(temporary))):
            states[result.name] = state(result, Path(temporary) / str(number))
    FILE.write_text(json.dumps(states, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
