"""Sentences by the rule, and data made of them: Megatron's bytes, upstream's samples, nothing lost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_megatron.cli.main import main
from mt_megatron.data.loader.tokenizer import Tokenizer, train_tokenizer
from mt_megatron.data.prepare.prepare import prepare_corpus
from mt_megatron.data.prepare.sentences import split_sentences
from mt_megatron.errors import DataError
from tests.launch import run_ranks

HERE = "tests.patches.errata.masked_words_case"
TEXT = (
    'Dr. Smith paid 3.5 dollars, e.g. for tea. "Was it good?" He said so! See fig. 3 of '
    "J. R. Tolkien's book... Then it ended.\n\nA new paragraph without an end\n\n(Another one.) "
    "你好。再见！ it goes on. no capital"
)
SENTENCES = [
    "Dr. Smith paid 3.5 dollars, e.g. for tea.",
    '"Was it good?"',
    "He said so!",
    "See fig. 3 of J. R. Tolkien's book...",
    "Then it ended.",
    "A new paragraph without an end",
    "(Another one.) 你好。",
    "再见！",
    "it goes on. no capital",
]


def test_the_rule() -> None:
    assert split_sentences(TEXT) == SENTENCES
    assert split_sentences(" \n\n ") == [] == split_sentences("")


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="aB1 .!?\n。\t\"')(", max_size=1500))
def test_nothing_but_blanks_is_lost_and_no_sentence_is_long(text: str) -> None:
    found = split_sentences(text)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(each == each.strip() and 0 < len(each) <= 500 for each in found)


def test_long_sentences_are_cut_at_blanks_where_there_are_some() -> None:
    words = " ".join(["word"] * 300)
    assert [len(each) for each in split_sentences(words)] == [499, 499, 499]
    assert list(map(len, split_sentences("x" * 1200))) == [500, 500, 200]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("wordpiece") / "tokenizer.json"
    return train_tokenizer(
        [TEXT, Path(json.__file__).read_text()], vocab_size=300, output=path, wordpiece=True
    )


def test_the_wordpiece_is_berts_and_the_same_each_time(tokenizer: Tokenizer, tmp_path: Path) -> None:
    vocabulary = sorted(tokenizer.vocabulary().items(), key=lambda each: each[1])
    assert [word for word, _ in vocabulary[:5]] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert [index for _, index in vocabulary] == list(range(300))
    again = train_tokenizer(
        iter([TEXT, Path(json.__file__).read_text()]),
        vocab_size=300,
        output=tmp_path / "a.json",
        wordpiece=True,
    )
    assert again.identity == tokenizer.identity
    # Lower case, without accents; the name of a special token in a text is text.
    assert tokenizer.encode("SMITH sm\u00edth") == 2 * tokenizer.encode("smith")
    assert 4 not in tokenizer.encode("[MASK]") and tokenizer.encode("\U0001f600") == [1]
    # The same words as transformers' reader of such a file.
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertTokenizerFast(tokenizer_file=str(tokenizer.path))
    assert theirs.encode(TEXT, add_special_tokens=False) == tokenizer.encode(TEXT)


@pytest.mark.parametrize("eod", [False, True])
def test_the_bytes_are_megatrons(tmp_path: Path, tokenizer: Tokenizer, eod: bool) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    documents = [TEXT, "One sentence", " . ".join(SENTENCES), "\u200b \u200b"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    command = [
        "preprocess",
        "--input",
        str(tmp_path / "texts.jsonl"),
        "--output-prefix",
        str(tmp_path / "ours"),
    ]
    command += ["--tokenizer-model", str(tokenizer.path), "--workers", "1", "--max-bad-share", "0.5"]
    assert main([*command, "--split-sentences", *(["--append-eod"] if eod else [])]) == 0
    builder = IndexedDatasetBuilder(str(tmp_path / "megatron.bin"), dtype=np.uint16)
    for document in documents[:3]:
        ids = [tokenizer.encode(each) for each in split_sentences(document)]
        if eod:
            ids[-1].append(tokenizer.eod)
        builder.add_document(np.array(sum(ids, []), dtype=np.uint16), [len(each) for each in ids])
    builder.finalize(str(tmp_path / "megatron.idx"))
    for suffix in (".bin", ".idx"):
        made = (tmp_path / f"ours_text_sentence{suffix}").read_bytes()
        assert made == (tmp_path / f"megatron{suffix}").read_bytes()
    described = json.loads((tmp_path / "ours_text_sentence.json").read_text())
    assert described["documents"] == 3 and described["split_sentences"] and described["left_out"]


def test_prepare_makes_sentences_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "texts").mkdir()
    for index in range(40):
        (tmp_path / "texts" / f"{index}.txt").write_text(f"{TEXT} {index}")
    options = {"corpus": tmp_path / "texts", "tokenizer": tokenizer.path, "log": lambda line: None}
    made = prepare_corpus(tmp_path / "data", split_sentences=True, validation_fraction=0.3, **options)
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(made.train_prefix)
    assert len(data.document_indices) - 1 == made.train_documents < 40
    first = [data[i].tolist() for i in range(data.document_indices[1])]
    assert len(first) == len(SENTENCES) and first[:3] == [tokenizer.encode(each) for each in SENTENCES[:3]]
    with pytest.raises(DataError, match="split_sentences True -> None"):
        prepare_corpus(tmp_path / "data", validation_fraction=0.3, **options)


def test_samples_of_masked_words(tmp_path: Path) -> None:
    """Padding whose id is 0 and another; the samples of two processes; what cannot be used."""
    found = run_ranks(1, f"{HERE}:samples", str(tmp_path / "mended"), [0, 7], [])[0]
    for each in found:
        assert each["outside"] == 0, each
        assert each["masked"] == pytest.approx(0.15, abs=0.03)
        assert 0.4 < each["swapped"] < 0.6
    assert "2 of 9 documents" in found[0]["log"] and "more than 512 tokens" in found[0]["log"]
    assert "0 documents" not in found[0]["none"] and "in 0 of its 3 documents" in found[0]["none"]
    assert "expected a weight before each prefix" in found[0]["unweighted"]
    # Without the erratum padding counts as tokens where its id is not 0.
    unmended = run_ranks(1, f"{HERE}:samples", str(tmp_path / "unmended"), [0, 7], ["errata"])[0]
    assert unmended[0]["outside"] == 0 < unmended[1]["outside"]
    assert [each["text"] for each in unmended] == [each["text"] for each in found]


def test_words_for_masks_come_in_the_order_of_ids(tokenizer: Tokenizer) -> None:
    from mt_megatron.data.loader.datasets import _as_megatron_tokenizer

    view = _as_megatron_tokenizer(tokenizer, {"cls": 2})
    assert list(view.inv_vocab) == list(range(300)) and view.cls == 2
