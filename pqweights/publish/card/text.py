"""The prose of a card: what a result is, how to load it, its recipe, the method, files and hashes.

A manifest promises no types for what it says of a recipe, so all of that is taken as text, and escaped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pqweights.checkpoint.names import EVALUATION_FILE, MANIFEST_FILE
from pqweights.checkpoint.storage import Origin
from pqweights.common.markdown import code, fenced, table, words
from pqweights.common.options import IMATRIX, Options
from pqweights.common.units import counted, size_text
from pqweights.convert.manifest import Manifest, manifest_beside, shards_of
from pqweights.convert.records import figures_by_type
from pqweights.formats import MASTER_CODECS
from pqweights.planning.layout import INTEGER
from pqweights.planning.recipe import load_recipe, recipe_names
from pqweights.publish.card.figures import is_lossless
from pqweights.results.inspect import Inspection
from pqweights.storage.addresses import is_repository_id
from pqweights.targets import EXPORTS, target_name
from pqweights.targets.loading import LoadableModel, by_pqweights, from_pretrained, shell
from pqweights.targets.target import ExportTarget

HUB = "https://huggingface.co"
# The papers on what was done before and beside coding, by what says in the manifest that it was done.
PAPERS = {
    "fit": "Malinovskii et al., *HIGGS*, [arXiv:2411.17525](https://arxiv.org/abs/2411.17525): bit widths for a size.",
    "awq": "Lin et al., *AWQ*, [arXiv:2306.00978](https://arxiv.org/abs/2306.00978): the scales of input channels.",
    "gptq": "Frantar et al., *GPTQ*, [arXiv:2210.17323](https://arxiv.org/abs/2210.17323): rounding that compensates.",
}
# How integers were rounded, by --qparams.
ROUNDING = {
    "best": ", with the parameters of least squared error for each group",
    "minmax": ", by the rule of the runtime's own converter",
}


def as_text(value: Any) -> str:
    """Return a value if it is a string, an empty string for None, and its JSON for anything else."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def opening(inspection: Inspection, base_model: str | None) -> list[str]:
    """Return paragraphs that say what the result is, what it was made from, and how large it is."""
    manifest = inspection.manifest
    made = "packed without loss" if is_lossless(manifest) else "that are quantized once"
    what = f"This is a *master*: weights {made} and then exported to the formats that runtimes load."
    if manifest.kind != "master":
        options = {name: value for name, value in manifest.made_by.items() if name in Options.__dataclass_fields__}
        options = {name: value.get("kind") if isinstance(value, dict) else value for name, value in options.items()}
        shown = [
            f", {name.replace('_', ' ')} {code(as_text(value))}" for name, value in options.items() if value is not None
        ]
        target = code(target_name(manifest.made_by["target"]) or "")
        if figures_by_type(manifest.made_by, manifest.pairs, shards_of(manifest)):  # they are in the table of types
            shown = []
        what = f"This is an export for the target {target}{''.join(shown)}."
    return [f"{what} {_origin(manifest, base_model)}{_adapters(manifest)}", _sizes(inspection)]


def _sizes(inspection: Inspection) -> str:
    totals = inspection.totals
    if types := figures_by_type(inspection.made_by, inspection.manifest.pairs, shards_of(inspection.manifest)):
        what = "a folder of each of {} formats" if inspection.manifest.folders else "a file of each of {} types"
        return (
            f"There is {what.format(len(types))}; together they take {size_text(totals.output_bytes or 0)}. "
            f"The source takes {size_text(totals.source_bytes or 0)}."
        )
    before, after = totals.source_bytes, totals.output_bytes
    sizes = f"The weight files take {size_text(after)}"
    if before and after:
        source = "master that it was made from" if inspection.manifest.is_of_master else "source"
        more = (
            f"{before / after:.2f} times smaller than" if before > after else f"{after / before:.2f} times the size of"
        )
        sizes += f" and are {more} those of the {source}, which take {size_text(before)}"
    if totals.bits_per_weight is None:
        return f"{sizes}."
    made = "packed" if is_lossless(inspection.manifest) else "quantized"
    return (
        f"**{totals.bits_per_weight:.4f} bits per weight**, counting everything that is stored for them, over the "
        f"{totals.coverage:.4%} of {totals.weights} weights that are {made}; {totals.bits_per_parameter:.4f} over "
        f"all of them, counting the headers of the files. {sizes}."
    )


def _adapters(manifest: Manifest) -> str:
    """Return a sentence about the adapters that were merged; empty if there are none."""
    merged = []
    for stated in manifest.made_by.get("adapters", []):
        name = _at(Origin(stated["id"], stated["revision"])) if "id" in stated else "a local adapter"
        share = "" if stated["weight"] == 1 else f", multiplied by {stated['weight']:g}"
        merged.append(f"{name} (fingerprint {code(stated['fingerprint'])}{share})")
    return f" Merged into it: {', '.join(merged)}." if merged else ""


def _origin(manifest: Manifest, base_model: str | None) -> str:
    model, revision = manifest.model.get("id"), manifest.model.get("revision")
    if isinstance(model, str) and is_repository_id(model, namespace=False):
        base = f"The base model is {_link(model)}" + ("." if revision is None else f" at commit {code(revision)}.")
        if manifest.origin is None or not manifest.is_of_master:
            return base
        return f"{base} The master that it was made from is {_at(manifest.origin)}."
    source = "master" if manifest.is_of_master else "checkpoint"
    where = f"a local {source}" if manifest.origin is None else f"the {source} {_at(manifest.origin)}"
    made = f"It was made from {where} (fingerprint {code(manifest.source_fingerprint)})."
    if base_model is None:
        return made
    return f"{made} The author of this card names {_link(base_model)} as the base model; the manifest names none."


def _at(origin: Origin) -> str:
    shown = _link(origin.id) if is_repository_id(origin.id) else code(origin.id)
    return f"{shown} at commit {code(origin.revision)}"


def _link(repository: str) -> str:
    return f"[{repository}]({HUB}/{repository})"


PACKED = "packed=True keeps them packed in memory (inference only)"


def loading(target: ExportTarget | None, manifest: Manifest, model: LoadableModel) -> list[str]:
    """Return the paragraphs and code blocks of the section on loading. target: None for a master"""
    branch = [] if model.branch is None else [f"It is on the branch {code(model.branch)}, which the commands name."]
    if target is not None and (results := manifest.made_by.get("results")):
        return branch + _load_one_of(target, results, model)
    if target is not None:
        return branch + target.load_section(manifest.made_by, model)
    return branch + _load_master(model, "" if is_lossless(manifest) else PACKED)


def _load_one_of(target: ExportTarget, results: Mapping[str, Mapping[str, Any]], model: LoadableModel) -> list[str]:
    """Return how to load one of several formats, each of which is a folder. results: their options"""
    first, where, fetch = next(iter(results)), model.location, []
    if is_repository_id(where):
        where = where.rpartition("/")[2]
        fetch = [shell(f"hf download {model.quoted}{model.revision_option} --include '{first}/*' --local-dir {where}")]
    one = replace(model, location=f"{where}/{first}", branch=None)
    listed = ", ".join(code(folder) for folder in results)
    return [
        f"Each of the folders {listed} is a model of its own, in that format. For {code(first)}:",
        *fetch,
        *target.load_section({"target": target.name, **results[first]}, one),
    ]


def _load_master(model: LoadableModel, comment: str) -> list[str]:
    parts = ["config.json names no model type, so only pqweights can read this folder."]
    if model.opens:
        parts = [
            "With pqweights, which decodes the weights while it loads them:",
            shell("pip install 'pqweights[transformers]'"),
            by_pqweights(model, comment=comment),
        ]
        if model.auto_class:
            parts += [
                "With transformers, once pqweights is imported:",
                fenced("python", ["import pqweights  # registers the format", *from_pretrained(model)]),
            ]
        parts.append(
            "Without `import pqweights`, transformers stops with an error that says what to do. Other programs cannot "
            "read the format."
        )
    targets = ", ".join(f"`{name}`" for name in EXPORTS if name != "bf16")
    return [
        *parts,
        f"To export it as an ordinary checkpoint, or with another `--target` ({targets}) for a runtime:",
        shell("pip install pqweights", f"pqweights export {model.quoted} OUT --target bf16{model.revision_option}"),
    ]


def recipe(manifest: Manifest) -> list[str]:
    """Return the recipe of the master, and what was calibrated; nothing if the manifest holds no recipe."""
    is_master, made = manifest.kind == "master", _about_master(manifest)
    stated, awq = made.get("recipe"), made.get("awq")
    if not isinstance(stated, dict):
        return []
    width = "a width chosen for each group" if "fit" in made else f"{words(as_text(stated.get('bits')))} bits"
    if "bits" not in stated:  # nothing is rounded
        return [_recipe_line(stated, fitted=False)]
    effort = f", effort {words(as_text(stated['effort']))}" if "effort" in stated else ""
    rules = len(stated["rules"]) if isinstance(stated.get("rules"), list) else 0
    listed = f"{code(MANIFEST_FILE)} lists its {counted(rules, 'rule')} for other weights." if rules else "No rules."
    lines = [
        f"{'' if is_master else 'The recipe of the master is '}{_recipe_line(stated, fitted='fit' in made)}",
        f"Default: {code(as_text(stated.get('codec')))}, {width}{effort}. {listed}",
    ]
    if "fit" in made:
        lines.append("Other widths were chosen to meet the target of the recipe with the smallest rise of the loss.")
    calibrated = made.get("calibrated")
    if isinstance(calibrated, dict):
        count = calibrated.get("weights")
        which = counted(count, "weight") if isinstance(count, int) else "weights"
        lines.append(f"{which[0].upper()}{which[1:]} were calibrated on a text; the recipe is that of the others.")
    if isinstance(awq, dict):
        tokens = words(as_text(awq.get("tokens")))
        whose = "Input channels have" if is_master else "In the master, input channels have"
        lines.append(f"{whose} activation-aware scales that were searched on a text of {tokens} tokens.")
    elif calibrated is None:
        without = "No calibration data was used."
        lines.append(without if is_master else "The master was made without calibration data.")
    return lines


def _about_master(manifest: Manifest) -> Mapping[str, Any]:
    """Return what the manifest of a master says of it, or that of an export of its master."""
    return manifest.made_by if manifest.kind == "master" else manifest.master


def _recipe_line(stated: Mapping[str, Any], *, fitted: bool) -> str:
    """Return the name of a recipe with its description, if that is true: options may have changed the recipe."""
    name = stated.get("name")
    own = load_recipe(name).to_json() if name in recipe_names() else {}
    changed = fitted or any(own.get(key) != stated.get(key) for key in ("bits", "codec", "rules"))
    if changed and own.get("description") == stated.get("description"):
        return f"{code(as_text(name))}, changed by options."
    return f"{code(as_text(name))}: {words(as_text(stated.get('description')))}".rstrip(": ")


def method(manifest: Manifest) -> list[str]:
    """Return how the weights were quantized, and the papers that the method comes from."""
    about, codecs = _about_master(manifest), _codecs(manifest)
    known = [MASTER_CODECS[name] for name in codecs if name in MASTER_CODECS]
    prefix = "The master was made as follows. " if manifest.is_of_master else ""
    described = [f"{prefix}{codec.description}" for codec in known if codec.description]
    papers = [paper for codec in known for paper in codec.papers]
    papers += [PAPERS[step] for step in ("fit", "awq") if isinstance(about.get(step), dict)]
    if any(tensor.action == INTEGER for tensor in manifest.tensors):
        rounding = ROUNDING.get(as_text(manifest.made_by.get("qparams")), "")
        if manifest.made_by.get("rounding") == "gptq":
            rounding += ", such that errors cancel in the outputs on a calibration text"
            papers.append(PAPERS["gptq"])
        elif manifest.made_by.get("rounding") == "importance":
            inputs = manifest.made_by.get("calibration")
            by_file = isinstance(inputs, dict) and inputs.get("sample") == IMATRIX
            measured = "by an importance matrix of llama.cpp" if by_file else "on a calibration text"
            rounding += f", where errors count by how large the inputs of their columns are {measured}"
        described.append(f"In this export, the weights are rounded in groups{rounding}.")
    listed = "\n".join(f"- {paper}" for paper in dict.fromkeys(papers))
    return [part for part in (" ".join(described), listed) if part]


def _codecs(manifest: Manifest) -> list[str]:
    """Return the names of the codecs of a master; of an export's master only the default is known."""
    if manifest.kind == "master":
        return sorted({tensor.codec for tensor in manifest.tensors if tensor.codec})
    stated = manifest.master.get("recipe")
    return [as_text(stated.get("codec"))] if isinstance(stated, dict) else []


def files(manifest: Manifest, manifest_sha256: str, has_records: bool) -> list[str]:
    """Return the section that lists the files with their sizes, the hash of the manifest, and fingerprints."""
    source = "master that it was made from" if manifest.is_of_master else "source"
    facts = [f"sha256 of {code(MANIFEST_FILE)}: {code(manifest_sha256)}"]
    origin = manifest.origin
    if origin is not None:
        facts.append(f"{source}: {code(origin.id)} at commit {code(origin.revision)}")
    facts.append(f"fingerprint of the {source}: {code(manifest.source_fingerprint)}")
    about = (
        f"{code(MANIFEST_FILE)} lists a hash of every stored tensor and of every other file; `pqweights verify` "
        "checks the folder against it."
    )
    if has_records:
        about += (
            f" {code(EVALUATION_FILE)} holds the figures of evaluations and names the manifest that they belong to."
        )
    rows = [[code(shard.file), str(shard.file_bytes)] for shard in shards_of(manifest)]
    return [about, "\n".join(f"- {fact}" for fact in facts), table(["file", "bytes"], rows, [1])]


def others(manifests: Sequence[Manifest]) -> list[str]:
    """Return which manifests in the repository are of its other exports; nothing if there are none."""
    rows = [[code(manifest_beside(manifest)), str(len(shards_of(manifest)))] for manifest in manifests]
    return [table(["manifest", "files"], sorted(rows), [1])] if rows else []
