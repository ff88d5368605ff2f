"""Pushing to the Hub: what is sent, which files in the repository stay, and what is refused before anything is sent."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import folder_bytes, run_command
from hub_cases import SOURCE, TARGET, Client, files_of, write_source
from loopback_faults import Cut, Drop, Fault, Status
from loopback_hub import LoopbackHub

from pqweights.results.verify import Verification, verify

# The official client's upload of large files.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")

LOG_IN = "hf auth login"
SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a master, its export, and a master in three shards."""
    folder = tmp_path_factory.mktemp("made")
    source = str(write_source(folder / "source"))
    run_command({"quantize": source}, folder / "master")
    run_command({"quantize": source, "max_shard_bytes": 40_000}, folder / "sharded")
    run_command({"export": str(folder / "master"), "target": "bf16"}, folder / "export")
    return folder


@pytest.fixture
def master(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "master", tmp_path / "master"))


def writes(hub: LoopbackHub) -> list[str]:
    """Return the requests that may have changed something."""
    asking = ("/api/validate-yaml",)
    return [f"{r.method} {r.path}" for r in hub.requests if r.method not in ("GET", "HEAD") and r.path not in asking]


def puts(hub: LoopbackHub) -> list[str]:
    """Return the hashes of the large files that were sent."""
    return [r.path.removeprefix("/uploads/") for r in hub.requests if r.method == "PUT"]


def assert_holds(hub: LoopbackHub, folder: Path, revision: str = "main", also: tuple[str, ...] = ()) -> None:
    """Check that the repository holds the folder, a card and, besides `also`, only what a new repository has."""
    there = hub.repositories[TARGET]
    assert set(there.files(revision)) == {*files_of(folder), "README.md", ".gitattributes", *also}
    for name, path in files_of(folder).items():
        assert there.read(name, revision) == path.read_bytes(), name


def refused(hub: LoopbackHub, client: Client, folder: Path, *options: str) -> str:
    """Return the line of a push that must fail, and check that it changed nothing on the Hub or in the folder."""
    before, sent = folder_bytes(folder), writes(hub)
    there = {name: (there.sha(), list(there.branches)) for name, there in hub.repositories.items()}
    line = client.line("push", folder, TARGET, *options)
    assert writes(hub) == sent
    assert {name: (there.sha(), list(there.branches)) for name, there in hub.repositories.items()} == there
    assert folder_bytes(folder) == before
    return line


@pytest.mark.parametrize("kind", ["master", "export", "sharded"])
def test_pushed_folder_opens_by_id(kind: str, hub: LoopbackHub, client: Client, made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / kind, tmp_path / kind))
    before = folder_bytes(folder)
    told = client.well("push", folder, TARGET).stdout
    assert f"{TARGET}, branch main (created): " in told
    assert f"commit {hub.repositories[TARGET].sha()}: {hub.url}/{TARGET}" in told
    assert_holds(hub, folder)
    assert not hub.repositories[TARGET].private and folder_bytes(folder) == before
    assert sum(path.startswith("POST") and "/commit/" in path for path in writes(hub)) == 1  # one commit for everything
    card = hub.repositories[TARGET].read("README.md")
    assert b"license: apache-2.0" in card and TARGET.encode() in card
    assert ": ok: " in client.well("verify", TARGET).stdout
    assert client.well("inspect", TARGET).stdout == client.well("inspect", folder).stdout
    if kind == "master":
        client.well("export", TARGET, tmp_path / "by-id", "--target", "bf16")
        exported, right = folder_bytes(tmp_path / "by-id"), folder_bytes(made / "export")
        assert json.loads(exported.pop("pqweights.json"))["source"]["id"] == TARGET
        del right["pqweights.json"]
        assert exported == right


def test_second_push_sends_only_what_changed(hub: LoopbackHub, client: Client, master: Path) -> None:
    client.well("push", master, TARGET)
    first, sent, uploaded = hub.repositories[TARGET].sha(), len(writes(hub)), len(puts(hub))
    assert "holds all of this already; nothing was pushed" in client.well("push", master, TARGET).stdout
    report = pushed(client, master)
    assert (report["commit"], report["bytes"]) == (None, 0)
    assert {file["change"] for file in report["files"]} == {"same"}
    assert len(writes(hub)) == sent and hub.repositories[TARGET].sha() == first
    note_here(client, master, "Mine.\n")
    report = pushed(client, master)
    assert {file["name"] for file in report["files"] if file["change"] != "same"} == {"README.md"}
    assert len(puts(hub)) == uploaded
    assert hub.repositories[TARGET].commits[hub.repositories[TARGET].sha()].title == "pqweights push: master"
    other = bytearray((master / SHARD).read_bytes())
    other[-1] ^= 1
    hub.commit(TARGET, {SHARD: bytes(other)})  # other bytes of the same size
    report = pushed(client, master)
    assert {file["name"] for file in report["files"] if file["change"] == "changed"} == {SHARD}
    assert_holds(hub, master)


def pushed(client: Client, folder: Path) -> Any:
    """Push, and return the report."""
    return json.loads(client.well("push", folder, TARGET, "--json").stdout)


@pytest.mark.parametrize("there", [False, True])
def test_dry_run_changes_nothing(there: bool, hub: LoopbackHub, client: Client, master: Path) -> None:
    if there:
        hub.commit(TARGET, {"notes.txt": b"x"})
    before, state = folder_bytes(master), hub.repositories[TARGET].sha() if there else None
    told = client.well("push", master, TARGET, "--dry-run").stdout
    assert "would be pushed (dry run)" in told and ("(would be created)" in told) != there
    report = json.loads(client.well("push", master, TARGET, "--dry-run", "--json", "--revision", "dev").stdout)
    assert report["dry_run"] and report["commit"] is None and report["created"] != there
    assert {file["name"] for file in report["files"]} == {*files_of(master), "README.md"}
    assert folder_bytes(master) == before and writes(hub) == []
    assert (TARGET in hub.repositories) == there
    assert not there or (hub.repositories[TARGET].sha(), [*hub.repositories[TARGET].branches]) == (state, ["main"])


# --- What is refused before anything is sent --------------------------------------------------------------------------


def flip_a_byte(folder: Path, name: str = SHARD) -> None:
    data = bytearray((folder / name).read_bytes())
    data[-10] ^= 1
    (folder / name).write_bytes(data)


BROKEN = {
    "a flipped byte": (flip_a_byte, "blake3_of_pieces"),
    "a shard that is missing": (lambda folder: (folder / SHARD).unlink(), SHARD),
    "a file that is missing": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
    "a file that is not in the manifest": (lambda folder: (folder / "more.bin").write_bytes(b"x"), "more.bin"),
    "no manifest": (lambda folder: (folder / "pqweights.json").unlink(), "pqweights.json"),
    "a damaged manifest": (lambda folder: (folder / "pqweights.json").write_bytes(b"{"), "pqweights.json"),
    "no folder": (shutil.rmtree, "master"),
    "a card that pqweights did not write": (lambda folder: (folder / "README.md").write_text("# Mine\n"), "README.md"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folder_is_refused_before_anything_is_sent(
    name: str, hub: LoopbackHub, client: Client, master: Path
) -> None:
    damage, says = BROKEN[name]
    damage(master)
    assert says in refused(hub, client, master)


@pytest.mark.parametrize(
    "name", ["master", "me/", "/master", "me/a/b", "../master", "", "https://example.com/me/master"]
)
def test_invalid_names_of_repositories_are_refused(name: str, hub: LoopbackHub, client: Client, master: Path) -> None:
    line = client.line("push", master, name)
    assert "ORG/NAME" in line
    wrong = client("push", master, TARGET, "--base-model", "a b")
    assert wrong.exit_code == 2 and "--base-model" in wrong.stderr
    assert hub.requests == []


@pytest.mark.parametrize(
    ("repository", "token"), [(TARGET, None), (TARGET, "hf_" + "Wrong" * 7), ("you/master", "right")]
)
def test_push_without_write_access_is_refused(
    repository: str, token: str | None, hub: LoopbackHub, client: Client, master: Path
) -> None:
    client.token = hub.token if token == "right" else token
    assert LOG_IN in client.line("push", master, repository)
    assert hub.repositories == {} and puts(hub) == []


UNCHECKED = "not checked: whether the repository can take this, which of these files it holds already, and whether it "


@pytest.mark.parametrize(
    ("why", "says"), [("no token", "token"), ("unreachable", "network"), ("offline", "HF_HUB_OFFLINE")]
)
def test_dry_run_goes_as_far_as_it_can_without_the_hub(
    why: str, says: str, hub: LoopbackHub, client: Client, master: Path
) -> None:
    if why == "no token":
        client.token = None
    elif why == "unreachable":
        hub.inject(Fault(Drop(), "GET", times=999))
    else:
        client.patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert says in refused(hub, client, master)
    *files, total, unchecked = client.well("push", master, TARGET, "--dry-run").stdout.splitlines()
    assert unchecked.startswith(UNCHECKED) and says in unchecked
    assert total.startswith(f"{TARGET}, branch main: at most ")
    names = {*files_of(master), "README.md"}
    assert {line.split()[-1] for line in files} == names and not any("unknown" in line for line in files)
    report = json.loads(client.well("push", master, TARGET, "--dry-run", "--json").stdout)
    assert report["dry_run"] and report["created"] is None and says in report["not_checked"]
    assert {file["name"] for file in report["files"]} == names and report["bytes"] > 0
    assert hub.repositories == {} and not writes(hub)


def test_repository_with_other_weights_is_refused(hub: LoopbackHub, client: Client, master: Path) -> None:
    for name in ("pytorch_model.bin", "model-00001-of-00002.safetensors", "onnx/model.onnx", "x.index.json"):
        hub.commit(TARGET, {name: b"of somebody else", "notes.txt": b"x"})
        assert name in refused(hub, client, master)
        hub.commit(TARGET, {name: None})
    hub.commit(TARGET, {"model.bin": b"of somebody else"}, branch="dev")
    assert "model.bin" in refused(hub, client, master, "--revision", "dev")
    client.well("push", master, TARGET)
    assert set(hub.repositories[TARGET].files()) == {*files_of(master), "README.md", "notes.txt"}


# --- Where it goes ----------------------------------------------------------------------------------------------------


def test_private_is_refused_for_a_public_repository(hub: LoopbackHub, client: Client, master: Path) -> None:
    hub.commit(TARGET, {"notes.txt": b"x"})
    for options in ((), ("--dry-run",)):
        assert "public" in refused(hub, client, master, "--private", *options)
    del hub.repositories[TARGET]
    for _ in range(2):
        client.well("push", master, TARGET, "--private")
        assert hub.repositories[TARGET].private


def test_commits_tags_and_invalid_branches_are_refused(hub: LoopbackHub, client: Client, master: Path) -> None:
    from huggingface_hub import GitRefInfo, HfApi

    hub.commit(TARGET, {"notes.txt": b"x"})
    commit, refs = hub.repositories[TARGET].sha(), HfApi.list_repo_refs

    def with_tag(*arguments: Any, **options: Any) -> Any:
        listed = refs(*arguments, **options)
        listed.tags.append(GitRefInfo(name="v1", ref="refs/tags/v1", target_commit=commit))
        return listed

    client.patch.setattr(HfApi, "list_repo_refs", with_tag)
    for said, revisions in (("a commit", (commit, commit.upper())), ("a tag", ("v1", "refs/tags/v1"))):
        for revision in revisions:
            assert said in refused(hub, client, master, "--revision", revision)
    for revision in ("a b", "a-->b"):
        assert revision in refused(hub, client, master, "--revision", revision)


@pytest.mark.parametrize("after", [0, 1])
def test_card_that_the_hub_refuses(after: int, hub: LoopbackHub, client: Client, master: Path) -> None:
    """The Hub refuses it before anything is sent, or only with the commit."""
    body = b'{"errors": [{"message": "\\"license\\" must be one of [x]"}, {"message": "b"}], "warnings": []}'
    hub.inject(Fault(Status(400, body=body), "POST", "/api/validate-yaml", after=after, times=1000))
    line = client.line("push", master, TARGET)
    assert '"license" must be one of [x]' in line and "like a Hub" not in line
    assert after or (writes(hub) == [] and TARGET not in hub.repositories)


def test_branch_is_created_and_main_stays_untouched(hub: LoopbackHub, client: Client, master: Path, made: Path) -> None:
    """The card names the branch, but not a pull request."""
    told = client.well("push", master, TARGET, "--revision", "refs/heads/dev").stdout
    assert f"{TARGET}, branch dev (created)" in told
    assert_holds(hub, master, "dev")
    card = hub.repositories[TARGET].read("README.md", "dev").decode()
    assert f'load_model("{TARGET}", revision="dev")' in card and "--revision dev" in card
    client.well("push", master, TARGET, "--revision", "dev")
    assert_holds(hub, master, "dev")
    shutil.copytree(made / "sharded", master.parent / "sharded")
    client.well("push", master.parent / "sharded", TARGET, "--revision", "dev")
    assert_holds(hub, master.parent / "sharded", "dev")
    assert list(hub.repositories[TARGET].files()) == [".gitattributes"]
    assert ": ok: " in client.well("verify", TARGET, "--revision", "dev").stdout
    sent = len(puts(hub))
    client.well("push", master, TARGET)
    assert_holds(hub, master)
    assert b"revision" not in hub.repositories[TARGET].read("README.md")
    assert len(puts(hub)) == sent  # the first push to the branch sent them
    hub.commit(TARGET, {"notes.txt": b"x"}, branch="refs/pr/1")
    client.well("push", master, TARGET, "--revision", "refs/pr/1")
    card = hub.repositories[TARGET].read("README.md", "refs/pr/1").decode()
    assert TARGET in card and "revision" not in card


# --- What is there already --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smaller_first", [True, False])
def test_old_shards_are_deleted_and_other_files_stay(
    smaller_first: bool, hub: LoopbackHub, client: Client, master: Path, made: Path, tmp_path: Path
) -> None:
    """verify reports the other files, because the manifest does not list them."""
    sharded = Path(shutil.copytree(made / "sharded", tmp_path / "sharded"))
    assert len(list(sharded.glob("*.safetensors"))) > 2
    first, second = (master, sharded) if smaller_first else (sharded, master)
    client.well("push", first, TARGET)
    hub.commit(TARGET, {"LICENSE": b"of others", "images/plot.png": b"png"})
    assert deleted(client, second) == {path.name for path in first.glob("*.safetensors")}
    assert_holds(hub, second, also=("LICENSE", "images/plot.png"))
    problems = client("verify", TARGET).stdout.splitlines()
    assert [problem.partition(": ")[0] for problem in problems] == ["LICENSE", "images/plot.png"]


def test_notes_on_the_hub_are_kept(hub: LoopbackHub, client: Client, master: Path) -> None:
    client.well("push", master, TARGET)
    note_there(hub, "Written on the Hub: *übrigens*.\n")
    note_there(hub, "datasets:\n- a/b\n", "tags:\n")
    client.well("push", master, TARGET)  # puts the keys in order
    card = hub.repositories[TARGET].read("README.md").decode()
    for _ in range(2):
        assert "nothing was pushed" in client.well("push", master, TARGET).stdout
        assert hub.repositories[TARGET].read("README.md").decode() == card
        client.well("card", master)  # without notes, it changes nothing
    # With other weights, the card is written anew except for the notes and the keys.
    (master / "README.md").unlink()
    run_command({"quantize": str(write_source(master.parent / "source")), "overwrite": True, "recipe": "q4"}, master)
    client.well("push", master, TARGET)
    found = hub.repositories[TARGET].read("README.md").decode()
    assert "\nWritten on the Hub: *übrigens*.\n<!-- /notes -->" in found and "datasets:\n- a/b\n" in found
    assert found != card


NOTES_BEGIN, NOTES = "<!-- notes: yours; pqweights card keeps what stands here -->", "<!-- /notes -->"


def note_here(client: Client, folder: Path, text: str, at: str = NOTES) -> None:
    client.well("card", folder, "--repo", TARGET)
    card = (folder / "README.md").read_bytes()
    (folder / "README.md").write_bytes(card.replace(at.encode(), text.encode() + at.encode(), 1))


def note_there(hub: LoopbackHub, text: str, at: str = NOTES) -> None:
    card = hub.repositories[TARGET].read("README.md").replace(at.encode(), text.encode() + at.encode(), 1)
    hub.commit(TARGET, {"README.md": card})


def test_notes_and_keys_of_the_folder_replace_others_with_a_note(
    hub: LoopbackHub, client: Client, master: Path
) -> None:
    note_here(client, master, "Of here.\n")
    note_here(client, master, "thumbnail: y\n", "tags:\n")
    assert "replaced" not in client.well("push", master, TARGET).stderr
    note_there(hub, "Of the Hub.\n")
    before = hub.repositories[TARGET].sha()
    told = client.well("push", master, TARGET, "--dry-run").stderr
    assert f"in README.md on the Hub would be replaced by those of the folder; commit {before} has them" in told
    assert "were replaced" in client.well("push", master, TARGET).stderr
    card = hub.repositories[TARGET].read("README.md")
    assert b"\nOf here.\n<!-- /notes -->" in card and b"thumbnail: y\n" in card and b"Of the Hub" not in card


def test_foreign_card_on_the_hub_is_refused(hub: LoopbackHub, client: Client, master: Path) -> None:
    hub.commit(TARGET, {"README.md": b"# By hand\n"})
    assert "README.md on the Hub" in refused(hub, client, master)
    hub.commit(TARGET, {"README.md": f"{NOTES_BEGIN}\n# By hand\n{NOTES}\n".encode()})
    client.well("push", master, TARGET)
    assert b"\n# By hand\n" in hub.repositories[TARGET].read("README.md")


@pytest.mark.parametrize("where", ["here", "there"])
@pytest.mark.parametrize(("content", "says"), [(b"# \xff\n", "UTF-8"), (b"# " + b"x" * 4_000_000, "4000000 bytes")])
def test_card_that_is_not_a_text_is_refused(
    where: str, content: bytes, says: str, hub: LoopbackHub, client: Client, master: Path
) -> None:
    if where == "here":
        (master / "README.md").write_bytes(content)
    else:
        hub.commit(TARGET, {"README.md": content})
    line = refused(hub, client, master)
    assert says in line and "README.md" in line


def remote_manifest(hub: LoopbackHub, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(hub.repositories[TARGET].read("pqweights.json"))
    change(data)
    hub.commit(TARGET, {"pqweights.json": json.dumps(data).encode()})


def deleted(client: Client, folder: Path) -> set[str]:
    """Push, and return which files that deleted."""
    return {file["name"] for file in pushed(client, folder)["files"] if file["change"] == "deleted"}


def test_manifest_on_the_hub_cannot_delete_other_files(hub: LoopbackHub, client: Client, master: Path) -> None:
    """Files that match their entry were pushed by us, as far as can be told: of small files there is no SHA-256."""
    client.well("push", master, TARGET)
    theirs = {"notes.txt": b"1234", "vocab.bin.txt": b"12345", ".gitattributes": b"* text\n", ".cache/x": b"123"}
    theirs |= {"big.zip": b"zip", "same.zip": b"own"}
    hub.commit(TARGET, theirs)
    theirs["README.md"] = hub.repositories[TARGET].read("README.md")
    listed: dict[str, dict[str, Any]] = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in theirs.items()
    }
    listed["notes.txt"]["bytes"] = 5
    listed["big.zip"]["sha256"] = "00" * 32
    remote_manifest(hub, lambda data: data["files"].update(listed))
    assert deleted(client, master) == {"vocab.bin.txt", "same.zip"}
    assert_holds(hub, master, also=("notes.txt", ".cache/x", "big.zip"))


# Odd manifests that are read nevertheless.
READABLE = ("two tensors of a name",)
HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "half surrogates": lambda data: data["files"].update({"\ud800": {"bytes": 1, "sha256": "x"}}),
    "half surrogates of a tensor": lambda data: data["tensors"][0]["stored"][0].update(name="\udfff"),
    "metadata of half surrogates": lambda data: data.update(metadata={"\ud800": "\udfff"}),
    "a shape that no float holds": lambda data: data["tensors"][0]["stored"][0].update(shape=[10**400]),
    "bits of a list": lambda data: data["tensors"][0].update(bits=[5], action="quantize", codec="hadamard-lloyd-max"),
    "two tensors of a name": lambda data: data["tensors"].append(data["tensors"][0]),
    "a negative size": lambda data: data["files"]["config.json"].update(bytes=-1),
    "another version": lambda data: data.update(manifest_version=99),
}


@pytest.mark.parametrize("name", [*HOSTILE, "depth", "no text", "too large"])
def test_hostile_manifest_on_the_hub(
    name: str, hub: LoopbackHub, client: Client, master: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest that cannot be read is replaced, and nothing that it lists is deleted."""
    client.well("push", master, TARGET)
    hub.commit(TARGET, {"gone.txt": b"x"})
    remote_manifest(hub, lambda data: data["files"].update({"gone.txt": {"bytes": 1, "sha256": "x"}}))
    if name in HOSTILE:
        remote_manifest(hub, HOSTILE[name])
    elif name == "too large":
        monkeypatch.setattr("pqweights.publish.destination.MAX_MANIFEST_BYTES", 1000)
    else:
        hub.commit(TARGET, {"pqweights.json": b"[" * 100_000 if name == "depth" else b"\xff\xfe\x00"})
    assert deleted(client, master) == ({"gone.txt"} if name in READABLE else set())
    assert hub.repositories[TARGET].read("pqweights.json") == (master / "pqweights.json").read_bytes()


def test_evaluations_on_the_hub_are_deleted_with_their_manifest(hub: LoopbackHub, client: Client, master: Path) -> None:
    client.well("push", master, TARGET)
    hub.commit(TARGET, {"pqweights-eval.json": b"{}"})
    note_here(client, master, "Mine.\n")
    assert deleted(client, master) == set()
    run_command({"quantize": str(write_source(master.parent / "source")), "overwrite": True, "recipe": "q4"}, master)
    assert deleted(client, master) == {"pqweights-eval.json"}


# --- Interrupted pushes -----------------------------------------------------------------------------------------------


def test_interrupted_push_does_not_send_files_again(
    hub: LoopbackHub, client: Client, made: Path, tmp_path: Path
) -> None:
    sharded = Path(shutil.copytree(made / "sharded", tmp_path / "sharded"))
    hub.inject(Fault(Cut(1_000), "PUT", after=2, times=1000))
    assert "run the same command again" in client.line("push", sharded, TARGET)
    assert set(hub.repositories[TARGET].files()) == {".gitattributes"}  # no commit of some files only
    hub.clear_faults()
    stored, sent = set(hub.objects), len(puts(hub))
    client.well("push", sharded, TARGET)
    again = puts(hub)[sent:]
    assert len(stored) == 2 and not set(again) & stored
    assert len(again) == len(set(again)) == len(list(sharded.glob("*.safetensors"))) - 2
    assert_holds(hub, sharded)


def test_card_names_the_repository_that_was_quantized(hub: LoopbackHub, client: Client, tmp_path: Path) -> None:
    hub.commit(SOURCE, files_of(write_source(tmp_path / "source")))
    client.well("quantize", SOURCE, tmp_path / "master", "--low-disk")
    client.well("push", tmp_path / "master", TARGET)
    card = hub.repositories[TARGET].read("README.md").decode()
    assert re.search(rf"base_model:\s+(- )?{SOURCE}", card) and "license: apache-2.0" in card


def test_failed_xet_upload_is_reported_in_one_line(client: Client, hub: LoopbackHub, master: Path) -> None:
    """Errors of xet are plain RuntimeErrors."""

    def refuse(*values: object, **options: object) -> None:
        raise RuntimeError(f"CAS: 403 for https://cas.example/x?signature=1 with {hub.token}")

    client.patch.setattr("huggingface_hub.HfApi.preupload_lfs_files", refuse)
    line = client.line("push", master, TARGET)
    assert "CAS: 403 for https://cas.example/x with hf_***" in line


@pytest.mark.parametrize("name", [SHARD, "tokenizer.json"])
def test_file_that_changes_after_it_was_verified_is_not_pushed(
    name: str, hub: LoopbackHub, client: Client, master: Path
) -> None:
    def verify_and_change(*arguments: Any, **options: Any) -> Verification:
        verified = verify(*arguments, **options)
        flip_a_byte(master, name)
        return verified

    client.patch.setattr("pqweights.publish.push.verify", verify_and_change)
    line = client.line("push", master, TARGET)
    assert name in line and writes(hub) == []
