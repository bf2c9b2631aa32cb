"""A checkout of Megatron-LM that the user names: looked at, never written to."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class CheckoutError(SystemExit):
    """What was named is not what is needed; shown, and the exit code is 2."""

    def __init__(self, message: str) -> None:
        print(f"tests/upstream: {message}")
        super().__init__(2)


def checked(folder: Path) -> Path:
    """``folder`` made absolute, if it is core_r0.9.0 without a change."""
    folder = folder.resolve()
    if not (folder / "pretrain_gpt.py").is_file():
        raise CheckoutError(f"{folder} has no pretrain_gpt.py; name the root of a Megatron-LM checkout")
    if changes(folder):
        raise CheckoutError(f"{folder} has changes:\n{changes(folder)}\nit must be as it was published")
    # A package's version stands in its core; run refuses other ones by itself, and says so later.
    stated = (folder / "megatron" / "core" / "package_info.py").read_text()
    if not all(f"{name} = {value}" in stated for name, value in (("MAJOR", 0), ("MINOR", 9), ("PATCH", 0))):
        raise CheckoutError(f"{folder} is no core_r0.9.0: check that branch or tag out")
    return folder


def changes(folder: Path) -> str:
    """``git status`` in short form: empty for a clean tree."""
    done = subprocess.run(
        ["git", "-C", str(folder), "status", "--porcelain"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CheckoutError(f"{folder} is no git checkout, so nobody can tell what is changed in it")
    return done.stdout.strip()


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Raises AssertionError when what ran inside left a file, ignored ones too, other than bytecode."""
    before = _files(folder)
    yield
    new = sorted(str(path.relative_to(folder)) for path in _files(folder) - before)
    assert not changes(folder) and not new, f"the checkout was changed: {changes(folder)} {new}"


def _files(folder: Path) -> set[Path]:
    return {
        path for path in folder.rglob("*") if "__pycache__" not in path.parts and ".git" not in path.parts
    }
