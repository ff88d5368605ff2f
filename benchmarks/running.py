"""Running a master without decoding it: the kernels, whole models, and llama.cpp, beside the BF16 original.

    python benchmarks/running.py --llama-cpp PYTHON

Kernels: F.linear with a packed weight beside F.linear with a BF16 weight, 14336 x 4096. Both take turns over several
weights, so that no cache holds them, and over several inputs, so that every product prepares its own.
Models: each run is a fresh process that reads from the page cache; the ways take turns. It loads, makes a token, makes
TOKENS tokens greedily from a prompt of one token (batch 1, after 8 to warm up), and then one token after a prompt of
512, of which the faster of two runs counts. Memory is VmHWM: all resident memory, mapped files included.
llama.cpp (running_llama.py) does the same on the same weights, if --llama-cpp names a Python with llama-cpp-python and
gguf; by default this one, if it has them.
Ratios are medians of the ratios of turns that followed each other.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import (
    PQWEIGHTS,
    Cell,
    Document,
    argument_parser,
    gigabytes,
    machine,
    make_source,
    memory,
    now,
    publish,
    run_command,
    silence_torchao,
    table,
    usable_cores,
    version,
)
from running_llama import FILE_TYPES

SHAPE = (14336, 4096)
# Weights and inputs that a kernel is timed on in turn.
KERNEL_WEIGHTS, KERNEL_INPUTS = 4, 7
WIDTHS, MODEL_WIDTHS = range(2, 9), (4, 5)
ROWS = (1, 2, 4, 8, 16, 32, 64)
BF16 = "BF16, transformers"
LLAMA = str(Path(__file__).with_name("running_llama.py"))
# Name -> the sizes of the checkpoint and of its embedding, whose rows are a multiple of 64, as llama.cpp likes them.
MODELS = {"small": ("800MB", "64MiB"), "large": ("3300MB", "256MiB")}


# --- kernels, in a process for each number of threads ---


def kernel_child(threads: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each bit width and number of rows of inputs."""
    import numpy as np
    import torch

    torch.set_num_threads(threads)
    chance = np.random.default_rng(0)
    plain = [gaussian(chance, *SHAPE) for _ in range(KERNEL_WEIGHTS)]
    result = []
    with torch.inference_mode():
        for bits in WIDTHS:
            packed = [random_packed(chance, bits) for _ in range(KERNEL_WEIGHTS)]
            check(packed[0], gaussian(chance, 3, SHAPE[1]))
            for rows in ROWS if bits in MODEL_WIDTHS else ROWS[:1]:
                inputs = [gaussian(chance, rows, SHAPE[1]) for _ in range(KERNEL_INPUTS)]
                times = kernel_times(packed, plain, inputs, rounds)
                result.append({"bits": bits, "threads": threads, "rows": rows, **times})
    return result


def gaussian(chance: Any, rows: int, columns: int) -> Any:
    """A BF16 tensor."""
    import numpy as np
    import torch

    values = chance.standard_normal((rows, columns), dtype=np.float32)
    return placed((values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)).view(torch.bfloat16)


def placed(values: Any) -> Any:
    """A tensor of its own: plain and packed weights then are aligned alike, and have pages of the same size."""
    import torch

    from pqweights.kernels.workers import pageable

    result = torch.from_numpy(pageable(values.nbytes).view(values.dtype).reshape(values.shape))
    return result.copy_(torch.from_numpy(values))


def random_packed(chance: Any, bits: int) -> Any:
    """A packed weight of random codes, all norms 1."""
    import numpy as np
    import torch

    from pqweights.formats import DEFAULT_CODEC, get_codec
    from pqweights.kernels import BLOCK_SIZE
    from pqweights.runtime.loading.packed import PackedTensor
    from pqweights.runtime.loading.packed_rows import Factor, PackedRows

    rows, columns = SHAPE
    blocks = rows * columns // BLOCK_SIZE
    codes = chance.integers(0, 256, (blocks, BLOCK_SIZE * bits // 8), dtype=np.uint8)
    norms = np.ones((blocks, 1), dtype=np.float16).view(np.uint8)
    matrix = PackedRows(
        place="random codes",
        weights=rows * columns,
        rows=rows,
        columns=columns,
        format=get_codec(DEFAULT_CODEC).at(bits),
        parts=(placed(codes), placed(norms)),
        offset=0,
        first_block=0,
        awq=None,
        factor=Factor(),
    )
    return PackedTensor(((matrix,),), False, torch.bfloat16)


def check(packed: Any, x: Any) -> None:
    """Stop if the product is not that of the decoded weight, within the rounding of BF16."""
    import torch

    exact = torch.nn.functional.linear(x.float(), packed.decode().float())
    error = (torch.nn.functional.linear(x, packed).float() - exact).norm() / exact.norm()
    if not error < 0.01:
        raise SystemExit(f"error: the product of {packed} differs by {error:.3g} from that of the decoded weight")


def kernel_times(packed: list[Any], plain: list[Any], inputs: list[Any], rounds: int) -> dict[str, Any]:
    """Times of the products with packed and plain weights, which take turns; one round is for warming up."""
    from torch.nn.functional import linear

    times: dict[str, list[float]] = {"packed": [], "bf16": []}
    turn = 0
    for round_number in range(rounds + 1):
        for pair in zip(packed, plain, strict=True):
            for name, weight in zip(times, pair, strict=True):
                x, turn = inputs[turn % len(inputs)], turn + 1
                begin = time.perf_counter()
                linear(x, weight)
                if round_number:
                    times[name].append(time.perf_counter() - begin)
    ratios = [theirs / ours for ours, theirs in zip(times["packed"], times["bf16"], strict=True)]
    return {
        **{f"{name}_seconds": statistics.median(values) for name, values in times.items()},
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
    }


def measure_kernels(threads: list[int], rounds: int) -> list[dict]:
    """The rows of all numbers of threads."""
    return [row for count in threads for row in run_json([sys.executable, __file__, "--child-kernel", count, rounds])]


# --- models, in a process for each run ---


def model_child(folder: str, *, packed: bool, tokens: int, prompt: int, threads: int) -> dict[str, Any]:
    """Load and generate; this is what a process of its own does, and running_llama.run for llama.cpp."""
    silence_torchao()
    import torch
    import transformers
    from transformers.models.llama import modeling_llama  # noqa: F401  # what a first load imports is not loading

    import pqweights

    transformers.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    imported, start = memory(), time.perf_counter()
    if packed:
        model = pqweights.load_model(folder, packed=True)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    loaded = time.perf_counter() - start
    generation_seconds(model, 1, 1)
    first = time.perf_counter() - start
    generation_seconds(model, 1, 8)
    seconds = generation_seconds(model, 1, tokens)
    generated = memory()
    prompts = [generation_seconds(model, prompt, 1) for _ in range(2)]
    return {
        "seconds": loaded,
        "first_token_seconds": first,
        "tokens_per_second": tokens / seconds,
        "prompt_seconds": prompts,
        "imported_bytes": imported["VmHWM"],
        "generated_peak_bytes": generated["VmHWM"],
        "peak_bytes": memory()["VmHWM"],
        "anonymous_bytes": memory()["RssAnon"],
        "weights": sum(p.numel() for p in model.parameters()),
        "threads": torch.get_num_threads(),
    }


def generation_seconds(model: Any, prompt: int, count: int) -> float:
    """How long it takes to make that many tokens, greedily, after a prompt of that many."""
    import torch

    ids = 1 + torch.arange(prompt)[None] % 1000
    begin = time.perf_counter()
    model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return time.perf_counter() - begin


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of running a model.

    name: what tables call it
    path: the folder or the file that it reads
    files: those of them that hold weights
    command: what runs it in a process of its own
    """

    name: str
    path: Path
    files: tuple[Path, ...]
    command: list[Any]


def make_ways(work: Path, sizes: tuple[str, str], llama: str | None, options: Any) -> list[Way]:
    """Make a checkpoint, its masters, and the files of llama.cpp."""
    make_source(work / "source", *sizes, "--no-head")
    settings = [options.tokens, options.prompt, options.threads[-1]]

    def ours(name: str, folder: Path, packed: bool) -> Way:
        command = [sys.executable, __file__, "--child-model", folder, int(packed), *settings]
        return Way(name=name, path=folder, files=tuple(folder.glob("*.safetensors")), command=command)

    result = [ours(BF16, work / "source", False)]
    for bits in MODEL_WIDTHS:
        master = work / f"{bits}"
        run_command([*PQWEIGHTS, "quantize", str(work / "source"), str(master), "--bits", str(bits)])
        result.append(ours(f"master, {bits} bits, packed", master, True))
    if llama is not None:
        whole = work / "BF16.gguf"
        run_command([llama, LLAMA, "convert", str(work / "source"), str(whole)])
        for kind in ("BF16", *FILE_TYPES):
            file = work / f"{kind}.gguf"
            if file != whole:
                run_command([llama, LLAMA, "quantize", str(whole), str(file), kind])
            command = [llama, LLAMA, "run", file, *settings]
            result.append(Way(name=f"llama.cpp {kind}", path=file, files=(file,), command=command))
    return result


def run_json(command: list[Any]) -> Any:
    """The JSON that a process prints last."""
    done = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


def read_seconds(files: tuple[Path, ...], fresh: bool) -> float:
    """How long it takes to read files from the page cache, into a buffer of 4 MiB or into fresh memory."""
    start, room = time.perf_counter(), bytearray(1 << 22)
    for file in files:
        with open(file, "rb", buffering=0) as stream:
            if fresh:
                room = bytearray(file.stat().st_size)
            left = memoryview(room)
            while count := stream.readinto(left):
                left = left[count:] if fresh else left
    return time.perf_counter() - start


MEDIANS = (
    "read_seconds",
    "fresh_read_seconds",
    "seconds",
    "first_token_seconds",
    "tokens_per_second",
    "prompt_seconds",
)
LARGEST = ("imported_bytes", "generated_peak_bytes", "peak_bytes", "anonymous_bytes", "weights", "threads")


def measure_model(ways: list[Way], rounds: int) -> list[dict]:
    """A row for each way; ratios are to BF16 in the same round."""
    found: dict[str, list[dict]] = {way.name: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            read_seconds(way.files, fresh=False)  # into the page cache
            reading = {"read_seconds": read_seconds(way.files, fresh=False)}
            reading["fresh_read_seconds"] = read_seconds(way.files, fresh=True)
            run = run_json(way.command)
            found[way.name].append({**run, **reading, "prompt_seconds": min(run["prompt_seconds"])})
    return [
        {
            "way": way.name,
            "bytes": sum(file.stat().st_size for file in way.files),
            **{field: statistics.median(run[field] for run in found[way.name]) for field in MEDIANS},
            **{field: max(run[field] for run in found[way.name]) for field in LARGEST},
            "tokens_ratio": ratio(found, way.name, lambda run: run["tokens_per_second"]),
            "prompt_ratio": ratio(found, way.name, lambda run: 1 / run["prompt_seconds"]),
            "loading_of_reading": statistics.median(run["seconds"] / run["read_seconds"] for run in found[way.name]),
            "tokens_per_second_runs": [run["tokens_per_second"] for run in found[way.name]],
            **{
                field: value for field, value in found[way.name][0].items() if field in ("version", "system", "buffers")
            },
        }
        for way in ways
    ]


def ratio(found: dict[str, list[dict]], name: str, rate: Callable[[dict], float]) -> float:
    """The median ratio of a rate to that of BF16 in the same round."""
    pairs = zip(found[name], found[BF16], strict=True)
    return statistics.median(rate(run) / rate(reference) for run, reference in pairs)


def measure_models(options: Any) -> list[dict]:
    """The rows of all models."""
    rows, llama = [], options.llama_cpp or own_llama()
    if llama is None:
        print("llama.cpp is left out: give --llama-cpp PYTHON, one with llama-cpp-python and gguf", file=sys.stderr)
    for name in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder) as work:
            ways = make_ways(Path(work), MODELS[name], llama, options)
            rows += [{"model": name, **row} for row in measure_model(ways, options.rounds)]
    return rows


def own_llama() -> str | None:
    """This Python, if it has llama.cpp."""
    return sys.executable if all(map(importlib.util.find_spec, ("llama_cpp", "gguf"))) else None


# --- tables ---


def kernel_table(kernels: list[Document]) -> str:
    """The speed beside BF16, by rows of inputs; 1 row is what a token takes."""
    found = {(row["rows"], row["bits"], row["threads"]): row for row in kernels}
    columns = sorted({(row["bits"], row["threads"]) for row in kernels})
    lines: list[list[Cell]] = []
    for bits, threads in columns:
        one = found[1, bits, threads]
        low, high = one["ratio_quartiles"]
        rate = f"{SHAPE[0] * SHAPE[1] / one['packed_seconds'] / 1e9:.1f}"
        more = [found.get((rows, bits, threads)) for rows in ROWS[1:]]
        ratios = [None if row is None else f"{row['ratio']:.2f}" for row in more]
        lines.append([bits, threads, rate, f"{one['ratio']:.2f} ({low:.2f} to {high:.2f})", *ratios])
    header = ["bits", "threads", "1 row, G weights/s", "1 row, of BF16 (quartiles)"]
    return table([*header, *(f"{rows} rows" for rows in ROWS[1:])], lines)


MODEL_HEADER = (
    "weights",
    "way",
    "bits per weight",
    "tokens/s (slowest to fastest)",
    "of BF16",
    "prompt, s",
    "loading, s",
    "until a token, s",
    "file",
    "peak memory",
    "peak less file and imports",
)


def model_row(row: Document) -> list[Cell]:
    """A line of the table of models."""
    runs, file, peak = row["tokens_per_second_runs"], row["bytes"], row["peak_bytes"]
    return [
        f"{row['weights'] / 1e9:.2f} G",
        row["way"],
        f"{file * 8 / row['weights']:.2f}",
        f"{row['tokens_per_second']:.2f} ({min(runs):.2f} to {max(runs):.2f})",
        f"{row['tokens_ratio']:.2f}",
        f"{row['prompt_seconds']:.2f}",
        f"{row['seconds']:.2f}",
        f"{row['first_token_seconds']:.2f}",
        *map(gigabytes, (file, peak, peak - file - row["imported_bytes"])),
    ]


def llama_line(rows: list[Document]) -> str:
    """Which llama.cpp took part, and what its build makes use of."""
    for row in rows:
        if "system" in row:
            used = row["system"].replace(" = 1", "").removeprefix("CPU : ").strip(" |").replace(" |", ",")
            return f"llama.cpp is that of llama-cpp-python {row['version']} with {used}."
    return "llama.cpp was not at hand."


def sections(document: Document) -> dict[str, str]:
    """The tables, in Markdown."""
    settings, kernels, models = document["settings"], document["kernels"], document["models"]
    shape = (
        f"{SHAPE[0]} x {SHAPE[1]} weights, BF16 inputs; medians of {settings['kernel_rounds']} rounds over "
        f"{KERNEL_WEIGHTS} weights."
    )
    about = (
        f"Synthetic Llamas, BF16 activations, {models[0]['threads']} threads, batch 1; {settings['tokens']} tokens, a "
        f"prompt of {settings['prompt']}; medians of {settings['rounds']} processes. {llama_line(models)}"
    )
    return {
        "running-kernels": f"{shape}\n\n{kernel_table(kernels)}",
        "running-models": f"{about}\n\n" + table(MODEL_HEADER, [model_row(row) for row in models]),
    }


def child(arguments: list[str]) -> Any:
    """What a process of its own measures."""
    kind, *rest = arguments
    if kind == "--child-kernel":
        return kernel_child(*map(int, rest))
    folder, packed, *numbers = rest
    tokens, prompt, threads = map(int, numbers)
    return model_child(folder, packed=packed == "1", tokens=tokens, prompt=prompt, threads=threads)


def main() -> None:
    if sys.argv[1:] and sys.argv[1].startswith("--child"):
        print(json.dumps(child(sys.argv[1:])))
        return
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where models are made; by default a temporary folder")
    parser.add_argument(
        "--llama-cpp", help="a Python with llama-cpp-python and gguf; by default this one, if it has them"
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--threads", nargs="+", type=int, default=sorted({1, usable_cores()}), help="models take the last"
    )
    parser.add_argument("--kernel-rounds", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=5, help="processes for each way of running a model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    options = parser.parse_args()
    start = now()
    kernels = measure_kernels(options.threads, options.kernel_rounds)
    models = measure_models(options)
    about = machine(start)
    about["versions"] |= {name: version(name) for name in ("transformers", "safetensors")}
    settings = {name: getattr(options, name) for name in ("threads", "kernel_rounds", "rounds", "tokens", "prompt")}
    document = {"machine": about, "settings": settings, "kernels": kernels, "models": models}
    publish("running", document, sections(document), options, ("q4", "q5"))


if __name__ == "__main__":
    main()
