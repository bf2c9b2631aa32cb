"""A drift is described by the lines that drifted, without keeping any upstream source."""

from __future__ import annotations

from pathlib import Path

import pytest

from mt_megatron.errors import UpstreamDriftError
from mt_megatron.patching.digest import (
    describe_drift,
    fingerprint,
    main,
    read_fingerprints,
    source_of,
    write_fingerprints,
)
from mt_megatron.patching.plan import Settings, make_plan

from .conftest import Toy

SOURCE = '''\
# first line

def f(a, b):
    """About f."""
    total = a + b
    for index in range(a):
        total += index
        total *= 2
    # a comment
    if total > 10:
        return None
    return total
'''


def drift(toy: Toy, tmp_path: Path, old: str, new: str) -> str:
    """Record SOURCE, install the changed source, describe."""
    path = toy.write("owner", SOURCE)
    before = source_of(toy.target("f"))
    recorded = tmp_path / "upstream.json"
    write_fingerprints(recorded, [before])
    assert old in SOURCE
    path.write_text(SOURCE.replace(old, new))
    return describe_drift(source_of(toy.target("f")), before.digest, read_fingerprints(recorded))


def test_names_the_changed_line_and_shows_it(toy: Toy, tmp_path: Path) -> None:
    text = drift(toy, tmp_path, "total *= 2", "total *= 3")
    head, shown, note = text.splitlines()
    assert head == f"{toy.root / 'owner.py'}, line(s) 8 of 3-12:"
    assert shown == "        8 +         total *= 3"
    assert note.strip() == "! in place of 1 expected line(s)"


def test_names_an_added_line(toy: Toy, tmp_path: Path) -> None:
    text = drift(toy, tmp_path, "    if total", "    print(total)\n    if total")
    assert "line(s) 10 of 3-13" in text
    assert "10 +     print(total)" in text
    assert "not among the expected line(s)" in text


def test_names_where_a_line_is_missing(toy: Toy, tmp_path: Path) -> None:
    text = drift(toy, tmp_path, "        total += index\n", "")
    assert "line(s) 7 of 3-11" in text
    assert "7 ! 1 expected line(s) are missing before this line" in text


def test_names_a_line_missing_at_the_end(toy: Toy, tmp_path: Path) -> None:
    text = drift(toy, tmp_path, "        return None\n    return total\n", "        return None\n")
    assert "expected line(s)" in text and "of 3-11" in text


def test_names_several_places(toy: Toy, tmp_path: Path) -> None:
    path = toy.write("owner", SOURCE)
    before = source_of(toy.target("f"))
    write_fingerprints(tmp_path / "f.json", [before])
    path.write_text(SOURCE.replace("a + b", "a - b").replace("> 10", "> 11").replace("return None", "raise"))
    text = describe_drift(source_of(toy.target("f")), before.digest, read_fingerprints(tmp_path / "f.json"))
    assert "line(s) 5, 10-11 of 3-12" in text


def test_a_long_drift_is_cut(toy: Toy, tmp_path: Path) -> None:
    lines = "".join(f"    x{i} = {i}\n" for i in range(40))
    text = drift(toy, tmp_path, "    total = a + b\n", "    total = a + b\n" + lines)
    assert "line(s) 6-45" in text
    assert text.splitlines()[-1].strip().startswith("... and 29 more")


@pytest.mark.parametrize("known", ["nothing", "another digest"])
def test_without_a_record_the_span_is_named(toy: Toy, tmp_path: Path, known: str) -> None:
    toy.write("owner", SOURCE)
    source = source_of(toy.target("f"))
    recorded = {} if known == "nothing" else {source.target: {"digest": "1" * 64, "lines": ""}}
    text = describe_drift(source, "abc", recorded)
    assert text.startswith(f"somewhere in {toy.root / 'owner.py'}:3-12")


def test_the_record_holds_no_source(toy: Toy, tmp_path: Path) -> None:
    toy.write("owner", SOURCE)
    write_fingerprints(tmp_path / "f.json", [source_of(toy.target("f"))])
    text = (tmp_path / "f.json").read_text().replace(toy.target("f"), "")
    for word in ("total", "index", "range", "return", "About"):
        assert word not in text


def test_a_line_that_only_moved_has_the_same_hash(toy: Toy) -> None:
    toy.write("owner", SOURCE)
    before = [mark for _, mark in fingerprint(source_of(toy.target("f")))]
    toy.write("owner", "x = 1\n\n\n" + SOURCE.replace("# a comment", ""))
    after = [mark for _, mark in fingerprint(source_of(toy.target("f")))]
    assert before == after


def test_the_command_writes_the_record(toy: Toy, tmp_path: Path) -> None:
    toy.write("owner", SOURCE)
    recorded = tmp_path / "f.json"
    assert main([toy.target("f"), "--write", str(recorded)]) == 0
    assert read_fingerprints(recorded)[toy.target("f")]["digest"] == source_of(toy.target("f")).digest


def test_no_record_reads_as_empty(tmp_path: Path) -> None:
    assert read_fingerprints(tmp_path / "none.json") == {}


def drifted_plan(toy: Toy, tmp_path: Path, damage: bytes | None = None, **settings: bool) -> object:
    path = toy.write("owner", SOURCE)
    patch = toy.patch("f", "wrap", lambda original, a, b: original(a, b), id="math.f")
    recorded = tmp_path / "f.json.gz"
    write_fingerprints(recorded, [source_of(toy.target("f"))])
    if damage is not None:
        recorded.write_bytes(damage)
    path.write_text(SOURCE.replace("total *= 2", "total *= 3"))
    return make_plan([patch], backend="cpu", settings=Settings(fingerprints=recorded, **settings))


def test_a_plan_refuses_a_drift_and_names_patch_file_and_lines(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(UpstreamDriftError) as caught:
        drifted_plan(toy, tmp_path)
    for part in ("math.f", toy.target("f"), str(toy.root / "owner.py"), "line(s) 8", "total *= 3"):
        assert part in str(caught.value)


def test_a_damaged_record_hides_no_drift_and_is_named(toy: Toy, tmp_path: Path) -> None:
    with pytest.raises(UpstreamDriftError) as caught:
        drifted_plan(toy, tmp_path, damage=b"no gzip")
    for part in (
        "math.f",
        "somewhere in",
        "owner.py:3-12",
        str(tmp_path / "f.json.gz"),
        "'mt-megatron patches record'",
    ):
        assert part in str(caught.value)


def test_an_allowed_drift_is_a_warning_of_the_plan(toy: Toy, tmp_path: Path) -> None:
    plan = drifted_plan(toy, tmp_path, allow_drift=True)
    (warning,) = plan.warnings  # type: ignore[attr-defined]
    assert "math.f" in warning and "line(s) 8" in warning


def test_a_comment_or_layout_change_is_no_drift(toy: Toy) -> None:
    path = toy.write("owner", SOURCE)
    patch = toy.patch("f", "wrap", lambda original, a, b: original(a, b))
    path.write_text(SOURCE.replace("# a comment", "# another").replace("range(a)", "range(\n  a\n )"))
    assert make_plan([patch], backend="cpu").steps
