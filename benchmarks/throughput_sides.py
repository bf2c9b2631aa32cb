"""The contenders of ``cpu_throughput.py``: one optimizer step of each on the same shape and tokens.

Every side has ``step() -> float`` (the loss in nats per token): forward, backward, clipping at 1.0
and a fused AdamW update, in bf16 with fp32 master weights where the dtype is bf16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A shape, a dtype and how a step's tokens are cut up."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocabulary: int
    dtype: torch.dtype
    experts: int = 0
    """Experts of every layer, ``ffn`` wide each; 0: dense layers."""

    topk: int = 0
    sequence: int = 512
    micro_batch: int = 8
    micro_batches: int = 1

    @property
    def tokens(self) -> int:
        """Per optimizer step."""
        return self.sequence * self.micro_batch * self.micro_batches

    def linears(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of every matrix that a token is multiplied with, the head last."""
        head = self.hidden // self.heads
        layer = [
            ((self.heads + 2 * self.groups) * head, self.hidden),
            (self.hidden, self.heads * head),
            (2 * self.ffn, self.hidden),
            (self.hidden, self.ffn),
        ]
        return layer * self.layers + [(self.vocabulary, self.hidden)]

    def flags(self, data_parallel: int = 1) -> list[str]:
        """What the trainer is told, in one of ``data_parallel`` copies."""
        return [
            *("--num-layers", str(self.layers), "--hidden-size", str(self.hidden)),
            *("--ffn-hidden-size", str(self.ffn), "--num-attention-heads", str(self.heads)),
            *("--num-query-groups", str(self.groups), "--vocab-size", str(self.vocabulary)),
            *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"),
            *("--disable-bias-linear", "--untie-embeddings-and-output-weights"),
            *("--hidden-dropout", "0", "--attention-dropout", "0", "--seq-length", str(self.sequence)),
            *("--micro-batch-size", str(self.micro_batch // data_parallel), "--train-iters", "1000000"),
            *("--global-batch-size", str(self.micro_batch * self.micro_batches), "--mock-data"),
            *("--tokenizer-type", "NullTokenizer", "--lr-decay-style", "constant", "--lr", str(LR)),
            *("--weight-decay", str(WEIGHT_DECAY), "--clip-grad", str(CLIP)),
            *("--adam-beta1", str(BETAS[0]), "--adam-beta2", str(BETAS[1]), "--adam-eps", str(EPS)),
            *(["--bf16"] if self.dtype is torch.bfloat16 else []),
            *(self._expert_flags() if self.experts else []),
        ]

    def _expert_flags(self) -> list[str]:
        # Neither side balances its experts: stock transformers adds that loss only when asked.
        return [
            *("--num-experts", str(self.experts), "--moe-router-topk", str(self.topk)),
            *("--moe-token-dispatcher-type", "alltoall", "--moe-router-load-balancing-type", "none"),
        ]


SHAPES: dict[str, dict[str, Any]] = {
    "vocabulary-heavy": {
        "name": "L4 h512 V32000",
        "layers": 4,
        "hidden": 512,
        "ffn": 1792,
        "heads": 8,
        "groups": 8,
        "vocabulary": 32000,
    },
    "layer-heavy": {
        "name": "L12 h768 V8192",
        "layers": 12,
        "hidden": 768,
        "ffn": 2048,
        "heads": 12,
        "groups": 12,
        "vocabulary": 8192,
    },
    "mixtral": {
        "name": "Mixtral L4 h512 8 experts of 1792, top 2, V8192",
        "layers": 4,
        "hidden": 512,
        "ffn": 1792,
        "heads": 8,
        "groups": 2,
        "vocabulary": 8192,
        "experts": 8,
        "topk": 2,
    },
    "mixtral-tiny": {
        "name": "Mixtral L2 h64 4 experts of 128, top 2, V512",
        "layers": 2,
        "hidden": 64,
        "ffn": 128,
        "heads": 2,
        "groups": 1,
        "vocabulary": 512,
        "experts": 4,
        "topk": 2,
    },
    "tiny": {
        "name": "L2 h64 V512",
        "layers": 2,
        "hidden": 64,
        "ffn": 128,
        "heads": 2,
        "groups": 2,
        "vocabulary": 512,
    },
}
"""What ``Case`` is told of a shape: one where the head takes the time, one where the layers do, one with
experts, and small ones to try the scripts with."""


def token_ids(case: Case, seed: int = 0) -> Tensor:
    """Random tokens and their successors, int64 [micro_batches, micro_batch, sequence + 1]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.micro_batches, case.micro_batch, case.sequence + 1)
    return torch.randint(case.vocabulary, shape, generator=generator)


class Ours:
    """``mt_megatron``'s trainer: its own ``train_step``, one process."""

    def __init__(
        self, case: Case, tokens: Tensor, more: tuple[str, ...] = (), data_parallel: int = 1
    ) -> None:
        import mt_megatron
        from mt_megatron.config.parse import load_config
        from mt_megatron.models.families import family_of
        from mt_megatron.training.distributed import joined
        from mt_megatron.training.model import build
        from mt_megatron.training.step import Shape, make_forward_step

        self.config = load_config([*case.flags(data_parallel), *more])
        self._stack = contextlib.ExitStack()
        self.job = self._stack.enter_context(joined(self.config, mt_megatron.backend()))
        family = family_of(self.config)
        self.trainable = build(self.config, self.job, family)
        self._forward_step = make_forward_step(
            family, self.job.backend.device(self.job.backend.current_device())
        )
        layout = self.job.layout
        self._shape = Shape(
            num_microbatches=self.config.num_microbatches(layout.world_size),
            micro_batch_size=case.micro_batch // layout.dp,
            seq_length=case.sequence,
        )
        # Every data-parallel rank takes its share of each micro-batch.
        self._tokens = tokens.chunk(layout.dp, dim=1)[self.job.at.dp]
        self._iteration = 0

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        positions = torch.arange(self._shape.seq_length)
        for rows in self._tokens:
            yield {
                "tokens": rows[:, :-1].contiguous(),
                "labels": rows[:, 1:].contiguous(),
                "loss_mask": torch.ones(rows.shape[0], self._shape.seq_length),
                "position_ids": positions.expand(rows.shape[0], -1).contiguous(),
            }

    def step(self) -> float:
        """One step of the trainer's own loop body."""
        loss: float = self.observed_step(None).loss
        return loss

    def observed_step(self, observer: Any) -> Any:
        """The same; a ``StepObserver`` hears of it. Returns the ``StepResult``."""
        from mt_megatron.training.step import NO_OBSERVER, train_step

        self._iteration += 1
        return train_step(
            self.trainable,
            self._forward_step,
            [self._batches()],
            self._shape,
            self.job,
            iteration=self._iteration,
            observer=observer or NO_OBSERVER,
        )

    def close(self) -> None:
        """Leave the process groups."""
        self._stack.close()


class Stock:
    """``transformers``' LlamaForCausalLM, or MixtralForCausalLM with the ``experts`` implementation asked
    for (``grouped_mm`` is its default), with SDPA and torch's fused AdamW.

    In bf16 either ``masters`` (bf16 weights, fp32 copies that AdamW updates) or ``autocast`` (fp32
    weights cast in forward).
    """

    def __init__(
        self, case: Case, tokens: Tensor, *, compiled: bool, bf16: str = "masters", experts: str | None = None
    ) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

        torch.manual_seed(0)
        kind: Any = LlamaForCausalLM
        settings: Any = LlamaConfig
        more: dict[str, Any] = {}
        if case.experts:
            kind, settings = MixtralForCausalLM, MixtralConfig
            more = {"num_local_experts": case.experts, "num_experts_per_tok": case.topk}
            more |= {"experts_implementation": experts}
        model: Any = kind._from_config(
            settings(
                vocab_size=case.vocabulary,
                hidden_size=case.hidden,
                intermediate_size=case.ffn,
                num_hidden_layers=case.layers,
                num_attention_heads=case.heads,
                num_key_value_heads=case.groups,
                max_position_embeddings=case.sequence,
                tie_word_embeddings=False,
                use_cache=False,
                attn_implementation="sdpa",
                **more,
            ),
        )
        low = case.dtype is not torch.float32
        self._autocast = low and bf16 == "autocast"
        self._model = model.to(case.dtype) if low and not self._autocast else model.float()
        self._model.train()
        self._weights = list(self._model.parameters())
        self._masters = self._weights
        if low and not self._autocast:
            self._masters = [torch.nn.Parameter(w.detach().float()) for w in self._weights]
            for master in self._masters:
                master.grad = torch.empty_like(master)
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )
        self._forward = torch.compile(self._model) if compiled else self._model
        self._tokens = tokens

    def step(self) -> float:
        """One step as a training script writes it."""
        low = self._masters is not self._weights
        total = 0.0
        for rows in self._tokens:
            inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
            with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
                # Already shifted, so that both sides learn from every position.
                loss = self._forward(input_ids=inputs, labels=labels, shift_labels=labels).loss
            (loss / len(self._tokens)).backward()
            total += loss.item()
        with torch.no_grad():
            if low:
                torch._foreach_copy_([m.grad for m in self._masters], [w.grad for w in self._weights])
        torch.nn.utils.clip_grad_norm_(self._masters, CLIP)
        self._optimizer.step()
        with torch.no_grad():
            if low:
                torch._foreach_copy_([w.data for w in self._weights], [m.data for m in self._masters])
        for weight in self._weights:
            weight.grad = None
        return total / len(self._tokens)


class Gemms:
    """The linear layers' matrix products of one step and nothing else: no step can be faster.

    Results go to buffers that are there already, and every layer has weights of its own.
    """

    def __init__(self, case: Case, rows: int = 1024) -> None:
        self._rows, self._chunks = rows, case.tokens // rows
        self._work = []
        for outputs, inputs in case.linears():
            weight = torch.randn(outputs, inputs).to(case.dtype)
            gradient = torch.empty_like(weight)
            self._work.append((weight, gradient))
        sizes = {size for pair in case.linears() for size in pair}
        self._activation = {n: torch.randn(rows, n).to(case.dtype) for n in sizes}
        self._result = {n: torch.empty(rows, n, dtype=case.dtype) for n in sizes}
        self.flops = 6.0 * case.tokens * sum(o * i for o, i in case.linears())

    def step(self) -> float:
        """Forward, input gradient and weight gradient of every linear."""
        for weight, gradient in self._work:
            outputs, inputs = weight.shape
            x, dy = self._activation[inputs], self._activation[outputs]
            for _ in range(self._chunks):
                torch.mm(x, weight.t(), out=self._result[outputs])
                torch.mm(dy, weight, out=self._result[inputs])
                torch.mm(dy.t(), x, out=gradient)
        return 0.0
