"""Special tokens of a published tokenizer: Megatron-LM's own choice, the others, and their record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import processors
from transformers import AutoTokenizer

from mt_megatron.data.loader.tokenizer import train_tokenizer
from mt_megatron.data.prepare.preprocess import preprocess
from mt_megatron.errors import DataError
from tests.data.test_preprocess import Lines, by_megatron, made, options, texts, write_jsonl


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_special_tokens_are_megatron_lms_unless_told_otherwise(
    tmp_path: Path, include: bool, split: bool
) -> None:
    """Megatron-LM 0.9's HuggingFaceTokenizer is transformers' AutoTokenizer, called with the text alone."""
    train_tokenizer(texts(50), vocab_size=300, output=tmp_path / "tokenizer.json")
    impl = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    impl.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>"])
    impl.add_tokens(["plainly"])
    # That of Llama 3.
    impl.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 300)]
            ),
        ]
    )
    impl.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    documents = [*texts(20, 3), "a<|eot_id|>b plainly <|begin_of_text|>c<|eot_id|>", "<|endoftext|> again."]
    given = options(
        tmp_path,
        write_jsonl(tmp_path / "a.jsonl", documents),
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=str(tmp_path),
        **({} if include else {"include_special_tokens": False}),
        **({"split_special_tokens": True} if split else {}),
    )
    told = Lines()
    result = preprocess(given, told)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = [
        theirs(text, add_special_tokens=include, split_special_tokens=split).input_ids for text in documents
    ]
    assert [len(ids) > 0 and ids[0] == 300 for ids in expected] == [include] * len(documents)
    whole = by_megatron(tmp_path / "m", [[*ids, 0] for ids in expected], 304)
    assert made(result.prefixes[0]) == whole
    sidecar = json.loads(Path(result.prefixes[0] + ".json").read_text())
    assert sidecar["special_tokens_in_text"] == 4
    assert sidecar["tokenizer"]["include_special_tokens"] is include
    assert sidecar["tokenizer"]["split_special_tokens"] is split
    assert any("ids [300]" in line for line in told.lines) is include
    assert any("names 4 special tokens" in line for line in told.lines)
    # Data of an earlier version were made without a choice, and are what they were.
    for name in ("include_special_tokens", "split_special_tokens"):
        del sidecar["plan"]["options"][name], sidecar["tokenizer"][name]
    Path(result.prefixes[0] + ".json").write_text(json.dumps(sidecar))
    if split and not include:
        assert preprocess(given, Lines()).already
    else:
        with pytest.raises(DataError, match=r"made otherwise .*special_tokens (False|True) -> .*keeps it"):
            preprocess(given, Lines())
