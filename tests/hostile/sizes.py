"""Bad inputs: target sizes, and files of sensitivities."""

from __future__ import annotations

from typing import Any

from hostile.case import Case, Content
from hostile.evaluation import GOOD_MODEL, evaluating, of_broken_models
from hostile.exports import TEXT

FIT = "plan model --target-size 15kB"
BY_FILE = FIT + " --sensitivity s.json"
MEASURE = "sensitivity model s.json"
SENSITIVITIES: dict[str, Any] = {
    "pqweights_sensitivity": 1,
    "checkpoint": "0" * 64,
    "method": {"kind": "random tokens", "tokens": 16},
    "groups": [{"name": "lm_head", "alpha": 0.5, "points": [[0.01, 0.005]], "weights": ["lm_head.weight"]}],
}


def fitting(name: str, options: str, *fragments: str, recipe: str | None = None) -> Case:
    """An undamaged model with a target, in a recipe or by options, for plan and quantize."""
    files: dict[str, Content] = GOOD_MODEL if recipe is None else GOOD_MODEL | {"recipe.yaml": recipe}
    by = options if recipe is None else f"--recipe recipe.yaml {options}".rstrip()
    return Case(name, {f"plan model {by}": fragments, f"quantize model out {by}": fragments}, files)


def remembering(name: str, options: str, *fragments: str) -> Case:
    """An undamaged model, and options of how much memory there is."""
    return Case(name, {f"plan model {options}": fragments}, GOOD_MODEL)


def by_file(name: str, *fragments: str, content: Content | None = None, **changed: Any) -> Case:
    """A damaged file of sensitivities. changed: keys of the file, or of its only group."""
    group = SENSITIVITIES["groups"][0] | {key: value for key, value in changed.items() if key not in SENSITIVITIES}
    whole = SENSITIVITIES | {"groups": [group]} | {key: value for key, value in changed.items() if key in SENSITIVITIES}
    return Case(name, {BY_FILE: ("s.json", *fragments)}, GOOD_MODEL | {"s.json": whole if content is None else content})


CASES = [
    fitting("fit-size-no-size", "--target-size 9XB", "'9XB'", "5GiB (2**30)"),
    fitting("fit-size-zero", "--target-size 0", "at least one byte"),
    fitting("fit-size-beyond-all-files", "--target-size " + "9" * 5000, "at most 2**63"),
    fitting("fit-bits-no-number", "--target-bpw many", "--target-bpw"),
    fitting("fit-bits-and-target", "--target-bpw 4.5 --bits 4", "which chooses the bit widths"),
    fitting(
        "fit-both-targets", "--target-size 15kB --target-bpw 4.5", "give either --target-size or --target-bpw, not both"
    ),
    fitting("fit-bits-nan", "--target-bpw nan", "positive number of bits per weight, found nan"),
    fitting("fit-bits-negative", "--target-bpw -4.5", "positive number of bits per weight, found -4.5"),
    fitting("fit-bits-beyond-numbers", "--target-bpw 1e308", "leaves nothing to quantize", "expected less than"),
    fitting("fit-bits-below-the-smallest", "--target-bpw 2", "below the smallest possible", "2.1250 bits per weight"),
    fitting("fit-bits-of-the-source", "--target-bpw 32", "leaves nothing to quantize", "expected less than"),
    fitting("fit-size-below-the-smallest", "--target-size 1kB", "1000 bytes: below the smallest possible"),
    fitting("fit-size-above-the-source", "--target-size 1GB", "leaves nothing to quantize", "expected less than"),
    fitting(
        "fit-sensitivity-without-target", "--sensitivity heuristic", "--sensitivity needs --target-size or --target-bpw"
    ),
    fitting("fit-recipe-both-targets", "", "recipe.yaml", "not both", recipe="{target_size: 15kB, target_bpw: 4.5}"),
    fitting("fit-recipe-size-no-size", "", "recipe.yaml", "'9 XB'", "5GiB", recipe="target_size: 9 XB"),
    fitting("fit-recipe-size-a-list", "", "recipe.yaml", "target_size", "[5]", recipe="target_size: [5]"),
    fitting("fit-recipe-bits-a-text", "", "recipe.yaml", "target_bpw", "'4.5'", recipe="target_bpw: '4.5'"),
    fitting("fit-recipe-bits-beyond-numbers", "", "recipe.yaml", "target", recipe="target_bpw: " + "9" * 400),
    fitting("fit-recipe-sensitivity-alone", "", "recipe.yaml", "sensitivity", recipe="sensitivity: heuristic"),
    fitting("fit-recipe-with-bits", "--bits 4", "leave --bits out", recipe="target_bpw: 4.5"),
    fitting("fit-recipe-nothing-free", "", "width is free", recipe="{target_bpw: 4.5, rules: [{name: '*', bits: 4}]}"),
    remembering("memory-zero", "--memory 0", "--memory", "at least one byte"),
    remembering("memory-no-size", "--memory 16XB", "--memory", "'16XB'", "5GiB (2**30)"),
    remembering("memory-context-negative", "--memory 1GB --context -1", "--context", "such as 8192 or 32k", "'-1'"),
    remembering("memory-context-no-number", "--memory 1GB --context 4kk", "--context", "'4kk'"),
    remembering("memory-context-zero", "--memory 1GB --context 0k", "--context", "'0k'"),
    remembering("memory-context-beyond-numbers", "--memory 1GB --context " + "9" * 20, "--context", "'999"),
    remembering("memory-context-alone", "--context 8k", "--context: expected --memory as well"),
    remembering("memory-runtime-unknown", "--memory 1GB --runtime nope", "--runtime", "llama.cpp or mlx or", "'nope'"),
    remembering("memory-runtime-alone", "--runtime mlx", "--runtime: expected --memory as well"),
    by_file("fit-sensitivity-of-another-model", "sensitivities of this checkpoint", "pqweights sensitivity"),
    fitting(
        "fit-sensitivity-missing", "--target-bpw 4.5 --sensitivity nowhere", "nowhere", "No such file", "'heuristic'"
    ),
    fitting("fit-sensitivity-a-folder", "--target-bpw 4.5 --sensitivity model", "model", "Is a directory"),
    by_file("fit-sensitivity-not-json", "expected JSON", content=b"{"),
    by_file("fit-sensitivity-deep", "levels of nesting", content=b"[" * 200_000),
    by_file("fit-sensitivity-something-else", "a file that pqweights sensitivity wrote", content={"groups": []}),
    by_file("fit-sensitivity-newer", "pqweights_sensitivity 1", pqweights_sensitivity=2),
    by_file("fit-sensitivity-without-groups", "groups: expected a list of length >= 1, found []", groups=[]),
    by_file("fit-sensitivity-a-group-of-nothing", "groups[0]: expected keys and values, found 5", groups=[5]),
    by_file("fit-sensitivity-method-unknown", "half of a surrogate pair", method={"kind": "\ud800"}),
    by_file("fit-sensitivity-weights-a-text", "weights: expected a list, found 'lm'", weights="lm"),
    by_file("fit-sensitivity-weight-twice", "is there twice", weights=["lm_head.weight"] * 2),
    by_file("fit-sensitivity-alpha-nan", "NaN is not a number of JSON", alpha=float("nan")),
    by_file("fit-sensitivity-alpha-negative", "alpha: expected a number >= 0.0, found -1", alpha=-1),
    by_file("fit-sensitivity-alpha-beyond-numbers", "alpha: number out of range", alpha=10**400),
    *of_broken_models("sensitivity", MEASURE + " --text text.txt"),
    evaluating("sensitivity-model-missing", "nowhere", command="sensitivity nowhere s.json"),
    evaluating(
        "sensitivity-output-in-no-folder", "nowhere", "make it first", command="sensitivity model nowhere/s.json"
    ),
    evaluating("sensitivity-output-there", TEXT, "--overwrite", command="sensitivity model text.txt"),
    evaluating("sensitivity-output-a-folder", "model", "found a folder", command="sensitivity model model --overwrite"),
    evaluating("sensitivity-recipe-unknown", "'q55'", "'q5'", command=MEASURE + " --recipe q55"),
    evaluating("sensitivity-keep-matches-nothing", "--keep: the pattern 'x*'", command=MEASURE + " --keep x*"),
    evaluating(
        "calibrate-set-matches-nothing",
        "--set: the pattern 'x*'",
        command="calibrate model s.safetensors --text text.txt --set x*=4",
    ),
    evaluating("sensitivity-text-missing", "nowhere.txt", "No such file", command=MEASURE + " --text nowhere.txt"),
    evaluating(
        "sensitivity-text-short", "2048 tokens", "found 3", command=MEASURE + " --text text.txt", text="w1 w2 w3"
    ),
]
