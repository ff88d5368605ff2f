"""Hostile repositories: each command gives a result or one line; nothing is run, and nothing written elsewhere."""

from __future__ import annotations

import itertools
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import bf16, folder_bytes, gaussian, run_command, safetensors_bytes, small_checkpoint
from hub_cases import Client, files_of, the_line
from loopback_faults import Corrupt, Drop, Fault, Status
from loopback_hub import Content, LoopbackHub

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")

SOURCE, MASTER = "evil/source", "evil/master"
INDEX, CONFIG, CARD = "model.safetensors.index.json", "config.json", "README.md"
SHARD = "model-00001-of-00002.safetensors"
OF_MASTER = "model-00001-of-00001.safetensors"
# Commands with a repository; {} stands for the output folder.
COMMANDS = (
    f"plan {SOURCE}",
    f"quantize {SOURCE} {{}}",
    f"quantize {SOURCE} {{}} --low-disk",
    f"verify {MASTER}",
    f"inspect {MASTER}",
    f"export {MASTER} {{}} --target bf16",
)


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder around everything that may be written, which is sandbox/a/b/work/out and sandbox/home."""
    work = tmp_path / "sandbox/a/b/work"
    work.mkdir(parents=True)
    (work / "mine.txt").write_text("mine")
    monkeypatch.chdir(work)
    return tmp_path / "sandbox"


@pytest.fixture
def home(sandbox: Path) -> Path:
    return sandbox / "home"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of two shards, and its master."""
    folder = tmp_path_factory.mktemp("made")
    small_checkpoint(folder / "source")
    run_command({"quantize": str(folder / "source")}, folder / "master")
    return folder


def outside(sandbox: Path, out: Path) -> dict[str, bytes]:
    """Return the content of all files but those in the output folder and the Hub's cache."""
    ours = {sandbox / "home", out}
    paths = (path for path in sandbox.rglob("*") if not ours & {path, *path.parents})
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in paths}


def expect_line_or_result(client: Client, sandbox: Path, command: str) -> str | None:
    """Run a command, and return the line with which it was refused, or None.

    Nothing but the output folder and the cache may change.
    """
    out = sandbox / "a/b/work/out"
    while out.exists():
        out = out.with_name(out.name + "-")
    before = outside(sandbox, out)
    result = client(*command.format(out).split())
    assert outside(sandbox, out) == before
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert not [path for path in out.rglob("*") if any(part.startswith(".git") for part in path.relative_to(out).parts)]
    if result.exit_code == 0:
        return None
    assert result.exit_code == 1
    if command.startswith("verify") and result.stdout:
        assert result.stderr == ""
        return result.stdout
    return the_line(result.stderr)


def commit(hub: LoopbackHub, made: Path, changes: Mapping[str, Content | None], *, only: str = "") -> None:
    """Commit the source and its master with changes, or only one of them."""
    for id, name in ((SOURCE, "source"), (MASTER, "master")):
        if only in ("", id):
            hub.commit(id, {**files_of(made / name), **changes})


# --- Names ------------------------------------------------------------------------------------------------------------

LEAVING = [
    *("../x", "/etc/x", "{sandbox}/absolute", "a/../../b", "a\\b", "..\\b", "a/./b", "a//b", "./x", "..", "a/..", "a/"),
    *("C:/x", "nul\0byte", "new\nline", "carriage\rreturn", "escape\x1b[31m", "/../../../x", "../../../../home/hub/x"),
]
ODD = ["a b.py", " .py", "übung.py", "-rf.py", "$(touch x).py", "x" * 200 + ".py", "%2e%2e/x.py"]
HIDDEN = [".git/config", ".git/hooks/post-checkout", ".gitmodules", ".pqweights/journal.jsonl", ".bashrc", "a/.ssh/id"]


@pytest.mark.parametrize("name", LEAVING, ids=ascii)
def test_names_that_lead_out_of_the_folder_are_refused(
    name: str, hub: LoopbackHub, client: Client, sandbox: Path, made: Path
) -> None:
    commit(hub, made, {name.format(sandbox=sandbox): b"escaped"})
    for command in COMMANDS[:2] + COMMANDS[4:5]:  # all of them open a repository in one of these ways
        line = expect_line_or_result(client, sandbox, command)
        assert line is not None and "do not use this repository" in line, command


def test_odd_names_are_kept(hub: LoopbackHub, client: Client, sandbox: Path, made: Path) -> None:
    commit(hub, made, dict.fromkeys(ODD, b"odd"))
    for command in COMMANDS:
        line = expect_line_or_result(client, sandbox, command)
        assert (line is None) != command.startswith("verify"), (command, line)
    for out in ("out", "out-"):
        assert {name: (sandbox / "a/b/work" / out / name).read_bytes() for name in ODD} == dict.fromkeys(ODD, b"odd")
    exported = folder_bytes(sandbox / "a/b/work/out--")
    assert "config.json" in exported and not exported.keys() & {*ODD}  # the manifest of the master does not list them
    commit(hub, made, {"x" * 300 + ".py": b"odd"})
    for command in COMMANDS[1:3]:
        assert expect_line_or_result(client, sandbox, command) is not None  # too long for the disk


def test_hidden_files_are_not_fetched(hub: LoopbackHub, client: Client, sandbox: Path, made: Path) -> None:
    commit(hub, made, dict.fromkeys(HIDDEN, b"hidden"))
    for command in COMMANDS:
        assert expect_line_or_result(client, sandbox, command) is None
    assert folder_bytes(sandbox / "a/b/work/out").keys() == folder_bytes(made / "master").keys()
    assert not [request for request in hub.requests for name in HIDDEN if request.path.endswith(f"/{name}")]


@pytest.mark.parametrize("both", [False, True], ids=["in the index", "in the index and the list"])
@pytest.mark.parametrize("name", ["../x.safetensors", "{sandbox}/x.safetensors", "a/x.safetensors", "a\\x.safetensors"])
def test_index_that_points_out_of_the_folder_is_refused(
    name: str, both: bool, hub: LoopbackHub, client: Client, sandbox: Path, made: Path
) -> None:
    name = name.format(sandbox=sandbox)
    real = (made / "source" / SHARD).read_bytes()
    for path in (sandbox / "a/b/x.safetensors", sandbox / "x.safetensors"):
        path.write_bytes(real)  # a file of the user
    index = json.loads((made / "source" / INDEX).read_bytes())
    index["weight_map"] = {key: name if file == SHARD else file for key, file in index["weight_map"].items()}
    changes: dict[str, Content | None] = {INDEX: json.dumps(index).encode(), SHARD: None}
    commit(hub, made, changes | ({name: real} if both else {}), only=SOURCE)
    for command in COMMANDS[:3]:
        line = expect_line_or_result(client, sandbox, command)
        assert line is not None and name[:60] in line.replace("\\\\", "\\")


def test_manifest_that_points_out_of_the_folder_is_refused(
    hub: LoopbackHub, client: Client, sandbox: Path, made: Path
) -> None:
    manifest = json.loads((made / "master/pqweights.json").read_bytes())
    for name in ("../mine.txt", f"{sandbox}/a/b/work/mine.txt"):
        manifest["files"][name] = {"bytes": 4, "sha256": "0" * 64}
        commit(hub, made, {"pqweights.json": json.dumps(manifest).encode()}, only=MASTER)
        assert expect_line_or_result(client, sandbox, f"verify {MASTER}") is not None
        expect_line_or_result(client, sandbox, f"inspect {MASTER}")


def test_symbolic_links_are_not_followed(hub: LoopbackHub, client: Client, sandbox: Path, made: Path) -> None:
    """Git stores a link as its target, and the Hub lists that as a small file."""
    for name in ("/etc/passwd", str(sandbox / "a/b/work/mine.txt"), "../mine.txt"):
        commit(hub, made, {"tokenizer.json": name.encode()}, only=SOURCE)
        for command in COMMANDS[1:3]:
            out = sandbox / "a/b/work" / f"out-{len(list(sandbox.rglob('out*')))}"
            client.well(*command.format(out).split())
            assert (out / "tokenizer.json").read_bytes() == name.encode()
            assert not (out / "tokenizer.json").is_symlink()
    hub.commit(SOURCE, {SHARD: b"../../../etc/passwd"})
    for command in COMMANDS[:3]:
        assert expect_line_or_result(client, sandbox, command) is not None


# --- Weights ----------------------------------------------------------------------------------------------------------


def header_of(length: int, text: bytes = b"", data: bytes = b"") -> bytes:
    return struct.pack("<Q", length) + text + data


# What a header says matters as it does in a local folder (tests/hostile/headers.py); here, how its bytes are requested.
SHARDS: dict[str, Callable[[bytes], bytes]] = {
    "a header of 2**64 - 1 bytes": lambda shard: header_of(2**64 - 1) + shard[8:],
    "a header of 200 MB that is not there": lambda shard: header_of(200_000_000) + shard[8:],
    "a header longer than the file": lambda shard: header_of(len(shard)) + shard[8:],
    "a header of no bytes": lambda shard: header_of(0) + shard[8:],
    "no header": lambda shard: b"\0" * 4,
    "an empty file": lambda shard: b"",
    "nesting": lambda shard: header_of(90_000, b"[" * 90_000, shard),
    "cut": lambda shard: shard[:-1],
    "more than the header says": lambda shard: shard + b"x",
}


@pytest.mark.parametrize("name", SHARDS)
def test_damaged_shards_are_refused(name: str, hub: LoopbackHub, client: Client, sandbox: Path, made: Path) -> None:
    for id, file in ((SOURCE, made / "source" / SHARD), (MASTER, made / "master" / OF_MASTER)):
        commit(hub, made, {file.name: SHARDS[name](file.read_bytes())}, only=id)
    for command in COMMANDS:
        line = expect_line_or_result(client, sandbox, command)
        assert (line is None) == command.startswith("inspect evil/master"), command
    assert not list(sandbox.rglob("out*/*.safetensors"))


def test_header_of_200_megabytes_is_not_fetched(hub: LoopbackHub, client: Client, sandbox: Path, made: Path) -> None:
    path = sandbox.parent / "sparse"
    with path.open("wb") as file:
        file.write(header_of(200_000_000, b"{" + b" " * 100))
        file.truncate(210_000_000)
    hub.commit(SOURCE, {**files_of(made / "source"), SHARD: path}, sha256={SHARD: "0" * 64})
    for command in COMMANDS[:3]:
        line = expect_line_or_result(client, sandbox, command)
        assert line is not None and SHARD in line
    assert sum(request.bytes_sent for request in hub.requests) < 20_000_000


@pytest.mark.parametrize("file", [SHARD, CONFIG, "tokenizer.json", CARD])
@pytest.mark.parametrize("change", [-1, 1, 10**13, "empty"])
def test_wrong_sizes_in_the_list_are_noticed(
    file: str, change: int | str, hub: LoopbackHub, client: Client, sandbox: Path, made: Path
) -> None:
    """The list names another size than the content that is served. So large a card is ignored."""
    commit(hub, made, {}, only=SOURCE)
    there = hub.repositories[SOURCE]
    old = there.blobs()[file]
    size = 0 if change == "empty" else old.size + int(change)
    there.advance("main", {file: replace(old, size=size)})
    for command in COMMANDS[:3]:
        is_read = not (command.startswith("plan") and file in ("tokenizer.json", CARD))
        is_noticed = is_read and not (file == CARD and size > 4_000_000)
        assert (expect_line_or_result(client, sandbox, command) is not None) == is_noticed


@pytest.mark.parametrize("options", ["", " --low-disk"])
def test_header_damaged_on_the_way_leaves_no_result(
    options: str, hub: LoopbackHub, client: Client, sandbox: Path, tmp_path: Path
) -> None:
    """There is no result that does not follow from the content of the repository."""
    data = safetensors_bytes({"model.layers.0.mlp.up_proj.weight": bf16(gaussian(64, 256))})
    hub.commit(SOURCE, {"model.safetensors": data})
    hub.inject(Fault(Corrupt(data.index(b"up_proj")), "GET", r"resolve/.*\.safetensors"))
    expect_line_or_result(client, sandbox, f"quantize {SOURCE} {{}}{options}")
    for path in sandbox.rglob("out*/*.safetensors"):
        assert b"up_proj" in path.read_bytes()


# --- Configurations and cards -----------------------------------------------------------------------------------------


def merges(levels: int) -> bytes:
    """Return YAML of a few lines that merges into 10**levels pairs."""
    lines = ["a0: &a0 {k: v}"]
    for n in range(1, levels + 1):
        merged = ", ".join([f"*a{n - 1}"] * 10)
        lines.append(f"a{n}: &a{n} {{<<: [{merged}]}}")
    return "\n".join(lines).encode()


def aliases(levels: int) -> bytes:
    """Return YAML of a few lines whose last list holds 10**levels items."""
    lists = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels + 1)]
    return "\n".join(["a0: &a0 [x]", *lists]).encode()


# The front matter of a card, and the facts that a master keeps of it.
CARDS: dict[str, tuple[bytes, dict[str, Any]]] = {
    "aliases": (aliases(19) + b"\nlicense: *a19\npipeline_tag: text-generation", {"pipeline_tag": "text-generation"}),
    "itself": (b"license: &a [*a]\nlicense_name: x", {"license_name": "x"}),
    "python": (b"license: !!python/object/apply:os.system ['touch RAN']", {}),
    "python, new": (b"license: !!python/object/new:os.system ['touch RAN']\nlanguage: en", {}),
    "python name": (b"license: !!python/name:os.system\nlanguage: en", {}),
    "tabs": (b"license:\tmit\n\tlanguage: en", {}),
    "nested": (b"license: " + b"[" * 20_000, {}),
    "types": (b"license: [mit]\nlicense_name: 3\nlicense_link: 2020-01-01\npipeline_tag: {a: b}\nlanguage: 7", {}),
    "dates": (b"license: 2020-99-99", {}),
    "long": (b"license: " + b"x" * 301 + b"\nlicense_name: ok", {"license_name": "ok"}),
    "control": (b'license: "a\\u001b[31mb\\u202e"\nlicense_name: "a\\nb"', {}),
    "no mapping": (b"- license: mit", {}),
    "norwegian": (b"language:\n- no\n- en", {"language": ["no", "en"]}),
    "no text": (b"license: \xff\xfe", {"license": "\ufffd\ufffd"}),
    "a list as a key": (b"? [a]\n: b\nlicense: mit", {}),
}
CARDS_TOO_MUCH = {
    "merged": merges(7),
    "languages in a list": b"language:\n- [en]\n- de",
    "languages in a mapping": b"language:\n- {en: 1}",
    "many lines": b"x: [a, b, c, d]\n" * 100_000,
    "a number to the base of 60": b"license: " + b"1:" * 300_000 + b"1",
}


@pytest.mark.parametrize("name", CARDS)
def test_hostile_cards_give_only_valid_facts(
    name: str, hub: LoopbackHub, client: Client, sandbox: Path, made: Path
) -> None:
    front, facts = CARDS[name]
    commit(hub, made, {CARD: b"---\n" + front + b"\n---\n# x\n"}, only=SOURCE)
    for command in COMMANDS[:2]:
        assert expect_line_or_result(client, sandbox, command) is None
    stated = json.loads((sandbox / "a/b/work/out/pqweights.json").read_bytes())["model"]
    assert {key: value for key, value in stated.items() if key not in ("id", "revision")} == facts
    assert not list(sandbox.rglob("RAN"))


@pytest.mark.parametrize("name", CARDS_TOO_MUCH)
def test_hostile_cards_are_read_in_a_second(name: str, tmp_path: Path) -> None:
    """Each is read in a process that may use little time; without care it would take minutes."""
    path = tmp_path / CARD
    path.write_bytes(b"---\n" + CARDS_TOO_MUCH[name] + b"\n---\n# x\n")
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_CPU, (2, 2)); from pathlib import Path\n"
        "from pqweights.checkpoint.config import model_facts\n"
        "from pqweights.checkpoint.storage import Storage\n"
        "model_facts(Storage(Path(sys.argv[1])))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_card_of_5_megabytes_is_not_fetched(hub: LoopbackHub, client: Client, sandbox: Path, made: Path) -> None:
    commit(hub, made, {CARD: b"---\nlicense: mit\n---\n" + b"x" * 5_000_000}, only=SOURCE)
    assert expect_line_or_result(client, sandbox, COMMANDS[1]) is None
    assert sum(request.bytes_sent for request in hub.requests) < 1_000_000


# --- Code -------------------------------------------------------------------------------------------------------------


def code(marker: Path) -> dict[str, bytes]:
    """Return files of code that leave a mark if they are run."""
    run = f"open({str(marker)!r}, 'a').write(__file__)\n".encode()
    model = run + b"class EvilModel: pass\nclass EvilConfig: pass\nclass EvilTokenizer: pass\n"
    names = [
        *("modeling_x.py", "configuration_x.py", "tokenization_x.py", "setup.py", "conftest.py", "__init__.py"),
        *("sitecustomize.py", "usercustomize.py", "json.py", "numpy.py", "transformers/__init__.py", "handler.py"),
        "chat_template.py",
    ]
    tokenizer = {
        "auto_map": {"AutoTokenizer": ["tokenization_x.EvilTokenizer", None]},
        "tokenizer_class": "EvilTokenizer",
    }
    return {**dict.fromkeys(names, model), "tokenizer_config.json": json.dumps(tokenizer).encode()}


AUTO_MAP = {
    "AutoConfig": "configuration_x.EvilConfig",
    "AutoModelForCausalLM": "modeling_x.EvilModel",
    "AutoModel": "modeling_x.EvilModel",
}


@pytest.mark.parametrize("kind", ["llama", "llama, another class", "unknown"])
def test_code_in_a_repository_is_never_run(
    kind: str, hub: LoopbackHub, client: Client, sandbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    import transformers

    import pqweights

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, head_dim=64
    )
    folder, marker = sandbox.parent / "model", sandbox.parent / "RAN"
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    written = json.loads((folder / CONFIG).read_bytes()) | {"auto_map": AUTO_MAP}
    if kind != "llama":
        written["architectures"] = ["EvilForCausalLM"]
    if kind == "unknown":
        written["model_type"] = "evil"
    (folder / CONFIG).write_text(json.dumps(written))
    for name, data in code(marker).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    hub.commit(SOURCE, files_of(folder))
    out = sandbox / "a/b/work/out"
    monkeypatch.setenv("HF_MODULES_CACHE", str(sandbox / "home/modules"))
    assert expect_line_or_result(client, sandbox, COMMANDS[1]) is None
    hub.commit(MASTER, files_of(out))
    for command in COMMANDS:
        assert expect_line_or_result(client, sandbox, command) is None
    monkeypatch.chdir(out)
    client.well("verify", ".")
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    for repository in (MASTER, SOURCE, out):
        if kind != "unknown":
            assert type(pqweights.load_model(repository)).__module__.startswith("transformers.models.llama")
        else:
            with pytest.raises((ValueError, pqweights.errors.PqweightsError)):
                pqweights.load_model(repository)
    assert not marker.exists()


# --- Tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "token"),
    [("--token", "hf_" + "Secret" * 6), ("HF_TOKEN", "another+form/of=secret"), ("--token", "x" * 40)],
)
def test_token_is_neither_printed_nor_written(
    given: str, token: str, hub: LoopbackHub, client: Client, sandbox: Path, made: Path
) -> None:
    hub.token = token
    client.token = token if given == "HF_TOKEN" else None
    option = ["--token", token] if given == "--token" else []
    commit(hub, made, {})
    hub.create("me/private", private=True).access = False
    hub.create("me/gated", gated="auto").access = False
    hub.commit("me/gated", files_of(made / "source"))
    saying = {"X-Error-Message": f"no, {token}: see https://x.org/y?Signature={token}"}
    body = json.dumps({"error": f"{token}"}).encode()
    elsewhere = {"Location": f"http://127.0.0.1:1/?token={token}"}
    faults = [
        *(Fault(Status(code, saying, body), times=100) for code in (400, 403, 500, 401)),
        Fault(Drop(), times=100),
        Fault(Status(200, {}, b"no JSON " + token.encode()), "GET", "/resolve/", times=100),
        Fault(Status(302, elsewhere, b""), "GET", "/resolve/", times=100),
    ]
    push, outs = f"push {made / 'master'} you/x --dry-run", (sandbox / f"out-{n}" for n in itertools.count())

    def exit_code(command: str) -> int:
        result = client(*command.format(next(outs)).split(), *option)
        assert not any(part in result.output for part in (token, "Signature=", "Traceback")), result.output
        return result.exit_code

    assert [exit_code(command) for command in COMMANDS] == [0] * len(COMMANDS)
    for command in ("plan me/private", "plan me/gated", "plan me/nothing", push):
        exit_code(command)
    for fault in faults:
        hub.inject(fault)
        assert exit_code(COMMANDS[2]) == 1
        for command in (COMMANDS[4], push):
            exit_code(command)
        hub.clear_faults()
    for path in sandbox.rglob("*"):
        assert token.encode() not in (path.read_bytes() if path.is_file() else os.fsencode(path))
    assert any(request.authorized for request in hub.requests)
