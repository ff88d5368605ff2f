"""The model card: README.md of a master or an export, generated from its manifest, configuration and evaluations.

The same inputs give the same bytes: a card holds no time, host or path. Its parts are described in docs/card.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.checkpoint.companions import LEADS_OUTSIDE, leads_outside
from pqweights.checkpoint.config import MAX_CARD_BYTES
from pqweights.checkpoint.names import CARD_FILE, MANIFEST_FILE, PICTURE_FILE
from pqweights.checkpoint.source import read_config
from pqweights.checkpoint.writer import write_whole
from pqweights.common.markdown import words
from pqweights.common.options import MOST_THREADS, anything, option, options
from pqweights.common.options import text as checked_text
from pqweights.common.threads import Progress, no_progress
from pqweights.convert.manifest import Manifest, container_of, shards_of
from pqweights.errors import MasterError, OptionError, OutputError
from pqweights.publish.card import figures, text
from pqweights.publish.card.old_card import (
    NOTES_BEGIN,
    NOTES_END,
    OldCard,
    generated_comment,
    is_branch,
    make_front_matter,
    read_old_card,
)
from pqweights.results.evaluation_record import EvaluationRecord, read_records
from pqweights.results.inspect import inspect
from pqweights.results.offers import offers
from pqweights.results.picture import kl_picture
from pqweights.storage.addresses import is_repository_id
from pqweights.targets import EXPORTS, get_target, target_name
from pqweights.targets.loading import LoadableModel, read_model
from pqweights.targets.target import ExportTarget

# Stands for the folder in commands if no repository is known.
HERE = "DIR"
MAIN = "main"


def model_id(name: str, value: Any, *, namespace: bool = False) -> str:
    """Take the id of a repository on the Hub. namespace: whether it must name an organization or a user"""
    if not is_repository_id(checked_text(name, value), namespace=namespace):
        raise OptionError(f"`{name}`: expected ORG/NAME, a repository on the Hub, found {value[:100]!a}")
    return str(value)


@options
class PublishOptions:
    """What is asked of a card and of a push.

    base_model: the original on the Hub, if the manifest names none
    repository: that of the commands in the card, which may also be a folder; by default that of the earlier card
    revision: the branch that the card names; by default that of the old card if it was for the same repository, or main
    private: create the repository as private; one that exists must be private
    message: the title of the commit
    dry_run: say what would be pushed, and change nothing
    verifying, comparing, progress: called while the folder is verified, compared with the repository, and sent
    """

    base_model: str | None = option(model_id, default=None)
    repository: str | None = None
    revision: str | None = None
    private: bool = False
    message: str | None = None
    dry_run: bool = False
    threads: int | None = option(least=1, most=MOST_THREADS, default=None)
    verifying: Progress = option(anything, default=no_progress)
    comparing: Progress = option(anything, default=no_progress)
    progress: Progress = option(anything, default=no_progress)


@dataclass(frozen=True, kw_only=True)
class Card:
    """A generated card.

    text: all of README.md
    picture: PICTURE_FILE, which it shows; None if it shows none
    repository, base_model: the repositories that it names; None if they are not known
    evaluations: how many evaluations it reports
    quick_evaluations: how many it leaves out, because they scored too few tokens
    changed: whether it differs from the card that was in the folder
    replaces_edits: whether the card on the Hub has notes or keys of the user's that this one has not
    """

    text: str
    picture: str | None
    repository: str | None
    base_model: str | None
    evaluations: int
    quick_evaluations: int
    changed: bool
    replaces_edits: bool = False


@dataclass(frozen=True, kw_only=True)
class _Names:
    """The names that a card uses.

    repository: the repository or folder that its commands name
    on_hub: the same if it is a repository
    branch: the branch of the repository; None for main
    base_model: the original on the Hub
    """

    repository: str | None
    on_hub: str | None
    branch: str | None
    base_model: str | None


def make_card(
    folder: Path,
    options: PublishOptions = PublishOptions(),
    *,
    old: str | None = None,
    pushed: str | None = None,
    beside: Sequence[tuple[Manifest, Sequence[EvaluationRecord]]] = (),
) -> Card:
    """Generate the card of a finished folder.

    old: the card that is there, whose notes and own front matter are kept
    pushed: the card on the Hub, of which they are kept if `old` has neither
    beside: the manifests of other exports in the repository, with what was measured of each

    Raises MasterError if pqweights did not write or finish the folder, SourceError if its config.json cannot be read,
    OutputError if something of the old cards would be lost, or if the options are wrong or contradict the manifest.
    """
    check_branch(options.revision)
    here = OldCard() if old is None else read_old_card(old)
    there = OldCard() if pushed is None else read_old_card(pushed, f"{CARD_FILE} on the Hub")
    before = here if here.is_edited or pushed is None else there
    inspection = inspect(folder)
    manifest = inspection.manifest
    sha256 = hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest()
    records = read_records(folder, sha256)
    shown = [record for record in records if record.is_for_card]
    beside_shown = [(other, [record for record in of if record.is_for_card]) for other, of in beside]
    offered = offers([(manifest, shown), *beside_shown])
    names = _choose_names(manifest, options, here, there)
    target, model = _target(manifest), _model_in(folder, manifest, names)
    load = text.loading(target, manifest, model)
    sections = {
        "Which file to take": figures.choice(offered),
        "Load": load if names.repository is not None else [f"{HERE} stands for this folder.", *load],
        "Recipe": text.recipe(manifest),
        "Weights": figures.weights(manifest),
        "Evaluation": figures.evaluation(shown, manifest),
        "Method": text.method(manifest),
        "Files and hashes": text.files(manifest, sha256, bool(records)),
        "Other exports in this repository": text.others([other for other, _ in beside]),
    }
    parts = [
        _head([manifest, *(other for other, _ in beside)], before, names, library=_library(target, model)),
        f"# {words(_title(names, target, manifest))}",
        *text.opening(inspection, names.base_model),
    ]
    for heading, body in sections.items():
        parts += [f"## {heading}", *body] if body else []
    made = "\n\n".join(parts) + f"\n\n{NOTES_BEGIN}{before.notes}{NOTES_END}\n"
    return Card(
        text=made,
        picture=kl_picture(offered),
        repository=names.on_hub,
        base_model=names.base_model,
        evaluations=len(shown),
        quick_evaluations=len(records) - len(shown),
        changed=made != old,
        replaces_edits=there.is_edited and (there.notes, there.own) != (before.notes, before.own),
    )


def _model_in(folder: Path, manifest: Manifest, names: _Names) -> LoadableModel:
    """Return the model of a folder, of several formats that of the first, as a card says how to load it."""
    first = container_of(manifest).folders[0]
    return read_model(
        names.repository or HERE,
        branch=names.branch,
        config=read_config(folder / first) or {},
        files=[name.removeprefix(first) for name in manifest.files],
        weights=(shard.file for shard in shards_of(manifest)),
    )


def _target(manifest: Manifest) -> ExportTarget | None:
    """Return the target of an export, or None for a master."""
    if manifest.kind == "master":
        return None
    stated = manifest.made_by["target"]
    name = target_name(stated)
    if name is None:
        raise MasterError(f"{MANIFEST_FILE}: target: expected {', '.join(EXPORTS)}, found {str(stated)[:80]!r}")
    return get_target(name)


def _choose_names(manifest: Manifest, options: PublishOptions, here: OldCard, there: OldCard) -> _Names:
    """Return the names of a card, from what is asked for, the manifest and the old cards."""
    base_model, named = options.base_model, manifest.model.get("id")
    if None not in (base_model, named) and base_model != named:
        raise OutputError(f"base model {base_model}: {MANIFEST_FILE} says that it was made from {words(named)}")
    if isinstance(named, str) and is_repository_id(named, namespace=False):
        base_model = named
    repository, revision = options.repository, options.revision
    if revision is None and repository in (None, here.repository):
        revision = here.branch
    repository = repository or here.repository
    if repository is not None and not repository.isprintable():
        raise OutputError(f"repository {repository!r}: expected a name of printable characters")
    on_hub = repository if repository is not None and is_repository_id(repository) else None
    return _Names(
        repository=repository,
        on_hub=on_hub,
        branch=None if on_hub is None or revision == MAIN else revision,
        base_model=base_model or here.base_model or there.base_model,
    )


def _head(manifests: Sequence[Manifest], before: OldCard, names: _Names, *, library: str | None) -> str:
    """Return the front matter, and the comment that marks the card as generated.

    manifests: that of the result, and those of other exports in the repository
    """
    manifest, targets = manifests[0], [(_target(of), of.made_by) for of in manifests]
    bits = figures.main_bits(manifest)
    made = ["lossless"] if figures.is_lossless(manifest) else ["quantized"]
    made += [] if bits is None or figures.is_lossless(manifest) else [f"{bits:g}-bit"]
    of_targets = [tag for target, made_by in targets if target is not None for tag in target.tags_of(made_by)]
    front_matter, written = make_front_matter(
        manifest.model,
        before.own,
        base_model=names.base_model,
        library=library,
        tags=["pqweights", made[0], *of_targets, *made[1:]],
    )
    return front_matter + generated_comment(repository=names.on_hub, branch=names.branch, written=written)


def _library(target: ExportTarget | None, model: LoadableModel) -> str | None:
    """Return library_name of the front matter, if there is one; target is None for a master."""
    if target is not None and target.library is not None:
        return target.library
    if model.opens:
        return "transformers"
    return "pqweights" if target is None else None


def _title(names: _Names, target: ExportTarget | None, manifest: Manifest) -> str:
    if names.on_hub is not None:
        return names.on_hub.rpartition("/")[2]
    bits = figures.main_bits(manifest)
    width = "lossless" if figures.is_lossless(manifest) else "" if bits is None else f"{bits:g}-bit"
    what = f"export {target.name}" if target is not None else f"{width} master".lstrip()
    return f"pqweights {what}{f' of {names.base_model}' if names.base_model else ''}"


def check_branch(name: str | None) -> None:
    """Raise OutputError for a branch that a card cannot name."""
    if name is not None and not is_branch(name):
        raise OutputError(f"branch {name[:100]!a}: expected a name of letters, digits and any of . _ / + @ -")


def read_card(folder: Path) -> str | None:
    """Return the card in a folder, or None if there is none.

    Raises OutputError if it is not UTF-8 text, or too large for a card.
    """
    path = folder / CARD_FILE
    if not path.is_file():
        return None
    if leads_outside(folder, path):
        raise OutputError(f"{path}: {LEADS_OUTSIDE}; replace it by the file itself, or move it away")
    try:
        with open(path, "rb") as stream:
            return card_text(stream.read(MAX_CARD_BYTES + 1))
    except ValueError as error:
        raise OutputError(f"{path}: {error}; correct it, or move it away") from None


def card_text(data: bytes) -> str:
    """Decode a card. Raises ValueError if it is too large for one, or not UTF-8 text."""
    if len(data) > MAX_CARD_BYTES:
        raise ValueError(f"expected a card of at most {MAX_CARD_BYTES} bytes, found more")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8 text, found an invalid byte at offset {error.start}") from None


def write_card(folder: Path, options: PublishOptions = PublishOptions()) -> Card:
    """Write or refresh the card of a folder.

    Raises what make_card raises, and OutputError if the folder cannot be written.
    """
    card = make_card(folder, options, old=read_card(folder))
    if card.changed:
        write_whole(folder, folder / CARD_FILE, [card.text.encode("utf-8")])
    if card.picture is not None:
        write_whole(folder, folder / PICTURE_FILE, [card.picture.encode("utf-8")])
    return card
