"""The tokenizers that are not ``tokenizer.json`` files, and the check of data against a run's tokenizer."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_megatron.config.parse import load_config
from mt_megatron.config.schema import DataConfig, TrainingConfig
from mt_megatron.data.loader.tokenizer import TOKENIZER_TYPES, load_tokenizer, open_tokenizer, train_tokenizer
from mt_megatron.data.prepare.preprocess import preprocess
from mt_megatron.data.prepare.sidecar import data_problems, tokenizer_problem
from mt_megatron.errors import ConfigError, DataError
from mt_megatron.training.validate import validate
from tests.data.test_preprocess import Lines, options, texts, write_jsonl

SENTENCE = "The quick brown fox jumps over the lazy dog, 12 times. Ünïcode 語."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model trained on a few sentences."""
    return train_sentencepiece(tmp_path_factory.mktemp("sp") / "t.model")


def train_sentencepiece(path: Path, **more: Any) -> Path:
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([SENTENCE, *(SENTENCE[i:] for i in range(40))] * 5),
        model_writer=written,
        vocab_size=330,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **more,
    )
    path.write_bytes(written.getvalue())
    return path


def test_sentencepiece_under_both_of_megatrons_names(model: Path) -> None:
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model))
    plain = open_tokenizer("GPTSentencePieceTokenizer", str(model))
    llama = open_tokenizer("Llama2Tokenizer", str(model))
    ids = theirs.encode(SENTENCE)
    assert plain.encode(SENTENCE) == ids and llama.encode(SENTENCE) == [theirs.bos_id(), *ids]
    assert plain.encode_batch([SENTENCE, "dog"]) == [ids, theirs.encode("dog")]
    assert llama.encode_batch(["dog"]) == [[theirs.bos_id(), *theirs.encode("dog")]]
    assert plain.eod == llama.eod == theirs.eos_id() and plain.vocab_size == theirs.vocab_size()
    assert plain.decode(ids) == theirs.decode(ids)
    assert plain.vocabulary()["</s>"] == plain.eod
    assert plain.identity != llama.identity
    assert theirs.eos_id() not in plain.encode("a </s> inside of a text")


def test_sentencepiece_files_that_cannot_serve_are_refused(tmp_path: Path) -> None:
    (tmp_path / "no.model").write_bytes(b"not a model")
    with pytest.raises(DataError, match="is no SentencePiece model"):
        open_tokenizer("Llama2Tokenizer", str(tmp_path / "no.model"))
    with pytest.raises(DataError, match="cannot read the tokenizer"):
        open_tokenizer("Llama2Tokenizer", str(tmp_path / "nothing.model"))
    endless = train_sentencepiece(tmp_path / "endless.model", eos_id=-1)
    with pytest.raises(DataError, match="no end-of-sequence token"):
        open_tokenizer("GPTSentencePieceTokenizer", str(endless))
    headless = train_sentencepiece(tmp_path / "headless.model", bos_id=-1)
    with pytest.raises(DataError, match="no beginning-of-sequence token"):
        open_tokenizer("Llama2Tokenizer", str(headless))
    assert open_tokenizer("GPTSentencePieceTokenizer", str(headless)).eod >= 0


@given(st.text(st.characters(blacklist_categories=("Cs",))))
def test_bytes_come_back(text: str) -> None:
    tokenizer = open_tokenizer("ByteLevelTokenizer", None)
    ids = tokenizer.encode(text)
    assert bytes(ids).decode() == text == tokenizer.decode([*ids, tokenizer.eod])
    assert [each.tolist() for each in tokenizer.encode_batch([text, ""])] == [ids, []]


def test_bytes_have_257_tokens() -> None:
    tokenizer = open_tokenizer("ByteLevelTokenizer", None)
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert sorted(tokenizer.vocabulary().values()) == list(range(257))
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_a_folder_says_how_its_tokenizer_ends_documents(tmp_path: Path) -> None:
    import tokenizers

    train_tokenizer([SENTENCE] * 9, vocab_size=270, output=tmp_path / "tokenizer.json")
    assert open_tokenizer("HuggingFaceTokenizer", str(tmp_path)).eod == 0
    impl = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    impl.add_special_tokens(["<|stop|>"])
    impl.save(str(tmp_path / "tokenizer.json"))
    for said in ("<|stop|>", {"content": "<|stop|>", "special": True}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": said}))
        assert open_tokenizer("HuggingFaceTokenizer", str(tmp_path)).eod == 270
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert open_tokenizer("HuggingFaceTokenizer", str(tmp_path)).eod == 0


def test_what_cannot_be_opened_is_refused() -> None:
    with pytest.raises(DataError, match="expected one of HuggingFaceTokenizer, GPTSentence"):
        open_tokenizer("TikTokenizer", None)
    for kind in TOKENIZER_TYPES[:3]:
        with pytest.raises(DataError, match="found no tokenizer"):
            open_tokenizer(kind, None)
    with pytest.raises(DataError, match=r"vocab_size=256, and ByteLevelTokenizer has 257 tokens"):
        load_tokenizer(DataConfig(tokenizer_type="ByteLevelTokenizer"), vocab_size=256)


def config(*flags: str) -> TrainingConfig:
    base = "--model llama3_tiny --train-iters 10 --lr 1e-3 --no-mock-data"
    return load_config([*base.split(), *flags])


def test_data_of_another_tokenizer_is_found_before_a_run(tmp_path: Path, model: Path) -> None:
    prefix = preprocess(options(tmp_path, write_jsonl(tmp_path / "a.jsonl", texts(50))), Lines()).prefixes[0]
    right = config("--train-data-path", prefix, "--tokenizer-type", "ByteLevelTokenizer")
    assert data_problems(prefix, right) == [] and tokenizer_problem(prefix, right) is None
    validate(right)
    wrong = config(
        "--train-data-path", prefix, "--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", str(model)
    )
    found = tokenizer_problem(prefix, wrong)
    assert found is not None and "says ByteLevelTokenizer with 257 tokens" in found
    with pytest.raises(ConfigError, match="was made with another tokenizer"):
        validate(wrong)
    too_small = config(
        "--train-data-path", prefix, "--tokenizer-type", "NullTokenizer", "--vocab-size", "200"
    )
    with pytest.raises(ConfigError, match="NullTokenizer has 200; expected at least as many"):
        validate(too_small)
    # Without a description the tokens themselves are looked at.
    Path(prefix + ".json").unlink()
    assert tokenizer_problem(prefix, wrong) is None
    with pytest.raises(ConfigError, match="holds token 256, and the tokenizer has only 200"):
        validate(too_small)


@pytest.mark.parametrize("option", ["--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss"])
def test_another_end_of_documents_is_found_where_a_run_looks_for_it(option: str, tmp_path: Path) -> None:
    made = preprocess(options(tmp_path, write_jsonl(tmp_path / "a.jsonl", texts(5))), Lines()).prefixes[0]
    own = ("--train-data-path", made, "--tokenizer-type", "ByteLevelTokenizer")
    assert tokenizer_problem(made, config(*own, option)) is None
    sidecar = json.loads(Path(made + ".json").read_text())
    sidecar["tokenizer"]["eod"] = 10
    Path(made + ".json").write_text(json.dumps(sidecar))
    assert tokenizer_problem(made, config(*own)) is None
    found = tokenizer_problem(made, config(*own, option))
    assert found is not None and "with the end-of-document token 10, as" in found
    assert f"ends documents with 256; expected the same for {option}. Name" in found
    null = config(
        "--train-data-path", made, "--tokenizer-type", "NullTokenizer", "--vocab-size", "300", option
    )
    assert "ends documents with 299" in (tokenizer_problem(made, null) or "")


@pytest.mark.parametrize("option", ["--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss"])
def test_documents_without_an_end_are_found_where_a_run_looks_for_it(option: str, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(5))
    made = preprocess(options(tmp_path, source, append_eod=False), Lines()).prefixes[0]
    for kind in (["ByteLevelTokenizer"], ["NullTokenizer", "--vocab-size", "257"]):
        own = ("--train-data-path", made, "--tokenizer-type", *kind)
        assert tokenizer_problem(made, config(*own)) is None
        found = tokenizer_problem(made, config(*own, option)) or ""
        assert f"{made}.bin was made without --append-eod, as {made}.json says" in found
        assert f"expected one for {option}. Make the data again with --append-eod" in found


def test_numbers_may_hold_the_ends_of_their_documents(tmp_path: Path) -> None:
    null: dict[str, Any] = {"tokenizer_type": "NullTokenizer", "vocab_size": 9, "append_eod": False}
    source = write_jsonl(tmp_path / "a.jsonl", ["5 7 8", "1 8"])
    made = preprocess(options(tmp_path, source, workers=1, **null), Lines()).prefixes[0]
    own = ("--train-data-path", made, "--tokenizer-type", "NullTokenizer", "--eod-mask-loss")
    assert data_problems(made, config(*own, "--vocab-size", "9")) == []
    (found,) = data_problems(made, config(*own, "--vocab-size", "10"))
    assert f"with the end-of-document token 8, as {made}.json says" in found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read"),
        ('{"format": 99}', "not a description of this version"),
        ('{"format": 1}', "names no tok"),
    ],
)
def test_a_description_that_cannot_be_read_is_an_error(tmp_path: Path, content: str, message: str) -> None:
    prefix = preprocess(options(tmp_path, write_jsonl(tmp_path / "a.jsonl", texts(5))), Lines()).prefixes[0]
    Path(prefix + ".json").write_text(content)
    (found,) = data_problems(prefix, config("--tokenizer-type", "ByteLevelTokenizer"))
    assert message in found


def write_texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"{SENTENCE} {i} {i * 7 % 11}\n" * 9)
    return folder


def test_a_prepared_folder_is_checked_as_well(tmp_path: Path) -> None:
    from mt_megatron.data.prepare.prepare import prepare_corpus

    made = prepare_corpus(
        tmp_path / "out", corpus=write_texts(tmp_path), vocab_size=280, log=lambda line: None
    )
    own = config("--tokenizer-model", str(made.tokenizer_path))
    assert data_problems(made.train_prefix, own) == []
    train_tokenizer([SENTENCE] * 9, vocab_size=281, output=tmp_path / "other.json")
    (found,) = data_problems(made.train_prefix, config("--tokenizer-model", str(tmp_path / "other.json")))
    assert "corpus.json says HuggingFaceTokenizer with 280 tokens" in found
    manifest = tmp_path / "out" / "corpus.json"
    said = json.loads(manifest.read_text())
    assert said["eod"] == 0
    flags = ("--tokenizer-model", str(made.tokenizer_path), "--eod-mask-loss")
    assert data_problems(made.train_prefix, config(*flags)) == []
    manifest.write_text(json.dumps(said | {"eod": 7}))
    assert data_problems(made.train_prefix, own) == []
    (found,) = data_problems(made.train_prefix, config(*flags))
    assert f"with the end-of-document token 7, as {manifest} says, and this run's" in found
    # A corpus.json of before does not name it: the last token of the data is it.
    del said["eod"]
    manifest.write_text(json.dumps(said))
    assert data_problems(made.train_prefix, config(*flags)) == []
    (tmp_path / "out" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    flags = ("--tokenizer-model", str(made.directory), "--eod-mask-loss")
    (found,) = data_problems(made.train_prefix, config(*flags))
    assert "token 0, with which its last document ends, and this run's tokenizer ends documents with" in found


def test_a_prepared_folder_that_names_the_end_is_named_in_its_place(tmp_path: Path) -> None:
    from mt_megatron.data.prepare.prepare import prepare_corpus

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    train_tokenizer([SENTENCE] * 9, vocab_size=270, output=folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    made = prepare_corpus(
        tmp_path / "out", corpus=write_texts(tmp_path), tokenizer=folder, log=lambda line: None
    )

    def found(model: Path) -> list[str]:
        return data_problems(made.train_prefix, config("--tokenizer-model", str(model), "--eod-mask-loss"))

    assert found(made.tokenizer_path) == found(folder) == []
    (line,) = found(made.directory / "tokenizer.json")
    assert f"with --tokenizer-type and --tokenizer-model ({made.directory}), or make" in line
