"""Which files of a folder hold the weights, the index that places tensors in them, and the tensors of pickled files.

As in transformers, the weights are in model.safetensors, or else in the files that the index names. Without an index
that fits, they are in the one set of files whose names say that it is complete. Pickles are read only on request:
torch's weights_only unpickler gives the layout, we read the bytes. It runs with fake tensors, so nothing is loaded;
torch notes for each storage where it lies in the zip file. The zip file itself is checked first, because torch's loader
does not check that its records are plain bytes.
"""

from __future__ import annotations

import pickle
import re
import struct
import warnings
import zipfile
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pqweights.checkpoint.companions import WEIGHT_SUFFIXES
from pqweights.checkpoint.header import MAX_NAME, StoredTensor, gguf_refused, overflows
from pqweights.checkpoint.names import CONFIG_FILE, INDEX_FILE, PICKLE_SUFFIXES, SINGLE_FILE, is_inside
from pqweights.checkpoint.storage import Storage, read_json_object
from pqweights.common.advice import pip_install
from pqweights.common.units import first_names
from pqweights.errors import MissingDependencyError, SourceError

if TYPE_CHECKING:
    from torch import Tensor

PICKLE_FILE = "pytorch_model.bin"
PICKLE_INDEX_FILE = "pytorch_model.bin.index.json"
# A part of a set of files, as transformers and others number them.
PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{1,9})-of-(?P<count>[0-9]{1,9})(?P<suffix>\.[a-z]+)")
# The stems of files that hold a model in the names of transformers; files with others, such as consolidated, may not.
STEMS = ("model", "model.safetensors", "pytorch_model")
# What torch's loader raises for a broken or hostile file.
REFUSALS = (
    *(pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, IndexError, TypeError, AttributeError),
    OSError,
)
# The safetensors dtype of each dtype of torch that can be read, by its name in torch.
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}

Span = tuple[int, int]  # first byte, last byte + 1
# Pickles that are not weights: the state of a training, and weights of other runtimes whose names end alike.
NO_WEIGHTS = (
    *("training_args.*", "optimizer*", "scheduler.*", "scaler.*", "rng_state*", "random_states*", "trainer_state*"),
    *("openvino_*.bin", "*_optim_rng.pt", "*mp_rank_*", "*zero_pp_rank_*", "consolidated*.pth", "*_optim_states.pt"),
)
# Patterns of whole paths, in lower case: what the file belongs to, and what makes a model of it.
OTHER_FORMATS = {
    "*zero_pp_rank_*": ("DeepSpeed", "run the zero_to_fp32.py beside it with --safe_serialization"),
    "*mp_rank_*model_states.pt": ("DeepSpeed", "run the zero_to_fp32.py beside it with --safe_serialization"),
    "*mp_rank_*": ("Megatron", "convert it with Megatron's checkpoint converter"),
    "*.distcp": ("torch.distributed.checkpoint (FSDP)", "join its parts with `accelerate merge-weights`"),
    "*.nemo": ("NeMo", "convert it with NeMo's script for Hugging Face"),
    "consolidated*.pth": (
        "the layout of the original code of the model",
        "take the files for transformers, or convert it with the script in transformers' folder of that model",
    ),
    "*flax_model*.msgpack": ("Flax", "load it in transformers with from_flax, and save it"),
    "tf_model*.h5": ("TensorFlow", "load it in transformers with from_tf, and save it"),
    "*.keras": ("Keras", "take the files for transformers"),
    "*.ckpt*.index": ("TensorFlow", "convert it with the script in transformers' folder of that model"),
    "*saved_model.pb": ("TensorFlow", "take the files for transformers"),
    "*.onnx": ("ONNX", "take the model that it was exported from"),
    "*openvino_*.bin": ("OpenVINO", "take the model that it was exported from"),
    "*.tflite": ("TensorFlow Lite", "take the model that it was exported from"),
    "*.mlmodel": ("Core ML", "take the model that it was exported from"),
    "*.pdparams": ("PaddlePaddle", "take the files for transformers"),
    "*rust_model.ot": ("rust-bert", "take the files for transformers"),
    "*.npz": ("MLX before safetensors", "convert it with a current mlx-lm"),
}
_SETTINGS = "model_index.json"  # of diffusers: a pipeline of several models


# The names of the files that hold the weights; for each tensor the file that holds it, by the index that names them, if
# one does; and what lies beside them and does not fit them, each with the reason.
WeightFiles = tuple[tuple[str, ...], dict[str, str], dict[str, str]]


def find_weight_files(storage: Storage, *, allow_pickle: bool, single_file: bool) -> WeightFiles:
    """Return the files that hold the weights. Raises SourceError if there are none, or if it is not clear which."""
    files = storage.files()
    if single_file:
        (only,) = files
        if not only.lower().endswith(WEIGHT_SUFFIXES):
            raise SourceError(f"{only}: expected a folder, or a safetensors file; give the folder")
        if not only.lower().endswith((".safetensors", *PICKLE_SUFFIXES)) and (instead := found_instead(files)):
            raise SourceError(f"{only}: expected a safetensors file, {instead}")
        if only.endswith(PICKLE_SUFFIXES) and not allow_pickle:
            raise _pickle_refused(only)
        return (only,), {}, {}
    if SINGLE_FILE in files:
        return (SINGLE_FILE,), {}, {}
    if INDEX_FILE in files:
        return _named_files(storage, INDEX_FILE, (".safetensors",))
    here = [name for name in files if "/" not in name]
    safetensors = [name for name in here if name.endswith(".safetensors")]
    if safetensors:
        return _complete_files(safetensors, INDEX_FILE)
    gguf = [name for name in here if name.endswith(".gguf")]
    if gguf:
        raise gguf_refused(gguf[0])
    pickles = [name for name in here if name.endswith(PICKLE_SUFFIXES) and holds_weights(name)]
    if not pickles:
        expected = f"expected {INDEX_FILE}, {SINGLE_FILE} or one other safetensors file"
        raise SourceError(f"no weights found: {found_instead(files) or expected}")
    if not allow_pickle:
        raise _pickle_refused(pickles[0])
    if PICKLE_FILE in pickles and PICKLE_INDEX_FILE not in files:
        return (PICKLE_FILE,), {}, {}
    if PICKLE_INDEX_FILE in files:
        return _named_files(storage, PICKLE_INDEX_FILE, PICKLE_SUFFIXES)
    return _complete_files(pickles, PICKLE_INDEX_FILE)


def _pickle_refused(file: str) -> SourceError:
    return SourceError(
        f"{file}: pickled weights can run code when they are loaded; convert them to safetensors, or pass "
        "`allow_pickle` to read them through torch's weights_only loader"
    )


def _named_files(storage: Storage, index: str, suffixes: tuple[str, ...]) -> WeightFiles:
    """Return the files that an index names; if some of these are not there, the one complete set of files.

    Raises SourceError if there is no such set, or more than one.
    """
    files, weight_map = read_index(storage, index, suffixes)
    absent = [name for name in files if name not in storage.files()]
    if not absent:
        return files, weight_map, {}
    here = [name for name in storage.files() if "/" not in name and name.endswith(suffixes)]
    complete = [of for of in numbered_sets(here) if of.is_of_model and of.absent is None]
    if not complete:
        raise _missing(index, weight_map, absent[0])
    only = _only(complete, index)
    stale = f"it names {absent[0]}, which is not there; all {len(only.files)} parts of {only.name} were read"
    return only.files, {}, {index: stale}


def _complete_files(names: list[str], index: str) -> WeightFiles:
    """Return those files, without an index, that are a whole model by their names.

    Raises SourceError if parts are missing, and if there is more than one such set or file.
    """
    sets = numbered_sets(names)
    numbered = {name for of in sets for name in of.files}
    complete = [of for of in sets if of.is_of_model and of.absent is None]
    if not complete:
        for of in sets:
            if of.absent is not None and (of.is_of_model or len(sets) == 1):
                raise SourceError(f"{of.absent}: missing, while {of.files[0]} is there: fetch it, or give one file")
        alone = [NumberedSet(name, (name,), None) for name in names if name not in numbered]
        complete = [of for of in (*sets, *alone) if of.absent is None]
        complete = [of for of in complete if not of.name.startswith("consolidated")] or complete
    only = _only(complete, index)
    if len(only.files) == 1:
        return only.files, {}, {}
    return only.files, {}, {index: f"there is none; all parts of {only.name} were read"}


class NumberedSet(NamedTuple):
    """Files that are the parts of one checkpoint by their names.

    name: the name of each, with a star for its number
    files: those that are there
    absent: the name of one that is not there; None if all are
    """

    name: str
    files: tuple[str, ...]
    absent: str | None

    @property
    def is_of_model(self) -> bool:
        """Whether it has the name that transformers gives to the files of a model."""
        return self.name.rpartition("-*-of-")[0] in STEMS


def numbered_sets(names: Iterable[str]) -> list[NumberedSet]:
    """Return the sets of files whose names number them, from 1 or from 0 on."""
    sets: dict[str, dict[int, str]] = {}
    for name in sorted(names):
        part = PART.fullmatch(name)
        if part is not None:
            of = sets.setdefault("{stem}-*-of-{count}{suffix}".format(**part.groupdict()), {})
            of[int(part["number"])] = name
    return [NumberedSet(name, tuple(files.values()), _absent(files)) for name, files in sets.items()]


def _absent(files: dict[int, str]) -> str | None:
    """Return the name of a part that is not there."""
    first = files[min(files)]
    part = PART.fullmatch(first)
    assert part is not None
    start, count = min(1, min(files)), int(part["count"])
    number = next((n for n in range(start, start + min(count, len(files) + 1)) if n not in files), None)
    if number is None:
        return None
    at = part.start("number")
    return f"{first[:at]}{number:0{len(part['number'])}d}{first[part.end('number') :]}"


def _only(sets: list[NumberedSet], index: str) -> NumberedSet:
    """Return the only set. Raises SourceError if there is another one."""
    if len(sets) == 1:
        return sets[0]
    found = ", ".join(of.name for of in sets[:4])
    raise SourceError(
        f"expected {index}, or files of one model alone, found {found}: fetch the index, remove those that are not "
        "meant, or give one file"
    )


def indexed_files(storage: Storage) -> tuple[tuple[str, ...], dict[str, str]]:
    """Read the index of safetensors, as read_index does; the weight files that it names must exist."""
    files, weight_map = read_index(storage, INDEX_FILE, (".safetensors",))
    for name in files:
        if name not in storage.files():
            raise _missing(INDEX_FILE, weight_map, name)
    return files, weight_map


def _missing(index: str, weight_map: dict[str, str], file: str) -> SourceError:
    tensor = next(tensor for tensor, of in weight_map.items() if of == file)
    return SourceError(f"{file}: missing; {index} places {tensor!r} in it: fetch it")


def read_index(storage: Storage, index: str, suffixes: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Read an index, and return the weight files that it names, and for each tensor the file that holds it.

    The files must have one of the suffixes.
    """
    weight_map = read_json_object(storage, index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{index}: expected a weight_map of tensor names to files, found none")
    first_tensors: dict[str, str] = {}  # by file: each file is checked once, and the message names its first tensor
    for tensor, name in weight_map.items():
        if isinstance(name, str) and name in first_tensors:
            continue
        if not isinstance(name, str) or not is_inside(name) or "/" in name or "\\" in name:
            raise SourceError(
                f"{index}: tensor {tensor!r} is placed in {str(name)[:80]!r}; expected a file in the same folder"
            )
        first_tensors[name] = tensor
    for name, tensor in first_tensors.items():
        if not name.endswith(suffixes):
            raise SourceError(f"{index}: tensor {tensor!r} is placed in {name!r}; expected a {suffixes[0]} file")
    return tuple(sorted(first_tensors)), weight_map


def check_index(folder: Path, stored: dict[str, StoredTensor]) -> None:
    """Check the tensors of the weight files of a folder against its index, if these are the files that it names.

    Raises SourceError if they differ.
    """
    files = sorted({tensor.file for tensor in stored.values()})
    if SINGLE_FILE not in files and (folder / INDEX_FILE).is_file():
        storage = Storage(folder, only=[INDEX_FILE, *files])
        check_tensors(INDEX_FILE, indexed_files(storage)[1], stored)


def index_of(weight_files: Sequence[str]) -> str:
    """Return the name of the index that may name these files."""
    return PICKLE_INDEX_FILE if weight_files[0].endswith(PICKLE_SUFFIXES) else INDEX_FILE


def check_tensors(index: str, weight_map: dict[str, str], stored: dict[str, StoredTensor]) -> dict[str, str]:
    """Return the index with the reason if it places a tensor in another file than that which holds it, else nothing.

    Raises SourceError if it names a tensor that is in none of its files.
    """
    misplaced = ""
    for name, file in weight_map.items():
        tensor = stored.get(name)
        if tensor is None:
            raise SourceError(
                f"{file}: expected the tensor {name!r}, which {index} places there, found no such tensor in any "
                f"file that it names; fetch them again, or remove {index} if the files are a whole model"
            )
        if tensor.file != file:
            misplaced = misplaced or f"it places {name!r} in {file}, but {tensor.file} holds it; it was read from there"
    return {index: misplaced} if misplaced else {}


# --- pickled files ---


def pickled_tensors(storage: Storage, file: str) -> list[StoredTensor]:
    """Return the tensors of a pickled file, as places in that file.

    Raises SourceError if torch refuses the pickle, or if the zip file or a tensor is not laid out plainly.
    """
    try:
        import torch
    except ImportError:
        raise MissingDependencyError(f"{file}: reading pickled weights needs torch: {pip_install('torch')}") from None
    folder = storage.local_folder()
    if folder is None:
        raise SourceError(f"{file}: pickled weights can only be read from a local folder")
    records = _data_records(folder / file, file)
    state = _load_without_data(folder / file, file)
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise SourceError(f"{file}: expected a dictionary of tensors, found {type(state).__name__}")
    return [_stored(file, str(name), tensor, records=records) for name, tensor in state.items()]


def _load_without_data(path: Path, file: str) -> Any:
    """Unpickle a file into fake tensors."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, weights_only=True, map_location="cpu")
    except REFUSALS as error:
        raise SourceError(
            f"{file}: torch's weights_only loader refuses it ({type(error).__name__}): it is damaged or holds more "
            "than tensors; convert it to safetensors if you trust it"
        ) from None


def _stored(file: str, name: str, tensor: Tensor, *, records: list[Span]) -> StoredTensor:
    """Return the place of a fake tensor in the file."""
    import torch

    dtype = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or dtype is None:
        raise SourceError(
            f"{file}: tensor {name!r} is not a contiguous tensor of a known dtype: convert to safetensors"
        )
    if len(name) > MAX_NAME or overflows(tuple(tensor.shape)):
        raise SourceError(
            f"{file}: tensor {ascii(name)[:80]}: expected a short name and the shape of a tensor, found "
            f"{str(list(tensor.shape))[:80]}"
        )
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    offset = (start or 0) + int(tensor.storage_offset()) * tensor.element_size()
    count = tensor.numel() * tensor.element_size()
    if start is None or not any(first <= offset and offset + count <= end for first, end in records):
        raise SourceError(f"{file}: tensor {name!r} does not lie within one record of the file: fetch it again")
    return StoredTensor(name=name, dtype=dtype, shape=tuple(tensor.shape), file=file, offset=offset, byte_count=count)


def _data_records(path: Path, file: str) -> list[Span]:
    """Return the span of every storage in the zip file.

    Raises SourceError for compressed or encrypted records, and for a byte order other than little-endian.
    """
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as stream:
            spans = []
            for entry in archive.infolist():
                if entry.filename.endswith("/byteorder") and archive.read(entry).strip() != b"little":
                    raise SourceError(f"{file}: expected little-endian data, found another byte order")
                if "/data/" not in entry.filename:
                    continue
                if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
                    raise SourceError(
                        f"{file}: record {entry.filename!r} is compressed or encrypted: save it with torch"
                    )
                stream.seek(entry.header_offset + 26)
                name_bytes, extra_bytes = struct.unpack("<HH", stream.read(4))
                start = entry.header_offset + 30 + name_bytes + extra_bytes
                spans.append((start, start + entry.file_size))
    except (zipfile.BadZipFile, struct.error, NotImplementedError, RuntimeError, EOFError, OSError) as error:
        raise SourceError(
            f"{file}: expected a file that torch.save wrote (a zip file), found {type(error).__name__}: it is damaged "
            "or older than torch 1.6; load and save it with a current torch"
        ) from None
    return spans


def holds_weights(name: str) -> bool:
    """Whether a file that is called like PyTorch's pickles may hold the weights of a model."""
    base = name.rpartition("/")[2]
    return not any(fnmatchcase(base, pattern) for pattern in NO_WEIGHTS)


def found_instead(files: Collection[str]) -> str:
    """Return what a folder without weights holds, and what to do, for a message; empty if nothing is known of it."""
    folders = _folders(files)
    if folders and _SETTINGS in files:
        return f"found a pipeline of several models: give one of the folders {first_names(folders)}"
    if folders:
        several = f" (also in {first_names(folders[1:])})" if len(folders) > 1 else ""
        return f"the model lies one folder down, in {folders[0]}/{several}: give that folder"
    for pattern, (kind, advice) in OTHER_FORMATS.items():
        match = next((name for name in files if fnmatchcase(name.lower(), pattern)), None)
        if match is not None:
            return f"found {match}, a checkpoint of {kind}: {advice}, and give the result"
    return ""


def _folders(files: Collection[str]) -> list[str]:
    """Return the folders inside that hold weights, those with a configuration and the newest of a training first."""
    suffixes = (".safetensors", ".gguf", *PICKLE_SUFFIXES)
    folders = {name.rpartition("/")[0] for name in files if name.lower().endswith(suffixes) and holds_weights(name)}

    def order(folder: str) -> tuple[int, bool, int, str]:
        numbers = re.findall(r"\d+", folder) if "checkpoint" in folder else []
        return folder.count("/"), f"{folder}/{CONFIG_FILE}" not in files, -int(numbers[-1]) if numbers else 0, folder

    return sorted(folders - {""}, key=order)
