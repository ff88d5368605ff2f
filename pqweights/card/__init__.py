"""The model card: README.md of a master or an export, generated from its manifest, configuration and evaluation records.

docs/card.md says what stands where. Same inputs, same bytes: no time, host or path is in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pqweights.card import loading, sections
from pqweights.card.front_matter import known_base_model, make_facts, to_yaml
from pqweights.card.merge import merge
from pqweights.card.old_card import NOTES_BEGIN, NOTES_END, OldCard, generated_comment, is_branch, read_old_card
from pqweights.checkpoint.model_card import MAX_CARD_BYTES
from pqweights.checkpoint.names import CARD_FILE, MANIFEST_FILE
from pqweights.checkpoint.source import read_config
from pqweights.checkpoint.writer import write_whole
from pqweights.errors import MasterError, OutputError
from pqweights.exports import EXPORTS, get_target
from pqweights.exports.loading import read_model
from pqweights.exports.target import ExportTarget
from pqweights.hub.ids import is_repository_id
from pqweights.markdown import words
from pqweights.results.evaluation_record import read_records
from pqweights.results.inspect import inspect
from pqweights.rewrite.manifest import Manifest

__all__ = ["Card", "CardOptions", "check_names", "make_card", "read_card", "save_card", "write_card"]

# In the commands, where no repository is known.
HERE = "DIR"
MAIN = "main"


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card. repository, base_model: what it names, None where that is not known. evaluations: how many it reports.

    changed: whether it differs from the one that was there.
    """

    text: str
    repository: str | None
    base_model: str | None
    evaluations: int
    changed: bool


@dataclass(frozen=True, kw_only=True)
class CardOptions:
    """What is asked of a card.

    repository: where the folder lies on the Hub (or a folder, for the commands), by default that of the old card. revision: the
    branch that it lies on, by default that of the old card, if it was for the same repository, else main. base_model: a
    repository, for a manifest that names none. adopt: keep all of a card that pqweights did not write.
    """

    repository: str | None = None
    revision: str | None = None
    base_model: str | None = None
    adopt: bool = False


def make_card(
    folder: Path, options: CardOptions = CardOptions(), *, old: str | None = None, pushed: str | None = None
) -> Card:
    """The card of a finished folder.

    old: the card that is there; its notes are kept, and what the user put into its front matter. pushed: the card on the Hub;
    see merge.merge.

    Raises MasterError for a folder that is not finished or not ours, SourceError for its configuration, OutputError where
    something of the old cards would be lost, or where what was asked for makes no sense or contradicts the manifest.
    """
    check_names(options.base_model, options.revision)
    found = inspect(folder)
    manifest, target = found.manifest, _target(found.manifest)
    sha256 = hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest()
    records = read_records(folder, sha256)
    before = _kept(old, pushed, options.adopt)
    named = _named(manifest, options, before)
    model = read_model(
        named.repository or HERE, branch=named.branch, config=read_config(folder) or {}, files=manifest.files
    )
    facts, carried, own = make_facts(
        manifest.identity.model,
        named.base_model,
        loading.library(target, model),
        loading.tags(target, sections.main_bits(manifest)),
        before,
    )
    loads = loading.load_section(target, manifest.made_by, model)
    if named.repository is None:
        loads = [f"{HERE} stands for this folder.", *loads]
    text = _text(
        front_matter=to_yaml(facts) + generated_comment(named.on_hub, named.branch, carried, before.notes, own),
        title=words(_title(named, target, manifest.made_by)),
        opening=sections.opening(found, named.base_model),
        bodies={
            "Load": loads,
            "Recipe": sections.recipe(manifest),
            "What became of the weights": sections.weights(found),
            "Evaluation": sections.evaluation(records, manifest),
            "Method": sections.method(manifest),
            "Files and hashes": sections.files(manifest, sha256, bool(records)),
        },
        notes=before.notes,
    )
    return Card(
        text=text,
        repository=named.on_hub,
        base_model=named.base_model,
        evaluations=len(records),
        changed=text != old,
    )


def _target(manifest: Manifest) -> ExportTarget[Any] | None:
    """None for a master."""
    if manifest.kind == "master":
        return None
    name = manifest.made_by["target"]
    if not isinstance(name, str) or name not in EXPORTS:
        raise MasterError(f"{MANIFEST_FILE}: target: expected {', '.join(EXPORTS)}, found {str(name)[:80]!r}")
    return get_target(name)


@dataclass(frozen=True, kw_only=True)
class _Names:
    """What a card calls things. on_hub: the repository where it is one; branch: None for main."""

    repository: str | None
    on_hub: str | None
    branch: str | None
    base_model: str | None


def _named(manifest: Manifest, options: CardOptions, before: OldCard) -> _Names:
    """By what is asked for, the manifest, and the old card."""
    base_model, named = options.base_model, manifest.identity.model.get("id")
    if None not in (base_model, named) and base_model != named:
        raise OutputError(f"base model {base_model}: {MANIFEST_FILE} says that it was made from {words(named)}")
    repository, revision = options.repository, options.revision
    if revision is None and repository in (None, before.repository):
        revision = before.branch
    repository = repository or before.repository
    if repository is not None and not repository.isprintable():
        raise OutputError(f"repository {repository!r}: expected a name that can be printed")
    on_hub = repository if repository is not None and is_repository_id(repository) else None
    return _Names(
        repository=repository,
        on_hub=on_hub,
        branch=None if on_hub is None or revision == MAIN else revision,
        base_model=known_base_model(manifest.identity.model, base_model, before),
    )


def _text(
    *, front_matter: str, title: str, opening: Sequence[str], bodies: Mapping[str, Sequence[str]], notes: str
) -> str:
    """All of a card; sections without a body are left out."""
    parts = [front_matter, f"# {title}", *opening]
    for heading, body in bodies.items():
        parts += [f"## {heading}", *body] if body else []
    return "\n\n".join(parts) + f"\n\n{NOTES_BEGIN}{notes}{NOTES_END}\n"


def check_names(base_model: str | None, revision: str | None) -> None:
    """Refuse names that a card cannot carry. Raises OutputError."""
    if base_model is not None and not is_repository_id(base_model, namespace=False):
        raise OutputError(f"base model {base_model[:100]!a}: expected ORG/NAME, a repository on the Hub")
    if revision is not None and not is_branch(revision):
        raise OutputError(f"branch {revision[:100]!a}: expected a name of letters, digits and any of . _ / + @ -")


def _kept(old: str | None, pushed: str | None, adopt: bool) -> OldCard:
    return merge(
        None if old is None else read_old_card(old, adopt),
        None if pushed is None else read_old_card(pushed, adopt, f"{CARD_FILE} on the Hub"),
    )


def read_card(folder: Path) -> str | None:
    """The card that a folder has.

    Raises OutputError for one that is no text.
    """
    path = folder / CARD_FILE
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_CARD_BYTES:
        raise OutputError(f"{path}: expected a card, found {path.stat().st_size} bytes; move it away")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise OutputError(
            f"{path}: expected UTF-8 text, found another byte at {error.start}; correct it, or move it away"
        ) from None


def save_card(folder: Path, card: Card) -> bool:
    """Write a card into its folder; whether it was another one that was there.

    Raises OutputError where the folder cannot be written.
    """
    path, data = folder / CARD_FILE, card.text.encode("utf-8")
    if path.is_file() and path.read_bytes() == data:
        return False
    write_whole(folder, path, [data])
    return True


def write_card(folder: Path, options: CardOptions = CardOptions()) -> Card:
    """Write the card of a folder, or refresh it. Raises as make_card and save_card."""
    card = make_card(folder, options, old=read_card(folder))
    save_card(folder, card)
    return card


def _title(names: _Names, target: ExportTarget[Any] | None, made_by: Mapping[str, object]) -> str:
    if names.on_hub is not None:
        return names.on_hub.rpartition("/")[2]
    of = f" of {names.base_model}" if names.base_model else ""
    if target is not None:
        return f"pqweights export {target.name}{of}"
    recipe = made_by.get("recipe")
    name = recipe.get("name") if isinstance(recipe, dict) else None
    return f"pqweights master {name or ''}".rstrip() + of
