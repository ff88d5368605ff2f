"""The model card: README.md of a master or an export, generated from its manifest, configuration and evaluations.

The same inputs give the same bytes: a card holds no time, host or path. Its parts are described in docs/card.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pqweights.checkpoint.companions import LEADS_OUTSIDE, leads_outside
from pqweights.checkpoint.model_card import MAX_CARD_BYTES
from pqweights.checkpoint.names import CARD_FILE, MANIFEST_FILE
from pqweights.checkpoint.source import read_config
from pqweights.checkpoint.writer import write_whole
from pqweights.common.markdown import words
from pqweights.errors import MasterError, OutputError
from pqweights.exports import EXPORTS, get_target, target_name
from pqweights.exports.loading import LoadableModel, read_model
from pqweights.exports.target import ExportTarget
from pqweights.publish.card import loading, provenance
from pqweights.publish.card.evaluation import evaluation
from pqweights.publish.card.front_matter import OURS, known_base_model, make_front_matter, own_keys, to_yaml
from pqweights.publish.card.old_card import NOTES_BEGIN, NOTES_END, OldCard, generated_comment, is_branch, read_old_card
from pqweights.publish.card.recipe import recipe
from pqweights.publish.card.recipe import title as recipe_title
from pqweights.publish.card.values import main_bits
from pqweights.publish.card.weights import weights
from pqweights.publish.options import CardOptions
from pqweights.rewrite.manifest import Manifest, shards_of
from pqweights.rewrite.results.evaluation_record import EvaluationRecord, read_records
from pqweights.rewrite.results.inspect import Inspection, inspect
from pqweights.storage.hub.repository import is_repository_id

__all__ = ["Card", "check_branch", "make_card", "read_card", "save_card", "write_card"]

# Stands for the folder in commands if no repository is known.
HERE = "DIR"
MAIN = "main"


@dataclass(frozen=True, kw_only=True)
class Card:
    """A generated card.

    text: all of README.md; with what the card on the Hub alone has of the user's, if it is to be pushed.
    here: all of README.md for the folder, without that.
    repository, base_model: the repositories that it names; None if they are not known.
    evaluations: how many evaluations it reports.
    quick_evaluations: how many it leaves out, because they scored too few tokens.
    changed: whether it differs from the card that was in the folder.
    replaced: what of the user's the card on the Hub has and this one has not: "notes", "front matter".
    """

    text: str
    here: str
    repository: str | None
    base_model: str | None
    evaluations: int
    quick_evaluations: int
    changed: bool
    replaced: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Names:
    """The names that a card uses.

    repository: the repository or folder that its commands name.
    on_hub: the same if it is a repository.
    branch: the branch of the repository; None for main.
    base_model: the original on the Hub.
    """

    repository: str | None
    on_hub: str | None
    branch: str | None
    base_model: str | None


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """Everything that a card is generated from.

    inspection: the manifest, with totals.
    manifest_sha256: the sha256 of the manifest's file.
    records: the evaluations of this very result.
    target: the target of an export; None for a master.
    names: the names that the card uses.
    model: what the commands depend on.
    """

    inspection: Inspection
    manifest_sha256: str
    records: tuple[EvaluationRecord, ...]
    target: ExportTarget[Any] | None
    names: _Names
    model: LoadableModel

    @property
    def manifest(self) -> Manifest:
        """The manifest of the folder."""
        return self.inspection.manifest

    @property
    def shown(self) -> list[EvaluationRecord]:
        """The evaluations that the card shows."""
        return [record for record in self.records if record.is_for_card]


def make_card(
    folder: Path, options: CardOptions = CardOptions(), *, old: str | None = None, pushed: str | None = None
) -> Card:
    """Generate the card of a finished folder.

    old: the card that is there, whose notes and own front matter are kept.
    pushed: the card on the Hub, of which they are kept where `old` has none.

    Raises MasterError if pqweights did not write or finish the folder, SourceError if its config.json cannot be read,
    OutputError if something of the old cards would be lost, or if the options are wrong or contradict the manifest.
    """
    check_branch(options.revision)
    here = OldCard() if old is None else read_old_card(old, options.adopt)
    there = OldCard() if pushed is None else read_old_card(pushed, options.adopt, f"{CARD_FILE} on the Hub")
    both = _kept(here, there)
    subject = _read_subject(folder, options, both)
    text = _text(subject, both)
    text_here = text if pushed is None else _text(subject, replace(both, notes=here.notes, facts=own_keys(here)))
    return Card(
        text=text,
        here=text_here,
        repository=subject.names.on_hub,
        base_model=subject.names.base_model,
        evaluations=len(subject.shown),
        quick_evaluations=len(subject.records) - len(subject.shown),
        changed=text_here != old,
        replaced=_replaced(both, there),
    )


def _read_subject(folder: Path, options: CardOptions, before: OldCard) -> _Subject:
    inspection = inspect(folder)
    target = _target(inspection.manifest)
    sha256 = hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest()
    records = read_records(folder, sha256)
    names = _choose_names(inspection.manifest, options, before)
    return _Subject(
        inspection=inspection,
        manifest_sha256=sha256,
        records=records,
        target=target,
        names=names,
        model=read_model(
            names.repository or HERE,
            branch=names.branch,
            config=read_config(folder) or {},
            files=inspection.manifest.files,
            weights=(shard.file for shard in shards_of(inspection.manifest)),
        ),
    )


def _target(manifest: Manifest) -> ExportTarget[Any] | None:
    """Return the target of an export, or None for a master."""
    if manifest.kind == "master":
        return None
    stated = manifest.made_by["target"]
    name = target_name(stated)
    if name is None:
        raise MasterError(f"{MANIFEST_FILE}: target: expected {', '.join(EXPORTS)}, found {str(stated)[:80]!r}")
    return get_target(name)


def _choose_names(manifest: Manifest, options: CardOptions, before: OldCard) -> _Names:
    """Return the names of a card, from what is asked for, the manifest and the old card."""
    base_model, named = options.base_model, manifest.identity.model.get("id")
    if None not in (base_model, named) and base_model != named:
        raise OutputError(f"base model {base_model}: {MANIFEST_FILE} says that it was made from {words(named)}")
    repository, revision = options.repository, options.revision
    if revision is None and repository in (None, before.repository):
        revision = before.branch
    repository = repository or before.repository
    if repository is not None and not repository.isprintable():
        raise OutputError(f"repository {repository!r}: expected a name of printable characters")
    on_hub = repository if repository is not None and is_repository_id(repository) else None
    return _Names(
        repository=repository,
        on_hub=on_hub,
        branch=None if on_hub is None or revision == MAIN else revision,
        base_model=known_base_model(manifest.identity.model, base_model, before),
    )


def _text(subject: _Subject, before: OldCard) -> str:
    """Return all of a card; sections without a body are left out. before: what is kept of the old card"""
    inspection, manifest = subject.inspection, subject.manifest
    sections = {
        "Load": _loading(subject),
        "Recipe": recipe(manifest),
        "Weights": weights(inspection),
        "Evaluation": evaluation(subject.shown, manifest),
        "Method": provenance.method(manifest),
        "Files and hashes": provenance.files(manifest, subject.manifest_sha256, bool(subject.records)),
    }
    title = words(_title(subject.names, subject.target, manifest.made_by))
    parts = [_head(subject, before), f"# {title}", *provenance.opening(inspection, subject.names.base_model)]
    for heading, body in sections.items():
        parts += [f"## {heading}", *body] if body else []
    return "\n\n".join(parts) + f"\n\n{NOTES_BEGIN}{before.notes}{NOTES_END}\n"


def _head(subject: _Subject, before: OldCard) -> str:
    """Return the front matter, and the comment that marks the card as generated."""
    names = subject.names
    facts, carried = make_front_matter(
        subject.manifest.identity.model,
        before,
        base_model=names.base_model,
        library=loading.library(subject.target, subject.model),
        tags=loading.tags(subject.target, main_bits(subject.manifest)),
    )
    return to_yaml(facts) + generated_comment(repository=names.on_hub, branch=names.branch, written=carried)


def _loading(subject: _Subject) -> list[str]:
    lines = loading.load_section(subject.target, subject.manifest.made_by, subject.model)
    lines += loading.needs_version(subject.manifest)
    return [f"{HERE} stands for this folder.", *lines] if subject.names.repository is None else lines


def check_branch(name: str | None) -> None:
    """Raise OutputError for a branch that a card cannot name."""
    if name is not None and not is_branch(name):
        raise OutputError(f"branch {name[:100]!a}: expected a name of letters, digits and any of . _ / + @ -")


def _kept(here: OldCard, there: OldCard) -> OldCard:
    """Return what is kept of the card in the folder and, where that has none of the user's, of the one on the Hub.

    Raises OutputError if text that was to be adopted would be lost.
    """
    if there.adopted and here.notes.strip() and here.notes != there.notes:
        raise OutputError(
            f"{CARD_FILE} on the Hub: `adopt` cannot keep its text, because {CARD_FILE} in the folder has notes: add "
            f"the text to these, and delete {CARD_FILE} on the Hub; nothing was pushed"
        )
    ours = {key: value for card in (there, here) for key, value in card.facts.items() if key in OURS and key != "tags"}
    return OldCard(
        notes=here.notes if here.notes.strip() or not there.notes.strip() else there.notes,
        facts=ours | (own_keys(here) or own_keys(there)),
        repository=here.repository or there.repository,
        branch=here.branch or there.branch,
    )


def _replaced(kept: OldCard, there: OldCard) -> tuple[str, ...]:
    """Return what of the user's the card on the Hub has, and loses."""
    lost = (
        ("notes", there.notes.strip() and there.notes != kept.notes),
        (
            "front matter",
            not own_keys(there).items() <= own_keys(kept).items(),
        ),
    )
    return tuple(part for part, is_lost in lost if is_lost)


def read_card(folder: Path) -> str | None:
    """Return the card in a folder, or None if there is none.

    Raises OutputError if it is not UTF-8 text, or too large for a card.
    """
    path = folder / CARD_FILE
    if not path.is_file():
        return None
    if leads_outside(folder, path):
        raise OutputError(f"{path}: {LEADS_OUTSIDE}; replace it by the file itself, or move it away")
    if path.stat().st_size > MAX_CARD_BYTES:
        raise OutputError(
            f"{path}: expected a card of at most {MAX_CARD_BYTES} bytes, found {path.stat().st_size} bytes; move it "
            "away"
        )
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise OutputError(
            f"{path}: expected UTF-8 text, found an invalid byte at offset {error.start}; correct it, or move it away"
        ) from None


def save_card(folder: Path, card: Card) -> bool:
    """Write a card into its folder, and return whether it differs from the one that was there.

    Raises OutputError if the folder cannot be written.
    """
    path, data = folder / CARD_FILE, card.here.encode("utf-8")
    if path.is_file() and path.read_bytes() == data:
        return False
    write_whole(folder, path, [data])
    return True


def write_card(folder: Path, options: CardOptions = CardOptions()) -> Card:
    """Write or refresh the card of a folder.

    Raises what make_card and save_card raise.
    """
    card = make_card(folder, options, old=read_card(folder))
    save_card(folder, card)
    return card


def _title(names: _Names, target: ExportTarget[Any] | None, made_by: Mapping[str, object]) -> str:
    if names.on_hub is not None:
        return names.on_hub.rpartition("/")[2]
    base = f" of {names.base_model}" if names.base_model else ""
    if target is not None:
        return f"pqweights export {target.name}{base}"
    return f"pqweights master {recipe_title(made_by)}".rstrip() + base
