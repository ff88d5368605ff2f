"""compressed-tensors `pack-quantized`, weights only, symmetric: what vLLM and transformers open.

Format: https://github.com/vllm-project/compressed-tensors (compressors/pack_quantized); code q + 2**(bits - 1) in 32-bit
words, the first lowest. In the rotated basis the stored weights are W H / sqrt(128), and transform_config tells the
runtime to rotate the inputs of those layers (QuaRot, arXiv:2404.00456, section 4, with H alone).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pqweights.checkpoint.config import edited_config, model_dtype
from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.dtypes import from_float32
from pqweights.errors import ExportError
from pqweights.exports.integers import Outline, Piece, Rounding, Rule, Stays
from pqweights.exports.linear import linear_weights
from pqweights.exports.options import BEST, MINMAX, PLAIN, ROTATED, ExportOptions, one_of
from pqweights.kernels import BLOCK_SIZE
from pqweights.kernels.groups import GroupRule, Groups, pack_bits
from pqweights.plan import DEFAULT_METADATA
from pqweights.roles import classify

NAME = "vllm-int4"
GROUP_SIZES = (128, 64, 32)

# Layers that vLLM fuses into one, which then has one input and one transform (its models' packed_modules_mapping).
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


@dataclass(frozen=True)
class VllmInt4:
    """The target. asked_group_size: None for 128, where weights that it does not divide stay plain."""

    bits: int
    asked_group_size: int | None
    basis: str
    qparams: str

    @property
    def group_size(self) -> int:
        """Weights that share a scale."""
        return self.asked_group_size or GROUP_SIZES[0]

    @staticmethod
    def make(options: ExportOptions) -> VllmInt4:
        """From what the user asked for.

        Raises ExportError for what the target does not have.
        """
        options.only(NAME, "bits", "group_size", "basis", "qparams")
        return VllmInt4(
            one_of(NAME, "bits", options.bits, (4, 8)),
            options.group_size and one_of(NAME, "group-size", options.group_size, GROUP_SIZES),
            one_of(NAME, "basis", options.basis, (PLAIN, ROTATED)),
            one_of(NAME, "qparams", options.qparams, (BEST, MINMAX)),
        )

    def describe(self) -> dict[str, Any]:
        """See integers.Target."""
        return {
            "target": NAME, "bits": self.bits, "group_size": self.group_size, "basis": self.basis,
            "qparams": self.qparams,
        }  # fmt: skip

    def outline(self, checkpoint: Checkpoint) -> Outline:
        """See integers.Target; names and shapes are the source's."""
        name = "best" if self.qparams == BEST else "compressed-tensors"
        plain = Rounding(GroupRule(self.bits, self.group_size, True, True, name), PackedLayout())
        reasons = linear_weights(NAME, checkpoint, self.asked_group_size, self.group_size, GROUP_SIZES, None)
        turned = _rotatable(checkpoint, reasons) if self.basis == ROTATED else set()
        if self.basis == ROTATED and not turned:
            raise ExportError(
                "--basis rotated: no linear layer of this model can be rotated (it takes layers without a bias, rows of whole "
                "blocks of 128, and all layers that vLLM fuses alike); use --basis plain"
            )
        decisions: dict[str, Rounding | Stays] = {
            name: replace(plain, rotated=name in turned) if why is None else Stays(why) for name, why in reasons.items()
        }
        return Outline(checkpoint.tensors, decisions, {}, DEFAULT_METADATA, self._config(checkpoint, decisions, turned))

    def _config(
        self, checkpoint: Checkpoint, decisions: Mapping[str, Rounding | Stays], turned: set[str]
    ) -> dict[str, Any]:
        """The quantization_config of compressed-tensors: every linear layer but those to be ignored."""
        weights = {
            "num_bits": self.bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": self.group_size,
            "dynamic": False,
        }  # fmt: skip
        group = {
            "targets": ["Linear"], "format": "pack-quantized", "input_activations": None, "output_activations": None,
            "weights": weights,
        }  # fmt: skip
        layers = [t.name for t in checkpoint.tensors if _may_be_layer(t)]
        rounded = [name for name in layers if isinstance(decisions.get(name), Rounding)]
        ignored = patterns([name for name in layers if name not in set(rounded)], rounded)
        quantization: dict[str, Any] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", *(pattern for pattern in ignored if pattern != "lm_head")],
        }
        if turned:
            targets = patterns(sorted(turned), [name for name in layers if name not in turned])
            apply = {"targets": targets, "location": "input", "inverse": False, "ignore": []}
            scheme = {
                "type": "hadamard", "head_dim": BLOCK_SIZE, "randomize": False, "requires_grad": False, "apply": [apply],
            }  # fmt: skip
            quantization["transform_config"] = {"config_groups": {"hadamard": scheme}}
        return edited_config(
            checkpoint.config, "BF16", model_dtype(checkpoint.config, checkpoint.tensors), quantization
        )


def _module(weight: str) -> str:
    return weight.removesuffix(".weight")


def _may_be_layer(tensor: LogicalTensor) -> bool:
    """Whether compressed-tensors may take what holds a tensor for a linear layer, or vLLM for fused experts."""
    role = classify(tensor.name, tensor.dtype, tensor.shape).name
    return len(tensor.shape) in (2, 3) and role not in ("embedding", "bias", "norm", "conv", "buffer")


def _rotatable(checkpoint: Checkpoint, reasons: Mapping[str, str | None]) -> set[str]:
    """The weights whose inputs the runtime can rotate."""
    names = {tensor.name for tensor in checkpoint.tensors}
    fit: dict[str, bool] = {}
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for tensor in checkpoint.tensors:
        if not tensor.name.endswith(".weight") or len(tensor.shape) != 2:
            continue
        module = _module(tensor.name)
        expert = (
            classify(tensor.name, tensor.dtype, tensor.shape).name == "expert"
        )  # vLLM's fused experts know no transform
        fit[tensor.name] = (
            reasons.get(tensor.name, "kept") is None
            and tensor.shape[1] % BLOCK_SIZE == 0
            and f"{module}.bias" not in names
            and not expert
        )
        parent, _, last = module.rpartition(".")
        siblings = next((group for group in FUSED if last in group), (last,))
        groups[parent, siblings].append(tensor.name)
    return {name for group in groups.values() if all(fit[name] for name in group) for name in group}


def patterns(weights: Sequence[str], others: Sequence[str]) -> list[str]:
    """Modules for compressed-tensors: one expression for those that differ only in numbers, unless it would take in others.

    An expression leaves open what stands before the layers, because runtimes put a prefix there or take one away.
    """
    forms: dict[str, list[str]] = defaultdict(list)
    for module in map(_module, weights):
        forms[_expression(module)].append(module)
    taken = {_expression(_module(weight)) for weight in others}
    result = []
    for form, members in forms.items():
        if len(members) > 1 and form not in taken:
            result.append(f"re:{form}")
        else:
            result += members
    return result


def _expression(module: str) -> str:
    """The regular expression that matches a module and its like in other layers."""
    start = re.search(r"(?<=\.)[^.\d][^.]*\.\d+\.", module)
    tail = module[start.start() :] if start else module
    return (
        r".*\b" * bool(start)
        + r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in tail.split("."))
        + "$"
    )


@dataclass(frozen=True)
class PackedLayout:
    """weight_packed i32 [N, K * bits / 32], weight_scale [N, K / g], weight_shape i64 [2]."""

    row_multiple: int = 1

    def specs(self, name: str, shape: tuple[int, ...], rule: Rule) -> tuple[TensorSpec, ...]:
        """See integers.Layout."""
        rows, columns = shape
        return (
            TensorSpec(f"{name}_packed", "I32", (rows, columns * rule.bits // 32)),
            TensorSpec(f"{name}_scale", "BF16", (rows, columns // rule.group_size)),
            TensorSpec(f"{name}_shape", "I64", (2,)),
        )

    def pieces(self, name: str, shape: tuple[int, ...], rule: Rule, first_row: int, groups: Groups) -> list[Piece]:
        """See integers.Layout."""
        _, columns = shape
        result = [
            Piece(f"{name}_packed", first_row * columns * rule.bits // 8, 0, pack_bits(groups.codes, rule.bits)[None]),
            Piece(
                f"{name}_scale",
                first_row * (columns // rule.group_size) * 2,
                0,
                from_float32(groups.scales, "BF16")[None],
            ),
        ]
        if first_row == 0:
            result.append(Piece(f"{name}_shape", 0, 0, np.array(shape, dtype="<i8").view(np.uint8)[None]))
        return result
