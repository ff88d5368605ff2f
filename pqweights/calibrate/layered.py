"""A language model that is run one decoder layer at a time, with the weights of that layer alone in memory.

The modules are transformers', made without memory for their weights. What a model does before and after its layers is
its own code: it runs with layers that only note how they are called. So positions, masks and scalings are those of the
architecture, and none needs a rule of its own, as long as it has its layers in a list and each of them maps the hidden
states of a batch to the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pqweights.checkpoint.readers import LogicalTensor, element_count, whole_blocks
from pqweights.checkpoint.source import Checkpoint, described_folder
from pqweights.convert.jobs import CHUNK_WEIGHTS
from pqweights.errors import SourceError
from pqweights.runtime.folders import read_folder, transformers_config
from pqweights.runtime.models import loader_of
from pqweights.runtime.packages import Refused, give_back_memory, package, quiet

# A configuration that describes more times the weights of its checkpoint is of another model, or lacks sizes.
MOST_DESCRIBED = 1.5
OUTSIDE = -1  # in place of the number of a layer: what comes before and after the layers


class ModelMatrix(NamedTuple):
    """A matrix by which a model multiplies: a parameter, or one expert's in a stack [experts, outputs, inputs].

    parameter: its name
    expert: the number in a stack, 0 for a parameter that is a matrix
    """

    parameter: str
    expert: int = 0


class MatrixPlace(NamedTuple):
    """Where the model has a matrix of the checkpoint.

    matrix: of which it is a part
    rows: which
    """

    matrix: ModelMatrix
    rows: slice

    def of(self, parameter: Tensor) -> Tensor:
        """Return these rows of the parameter, [rows, inputs]."""
        matrix = parameter[self.matrix.expert] if parameter.ndim == 3 else parameter
        return matrix.detach()[self.rows]


class StoredMatrices(NamedTuple):
    """Which matrices of the model are those of a tensor of the checkpoint.

    matrices: in order; an expert's may be a part of one
    transposed: whether the model has them the other way round
    """

    matrices: tuple[ModelMatrix, ...] = ()
    transposed: bool = False


@dataclass(frozen=True, eq=False)
class LayerCall:
    """What a layer gets besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def equals(self, other: LayerCall) -> bool:
        """Whether both hold the same."""
        return _equal(self.args, other.args) and _equal(self.kwargs, other.kwargs)


class _Note(torch.nn.Module):
    """Stands in the place of a layer, notes the call, and returns the hidden states or what it is told to."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # no submodule
        self.__dict__["call"], self.__dict__["hidden"], self.__dict__["result"] = None, None, None
        self.__dict__["as_tuple"] = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)  # such as the kind of attention, for which the model asks

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Note the call."""
        state = self.__dict__
        state["call"], state["hidden"] = LayerCall(args, kwargs), hidden_states
        result = hidden_states if state["result"] is None else state["result"]
        return (result,) if state["as_tuple"] else result


class LayeredModel:
    """The model of a checkpoint; see above.

    checkpoint: the opened source, an original
    folder: where its configuration lies
    remedy: what to do if it cannot be run so, for messages

    Raises SourceError for a model that cannot be run so, MissingDependencyError.
    """

    def __init__(self, checkpoint: Checkpoint, folder: Path, *, remedy: str) -> None:
        package("transformers", "transformers", "calibrating")
        from transformers.conversion_mapping import get_model_conversion_mapping

        self._folder, self._remedy = folder, remedy
        described = described_folder(checkpoint, folder)
        config, loader = transformers_config(described), loader_of(read_folder(described))
        with Refused(f"{folder}: transformers cannot run this model"), quiet(), _without_weights():
            self.model = loader.from_config(config, dtype=torch.float32).eval()
        self.model.tie_weights()
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        self._is_tied = head is not None and embedding.weight is head.weight
        self.model.requires_grad_(False)
        with contextlib.suppress(ValueError, KeyError, AttributeError):
            self.model.set_experts_implementation("eager")
        self._path, self._list = self._find_layers(config)
        self._layers = list(self._list)
        self._mapping = get_model_conversion_mapping(self.model)
        self._places: dict[str, MatrixPlace] = {}
        self._stacks: dict[str, StoredMatrices] = {}
        self._tensors = self._by_layer(checkpoint)
        self._as_tuple = False
        if getattr(config.get_text_config(), "num_kv_shared_layers", 0):
            raise self._refused("its layers share keys and values")
        described = sum(parameter.numel() for parameter in self.model.parameters())
        stored = sum(element_count(tensor) for tensor in checkpoint.tensors)
        if described > MOST_DESCRIBED * stored:  # a sample would be drawn from one with random weights
            raise self._refused(f"config.json describes {described} weights, and the checkpoint has {stored}")

    # --- what there is ---

    @property
    def layers(self) -> int:
        """The number of decoder layers."""
        return len(self._layers)

    @property
    def width(self) -> int:
        """The number of channels of a hidden state."""
        return int(self.model.get_input_embeddings().weight.shape[1])

    def parameters_of(self, layer: int) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of a layer, or of what is outside, by name; tied ones once."""
        if layer != OUTSIDE:
            prefix = f"{self._path}.{layer}."
            return {prefix + name: parameter for name, parameter in self._layers[layer].named_parameters()}
        inside = {id(parameter) for module in self._layers for parameter in module.parameters()}
        return {name: parameter for name, parameter in self.model.named_parameters() if id(parameter) not in inside}

    @property
    def head(self) -> str | None:
        """The parameter by which hidden states are multiplied to predict tokens; None if there is no such."""
        head = self.model.get_output_embeddings()
        weight = None if head is None else head.weight
        return next((name for name, parameter in self.parameters_of(OUTSIDE).items() if parameter is weight), None)

    @property
    def tied(self) -> str | None:
        """The tensor of the embedding if the head has the same; None if there are two, or no head."""
        if not self._is_tied:
            return None
        weight = self.model.get_input_embeddings().weight
        names = {name for name, parameter in self.parameters_of(OUTSIDE).items() if parameter is weight}
        return next((tensor for tensor, place in self._places.items() if place.matrix.parameter in names), None)

    def tensors_of(self, layer: int) -> Sequence[LogicalTensor]:
        """Return the tensors of the checkpoint that belong to a layer, or to what is outside."""
        return self._tensors.get(layer, ())

    def places_of(self, tensor: str) -> tuple[MatrixPlace, ...]:
        """Return where the matrices of a tensor are; none if the model has them in another form, or does not use it."""
        place = self._places.get(tensor)
        matrices = self._stacks.get(tensor, StoredMatrices()).matrices
        return tuple(MatrixPlace(matrix, slice(None)) for matrix in matrices) if place is None else (place,)

    def matrices_of(self, tensor: str) -> StoredMatrices:
        """Return which matrices hold those of a tensor; none if the model has it in another form, or has none."""
        place = self._places.get(tensor)
        return self._stacks.get(tensor, StoredMatrices()) if place is None else StoredMatrices((place.matrix,))

    def parameter_of(self, tensor: str) -> torch.nn.Parameter | None:
        """Return the parameter that has a tensor, or of which it is a part; None if there is none such."""
        matrices = self.matrices_of(tensor).matrices
        return self.model.get_parameter(matrices[0].parameter) if matrices else None

    def part_of(self, tensor: str, parameter: Tensor) -> Tensor:
        """Return the part that a tensor is of its parameter, or of something of that shape, as the tensor has it."""
        place = self._places.get(tensor)
        if place is not None:
            return place.of(parameter)
        return parameter.mT if self._stacks[tensor].transposed else parameter

    def _find_layers(self, config: Any) -> tuple[str, torch.nn.ModuleList]:
        count = getattr(config.get_text_config(), "num_hidden_layers", None)
        decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model.base_model
        for name, module in self.model.named_modules():
            inside = name.startswith(next((n for n, m in self.model.named_modules() if m is decoder), ""))
            if inside and isinstance(module, torch.nn.ModuleList) and len(module) == count:
                return name, module
        raise self._refused("it has no list of decoder layers")

    def _refused(self, why: str) -> SourceError:
        return SourceError(
            f"{self._folder}: {type(self.model).__name__} cannot be run layer by layer: {why}; {self._remedy}"
        )

    def _by_layer(self, checkpoint: Checkpoint) -> dict[int, list[LogicalTensor]]:
        """Return which tensors of the checkpoint belong to each layer, by transformers' rules for renaming."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        renamings = [rule for rule in self._mapping if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in self._mapping if isinstance(rule, WeightConverter)]
        state, prefix = self.model.state_dict(), self._path + "."
        result: dict[int, list[LogicalTensor]] = {}
        fused: dict[tuple[str, str], list[LogicalTensor]] = {}
        for tensor in checkpoint.tensors:
            name, pattern = rename_source_key(tensor.name, renamings, converters, self.model.base_model_prefix, state)
            name, pattern = (name, pattern) if name in state else (tensor.name, None)
            if name in state:
                transposing = [
                    rule for rule in converters if pattern in rule.source_patterns and _transposes(rule) is not None
                ]
                transposed = any(_transposes(rule) or state[name].shape != tensor.shape for rule in transposing)
                if pattern is not None:
                    fused.setdefault((name, pattern), []).append(tensor)
                elif state[name].shape == tensor.shape and len(tensor.shape) == 2:
                    self._places[tensor.name] = MatrixPlace(ModelMatrix(name), slice(None))
                if len(tensor.shape) in (2, 3) and (transposing or (pattern is None and state[name].ndim == 3)):
                    count = tensor.shape[0] if len(tensor.shape) == 3 else 1
                    stack = tuple(ModelMatrix(name, number) for number in range(count))
                    self._stacks[tensor.name] = StoredMatrices(stack, transposed)
                number = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
                result.setdefault(int(number) if number.isdigit() else OUTSIDE, []).append(tensor)
        for converter in converters:
            if _stacks_experts(converter):
                for name in {name for name, pattern in fused if pattern in converter.source_patterns}:
                    parts = [fused.get((name, pattern), []) for pattern in converter.source_patterns]
                    self._places |= _places_in_stack(name, tuple(state[name].shape), parts)
        return result

    # --- weights ---

    @contextlib.contextmanager
    def loaded(self, layer: int) -> Iterator[None]:
        """Have the weights of a layer, or of what is outside, in memory."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        state = {tensor.name: _read(tensor) for tensor in self._tensors.get(layer, ())}
        options = LoadStateDictConfig(dtype=torch.float32, weight_mapping=self._mapping)
        with Refused(f"{self._folder}: transformers cannot load this model"), quiet():
            convert_and_load_state_dict_in_model(self.model, state, options)
            if layer == OUTSIDE:
                self._tie()
        del state
        missing = [name for name, parameter in self.parameters_of(layer).items() if parameter.is_meta]
        if missing:
            raise self._refused(f"the checkpoint has no tensor for {missing[0]}")
        self.model.requires_grad_(False)
        try:
            yield
        finally:
            for module in self._modules(layer):
                for name, parameter in module._parameters.items():
                    module._parameters[name] = None if parameter is None else _on_meta(parameter)
            if layer == OUTSIDE:
                self.model.tie_weights()
            give_back_memory()

    def _tie(self) -> None:
        """Give embedding and head the same weight, whichever of them the checkpoint has, if they share it."""
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if self._is_tied and embedding.weight.is_meta:
            embedding.weight = head.weight
        self.model.tie_weights()

    def _modules(self, layer: int) -> list[torch.nn.Module]:
        if layer != OUTSIDE:
            return list(self._layers[layer].modules())
        inside = {id(module) for one in self._layers for module in one.modules()}
        return [module for module in self.model.modules() if id(module) not in inside]

    # --- computing ---

    def begin(self, ids: Tensor) -> tuple[Tensor, list[LayerCall]]:
        """Return the hidden states before the first layer, [windows, tokens, width], and how each layer is called.

        ids: token ids, [windows, tokens]. What is outside must be loaded.
        """
        try:
            notes = self._run_outside(ids, None)
        except SourceError:
            if self._as_tuple:
                raise
            notes = []
        if not notes or any(note.hidden.shape != notes[0].hidden.shape for note in notes):
            self._as_tuple = True  # a model that takes the first item of what a layer returns
            notes = self._run_outside(ids, None)
        if any(note.hidden.shape != notes[0].hidden.shape or note.hidden.shape[:2] != ids.shape for note in notes):
            raise self._refused("its layers do not map hidden states [windows, tokens, width] to the next")
        return notes[0].hidden, [note.call for note in notes]

    def end(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the logits [windows, tokens, vocabulary] for hidden states after the last layer."""
        logits: Tensor = self._run_outside(ids, hidden)[-1].logits
        return logits

    def run(self, layer: int, hidden: Tensor, call: LayerCall) -> Tensor:
        """Return the hidden states after a layer that is loaded."""
        with Refused(f"{self._folder}: transformers cannot run this model"):
            result = self._layers[layer](hidden, *call.args, **call.kwargs)
        result = result[0] if isinstance(result, tuple) else result
        if not isinstance(result, Tensor) or result.shape != hidden.shape:
            raise self._refused("a layer does not map hidden states to hidden states")
        return result

    def _run_outside(self, ids: Tensor, result: Tensor | None) -> list[_Note]:
        notes = [_Note(layer) for layer in self._layers]
        for number, note in enumerate(notes):
            self._list._modules[str(number)] = note
            note.__dict__["as_tuple"] = self._as_tuple
        notes[-1].__dict__["result"] = result
        try:
            with Refused(f"{self._folder}: transformers cannot run this model"):
                logits = self.model(ids, use_cache=False, logits_to_keep=0 if result is not None else 1).logits
        finally:
            for number, layer in enumerate(self._layers):
                self._list._modules[str(number)] = layer
        if any(note.call is None for note in notes):
            raise self._refused("it does not call its layers one after the other")
        notes[-1].__dict__["logits"] = logits
        return notes


def _stacks_experts(converter: Any) -> bool:
    """Whether transformers makes a stack [experts, outputs, inputs] of matrices, with some below each other."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    operations = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
    count = len(converter.source_patterns)
    return operations == [(MergeModulelist, 0), *([(Concatenate, 1)] if count > 1 else [])]


def _transposes(converter: Any) -> bool | None:
    """Whether transformers transposes always, or only tensors of another shape than the model's; None if never."""
    from transformers.core_model_loading import Transpose

    transposes = [operation for operation in converter.operations if isinstance(operation, Transpose)]
    return None if not transposes else not transposes[0].check_dims


def _places_in_stack(
    name: str, shape: tuple[int, ...], parts: Sequence[Sequence[LogicalTensor]]
) -> dict[str, MatrixPlace]:
    """Return the places of the matrices of a stack, by tensor; none if they do not fill it.

    parts: the matrices of all experts that are above each other in the stack
    """
    from transformers.core_model_loading import dot_natural_key

    result, start = {}, 0
    for part in parts:
        if len(part) != shape[0] or any(tensor.shape != (part[0].shape[0], *shape[2:]) for tensor in part):
            return {}
        rows = slice(start, start + part[0].shape[0])
        for expert, tensor in enumerate(sorted(part, key=lambda tensor: dot_natural_key(tensor.name))):
            result[tensor.name] = MatrixPlace(ModelMatrix(name, expert), rows)
        start = rows.stop
    return result if start == shape[1] else {}


@contextlib.contextmanager
def _without_weights() -> Iterator[None]:
    """Have modules made with parameters on the meta device; buffers are computed, as the constructors do."""
    from transformers.initialization import no_init_weights

    register = torch.nn.Module.register_parameter

    def on_meta(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(self, name, None if param is None else _on_meta(param))

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        with no_init_weights():
            yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _on_meta(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


def _read(tensor: LogicalTensor) -> Tensor:
    count, step = element_count(tensor), whole_blocks(tensor, CHUNK_WEIGHTS)
    values = np.empty(count, dtype=np.float32)
    for start in range(0, count, step):
        part = values[start : start + step]
        tensor.read(start, len(part), "F32", part.view(np.uint8))
    return torch.from_numpy(values).view(tensor.shape)


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and torch.equal(first, second)
    if isinstance(first, list | tuple):
        return type(first) is type(second) and len(first) == len(second) and all(map(_equal, first, second))
    if isinstance(first, dict):
        return (
            isinstance(second, dict)
            and first.keys() == second.keys()
            and all(_equal(first[k], second[k]) for k in first)
        )
    return first is second or bool(first == second)
