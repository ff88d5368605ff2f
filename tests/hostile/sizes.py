"""Bad inputs: target sizes, and what is measured for them."""

from __future__ import annotations

from hostile.case import Case, Content
from hostile.evaluation import GOOD_MODEL, evaluating

MEASURE = "quantize model out --target-bpw 4.5 --calibrate text.txt"
EXPORT = "export model out --target mlx --calibrate text.txt"


def fitting(name: str, options: str, *fragments: str, recipe: str | None = None) -> Case:
    """An undamaged model with a target, in a recipe or by options, for plan and quantize."""
    files: dict[str, Content] = GOOD_MODEL if recipe is None else GOOD_MODEL | {"recipe.yaml": recipe}
    by = options if recipe is None else f"--recipe recipe.yaml {options}".rstrip()
    return Case(name, {f"plan model {by}": fragments, f"quantize model out {by}": fragments}, files)


def remembering(name: str, options: str, *fragments: str) -> Case:
    """An undamaged model, and options of how much memory there is."""
    return Case(name, {f"plan model {options}": fragments}, GOOD_MODEL)


CASES = [
    fitting("fit-size-no-size", "--target-size 9XB", "'9XB'", "5GiB (2**30)"),
    fitting("fit-size-zero", "--target-size 0", "'0'"),
    fitting("fit-size-beyond-all-files", "--target-size " + "9" * 5000, "at most 2**63"),
    fitting("fit-bits-no-number", "--target-bpw many", "--target-bpw"),
    fitting("fit-bits-and-target", "--target-bpw 4.5 --bits 4", "--bits"),
    fitting(
        "fit-both-targets", "--target-size 15kB --target-bpw 4.5", "give either --target-size or --target-bpw, not both"
    ),
    fitting("fit-bits-nan", "--target-bpw nan", "positive number of bits per weight, found nan"),
    fitting("fit-bits-negative", "--target-bpw -4.5", "positive number of bits per weight, found -4.5"),
    fitting("fit-bits-beyond-numbers", "--target-bpw 1e308", "target: "),
    fitting("fit-bits-below-the-smallest", "--target-bpw 2", "target: ", "2.1250 bits per weight"),
    fitting("fit-bits-of-the-source", "--target-bpw 32", "target: "),
    fitting("fit-size-below-the-smallest", "--target-size 1kB", "target: ", "1000 bytes"),
    fitting("fit-size-above-the-source", "--target-size 1GB", "target: "),
    fitting("fit-recipe-both-targets", "", "recipe.yaml", "not both", recipe="{target_size: 15kB, target_bpw: 4.5}"),
    fitting("fit-recipe-size-no-size", "", "recipe.yaml", "'9 XB'", "5GiB", recipe="target_size: 9 XB"),
    fitting("fit-recipe-size-a-list", "", "recipe.yaml", "target_size", "[5]", recipe="target_size: [5]"),
    fitting("fit-recipe-bits-a-text", "", "recipe.yaml", "target_bpw", "'4.5'", recipe="target_bpw: '4.5'"),
    fitting("fit-recipe-bits-beyond-numbers", "", "recipe.yaml", "target", recipe="target_bpw: " + "9" * 400),
    fitting("fit-recipe-sensitivity", "", "recipe.yaml", "sensitivity", recipe="sensitivity: heuristic"),
    fitting("fit-recipe-with-bits", "--bits 4", "leave --bits out", recipe="target_bpw: 4.5"),
    fitting("fit-recipe-nothing-free", "", "width is free", recipe="{target_bpw: 4.5, rules: [{name: '*', bits: 4}]}"),
    remembering("memory-zero", "--memory 0", "--memory"),
    remembering("memory-no-size", "--memory 16XB", "--memory", "'16XB'", "5GiB (2**30)"),
    remembering("memory-context-negative", "--memory 1GB --context -1", "--context", "such as 8192 or 32k", "'-1'"),
    remembering("memory-context-no-number", "--memory 1GB --context 4kk", "--context", "'4kk'"),
    remembering("memory-context-zero", "--memory 1GB --context 0k", "--context", "'0k'"),
    remembering("memory-context-beyond-numbers", "--memory 1GB --context " + "9" * 20, "--context", "'999"),
    remembering("memory-context-alone", "--context 8k", "--context: expected --memory as well"),
    remembering("memory-runtime-unknown", "--memory 1GB --runtime nope", "--runtime", "llama.cpp or mlx or", "'nope'"),
    remembering("memory-runtime-alone", "--runtime mlx", "--runtime: expected --memory as well"),
    evaluating("measure-model-missing", "nowhere", command=MEASURE.replace("model", "nowhere")),
    evaluating("measure-keep-matches-nothing", "--keep x*: the pattern 'x*'", command=MEASURE + " --keep x*"),
    evaluating("measure-text-missing", "nowhere.txt", "No such file", command=MEASURE.replace("text", "nowhere")),
    evaluating("measure-text-short", "2048 tokens", "found 3", command=MEASURE, text="w1 w2 w3"),
    # What is refused before the text, which is too short, is read.
    evaluating("measure-bits-too-few", "2.1250 bits", command=MEASURE.replace("4.5", "1"), text="w1 w2 w3"),
    evaluating("export-bits-too-few", "8.0228 bits per weight", command=f"{EXPORT} --target-bpw 1", text="w1 w2 w3"),
    evaluating("export-bytes-too-few", "1000 bytes", " bytes", command=f"{EXPORT} --target-size 1kB", text="w1 w2 w3"),
    evaluating("export-bytes-of-the-source", "leaves nothing", command="export model out -t mlx --target-size 1GB"),
    evaluating("export-bits-of-the-source", "leaves nothing", command="export model out -t vllm --target-bpw 16"),
    evaluating("role-of-no-tensor", "role:expert=6: no tensor", command="quantize model out --set role:expert=6"),
    evaluating("export-role-of-no-tensor", "no tensor", command="export model out -t mlx --set role:expert=q6"),
    evaluating(
        "export-bits-and-type", "--target-bpw: chooses", command="export model out -t gguf --target-bpw 5 --type q4_0"
    ),
    evaluating("measure-without-a-target", "trellis", "target", command="quantize model out --calibrate text.txt"),
]
