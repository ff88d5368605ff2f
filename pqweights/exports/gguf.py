"""The gguf target: one file, or several numbered ones, for llama.cpp, Ollama and LM Studio.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What the model is in llama.cpp's terms is in
pqweights/gguf, which types its tensors get in gguf_types.py, and what lies beside the weights in gguf_files.py.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pqweights.checkpoint.header import TensorSpec
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.installing import pip_install
from pqweights.errors import MissingDependencyError, OptionError
from pqweights.exports.gguf_files import GgufOutput, load_section
from pqweights.exports.gguf_options import TypeOptions, read_types
from pqweights.exports.gguf_types import TypeChoice, chosen_types
from pqweights.exports.integers import Outline, Rounding, RoundingRule, Stays, StoredPiece
from pqweights.exports.options import BEST, IMPORTANCE, PLAIN, one_of
from pqweights.exports.original import integer_export
from pqweights.exports.target import LLAMA_CPP, ExportSource, ExportTarget, PlannedMaster
from pqweights.gguf.mixes import PLAIN_TYPES, may_be_quantized
from pqweights.kernels.gguf_types import BLOCK_TYPES, BlockType
from pqweights.kernels.groups import Groups
from pqweights.options import ExportOptions
from pqweights.rewrite.transform import Transform
from pqweights.storage.hub.ids import is_repository_id

if TYPE_CHECKING:
    from pqweights.kernels.gguf_encoding import EncodedBlocks

NAME = "gguf"


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """The format with its options.

    types: which types tensors get
    weighed: whether errors are weighed by the importance of inputs
    imatrix: whether the importance matrix is written beside the weights
    name: what the model is called; None if it is not known
    fingerprint: that of the checkpoint that the master was made from; None if it is not known
    """

    types: TypeOptions
    weighed: bool
    imatrix: bool
    name: str | None = None
    fingerprint: str | None = None

    compares_master = False

    def describe(self) -> dict[str, Any]:
        """Return the manifest's account of the target and its options."""
        imatrix = {"imatrix": True} if self.imatrix else {}
        return {"target": NAME, **self.types.describe(), **imatrix, "name": self.file_name}

    @property
    def file_name(self) -> str:
        """The name of the file without its ending."""
        return f"{(self.name or 'model').rpartition('/')[2]}-{self.types.label}"

    def outline(self, checkpoint: Checkpoint) -> Outline:
        """Decide which types tensors get; names and shapes are those of llama.cpp.

        Raises MissingDependencyError without gguf, ExportError if llama.cpp cannot take the model or its tokenizer.
        """
        _check_package()
        from pqweights.gguf.model import gguf_model

        model = gguf_model(checkpoint, name=self.name)
        types = chosen_types(self.types, model, checkpoint, fingerprint=self.fingerprint, imatrix=self.weighed)
        mix = None if self.types.target_size is not None else self.types.mix
        output = GgufOutput(file_name=self.file_name, model=model, mix=mix, imatrix=self.imatrix, checkpoint=checkpoint)
        return Outline(
            tensors=model.tensors,
            decisions={name: _decision(choice) for name, choice in types.items()},
            left_out=model.left_out,
            metadata={},
            config=None,
            plain_dtype=None,
            container=output.container,
            small_files=output.small_files,
            companions=output.companions,
            measured=tuple(
                tensor
                for tensor in model.tensors
                if self.imatrix
                and types[tensor.name].type in PLAIN_TYPES
                and may_be_quantized(tensor.name, tensor.shape)
            ),
            warnings=model.notes,
        )


def _decision(choice: TypeChoice) -> Rounding | Stays:
    """Return what becomes of a tensor of this type."""
    if choice.type in PLAIN_TYPES:
        return Stays(choice.reason, choice.type)
    rule = BlockRule(BLOCK_TYPES[choice.type])
    return Rounding(rule, BlockLayout(), label=choice.type, reason=choice.reason)


@dataclass(frozen=True)
class BlockRule:
    """A block format, whose scales are chosen by least squares (kernels/gguf_encoding.py)."""

    type: BlockType

    name = BEST

    @property
    def bits(self) -> int:
        """The width of a code."""
        return self.type.bits

    @property
    def group_size(self) -> int:
        """The number of weights of a block."""
        return self.type.block_size

    @property
    def kind(self) -> str:
        """The name of the format."""
        return self.type.name

    def quantize(self, values: npt.NDArray[np.float32]) -> Groups:
        """Quantize whole blocks of weights; the codes are the bytes of the blocks."""
        from pqweights.kernels.gguf_encoding import encode_blocks
        from pqweights.kernels.gguf_gain import with_gain

        rows = values.reshape(-1, self.group_size)
        return _groups(with_gain(self.type.name, encode_blocks(self.type.name, rows, None)))

    def quantize_weighted(self, values: npt.NDArray[np.float32], importance: npt.NDArray[np.float32]) -> Groups:
        """See WeightedRule."""
        from pqweights.kernels.gguf_encoding import encode_blocks
        from pqweights.kernels.gguf_gain import FACTORS, products_of, with_gain

        rows = values.reshape(-1, len(importance))
        blocks = encode_blocks(self.type.name, rows, importance)
        if self.type.name in FACTORS:
            blocks = with_gain(self.type.name, blocks, products_of(rows, self._decoded(blocks.data), importance))
        return _groups(blocks)

    def decode(self, groups: Groups) -> npt.NDArray[np.float32]:
        """Return the weights that llama.cpp decodes: [blocks, block size]."""
        return self._decoded(groups.codes)

    def _decoded(self, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        import gguf

        kind = gguf.GGMLQuantizationType[self.type.name]
        decoded: npt.NDArray[np.float32] = gguf.quants.dequantize(data, kind)
        return decoded.reshape(-1, self.group_size)


def _groups(blocks: EncodedBlocks) -> Groups:
    """Return blocks in the form of groups, whose codes are the bytes of the blocks."""
    none = np.zeros(len(blocks.data), dtype=np.float32)
    return Groups(codes=blocks.data, scales=none, offsets=none, energies=blocks.energies, errors=blocks.errors)


@dataclass(frozen=True)
class BlockLayout:
    """Blocks, one after the other, as u8 [..., N, bytes of a row]."""

    row_multiple: int = 1

    def specs(self, name: str, shape: tuple[int, ...], rule: RoundingRule) -> tuple[TensorSpec, ...]:
        """Return the one stored tensor of a weight [..., K]."""
        return (TensorSpec(name, "U8", (*shape[:-1], self._row_bytes(shape, rule))),)

    def pieces(
        self, name: str, shape: tuple[int, ...], rule: RoundingRule, *, first_row: int, groups: Groups
    ) -> list[StoredPiece]:
        """Return the bytes of some rows."""
        offset = first_row * self._row_bytes(shape, rule)
        return [StoredPiece(name, offset, groups.codes.reshape(-1))]

    def _row_bytes(self, shape: tuple[int, ...], rule: RoundingRule) -> int:
        return BLOCK_TYPES[rule.kind].row_bytes(shape[-1])


def _check_package() -> None:
    """Raise MissingDependencyError if the gguf package is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise MissingDependencyError(f"the target {NAME} needs the gguf package: {pip_install('gguf')}")


def read_options(options: ExportOptions) -> Gguf:
    """Return the format with the options that the user gave.

    Raises OptionError for an option that the target does not have, RecipeError for a recipe that cannot be read.
    """
    rounding = one_of(NAME, "rounding", options.rounding, allowed=(None, PLAIN, IMPORTANCE))
    if rounding == IMPORTANCE and options.calibration is None:
        raise OptionError(f"`rounding` {IMPORTANCE}: expected `calibration` FILE as well")
    if options.imatrix and (options.calibration is None or rounding == PLAIN):
        raise OptionError("`imatrix`: expected `calibration` FILE as well, and no `rounding` plain")
    weighed = options.calibration is not None and rounding != PLAIN
    return Gguf(types=read_types(options), weighed=weighed, imatrix=options.imatrix)


def _prepare(source: ExportSource, settings: Gguf) -> tuple[Checkpoint, Transform]:
    """Return the checkpoint to be rewritten, and the transform that does it."""
    # The manifest of a master may say anything; the name stands in names of files and in the Modelfile.
    manifest = source.manifest
    model_id = "" if manifest is None else manifest.identity.model.get("id", "")
    fingerprint = None if manifest is None else manifest.source_fingerprint
    named = replace(
        settings, name=model_id if is_repository_id(model_id, namespace=False) else None, fingerprint=fingerprint
    )
    return integer_export(source, named)


def _check(master: PlannedMaster, settings: Gguf) -> None:
    """See ExportTarget; the tokenizer, which may be large, is not read."""
    from pqweights.gguf.model import check_model

    check_model(master.source)


TARGET = ExportTarget(
    name=NAME,
    runtime=LLAMA_CPP,
    tags=("gguf", "llama.cpp"),
    options=(
        *("type", "pure", "recipe", "set_type", "target_size", "sensitivity"),
        *("imatrix", "fold", "rounding", "calibration"),
    ),
    account=("name", "types"),
    read_options=read_options,
    prepare=_prepare,
    check=_check,
    load_section=load_section,
    library="gguf",
    unchecked="if llama.cpp has its tokenizer",
)
