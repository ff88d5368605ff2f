"""How the stored tensors of a master become parameters: conversions for the loader of transformers.

transformers renames each stored tensor, hands it to a converter (of the model, for fused experts and the like), and
calls the converter for each parameter in turn. Here, the parts of a weight `X` (`X_codes` and so on) first get the name
`X`, so that all renamings and converters of the model find the names that they expect. Every converter is replaced by
one that reads encoded weights itself when its turn comes: in chunks, decoded straight into the memory of the parameter.
Nothing is fetched in advance, and the loader, which would only log errors, catches none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from pqweights.checkpoint.digests import REMEDY
from pqweights.checkpoint.header import StoredTensor
from pqweights.checkpoint.master import logical_tensors
from pqweights.checkpoint.readers import EncodedTensor, whole_blocks
from pqweights.checkpoint.source import stored_tensors
from pqweights.checkpoint.storage import Storage
from pqweights.checkpoint.weight_files import check_index
from pqweights.convert.listed_files import check_config, checked, checked_reads
from pqweights.convert.manifest import Manifest
from pqweights.errors import MasterError, SourceError
from pqweights.runtime.loading.packed import PackedTensor, bytes_per_weight, pack

CHUNK_WEIGHTS = 1 << 20  # decoded at a time, in whole blocks
NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
NEVER = "(?!)"  # a pattern that matches nothing


class Master:
    """The weights of a master while a model is loaded from it.

    folder: where it lies
    is_checked: whether the hashes of its tensors are known
    parts: for each stored name, the weight that it belongs to
    decoded_weights: parameters that should have stayed packed and could not
    """

    def __init__(
        self, files: list[str], settings: dict[str, Any], *, manifest: Manifest | None, model: Any, packed: bool
    ) -> None:
        """Open the weight files of a master.

        files: paths of its safetensors files
        settings: its quantization_config
        manifest: its manifest, if it has one: then all tensors that the model uses are checked
        model: the model whose parameters are loaded
        packed: whether weights stay packed if they can

        Raises SourceError or MasterError if the files are not those of a sound master.
        """
        storage = _files_of(files)
        self.folder, self.is_checked = storage.root, manifest is not None
        self._stored, _ = stored_tensors(storage, tuple(Path(file).name for file in files))
        tensors = logical_tensors(storage, self._stored, {"quantization_config": settings})
        try:
            check_index(storage.root, self._stored)
        except SourceError as error:
            raise MasterError(f"{error}; {REMEDY}") from None
        self._checks = None if manifest is None else checked_reads(storage, self._stored.values(), manifest)
        if self._checks is not None and manifest is not None:
            check_config(settings, tensors, manifest)
            tensors = [checked(tensor, self._checks) for tensor in tensors]
        self._plain: dict[str, StoredTensor] = {}  # those that the model uses
        self.parts = {
            part.name: tensor for tensor in tensors if isinstance(tensor, EncodedTensor) for part in tensor.parts
        }
        if not self.parts and settings.get("codec") is not None:
            raise MasterError(
                "config.json: the quantization_config is that of a master, but the files hold no codes; if the model "
                "is an ordinary one, remove quantization_config and transformers_weights from its config.json"
            )
        self.packed = packed
        self.decoded_weights: set[str] = set()
        self._model = model
        self._pool = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="pqweights")
        self._originals: dict[int, WeightConverter] = {}

    def __deepcopy__(self, memo: Any) -> Master:
        return self  # converters are copied for each parameter, and share the master

    def conversions(self, conversions: list[Any]) -> list[Any]:
        """Return the conversions of a model, made to read this master."""
        result: list[Any] = [PlainName(self)]
        for conversion in conversions:
            if isinstance(conversion, WeightConverter):
                decoder = WeightDecoder(self, conversion)
                self._originals[id(decoder)] = conversion
                result.append(decoder)
            else:
                result.append(conversion)
        return [*result, EverythingElse(self)]

    def originals(self, conversions: list[Any]) -> list[Any]:
        """Return the conversions from which `conversions` made these."""
        ours = (PlainName, EverythingElse)
        return [self._originals.get(id(c), c) for c in conversions if not isinstance(c, ours)]

    def read(self, tensor: EncodedTensor, dtype: torch.dtype, target: str) -> Tensor:
        """Read a weight for the parameter `target`: packed if that is wanted and possible, else decoded."""
        if self.packed and self.can_stay_packed(target):
            kept = pack(tensor, dtype)
            if kept is not None:
                self._check(tensor.parts)
                return kept
        return self.decode(tensor, dtype)

    def uses(self, stored_name: str) -> None:
        """Note that the model uses a tensor that is stored plainly, which the loader reads itself."""
        self._plain[stored_name] = self._stored[stored_name]

    def check_plain(self) -> None:
        """Check all tensors that `uses` noted. Raises MasterError."""
        self._check(self._plain.values())

    def _check(self, stored: Iterable[StoredTensor]) -> None:
        """Check stored tensors whole, on all threads. Raises MasterError if one is damaged."""
        if self._checks is not None:
            self._checks.check(stored, run=self._pool.map)

    def decode(self, tensor: EncodedTensor, dtype: torch.dtype) -> Tensor:
        """Decode a weight to a dtype, in chunks and on all threads."""
        name = NAMES.get(dtype)
        result = torch.empty(tensor.shape, dtype=dtype if name else torch.float32, device="cpu")
        count, size = result.numel(), result.element_size()
        if count:
            raw = result.view(-1).view(torch.uint8).numpy()

            step = whole_blocks(tensor, CHUNK_WEIGHTS)

            def decode_chunk(start: int) -> None:
                length = min(step, count - start)
                tensor.read(start, length, name or "F32", raw[start * size : (start + length) * size])

            for _ in self._pool.map(decode_chunk, range(0, count, step)):
                pass
        self._check(tensor.parts)
        return result.to(dtype)

    def can_stay_packed(self, parameter: str) -> bool:
        """Whether a name is that of a matrix, or of a stack of matrices, among the parameters of the model."""
        path, _, name = parameter.rpartition(".")
        value = self._model.get_submodule(path)._parameters.get(name)
        return value is not None and value.ndim in (2, 3)

    def packed_bytes_per_weight(self, value: Tensor) -> float | None:
        """Return the memory of a packed weight per element; None if it is decoded.

        value: a parameter or buffer of the model, of which transformers gives the name in some part of it

        It is an estimate, because names may change in loading: that of the weight with this name, else of any weight.
        """
        parameter = self._parameter_names.get(id(value))
        if not self.parts or parameter is None or value.ndim not in (2, 3):
            return None
        by_weight = {tensor.name: tensor for tensor in self.parts.values()}
        return bytes_per_weight(by_weight.get(parameter) or next(iter(self.parts.values())))

    @functools.cached_property
    def _parameter_names(self) -> dict[int, str]:
        return {id(value): name for name, value in self._model.named_parameters()}

    def close(self) -> None:
        """Release the checkpoint and the threads."""
        self._pool.shutdown()
        self.parts, self._model = {}, None


def _files_of(files: list[str]) -> Storage:
    """Return the folder of the weight files, with no other files."""
    folders = {Path(file).parent for file in files}
    if len(folders) != 1:
        raise SourceError(f"expected the weight files of a master in one folder, found {sorted(map(str, folders))}")
    return Storage(folders.pop(), only=tuple(Path(file).name for file in files))


class PlainName(WeightRenaming):
    """The renaming that comes first: parts of an encoded weight get its name."""

    __slots__ = ("master",)

    def __init__(self, master: Master) -> None:
        super().__init__([NEVER], [""])
        self.master = master

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the new name, and no pattern: this renaming belongs to no converter."""
        tensor = self.master.parts.get(source_key)
        return source_key if tensor is None else tensor.name, None


class WeightDecoder(WeightConverter):
    """A converter of the model whose source tensors may be encoded. dtype: that of the parameter."""

    __slots__ = ("dtype", "master")

    def __init__(self, master: Master, converter: WeightConverter) -> None:
        sources, targets = list(converter._original_source_patterns), list(converter._original_target_patterns)
        # On the CPU; transformers moves the result to its device.
        super().__init__(sources, targets, list(converter.operations), force_cpu=True)
        for name in ("scope_prefix", "base_model_prefix"):
            setattr(self, name, getattr(converter, name))
        self.master, self.dtype = master, torch.float32

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        """Collect one stored tensor: its first part stands for a weight, and the other parts are ignored."""
        self.layer_targets[target_key].add(source_key)
        tensor = self.master.parts.get(source_key)
        read: Callable[[], Tensor]
        if tensor is None:
            self.master.uses(source_key)
            read = future.result if isinstance(future, Future) else future
        else:
            if isinstance(future, Future):
                future.cancel()
            if source_key != tensor.encoded[0].name:
                return
            weight = tensor

            def read() -> Tensor:
                return self.master.read(weight, self.dtype, target_key)

        self.collected_tensors[source_pattern].append(read)

    def convert(self, layer_name: str, loading_info: Any = None, **options: Any) -> dict[str, Any]:
        """Convert the collected tensors to parameters, and decode those that cannot stay packed."""
        converted = self._converted(layer_name, loading_info=loading_info, **options)
        if self.master.packed:
            for name, values in converted.items():
                value = values[0] if isinstance(values, list) else values
                converted[name] = self._as_wanted(name, value)
        return converted

    def _converted(self, layer_name: str, **options: Any) -> dict[str, Any]:
        result: dict[str, Any] = super().convert(layer_name, **options)
        return result

    def _as_wanted(self, name: str, value: Tensor) -> Tensor:
        """Return a parameter, decoded if it is packed and cannot stay so."""
        encoded = any(key in self.master.parts for keys in self.layer_targets.values() for key in keys)
        if isinstance(value, PackedTensor) and self.master.can_stay_packed(name):
            return value
        if encoded:
            self.master.decoded_weights.add(name)
        return value.decode() if isinstance(value, PackedTensor) else value


class _Nothing(ConversionOps):
    """The operation that changes nothing."""

    def convert(self, input_dict: dict[str, Any], **options: Any) -> dict[str, Any]:
        return input_dict


class EverythingElse(WeightDecoder):
    """The converter for weights that no converter of the model takes: each becomes the parameter with its name."""

    __slots__ = ()

    def __init__(self, master: Master) -> None:
        super().__init__(master, WeightConverter([NEVER], [""], [_Nothing()]))

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the name unchanged, and the pattern of this converter."""
        return source_key, NEVER

    def _converted(self, layer_name: str, **options: Any) -> dict[str, Any]:
        (tensors,) = self.materialize_tensors().values()
        return {layer_name: tensors[0]}
