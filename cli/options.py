"""The arguments and options of commands, shared by all of them: what Typer parses, and the texts of help.

The names of parameters are those of the functions of the API. What values mean is checked there, once.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import output

if TYPE_CHECKING:
    from pqweights.common.options import Options
    from pqweights.storage.sources import Fetched

# Samples of text for a calibration.
SAMPLES = "self|mixture|FILE|ORG/DATASET"

# Arguments: checkpoints and results

Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="Checkpoint: a folder of safetensors files, one of them, a GGUF file, ORG/MODEL or "
        "hf://ORG/MODEL/FILE.gguf on the Hub, or an address such as s3://BUCKET/FOLDER.",
    ),
]
Exported = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="Checkpoint or master: a folder, a file in safetensors or GGUF, ORG/MODEL on the Hub, or an address such "
        "as s3://BUCKET/FOLDER.",
    ),
]
Folder = Annotated[
    str,
    typer.Argument(
        metavar="DIR",
        help="Master or export written by pqweights: a folder, ORG/NAME on the Hub, or an address such as "
        "s3://BUCKET/FOLDER.",
    ),
]
LocalFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of a master or an export written by pqweights.")
]
Stated = Annotated[
    str,
    typer.Argument(
        metavar="MANIFEST",
        help="The pqweights.json of a result, or the result itself: a folder, ORG/NAME on the Hub, or an address.",
    ),
]
MadeOf = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="Source of the result, or a lossless master of it: a folder, a file, ORG/MODEL on the Hub (at the commit "
        "that the manifest names), or an address.",
    ),
]
Out = Annotated[
    str,
    typer.Argument(
        metavar="OUT",
        help="Folder for the result, new or empty: a local one, or an address such as s3://BUCKET/FOLDER.",
    ),
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Master, or any checkpoint of a language model that transformers loads: a folder, or ORG/NAME on the Hub.",
    ),
]
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help="Checkpoints, masters and exports: folders, or ORG/NAME on the Hub; also GGUF files.",
    ),
]
Repository = Annotated[
    str, typer.Argument(metavar="ORG/NAME", help="Repository on the Hub; created if it does not exist.")
]

# What is printed

Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="Also write a self-contained page to FILE: errors and bits by layer and kind of tensor, the worst "
        "tensors, what is kept and why, sizes.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print no progress, notes or summary; errors and warnings stay.")
]
Summary = Annotated[
    bool | None,
    typer.Option(
        "--summary/--no-summary",
        show_default="a summary on a terminal, above 200 tensors",
        help="Show a line for each role, codec and bit width in place of one for each tensor.",
    ),
]
PRINTING = {"json", "quiet", "summary", "dry_run", "html"}

# The Hub, and how a command runs

Revision = Annotated[
    str | None,
    typer.Option(metavar="REV", show_default="main", help="Branch, tag or commit of the repository on the Hub."),
]
Branch = Annotated[
    str | None,
    typer.Option("--revision", metavar="BRANCH", show_default="main", help="Branch; created if it does not exist."),
]
Token = Annotated[
    str | None,
    typer.Option(
        metavar="TOKEN",
        show_default="HF_TOKEN, or the token saved by hf auth login",
        help="Access token for the Hub.",
    ),
]
Threads = Annotated[int | None, typer.Option(show_default="the number of cores", help="Number of worker threads.")]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS|auto|local",
        help="Have the nodes of a Ray cluster do the work, output file by output file: HOST:PORT of its head node, "
        "auto for the cluster of this machine, local for a new one on it. --threads is then the number of each task. "
        "The output bytes are the same.",
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", help="Replace an earlier result in OUT. Only files listed in its manifest are deleted."
    ),
]
MaxShardSize = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Maximum size of an output file, e.g. 5GB, without its header; a larger tensor has a file of its own.",
    ),
]
MaxExportedSize = Annotated[
    str | None,
    typer.Option(
        "--max-shard-size",
        metavar="SIZE",
        show_default="2GB, for gguf 45GB",
        help="Maximum size of an output file, e.g. 5GB, without its header; a larger tensor has a file of its own.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan without writing anything.")]

# Recipes, and what changes them

Recipe = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        "-r",
        metavar="NAME|FILE",
        show_default="q5",
        help="Name of a built-in recipe, or a YAML file.",
    ),
]
Codec = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default="the recipe's",
        help="Default codec, unless a rule of the recipe gives another.",
    ),
]
Bits = Annotated[
    float | None,
    typer.Option(
        "--bits",
        "-b",
        metavar="BITS",
        show_default="the recipe's",
        help="Default bit width, unless a rule of the recipe gives another; a fraction for codecs with such rates.",
    ),
]
Effort = Annotated[
    int | None,
    typer.Option(
        show_default="the recipe's, else the codec's least, or 64 with --calibrate",
        help="Effort of encoding, for codecs with a choice: a larger one takes longer and has smaller errors at the "
        "same size.",
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        show_default=False,
        help="Keep the tensors whose names match a shell-style PATTERN, e.g. '*.o_proj.*', or those of a role or of "
        "layers, as in role:expert and layers:0-3; before --set, and before the rules of the recipe. Can be repeated.",
    ),
]
SetFormat = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATTERN=FORMAT",
        show_default=False,
        help="Format of the tensors that a PATTERN as for --keep matches: in a master their bits, e.g. '*.mlp.*=6', "
        "else one of those of --format. The first that matches decides, before the rules of the recipe. Can be "
        "repeated.",
    ),
]
TargetSize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Choose the format of each weight so that the files of weights take at most SIZE, e.g. 9GB or 9GiB.",
    ),
]
TargetBpw = Annotated[
    float | None,
    typer.Option(
        metavar="BITS",
        help="Choose the format of each weight so that the mean over the weights that get one is at most BITS, all "
        "overhead counted.",
    ),
]
MaxKl = Annotated[
    float | None,
    typer.Option(
        metavar="NATS",
        help="With --calibrate: make the smallest result whose divergence KL(original || result) is at most NATS per "
        "token, e.g. 0.02, measured on held-out tokens of the sample, or on the text of --eval.",
    ),
]
Eval = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="With --max-kl: measure the divergence on up to 16 windows (4096 tokens) of this text.",
    ),
]
# How a source is read and quantized

Adapter = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FOLDER|ORG/NAME[:WEIGHT]",
        show_default=False,
        help="Merge an adapter of PEFT or mlx-lm (LoRA, DoRA, trained tokens, saved modules) into the source; "
        "repeatable.",
    ),
]
LeaveOut = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        show_default=False,
        help="Leave out the tensors whose name matches a shell-style PATTERN, such as '*.k_scale'; repeatable.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Fail if the error of a tensor is above the limit of its codec, even with signs (a rescue)."
    ),
]
Awq = Annotated[
    str | None,
    typer.Option(
        metavar=SAMPLES,
        help="Scale input channels before quantizing (AWQ), with scales that are searched on a sample of text, given "
        "as for --calibrate.",
    ),
]
AllowPickle = Annotated[
    bool,
    typer.Option("--allow-pickle", help="Also read pickled weights, with torch's restricted weights_only loader."),
]
IncludeFiles = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        show_default=False,
        help="Also copy files of the source that match PATTERN, such as 'data/*'; repeatable. Without it, only what "
        "loading the model needs is copied.",
    ),
]
Lossless = Annotated[
    bool,
    typer.Option(
        "--lossless",
        help="Round nothing: store the source's own numbers, entropy-coded, so that every weight is read back bit for "
        "bit. The source is read twice.",
    ),
]
LowDisk = Annotated[
    bool,
    typer.Option(
        "--low-disk",
        help="For a source on the Hub: keep at most two of its files at a time, and delete each when it is done.",
    ),
]
Calibrate = Annotated[
    str | None,
    typer.Option(
        metavar=SAMPLES,
        help="Calibrate the codes of the trellis codec, layer by layer: on text that the model writes and texts that "
        "come with pqweights (self), on those texts alone (mixture), a FILE, a folder of *.txt, what --save-sample "
        "wrote, or a data set of the Hub. It takes longer, and has much less divergence in the same bytes. With other "
        "codecs and a target, it measures how much each weight matters.",
    ),
]
CalibrationTokens = Annotated[int, typer.Option(help="Number of tokens of the sample.")]
SaveSample = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.safetensors",
        show_default=False,
        help="Also write the tokens of the sample to FILE.safetensors, which --calibrate accepts for other results of "
        "the same model, so that the sample is drawn only once.",
    ),
]
Rate = Annotated[
    str,
    typer.Option(
        metavar="model|tensor",
        help="How a calibration divides the bits: more of them where they matter more (model), or to each weight those "
        "of the recipe (tensor).",
    ),
]

# How a result is made again

From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="SRC",
        show_default=False,
        help="Also make every tensor again from SRC, the source of the result, and compare its hash; nothing is kept.",
    ),
]
StatedSample = Annotated[
    str | None,
    typer.Option(
        "--calibrate",
        metavar=SAMPLES,
        show_default="what the manifest names",
        help="The text on which the result was calibrated, if its manifest has only the digest.",
    ),
]
StatedImatrix = Annotated[
    str | None,
    typer.Option("--imatrix", metavar="FILE", show_default=False, help="The importance matrix of an export."),
]
StatedEval = Annotated[
    str | None,
    typer.Option("--eval", metavar="FILE", show_default=False, help="The text on which --max-kl was measured."),
]
StatedTypes = Annotated[
    str | None,
    typer.Option(
        "--type", metavar="TYPE", show_default="all", help="With several GGUF files: make only those of these types."
    ),
]

# What exports are to fit into

Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Propose targets and formats with which the model fits into SIZE of memory, e.g. 16GB: that of the GPU, "
        "or all of a Mac's.",
    ),
]
Context = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        show_default="the most that the model takes, but not more than 8192",
        help="For --memory: length of the context in tokens, e.g. 32k.",
    ),
]
Runtime = Annotated[
    str | None,
    typer.Option(
        metavar="llama.cpp|mlx|vllm|transformers",
        help="For --memory: propose only what this runtime loads.",
    ),
]

# Exports

Target = Annotated[
    str,
    typer.Option("--target", "-t", metavar="TARGET", help="What to export to, one of the targets above."),
]
Push = Annotated[
    str | None,
    typer.Option(
        "--push",
        metavar="ORG/NAME",
        help="Send each file to a repository on the Hub once it is complete, and remove it here; then the rest, as the "
        "command push does. Files are made one after the other: with --low-disk, the disk holds one of the source and "
        "one of the result at a time, and the source is fetched for each.",
    ),
]
IntegerBits = Annotated[
    str | None,
    typer.Option(
        "--bits",
        "-b",
        metavar="BITS",
        show_default="4",
        help="Bits per code of an integer target; several, separated by commas, as for --format.",
    ),
]
GroupSize = Annotated[
    int | None,
    typer.Option("--group-size", "-g", show_default="128, for mlx 64", help="Weights per scale of an integer target."),
]
Qparams = Annotated[
    str | None,
    typer.Option(
        metavar="best|minmax",
        show_default="best, if the format has a choice",
        help="How to choose scales and offsets: best searches for those with the least error, in which large weights "
        "count more; minmax follows the runtime's own converter.",
    ),
]
Rounding = Annotated[
    str | None,
    typer.Option(
        metavar="plain|gptq|importance",
        show_default="plain; gptq with --calibrate, importance with --imatrix",
        help="How to choose codes: the nearest ones (plain), or, with --calibrate, such that errors within a row "
        "cancel in the outputs (gptq), or with errors weighed by the size of the inputs (importance).",
    ),
]
CalibrateInputs = Annotated[
    str | None,
    typer.Option(
        "--calibrate",
        metavar=SAMPLES,
        help="For --rounding and --target-size: measure the inputs of weights, and how much each weight matters, layer "
        "by layer, on a sample of text: the same choices as in quantize.",
    ),
]
Imatrix = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="Weigh errors by an importance matrix of llama.cpp (imatrix.gguf, or the older imatrix.dat), whatever the "
        "target.",
    ),
]
SaveImatrix = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="With --calibrate: also write the importances as an imatrix.gguf, which llama-quantize takes.",
    ),
]
Packing = Annotated[
    str | None,
    typer.Option(
        metavar="PACKING",
        show_default="tile_packed_to_4d",
        help="For torchao in INT4: the layout of the packed codes.",
    ),
]
Mode = Annotated[
    str | None,
    typer.Option(
        metavar="MODE",
        show_default="affine",
        help="For mlx: affine integers, or one of the float formats of MLX.",
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        show_default="w4a16, q4, int4, q4_k_m",
        help="Format of the weights, of those that the target has: w4a16, w8a16, int8, fp8, nvfp4, mxfp4, ... for "
        "vllm; q2 to q8, mxfp4, mxfp8, nvfp4 or a mix for mlx; int4, int8, int8-dynamic or fp8 for torchao; a type "
        "for gguf. Several, separated by commas, make a folder each in OUT, and read the source once.",
    ),
]
StoredDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="bf16|source",
        show_default="bf16",
        help="For bf16: store all weights as BF16, or each in the dtype that it had in the source.",
    ),
]
GgufType = Annotated[
    str | None,
    typer.Option(
        "--type",
        metavar="TYPE",
        show_default="q4_k_m",
        help="For gguf: a mix or type of llama.cpp, such as q4_k_m, q5_k_m, q6_k, iq4_xs, q8_0 or bf16; several with "
        "commas between them make a file each, and read the source once.",
    ),
]
Pure = Annotated[
    bool,
    typer.Option("--pure", help="For gguf: all matrices in the type of the mix, none of them wider."),
]
WithoutTokenizer = Annotated[
    bool,
    typer.Option(
        "--without-tokenizer",
        help="For gguf: write the file although the model has no tokenizer, for programs that pass token ids to "
        "llama.cpp; llama.cpp's own programs abort at the first text.",
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        show_default="that of its repository, else that of its folder",
        help="For gguf: the name of the model, with which file names begin.",
    ),
]
FormatRecipe = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        "-r",
        metavar="FILE",
        help="YAML FILE that says which format each weight gets, with the keys of recipes.",
    ),
]
# Running models

Tokenizer = Annotated[
    str | None, typer.Option(metavar="DIR", show_default="the model's own", help="Folder of the tokenizer.")
]
Device = Annotated[
    str, typer.Option(metavar="cpu|cuda|auto", help="Device to compute on; auto uses a GPU if there is one.")
]
Dtype = Annotated[
    str, typer.Option(metavar="auto|float32|bfloat16|float16", help="Dtype to compute in; auto is the model's own.")
]

# Generating

Prompt = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        "-p",
        metavar="TEXT",
        show_default="what comes on stdin",
        help="Text to answer or continue.",
    ),
]
NoChat = Annotated[
    bool, typer.Option("--no-chat", help="Continue the prompt as it is, even if the model has a chat template.")
]
MaxTokens = Annotated[int, typer.Option(metavar="N", help="Maximum number of tokens of the text.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        "-t",
        metavar="T",
        show_default="as generation_config.json says",
        help="Choose tokens at random, with logits divided by T; 0 always takes the likeliest.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="N", show_default="random", help="Seed of the random choices."),
]
Packed = Annotated[
    bool | None,
    typer.Option(
        "--packed/--no-packed",
        show_default="packed for scalar codecs on the CPU, where that is faster",
        help="Keep the weights of a master packed in memory.",
    ),
]
KvCache = Annotated[
    str | None,
    typer.Option(
        metavar="SPEC",
        show_default="as the model computes them",
        help="Quantize keys and values: klt, hadamard, polar or polar-rope, with options as in klt:3.",
    ),
]

# Evaluating

Text = Annotated[Path | None, typer.Option(metavar="FILE", help="UTF-8 text to evaluate on.")]
Dataset = Annotated[
    str | None,
    typer.Option(metavar="wikitext", help="Evaluate on the test split of WikiText-2 (raw) instead of --text."),
]
Reference = Annotated[
    str | None,
    typer.Option(
        metavar="SRC",
        help="Model to compare with, token by token: KL divergence, top-1 agreement, change of the perplexity. Or the "
        ".pqref file that --save-reference wrote, which also contains the text.",
    ),
]
SaveReference = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.pqref",
        help="Write the distributions of the reference, or of the only MODEL: for --reference on a machine without the "
        "original. The file contains the text.",
    ),
]
NoRecord = Annotated[
    bool, typer.Option("--no-record", help="Do not write pqweights-eval.json beside masters and exports.")
]
PackedMasters = Annotated[
    bool, typer.Option("--packed", help="Keep the weights packed in memory; every MODEL must be a master.")
]
KvCaches = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-cache",
        metavar="SPEC",
        show_default=False,
        help="Quantize keys and values: klt, hadamard, polar or polar-rope, with options as in hadamard:3. Repeat it "
        "to compare several. Scored tokens are read one by one, as in generation.",
    ),
]
NoBos = Annotated[
    bool,
    typer.Option("--no-bos", help="Do not begin windows with BOS, even if the tokenizer puts it before a text."),
]
Window = Annotated[
    int | None, typer.Option(show_default="2048, or the model's limit if smaller", help="Tokens per window.")
]
Stride = Annotated[
    int | None,
    typer.Option(
        show_default="a quarter of the window, at most 512",
        help="Tokens between the starts of consecutive windows.",
    ),
]
ScoreFirst = Annotated[
    bool, typer.Option("--score-first", help="Score all tokens of the first window, not only its last ones.")
]
TextTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", show_default="all", help="Maximum number of tokens to read from the text."),
]

# Cards and pushes

BaseModel = Annotated[
    str | None,
    typer.Option(
        metavar="ORG/MODEL", help="Original model on the Hub to name in the card, if the manifest names none."
    ),
]
CardRepository = Annotated[
    str | None,
    typer.Option(
        "--repo",
        metavar="ORG/NAME",
        show_default="that of the earlier card",
        help="Repository on the Hub to name in the commands of the card.",
    ),
]
PrintCard = Annotated[bool, typer.Option("--print", help="Print the card without writing it.")]
Private = Annotated[
    bool, typer.Option("--private", help="Create the repository as private; one that exists must be private.")
]
Message = Annotated[str | None, typer.Option("--message", "-m", help="Title of the commit.")]
DryPush = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Show what would be pushed, and change nothing. Without a network or a token, only the folder is checked.",
    ),
]


# The flags of parameters that are not called like them.
FLAGS = {"set_format": "--set"}


def given(context: typer.Context) -> dict[str, Any]:
    """Return what stands on the command line, but for how it is printed, as the function of the API takes it."""
    names = [name for name in context.params if name not in PRINTING and _is_given(context, name)]
    return {name: context.params[name] for name in names} | {"tell": output.note}


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def spelled(values: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    words: list[str] = []
    for name, value in values.items():
        flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
        for one in value if isinstance(value, tuple | list) else (value,):
            text = f"{one:g}" if isinstance(one, float) else str(one)
            words += [flag] if one is True else [flag, shlex.quote(text)]
    return words


def run_continues(source: str, out: str, sample: str | None) -> bool | Path:
    """Whether an interrupted run left something: in its folder or files of a repository, or where it calibrated."""
    from pqweights.calibrate.work_folder import folder_beside
    from pqweights.convert.journal import is_under_way
    from pqweights.errors import PqweightsError
    from pqweights.storage import open_store
    from pqweights.storage.addresses import repository_id

    try:
        store = open_store(out)
        if sample is not None and (work := folder_beside(store)).exists():
            return work
        under_way = is_under_way(store)
    except PqweightsError:  # an address that does not answer, or cannot be one
        under_way = False
    return under_way or repository_id(source) is not None  # files of a repository stay in the Hub's cache


def hub(revision: str | None, token: str | None) -> Options:
    """Return how a command reaches the Hub."""
    from pqweights.common.options import Options

    return Options(revision=revision, token=token, tell=output.note)


def fetched(source: str, hub: Options) -> Fetched:
    """Return a local folder, or a repository on the Hub as a folder in the cache."""
    from pqweights.storage.sources import local_folder

    with output.progress("fetching") as progress:
        return local_folder(source, hub, progress=progress)
