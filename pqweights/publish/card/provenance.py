"""The parts of a card that say what a result is and where it comes from: the opening, the method, files and hashes."""

from __future__ import annotations

from pqweights.checkpoint.names import EVALUATION_FILE, MANIFEST_FILE
from pqweights.checkpoint.storage import Origin
from pqweights.codecs import CODECS
from pqweights.common.markdown import code, table
from pqweights.common.units import size_text
from pqweights.exports import target_name
from pqweights.options import ExportOptions
from pqweights.parameters import parameters
from pqweights.planning.plan import INTEGER
from pqweights.planning.totals import Totals
from pqweights.publish.card.values import as_text
from pqweights.rewrite.manifest import Manifest, shards_of
from pqweights.rewrite.results.inspect import Inspection
from pqweights.storage.hub.repository import is_repository_id

HUB = "https://huggingface.co"
PAPERS = "https://arxiv.org/abs"
# How integers were rounded, by --qparams.
ROUNDING = {
    "best": ", with the parameters of least squared error for each group",
    "minmax": ", by the rule of the runtime's own converter",
}
RELATED = {"TurboQuant": "2504.19874", "HIGGS": "2411.17525", "QuIP#": "2402.04396", "QuaRot": "2404.00456"}


def opening(inspection: Inspection, base_model: str | None) -> list[str]:
    """Return paragraphs that say what the result is, what it was made from, and how large it is."""
    manifest = inspection.manifest
    what = "This is a *master*: weights that are quantized once and then exported to the formats that runtimes load."
    if manifest.kind != "master":
        options = {name: value for name, value in manifest.made_by.items() if name in parameters(ExportOptions)}
        options = {name: value.get("kind") if isinstance(value, dict) else value for name, value in options.items()}
        shown = [
            f", {name.replace('_', ' ')} {code(as_text(value))}" for name, value in options.items() if value is not None
        ]
        what = (
            f"This is an export for the target {code(target_name(manifest.made_by['target']) or '')}{''.join(shown)}."
        )
    return [f"{what} {_origin(manifest, base_model)}", _sizes(manifest, inspection.totals)]


def _sizes(manifest: Manifest, totals: Totals) -> str:
    before, after = totals.source_bytes, totals.output_bytes
    source = "source" if manifest.kind == "master" else "master that it was made from"
    sizes = f"The weight files take {size_text(after)}"
    if before and after:
        factor = (
            f"{before / after:.2f} times smaller than" if before > after else f"{after / before:.2f} times the size of"
        )
        sizes += f" and are {factor} those of the {source}, which take {size_text(before)}"
    bits, weights = totals.bits_per_weight, totals.weights
    if bits is None:
        return f"{sizes}."
    overall = f"{totals.bits_per_parameter:.4f} over all of them, counting the headers of the files"
    return (
        f"**{bits:.4f} bits per weight**, counting everything that is stored for them, over the "
        f"{totals.coverage:.4%} of {weights} weights that are quantized; {overall}. {sizes}."
    )


def _origin(manifest: Manifest, base_model: str | None) -> str:
    identity = manifest.identity
    model, revision = identity.model.get("id"), identity.model.get("revision")
    if isinstance(model, str) and is_repository_id(model, namespace=False):
        base = f"The base model is {_link(model)}" + ("." if revision is None else f" at commit {code(revision)}.")
        if identity.origin is None or manifest.kind == "master":
            return base
        return f"{base} The master that it was made from is {_at(identity.origin)}."
    source = "checkpoint" if manifest.kind == "master" else "master"
    place = f"a local {source}" if identity.origin is None else f"the {source} {_at(identity.origin)}"
    made = f"It was made from {place} (fingerprint {code(manifest.source_fingerprint)})."
    if base_model is None:
        return made
    return f"{made} The author of this card names {_link(base_model)} as the base model; the manifest names none."


def _at(origin: Origin) -> str:
    shown = _link(origin.id) if is_repository_id(origin.id) else code(origin.id)
    return f"{shown} at commit {code(origin.revision)}"


def _link(repository: str) -> str:
    return f"[{repository}]({HUB}/{repository})"


def method(manifest: Manifest) -> list[str]:
    """Return paragraphs that say how the weights were quantized, and the papers that the method comes from."""
    described = " ".join(_descriptions(manifest))
    return [*([described] if described else []), "\n".join(f"- {paper}" for paper in _papers(manifest))]


def _codecs(manifest: Manifest) -> set[str]:
    """Return the names of the codecs of a master; of an export's master only the default is known."""
    if manifest.kind == "master":
        return {tensor.codec for tensor in manifest.tensors if tensor.codec}
    recipe = manifest.identity.master.get("recipe")
    return {as_text(recipe.get("codec"))} - {""} if isinstance(recipe, dict) else set()


def _descriptions(manifest: Manifest) -> list[str]:
    prefix = "" if manifest.kind == "master" else "The master was made as follows. "
    codecs = _codecs(manifest)
    described = {name: CODECS[name].description for name in sorted(codecs) if name in CODECS}
    lines = [f"{prefix}{description}" for description in described.values() if description]
    others = sorted(codec for codec in codecs if not described.get(codec))
    if others:
        lines.append(f"{prefix}The weights are encoded with {' or '.join(code(codec) for codec in others)}.")
    if any(tensor.action == INTEGER for tensor in manifest.tensors):
        rounding = ROUNDING.get(as_text(manifest.made_by.get("qparams")), "")
        compensated = ""
        if manifest.made_by.get("rounding") == "gptq":
            file = code(as_text(manifest.made_by.get("calibration")))
            compensated = f", such that errors cancel in the outputs on a calibration text (moments with sha256 {file})"
        lines.append(f"In this export, the weights are rounded in groups{rounding}{compensated}.")
    return lines


def _papers(manifest: Manifest) -> list[str]:
    source = manifest.made_by if manifest.kind == "master" else manifest.identity.master
    known = [CODECS[name] for name in sorted(_codecs(manifest)) if name in CODECS]
    papers = list(dict.fromkeys(paper for codec in known for paper in codec.papers))
    if isinstance(source.get("awq"), dict) and "original_fingerprint" not in manifest.made_by:
        papers.append(f"Lin et al., *AWQ*, {_paper('2306.00978')}: the scales of input channels.")
    if manifest.made_by.get("rounding") == "gptq":
        papers.append(f"Frantar et al., *GPTQ*, {_paper('2210.17323')}: error-compensated rounding.")
    related = ", ".join(f"{name} ({_paper(paper)})" for name, paper in RELATED.items())
    return [*papers, f"Related: {related}."]


def _paper(number: str) -> str:
    return f"[arXiv:{number}]({PAPERS}/{number})"


def files(manifest: Manifest, manifest_sha256: str, has_records: bool) -> list[str]:
    """Return the section that lists the files with their sizes, the hash of the manifest, and fingerprints."""
    source = "source" if manifest.kind == "master" else "master that it was made from"
    facts = [f"sha256 of {code(MANIFEST_FILE)}: {code(manifest_sha256)}"]
    if manifest.identity.origin is not None:
        facts.append(
            f"{source}: {code(manifest.identity.origin.id)} at commit {code(manifest.identity.origin.revision)}"
        )
    facts.append(f"fingerprint of the {source}: {code(manifest.source_fingerprint)}")
    if "original_fingerprint" in manifest.made_by:
        facts.append(f"fingerprint of the original: {code(as_text(manifest.made_by['original_fingerprint']))}")
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
