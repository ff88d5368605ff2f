"""The gguf target: one file, or several numbered ones, for llama.cpp, Ollama and LM Studio.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What the model is in llama.cpp's terms is in
pqweights/checkpoint/gguf, and which types its tensors get in gguf_types.py.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pqweights.checkpoint.gguf.diffusion import diffusion_family, diffusion_model
from pqweights.checkpoint.gguf.mixes import (
    EMBEDDING,
    MIXES,
    OUTPUT,
    OUTPUTS,
    WANT_IMPORTANCE,
    file_type,
    fitting_type,
    role_of,
)
from pqweights.checkpoint.gguf.model import (
    ALIGNMENT,
    GgufModel,
    encode_header,
    gguf_model,
    gives_vectors,
    model_tensors,
    sampling_settings,
    tensor_info,
)
from pqweights.checkpoint.gguf.views import RenamedTensor
from pqweights.checkpoint.names import file_stem, gguf_name
from pqweights.checkpoint.readers import LogicalTensor
from pqweights.checkpoint.source import Checkpoint
from pqweights.common.markdown import fenced
from pqweights.common.options import Options
from pqweights.convert.plan import SmallFiles
from pqweights.errors import ExportError, OptionError
from pqweights.kernels.gguf_encoding import BLOCK_TYPES
from pqweights.models.diffusion import CLASS, COMFYUI, DIFFUSERS
from pqweights.planning.layout import GgufFiles, ShardPlan, TensorPlan, cuts_together
from pqweights.planning.recipe import Recipe
from pqweights.storage.addresses import is_repository_id
from pqweights.targets.assignment import describe
from pqweights.targets.gguf_types import (
    PLAIN_BITS,
    TOWER_TYPE,
    check_types,
    chosen_types,
    decision_of,
    read_types,
    tower_type,
)
from pqweights.targets.integers import Assignment
from pqweights.targets.loading import PART, LoadableModel, files_of_type, into_comfyui, legal_files, shell
from pqweights.targets.target import (
    INPUT_OPTIONS,
    LLAMA_CPP,
    PLAIN,
    RECIPE_OPTIONS,
    ExportSettings,
    ExportTarget,
    read_rounding,
)

MODELFILE = "Modelfile"
# One file of nearly every model, as llama.cpp's programs and Ollama like them; the Hub takes files of up to 50 GB.
MAX_SHARD_BYTES = 45_000_000_000
# Between the type of a file and the names of its tensors, where a result has several files.
TYPE_END = "/"
# llama.cpp and others take a file of that name for the tower of the model beside it.
TOWER_PREFIX = "mmproj-"
NO_TOKENIZER = (
    "put tokenizer.json and tokenizer_config.json beside the weights (of a master: quantize again), or pass "
    "`without_tokenizer` for programs that give it token ids"
)
WITHOUT_TOKENIZER = (
    "the file has no tokenizer: use it with programs that give llama.cpp token ids, such as pqweights eval "
    "--tokenizer DIR; llama-cli, llama-server and Ollama abort at the first text"
)
# What a Modelfile calls settings that have other names there than in GENERATION_CONFIG.
OLLAMA_NAMES = {"repetition_penalty": "repeat_penalty"}


def _container(
    mixes: Mapping[str, str],
    recipe: Recipe,
    base_name: str,
    model: GgufModel,
    tensors: Sequence[TensorPlan],
    max_shard_bytes: int,
) -> GgufFiles:
    """Return the files with their headers: those of each type are cut at the same tensors, then that of a tower.

    mixes: see read_types
    base_name: what names of files begin with
    """
    count = len(model.tensors)
    firsts = range(0, count * len(mixes), count)
    by_type = [tensors[first : first + count] for first in firsts]
    runs = cuts_together(by_type, max_shard_bytes)
    files = []
    for (label, mix), first in zip(mixes.items(), firsts, strict=True):
        # Types that are chosen one by one have no mix to name.
        metadata = model.metadata | _about_types(mix if recipe.goal is None else None)
        for number, run in enumerate(runs):
            held = range(first + run.start, first + run.stop)
            header = encode_header(
                metadata, _listed(tensors[i] for i in held), number=number, parts=len(runs), tensors_of_all=count
            )
            name = gguf_name(f"{base_name}-{label}", number, len(runs))
            files.append(ShardPlan(file=name, tensors=held, header=header, group=number))
    if model.tower:
        about = model.tower_metadata | _about_types(TOWER_TYPE)
        of_tower = range(count * len(mixes), len(tensors))
        header = encode_header(about, _listed(tensors[index] for index in of_tower))
        name = gguf_name(f"{TOWER_PREFIX}{base_name}-{TOWER_TYPE}", 0, 1)
        files.append(ShardPlan(file=name, tensors=of_tower, header=header, group=len(runs)))
    return GgufFiles(name=names_together(base_name, mixes), alignment=ALIGNMENT, files=tuple(files))


def _small_files(checkpoint: Checkpoint, has_tower: bool, shards: Sequence[ShardPlan]) -> SmallFiles:
    """Return a Modelfile, unless there are several files of text, which Ollama does not take."""
    if len(shards) > (2 if has_tower else 1):
        return {}
    return {MODELFILE: partial(_modelfile, checkpoint, [shard.file for shard in shards])}


def _modelfile(checkpoint: Checkpoint, files: Sequence[str]) -> bytes:
    settings = sampling_settings(checkpoint)
    lines = [f"PARAMETER {OLLAMA_NAMES.get(key, key)} {value}" for key, value in settings.items()]
    return "\n".join(["# ollama create NAME -f Modelfile", *(f"FROM ./{file}" for file in files), *lines, ""]).encode()


def _listed(tensors: Iterable[TensorPlan]) -> dict[str, Any]:
    """Return what a header says of planned tensors."""
    return {
        of.name.rpartition(TYPE_END)[2]: tensor_info(of.shape, of.codec or of.stored[0].dtype, of.bytes)
        for of in tensors
    }


def _about_types(mix: str | None) -> dict[str, Any]:
    """Return the metadata that name the mix, if there is one, and the version of the block formats."""
    import gguf

    writer = gguf.GGUFWriter(None, "")
    writer.kv_data[0].clear()
    if mix is not None:
        writer.add_file_type(file_type(mix))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return dict(writer.kv_data[0])


def load_section(made_by: Mapping[str, Any], model: LoadableModel) -> list[str]:
    """Return the part of a card that says how to load the result."""
    if "runs_in" in made_by:
        return _load_diffusion(made_by, model)
    of_text = [file for file in model.weights if not file.startswith(TOWER_PREFIX)]
    first, whole = of_text[0], len(of_text) == 1
    tower = next((file for file in model.weights if file not in of_text), None)
    if "," in made_by.get("type", ""):
        return _load_one_of(made_by["name"], of_text, tower, model)
    if made_by.get("embeds"):
        hub = is_repository_id(model.location)
        where = f"-hf {model.location} -hff {first}" if hub else f"-m {shlex.quote(f'{model.location}/{first}')}"
        return ["With llama.cpp, which makes vectors of texts:", shell(f"llama-embedding {where} -p 'a text'")]
    if is_repository_id(model.location):
        branch = "" if model.branch is None else f" (branch {model.branch})"
        ollama = [f"ollama run hf.co/{model.location}:{first}"] if whole else []
        return [
            f"With llama.cpp, which fetches the file{branch}{', or with Ollama' if whole else ''}:",
            shell(f"llama-cli -hf {model.location} -hff {first}", *ollama),
            "LM Studio finds it by the name of the repository.",
        ]
    run = f"llama-cli -m {shlex.quote(f'{model.location}/{first}')}"
    run += f" --mmproj {shlex.quote(f'{model.location}/{tower}')}" if tower else ""
    if not whole:
        return ["With llama.cpp, which finds the other parts itself:", shell(run), "LM Studio opens it, too."]
    modelfile = shlex.quote(f"{model.location}/{MODELFILE}")
    return [
        "With llama.cpp, or with Ollama:",
        shell(run, f"ollama create my-model -f {modelfile}", "ollama run my-model"),
        "LM Studio opens the file, too.",
    ]


def _load_diffusion(made_by: Mapping[str, Any], model: LoadableModel) -> list[str]:
    """Return the part of a card that says how to load an image or video model."""
    file, is_on_hub = model.weights[0], is_repository_id(model.location)
    said = []
    if COMFYUI in made_by["runs_in"]:
        said += [
            "In ComfyUI with the nodes of [ComfyUI-GGUF](https://github.com/city96/ComfyUI-GGUF), the node Unet Loader "
            "(GGUF) has the file after:",
            into_comfyui(model),
        ]
    class_name = made_by["class"]
    if DIFFUSERS in made_by["runs_in"] and class_name:
        at = f"https://huggingface.co/{model.location}/blob/{model.branch or 'main'}/{file}"
        where = json.dumps(at if is_on_hub else f"{model.location}/{file}")
        config = f", config={model.literal}" if model.opens_in_diffusers else ""
        compute = "quantization_config=GGUFQuantizationConfig(compute_dtype=torch.bfloat16), torch_dtype=torch.bfloat16"
        lines = [
            "import torch",
            f"from diffusers import GGUFQuantizationConfig, {class_name}",
            "",
            f"transformer = {class_name}.from_single_file(",
            f"    {where}{config},",
            f"    {compute},",
            ")",
        ]
        said += ["With diffusers, in whose pipeline it takes the place of that model:", fenced("python", lines)]
    return said


def _load_one_of(together: str, files: Sequence[str], tower: str | None, model: LoadableModel) -> list[str]:
    """Return the part of a card that says how to load one of several types.

    together: what their files are called together, see names_together
    files: those of text
    """
    named, *others = together.split("+")
    base = next(re.sub(PART, "", file) for file in files_of_type(files, others[0])).removesuffix(others[0])
    types = [named.removeprefix(base), *others]
    if is_repository_id(model.location):
        branch = "" if model.branch is None else f" (branch {model.branch})"
        lines = [f"llama-cli -hf {model.location}:{name}" for name in types]
        return [
            f"With llama.cpp, which fetches the file of the type behind the colon{branch}, or with Ollama:",
            shell(*lines, f"ollama run hf.co/{model.location}:{types[-1]}"),
            "LM Studio finds them by the name of the repository.",
        ]
    run = [f"llama-cli -m {shlex.quote(f'{model.location}/{files_of_type(files, name)[0]}')}" for name in types]
    run = [f"{line} --mmproj {shlex.quote(f'{model.location}/{tower}')}" for line in run] if tower else run
    return ["With llama.cpp, one of:", shell(*run), "LM Studio opens them, too."]


def names_together(base_name: str, labels: Iterable[str]) -> str:
    """Return what files of some types are called together."""
    return f"{base_name}-{'+'.join(labels)}"


NAME = "gguf"
UNKNOWN = "model"  # what files are called if nothing names the model


def _assign(
    mixes: Mapping[str, str],
    recipe: Recipe,
    options: Options,
    rounding: str,
    checkpoint: Checkpoint,
    called: str | None,
) -> Assignment:
    """Decide which types tensors get; names and shapes are those of llama.cpp, or of an image or video model.

    mixes: see read_types
    rounding: how codes are chosen: PLAIN, GPTQ or IMPORTANCE

    Raises MissingDependencyError without gguf, ExportError if llama.cpp cannot take the model or its tokenizer, or if
    it has none; OptionError for types that nothing decodes which runs image and video models.
    """
    diffusion, name = diffusion_family(checkpoint), options.name or called
    base_name = (name or UNKNOWN).rpartition("/")[2]
    name = None if name == UNKNOWN else name
    stated: dict[str, Any] = {"name": names_together(base_name, mixes)}
    if diffusion is not None:
        model = diffusion_model(checkpoint, diffusion, name=name)
        stated |= {"runs_in": list(diffusion.programs), "class": diffusion.class_name}
    else:
        model = gguf_model(checkpoint, name=name)
        stated |= {"embeds": True} if gives_vectors(checkpoint) else {}
        if not model.has_vocabulary:
            if not options.without_tokenizer:
                raise ExportError(
                    f"the model has no tokenizer, without which llama.cpp aborts at the first text: {NO_TOKENIZER}"
                )
            model = replace(model, notes=(*model.notes, WITHOUT_TOKENIZER))
    tensors, types, warnings = list[LogicalTensor](), dict[str, tuple[str, str]](), list[str]()
    for label, mix in mixes.items():
        chosen = chosen_types(mix, recipe, model, checkpoint, pure=options.pure, rounding=rounding)
        if diffusion is not None:
            check_types(chosen)
        # Several files have tensors of the same names, which a result tells apart.
        of_type = "" if len(mixes) == 1 else label + TYPE_END
        tensors += [RenamedTensor.of(of_type + t.name, t) for t in model.tensors] if of_type else model.tensors
        types |= {of_type + name: of for name, of in chosen.items()}
        warnings += [] if rounding != PLAIN else _wanting(chosen)
    types |= {tensor.name: tower_type(tensor) for tensor in model.tower}
    return Assignment(
        tensors=(*tensors, *model.tower),
        decisions={name: decision_of(*of) for name, of in types.items()},
        dtypes={name: type_name for name, (type_name, _) in types.items() if type_name in PLAIN_BITS},
        # By which diffusers makes the model.
        config=checkpoint.config if CLASS in (checkpoint.config or {}) else None,
        left_out=model.left_out,
        metadata={},
        plain_dtype=None,
        warnings=(*model.notes, *warnings),
        container=partial(_container, mixes, recipe, base_name, model),
        small_files=None if diffusion else partial(_small_files, checkpoint, bool(model.tower)),
        companions=legal_files(checkpoint.companions),
        stated=stated,
    )


def _wanting(types: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """Yield a warning of types that llama.cpp makes with importances only."""
    matrices = [type_name for name, (type_name, _) in types.items() if role_of(name) not in (OUTPUT, EMBEDDING)]
    wanting = [name for name in WANT_IMPORTANCE if name in matrices]
    if wanting:
        yield (
            f"{', '.join(wanting)} without importances, which llama.cpp's own quantizer requires for such types: a "
            "model with outlier channels may become useless; `calibrate` self measures importances"
        )


def read_options(options: Options) -> ExportSettings:
    """Return the target with its options. Raises OptionError for one that it does not have."""
    name = options.name
    if name is not None and (not name or file_stem(name) != name):
        raise OptionError(f"`name`: expected letters, digits, '.', '_' and '-', at most 96, found {name[:100]!r}")
    rounding = read_rounding(NAME, options)
    mixes, recipe = read_types(options)
    stated: dict[str, Any] = {} if recipe.goal is not None else {"type": ",".join(mixes.values())}
    stated |= {"pure": True} if options.pure else {}
    return ExportSettings(
        stated={"target": NAME, **stated, **describe(recipe)},
        assign=partial(_assign, mixes, recipe, options, rounding),
        recipe=recipe,
        rounding=rounding,
    )


def _check(checkpoint: Checkpoint) -> None:
    """Check whether a runtime has the model; the tokenizer, which may be large, is not read."""
    if diffusion_family(checkpoint) is None:
        model_tensors(checkpoint)


# The mixes that a memory is filled with: of those with about as many bits, the ones that cost least.
PROPOSED = (
    "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q3_K_M", "IQ3_XXS", "Q2_K", "IQ2_M", "IQ2_XXS", "IQ1_M",
)  # fmt: skip


def _bits(mix: str, columns: int) -> float:
    """Return about how many bits a mix has for each weight of rows of so many.

    Most have its type, and a fifth that of the output, or those that they fall back to.
    """
    names = [fitting_type(wanted, columns) for wanted in (MIXES[mix][0], OUTPUTS[mix])]
    of_most, of_output = (
        PLAIN_BITS[name] if name in PLAIN_BITS else BLOCK_TYPES[name].bits_per_weight for name in names
    )
    return (4 * of_most + max(of_most, of_output)) / 5


TARGET = ExportTarget(
    name=NAME,
    runtime=LLAMA_CPP,
    tags=("gguf", "llama.cpp"),
    options=(
        "type",
        "pure",
        "name",
        "without_tokenizer",
        *RECIPE_OPTIONS,
        *INPUT_OPTIONS,
    ),
    stated=("rules", "embeds", "runs_in", "class"),
    read_options=read_options,
    check=_check,
    load_section=load_section,
    max_shard_bytes=MAX_SHARD_BYTES,
    library="gguf",
    unchecked=lambda checkpoint: None if diffusion_family(checkpoint) else "if llama.cpp has its tokenizer",
    choices={mix.lower(): (Options(type=mix.lower()), partial(_bits, mix)) for mix in MIXES if mix in PROPOSED},
)
