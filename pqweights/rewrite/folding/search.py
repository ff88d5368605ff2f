"""The search for the vectors between the layers of a model, by names and shapes."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pqweights.checkpoint.models import text_config, text_model
from pqweights.checkpoint.models.conventions import HEADS, LAYER
from pqweights.checkpoint.models.defaults import HEAD_SIZES
from pqweights.checkpoint.models.description import stated_or_default
from pqweights.checkpoint.models.layers import LAST_HALF, VALUE_HEADS, LayerFlow, NormReaders, WriterReader
from pqweights.checkpoint.models.names import role_name, tower_of
from pqweights.checkpoint.models.table import MODELS
from pqweights.checkpoint.models.traits import Trait
from pqweights.checkpoint.readers import LogicalTensor, element_count
from pqweights.errors import SourceError
from pqweights.rewrite.folding.links import COLUMNS, ROWS, FoldLinks, Layer, Link, Side, layers_of

_NARROW = "a weight stays plain in float16, whose range factors may leave"


def find_links(
    config: Mapping[str, Any] | None, tensors: Sequence[LogicalTensor], *, plain: Collection[str]
) -> FoldLinks:
    """Return the vectors of a model.

    config: its config.json
    plain: the tensors that the result stores plainly

    Raises SourceError if the norms of a known family are missing.
    """
    flow = text_model(config).flow
    if flow is None:
        known = ", ".join(sorted(name for name, model in MODELS.items() if model.flow is not None))
        model_type = (config or {}).get("model_type", text_config(config).get("model_type"))
        return FoldLinks(unfolded=f"the architecture {model_type!r} is not known to `fold`; those that are: {known}")
    search = _LinkSearch(config or {}, tensors, flow=flow, plain=plain)
    search.run()
    if not search.links:
        reasons = "; ".join(sorted(search.left)) or "no layer has the names of its family"
        return FoldLinks(left=search.frozen_left, unfolded=f"nothing of this model can be folded: {reasons}")
    return FoldLinks(links=tuple(search.links), notes=search.notes, left=search.frozen_left)


class _LinkSearch:
    """The search for the links of one model."""

    def __init__(
        self, config: Mapping[str, Any], tensors: Sequence[LogicalTensor], *, flow: LayerFlow, plain: Collection[str]
    ) -> None:
        self._config, self._model = text_config(config), text_model(config)
        self._tied = config.get("tie_word_embeddings", self._config.get("tie_word_embeddings"))
        self._tensors, self._flow, self._plain = tensors, flow, plain
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
            for norm in self._flow.norms:
                self._add_norm(layer, norm)
            for pair in self._flow.pairs:
                self._add_pairs(layer, pair)
        self._add_head()

    @functools.cached_property
    def _known(self) -> re.Pattern[str]:
        """What matches every module that a layer of the family may have."""
        flow = self._flow
        expressions = [
            *(module for norm in flow.norms for module in (norm.norm, *norm.readers)),
            *(module for pair in flow.pairs for module in (pair.writer, pair.reader)),
            *flow.others,
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
                f"`fold`: expected the norm {name}.weight, whose output {layer.prefix}{readers[0]} reads, found none; "
                "leave out `fold`, or give the complete checkpoint"
            )
        weights = [weight for module in readers if (weight := layer.weight(module)) is not None]
        self._add_gain(name, norm, gain, bias=layer.bias(norm.norm), readers=weights)

    def _add_gain(
        self,
        name: str,
        norm: NormReaders,
        gain: LogicalTensor,
        *,
        bias: LogicalTensor | None,
        readers: Sequence[LogicalTensor],
    ) -> None:
        """Add the link of a norm."""
        zero_centred = self._is_zero_centred(norm)
        sides = [self._side(gain, reader, norm.repeated) for reader in readers]
        fitting = tuple(side for side in sides if side is not None)
        plain = [side.tensor for side in fitting if side.tensor in self._plain]
        reason = ""
        if len(fitting) < len(sides):
            reason = f"the shapes of a norm and of {norm.norm}'s readers do not fit"
        elif len(plain) == len(sides):
            reason = "all that reads the norm stays plain"
        elif zero_centred and (plain or bias is not None):
            reason = "the norm stores its gain minus 1, which no power of two multiplies, and a reader stays plain"
        elif any(reader.name in plain and reader.plain_dtype == "F16" for reader in readers):
            reason = _NARROW
        if reason:
            self.left[reason].append(name)
            return
        vectors = () if bias is None else (_whole(bias),)
        link = Link(
            name=name,
            norm=gain.name,
            zero_centred=zero_centred,
            writers=(),
            vectors=vectors,
            readers=fitting,
            input_norm=None,
            exact=bool(plain or vectors),
            matrices=1,
            channels=gain.shape[0],
        )
        self._add(link, writer=norm.norm, reader="")

    def _is_zero_centred(self, norm: NormReaders) -> bool:
        return Trait.ZERO_CENTRED_NORMS in self._model.traits and not norm.never_centred

    def _side(self, gain: LogicalTensor, reader: LogicalTensor, repeated: bool) -> Side | None:
        """Return the side of a weight that reads a norm; None if their shapes do not fit."""
        if len(gain.shape) != 1 or len(reader.shape) < 2 or not gain.shape[0] or not element_count(reader):
            return None
        is_turned = Trait.TURNED_EXPERTS in self._model.traits and len(reader.shape) == 3
        axis, channels = ROWS if is_turned else COLUMNS, gain.shape[0]
        count = reader.shape[axis]
        if count % channels or (count != channels and not repeated):
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
        rows, columns, bias = layer.weight(writer), layer.weight(reader), layer.bias(writer)
        if rows is None or columns is None or not (element_count(rows) and element_count(columns)):
            return
        name, sides, reason = layer.prefix + writer, self._sides(rows, columns, pair), ""
        if columns.name in self._plain:
            reason = "the weight that reads it stays plain"
        elif rows.name in self._plain and rows.plain_dtype == "F16":
            reason = _NARROW
        elif pair.rows == VALUE_HEADS and 0 in self._head_sizes:
            reason = "config.json does not say how large or how many the heads are"
        elif sides is None:
            reason = "the shapes of a module and its reader do not fit"
        elif bias is not None and bias.shape != rows.shape[-2:-1]:
            reason = "a bias that is not a vector"
        if reason or sides is None:
            self.left[reason].append(name)
            return
        written, read = sides
        vectors = () if bias is None else (replace(written, tensor=bias.name, axis=COLUMNS),)
        self._add(
            Link(
                name=name,
                norm=None,
                zero_centred=False,
                writers=(written,),
                vectors=vectors,
                readers=(read,),
                input_norm=self._input_norm(layer, writer),
                exact=bool(vectors or rows.name in self._plain),
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
        hidden, heads, key_heads, size = (stated_or_default(self._config, self._model, key) for key in HEAD_SIZES)
        if not isinstance(size, int):
            size = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else 0
        key_heads = heads if key_heads is None else key_heads
        return size, key_heads if isinstance(key_heads, int) else 0

    def _input_norm(self, layer: Layer, writer: str) -> tuple[str, bool] | None:
        """Return the weight of the norm that a module reads, and whether it is zero-centred."""
        for norm in self._flow.norms:
            if any(re.fullmatch(expression, writer) for expression in norm.readers):
                gain, weight = layer.weight(norm.norm), layer.weight(writer)
                fits = gain is not None and weight is not None and gain.shape == weight.shape[-1:]
                return (gain.name, self._is_zero_centred(norm)) if gain is not None and fits else None
        return None

    def _add_head(self) -> None:
        """Add the link from the last norm to the head, unless the head is tied, or something else may use it."""
        by_name = {tensor.name: tensor for tensor in self._tensors}
        head = next((by_name[f"{name}.weight"] for name in HEADS if f"{name}.weight" in by_name), None)
        prefixes = {match[1] for tensor in self._tensors if (match := LAYER.fullmatch(tensor.name))}
        name = "".join(prefixes).removesuffix("layers.") + "norm"
        gain = by_name.get(f"{name}.weight")
        if len(prefixes) != 1 or gain is None:
            return
        if head is None or self._tied is not False:
            self.left["the head is tied to the embedding, which no norm writes"].append(name)
        elif (other := self._other_head(name, head.name)) is not None:
            self.left[f"{other} may read the last norm or the head, too"].append(name)
        else:
            self._add_gain(name, NormReaders("norm", ()), gain, bias=by_name.get(f"{name}.bias"), readers=[head])

    def _other_head(self, norm: str, head: str) -> str | None:
        """Return a tensor outside of the layers that is neither the last norm nor the head, nor an embedding."""
        for tensor in self._tensors:
            role = role_name(tensor.name, tensor.dtype, tensor.shape, self._model)
            known = LAYER.fullmatch(tensor.name) or tensor.name.startswith(f"{norm}.") or "rotary" in tensor.name
            known = known or tensor.name == head or tower_of(tensor.name) is not None
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
