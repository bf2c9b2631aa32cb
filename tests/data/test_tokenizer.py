"""The tokenizer: lossless, deterministic, and no text can forge the end of a document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from mt_megatron.config.schema import DataConfig
from mt_megatron.data.loader.tokenizer import (
    END_OF_DOCUMENT,
    NullTokenizer,
    Tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from mt_megatron.errors import DataError

TEXTS = [Path(__file__).read_text(), Path(json.__file__).read_text()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer(TEXTS, vocab_size=400, output=tmp_path_factory.mktemp("t") / "tokenizer.json")


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x\n",
        "\ttabs\r\n and  blanks  ",
        "żółć 漢字 😀",
        "\x00\x7f\ufeff",
        "",
        "a" * 3000,
    ],
)
def test_every_text_survives_the_round_trip(trained: Tokenizer, text: str) -> None:
    assert trained.decode(trained.encode(text)) == text


def test_ids_lie_below_the_vocabulary_size(trained: Tokenizer) -> None:
    assert trained.vocab_size == 400
    assert sorted(trained.vocabulary().values()) == list(range(400))
    assert trained.vocabulary()[END_OF_DOCUMENT] == trained.eod


def test_training_is_deterministic(trained: Tokenizer, tmp_path: Path) -> None:
    again = train_tokenizer(TEXTS, vocab_size=400, output=tmp_path / "tokenizer.json")
    assert again.path.read_bytes() == trained.path.read_bytes()


def test_a_text_cannot_forge_the_end_of_a_document(trained: Tokenizer) -> None:
    text = f"before{END_OF_DOCUMENT}after"
    for ids in (trained.encode(text), trained.encode_batch([text])[0]):
        assert trained.eod not in ids
        assert trained.decode(ids) == text


def test_batches_encode_like_single_texts(trained: Tokenizer) -> None:
    assert trained.encode_batch(TEXTS) == [trained.encode(text) for text in TEXTS]


def test_truncation_and_padding_of_the_file_are_not_applied(trained: Tokenizer, tmp_path: Path) -> None:
    impl = tokenizers.Tokenizer.from_file(str(trained.path))
    impl.enable_truncation(max_length=5)
    impl.enable_padding(length=50)
    impl.save(str(tmp_path / "tokenizer.json"))
    opened, given = Tokenizer(tmp_path / "tokenizer.json"), ["a", TEXTS[0]]
    assert opened.encode_batch(given) == [opened.encode(text) for text in given]
    assert opened.encode_batch(given) == trained.encode_batch(given)


def test_the_vocabulary_reaches_the_largest_id_over_gaps(tmp_path: Path) -> None:
    vocabulary = {END_OF_DOCUMENT: 0, "a": 1, "b": 9}
    impl = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=END_OF_DOCUMENT))
    impl.save(str(tmp_path / "tokenizer.json"))
    opened = Tokenizer(tmp_path / "tokenizer.json")
    assert opened.encode("b") == [9] and opened.vocab_size == 10


def test_wrong_sizes_and_files_are_errors(tmp_path: Path, trained: Tokenizer) -> None:
    with pytest.raises(DataError, match="at least 257"):
        train_tokenizer(TEXTS, vocab_size=256, output=tmp_path / "t.json")
    with pytest.raises(DataError, match="yield only"):
        train_tokenizer(["ab ab"], vocab_size=1000, output=tmp_path / "t.json")
    with pytest.raises(DataError, match="cannot read"):
        Tokenizer(tmp_path / "missing.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizer"):
        Tokenizer(tmp_path / "bad.json")
    with pytest.raises(DataError, match="no end-of-document token"):
        Tokenizer(trained.path, eod_token="<other>")


def test_load_follows_the_configuration(trained: Tokenizer) -> None:
    named = DataConfig(tokenizer_model=str(trained.path))
    assert load_tokenizer(named).vocab_size == 400
    assert load_tokenizer(named, vocab_size=512).vocab_size == 400
    with pytest.raises(DataError, match="expected at least as many"):
        load_tokenizer(named, vocab_size=399)
    with pytest.raises(DataError, match="--tokenizer-model"):
        load_tokenizer(DataConfig())
    null = load_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), vocab_size=10)
    assert isinstance(null, NullTokenizer)
    assert (null.vocab_size, null.eod) == (10, 9)
    with pytest.raises(DataError, match="--vocab-size"):
        load_tokenizer(DataConfig(tokenizer_type="NullTokenizer"))
