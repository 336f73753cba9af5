"""Fixtures: tiny real models, the real SmolLM2, and user folders that are the test's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from localbatch.models.catalog import load_catalog, model_path
from tests import tiny_gguf


@pytest.fixture(autouse=True)
def _own_user_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests away from the user's settings and measurements."""
    home = tmp_path_factory.getbasetemp() / "user"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALBATCH_MODELS", os.environ.get("LOCALBATCH_MODELS") or str(_STORE))
        patch.setenv("XDG_CONFIG_HOME", str(home / "config"))
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        patch.delenv("LOCALBATCH_DEBUG", raising=False)
        yield


_STORE = model_path(load_catalog()["smollm2-135m"]).parent


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a tiny F16 model with a chat template."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    tiny_gguf.write(path)
    return path


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the path of a tiny model for each weight type."""
    folder = tmp_path_factory.mktemp("types")
    paths = {"f16": folder / "f16.gguf"}
    tiny_gguf.write(paths["f16"], embd=256, ff=512, vocab=512)
    for kind in tiny_gguf.FILE_TYPES.keys() - {"f16"}:
        paths[kind] = folder / f"{kind}.gguf"
        tiny_gguf.quantize(paths["f16"], paths[kind], kind)
    return paths


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the path of the real SmolLM2; the test fails if it is not there."""
    path = Path(
        os.environ.get("LOCALBATCH_TEST_MODEL") or _STORE / "SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    if not path.exists():
        pytest.fail(f"{path} is missing; `make test` fetches it", pytrace=False)
    return path
