"""Published configurations drawn at random, valid and not, and what both sides make of one."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mt_megatron
from mt_megatron.cli.main import main
from mt_megatron.config.parse import load_config
from mt_megatron.convert.hf.config import options_of
from mt_megatron.convert.settings import configuration
from mt_megatron.errors import MtMegatronError
from mt_megatron.models.families import family_of
from mt_megatron.training.distributed import joined
from mt_megatron.training.init_from_hf import fill_from

TOKENS = 24
VOCABULARY = 61

Document = dict[str, Any]
_RUN = (
    f"--seq-length {TOKENS} --max-position-embeddings 64 --train-iters 1 --lr 1e-3 --mock-data "
    "--make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer --attention-dropout 0"
)

_SMALLEST = f"{_RUN} --num-layers 1 --hidden-size 8 --num-attention-heads 1 --vocab-size 4096"


def plain(family: str, rng: random.Random) -> Document:
    """A small valid model: two or three layers."""
    heads = rng.choice([2, 4, 6])
    groups = rng.choice([n for n in (1, 2, 3, heads) if heads % n == 0])
    layers = rng.choice([2, 2, 3])
    shape: Document = {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * rng.choice([8, 10]),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": rng.choice([24, 40, 51]),
        "max_position_embeddings": 64,
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "rope_theta": rng.choice([100.0, 10000.0, 500000, 1000000.0]),
        "tie_word_embeddings": rng.random() < 0.3,
        "hidden_act": "silu",
    }
    if family in ("qwen3", "qwen3_moe") or (family in ("llama", "mixtral") and rng.random() < 0.5):
        shape["head_dim"] = rng.choice([6, 8, 16])
    if family == "mixtral":
        shape |= {"num_local_experts": rng.choice([2, 4, 5]), "num_experts_per_tok": rng.choice([1, 2])}
        shape |= {"sliding_window": None}
    if family == "qwen3_moe":
        shape |= {"num_experts": rng.choice([4, 5]), "num_experts_per_tok": rng.choice([1, 2, 3])}
        shape |= {"moe_intermediate_size": rng.choice([12, 20]), "norm_topk_prob": rng.random() < 0.5}
        shape |= {"mlp_only_layers": rng.choice([[], [1], [0]]), "decoder_sparse_step": rng.choice([1, 1, 2])}
    if family.startswith("deepseek"):
        shape |= {
            "num_key_value_heads": heads,
            "rms_norm_eps": 1e-6,
            "moe_intermediate_size": rng.choice([12, 20]),
            "n_routed_experts": 8,
            "n_shared_experts": rng.choice([1, 2]),
            "num_experts_per_tok": rng.choice([2, 3, 4]),
            "first_k_dense_replace": rng.choice([0, 1]),
            "n_group": rng.choice([1, 2, 4]),
            "kv_lora_rank": rng.choice([12, 16]),
            "q_lora_rank": rng.choice([None, 20]),
            "qk_nope_head_dim": rng.choice([6, 8]),
            "qk_rope_head_dim": rng.choice([4, 8]),
            "v_head_dim": rng.choice([6, 8, 12]),
            "routed_scaling_factor": rng.choice([1.0, 2.5]),
        }
        shape["topk_group"] = min(shape["n_group"], 2)
    if family == "deepseek_v2":
        shape |= {"topk_method": rng.choice(["greedy", "group_limited_greedy"]), "norm_topk_prob": False}
    if family == "deepseek_v3":
        shape |= {"num_nextn_predict_layers": 0, "norm_topk_prob": True, "scoring_func": "sigmoid"}
        shape |= {"topk_method": "noaux_tc"}
    return shape


def rotary(rng: random.Random) -> Document:
    """Rotary settings in one of their spellings, some of them incomplete or of unknown kinds."""
    kind = rng.choice(["default", "linear", "llama3", "llama3", "yarn", "yarn", "yarn", "dynamic"])
    found: Document = {rng.choice(["rope_type", "rope_type", "type"]): kind}
    if kind != "default":
        found["factor"] = rng.choice([2.0, 4, 8.0, 8.0, 1.0, 0.5])
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([4.0, 4.0, 1.0])}
    if kind in ("llama3", "yarn") and rng.random() < 0.8:
        found["original_max_position_embeddings"] = rng.choice([16, 16, 32, None])
    if kind == "yarn":
        extra: list[Document] = [
            {},
            {"beta_fast": 32, "beta_slow": 1},
            {"beta_fast": 4.0, "beta_slow": None},
            {"mscale": 0.7, "mscale_all_dim": 0.7},
            {"mscale": 1.0, "mscale_all_dim": 0.5},
            {"mscale": 0.7},
            {"mscale_all_dim": 0.7},
            {"attention_factor": 1.3},
            {"attention_factor": None, "truncate": True},
            {"truncate": False},
        ]
        found |= rng.choice(extra)
    if rng.random() < 0.2:
        found["rope_theta"] = rng.choice([100.0, 50000.0, None, "10000"])
    if rng.random() < 0.1:
        found["partial_rotary_factor"] = rng.choice([1.0, 0.5])
    if found and rng.random() < 0.1:
        found.pop(rng.choice(list(found)))
    return found


def _changes(family: str) -> list[Callable[[random.Random, Document], Document]]:
    """Ways to change a plain model; each returns the entries it sets, with ``...`` for those it removes."""

    def entry(name: str, *values: Any) -> Callable[[random.Random, Document], Document]:
        return lambda rng, shape: {name: rng.choice(values)}

    positions: list[Callable[[random.Random, Document], Document]] = [
        lambda rng, shape: {"rope_scaling": rotary(rng)},
        lambda rng, shape: {"rope_parameters": {"rope_theta": 5000.0, **rotary(rng)}, "rope_theta": ...},
        lambda rng, shape: {
            "rope_scaling": rotary(rng),
            "rope_parameters": {"rope_theta": 5000.0, **rotary(rng)},
        },
        entry("rope_theta", ..., None, "10000", 10000, 0, -1.0),
        entry("partial_rotary_factor", 0.5, 1.0, None),
    ]
    common = [
        entry("num_key_value_heads", ..., None, 3, 5, 0),
        entry("head_dim", ..., None, 8, 16, 7, "8", 4),
        entry("hidden_act", "swish", "gelu", "relu", None),
        entry("attention_bias", True, False, None),
        entry("mlp_bias", True, False),
        entry("tie_word_embeddings", True, False, None, "false"),
        entry("rms_norm_eps", 1e-5, 1e-3, 1e-12, "1e-5", 0, None),
        entry("num_hidden_layers", 1, "2", 2.0, None),
        entry("hidden_size", 24.0, "32"),
        entry("vocab_size", float(VOCABULARY), VOCABULARY),
        entry("intermediate_size", "24", 17, 24.0),
        entry("num_attention_heads", 3, 1, "2"),
        entry("use_sliding_window", True, False),
        entry("sliding_window", 4, 16, None),
        entry("layer_types", ["full_attention"] * 2, ["sliding_attention", "full_attention"], None),
        entry("max_window_layers", 0, 1, 28),
        entry("initializer_range", 0.5, 0.02),
        entry("attention_dropout", 0.1, 0, None),
        entry("bos_token_id", 5, None),
        entry("use_cache", False),
        entry("pretraining_tp", 2),
        entry("max_position_embeddings", 128, 64.0, 48),
        entry("original_max_position_embeddings", 16, 32),
    ]
    experts = [
        entry("num_experts_per_tok", 1, 2, 9, "2", 2.0),
        entry("norm_topk_prob", True, False, None, "true"),
        entry("scoring_func", "softmax", "sigmoid"),
        entry("router_aux_loss_coef", 0.0, 0.5),
        entry("moe_intermediate_size", 16, 16.0),
        entry("router_jitter_noise", 0.1),
    ]
    own: dict[str, list[Callable[[random.Random, Document], Document]]] = {
        "mixtral": [*experts, entry("num_local_experts", 1, 3, "4"), entry("sliding_window", 4, 4096, None)],
        "qwen3_moe": [
            *experts,
            entry("num_experts", 3, 0, 8.0),
            entry("mlp_only_layers", [0, 1, 2], [1], None, [-1], ["0"]),
            entry("decoder_sparse_step", 2, 3, 0, None),
        ],
    }
    latent = [
        *experts,
        entry("n_group", 1, 2, 3, 8, None, ...),
        entry("topk_group", 1, 2, 5, None, ...),
        entry("topk_method", "greedy", "group_limited_greedy", "noaux_tc", None, ...),
        entry("moe_layer_freq", 1, 2),
        entry("first_k_dense_replace", 0, 1, 3, None, ...),
        entry("n_shared_experts", None, 0, 3, ...),
        entry("routed_scaling_factor", 1, 0.5, None, "1.0"),
        entry("rope_interleave", True, False, None),
        entry("ep_size", 1, 2),
        entry("q_lora_rank", None, 16, ...),
        entry("qk_rope_head_dim", 4, 5),
        entry("n_routed_experts", 6, 8, 4),
    ]
    return positions + positions + common + own.get(family, latent if family.startswith("deepseek") else [])


def draw(family: str, rng: random.Random) -> tuple[Document, Document]:
    """A plain valid model, and the same after up to three changes."""
    shape = plain(family, rng)
    changed = dict(shape)
    for change in rng.sample(_changes(family), rng.choice([0, 1, 1, 1, 2, 3])):
        for name, value in change(rng, shape).items():
            changed.pop(name, None)
            if value is not ...:
                changed[name] = value
    return shape, changed


@dataclass(frozen=True)
class Outcome:
    """What both sides made of one configuration."""

    kind: str
    """converted, refused by ours, refused by both, lenient (transformers cannot build it, ours can),
    different, crashed."""

    said: str = ""
    difference: float = 0.0


def theirs(folder: Path, family: str, shape: Document, document: Document, seed: int) -> Any:
    """The model in transformers of ``document``, saved to ``folder``; an error's text where it is refused.
    Then weights of the plain ``shape`` lie there, so that a conversion has something to read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.rmtree(folder, ignore_errors=True)
    error, model = "", None
    for entries in (document, _with_floats(document), shape):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"model_type": family, **entries}))
        try:
            config = AutoConfig.from_pretrained(folder)
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", experts_implementation="eager"
            )
            model = model.float().eval()
            _fill(model, seed)
            _logits(model)
        except Exception as raised:  # noqa: BLE001, whatever transformers raises
            error = error or f"{type(raised).__name__}: {raised}"
            continue
        if entries is not shape:
            error = ""
        break
    assert model is not None, f"the plain model is refused: {error}"
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": family, **document}))
    return error or model


def _with_floats(document: Document) -> Document:
    """The same numbers in the type that transformers insists on."""
    whole = {name for name in _FLOATS if type(document.get(name)) is int}
    return {**document, **{name: float(document[name]) for name in whole}}


_FLOATS = ("attention_dropout", "routed_scaling_factor", "rms_norm_eps", "initializer_range")


def _fill(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.2 * noise if tensor.dim() == 1 and "norm" in name else 0.3 * noise)
        for name, tensor in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(_tokens()).logits
    return found


def _tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(7))


def ours(folder: Path, job: Any) -> torch.Tensor:
    """Logits of our model with the folder's weights. Raises ``MtMegatronError`` where it is refused."""
    document = json.loads((folder / "config.json").read_text())
    config = configuration(options_of(document), _RUN.split(), published=True, say=lambda line: None)
    model = family_of(config).build_model(config, job.layout)[0].float().eval()
    fill_from(folder, config, [model])
    tokens = _tokens()
    with torch.no_grad():
        found: torch.Tensor = model(tokens, torch.arange(TOKENS).expand_as(tokens), None)
    return found[..., :VOCABULARY]


def outcome(
    folder: Path, family: str, seed: int, job: Any, spoil: Document | None = None
) -> tuple[Outcome, Document]:
    """Draw one, and compare. ``spoil`` holds entries that only our side reads, of a plain model."""
    shape, document = draw(family, random.Random(f"{family} {seed}"))
    if spoil is not None:
        document = shape
    model = theirs(folder, family, shape, document, seed)
    if spoil is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": family, **document, **spoil}))
    try:
        found = ours(folder, job)
    except MtMegatronError as error:
        kind = "refused by both" if isinstance(model, str) else "refused by ours"
        return Outcome(kind, str(error)), document
    except Exception as error:  # noqa: BLE001, no refusal, whatever it is
        return Outcome("crashed", f"{type(error).__name__}: {error}"), document
    if isinstance(model, str):
        return Outcome("lenient", model), document
    expected = _logits(model)
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    if difference > 2e-5:
        # Two experts may be as good as equal in fp32: the reference in fp64 tells.
        reference = _logits(model.double())
        scale = reference.abs().max()
        difference = min(difference, ((found.double() - reference).abs().max() / scale).item())
    return Outcome("converted" if difference <= 2e-5 else "different", difference=difference), document


def by_command(folder: Path, family: str, seed: int) -> tuple[Outcome, Document]:
    """The same through the command line, to a Megatron checkpoint and back: stock transformers computes the
    same from what comes out."""
    from transformers import AutoModelForCausalLM

    shape, document = draw(family, random.Random(f"{family} {seed}"))
    source = folder / "source"
    model = theirs(source, family, shape, document, seed)
    for name in ("megatron", "back"):
        shutil.rmtree(folder / name, ignore_errors=True)
    commands = (
        ["--from-hf", str(source), "--to-megatron", str(folder / "megatron")],
        ["--from-megatron", str(folder / "megatron"), "--to-hf", str(folder / "back")],
    )
    for command in commands:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                code = main(["convert", *command])
        except Exception as error:  # noqa: BLE001, no refusal, whatever it is
            return Outcome("crashed", f"{type(error).__name__}: {error}"), document
        if code:
            text = said.getvalue()
            kind = "refused by both" if isinstance(model, str) else "refused by ours"
            return Outcome("crashed" if "Traceback" in text else kind, text), document
    if isinstance(model, str):
        return Outcome("lenient", model), document
    again = AutoModelForCausalLM.from_pretrained(
        folder / "back", dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    difference = (_logits(again) - _logits(model)).abs().max().item()
    return Outcome("converted" if difference == 0 else "different", difference=difference), document


def everything(folder: str, family: str, first: int, count: int, commands: int) -> dict[str, list[Any]]:
    """``count`` configurations of a family from the seed ``first`` on in this process, and ``commands``
    through the command line. The last are plain models of which our side is told something wrong."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    mt_megatron.patch("cpu")
    gc.freeze()  # else every collection at the end of a run visits the modules
    torch.set_num_threads(1)
    found: dict[str, list[Any]] = {"process": [], "command": [], "spoiled": []}
    latent = family.startswith("deepseek")
    spoils = [{"rope_theta": 300.0}, {"routed_scaling_factor": 1.1} if latent else {"rms_norm_eps": 1e-2}]
    with joined(load_config(_SMALLEST.split()), mt_megatron.backend()) as job:
        for seed in range(first, first + count):
            found["process"].append(_row(seed, *outcome(Path(folder) / "process", family, seed, job)))
        for seed, spoil in enumerate(spoils):
            result = outcome(Path(folder) / "spoiled", family, seed, job, spoil)
            found["spoiled"].append(_row(seed, *result))
    for seed in range(first + 10_000, first + 10_000 + commands):
        found["command"].append(_row(seed, *by_command(Path(folder) / "command", family, seed)))
    return found


def _row(seed: int, result: Outcome, document: Document) -> tuple[Any, ...]:
    return seed, result.kind, result.said, result.difference, document
