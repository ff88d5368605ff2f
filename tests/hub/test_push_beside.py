"""Several exports of a model in one repository: each push leaves the files of the others as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import language_models
import pytest
from commands import done
from gguf_files import write_llama
from hub_cases import TARGET, Client, files_of
from loopback_hub import LoopbackHub
from measurements import measure

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a master, other masters and exports of it; `split` is `q8` in several files."""
    folder = tmp_path_factory.mktemp("made")
    source = language_models.with_tokenizer(write_llama(folder / "source", rows=264))
    done("quantize", source, folder / "master", "-q")
    done("quantize", source, folder / "sharded", "--max-shard-size", "6kB", "-q")
    done("export", folder / "master", folder / "bf16", "--target", "bf16", "-q")
    for name, options in (("q8", ("q8_0",)), ("q4", ("q4_0",)), ("split", ("q8_0", "--max-shard-size", "6kB"))):
        done("export", folder / "master", folder / name, "--target", "gguf", "--type", *options, "-q")
    return folder


def pushed(client: Client, folder: Path, *options: str) -> dict[str, set[str]]:
    """Push, and return the names of the files by what happens to them."""
    files = json.loads(client.well("push", folder, TARGET, "--json", *options).stdout)["files"]
    return {change: {file["name"] for file in files if file["change"] == change} for change in ("new", "deleted")}


def weights(folder: Path) -> set[str]:
    return {name for name in files_of(folder) if name.endswith((".gguf", ".safetensors"))}


def there(hub: LoopbackHub) -> dict[str, Any]:
    return hub.repositories[TARGET].files()


def assert_holds(hub: LoopbackHub, folder: Path) -> None:
    for name in weights(folder):
        assert hub.repositories[TARGET].read(name) == (folder / name).read_bytes()


def test_a_second_type_leaves_the_first(hub: LoopbackHub, client: Client, made: Path) -> None:
    for name in ("q4", "q8"):
        assert pushed(client, made / name)["deleted"] == set()
    assert_holds(hub, made / "q4")
    assert_holds(hub, made / "q8")
    manifests = [hub.repositories[TARGET].read(name) for name in there(hub) if name.endswith("pqweights.json")]
    assert sorted(manifests) == sorted((made / name / "pqweights.json").read_bytes() for name in ("q4", "q8"))
    card = hub.repositories[TARGET].read("README.md").decode()
    assert all(name in card for name in weights(made / "q4") | weights(made / "q8"))
    assert ": ok: " in client.well("verify", TARGET).stdout
    before = there(hub)
    assert "nothing was pushed" in client.well("push", made / "q8", TARGET).stdout
    assert there(hub) == before


def test_eval_of_a_repository_takes_the_files_of_all_pushes(
    hub: LoopbackHub, client: Client, made: Path, tmp_path: Path
) -> None:
    for name in ("q4", "q8"):
        pushed(client, made / name)
    hub.commit(TARGET, {"a.pqweights.json": b"{", "b.pqweights.json": b'{"container": {"files": [{"name": []}]}}'})
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 40, encoding="utf-8")
    options = ("--text", tmp_path / "text.txt", "--window", "16", "--max-tokens", "32", "--json", "-q")
    rows = json.loads(client.well("eval", TARGET, *options).stdout)["models"]
    assert {row["model"] for row in rows} == {
        f"{TARGET}/{file}" for name in ("q4", "q8") for file in weights(made / name)
    }


def test_only_stale_files_of_the_same_type_go_and_are_named_before(
    hub: LoopbackHub, client: Client, made: Path
) -> None:
    """The first type is pushed again in fewer files, after another type has taken pqweights.json."""
    for name in ("split", "q4"):
        pushed(client, made / name)
    hub.commit(TARGET, {"imatrix.dat": b"of others", "other-Q5_K_M.gguf": b"GGUF"})
    stale = weights(made / "split") | {"model-Q8_0.pqweights.json"}
    told = client.well("push", made / "q8", TARGET, "--dry-run")
    assert {line.split()[-1] for line in told.stdout.splitlines() if line.startswith("deleted")} == stale
    assert weights(made / "split") <= there(hub).keys()
    told = client.well("push", made / "q8", TARGET)
    assert "removing what an earlier push of this export left" in told.stderr
    assert all(name in told.stderr for name in stale) and not stale & there(hub).keys()
    assert {"imatrix.dat", "other-Q5_K_M.gguf"} <= there(hub).keys()
    assert_holds(hub, made / "q4")
    assert_holds(hub, made / "q8")


@pytest.mark.parametrize("order", [("master", "q4", "q8"), ("q4", "q8", "master"), ("q4", "master", "q8")])
def test_a_master_and_its_exports_to_gguf_lie_in_one_repository(
    order: tuple[str, ...], hub: LoopbackHub, client: Client, made: Path, tmp_path: Path
) -> None:
    for name in (*order, order[0]):
        assert not weights(made / "q4") & pushed(client, made / name)["deleted"]
    for name in order:
        assert_holds(hub, made / name)
    assert hub.repositories[TARGET].read("pqweights.json") == (made / "master/pqweights.json").read_bytes()
    card = hub.repositories[TARGET].read("README.md").decode()
    assert all(f"\n- {tag}\n" in card for tag in ("5-bit", "gguf", "llama.cpp"))
    assert ": ok: " in client.well("verify", TARGET).stdout
    client.well("export", TARGET, tmp_path / "bf16", "--target", "bf16")
    # Other shards of the master take the place of the first.
    assert pushed(client, made / "sharded")["deleted"] == weights(made / "master")
    for name in ("sharded", "q4", "q8"):
        assert_holds(hub, made / name)


@pytest.mark.parametrize(("first", "second"), [("master", "bf16"), ("bf16", "master"), ("bf16", "sharded")])
def test_another_result_in_safetensors_is_refused(
    first: str, second: str, hub: LoopbackHub, client: Client, made: Path
) -> None:
    """Its configuration would replace that of the first, whose weights nothing could load then."""
    pushed(client, made / first)
    before, asked = there(hub), len(hub.requests)
    line = client.line("push", made / second, TARGET)
    assert TARGET in line and ("an export for bf16" if first == "bf16" else "a master") in line
    assert there(hub) == before and not any(r.method in ("PUT", "POST") for r in hub.requests[asked:])


def test_evaluations_stay_with_the_manifest_that_they_are_of(hub: LoopbackHub, client: Client, made: Path) -> None:
    pushed(client, made / "q4")
    hub.commit(TARGET, {"pqweights-eval.json": b"{}"})
    assert pushed(client, made / "q8")["deleted"] == {"pqweights-eval.json"}
    assert hub.repositories[TARGET].read("model-Q4_0.pqweights-eval.json") == b"{}"
    assert "model-Q4_0.pqweights-eval.json" in pushed(client, made / "q4")["deleted"]
    assert hub.repositories[TARGET].read("pqweights-eval.json") == b"{}"


def test_the_card_has_one_table_and_one_picture_of_all_types(
    hub: LoopbackHub, client: Client, made: Path, tmp_path: Path
) -> None:
    folders = [Path(shutil.copytree(made / name, tmp_path / name)) for name in ("q4", "q8")]
    for folder, kl in zip(folders, (0.05, 0.004), strict=True):
        measure(folder, {None: kl})
        pushed(client, folder)
    card = hub.repositories[TARGET].read("README.md").decode()
    assert all(f"| {kind} | `model-{kind}.gguf` |" in card for kind in ("Q4_0", "Q8_0"))
    assert "| 0.05000 ±" in card and "| 0.00400 ±" in card and "](pqweights-kl.svg)" in card
    assert all(kind in hub.repositories[TARGET].read("pqweights-kl.svg").decode() for kind in ("Q4_0", "Q8_0"))
    assert ": ok: " in client.well("verify", TARGET).stdout
