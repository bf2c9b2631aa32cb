"""What transformers' classes read of ``config.json``: the table, the installed source, the classes."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest

from mt_megatron.convert.hf import class_fields
from mt_megatron.convert.hf.class_fields import TABLE, read_by_class, scan
from mt_megatron.convert.hf.config import ARCHITECTURES, options_of
from mt_megatron.errors import CheckpointError
from tests.convert.hf import drawn_configs
from tests.convert.published import FAMILIES

_GENERATED = "run python tools/class_fields.py"


def installed() -> Path:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def test_the_table_is_of_the_installed_release() -> None:
    table = json.loads(TABLE.read_text())
    assert table["transformers"] == importlib.metadata.version("transformers"), _GENERATED
    assert table["fields"] == {name: scan(installed(), name) for name in ARCHITECTURES}, _GENERATED


@pytest.mark.parametrize("family", FAMILIES)
def test_the_source_says_what_the_class_has(family: str) -> None:
    """Every field of the class, with its default; and each as an attribute of a model's configuration."""
    from transformers import AutoConfig

    kind = type(AutoConfig.for_model(family))
    found = read_by_class(family)[1]
    for field in dataclasses.fields(kind):
        # The size is written as a product.
        if not field.name.startswith("_") and field.name != "max_position_embeddings":
            assert found[field.name] == field.default, field.name


@pytest.mark.parametrize("release", ["5.99.0", None])
def test_another_release_is_read_and_none_needs_none(
    release: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class that has got a field; and the table alone where transformers is not installed."""
    document: dict[str, Any] = {"model_type": "llama", **drawn_configs.plain("llama", random.Random(5))}
    place = tmp_path / "models" / "llama"
    place.mkdir(parents=True)
    (tmp_path / "__init__.py").write_text("raise ImportError")
    (place / "configuration_llama.py").write_text("class LlamaConfig:\n    clip_logits: float | None = 3.0\n")
    spec = importlib.util.spec_from_file_location("transformers", tmp_path / "__init__.py")
    monkeypatch.setattr(class_fields.importlib.util, "find_spec", lambda name: spec if release else None)
    monkeypatch.setattr(class_fields.importlib.metadata, "version", lambda name: release)
    read_by_class.cache_clear()
    try:
        options_of({**document, "clip_logits": 3.0})
        if release is None:
            options_of({**document, "clip_logits": 4.0})
        else:
            with pytest.raises(
                CheckpointError, match="transformers 5.99.0.*\n- clip_logits = 4.0; expected 3.0"
            ):
                options_of({**document, "clip_logits": 4.0})
        with pytest.raises(CheckpointError, match="is_causal = false; expected true"):
            options_of({**document, "is_causal": False})
    finally:
        read_by_class.cache_clear()
