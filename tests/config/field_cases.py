"""Logits of small models in one process, before and after one option changes and the weights stay."""

from __future__ import annotations

import gc
import random
from typing import Any, Literal, get_args, get_origin

import torch

import mt_megatron
from mt_megatron.config.field_kinds import Kind, names_of
from mt_megatron.config.parse import load_config
from mt_megatron.config.types import members, options
from mt_megatron.errors import ConfigError
from mt_megatron.models.families import family_of
from mt_megatron.training.distributed import joined
from mt_megatron.training.validate import problems

SEQUENCE = 24
_COMMON = (
    f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --vocab-size 4096 "
    f"--make-vocab-size-divisible-by 32 --seq-length {SEQUENCE} --position-embedding-type rope "
    "--normalization RMSNorm --activation-func silu --gated-linear-unit --no-add-bias-linear "
    "--hidden-dropout 0 --attention-dropout 0 --mock-data --tokenizer-type NullTokenizer --train-iters 1 "
    "--lr 1e-3 --untie-embeddings-and-output-weights --max-position-embeddings 64"
)
_MIXTURE = f"{_COMMON} --family mixtral --num-moe-experts 8 --moe-router-topk 4"
_GROUPS = "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-group-score-topk 1"
_LATENT = (
    "--multi-latent-attention --qk-layernorm --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 8 --rope-type yarn --rotary-scaling-factor 4 "
    "--original-max-position-embeddings 64 --rotary-base 1000 --mscale 0.7 --mscale-all-dim 0.7"
)
_STRETCHED = "--rotary-scaling-factor 8 --original-max-position-embeddings 16"
_UNSTRETCHED = (
    "--rotary-scaling-factor 1 --original-max-position-embeddings 4096 --mscale 1 --mscale-all-dim 0"
)
BASES = {
    "dense": _COMMON,
    "linear": f"{_COMMON} --rope-type linear --rotary-scaling-factor 2",
    "llama3": f"{_COMMON} --rope-type llama3 {_STRETCHED}",
    "experts": _MIXTURE,
    "groups": f"{_MIXTURE} {_GROUPS}",
    "capacity": f"{_MIXTURE} --moe-expert-capacity-factor 0.7 --moe-token-dispatcher-type alltoall",
    "latent": f"{_MIXTURE} {_GROUPS} {_LATENT} --family deepseek",
}
"""Models that have all options of the function in use, one or the other."""


def drawn(rng: random.Random) -> dict[str, list[tuple[str, str]]]:
    """Option of the function -> bases, and flags that give it another value there."""
    number, whole = rng.uniform, rng.randint
    base = f"{number(2e4, 9e5):.0f}"
    return {
        "activation_func": [("dense", "gelu"), ("experts", "gelu")],
        "layernorm_epsilon": [("dense", f"{number(1e-3, 1e-1):g}"), ("latent", "1e-2")],
        "layernorm_zero_centered_gamma": [("dense", "true")],
        "window_size": [("dense", f"{whole(2, 9)} 0")],
        "rotary_base": [("dense", base), ("latent", base)],
        "rotary_percent": [("dense", "0.5")],
        "rotary_interleaved": [("dense", "true")],
        "rotary_seq_len_interpolation_factor": [("dense", f"{number(1.5, 4):.3f}")],
        "rope_type": [
            ("dense", f"linear --rotary-scaling-factor {number(2, 4):.2f}"),
            ("latent", f"rope {_UNSTRETCHED}"),
        ],
        "rotary_scaling_factor": [(each, f"{number(9, 16):.2f}") for each in ("linear", "llama3", "latent")],
        "original_max_position_embeddings": [("llama3", "8"), ("latent", "8")],
        "beta_fast": [("latent", f"{number(2, 3):.2f}")],
        "beta_slow": [("latent", f"{number(0.1, 0.5):.3f}")],
        "mscale": [("latent", f"{number(1, 2):.3f}")],
        "mscale_all_dim": [("latent", f"{number(1, 2):.3f}")],
        "rope_low_freq_factor": [("llama3", f"{number(0.2, 0.6):.3f}")],
        "rope_high_freq_factor": [("llama3", f"{number(5, 9):.3f}")],
        "moe_router_topk": [("experts", f"{whole(1, 3)}"), ("capacity", "3")],
        "moe_router_pre_softmax": [("experts", "true"), ("latent", "true")],
        "moe_router_score_function": [("experts", "sigmoid")],
        "moe_router_num_groups": [("groups", "2"), ("experts", "4 --moe-router-group-topk 2")],
        "moe_router_group_topk": [("groups", "3")],
        "moe_router_group_score_topk": [("groups", "2")],
        "moe_router_topk_scaling_factor": [("experts", f"{number(1.5, 3):.3f}")],
        "moe_expert_capacity_factor": [
            ("experts", "0.5 --moe-token-dispatcher-type alltoall"),
            ("capacity", "0.4"),
        ],
        "moe_token_drop_policy": [("capacity", "position")],
    }


def unlike(name: str) -> list[str]:
    """Other values of a neutral option than its default, as text; none for what is no choice."""
    option = options()[name]
    found: list[str] = []
    for member in members(option.type):
        if member is bool:
            found.append(str(not option.default).lower())
        elif get_origin(member) is Literal:
            found += [str(each) for each in get_args(member) if each != option.default]
        elif member in (int, float):
            found.append("1" if option.default != 1 else "2")
    return found


class Logits:
    """Models of one process, whose weights are drawn once per base."""

    def __init__(self, job: Any, seed: int) -> None:
        self._job = job
        self._seed = seed
        self._weights: dict[str, dict[str, Any]] = {}
        self.before = {base: self._of(base, "") for base in BASES}

    def after(self, base: str, flags: str) -> float:
        """The largest difference to the base's logits. Raises ``ConfigError``."""
        return (self._of(base, flags) - self.before[base]).abs().max().item()

    def _of(self, base: str, flags: str) -> torch.Tensor:
        config = load_config([*BASES[base].split(), *flags.split()])
        wrong = problems(config, world_size=1)
        if wrong:
            raise ConfigError("; ".join(wrong))
        torch.manual_seed(self._seed)
        model = family_of(config).build_model(config, self._job.layout)[0].float().eval()
        if base not in self._weights:
            with torch.no_grad():
                for parameter in model.parameters():
                    noise = torch.randn_like(parameter)
                    parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.3 * noise)
            self._weights[base] = {
                name: each for name, each in model.state_dict().items() if each is not None
            }
        model.load_state_dict(self._weights[base], strict=False)
        tokens = torch.randint(96, (2, SEQUENCE), generator=torch.Generator().manual_seed(self._seed))
        with torch.no_grad():
            logits: torch.Tensor = model(tokens, torch.arange(SEQUENCE).expand_as(tokens), None)
        return logits


def everything(seed: int) -> dict[str, Any]:
    """Differences by option, base and flags; for neutral ones also what is refused."""
    mt_megatron.patch("cpu")
    gc.freeze()  # else every collection at the end of a run visits the modules
    config = load_config(_COMMON.split())
    function: dict[str, dict[str, float]] = {}
    neutral: dict[str, dict[str, float]] = {}
    refused: dict[str, str] = {}
    with joined(config, mt_megatron.backend()) as job:
        logits = Logits(job, seed)
        scale = {base: each.abs().max().item() for base, each in logits.before.items()}
        for name, cases in drawn(random.Random(seed)).items():
            for base, text in cases:
                flags = f"{options()[name].flag} {text}" if text != "true" else options()[name].flag
                function.setdefault(name, {})[f"{base} {flags}"] = logits.after(base, flags) / scale[base]
        of_the_model = [each for each in options().values() if each.section == "model"]
        for option in of_the_model:
            if option.name not in names_of(Kind.NEUTRAL) or option.name in _NOT_DRAWN:
                continue
            for value in unlike(option.name):
                flags = f"{option.flag}={value}" if option.is_bool else f"{option.flag} {value}"
                for base in ("dense", "latent"):
                    try:
                        difference = logits.after(base, flags) / scale[base]
                    except (ConfigError, AssertionError, ImportError, ValueError, RuntimeError) as error:
                        refused[flags] = repr(error)[:200]
                    else:
                        neutral.setdefault(option.name, {})[f"{base} {flags}"] = difference
    return {"function": function, "neutral": neutral, "refused": refused}


_NOT_DRAWN = ("preset", "family", "autocast_dtype", "moe_extended_tp")
"""Not choices, and one that gives parameters other names: the experts of one layer by themselves."""
