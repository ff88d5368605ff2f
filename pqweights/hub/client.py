"""The Hub behind one door: every request, how long is waited, and the words in which a refusal is told.

The official client (huggingface_hub 2.4) tries few requests again, checks no hash of what it fetched, and starts a
file from the beginning where a process was killed. So this is done here: lost connections, replies cut short, 429 with
Retry-After and errors of the server are tried again, content is checked against the hash that the Hub lists, and large
files are fetched by ranges. All refusals become HubError, one line without the token.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pqweights.checkpoint.storage import Origin
from pqweights.checkpoint.writer import COPY_BYTES, disk_errors, partial_path, sync_folder
from pqweights.errors import HubError

ATTEMPTS = 6
FIRST_ATTEMPTS = 3  # as long as there was no answer to anything
FIRST_WAIT_SECONDS = 1.0  # then twice as long each time
LONGEST_WAIT_SECONDS = 120.0  # asked for by the Hub; longer than that is for the user to wait
WRONG_CONTENT_ATTEMPTS = 3  # a file that does not hash to what the Hub says
TIMEOUT_SECONDS = 30.0
COMMIT_TIMEOUT_SECONDS = 300.0
PASSING = (408, 425, 429, 500, 502, 503, 504)
LOG_IN = "log in with `hf auth login`, or pass --token"
TOKEN = re.compile(r"hf_[A-Za-z0-9_-]{4,}")
# Of a URL, user and password, and everything from the question mark on, where signatures stand.
CREDENTIALS = re.compile(r"(https?://)[^\s/@'\"]+@")
QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
MOST_HTTP_BYTES = 50_000_000_000  # of a file; more the Hub sends by xet alone

Result = TypeVar("Result")
Tell = Callable[[str], None]  # a line for the user: what is being waited for
Show = Callable[[int], None]  # so many more bytes have come, or gone


class Interrupted(Exception):
    """A transfer was stopped by this program, because something else failed or the user asked for it."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository. sha256: of its content where it is kept as a large file, else blob_id, its git SHA-1."""

    name: str
    byte_count: int
    sha256: str | None
    blob_id: str | None

    @property
    def identity(self) -> str:
        """What its content hashes to."""
        return self.sha256 or self.blob_id or ""

    def is_of(self, pieces: Iterable[bytes]) -> bool:
        """Whether this is its content."""
        digest = hashlib.sha256() if self.sha256 is not None else hashlib.sha1(usedforsecurity=False)
        if self.sha256 is None:
            digest.update(b"blob %d\0" % self.byte_count)
        for piece in pieces:
            digest.update(piece)
        return digest.hexdigest() == self.identity


@dataclass(frozen=True)
class Repository:
    """A repository at one commit; every request names that commit, so that later ones change nothing."""

    id: str
    commit: str
    files: dict[str, RemoteFile]
    private: bool = False

    @property
    def origin(self) -> Origin:
        """Id and commit."""
        return Origin(self.id, self.commit)


class Hub:
    """Requests with one token. requests, bytes: how many were sent, and what came back, so far.

    token: None for the one that the user logged in with, or that HF_TOKEN names. tell: hears of every wait.
    """

    def __init__(self, token: str | None = None, tell: Tell = lambda line: None) -> None:
        if token is not None:
            token = token.strip()
            if not (token.isascii() and token.isprintable() and token):
                raise HubError("--token: expected printable ASCII characters; copy the token anew")
        # Imported here: most commands never need it, and it takes half as long as they do.
        self.library: Any = importlib.import_module("huggingface_hub")
        self._http: Any = importlib.import_module("httpx2")
        self.utils: Any = importlib.import_module("huggingface_hub.utils")
        self.errors: Any = importlib.import_module("huggingface_hub.errors")
        # Its remarks repeat what `tell` says.
        self.utils.logging.set_verbosity_error()
        self.token = token
        self.api: Any = self.library.HfApi(token=token)
        self.requests = self.bytes = 0
        self._tell = tell
        self._counted: Any = None
        self._lock = threading.Lock()
        try:
            self._count()
        except (ValueError, self._http.InvalidURL) as error:
            raise HubError(f"HF_ENDPOINT: no address of a Hub: {self.clean(str(error))}") from None

    def repository(self, repository: str, revision: str | None = None) -> Repository:
        """What a repository holds at a branch, tag or commit (None: main).

        Raises HubError.
        """
        try:
            self.utils.validate_repo_id(repository)
        except self.errors.HFValidationError as error:
            raise HubError(f"{repository}: no name of a repository: {self.clean(str(error))}") from None
        of = f" at revision {revision}" if revision else ""
        found = self.call(
            repository,
            lambda: self.api.model_info(repository, revision=revision, files_metadata=True, timeout=TIMEOUT_SECONDS),
            of,
        )
        files = {}
        for each in found.siblings or ():
            file = RemoteFile(each.rfilename, each.size, None if each.lfs is None else each.lfs.sha256, each.blob_id)
            if not isinstance(file.byte_count, int) or file.byte_count < 0 or not HASH.fullmatch(str(file.identity)):
                raise HubError(f"{repository}: {file.name!a}: the Hub tells neither size nor hash of it")
            files[file.name] = file
        if not HASH.fullmatch(str(found.sha)):
            raise HubError(f"{repository}: the Hub tells no commit of it")
        return Repository(str(found.id), str(found.sha), dict(sorted(files.items())), bool(found.private))

    @property
    def endpoint(self) -> str:
        """Address of the Hub that is asked."""
        return self.clean(str(self.api.endpoint))

    def log_in(self) -> str:
        """The name that the token stands for; before anything is sent.

        Raises HubError where there is none, or not a valid one.
        """
        self.utils.disable_progress_bars()
        # The client's own is none: a stalled reply would be waited for for ever. Long enough for a commit of many files.
        self.utils.get_session().timeout = self._http.Timeout(COMMIT_TIMEOUT_SECONDS, connect=TIMEOUT_SECONDS)
        return str(self.call("login", lambda: self.api.whoami())["name"])

    def exists(self, repository: str) -> bool:
        """Whether there is a repository that we may see. Raises HubError."""
        return bool(self.call(repository, lambda: self.api.repo_exists(repository)))

    def read(self, repository: Repository, file: str, start: int, count: int) -> bytes:
        """`count` bytes of a file from `start`, by one ranged request. Raises HubError."""
        if count == 0:
            return b""

        def fetch() -> bytes:
            data = bytearray()
            for chunk in self._stream(repository, file, start, count):
                data += chunk
                if len(data) > count:
                    raise HubError(f"{repository.id}: {file}: asked for {count} bytes, the Hub sends more")
            if len(data) != count:
                raise self._http.RemoteProtocolError(f"expected {count} bytes, found {len(data)}")
            return bytes(data)

        return self.call(repository.id, fetch, f": {file}")

    def read_whole(self, repository: Repository, file: RemoteFile) -> bytes:
        """A small file, checked against its hash. Raises HubError."""
        for _ in range(WRONG_CONTENT_ATTEMPTS):
            data = self.read(repository, file.name, 0, file.byte_count)
            if file.is_of([data]):
                return data
        raise _wrong_content(repository, file)

    def download(
        self,
        repository: Repository,
        file: RemoteFile,
        target: Path,
        show: Show = lambda count: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Fetch a file to `target`, going on where an earlier attempt or process stopped; checked against its hash.

        Raises HubError, OutputError for the disk, Interrupted once `stop` says so.
        """
        if file.byte_count > MOST_HTTP_BYTES:
            raise HubError(
                f"{repository.id}: {file.name}: {file.byte_count} bytes, more than the Hub sends by HTTP: fetch it with `hf download "
                f"{repository.id}`, and give the folder"
            )
        partial = partial_path(target)

        def fetch() -> None:
            with disk_errors(target), open(partial, "ab") as stream:
                if stream.tell() > file.byte_count:
                    stream.seek(stream.truncate(0))
                for chunk in self._stream(repository, file.name, stream.tell(), file.byte_count - stream.tell()):
                    if stop():
                        raise Interrupted
                    stream.write(chunk)
                    show(len(chunk))
                stream.flush()
                if stream.tell() != file.byte_count:
                    raise self._http.RemoteProtocolError(f"expected {file.byte_count} bytes, found {stream.tell()}")
                os.fsync(stream.fileno())

        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(WRONG_CONTENT_ATTEMPTS):
            self.call(
                repository.id, fetch, f": {file.name}", stop,
                how_far=lambda: partial.stat().st_size if partial.exists() else 0,
            )  # fmt: skip
            if file.is_of(pieces_of(partial)):
                with disk_errors(target):
                    os.replace(partial, target)
                    sync_folder(target.parent)
                return
            partial.unlink()
        raise _wrong_content(repository, file)

    def cached(self, repository: Repository, file: RemoteFile) -> Path | None:
        """A file in the cache that all users of the Hub's client share, where it is there and of the right size."""
        path = self._cache(repository) / "snapshots" / repository.commit / file.name
        return path if path.is_file() and path.stat().st_size == file.byte_count else None

    def cache_room(self) -> int:
        """Free bytes on the disk of that cache."""
        cache = Path(self._constants.HF_HUB_CACHE).absolute()
        return int(shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.exists())).free)

    def download_to_cache(
        self,
        repository: Repository,
        file: RemoteFile,
        show: Show = lambda count: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Path:
        """Fetch a file into that cache, unless it is there; checked against its hash either way.

        The layout is the client's (https://huggingface.co/docs/huggingface_hub/guides/manage-cache): a blob under its hash, and a
        link to it under commit and name; under the client's own lock. Raises HubError, OutputError, Interrupted.
        """
        found = self.cached(repository, file)
        if found is not None and file.is_of(pieces_of(found)):
            return found
        cache = self._cache(repository)
        blob, pointer = cache / "blobs" / file.identity, cache / "snapshots" / repository.commit / file.name
        lock = cache.parent / ".locks" / cache.name / f"{file.identity}.lock"
        with disk_errors(blob):
            lock.parent.mkdir(parents=True, exist_ok=True)
            pointer.parent.mkdir(parents=True, exist_ok=True)
        with self.utils.WeakFileLock(lock):
            if not (blob.is_file() and file.is_of(pieces_of(blob))):
                self.download(repository, file, blob, show, stop)
            with disk_errors(pointer):
                pointer.unlink(missing_ok=True)
                try:
                    pointer.symlink_to(os.path.relpath(blob, pointer.parent))
                except OSError:  # a file system without links
                    shutil.copyfile(blob, pointer)
        return pointer

    def remember(self, repository: Repository, revision: str | None) -> None:
        """Note in the cache which commit a branch is at, for the client's use without a network."""
        if revision != repository.commit:
            ref = self._cache(repository) / "refs" / (revision or "main")
            with disk_errors(ref):
                ref.parent.mkdir(parents=True, exist_ok=True)
                ref.write_text(repository.commit)

    def snapshot(self, repository: str, revision: str | None) -> Path:
        """The folder in the cache, without asking the Hub.

        Raises HubError where it is not there.
        """
        try:
            return Path(self.library.snapshot_download(repository, revision=revision, local_files_only=True))
        except self.errors.LocalEntryNotFoundError:
            raise HubError(
                f"{repository}: not in the cache, and the Hub is switched off by HF_HUB_OFFLINE; unset it"
            ) from None

    @property
    def is_offline(self) -> bool:
        """Whether the user has switched the Hub off."""
        return bool(self._constants.is_offline_mode())

    @property
    def _constants(self) -> Any:
        return importlib.import_module("huggingface_hub.constants")

    def _cache(self, repository: Repository) -> Path:
        name: str = importlib.import_module("huggingface_hub.file_download").repo_folder_name(
            repo_id=repository.id, repo_type="model"
        )
        return Path(str(self._constants.HF_HUB_CACHE)) / name

    def upload(self, repository: Repository, branch: str, name: str, content: str | bytes, create_pr: bool) -> Any:
        """The operation that adds a file to a commit, its content sent already if it is a large file. content: path, or bytes.

        Raises HubError.
        """

        def send() -> Any:
            addition = self.library.CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
            try:
                self.api.preupload_lfs_files(repository.id, additions=[addition], revision=branch, create_pr=create_pr)
            except RuntimeError as error:  # the client's, around what went wrong, or that of xet alone
                if isinstance(error.__cause__, self._http.HTTPError | OSError):
                    raise error.__cause__ from None
                raise HubError(f"{repository.id}: {name}: the upload failed: {self.clean(str(error))[:200]}") from None
            return addition

        return self.call(repository.id, send, f": {name}", attempts=1)  # the client tries six times by itself

    def call(
        self,
        repository: str,
        request: Callable[[], Result],
        of: str = "",
        stop: Callable[[], bool] = lambda: False,
        attempts: int | None = None,
        how_far: Callable[[], int] = lambda: 0,
    ) -> Result:
        """The result of a request, tried again where that may help. of: what it is about, after the repository's name.

        attempts: at most so many; by default fewer as long as the Hub was never reached. how_far: they are counted anew when
        this grows.

        Raises HubError, Interrupted.
        """
        what, wait = repository + of, FIRST_WAIT_SECONDS
        attempt, reached = 0, how_far()
        while True:
            self._count()
            try:
                return request()
            except (self._http.HTTPError, OSError) as error:
                if how_far() > reached:
                    attempt, reached, wait = 0, how_far(), FIRST_WAIT_SECONDS
                attempt += 1
                most = attempts or (ATTEMPTS if self.requests else FIRST_ATTEMPTS)
                pause = self._pause(error, wait)
                if pause is None and not self._is_of_the_hub(error):
                    raise  # the disk's
                if pause is None or attempt >= most or pause > LONGEST_WAIT_SECONDS:
                    raise self._explained(repository, what, error, attempt) from None
                again = f"trying again in {pause:.0f} s ({attempt} of {most - 1})"
                self._tell(f"{what}: {self._in_short(error)}; {again}")
            except (ValueError, KeyError, TypeError) as error:  # of the client, which found no answer of a Hub's
                raise HubError(
                    f"{what}: {self.endpoint} does not answer as a Hub does ({type(error).__name__}: {self.clean(str(error))[:120]})"
                ) from None
            end = time.monotonic() + pause
            while time.monotonic() < end:
                if stop():
                    raise Interrupted
                time.sleep(min(0.1, max(0.0, end - time.monotonic())))
            wait *= 2

    def clean(self, text: str) -> str:
        """A text of the client or the server on one line, without tokens and without signatures in URLs."""
        token = self.token or self.library.get_token()
        if token:
            text = text.replace(token, "hf_***")
        return " ".join(QUERY.sub(r"\1", CREDENTIALS.sub(r"\1", TOKEN.sub("hf_***", text))).split())

    def _stream(self, repository: Repository, file: str, start: int, count: int) -> Iterator[bytes]:
        """`count` bytes from `start`, as they come; fewer where the reply is short."""
        if count == 0:
            return
        url = self.library.hf_hub_url(repository.id, file, revision=repository.commit)
        headers = self.utils.build_hf_headers(token=self.token)
        headers |= {"Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
        with self.utils.get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_SECONDS) as response:
            if response.status_code >= 400:
                response.read()  # what the server says
            self.utils.hf_raise_for_status(response)
            skip = 0
            if response.status_code != 206:
                skip = start  # the server sends the whole file
            elif not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                raise self._http.RemoteProtocolError("the reply is of another range")
            left = count
            for chunk in response.iter_raw():
                passed = min(skip, len(chunk))
                skip -= passed
                part = chunk[passed : passed + left]
                left -= len(part)
                if part:
                    yield part
                if not left:
                    return

    def _count(self) -> None:
        """Count what the client's session sends and gets; it makes a new one after some errors."""
        with self._lock:
            session = self.utils.get_session()
            if session is self._counted:
                return
            self._counted = session

            def count(response: Any) -> None:
                with self._lock:
                    self.requests += 1
                close = response.close

                def closed() -> None:
                    if not response.is_closed:
                        with self._lock:
                            self.bytes += response.num_bytes_downloaded
                    close()

                response.close = closed

            hooks = session.event_hooks
            session.event_hooks = {**hooks, "response": [*hooks["response"], count]}

    def _is_of_the_hub(self, error: Exception) -> bool:
        kinds = (self._http.HTTPError, self.errors.OfflineModeIsEnabled, self.errors.LocalTokenNotFoundError)
        return isinstance(error, kinds)

    def _pause(self, error: Exception, wait: float) -> float | None:
        """Seconds after which a request may succeed; None where it will not."""
        if isinstance(error, self.errors.OfflineModeIsEnabled):
            return None
        response = getattr(error, "response", None)
        if response is not None:
            if response.status_code not in PASSING:
                return None
            asked = self._asked(response.headers)
            return wait if asked is None else asked
        return wait if isinstance(error, self._http.TransportError) else None

    def _asked(self, headers: Any) -> float | None:
        """Seconds that the Hub asks to wait, in either of its headers; None where it does not."""
        try:
            return max(0.0, float(headers.get("Retry-After", "")))
        except ValueError:  # a date, which nobody sends here, or none
            limits = self.utils.parse_ratelimit_headers(headers)
        return float(limits.reset_in_seconds) if limits is not None and limits.remaining == 0 else None

    def _in_short(self, error: Exception) -> str:
        response = getattr(error, "response", None)
        if response is not None:
            return f"the Hub answers {response.status_code}"
        return f"the connection failed ({type(error).__name__})"

    def _explained(self, repository: str, what: str, error: Exception, attempts: int) -> HubError:
        """One line: what, what is wrong, what to do."""
        endpoint = self.endpoint
        errors, response = self.errors, getattr(error, "response", None)
        status = None if response is None else response.status_code
        if isinstance(error, errors.LocalTokenNotFoundError):
            return HubError(f"pushing needs a token that may write: {LOG_IN}")
        if isinstance(error, errors.OfflineModeIsEnabled):
            return HubError(f"{what}: the Hub is switched off by HF_HUB_OFFLINE; unset it")
        if isinstance(error, errors.GatedRepoError):
            return HubError(
                f"{what}: gated: accept its conditions at {endpoint}/{repository}, then {LOG_IN} of that account"
            )
        if isinstance(error, errors.DisabledRepoError):
            return HubError(f"{what}: access to it is disabled on the Hub")
        if isinstance(error, errors.RevisionNotFoundError):
            return HubError(f"{what}: no such branch, tag or commit; see {endpoint}/{repository}/tree/main")
        if isinstance(error, errors.RepositoryNotFoundError):
            return HubError(
                f"{what}: neither a folder here nor a repository on {endpoint} that you may see: check the name; if it is "
                f"private, {LOG_IN}"
            )
        if isinstance(error, errors.EntryNotFoundError):
            return HubError(f"{what}: is not in the repository")
        if status == 401:
            return HubError(f"{what}: the Hub does not accept the token: {LOG_IN}")
        if status == 403:
            return HubError(f"{what}: the token does not permit that: {self._said(error)}; {LOG_IN} that does")
        if status == 409:
            return HubError(f"{what}: somebody else is changing it: {self._said(error)}; run the same command again")
        if status == 412:
            return HubError(f"{what}: somebody else has changed it in between; run the same command again")
        if status == 429:
            asked = self._asked(response.headers)  # type: ignore[union-attr]
            for_how_long = "" if asked is None else f" for {asked:.0f} s"
            return HubError(
                f"{what}: too many requests: the Hub asks to wait{for_how_long} (429); wait, {LOG_IN} for a higher limit, and "
                "run the same command again"
            )
        if status is not None and status >= 500:
            return HubError(f"{what}: the Hub failed {attempts} times ({status}); run the same command again later")
        if status is not None:
            return HubError(f"{what}: the Hub refuses ({status}): {self._said(error)}")
        how = "the connection to {} keeps breaking" if self.requests else "{} cannot be reached"
        return HubError(
            f"{what}: {how.format(endpoint)} ({type(error).__name__}: {self.clean(str(error))[:120]}); check the network and run the "
            "same command again"
        )

    def _said(self, error: Exception) -> str:
        said = getattr(error, "server_message", None) or str(error).partition("\n\n")[2] or str(error)
        return self.clean(said)[:200].rstrip(".")


def pieces_of(path: Path) -> Iterator[bytes]:
    """The content of a file on this machine."""
    with open(path, "rb", buffering=0) as stream:
        while data := stream.read(COPY_BYTES):
            yield data


def _wrong_content(repository: Repository, file: RemoteFile) -> HubError:
    return HubError(
        f"{repository.id}: {file.name}: fetched {WRONG_CONTENT_ATTEMPTS} times, and its content never was what the Hub says (hash "
        f"{file.identity[:16]}...); run the same command again, and if it stays so tell the owner of the repository"
    )
