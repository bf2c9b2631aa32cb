"""Optimizers without Apex: torch's fused AdamW, and a resume that continues to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.launch import run_ranks

HERE = "tests.patches.optimizer.test_fused_adam"

SAVED_BY = ("fully_sharded_model_space", "fully_sharded_bucket_space", "dp_zero_gather_scatter", "files")
KINDS = {
    "fp32 distributed": {"distributed": True},
    "bf16 distributed": {"distributed": True, "bf16": True},
    "fp32": {},
    "bf16": {"bf16": True},
}


def make(kind: dict[str, Any], seed: int = 0) -> tuple[Any, Any]:
    """The small GPT in DDP and its optimizer; weights and biases form two groups."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from tests.patches import small_gpt

    bf16, distributed = kind.get("bf16", False), kind.get("distributed", False)
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = small_gpt.transformer_config(
        num_layers=1, add_bias_linear=True, bf16=bf16, params_dtype=dtype, normalization="LayerNorm"
    )
    model = small_gpt.build(config)
    if seed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(seed))
    model = small_gpt.distributed(
        config,
        model.to(dtype),
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=distributed,
        grad_reduce_in_fp32=True,
        bucket_size=2000 if distributed else None,
    )
    options = OptimizerConfig(
        lr=1e-2,
        weight_decay=0.1,
        clip_grad=1.0,
        bf16=bf16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    return model, get_megatron_optimizer(options, [model])


def train(model: Any, optimizer: Any, steps: range) -> list[Any]:
    from megatron.core import parallel_state

    from tests.patches import small_gpt

    history = []
    for step in steps:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        seed = 2 * step + parallel_state.get_data_parallel_rank()
        losses = small_gpt.train_step(model, [small_gpt.batch(seed)])
        success, norm, _ = optimizer.step()
        assert success
        history.append([losses, float(norm)])
    return history


def steps_of(optimizer: Any) -> list[float]:
    return sorted({float(state["step"]) for state in optimizer.optimizer.state.values()})


def checksum(model: Any, optimizer: Any) -> list[float]:
    found = [float(p.detach().double().abs().sum()) for p in model.parameters()]
    for state in optimizer.optimizer.state.values():
        found += [float(state[key].double().abs().sum()) for key in ("exp_avg", "exp_avg_sq")]
    return found


def save_and_load(folder: str, saved_by: str, old: tuple[Any, Any], new: tuple[Any, Any]) -> None:
    import copy

    from megatron.core import dist_checkpointing, parallel_state

    def sharded(pair: tuple[Any, Any], is_loading: bool) -> dict[str, Any]:
        model, optimizer = pair
        weights = model.module.sharded_state_dict()
        options = {"sharding_type": saved_by} if saved_by in SAVED_BY else {}
        return {
            "model": weights,
            "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, **options),
        }

    if saved_by == "memory":
        new[0].load_state_dict(old[0].state_dict())
        new[1].load_state_dict(copy.deepcopy(old[1].state_dict()))
    elif saved_by == "files":
        path = f"{folder}/{parallel_state.get_tensor_model_parallel_rank()}.pt"
        old[1].save_parameter_state(path)
        new[0].load_state_dict(old[0].state_dict())
        new[1].load_state_dict(copy.deepcopy(old[1].state_dict()))
        torch.distributed.barrier()
        new[1].load_parameter_state(path)
    else:
        dist_checkpointing.save(sharded(old, False), folder)
        loaded = dist_checkpointing.load(sharded(new, True), folder)
        new[0].module.load_state_dict(loaded["model"])
        new[1].load_state_dict(loaded["optimizer"])


def resume(folder: str, kind: str, saved_by: str, spoil: bool = False) -> dict[str, Any]:
    """Three steps, a checkpoint into another model and optimizer, three more steps with both."""
    import os

    from tests.patches import small_gpt

    small_gpt.start()
    old = make(KINDS[kind])
    train(*old, range(3))
    new = make(KINDS[kind], seed=5)
    os.makedirs(folder, exist_ok=True)
    save_and_load(folder, saved_by, old, new)
    loaded = steps_of(new[1])
    if spoil:
        for state in new[1].optimizer.state.values():
            state["step"].zero_()
    shared = len({id(state["step"]) for state in new[1].optimizer.state.values()})
    results = [train(*pair, range(3, 6)) for pair in (old, new)]
    return {
        "loaded": loaded,
        "own": shared == len(new[1].optimizer.state),
        "after": steps_of(new[1]),
        "same": results[0] == results[1] and checksum(*old) == checksum(*new),
        "falls": results[0][-1][0] != results[0][0][0],
    }


def resume_all(folder: str, cases: list[tuple[str, str]]) -> list[Any]:
    return [resume(f"{folder}/{i}", kind, saved_by) for i, (kind, saved_by) in enumerate(cases)]


CASES = [("fp32 distributed", way) for way in SAVED_BY] + [
    ("bf16 distributed", "fully_sharded_model_space"),
    ("fp32", "memory"),
    ("fp32", "dist_checkpointing"),
    ("bf16", "memory"),
    ("bf16", "dist_checkpointing"),
]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: Any) -> Any:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    ranks = run_ranks(2, f"{HERE}:resume_all", folder, CASES, timeout=400)
    return {tuple(case): [rank[i] for rank in ranks] for i, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES, ids=" by ".join)
def test_resume_continues_to_the_bit(case, resumed):
    for result in resumed[case]:
        assert result == {"loaded": [3.0], "own": True, "after": [6.0], "same": True, "falls": True}


def spoiled(folder: str) -> Any:
    return resume(folder, "fp32 distributed", "fully_sharded_model_space", spoil=True)


def test_lost_step_is_noticed(tmp_path):
    """Negative control: with Adam's step back at zero the comparison above fails."""
    for result in run_ranks(2, f"{HERE}:spoiled", str(tmp_path)):
        assert result["loaded"] == [3.0] and result["same"] is False


def only_padding() -> dict[str, Any]:
    """One parameter of nine elements on two ranks: the second owns nothing but padding."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import MegatronModule

    from tests.patches import small_gpt

    small_gpt.start()

    class Scale(MegatronModule):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.weight = torch.nn.Parameter(torch.ones(3, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).square().sum()

    def make_pair() -> tuple[Any, Any]:
        config = small_gpt.transformer_config()
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = DistributedDataParallel(config, ddp, Scale(config))
        options = OptimizerConfig(lr=0.1, clip_grad=1.0, use_distributed_optimizer=True)
        return model, get_megatron_optimizer(options, [model])

    def steps(model: Any, optimizer: Any, count: int) -> list[float]:
        for _ in range(count):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            model(torch.ones(3, 3)).backward()
            model.finish_grad_sync()
            optimizer.step()
        return model.module.weight.flatten().tolist()

    import copy

    old, new = make_pair(), make_pair()
    before = old[1].state_dict()["optimizer"]["param_groups"][0]["step"]
    steps(*old, 2)
    owned = sum(p.numel() for g in old[1].optimizer.param_groups for p in g["params"])
    state = copy.deepcopy(old[1].state_dict())
    new[0].load_state_dict(old[0].state_dict())
    new[1].load_state_dict(copy.deepcopy(state))
    new[1].load_parameter_state_from_dp_zero(old[1].get_parameter_state_dp_zero())
    return {
        "owned": owned,
        "before": before,
        "saved": state["optimizer"]["param_groups"][0]["step"],
        "same": steps(*old, 2) == steps(*new, 2),
        "again": [pair[1].state_dict()["optimizer"]["param_groups"][0]["step"] for pair in (old, new)],
    }


def test_rank_without_a_shard_steps_and_agrees():
    first, second = run_ranks(2, f"{HERE}:only_padding")
    assert (first["owned"], second["owned"]) == (9, 0)
    for result in (first, second):
        assert {**result, "owned": 0} == {
            "owned": 0,
            "before": 0.0,
            "saved": 2.0,
            "same": True,
            "again": [4.0, 4.0],
        }


def which_adam() -> dict[str, Any]:
    from tests.patches import small_gpt

    small_gpt.start()
    from megatron.core.optimizer import Adam, distrib_optimizer

    _, optimizer = make(KINDS["fp32 distributed"])
    inner = optimizer.optimizer
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    return {
        "order": group_entries(saved) == group_entries(optimizer.state_dict()),
        "class": type(inner).__name__,
        "fused": inner.defaults["fused"],
        "decay": sorted(group["wd_mult"] for group in inner.param_groups),
        "flag": distrib_optimizer.HAVE_APEX_OR_TE,
        "adam": isinstance(inner, distrib_optimizer.Adam),
        "checks": [isinstance(inner, Adam), isinstance(torch.optim.SGD([torch.ones(1)]), Adam)],
        "subclass": issubclass(torch.optim.AdamW, Adam),
        "unset rate": unset_rate(Adam),
    }


def group_entries(state: dict[str, Any]) -> list[list[str]]:
    """In their order, in which files have them."""
    return [list(group) for group in state["optimizer"]["param_groups"]]


def unset_rate(adam: Any) -> list[Any]:
    """The rates of two groups, one without its own; the weights after a step with a rate; whether a step
    without one is refused."""
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = adam([{"params": [first]}, {"params": [second], "lr": 0.0}], lr=None, weight_decay=0.0)
    for parameter in (first, second):
        parameter.grad = torch.ones(1)
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    weights = [first.item(), second.item()]
    optimizer.param_groups[0]["lr"] = rates[0]
    with pytest.raises((TypeError, RuntimeError)):
        optimizer.step()
    return [rates, weights]


def test_adam_is_torchs_fused_adamw_and_the_flag_stays():
    (found,) = run_ranks(1, f"{HERE}:which_adam")
    assert found == {
        "order": True,
        "class": "AdamW",
        "fused": True,
        "decay": [0.0, 1.0],
        "flag": False,
        "adam": True,
        "checks": [True, False],
        "subclass": True,
        "unset rate": [[None, 0.0], [pytest.approx(0.5), 1.0]],
    }
