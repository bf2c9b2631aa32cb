"""The process that asks which layers it would get."""

from __future__ import annotations

import contextlib
import logging
import sys


def chosen(backend: str, arguments: list[str], path: str) -> dict[str, str]:
    """Names of the classes in the spec and of the norm that is built for queries, what was logged, and the
    row of the first norm; or ``error``."""
    if path:
        sys.path.insert(0, path)
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    import mt_megatron
    from mt_megatron.config.parse import load_config
    from mt_megatron.errors import ConfigError
    from mt_megatron.models.families import family_of
    from mt_megatron.models.layer_spec import gpt_layer_spec
    from mt_megatron.planning.build import transformer_config
    from tests.fake_cuda.stand_in import RecordingCuda

    with contextlib.ExitStack() as stack:
        if backend == "cuda":
            stack.enter_context(RecordingCuda().installed())
        mt_megatron.patch(backend)
        common = (
            "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 64 --seq-length 16 "
            "--max-position-embeddings 16 --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data"
        )
        config = load_config([*common.split(), *arguments])
        logger = logging.getLogger("mt_megatron")
        logger.setLevel(logging.INFO)
        logger.addHandler(Keep())
        try:
            made = transformer_config(config)
            spec = gpt_layer_spec(config, made)
        except ConfigError as error:
            return {"error": str(error)}
        # Not earlier: it imports Megatron-Core, which patch() comes before.
        from megatron.core.transformer.spec_utils import build_module

        attention = spec.submodules.self_attention.submodules
        norm = build_module(attention.q_layernorm, config=made, hidden_size=8, eps=1e-5)
        table = family_of(config).convert_table(config)
        return {
            "linear_qkv": attention.linear_qkv.__name__,
            "core_attention": attention.core_attention.__name__,
            "norm_of_queries": f"{type(norm).__module__}.{type(norm).__name__}",
            "norm_row": next(name for name, row in table.items() if "input_layernorm" in row.sources[0]),
            "log": "\n".join(lines),
        }
