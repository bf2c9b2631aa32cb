"""Preprocessing from end to end: Megatron's own bytes, whatever the format and whatever was killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_megatron.data.loader.tokenizer import open_tokenizer
from mt_megatron.data.prepare.indexed_files import pair_problem, read_header, token_dtype, write_index
from mt_megatron.data.prepare.preprocess import preprocess
from mt_megatron.data.prepare.preprocess_options import PreprocessOptions
from mt_megatron.data.prepare.preprocess_plan import overwrite
from mt_megatron.errors import DataError
from tests.data.test_reading import compress

ROOT = Path(__file__).resolve().parents[2]
EOD = 256


class Lines:
    """What was said, and how often it was told how far it is."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.done: list[int] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def advance(self, done_bytes: int, total_bytes: int, documents: int, tokens: int) -> None:
        self.done.append(done_bytes)


def options(tmp_path: Path, *inputs: Path, **more: Any) -> PreprocessOptions:
    made = PreprocessOptions(
        inputs=tuple(map(str, inputs)),
        output_prefix=str(tmp_path / "out" / "a"),
        tokenizer_type="ByteLevelTokenizer",
        append_eod=True,
        workers=2,
    )
    return replace(made, **more)


def texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    words = ["alpha", "beta", "gamma\n", "délta ", "  ", "\t5", "語"]
    return ["".join(rng.choices(words, k=rng.randint(1, 400))) + "." for _ in range(count)]


def write_jsonl(path: Path, documents: list[str], **more: list[str]) -> Path:
    rows = [{"text": text, **{key: more[key][i] for key in more}} for i, text in enumerate(documents)]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(compress(content, path.suffix))
    return path


def by_megatron(folder: Path, documents: list[list[int]], vocab_size: int) -> tuple[bytes, bytes]:
    """What Megatron-Core's own builder writes for these tokens."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    folder.mkdir(exist_ok=True)
    builder = IndexedDatasetBuilder(str(folder / "m.bin"), dtype=DType.optimal_dtype(vocab_size))
    for ids in documents:
        builder.add_document(np.asarray(ids, dtype=builder.dtype), [len(ids)])
    builder.finalize(str(folder / "m.idx"))
    return (folder / "m.bin").read_bytes(), (folder / "m.idx").read_bytes()


def made(prefix: str) -> tuple[bytes, bytes]:
    return Path(prefix + ".bin").read_bytes(), Path(prefix + ".idx").read_bytes()


def as_bytes(documents: list[str]) -> list[list[int]]:
    return [[*text.encode(), EOD] for text in documents]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_the_bytes_are_megatrons(tmp_path: Path, suffix: str) -> None:
    documents = texts(1500)
    source = write_jsonl(tmp_path / f"a{suffix}", documents)
    told = Lines()
    result = preprocess(options(tmp_path, source), told)
    assert made(result.prefixes[0]) == by_megatron(tmp_path / "m", as_bytes(documents), 257)
    assert result.documents == 1500 and result.counts == {} and result.report is None
    assert len(told.done) > 2 or suffix != ".jsonl", "several shards"
    assert told.done == sorted(told.done)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        f"a_text_document.{kind}" for kind in ("bin", "idx", "json")
    ]


def test_several_inputs_formats_and_keys(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    first, second, third, titles = texts(40, 1), texts(30, 2), texts(20, 3), [f"t{i}" for i in range(40)]
    write_jsonl(tmp_path / "b1.jsonl", first, title=titles)
    write_jsonl(tmp_path / "b2.jsonl.gz", second, title=titles)
    table = pyarrow.table({"text": third, "title": titles[:20]})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet", row_group_size=7)
    given = options(
        tmp_path, tmp_path / "c.parquet", tmp_path / "b*", json_keys=("text", "title"), append_eod=False
    )
    told = Lines()
    result = preprocess(given, told)
    assert [Path(p).name for p in result.prefixes] == ["a_text_document", "a_title_document"]
    for prefix, documents in zip(
        result.prefixes, (third + first + second, titles[:20] + titles + titles[:30]), strict=True
    ):
        expected = [list(text.encode()) for text in documents]
        assert made(prefix) == by_megatron(tmp_path / "m", expected, 257)
    assert any("--append-eod" in line for line in told.lines)


def test_large_vocabularies_take_int32(tmp_path: Path) -> None:
    numbers = [[1, 69_000, 3], [65_535, 65_536], [7]]
    source = write_jsonl(tmp_path / "a.jsonl", [" ".join(map(str, each)) for each in numbers])
    given = options(tmp_path, source, tokenizer_type="NullTokenizer", vocab_size=70_000)
    result = preprocess(given, Lines())
    expected = by_megatron(tmp_path / "m", [[*each, 69_999] for each in numbers], 70_000)
    assert made(result.prefixes[0]) == expected


def test_a_trained_bpe_is_used_and_published(tmp_path: Path) -> None:
    documents = texts(300)
    source = write_jsonl(tmp_path / "a.jsonl", documents)
    told = Lines()
    result = preprocess(options(tmp_path, source, tokenizer_type="HuggingFaceTokenizer", train_bpe=280), told)
    assert result.tokenizer_model == f"{tmp_path}/out/a_tokenizer.json"
    tokenizer = open_tokenizer("HuggingFaceTokenizer", result.tokenizer_model)
    assert tokenizer.vocab_size == 280
    expected = [[*tokenizer.encode(text), tokenizer.eod] for text in documents]
    assert made(result.prefixes[0]) == by_megatron(tmp_path / "m", expected, 280)
    again = preprocess(options(tmp_path, source, tokenizer_type="HuggingFaceTokenizer", train_bpe=280), told)
    assert again == replace(result, already=True)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_tokenizer_is_trained_on_all_shards(tmp_path: Path, suffix: str) -> None:
    documents = [*texts(1500), "zqxjk" * 2000]
    source = write_jsonl(tmp_path / f"a{suffix}", documents)
    given = options(tmp_path, source, tokenizer_type="HuggingFaceTokenizer", train_bpe=300)
    result = preprocess(given, Lines())
    assert "zqxjk" in open_tokenizer("HuggingFaceTokenizer", result.tokenizer_model).vocabulary()


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    cut=st.integers(1, 10),
    vocab_size=st.sampled_from([300, 70_000]),
)
def test_an_index_is_megatrons_whatever_its_pieces(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], cut: int, vocab_size: int
) -> None:
    folder = tmp_path_factory.mktemp("index")
    documents = [list(range(length)) for length in lengths]
    content, index = by_megatron(folder, documents, vocab_size)

    def pieces() -> Iterator[Any]:
        for start in range(0, len(lengths), cut):
            yield np.array(lengths[start : start + cut], dtype=np.int32)

    write_index(folder / "a.idx", token_dtype(vocab_size), pieces)
    assert (folder / "a.idx").read_bytes() == index
    assert read_header(folder / "a.idx").tokens == sum(lengths)
    (folder / "a.bin").write_bytes(content)
    assert pair_problem(str(folder / "a")) is None
    for name, whole in (("a.bin", content), ("a.idx", index)):
        (folder / name).write_bytes(whole[:-1])
        assert pair_problem(str(folder / "a")) is not None
        (folder / name).write_bytes(whole)


def test_bad_documents_are_counted_shown_and_reported(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in texts(2000)]
    for number in range(10, 70, 5):
        lines[number] = '{"body": 1}'
    lines[1900], lines[1950] = "nonsense", '{"text": " "}'
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(lines) + "\n")
    told = Lines()
    result = preprocess(options(tmp_path, source), told)
    assert result.documents == 2000 - 14
    assert result.counts == {"missing_key": 12, "broken_json": 1, "empty": 1}
    text = "\n".join(told.lines)
    assert "found: 1 broken_json, 12 missing_key, 1 empty" in text
    for line in (
        "line 11: ",
        "line 31: ",
        "line 1901: not JSON",
        "line 1951: holds nothing",
        "7 more of kind",
    ):
        assert line in text
    assert "line 41: " not in text
    reported = [json.loads(line) for line in Path(str(result.report)).read_text().splitlines()]
    assert [each["at"] for each in reported] == [*range(11, 71, 5), 1901, 1951]
    sidecar = json.loads(Path(result.prefixes[0] + ".json").read_text())
    assert sidecar["left_out"] == result.counts and sidecar["report"] == result.report


def test_strict_and_the_limit_make_them_an_error_that_names_them(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "good"})] * 18 + ["bad", '{"text": ""}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    given = options(tmp_path, tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"5\.26% of the documents are bad, more than --max-bad-share 0\.05"):
        preprocess(given, Lines())
    with pytest.raises(DataError, match=r"--strict allows nothing(.|\n)*line 19: not JSON(.|\n)*line 20"):
        preprocess(replace(given, strict=True, max_bad_share=1.0), Lines())
    assert not Path(given.output_prefix + "_text_document.bin").exists()
    result = preprocess(replace(given, max_bad_share=0.06), Lines())
    assert result.documents == 18


def _cut(name: str, whole: bytes) -> bytes:
    if name.startswith("truncated"):
        return whole[: len(whole) // 4]
    half = len(whole) // 2
    return whole[:half] + bytes(64) + whole[half + 64 :]


@pytest.mark.parametrize("kind", ["truncated", "damaged"])
@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_a_file_that_breaks_off_is_judged_by_what_is_lost(tmp_path: Path, kind: str, suffix: str) -> None:
    """One finding stands for thousands of documents."""
    import pyarrow
    import pyarrow.parquet

    documents = [f"{number} {random.Random(number).random()}" for number in range(4000)]
    whole = tmp_path / "in" / f"whole{suffix}"
    whole.parent.mkdir()
    if suffix == ".parquet":
        table = pyarrow.table({"text": documents})
        pyarrow.parquet.write_table(
            table, whole, row_group_size=500, write_page_checksum=True, use_dictionary=False
        )
    else:
        write_jsonl(whole, documents)
    broken = tmp_path / f"broken{suffix}"
    broken.write_bytes(_cut(kind, whole.read_bytes()))
    given = options(tmp_path, broken, workers=1)
    with pytest.raises(DataError, match="not known|input is bad or lost|no document that can"):
        preprocess(given, Lines())
    allowed = replace(given, inputs=(str(broken), str(whole)), output_prefix=str(tmp_path / "out" / "b"))
    # The loss of a file that is cut off is not known; half of one of two files is a fourth.
    rule = (
        r"a truncated file is not known" if kind == "truncated" else r"\d+\.\d\d% of the input is bad or lost"
    )
    with pytest.raises(DataError, match=rule) as caught:
        preprocess(replace(allowed, max_bad_share=0.01), Lines())
    assert ("bytes were not read" in str(caught.value)) == (kind == "damaged" or suffix == ".parquet")
    result = preprocess(replace(allowed, max_bad_share=1.0), Lines())
    assert 4000 <= result.documents < 8000
    sidecar = json.loads(Path(result.prefixes[0] + ".json").read_text())
    assert sum(sidecar["left_out"].values()) >= 1 and (kind == "truncated" or sidecar["lost_bytes"] > 0)


def test_what_is_made_already_is_left_and_what_differs_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(20))
    given = options(tmp_path, source)
    first = preprocess(given, Lines())
    times = [Path(first.prefixes[0] + suffix).stat().st_mtime_ns for suffix in (".bin", ".idx", ".json")]
    assert preprocess(replace(given, workers=1), Lines()) == replace(first, already=True)
    with pytest.raises(DataError, match=r"append_eod True -> False.*--overwrite"):
        preprocess(replace(given, append_eod=False), Lines())
    write_jsonl(tmp_path / "b.jsonl", texts(5))
    with pytest.raises(DataError, match=r"b\.jsonl is new in the input"):
        preprocess(replace(given, inputs=(str(tmp_path / "*.jsonl"),)), Lines())
    write_jsonl(source, texts(21))
    with pytest.raises(DataError, match=r"a\.jsonl has changed"):
        preprocess(given, Lines())
    assert times == [
        Path(first.prefixes[0] + suffix).stat().st_mtime_ns for suffix in (".bin", ".idx", ".json")
    ]
    overwrite(given)
    assert preprocess(given, Lines()).documents == 21


def test_killed_between_two_names_it_publishes_again(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(20))
    given = options(tmp_path, source)
    first = preprocess(given, Lines())
    whole = made(first.prefixes[0])
    sidecar, folder = Path(first.prefixes[0] + ".json"), Path(given.output_prefix + ".preprocess")
    # After the last name and before the folder was removed.
    folder.mkdir()
    assert preprocess(given, Lines()).already and not folder.exists()
    # After .bin and before .idx and .json: what was to be published is made again.
    plan = json.loads(sidecar.read_text())["plan"]
    sidecar.unlink()
    Path(first.prefixes[0] + ".idx").unlink()
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({**plan, "shard_bytes": 1 << 19}))
    again = preprocess(given, Lines())
    assert not again.already and made(again.prefixes[0]) == whole and not folder.exists()


def test_files_of_somebody_else_are_not_overwritten(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(20))
    given = options(tmp_path, source)
    (tmp_path / "out").mkdir()
    Path(given.output_prefix + "_text_document.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match="nothing beside it says what it is"):
        preprocess(given, Lines())
    assert Path(given.output_prefix + "_text_document.bin").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        (None, {}, "names no file to read"),
        (b'{"body": "x"}\n', {"max_bad_share": 1.0}, "holds no document that can be used"),
        (b'{"text": "x"}\n', {"tokenizer_type": "HuggingFaceTokenizer"}, "found no tokenizer"),
        (b'{"text": "x"}\n', {"tokenizer_type": "NullTokenizer"}, "give --vocab-size"),
        (
            b'{"text": "x"}\n',
            {"tokenizer_type": "NullTokenizer", "vocab_size": 9},
            "found 'x'; NullTokenizer reads",
        ),
        (b'{"text": "5 9"}\n', {"tokenizer_type": "NullTokenizer", "vocab_size": 9}, "found '9'; .* 0 to 8"),
    ],
)
def test_what_cannot_be_made_is_refused(tmp_path: Path, content: Any, more: dict, message: str) -> None:
    source = tmp_path / "a.jsonl"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(DataError, match=message):
        preprocess(options(tmp_path, source, **more), Lines())
    assert not list((tmp_path).glob("out/*.bin"))


# Processes that are killed.


def start(given: PreprocessOptions, *, limit: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mt_megatron.cli", "preprocess", "--input", *given.inputs]
    command += ["--output-prefix", given.output_prefix, "--tokenizer-type", given.tokenizer_type]
    command += ["--append-eod", "--workers", str(given.workers)]
    if limit:
        command = ["bash", "-c", f'{limit}; exec "$@"', "-", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell's background job ignores SIGINT, and so does everything below it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"PPid:\t{process.pid}\n" in (entry / "status").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def _runs(pid: int) -> bool:
    try:
        # Nobody may be there to collect the end of an orphan.
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def shards_of(given: PreprocessOptions) -> int:
    return len(list(Path(given.output_prefix + ".preprocess").glob("*-*.json")))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 9 MB in 18 shards: long enough to be killed within."""
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "a.jsonl", texts(11_000))


@pytest.fixture(scope="module")
def uninterrupted(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    return made(preprocess(options(tmp_path_factory.mktemp("whole"), corpus), Lines()).prefixes[0])


def wait_for_shards(process: subprocess.Popen[str], given: PreprocessOptions, count: int) -> None:
    deadline = time.monotonic() + 60
    while shards_of(given) < count:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.002)


def test_killed_at_any_moment_it_continues_to_the_same_bytes(
    tmp_path: Path, corpus: Path, uninterrupted: tuple[bytes, bytes]
) -> None:
    given = options(tmp_path, corpus)
    for count in (1, 6):
        process = start(given)
        wait_for_shards(process, given, count)
        workers = workers_of(process)
        process.kill()
        process.communicate(timeout=30)
        assert len(workers) == 2 and gone(workers), "no worker outlives the one that started it"
        assert not Path(given.output_prefix + "_text_document.bin").exists()
    kept = shards_of(given)
    told = Lines()
    result = preprocess(replace(given, workers=1), told)
    assert kept >= 6 and f"continued an interrupted run: {kept} shards were done before" in told.lines
    assert made(result.prefixes[0]) == uninterrupted


@pytest.mark.soak
def test_killed_at_twenty_random_moments_it_continues_to_the_same_bytes(
    tmp_path: Path, corpus: Path, uninterrupted: tuple[bytes, bytes]
) -> None:
    rng = random.Random(1)
    given = options(tmp_path, corpus)
    kills = 0
    while kills < 20:
        process = start(given)
        time.sleep(rng.uniform(0.1, 1.2))
        ended = process.poll() is not None
        workers = workers_of(process)
        process.kill()
        process.communicate(timeout=30)
        assert gone(workers)
        kills += not ended
        if ended:
            assert made(given.output_prefix + "_text_document") == uninterrupted
            overwrite(given)
    assert made(preprocess(given, Lines()).prefixes[0]) == uninterrupted


def test_a_worker_that_is_killed_is_named(
    tmp_path: Path, corpus: Path, uninterrupted: tuple[bytes, bytes]
) -> None:
    given = options(tmp_path, corpus)
    process = start(given)
    wait_for_shards(process, given, 1)
    workers = workers_of(process)
    os.kill(workers[0], signal.SIGKILL)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"(process {workers[0]}) was killed by SIGKILL w" in told and "out-of-memory" in told
    assert gone(workers)
    assert made(preprocess(given, Lines()).prefixes[0]) == uninterrupted


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_continue(tmp_path: Path, corpus: Path, which: int) -> None:
    given = options(tmp_path, corpus)
    process = start(given)
    wait_for_shards(process, given, 1)
    workers = workers_of(process)
    process.send_signal(which)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130 and "run the same command again to continue" in told
    assert gone(workers)


def test_a_changed_file_is_noticed_when_a_run_continues(tmp_path: Path, corpus: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(corpus.read_bytes())
    given = options(tmp_path, source)
    process = start(given)
    wait_for_shards(process, given, 1)
    process.kill()
    process.communicate(timeout=30)
    os.utime(source, ns=(1, 1))
    with pytest.raises(DataError, match=r"unfinished run.*a\.jsonl has changed.*--overwrite"):
        preprocess(given, Lines())
    with pytest.raises(
        DataError, match=r"unfinished run.*tokenizer_type ByteLevelTokenizer -> NullTokenizer"
    ):
        preprocess(replace(given, tokenizer_type="NullTokenizer", vocab_size=9), Lines())


def test_a_full_disk_is_told_and_nothing_is_lost(
    tmp_path: Path, corpus: Path, uninterrupted: tuple[bytes, bytes]
) -> None:
    given = options(tmp_path, corpus)
    # In blocks of 1024: enough for some shards' tokens, too little for all of them in one file.
    process = start(given, limit="ulimit -f 3000")
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1 and "File too large" in told and "run the same command again" in told
    assert shards_of(given) > 5
    assert made(preprocess(given, Lines()).prefixes[0]) == uninterrupted


def test_a_disk_that_is_really_full(tmp_path: Path, corpus: Path, uninterrupted: tuple[bytes, bytes]) -> None:
    given = options(tmp_path, corpus)
    disk = tmp_path / "out"
    disk.mkdir()

    def mount(how: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", how, "none", str(disk)]
        return subprocess.run(command, capture_output=True).returncode == 0

    if not mount("size=5m"):
        pytest.skip("a small file system to fill cannot be mounted here")
    try:
        process = start(given)
        _, told = process.communicate(timeout=60)
        assert process.returncode == 1 and "the disk is full" in told and "No space left on device" in told
        assert mount("remount,size=100m")
        result = preprocess(given, Lines())
        assert made(result.prefixes[0]) == uninterrupted
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_shard_that_was_damaged_on_the_disk_is_made_again(
    tmp_path: Path, corpus: Path, uninterrupted: tuple[bytes, bytes]
) -> None:
    given = options(tmp_path, corpus)
    process = start(given)
    wait_for_shards(process, given, 2)
    process.kill()
    process.communicate(timeout=30)
    shard = sorted(Path(given.output_prefix + ".preprocess").glob("*.0.bin"))[0]
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(DataError, match="damaged and was removed"):
        preprocess(given, Lines())
    assert made(preprocess(given, Lines()).prefixes[0]) == uninterrupted


_PEAK = """
import sys
from pathlib import Path
import psutil
from tests.data.test_preprocess import Lines, options
from mt_megatron.data.prepare.preprocess import preprocess

def peak(pid):
    # Not ru_maxrss: it begins with that of the process that started this one.
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)

class Watched(Lines):
    workers = 0
    def advance(self, *figures):
        pids = [child.pid for child in psutil.Process().children()]
        self.workers = max([self.workers, *map(peak, pids)])

watched = Watched()
preprocess(options(Path(sys.argv[1]), Path(sys.argv[2]), workers=1), watched)
print(peak("self"))
print(watched.workers)
"""


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    block = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts(800))
    peaks = []
    for times in (4, 28):
        source = tmp_path / f"{times}.jsonl"
        source.write_bytes(block * times)
        run = subprocess.run(
            [sys.executable, "-c", _PEAK, str(tmp_path / str(times)), str(source)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
            capture_output=True,
            timeout=120,
        )
        assert run.returncode == 0, run.stderr
        peaks.append([int(line) / 1024 for line in run.stdout.split()])
    for small, large in zip(*peaks, strict=True):
        # 16 MB more of text, which would be twice as much in tokens.
        assert large < small + 6, peaks
