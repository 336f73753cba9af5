"""Fixtures: tiny real models, the real SmolLM2, and user folders that are the test's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Two threads of llama.cpp that spin for milliseconds take 20 times as long beside another process
# (localbatch/engine/client.py); GNU's OpenMP reads this when llama.cpp is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

from localbatch.models.catalog import load_catalog, model_path, models_folder
from tests import tiny_gguf

hypothesis.settings.register_profile("localbatch", deadline=None)  # the machine may be busy
hypothesis.settings.load_profile("localbatch")


@pytest.fixture(scope="session", autouse=True)
def _own_user_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests away from the user's settings and measurements; fetched models stay in reach.

    For the whole session, so that fixtures of modules, which come before those of tests, have it.
    """
    home = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALBATCH_MODELS", str(models_folder()))
        patch.setenv("XDG_CONFIG_HOME", str(home / "config"))
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        patch.setenv("APPDATA", str(home / "config"))
        patch.setenv("LOCALAPPDATA", str(home / "cache"))
        patch.delenv("LOCALBATCH_DEBUG", raising=False)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a tiny F16 model with a chat template."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    tiny_gguf.write(path)
    return path


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the path of a tiny model for each weight type; K-quants come in blocks of 256."""
    folder = tmp_path_factory.mktemp("types")
    paths = {"f16": folder / "f16.gguf"}
    tiny_gguf.write(paths["f16"], embd=256, ff=512, vocab=512)
    for kind in tiny_gguf.FILE_TYPES.keys() - {"f16"}:
        paths[kind] = folder / f"{kind}.gguf"
        tiny_gguf.quantize(paths["f16"], paths[kind], kind)
    return paths


@pytest.fixture(scope="session")
def smollm2(_own_user_folders: None) -> Path:
    """Return the path of the real SmolLM2; the test fails if it is not there.

    `LOCALBATCH_TEST_MODEL` names another file.
    """
    own = os.environ.get("LOCALBATCH_TEST_MODEL")
    path = Path(own) if own else model_path(load_catalog()["smollm2-135m"])
    if not path.exists():
        pytest.fail(f"{path} is missing; `make test` fetches it", pytrace=False)
    return path


@pytest.fixture(scope="session")
def gemma(_own_user_folders: None) -> Path:
    """Return the path of the real Gemma 3 270M; the test is skipped if it is not there.

    It has 262,144 tokens, a SentencePiece vocabulary, and attention in sliding windows.
    """
    path = model_path(load_catalog()["gemma3-270m"])
    if not path.exists():
        pytest.skip(f"{path} is missing; `make test` fetches it")
    return path
