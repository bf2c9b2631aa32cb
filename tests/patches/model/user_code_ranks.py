"""Code of users around the patched layers in one process: checkpointing, autocast, subclasses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import mt_megatron
from tests.patches.model.router_ranks import start

HIDDEN, EXPERTS, TOKENS = 16, 4, 12


def config_of(**options: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 2,
        "ffn_hidden_size": 32,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
    }
    return TransformerConfig(**{**values, **options})


def layer_of(kind: Any = None, **options: Any) -> Any:
    """An MoE layer (of the class ``kind``) with the same weights each time."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe.moe_layer import MoELayer

    torch.manual_seed(3)
    config = config_of(**options)
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=config.moe_grouped_gemm)
    layer = (kind or MoELayer)(config, spec.submodules.mlp.submodules, layer_number=1)
    layer.set_layer_number(1)
    for number, parameter in enumerate(layer.parameters()):
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        parameter.data.copy_(drawn * 0.2)
    return layer


def tokens_of(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    drawn = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(5))
    return drawn.to(dtype).requires_grad_()


def attempt(call: Callable[[], Any]) -> Any:
    """What ``call`` returns, or its error's name and text."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


LOSSES: dict[str, dict[str, Any]] = {
    "aux": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "sequence": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
    "z": {"moe_z_loss_coeff": 0.1},
}


def checkpointing() -> dict[str, Any]:
    """For each loss and way of recomputation: gradients of the router, tokens that the bias counts, and
    the values that are tracked for the log."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import checkpoint as megatrons
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker

    from mt_megatron.layers.moe.router import listen

    biased = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    ways: dict[str, Callable[[Any, Any], Any]] = {
        "once": lambda layer, tokens: layer(tokens)[0],
        "torch": lambda layer, tokens: checkpoint(lambda x: layer(x)[0], tokens, use_reentrant=False),
        "torch reentrant": lambda layer, tokens: checkpoint(
            lambda x: layer(x)[0], tokens, use_reentrant=True
        ),
        "megatron": lambda layer, tokens: megatrons(lambda x: layer(x)[0], False, tokens),
    }
    found: dict[str, Any] = {}
    for loss, options in LOSSES.items():
        for way, run in ways.items():

            def step(options: Any = options, run: Any = run) -> Any:
                layer, tokens = layer_of(**biased, **options), tokens_of()
                load = listen(layer.router)
                clear_aux_losses_tracker()
                (run(layer, tokens) * 0.0).sum().backward()
                tracker = parallel_state.get_moe_layer_wise_logging_tracker()
                return {
                    "gradient": layer.router.weight.grad.tolist(),
                    "tokens": int(layer.router.local_tokens_per_expert.sum()),
                    "tracked": {name: each["values"].tolist() for name, each in tracker.items()},
                    "load": load.take(),
                }

            found[f"{loss} {way}"] = attempt(step)
    return found


def subclasses() -> dict[str, Any]:
    """What code between dispatcher and experts sees, and a layer's output: classes of users with grouped
    and sequential experts, and other experts in place of the layer's own."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    class Scaled(MoELayer):  # type: ignore[misc]
        def forward(self, hidden_states: Any) -> Any:
            probs, indices = self.router(hidden_states)
            rows, counts = self.token_dispatcher.token_permutation(hidden_states, probs, indices)
            made, _ = self.experts(rows, counts)
            self.seen = [rows.shape[0], counts.tolist()]
            made = made * torch.arange(1.0, EXPERTS + 1).repeat_interleave(counts)[:, None]
            return self.token_dispatcher.token_unpermutation(made, None)

    class Rows(torch.nn.Module):
        """Two times what it gets, and how many rows that is."""

        def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, None]:
            self.seen = [rows.shape[0], counts.tolist()]
            return 2.0 * rows, None

    class Other(MoELayer):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.experts = Rows()

    def exchanged(**options: Any) -> Any:
        layer = layer_of(**options)
        layer.experts = Rows()
        return layer

    def run(layer: Any) -> Any:
        seer = layer if isinstance(layer, Scaled) else layer.experts
        output, _ = layer(tokens_of())
        return {"seen": seer.seen, "output": output.tolist()}

    found: dict[str, Any] = {}
    for topk in (1, 2):
        for dispatcher in ("alltoall", "allgather"):
            options = {
                "moe_router_topk": topk,
                "moe_router_pre_softmax": True,
                "moe_token_dispatcher_type": dispatcher,
            }
            grouped = {**options, "moe_grouped_gemm": True}
            found[f"{topk} {dispatcher}"] = {
                "scaled": attempt(lambda made=grouped: run(layer_of(Scaled, **made))),
                "expected": attempt(lambda made=options: run(_like_grouped(Scaled, made))),
                "other": attempt(lambda made=grouped: run(layer_of(Other, **made))),
                "exchanged": attempt(lambda made=grouped: run(exchanged(**made))),
            }
    return found


def _like_grouped(kind: Any, options: dict[str, Any]) -> Any:
    """A layer of sequential experts with the weights of one of grouped experts."""
    grouped, made = layer_of(moe_grouped_gemm=True, **options), layer_of(kind, **options)
    with torch.no_grad():
        made.router.weight.copy_(grouped.router.weight)
        for number, expert in enumerate(made.experts.local_experts):
            expert.linear_fc1.weight.copy_(grouped.experts.weight1[number])
            expert.linear_fc2.weight.copy_(grouped.experts.weight2[number])
    return made


def grouped_subclasses() -> dict[str, Any]:
    """Output and gradients of grouped experts with weights in upstream's order: ours, and those of
    subclasses that read the weights as upstream does or call the inherited forward."""
    from megatron.core.transformer.moe.experts import GroupedMLP

    class Loop(GroupedMLP):  # type: ignore[misc]
        def forward(self, rows: Any, counts: Any) -> Any:
            weight1 = self.weight1.view(self.num_local_experts, self.config.hidden_size, -1)
            weight2 = self.weight2.view(self.num_local_experts, -1, self.config.hidden_size)
            parts = rows.split(counts.tolist())
            made = [self.activation_func(part @ weight1[e]) @ weight2[e] for e, part in enumerate(parts)]
            return torch.cat(made), None

    class Calling(GroupedMLP):  # type: ignore[misc]
        def forward(self, rows: Any, counts: Any) -> Any:
            return super().forward(rows, counts)

    class Plain(GroupedMLP):  # type: ignore[misc]
        pass

    def replaced() -> Any:
        """``GroupedMLP`` itself has the forward of ``Loop``."""
        kept = GroupedMLP.forward
        GroupedMLP.forward = Loop.forward
        try:
            return run(GroupedMLP)
        finally:
            GroupedMLP.forward = kept

    config = config_of(moe_grouped_gemm=True, gradient_accumulation_fusion=False)
    generator = torch.Generator().manual_seed(4)
    state = {
        "weight1": torch.randn(HIDDEN, EXPERTS * 64, generator=generator) * 0.2,
        "weight2": torch.randn(EXPERTS * 32, HIDDEN, generator=generator) * 0.2,
    }
    found: dict[str, Any] = {}
    for kind in (GroupedMLP, Loop, Calling, Plain):

        def run(kind: Any = kind) -> Any:
            experts, rows = kind(EXPERTS, config), tokens_of()[:, 0].detach().requires_grad_()
            experts.load_state_dict(dict(state))
            output, _ = experts(rows, torch.tensor([3, 0, 5, 4]))
            (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
            gradients = [experts.weight1.grad, experts.weight2.grad]
            if gradients[0].dim() == 3:
                gradients = [each.transpose(1, 2).reshape(each.shape[0], -1) for each in gradients]
            else:
                shapes = [(EXPERTS, HIDDEN, -1), (EXPERTS, -1, HIDDEN)]
                pairs = zip(gradients, shapes, strict=True)
                gradients = [each.view(shape).reshape(EXPERTS, -1) for each, shape in pairs]
            kept = sorted(experts.sharded_state_dict())
            return {
                "output": output.tolist(),
                "gradients": [rows.grad.tolist(), *(each.tolist() for each in gradients)],
                "dimensions": experts.weight1.dim(),
                "kept": kept,
                "diverge": _as_diverge_sees(experts),
            }

        found[kind.__name__] = attempt(run)

    found["replaced"] = attempt(replaced)

    from mt_megatron.fp8.attach import _weights

    found["fp8"] = attempt(lambda: len(list(_weights(torch.nn.Sequential(Loop(EXPERTS, config))))))
    return found


def _as_diverge_sees(module: Any) -> dict[str, Any]:
    """Each weight of ``module``, put together from the pieces that ``diverge`` compares."""
    from mt_megatron.diverge.weights import current_value, parameter_pieces

    trainable: Any = SimpleNamespace(bare_chunks=lambda: [module])
    found: dict[str, torch.Tensor] = {}
    for piece in parameter_pieces(trainable, "weights", [0], current_value):
        whole = found.setdefault(piece.name, torch.full(piece.shape, torch.nan))
        whole[torch.meshgrid(*piece.index, indexing="ij")] = piece.tensor
    return {name: whole.tolist() for name, whole in found.items()}


def autocast() -> dict[str, Any]:
    """Logits of a router with moe_router_dtype under autocast, and its gradients, beside those without."""
    found: dict[str, Any] = {}
    for name in ("off", "on"):

        def run(on: bool = name == "on") -> Any:
            router = layer_of(moe_router_dtype="fp32").router
            tokens = tokens_of()
            with torch.autocast("cpu", torch.bfloat16, enabled=on):
                logits = router.gating(tokens)
                slope = torch.linspace(-1, 1, logits.numel()).view_as(logits)
                # Backward too, which is where recomputation runs.
                (logits * slope).sum().backward()
            gradients = [router.weight.grad.tolist(), tokens.grad.tolist()]
            return [str(logits.dtype), logits.tolist(), gradients]

        found[name] = attempt(run)

    def layer() -> Any:
        made, tokens = layer_of(moe_router_dtype="fp32"), tokens_of()
        with torch.autocast("cpu", torch.bfloat16):
            output, _ = made(tokens)
        output.float().sum().backward()
        return bool(made.router.weight.grad.isfinite().all())

    found["layer"] = attempt(layer)
    for name, recomputed in (("once", False), ("twice", True)):

        def step(recomputed: bool = recomputed) -> Any:
            made, tokens = layer_of(moe_layer_recompute=recomputed), tokens_of()
            with torch.autocast("cpu", torch.bfloat16):
                output, _ = made(tokens)
            output.float().square().sum().backward()
            return [made.router.weight.grad.tolist(), tokens.grad.tolist()]

        found[name] = attempt(step)
    for name, enabled in (("types", True), ("types off", False)):
        found[name] = attempt(lambda enabled=enabled: types_of_recomputation(enabled))  # type: ignore[misc]
    return found


def types_of_recomputation(enabled: bool) -> list[str]:
    """Types of a product in the forward pass and in its recomputation, which runs under autocast where that
    one did not and the other way round. A meta tensor, whose device has no autocast, goes before."""
    from megatron.core import tensor_parallel

    types, tokens, unused = [], tokens_of(), torch.empty(1, device="meta")

    def product(_: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        made = rows @ rows.transpose(-1, -2)
        types.append(str(made.dtype))
        return made

    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        output = tensor_parallel.checkpoint(product, False, unused, tokens)
    with torch.autocast("cpu", torch.bfloat16, enabled=not enabled):
        output.backward(torch.ones_like(output))
    return types


def losses() -> dict[str, Any]:
    """A model whose loss is its own, and one whose object has one: with the fused loss and without."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    class Tempered(GPTModel):  # type: ignore[misc]
        def compute_language_model_loss(self, labels: Any, logits: Any) -> Any:
            return super().compute_language_model_loss(labels, logits / 0.7)

    def run(kind: Any, fused: bool, own: bool = False, head: bool = False) -> Any:
        options = {"num_moe_experts": None, "cross_entropy_loss_fusion": fused}
        config = config_of(**options, hidden_dropout=0.0, attention_dropout=0.0)
        torch.manual_seed(1)
        model = kind(config, get_gpt_layer_local_spec(), 32, 8, position_embedding_type="rope")
        for number, parameter in enumerate(model.parameters()):
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.data.copy_(drawn)
        if own:
            inherited = model.compute_language_model_loss
            model.compute_language_model_loss = lambda labels, logits: inherited(labels, logits / 0.7)
        if head:
            model.output_layer.forward = tempering(model.output_layer.forward)
        tokens = torch.arange(8).view(1, 8)
        return model(tokens, tokens, None, labels=tokens + 1).tolist()

    def tempering(forward: Any) -> Any:
        @functools.wraps(forward)
        def tempered(self_or_hidden: Any, *args: Any, **kwargs: Any) -> Any:
            output, bias = forward(self_or_hidden, *args, **kwargs)
            return (output / 0.7 if output.shape[-1] == 32 else output), bias

        return tempered

    def with_head() -> Any:
        """All output layers compute otherwise."""
        from megatron.core.tensor_parallel import ColumnParallelLinear

        kept = ColumnParallelLinear.forward
        ColumnParallelLinear.forward = tempering(kept)
        try:
            return run(GPTModel, True)
        finally:
            ColumnParallelLinear.forward = kept

    warned: list[str] = []

    def replaced(*, before: bool) -> Any:
        """The class's own loss is another function, since before the patches were made or after."""
        from megatron.core.models.common.language_module.language_module import LanguageModule

        if before:
            mt_megatron.unpatch()
        kept = LanguageModule.compute_language_model_loss

        @functools.wraps(kept)
        def tempered(self: Any, labels: Any, logits: Any) -> Any:
            return kept(self, labels, logits / 0.7)

        LanguageModule.compute_language_model_loss = tempered
        if before:
            warned.extend(mt_megatron.patch(backend="cpu").warnings)
        try:
            return run(GPTModel, True)
        finally:
            if before:
                mt_megatron.unpatch()
            LanguageModule.compute_language_model_loss = kept
            if before:
                mt_megatron.patch(backend="cpu")

    return {
        "replaced after": attempt(lambda: replaced(before=False)),
        "replaced before": attempt(lambda: replaced(before=True)),
        "apart": attempt(lambda: run(Tempered, False)),
        "fused": attempt(lambda: run(Tempered, True)),
        "own": attempt(lambda: run(GPTModel, True, own=True)),
        "head": attempt(lambda: run(GPTModel, True, head=True)),
        "all heads": attempt(with_head),
        "plain": attempt(lambda: run(GPTModel, True)),
        "warned": warned,
    }


def everything() -> dict[str, Any]:
    start()
    return {
        "checkpointing": checkpointing(),
        "subclasses": subclasses(),
        "grouped": grouped_subclasses(),
        "autocast": autocast(),
        "losses": losses(),
    }
