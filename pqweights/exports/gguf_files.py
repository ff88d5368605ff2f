"""The files of a GGUF export: names and headers, a Modelfile for Ollama, the importance matrix, and how to load it."""

from __future__ import annotations

import fnmatch
import json
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pqweights.checkpoint.source import Checkpoint
from pqweights.checkpoint.storage import read_file
from pqweights.exports.integers import Importances
from pqweights.exports.loading import LoadableModel, shell
from pqweights.gguf.mixes import Mix
from pqweights.gguf.package import ALIGNMENT, FilePart, GgufTensor, MetadataEntry, encode_header
from pqweights.planning.plan import FileHeader, GgufFiles, ShardPlan, TensorPlan, cuts
from pqweights.rewrite.transform import SmallFiles
from pqweights.storage.hub.ids import is_repository_id

if TYPE_CHECKING:
    from pqweights.gguf.model import GgufModel

MODELFILE, IMATRIX_FILE = "Modelfile", "imatrix.dat"
GENERATION_CONFIG = "generation_config.json"
# What is copied beside the weights, which hold everything that llama.cpp reads of the model.
COPIED = ("*license*", "*licence*", "copying*", "copyright*", "notice*", "*policy*", "citation*", "authors*")
# Settings of generation_config.json that a Modelfile has under the same names.
SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
OLLAMA_NAMES = {"repetition_penalty": "repeat_penalty"}


@dataclass(frozen=True, kw_only=True, eq=False)
class GgufOutput:
    """What a GGUF export writes.

    file_name: the name of the file without its ending
    model: the model in llama.cpp's terms
    mix: the mix of types, which the metadata name; None if types were chosen one by one
    imatrix: whether the importance matrix is written
    checkpoint: the master
    """

    file_name: str
    model: GgufModel
    mix: Mix | None
    imatrix: bool
    checkpoint: Checkpoint

    def container(self, tensors: Sequence[TensorPlan], max_shard_bytes: int) -> GgufFiles:
        """Return the files with their headers."""
        metadata = [*self.model.metadata, *_about_types(self.mix)]
        runs = cuts(tensors, max_shard_bytes)
        headers = []
        for number, run in enumerate(runs):
            held = [_listed(tensors[index]) for index in run]
            content = encode_header(metadata, held, FilePart(number, len(runs), len(tensors)))
            headers.append(FileHeader.of(content))
        return GgufFiles(name=self.file_name, alignment=ALIGNMENT, headers=tuple(headers))

    def small_files(self, shards: Sequence[ShardPlan], importances: Importances | None) -> SmallFiles:
        """Return a Modelfile, unless there are several files, which Ollama does not take; and what was asked for."""
        result: dict[str, Callable[[], bytes]] = {}
        if len(shards) == 1:
            result[MODELFILE] = lambda: self._modelfile(shards[0].file)
        if self.imatrix and importances is not None:
            result[IMATRIX_FILE] = lambda: _imatrix(self.model, importances)
        return result

    @property
    def companions(self) -> tuple[str, ...]:
        """The files that are copied."""
        names = self.checkpoint.companions
        return tuple(n for n in names if any(fnmatch.fnmatchcase(n.lower(), pattern) for pattern in COPIED))

    def _modelfile(self, file: str) -> bytes:
        settings: Any = {}
        if GENERATION_CONFIG in self.checkpoint.companions:
            settings = json.loads(read_file(self.checkpoint.storage, GENERATION_CONFIG))
        known = {key: settings[key] for key in SETTINGS if isinstance(settings, dict) and _is_number(settings.get(key))}
        lines = [f"PARAMETER {OLLAMA_NAMES.get(key, key)} {value}" for key, value in known.items()]
        return "\n".join(["# ollama create NAME -f Modelfile", f"FROM ./{file}", *lines, ""]).encode()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _listed(planned: TensorPlan) -> GgufTensor:
    """Return what a header says of a planned tensor."""
    kind = planned.codec or planned.stored[0].dtype
    return GgufTensor(planned.name, planned.shape, kind, planned.bytes)


def _about_types(mix: Mix | None) -> list[MetadataEntry]:
    """Return the metadata that name the mix, if there is one, and the version of the block formats."""
    import gguf

    keys, number = gguf.Keys.General, int(gguf.GGUFValueType.UINT32)
    version = MetadataEntry(keys.QUANTIZATION_VERSION, gguf.GGML_QUANT_VERSION, number)
    if mix is None:
        return [version]
    return [MetadataEntry(keys.FILE_TYPE, int(gguf.LlamaFileType[mix.file_type]), number), version]


def _imatrix(model: GgufModel, importances: Importances) -> bytes:
    """Return the importance matrix as llama.cpp's tools read it: sums of squares of inputs, and how many there were.

    Format: llama.cpp, tools/imatrix.
    """
    import gguf

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / IMATRIX_FILE
        writer = gguf.GGUFWriter(path, "")
        writer.kv_data[0].clear()
        writer.add_type("imatrix")
        writer.add_array("imatrix.datasets", ["pqweights calibrate --moments"])
        writer.add_uint32("imatrix.chunk_count", 1)
        most = 1
        for tensor in model.tensors:
            known = importances.of(tensor)
            pairs = [pair for pair in known if pair is not None]
            if not pairs or len(pairs) < len(known):
                continue
            counts = np.array([[tokens] for _, tokens in pairs], dtype=np.float32)
            most = max(most, int(counts.max()))
            writer.add_tensor(f"{tensor.name}.in_sum2", np.stack([mean for mean, _ in pairs]) * counts)
            writer.add_tensor(f"{tensor.name}.counts", counts)
        writer.add_uint32("imatrix.chunk_size", most)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def load_section(made_by: Mapping[str, Any], model: LoadableModel) -> list[str]:
    """Return the part of a card that says how to load the result."""
    first, whole = model.weights[0], len(model.weights) == 1
    if is_repository_id(model.place):
        branch = "" if model.branch is None else f" (branch {model.branch})"
        ollama = [f"ollama run hf.co/{model.place}:{first}"] if whole else []
        return [
            f"With llama.cpp, which fetches the file{branch}{', or with Ollama' if whole else ''}:",
            shell(f"llama-cli -hf {model.place} -hff {first}", *ollama),
            "LM Studio finds it by the name of the repository.",
        ]
    run = f"llama-cli -m {shlex.quote(f'{model.place}/{first}')}"
    if not whole:
        return ["With llama.cpp, which finds the other parts itself:", shell(run), "LM Studio opens it, too."]
    modelfile = shlex.quote(f"{model.place}/{MODELFILE}")
    return [
        "With llama.cpp, or with Ollama:",
        shell(run, f"ollama create my-model -f {modelfile}", "ollama run my-model"),
        "LM Studio opens the file, too.",
    ]
