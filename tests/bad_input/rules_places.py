"""Data, tokenizers, checkpoints and folders that are named and cannot be used."""

from __future__ import annotations

from random import Random

from tests.bad_input.cases import Case, Promise
from tests.bad_input.rules import promise, rule


@rule
def two_sources(case: Case, rng: Random) -> Promise:
    case["data_path"], case["split"] = ("/nonexistent/a",), "98,2,0"
    return Promise(option="sources of data", found="2", change="--mock-data")


@rule
def no_source(case: Case, rng: Random) -> Promise:
    case["mock_data"] = False
    return Promise(option="sources of data", found="0", change="--data-path")


@rule
def shares_that_are_none(case: Case, rng: Random) -> Promise:
    case["mock_data"], case["data_path"] = False, ("/nonexistent/a",)
    case["split"] = rng.choice(["98,x,0", "0,0,0", "-1,2,3", "1,2,3,4", "nan,1,1", ","])
    return promise("split", repr(case["split"]))


@rule
def generated_tokens_beyond_the_vocabulary(case: Case, rng: Random) -> Promise:
    case["vocab_size"] = rng.randrange(1, 4095)
    return promise("vocab_size", case["vocab_size"])


@rule
def weights_that_are_none(case: Case, rng: Random) -> Promise:
    case["mock_data"] = False
    case["train_data_path"] = rng.choice([("1", "a", "0", "b"), ("0.5", "a", "-1", "b"), ("1", "a", "2")])
    return promise("train_data_path", " ".join(case["train_data_path"]))


@rule
def prefixes_that_are_not_there(case: Case, rng: Random) -> Promise:
    case["mock_data"] = False
    case["train_data_path"] = (f"/nonexistent/{rng.randrange(10**6)}",)
    return promise("train_data_path", case["train_data_path"][0])


@rule
def tokenizers_that_are_not_there(case: Case, rng: Random) -> Promise:
    case["tokenizer_type"], case["tokenizer_model"] = "HuggingFaceTokenizer", "/nonexistent/tokenizer.json"
    return promise("tokenizer_model", "/nonexistent/tokenizer.json")


@rule
def checkpoints_that_are_not_there(case: Case, rng: Random) -> Promise:
    name = rng.choice(["load", "resume"])
    case[name] = "/nonexistent/run"
    return promise(name, "/nonexistent/run")


@rule
def intervals_without_a_folder(case: Case, rng: Random) -> Promise:
    name = rng.choice(["save_interval", "save_interval_in_mins"])
    case[name] = 10
    return promise(name, "without save", "--save")


@rule
def places_below_a_file(case: Case, rng: Random) -> Promise:
    name = rng.choice(["save", "metrics_path", "tensorboard_dir", "wandb_save_dir"])
    case[name] = "/etc/hostname/below"
    return promise(name, "/etc/hostname")


@rule
def places_without_a_name(case: Case, rng: Random) -> Promise:
    name = rng.choice(["save", "metrics_path", "tensorboard_dir", "wandb_save_dir", "data_cache_path"])
    case[name] = ""
    return promise(name, "empty")


@rule
def names_that_no_file_can_have(case: Case, rng: Random) -> Promise:
    name = rng.choice(
        ["save", "metrics_path", "tensorboard_dir", "load", "resume", "tokenizer_model", "train_data_path"]
    )
    case[name] = rng.choice(["/tmp/" + "x" * 300, "/tmp/\0"])
    if name == "tokenizer_model":
        case["tokenizer_type"] = "HuggingFaceTokenizer"
    if name == "train_data_path":
        case["mock_data"], case[name] = False, (case[name],)
    return promise(name, "/tmp/")
