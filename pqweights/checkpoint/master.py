"""The quantization_config of a master: writing it, and reading it back with every claim checked.

It holds everything that decoding needs besides the tensors: defaults for all weights, and overrides for single ones.
docs/format.md, section "config.json", has the format.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pqweights.checkpoint import quantized
from pqweights.checkpoint.blocks import BlocksTensor, grid_of_stored, grid_spec
from pqweights.checkpoint.header import StoredTensor, TensorSpec
from pqweights.checkpoint.names import AWQ_SUFFIX, QUANT_METHOD, awq_name
from pqweights.checkpoint.native import NativeImage, NativePart, NativeTensor, coded_specs
from pqweights.checkpoint.readers import (
    BlockTensor,
    ColumnTensor,
    EncodedTensor,
    LogicalTensor,
    PlainTensor,
    scale_shape,
)
from pqweights.checkpoint.storage import Storage
from pqweights.common.advice import instead
from pqweights.common.documents import Number, Size, as_document
from pqweights.common.dtypes import DTYPE_BITS, FLOAT_DTYPES, PACKED_DTYPES
from pqweights.common.strict_json import MAX_ELEMENTS
from pqweights.errors import MasterError, RecipeError, SourceError
from pqweights.formats import DEFAULT_CODEC, MASTER_CODECS, native
from pqweights.formats.columns import (
    MOST_STORED_COLUMNS,
    ColumnCut,
    TrellisColumns,
    bits_of,
)
from pqweights.formats.master import BlockFormat, MasterFormat, exact_rate
from pqweights.formats.native import Native
from pqweights.formats.packed import QuantizedTensor
from pqweights.formats.weight import block_count
from pqweights.kernels import VALUE_DTYPES
from pqweights.kernels.gguf_encoding import BLOCK_TYPES

# Of the format of masters, docs/format.md.
FORMAT_VERSION = 1
LOGICAL_DTYPES = (*FLOAT_DTYPES, *PACKED_DTYPES)


def has_whole_rows(shape: tuple[int, ...], format: MasterFormat) -> bool:
    """Whether blocks of a fixed size divide the last dimension, so that the stored shapes follow the weight's."""
    if not isinstance(format, BlockFormat) or format.depends_on_size or not shape or math.prod(shape) == 0:
        return False
    return shape[-1] % format.block_size == 0


def encoded_specs(
    name: str, shape: tuple[int, ...], format: BlockFormat, *, awq: bool = False
) -> tuple[TensorSpec, ...]:
    """Return the stored tensors of a weight: the format's parts, and with `awq` the F16 scales of its input channels.

    With n items of a part in a block of b weights, [..., K] becomes [..., K / b * n]. If b does not divide K, or if it
    depends on the size of the weight, the blocks run over the flattened weight: [blocks, n], or [blocks] for n = 1.
    """
    sized = format.sized(math.prod(shape))
    block_size, whole_rows = sized.block_size, has_whole_rows(shape, sized)
    blocks, specs = block_count(math.prod(shape), block_size), []
    for suffix, dtype, count in sized.parts:
        if whole_rows:
            stored = (*shape[:-1], shape[-1] // block_size * count)
        else:
            stored = (blocks, count) if count > 1 else (blocks,)
        specs.append(TensorSpec(name + suffix, dtype, stored))
    if awq:
        specs.append(TensorSpec(name + AWQ_SUFFIX, "F16", scale_shape(shape)))
    return tuple(specs)


def column_specs(name: str, cut: ColumnCut, total: int) -> tuple[TensorSpec, ...]:
    """Return the stored tensors of a weight of hadamard-trellis-columns whose superblocks take `total` bytes."""
    trellis, lengths, row_scales, column_scales = (name + suffix for suffix in TrellisColumns.suffixes)
    return (
        TensorSpec(trellis, "U8", (total,)),
        TensorSpec(lengths, "I32", cut.lengths),
        TensorSpec(row_scales, "U8", (*cut.stack, cut.rows)),
        TensorSpec(column_scales, "U8", (*cut.stack, cut.columns)),
    )


@dataclass(frozen=True, kw_only=True)
class NativeSource:
    """What a master with weights of the codec `native` says of its source.

    settings: the source's quantization_config; {} without one
    coded: of each stored tensor that is coded and is not called as a weight, dtype and shape
    """

    settings: Mapping[str, Any]
    coded: Mapping[str, TensorSpec]

    def to_json(self) -> dict[str, Any]:
        """Return its keys in a quantization_config."""
        coded = {name: {"dtype": spec.dtype, "shape": list(spec.shape)} for name, spec in self.coded.items()}
        return {"source": dict(self.settings), "coded": coded}


def quantization_config(
    weights: Sequence[tuple[LogicalTensor, MasterFormat]], kept: Sequence[str], source: NativeSource | None = None
) -> dict[str, Any]:
    """Return the quantization_config of a master with these weights; the most common settings become the defaults.

    weights: those of the source, each with the format of its last pass
    source: what it says of its source, if a weight has the codec `native`
    """
    formats = [format for _, format in weights]
    defaults: dict[str, Any] = {
        "codec": _most_common([format.codec for format in formats]),
        "bits": _most_common([format.bits for format in formats]),
        "dtype": _most_common([weight.dtype for weight, _ in weights]),
    }
    for key in stated_defaults(MASTER_CODECS.values()):
        defaults[key] = _most_common([format.settings[key] for format in formats if key in format.settings])
    overrides = {weight.name: own for weight, format in weights if (own := _override(weight, format, defaults))}
    levels: dict[str, dict[str, Any]] = {}
    for (codec, bits), format in sorted({(format.codec, format.bits): format for format in formats}.items()):
        tables = format.tables()
        if tables is not None:
            levels.setdefault(codec, {})[str(bits)] = tables
    return {
        "quant_method": QUANT_METHOD,
        "format_version": FORMAT_VERSION,
        "block_size": _most_common([format.stated_block_size for format in formats])
        or MASTER_CODECS[DEFAULT_CODEC].stated_block_size,
        **defaults,
        "levels": levels,
        "overrides": overrides,
        "kept": list(kept),
        **({} if source is None else source.to_json()),
    }


def stated_defaults(codecs: Iterable[type[MasterFormat]]) -> tuple[str, ...]:
    """Return the settings of formats for which a configuration states a default; a default of 0 is not stated."""
    return tuple(dict.fromkeys(key for codec in codecs for key, value in codec.settings.items() if value))


def _most_common(values: list[Any]) -> Any:
    return Counter(values).most_common(1)[0][0] if values else None


def _override(weight: LogicalTensor, format: MasterFormat, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a weight that differ from the defaults."""
    own = {"codec": format.codec, "bits": format.bits, "dtype": weight.dtype, **format.stated()}
    expected = {**format.settings, **defaults}
    result = {key: value for key, value in own.items() if value != expected[key]}
    if not has_whole_rows(weight.shape, format):
        result["shape"] = list(weight.shape)
    return result


def is_master(config: dict[str, Any] | None) -> bool:
    """Whether a config.json is that of a master."""
    settings = (config or {}).get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") == QUANT_METHOD


def logical_tensors(storage: Storage, stored: dict[str, StoredTensor], config: dict[str, Any]) -> list[LogicalTensor]:
    """Return the encoded weights and the kept tensors of a master.

    Raises MasterError if the configuration and the headers contradict each other.
    """
    settings = _Reader(config["quantization_config"])
    encoded = [
        settings.tensor(storage, stored, name)
        for stored_name in stored
        if stored_name not in settings.kept and (name := settings.weight_of(stored_name)) is not None
    ]
    taken = {part.name for tensor in encoded for part in tensor.parts}
    encoded += settings.natives(storage, {name: tensor for name, tensor in stored.items() if name not in taken})
    settings.check_codecs(encoded)
    taken.update(part.name for tensor in encoded for part in tensor.parts)
    unknown = settings.overrides.keys() - {tensor.name for tensor in encoded}
    if unknown:
        raise _damaged(f"overrides: {min(unknown)!r} is not a quantized weight of this checkpoint")
    return [*encoded, *(PlainTensor.of(storage, tensor) for name, tensor in stored.items() if name not in taken)]


class _Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A quantization_config. It has the stated defaults of settings as well (stated_defaults)."""

    quant_method: str
    format_version: int
    block_size: int
    codec: str | None = None
    bits: Number | None = None
    dtype: str | None = None
    levels: dict[str, dict[str, Any]]
    overrides: dict[str, dict[str, Any]]
    kept: tuple[str, ...]
    source: dict[str, Any] | None = None
    coded: dict[str, _CodedPart] | None = None


class _CodedPart(msgspec.Struct, frozen=True, kw_only=True):
    """What a configuration states of a stored tensor that is coded."""

    dtype: str
    shape: tuple[Size, ...]


class _WeightSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a configuration states of one weight, besides the settings of its format."""

    codec: str | None = None
    bits: Number
    dtype: str
    shape: tuple[Size, ...] | None = None


class _Reader:
    """Reads the weights of a master by its quantization_config, which is checked as far as that needs no tensors."""

    def __init__(self, settings: dict[str, Any]) -> None:
        version = settings.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            raise _damaged(
                f"format_version: expected {FORMAT_VERSION}, found {version!r}; a newer pqweights may read it"
            )
        known = (*_Settings.__struct_fields__, *stated_defaults(MASTER_CODECS.values()))
        _check_keys("quantization_config", settings, known)
        stated = as_document(settings, _Settings, _damaged)
        self.kept, self.overrides, self._levels = frozenset(stated.kept), stated.overrides, stated.levels
        self._settings, self._block_size = settings, stated.block_size
        self._formats: dict[tuple[str, float], MasterFormat] = {}
        # The longest first: one suffix may be the end of another.
        blocks = (codec for codec in MASTER_CODECS.values() if codec is not Native)
        self._first_suffixes = sorted({codec.suffixes[0] for codec in blocks}, key=len, reverse=True)
        self._source, self._coded = stated.source, stated.coded

    def check_codecs(self, encoded: Sequence[EncodedTensor]) -> None:
        """Raise MasterError unless the block size is that of one of the codecs, or of the default one."""
        names = sorted({tensor.format.codec for tensor in encoded})
        sizes = sorted({MASTER_CODECS[name].stated_block_size for name in names or [DEFAULT_CODEC]})
        if self._block_size not in sizes:
            raise _damaged(f"block_size: expected {' or '.join(map(str, sizes))}, found {self._block_size}")

    def weight_of(self, stored_name: str) -> str | None:
        """Return the weight whose first part a stored tensor is, judged by its name; None for another tensor."""
        for suffix in self._first_suffixes:
            if stored_name.endswith(suffix):
                name = stored_name[: -len(suffix)]
                codec = self._merged(name).get("codec")
                named = MASTER_CODECS.get(codec) if isinstance(codec, str) else None
                if named is None or named.suffixes[0] == suffix:
                    return name
        return None

    def natives(self, storage: Storage, stored: Mapping[str, StoredTensor]) -> list[NativeTensor]:
        """Return the weights of the codec `native`. stored: the stored tensors, without those of other weights"""
        if self._source is None or self._coded is None:
            if (self._source, self._coded) == (None, None) and self._settings.get("codec") != Native.codec:
                return []
            raise _damaged(f"expected source and coded beside weights of {Native.codec}, found one alone or none")
        parts = self._native_parts({name: tensor for name, tensor in stored.items() if name not in self.kept})
        unknown = self._coded.keys() - {part.tensor.name for part in parts if len(part.held) > 1}
        if unknown:
            raise _damaged(f"coded: {min(unknown)!r} is not a coded tensor of this checkpoint")
        image = NativeImage(storage, parts)
        by_name = {part.tensor.name: part for part in parts}
        on_grids = [of for part in parts if (of := self._on_grid(image, part.tensor)) is not None]
        blocks = {of.stored.name for of in on_grids}
        others = {name: part.tensor for name, part in by_name.items() if name not in blocks}
        try:
            tensors, left_out, _ = quantized.logical_tensors(image, others, {"quantization_config": self._source})
        except SourceError as error:
            raise _damaged(f"source: {error}") from None
        if left_out:
            raise _damaged(f"{min(left_out)!r} is not part of a weight, and not in kept")
        return [self._native(storage, of, [by_name[part.name] for part in of.parts]) for of in (*tensors, *on_grids)]

    def _on_grid(self, image: NativeImage, part: StoredTensor) -> BlocksTensor | None:
        """Return the weight whose blocks a stored tensor of the image is; None if it is something else."""
        weight, kind = grid_of_stored(part.name) or ("", "")
        if weight not in self.overrides:
            return None
        own = self._weight_settings(weight)
        if own.dtype not in VALUE_DTYPES or not own.shape or own.shape[-1] % BLOCK_TYPES[kind].group_size:
            raise _damaged(
                f"{weight!r}: expected a float dtype and whole blocks of {kind}, found {own.dtype} {own.shape}"
            )
        if (expected := grid_spec(weight, own.shape, kind)) != TensorSpec(*part[:3]):
            raise _damaged(f"{part.name!r}: expected {expected}, found {TensorSpec(*part[:3])}")
        return BlocksTensor(
            storage=image,
            stored=part,
            name=weight,
            shape=own.shape,
            kind=kind,
            dtype=own.dtype,
            plain_dtype=own.dtype,
        )

    def _native_parts(self, stored: Mapping[str, StoredTensor]) -> list[NativePart]:
        """Return the stored tensors of the source that these are, one after the other."""
        parts, end = [], 0
        for name, tensor in stored.items():
            whole = name.removesuffix(native.CODED)
            lengths = stored.get(whole + native.LENGTHS)
            if name.endswith(native.LENGTHS) and name.removesuffix(native.LENGTHS) + native.CODED in stored:
                continue
            spec = TensorSpec(*tensor[:3])
            held: tuple[StoredTensor, ...] = (tensor,)
            if whole != name and lengths is not None:
                spec, held = self._coded_spec(whole), (tensor, lengths)
                for expected, part in zip(coded_specs(spec, tensor.byte_count), held, strict=True):
                    if expected != TensorSpec(*part[:3]):
                        raise MasterError(
                            f"{part.file}: {part.name!r}: expected {expected.dtype} {list(expected.shape)} for "
                            f"{spec.dtype} {list(spec.shape)}, found {part.dtype} {list(part.shape)}"
                        )
            parts.append(NativePart(StoredTensor(*spec, tensor.file, end, spec.byte_count), held))
            end += spec.byte_count
        return parts

    def _coded_spec(self, name: str) -> TensorSpec:
        """Return what the source said of a stored tensor that is coded."""
        own = (self._coded or {}).get(name)
        stated = own or as_document(
            {key: value for key, value in self._merged(name).items() if key in _CodedPart.__struct_fields__},
            _CodedPart,
            lambda problem: _damaged(f"{name!r}: {problem}"),
        )
        if stated.dtype not in DTYPE_BITS or not 0 < math.prod(stated.shape) <= MAX_ELEMENTS:
            raise _damaged(
                f"{name!r}: expected the dtype and the shape of a stored tensor, found {stated.dtype} "
                f"{list(stated.shape)}"
            )
        return TensorSpec(name, stated.dtype, stated.shape)

    def _native(self, storage: Storage, of: LogicalTensor, parts: Sequence[NativePart]) -> NativeTensor:
        """Return a weight that a reader of sources found."""
        where, own = f"{of.name!r}", self._weight_settings(of.name)
        held = tuple(stored for part in parts for stored in part.held)
        bits = native.bits_of(sum(stored.byte_count for stored in held), max(1, math.prod(of.shape)))
        is_native = isinstance(of, QuantizedTensor | BlocksTensor) or (isinstance(of, PlainTensor) and len(held) > 1)
        stated = (own.codec, own.bits, own.dtype, own.shape)
        if not is_native or stated != (Native.codec, bits, of.dtype, of.shape):
            raise _damaged(
                f"{where}: expected a weight of {Native.codec}, {bits} bits, {of.dtype}, {list(of.shape)}, as it "
                f"is stored, or in kept; found {stated}"
            )
        assert isinstance(of, PlainTensor | QuantizedTensor | BlocksTensor)
        return NativeTensor(
            storage=storage,
            name=of.name,
            shape=of.shape,
            dtype=of.dtype,
            format=Native(bits=own.bits),
            encoded=held,
            source=of,
            source_parts=tuple(parts),
        )

    def _weight_settings(self, name: str) -> _WeightSettings:
        """Return the settings of a weight of `native`, which has none of its own."""
        _check_keys(f"overrides of {name!r}", self.overrides.get(name, {}), _WeightSettings.__struct_fields__)
        return as_document(self._merged(name), _WeightSettings, lambda problem: _damaged(f"{name!r}: {problem}"))

    def _merged(self, name: str) -> dict[str, Any]:
        """The settings of a weight: the defaults with its overrides."""
        return {**self._settings, "shape": None, **self.overrides.get(name, {})}

    def format(self, where: str, codec: str, bits: float) -> MasterFormat:
        """Return the formats of a codec at a rate, whose tables must be those that the master holds."""
        if (codec, bits) not in self._formats:
            try:
                format = MASTER_CODECS[codec].at(bits)
                format.check_tables(self._levels.get(codec, {}).get(str(exact_rate(bits))))
            except RecipeError as error:
                raise _damaged(f"{where}: bits: {error}") from None
            except ValueError as error:
                raise _damaged(f"levels of {codec}: {error}") from None
            self._formats[codec, bits] = format
        return self._formats[codec, bits]

    def tensor(self, storage: Storage, stored: Mapping[str, StoredTensor], name: str) -> EncodedTensor:
        """Return a weight by its own settings and its stored tensors."""
        where, merged = f"{name!r}", self._merged(name)
        codec = merged.get("codec")
        if not isinstance(codec, str) or codec not in MASTER_CODECS:
            raise _damaged(f"{where}: codec: expected one of {', '.join(MASTER_CODECS)}, found {codec!r}")
        defaults = MASTER_CODECS[codec].settings
        _check_keys(
            f"overrides of {where}", self.overrides.get(name, {}), (*_WeightSettings.__struct_fields__, *defaults)
        )
        own = as_document(merged, _WeightSettings, lambda problem: _damaged(f"{where}: {problem}"))
        if own.dtype not in LOGICAL_DTYPES:
            raise _damaged(f"{where}: dtype: expected one of {', '.join(LOGICAL_DTYPES)}, found {own.dtype!r}")
        format = _with_settings(where, self.format(where, codec, own.bits), merged)
        parts = _parts(stored, name, format)
        awq = stored.get(awq_name(name)) if awq_name(name) not in self.kept else None
        shape = _shape(where, own.shape, format=format, first=parts[0])
        about: Any = {"storage": storage, "name": name, "shape": shape, "dtype": own.dtype, "encoded": parts}
        if isinstance(format, TrellisColumns):
            cut, total = _column_cut(where, shape, format), parts[0].byte_count
            _check_shapes(column_specs(name, cut, total), shape, format=format, parts=parts, awq=awq)
            if own.bits != (bits := bits_of(cut, total)):
                raise _damaged(f"{where}: bits: expected {bits}, which its stored tensors take, found {own.bits}")
            return ColumnTensor(**about, format=format)
        assert isinstance(format, BlockFormat)
        format = format.sized(math.prod(shape))
        specs = encoded_specs(name, shape, format, awq=awq is not None and len(shape) > 1)
        _check_shapes(specs, shape, format=format, parts=parts, awq=awq)
        return BlockTensor(**about, format=format, awq=awq)


def _with_settings(where: str, format: MasterFormat, merged: Mapping[str, Any]) -> MasterFormat:
    """Return a format with the settings of a weight."""
    for key in stated_defaults([type(format)]):
        if key not in merged:
            raise _damaged(f"{where}: missing key {key}")
    try:
        return format.with_settings({key: merged[key] for key in format.settings if key in merged})
    except ValueError as error:
        raise _damaged(f"{where}: {error}") from None


def _parts(stored: Mapping[str, StoredTensor], name: str, format: MasterFormat) -> tuple[StoredTensor, ...]:
    """Return the stored parts of a weight."""
    names = [name + suffix for suffix in format.suffixes]
    for missing in names:
        if missing not in stored:
            raise MasterError(f"tensor {names[0]!r} has no {missing!r} beside it; the master is damaged")
    return tuple(stored[part] for part in names)


def _shape(where: str, stated: tuple[int, ...] | None, *, format: MasterFormat, first: StoredTensor) -> tuple[int, ...]:
    """Return the shape of a weight: the one that its settings state, else the one that its first part implies.

    Nothing implies the shape of a weight whose blocks depend on its size.
    """
    if stated is not None:
        if math.prod(stated) > MAX_ELEMENTS:
            raise _damaged(f"{where}: shape: expected at most {MAX_ELEMENTS} elements, found {list(stated)}")
        return stated
    if not isinstance(format, BlockFormat) or format.depends_on_size:
        raise _damaged(f"{where}: shape: expected that of the weight, as for all weights of {format.codec}, found none")
    items = format.parts[0].items_per_block
    per_row, rest = divmod(first.shape[-1] if first.shape else 1, items)
    if rest:
        raise MasterError(
            f"{first.file}: {first.name!r}: expected a last dimension that {items} divides ({format.bits} bits), found "
            f"shape {list(first.shape)}"
        )
    return (*first.shape[:-1], per_row * format.block_size)


def _column_cut(where: str, shape: tuple[int, ...], format: TrellisColumns) -> ColumnCut:
    if len(shape) not in (2, 3) or not math.prod(shape):
        raise _damaged(f"{where}: shape: expected rows and columns for {format.codec}, found {list(shape)}")
    if shape[-1] > MOST_STORED_COLUMNS:
        raise _damaged(
            f"{where}: shape: expected at most {MOST_STORED_COLUMNS} columns for {format.codec}, found {list(shape)}"
        )
    return ColumnCut.of(shape, transposed=format.transposed)


def _check_shapes(
    specs: Sequence[TensorSpec],
    shape: tuple[int, ...],
    *,
    format: MasterFormat,
    parts: tuple[StoredTensor, ...],
    awq: StoredTensor | None,
) -> None:
    """Raise MasterError if the stored tensors of a weight do not have the dtypes and shapes that its shape implies."""
    stored = parts if awq is None else (*parts, awq)
    if awq is not None and len(specs) < len(stored):
        raise MasterError(
            f"{awq.file}: {awq.name!r}: expected no scales for a weight {list(shape)} of {format.codec}; the master is "
            "damaged"
        )
    for spec, part in zip(specs, stored, strict=True):
        if (spec.dtype, spec.shape) != (part.dtype, part.shape):
            raise MasterError(
                f"{part.file}: {part.name!r}: expected {spec.dtype} {list(spec.shape)} for a weight {list(shape)} at "
                f"{format.bits} bits, found {part.dtype} {list(part.shape)}"
            )


def _damaged(problem: str) -> MasterError:
    return MasterError(f"config.json: {problem}")


def _check_keys(where: str, settings: dict[str, Any], known: Sequence[str]) -> None:
    """Raise MasterError for an unknown key, which may change the meaning of the bytes."""
    for key in settings:
        if key not in known:
            raise _damaged(f"{where}: unknown key {key!r}; {instead(key, known)}")
