"""Bad inputs: recipes."""

from __future__ import annotations

from hostile.case import GOOD_SRC, RECIPE, UP, Case, Content


def recipe(name: str, text: Content, *fragments: str) -> Case:
    return Case(name, {RECIPE: ("recipe.yaml", *fragments)}, {**GOOD_SRC, "recipe.yaml": text})


CASES = [
    Case("recipe-name-unknown", {"quantize src out --recipe q55": ("'q55'", "'q5'")}, GOOD_SRC),
    Case("recipe-name-far-from-all", {"quantize src out --recipe gptq": ("'gptq'", "expected q2, q3")}, GOOD_SRC),
    Case("recipe-name-of-a-width", {"quantize src out --recipe q7": ("'q7'", "--recipe q5 --bits 7")}, GOOD_SRC),
    Case(
        "recipe-name-of-a-file",
        {"quantize src out --recipe mine": ("'mine'", "'mine.yaml'", "--recipe mine.yaml")},
        {**GOOD_SRC, "mine.yaml": "bits: 4\n"},
    ),
    Case("recipe-path-missing", {"quantize src out --recipe mine/q5": ("mine/q5", "No such file")}, GOOD_SRC),
    Case("recipe-file-missing", {RECIPE: ("recipe.yaml",)}, GOOD_SRC),
    Case("recipe-a-folder", {RECIPE: ("recipe.yaml",)}, {**GOOD_SRC, "recipe.yaml/a": b""}),
    recipe("recipe-not-yaml", "bits: [", "not YAML"),
    recipe("recipe-not-utf-8", b"name: \xff"),
    recipe("recipe-empty", ""),
    recipe("recipe-a-list", "- bits: 5\n", "keys and values"),
    recipe("recipe-alias-undefined", "rules:\n  - name: *up\n    bits: 6\n", "line 2", "quote", '"*up"'),
    recipe("recipe-of-tabs", "rules:\n\t- keep: true\n"),
    recipe("recipe-with-python", "!!python/object/apply:os.system [touch payload-ran]"),
    recipe("recipe-impossible-date", "name: 2020-13-45\n"),
    recipe("recipe-impossible-number", "bits: !!int five\n"),
    recipe("recipe-nested", "[" * 1500),
    recipe("recipe-key-unknown", "bitz: 5\n", "'bitz'", "'bits'"),
    recipe("recipe-key-a-number", "5: 5\n", "unknown key"),
    recipe("recipe-bits-too-many", "bits: 9\n", "bits", "2 to 8", "9"),
    recipe("recipe-bits-a-string", "bits: five\n", "bits", "five"),
    recipe("recipe-bits-a-boolean", "bits: true\n", "bits"),
    recipe("recipe-bits-a-float", "bits: 5.5\n", "bits", "whole", "5.5"),
    recipe("recipe-effort-a-word", "codec: hadamard-trellis\nbits: 4\neffort: fast\n", "effort", "whole", "'fast'"),
    recipe("recipe-effort-of-a-codec-without", "bits: 4\neffort: 64\n", "effort", "hadamard-trellis has"),
    recipe("recipe-trellis-bits-9", "codec: hadamard-trellis\nbits: 9\n", "bits", "1.5 to 8"),
    recipe("recipe-rules-a-mapping", "rules: {keep: true}\n", "rules"),
    recipe("recipe-rules-a-string", "rules: all\n", "rules"),
    recipe("rule-a-string", "rules: [all]\n", "rule 1"),
    recipe("rule-key-unknown", "rules: [{nome: a, keep: true}]\n", "rule 1", "'nome'", "'name'"),
    recipe("rule-role-unknown", "rules: [{role: atention, bits: 4}]\n", "rule 1", "'atention'", "'attention'"),
    recipe("rule-bits-too-many", "rules: [{name: '*', keep: true}, {name: '*', bits: 16}]\n", "rule 2", "16"),
    recipe("rule-keep-and-bits", "rules: [{name: '*', keep: true, bits: 4}]\n", "rule 1", "more than one"),
    recipe("rule-without-an-action", "rules: [{name: '*'}]\n", "rule 1"),
    recipe("rule-without-a-condition", "rules: [{bits: 4}]\n", "rule 1", "condition"),
    recipe("rule-name-a-number", "rules: [{name: 5, bits: 4}]\n", "rule 1", "name"),
    recipe("rule-layers-backwards", "rules: [{layers: [3-0], bits: 4}]\n", "rule 1", "layers", "'0-3'", "3-0"),
    recipe("rule-sizes-backwards", "rules: [{min_weights: 5, max_weights: 4, bits: 4}]\n", "rule 1", "max_weights 4"),
    recipe("recipe-key-twice", "bits: 4\nname: a\nbits: 5\n", "line 3", "'bits'"),
    recipe("rule-dims-a-string", "rules: [{dims: two, bits: 4}]\n", "rule 1", "dims"),
    Case(
        "recipe-codec-unknown",
        {RECIPE: ("'hadamard'", "'hadamard-trellis'")},
        {**GOOD_SRC, "recipe.yaml": "codec: hadamard\n"},
    ),
    recipe("recipe-codec-far-from-all", "codec: gptq\n", "'gptq'", "expected hadamard-lloyd-max, hadamard-trellis"),
    recipe("rule-role-far-from-all", "rules: [{role: wombat, bits: 4}]\n", "'wombat'", "expected attention, mlp"),
    recipe("recipe-key-far-from-all", "wombat: 4\n", "'wombat'", "expected name, description"),
    Case(
        "rule-matches-nothing-near",
        {RECIPE: ("rule 1", "'xyz'", "the first of its 2 tensors")},
        {**GOOD_SRC, "recipe.yaml": "rules: [{name: xyz, bits: 4}]\n"},
    ),
    Case(
        "set-matches-nothing",
        {
            "plan src --set *.mlp.up_porj.weight=6": ("--set", UP),
            "plan src --keep *.mlp.up_porj.weight": ("--keep", UP),
        },
        GOOD_SRC,
    ),
    Case(
        "set-malformed",
        {
            "plan src --set model.norm.weight": ("--set", "PATTERN=FORMAT"),
            "plan src --set *=four": ("PATTERN=BITS",),
            "plan src --set =4": ("PATTERN=FORMAT",),
            "plan src --set *=9": ("--set *=9", "2 to 8"),
        },
        GOOD_SRC,
    ),
    Case(
        "rule-matches-nothing",
        {RECIPE: ("rule 1", "'model.layers.*.mlp.up_porj.weight'", UP)},
        {**GOOD_SRC, "recipe.yaml": "rules: [{name: model.layers.*.mlp.up_porj.weight, bits: 4}]\n"},
    ),
]
