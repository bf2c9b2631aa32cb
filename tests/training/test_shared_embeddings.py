"""Embeddings of the first and the last stage under the distributed optimizer, in buckets of every size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.convert.recorded_run import converted
from tests.launch import run_ranks
from tests.second_lane import of_lane
from tests.training.shared_embedding_cases import FIRST, PP2, STEPS, VPP2, ZERO1

CASES = of_lane(
    {
        "narrow_tp2_pp2": ("narrow", f"--tensor-model-parallel-size 2 {PP2} {ZERO1}"),
        "qwen_tp2_pp2": ("qwen", f"--tensor-model-parallel-size 2 {PP2} {ZERO1}"),
        "tied_buckets_of_500": ("llama", f"{PP2} {ZERO1} --bucket-size 500"),
        "tied_buckets_of_2000": ("llama", f"{PP2} {ZERO1} --bucket-size 2000"),
        "tied_buckets_of_8000": ("llama", f"{PP2} {ZERO1} --bucket-size 8000"),
        "tied_chunks": ("llama", f"{VPP2} {ZERO1} --bucket-size 2000"),
        "tied_predicting": ("predicting", f"{PP2} {ZERO1}"),
        "layout_3_1": ("deepseek", f"{PP2} {ZERO1} --pipeline-model-parallel-layout 3,1"),
    },
    *("narrow_tp2_pp2", "tied_buckets_of_2000", "tied_predicting", "layout_3_1"),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("shared")
    models = sorted({model for model, _ in CASES.values()})
    cases = "tests.training.shared_embedding_cases"
    [references] = run_ranks(1, f"{cases}:references", str(folder), models)
    return folder, references, run_ranks(4, f"{cases}:layouts", str(folder), CASES, timeout=300)[0]


@pytest.mark.parametrize("name", CASES)
def test_shared_embeddings_train_save_resume_and_convert(trained: Any, name: str) -> None:
    folder, references, found = trained
    model = CASES[name][0]
    assert "error" not in references[model], references[model]
    expected = references[model]["steps"]
    halves = found[name]
    assert not any("error" in half for half in halves), halves
    steps = {**halves[0]["steps"], **halves[1]["steps"]}
    assert list(steps) == list(expected) == [str(step) for step in range(FIRST + 1, STEPS + 1)]
    tensors = []
    for source in (folder / model, folder / name):
        made = converted(source, folder / f"{source.name}_published", "huggingface", prediction=False)
        tensors.append(
            {
                key: value
                for each in made.folder.glob("*.safetensors")
                for key, value in load_file(each).items()
            }
        )
    # Torch sums the squares of a tensor in fp32, one by one.
    rounding = 2**-24 * max(value.numel() for value in tensors[0].values()) ** 0.5
    for step, (loss, norm, _) in expected.items():
        assert steps[step][0] == pytest.approx(loss, rel=4e-6), step
        assert steps[step][1] == pytest.approx(norm, rel=4 * rounding), step
    assert tensors[0].keys() == tensors[1].keys()
    assert max(float((tensors[1][key] - value).abs().max()) for key, value in tensors[0].items()) < 1e-4
