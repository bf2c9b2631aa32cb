"""What is simulated: sizes of the job, how long its parts take, and how unsteady they are.

The figures are those of a dense or expert model on accelerators with fast links within a machine and
slower ones between machines; none is measured anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mt_megatron.errors import ConfigError

from .layout import Layout


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run. Times of an undisturbed rank. Raises ``ConfigError`` for impossible figures."""

    layout: Layout
    steps: int = 50
    microbatches: int = 8
    """Per step and data parallel rank."""

    layers: int = 2
    """Per model chunk."""

    attention_ms: float = 2.5
    """Forward, one layer, one micro-batch; the backward pass takes twice as long."""

    mlp_ms: float = 3.5
    embedding_layers: float = 0.1
    """On the first stage, in layers' worth of time."""

    head_layers: float = 0.25
    """On the last stage."""

    optimizer_ms: float = 12.0
    data_part: float = 0.35
    """What a data worker needs for a micro-batch, as a part of its forward and backward pass."""

    prefetched: int = 4
    """Micro-batches that are made ahead."""

    tokens: int = 8192
    """Per micro-batch."""

    packed: bool = False
    """Whether micro-batches differ in tokens."""

    distributed_optimizer: bool = False
    checkpoint_every: int = 0
    """Steps; 0 for none."""

    checkpoint_seconds: float = 2.0
    activation_bytes: int = 32 << 20
    """Of one micro-batch between layers."""

    gradient_bytes: int = 256 << 20
    """Of one rank's parameters."""

    buckets: int = 2
    """Into which a chunk's gradients are cut."""

    local_gb_per_s: float = 100.0
    """Between ranks of one machine."""

    network_gb_per_s: float = 25.0
    """Between machines, per rank."""

    local_latency_us: float = 8.0
    network_latency_us: float = 20.0

    rank_spread: float = 0.01
    """Standard deviation of the lasting differences in speed between ranks."""

    step_spread: float = 0.004
    """Of one rank's speed from step to step, which lasts a few steps."""

    job_spread: float = 0.004
    """Of all ranks' together from step to step."""

    jitter: float = 0.015
    """Of each piece of work between two communications (lognormal)."""

    link_spread: float = 0.03
    """Of the lasting differences between links."""

    link_jitter: float = 0.05
    """Of each message (lognormal)."""

    tail_probability: float = 5e-4
    """That a piece of work or a message takes longer by a heavy-tailed (Pareto) time."""

    tail_ms: float = 1.0
    tail_exponent: float = 1.6
    routing_spread: float = 0.08
    """Of the tokens that an expert parallel rank gets (lognormal)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value < 0:
                raise ConfigError(f"{field.name}={value}; expected at least 0")
        for name in ("steps", "microbatches", "layers", "buckets", "prefetched"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; expected at least 1")

    @property
    def microbatch_ms(self) -> float:
        """Compute of one micro-batch through all chunks of a stage, both ways."""
        return 3 * (self.attention_ms + self.mlp_ms) * self.layers * self.layout.vpp
