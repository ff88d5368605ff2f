"""The search for the vectors between the layers of a model, by names and shapes."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.errors import SourceError
from pqweights.gguf.architectures import DEFAULTS, HEAD_SIZES, stated_or_default
from pqweights.planning.roles import classify, is_of_other_senses
from pqweights.rewrite.folding.links import (
    COLUMNS,
    FAMILIES,
    LAST_HALF,
    LAYER,
    NOT_CENTRED,
    ROWS,
    VALUE_HEADS,
    Family,
    Layer,
    Link,
    Links,
    NormReaders,
    Side,
    WriterReader,
    family_of,
    layers_of,
    model_types,
)

_HEADS = ("lm_head", "model.lm_head", "language_model.lm_head")
_NARROW = "a weight stays plain in float16, whose range factors may leave"
_UNKNOWN_HEADS = "config.json does not say how large or how many the heads are"


def find_links(config: Mapping[str, Any] | None, tensors: Sequence[LogicalTensor], *, plain: Collection[str]) -> Links:
    """Return the vectors of a model.

    config: its config.json
    plain: the tensors that the result stores plainly

    Raises SourceError if the norms of a known family are missing.
    """
    family = family_of(config)
    if family is None:
        types = model_types(config or {})
        known = ", ".join(sorted(FAMILIES))
        model_type = types[0] if types else None
        return Links(unfolded=f"the architecture {model_type!r} is not known to --fold; those that are: {known}")
    search = _LinkSearch(config or {}, tensors, family=family, plain=plain)
    search.run()
    if not search.links:
        reasons = "; ".join(sorted(search.left)) or "no layer has the names of its family"
        return Links(left=search.frozen_left, unfolded=f"nothing of this model can be folded: {reasons}")
    return Links(links=tuple(search.links), notes=search.notes, left=search.frozen_left)


@dataclass(frozen=True, kw_only=True)
class _Norm:
    """A norm. short: its name in notes. repeated: see NormReaders."""

    name: str
    short: str
    gain: LogicalTensor
    bias: LogicalTensor | None
    zero_centred: bool
    repeated: bool


class _LinkSearch:
    """The search for the links of one model."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Sequence[LogicalTensor], *, family: Family, plain: Collection[str]
    ) -> None:
        text = config.get("text_config")
        self._config = text if isinstance(text, Mapping) else config
        self._model_type = next((name for name in reversed(model_types(config)) if name in DEFAULTS), "")
        self._tied = config.get("tie_word_embeddings", self._config.get("tie_word_embeddings"))
        self._tensors, self._family, self._plain = tensors, family, plain
        self.links: list[Link] = []
        self.notes: dict[str, str] = {}
        self.left: dict[str, list[str]] = defaultdict(list)

    @property
    def frozen_left(self) -> dict[str, tuple[str, ...]]:
        """What is left as it is, by the reason."""
        return {reason: tuple(names) for reason, names in self.left.items()}

    def run(self) -> None:
        """Find the links of every layer, and that of the norm before the head."""
        for layer in layers_of(self._tensors):
            strange = [module for module in layer.modules if not self._known.fullmatch(module)]
            if strange:
                self.left[f"a module that is not known there: {strange[0]}"].append(layer.prefix.rstrip("."))
                continue
            for norm in self._family.norms:
                self._add_norm(layer, norm)
            for pair in self._family.pairs:
                self._add_pairs(layer, pair)
        self._add_head()

    @functools.cached_property
    def _known(self) -> re.Pattern[str]:
        """What matches every module that a layer of the family may have."""
        family = self._family
        expressions = [
            *(module for norm in family.norms for module in (norm.norm, *norm.readers)),
            *(module for pair in family.pairs for module in (pair.writer, pair.reader)),
            *family.others,
        ]
        return re.compile("|".join(f"(?:{expression})" for expression in expressions))

    def _add_norm(self, layer: Layer, norm: NormReaders) -> None:
        """Add the link from a norm to the weights that read its output."""
        expression = re.compile("|".join(norm.readers))
        readers = [module for module in layer.modules if expression.fullmatch(module)]
        if not readers:
            return
        gain, name = layer.weight(norm.norm), layer.prefix + norm.norm
        if gain is None:
            raise SourceError(
                f"--fold: expected the norm {name}.weight, whose output {layer.prefix}{readers[0]} reads, found none; "
                "leave out --fold, or give the complete checkpoint"
            )
        written = _Norm(
            name=name,
            short=norm.norm,
            gain=gain,
            bias=layer.bias(norm.norm),
            zero_centred=self._family.zero_centred and norm.norm not in NOT_CENTRED,
            repeated=norm.repeated,
        )
        self._add_gain(written, [tensor for m in readers if (tensor := layer.weight(m)) is not None])

    def _add_gain(self, norm: _Norm, readers: Sequence[LogicalTensor]) -> None:
        """Add the link of a norm."""
        sides = [self._side(norm, reader) for reader in readers]
        fitting = [side for side in sides if side is not None]
        plain = [side.tensor for side in fitting if side.tensor in self._plain]
        reason = ""
        if len(fitting) < len(sides):
            reason = f"the shapes of a norm and of {norm.short}'s readers do not fit"
        elif len(plain) == len(sides):
            reason = "all that reads the norm stays plain"
        elif norm.zero_centred and (plain or norm.bias is not None):
            reason = "the norm stores its gain minus 1, which no power of two multiplies, and a reader stays plain"
        elif any(reader.name in plain and reader.plain_dtype == "F16" for reader in readers):
            reason = _NARROW
        if reason:
            self.left[reason].append(norm.name)
            return
        vectors = () if norm.bias is None else (_whole(norm.bias),)
        link = Link(
            name=norm.name,
            norm=norm.gain.name,
            zero_centred=norm.zero_centred,
            writers=(),
            vectors=vectors,
            readers=tuple(fitting),
            input_norm=None,
            exact=bool(plain or vectors),
            matrices=1,
            channels=norm.gain.shape[0],
        )
        self._add(link, writer=norm.short, reader="")

    def _side(self, norm: _Norm, reader: LogicalTensor) -> Side | None:
        """Return the side of a weight that reads a norm; None if their shapes do not fit."""
        if len(norm.gain.shape) != 1 or len(reader.shape) < 2 or not norm.gain.shape[0] or not element_count(reader):
            return None
        axis, channels = self._input_axis(reader), norm.gain.shape[0]
        count = reader.shape[axis]
        if count % channels or (count != channels and not norm.repeated):
            return None
        return Side(tensor=reader.name, axis=axis, count=count, repeats=count // channels, width=channels)

    def _add_pairs(self, layer: Layer, pair: WriterReader) -> None:
        """Add the links from a module to the one that reads its output: one, or one for each expert."""
        writer, reader = re.compile(pair.writer), re.compile(pair.reader)
        readers = {end.groups(): module for module in layer.modules if (end := reader.fullmatch(module))}
        for module in layer.modules:
            match = writer.fullmatch(module)
            if match is not None and match.groups() in readers:
                self._add_pair(layer, module, readers[match.groups()], pair)

    def _add_pair(self, layer: Layer, writer: str, reader: str, pair: WriterReader) -> None:
        """Add one link between two modules."""
        name = layer.prefix + writer
        rows, columns = layer.weight(writer), layer.weight(reader)
        if rows is None or columns is None or not (element_count(rows) and element_count(columns)):
            return
        if columns.name in self._plain:
            self.left["the weight that reads it stays plain"].append(name)
            return
        if rows.name in self._plain and rows.plain_dtype == "F16":
            self.left[_NARROW].append(name)
            return
        if pair.rows == VALUE_HEADS and 0 in self._head_sizes:
            self.left[_UNKNOWN_HEADS].append(name)
            return
        sides = self._sides(rows, columns, pair)
        if sides is None:
            self.left["the shapes of a module and its reader do not fit"].append(name)
            return
        written, read = sides
        bias = layer.bias(writer)
        vectors: tuple[Side, ...] = ()
        if bias is not None:
            if bias.shape != rows.shape[-2:-1]:
                self.left["a bias that is not a vector"].append(name)
                return
            vectors = (replace(written, tensor=bias.name, axis=COLUMNS),)
        self._add(
            Link(
                name=name,
                norm=None,
                zero_centred=False,
                writers=(written,),
                vectors=vectors,
                readers=(read,),
                input_norm=self._input_norm(layer, writer),
                exact=bool(vectors or {rows.name, columns.name} & set(self._plain)),
                matrices=rows.shape[0] if len(rows.shape) == 3 else 1,
                channels=written.channels,
            ),
            writer=re.sub(r"\.\d+\.", ".N.", writer),
            reader=re.sub(r"\.\d+\.", ".N.", reader),
        )

    def _sides(self, rows: LogicalTensor, columns: LogicalTensor, pair: WriterReader) -> tuple[Side, Side] | None:
        """Return the sides of a pair of weights; None if their shapes do not fit."""
        if len(rows.shape) != len(columns.shape) or rows.shape[:-2] != columns.shape[:-2]:
            return None
        total, inputs = rows.shape[-2], columns.shape[-1]
        stacked = len(rows.shape) == 3
        if pair.rows == VALUE_HEADS:
            width, key_heads = self._head_sizes
            count = width * key_heads
        else:
            width = count = total // 2 if pair.rows == LAST_HALF else total
        if not count or total < count or inputs % count or (inputs != count and pair.rows != VALUE_HEADS):
            return None
        if pair.rows == VALUE_HEADS and total not in (count, inputs + 2 * count):  # values alone, or behind q and k
            return None
        written = Side(tensor=rows.name, axis=ROWS, first=total - count, count=count, width=width, stacked=stacked)
        repeats = inputs // count
        read = Side(tensor=columns.name, axis=COLUMNS, count=inputs, repeats=repeats, width=width, stacked=stacked)
        return written, read

    @property
    def _head_sizes(self) -> tuple[int, int]:
        """The size of a head, and the number of key-value heads; 0 where neither the file nor a default says it."""
        hidden, heads, key_heads, size = (stated_or_default(self._config, self._model_type, key) for key in HEAD_SIZES)
        if not isinstance(size, int):
            size = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else 0
        key_heads = heads if key_heads is None else key_heads
        return size, key_heads if isinstance(key_heads, int) else 0

    def _input_norm(self, layer: Layer, writer: str) -> tuple[str, bool] | None:
        """Return the weight of the norm that a module reads, and whether it is zero-centred."""
        for norm in self._family.norms:
            if any(re.fullmatch(expression, writer) for expression in norm.readers):
                gain = layer.weight(norm.norm)
                centred = self._family.zero_centred and norm.norm not in NOT_CENTRED
                weight = layer.weight(writer)
                fits = gain is not None and weight is not None and gain.shape == weight.shape[-1:]
                return (gain.name, centred) if gain is not None and fits else None
        return None

    def _input_axis(self, reader: LogicalTensor) -> int:
        """Return along which axis a weight reads its input: gpt-oss stores its experts as [E, in, out]."""
        return ROWS if self._config.get("model_type") == "gpt_oss" and len(reader.shape) == 3 else COLUMNS

    def _add_head(self) -> None:
        """Add the link from the last norm to the head, unless the head is tied, or something else may use it."""
        by_name = {tensor.name: tensor for tensor in self._tensors}
        head = next((by_name[f"{name}.weight"] for name in _HEADS if f"{name}.weight" in by_name), None)
        prefixes = {match[1] for tensor in self._tensors if (match := LAYER.fullmatch(tensor.name))}
        if len(prefixes) != 1:
            return
        name = prefixes.pop().removesuffix("layers.") + "norm"
        gain = by_name.get(f"{name}.weight")
        if gain is None:
            return
        if head is None or self._tied is not False:
            self.left["the head is tied to the embedding, which no norm writes"].append(name)
        elif (other := self._other_head(name, head.name)) is not None:
            self.left[f"{other} may read the last norm or the head, too"].append(name)
        else:
            norm = _Norm(
                name=name,
                short="norm",
                gain=gain,
                bias=by_name.get(f"{name}.bias"),
                zero_centred=self._family.zero_centred,
                repeated=False,
            )
            self._add_gain(norm, [head])

    def _other_head(self, norm: str, head: str) -> str | None:
        """Return a tensor outside of the layers that is neither the last norm nor the head, nor an embedding."""
        for tensor in self._tensors:
            role = classify(tensor.name, tensor.dtype, tensor.shape).name
            known = LAYER.fullmatch(tensor.name) or tensor.name.startswith(f"{norm}.") or "rotary" in tensor.name
            known = known or tensor.name == head or is_of_other_senses(tensor.name)
            if not known and role not in ("embedding", "buffer"):
                return tensor.name
        return None

    def _add(self, link: Link, *, writer: str, reader: str) -> None:
        """Add a link, and note at its tensors what they are folded with."""
        self.links.append(link)
        for side in link.readers:
            self._note(side.tensor, f"inputs with {writer}")
        for side in (*link.writers, *link.vectors):
            self._note(side.tensor, f"outputs with {reader}" if reader else "with its readers")
        if link.norm is not None:
            self._note(link.norm, "gain with its readers")

    def _note(self, tensor: str, what: str) -> None:
        self.notes[tensor] = f"{self.notes[tensor]}, {what}" if tensor in self.notes else f"foldable: {what}"


def _whole(vector: LogicalTensor) -> Side:
    count = vector.shape[0]
    return Side(tensor=vector.name, axis=COLUMNS, count=count, width=count)
