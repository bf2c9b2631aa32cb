"""Watching a model's modules while it trains: what is asked for, and no hook where nobody looks.

    from mt_megatron.seams import taps

    for path, module in taps.named_modules(chunks):
        if path.endswith("mlp"):
            watches.append(taps.watch(module, after=lambda call, output: ...))
    ...
    for each in watches:
        each.close()

Open and close taps between two steps. A callback gets detached tensors that share memory with the run's:
copy what is kept beyond the call, write into none, and draw no random numbers. A watched run computes the
same bits as an unwatched one.

names      module paths of the whole model, across pipeline stages and chunks
progress   the micro-batch and chunk under way; whether a forward pass is a recomputed one
modules    calls of a module: inputs, outputs, gradients; watched or changed
loss       logits out of the blocks of the fused cross-entropy
attention  queries, keys and values as core attention gets them
router     logits, scores and choices of an expert router
"""

from .attention import AttentionInputs, attention_inputs, key_shards
from .loss import LossBlock, loss_blocks, token_losses
from .modules import Call, Watch, change, watch
from .names import layer_of, named_modules, whole_name, whole_path
from .progress import current_chunk, current_microbatch, is_recomputing
from .router import RouterScores, router_scores

__all__ = [
    "AttentionInputs",
    "Call",
    "LossBlock",
    "RouterScores",
    "Watch",
    "attention_inputs",
    "change",
    "current_chunk",
    "current_microbatch",
    "is_recomputing",
    "key_shards",
    "layer_of",
    "loss_blocks",
    "named_modules",
    "router_scores",
    "token_losses",
    "watch",
    "whole_name",
    "whole_path",
]
