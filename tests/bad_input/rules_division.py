"""What divides what: model over processes, batch over micro-batches."""

from __future__ import annotations

from random import Random

from tests.bad_input.cases import Case, Promise
from tests.bad_input.rules import alone, promise, rule


@rule
def heads_over_tensor(case: Case, rng: Random) -> Promise:
    alone(case)
    tensor = rng.choice([2, 3, 4, 8])
    heads = tensor * rng.randrange(1, 5) + rng.randrange(1, tensor)
    # One group would be wrong as well: this many groups are as wrong as the heads, and named too.
    case["num_attention_heads"], case["num_query_groups"] = heads, heads
    case["tensor_model_parallel_size"], case["ffn_hidden_size"] = tensor, 8 * tensor
    case.world = tensor
    return promise("num_attention_heads", heads)


@rule
def query_groups_over_tensor(case: Case, rng: Random) -> Promise:
    alone(case)
    tensor = rng.choice([4, 8])
    groups = rng.choice([1, 2])
    case["num_attention_heads"], case["num_query_groups"] = 8 * groups, groups
    case["tensor_model_parallel_size"], case["ffn_hidden_size"], case.world = tensor, 8 * tensor, tensor
    return promise("num_query_groups", groups)


@rule
def ffn_over_tensor(case: Case, rng: Random) -> Promise:
    alone(case)
    tensor = rng.choice([2, 4])
    case["num_attention_heads"] = case["num_query_groups"] = 8
    case["ffn_hidden_size"] = tensor * rng.randrange(4, 40) + rng.randrange(1, tensor)
    case["tensor_model_parallel_size"] = case.world = tensor
    return promise("ffn_hidden_size", case["ffn_hidden_size"])


@rule
def groups_over_heads(case: Case, rng: Random) -> Promise:
    alone(case)
    heads = rng.randrange(4, 32)
    groups = rng.choice([each for each in range(2, 40) if heads % each])
    case["num_attention_heads"], case["num_query_groups"] = heads, groups
    return promise("num_query_groups", groups)


@rule
def hidden_over_heads(case: Case, rng: Random) -> Promise:
    alone(case)
    heads = rng.choice([3, 5, 7])
    case["num_attention_heads"] = case["num_query_groups"] = heads
    case["hidden_size"] = 64
    case["kv_channels"] = None
    return promise("hidden_size", 64)


@rule
def layers_over_stages(case: Case, rng: Random) -> Promise:
    alone(case)
    stages = rng.choice([2, 3, 4, 5])
    case["num_layers"] = stages * rng.randrange(1, 9) + rng.randrange(1, stages)
    case["pipeline_model_parallel_size"] = case.world = stages
    return promise("num_layers", case["num_layers"])


@rule
def layers_over_stages_and_chunks(case: Case, rng: Random) -> Promise:
    alone(case)
    stages, chunks = rng.choice([2, 4]), rng.choice([2, 3])
    case["num_layers"] = stages * (chunks * rng.randrange(1, 4) + 1)
    case["pipeline_model_parallel_size"], case["virtual_pipeline_model_parallel_size"] = stages, chunks
    case["global_batch_size"] = case["micro_batch_size"] * stages
    case.world = stages
    return promise("num_layers", case["num_layers"])


@rule
def uneven_stages(case: Case, rng: Random) -> Promise:
    alone(case)
    stages = rng.choice([3, 4])
    first = rng.randrange(1, 5)
    case["num_layers"] = first + (stages - 1) * rng.randrange(1, 4) + 1
    case["first_pipeline_num_layers"] = first
    case["pipeline_model_parallel_size"] = case.world = stages
    return promise("first_pipeline_num_layers", first, "--pipeline-model-parallel-size")


@rule
def sequence_over_context(case: Case, rng: Random) -> Promise:
    alone(case)
    context = rng.choice([2, 4])
    case["seq_length"] = 2 * context * rng.randrange(2, 9) + rng.randrange(1, 2 * context)
    case["context_parallel_size"] = case.world = context
    return promise("seq_length", case["seq_length"])


@rule
def sequence_over_tensor(case: Case, rng: Random) -> Promise:
    alone(case)
    tensor = rng.choice([2, 4])
    case["num_attention_heads"] = case["num_query_groups"] = case["ffn_hidden_size"] = 8
    case["seq_length"] = tensor * rng.randrange(2, 9) + rng.randrange(1, tensor)
    case["tensor_model_parallel_size"] = case.world = tensor
    case["sequence_parallel"] = True
    return promise("seq_length", case["seq_length"])


@rule
def sequence_parallel_alone(case: Case, rng: Random) -> Promise:
    alone(case)
    case["sequence_parallel"] = True
    return promise("sequence_parallel", "1")


@rule
def batch_over_micro_and_data(case: Case, rng: Random) -> Promise:
    alone(case)
    micro, data = rng.choice([1, 2, 4]), rng.choice([2, 3, 4])
    case["micro_batch_size"], case.world = micro, data
    case["global_batch_size"] = micro * data * rng.randrange(1, 6) + rng.randrange(1, micro * data)
    return promise("global_batch_size", case["global_batch_size"])


@rule
def microbatches_over_stages(case: Case, rng: Random) -> Promise:
    alone(case)
    stages = rng.choice([2, 4])
    count = stages * rng.randrange(1, 4) + rng.randrange(1, stages)
    case["num_layers"] = stages * 2
    case["pipeline_model_parallel_size"] = case.world = stages
    case["virtual_pipeline_model_parallel_size"] = 2
    case["global_batch_size"] = case["micro_batch_size"] * count
    return promise("micro-batches", count, "--global-batch-size")


@rule
def world_over_parallel_sizes(case: Case, rng: Random) -> Promise:
    share = (
        case["tensor_model_parallel_size"]
        * case["pipeline_model_parallel_size"]
        * case["context_parallel_size"]
    )
    if share == 1:
        alone(case)
        case["pipeline_model_parallel_size"], case["num_layers"], share = 2, 2, 2
    case.world = share * rng.randrange(1, 4) + rng.randrange(1, share)
    return Promise(option="world size", found=str(case.world), change="Start another number of processes")


@rule
def experts_over_expert_parallel(case: Case, rng: Random) -> Promise:
    alone(case)
    size = rng.choice([2, 4])
    case["family"], case["num_moe_experts"] = "other", size * rng.randrange(1, 5) + rng.randrange(1, size)
    case["moe_router_topk"] = 1
    case["expert_model_parallel_size"] = case.world = size
    return promise("num_moe_experts", case["num_moe_experts"])


def with_experts(case: Case, experts: int) -> None:
    alone(case)
    case["family"], case["num_moe_experts"], case["add_bias_linear"] = "other", experts, False


@rule
def experts_into_groups(case: Case, rng: Random) -> Promise:
    groups = rng.choice([2, 3, 4])
    with_experts(case, groups * rng.randrange(2, 5) + rng.randrange(1, groups))
    case["moe_router_num_groups"], case["moe_router_group_topk"] = groups, 1
    return promise("moe_router_num_groups", groups)


@rule
def layers_with_experts_over_all_layers(case: Case, rng: Random) -> Promise:
    with_experts(case, 4)
    entries = case["num_layers"] + rng.choice([1, 2])
    case["moe_layer_freq"] = (0, *([1] * (entries - 1)))
    return promise("moe_layer_freq", entries)


@rule
def width_of_experts_over_tensor_parallel(case: Case, rng: Random) -> Promise:
    name = rng.choice(["moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"])
    with_experts(case, 4)
    case["tensor_model_parallel_size"] = case.world = 2
    case["num_attention_heads"] = case["num_query_groups"] = 4
    case["sequence_parallel"], case[name] = True, 2 * rng.randrange(4, 40) + 1
    return promise(name, case[name])


@rule
def layout_over_all_layers(case: Case, rng: Random) -> Promise:
    alone(case)
    case["pipeline_model_parallel_size"] = case.world = 2
    case["num_layers"] = rng.randrange(2, 8)
    case["global_batch_size"] = 2 * case["micro_batch_size"]
    first = rng.randrange(1, 8)
    last = case["num_layers"] - first + rng.choice([1, 2, 5]) if first < case["num_layers"] else first
    case["pipeline_model_parallel_layout"] = (first, last)
    return promise("pipeline_model_parallel_layout", first + last)


@rule
def expert_parallel_without_experts(case: Case, rng: Random) -> Promise:
    alone(case)
    case["expert_model_parallel_size"] = case.world = 2
    return promise("expert_model_parallel_size", 2)


@rule
def positions_over_the_limit(case: Case, rng: Random) -> Promise:
    alone(case)
    case["max_position_embeddings"] = rng.randrange(1, case["seq_length"])
    return promise("seq_length", case["seq_length"])


@rule
def increments_over_the_final_batch(case: Case, rng: Random) -> Promise:
    alone(case)
    micro = case["micro_batch_size"]
    start, increment = micro, micro * rng.choice([2, 3])
    case["global_batch_size"] = start + increment * rng.randrange(1, 5) + micro
    case["rampup_batch_size"] = (start, increment, 100)
    return promise("rampup_batch_size", f"{start} {increment} 100")


@rule
def increments_over_micro_and_data(case: Case, rng: Random) -> Promise:
    alone(case)
    case["micro_batch_size"], case["global_batch_size"] = 4, 16
    start = rng.choice([1, 2, 3])
    case["rampup_batch_size"] = (start, 16 - start, 100)
    return promise("rampup_batch_size", f"global batch of {start};", "--micro-batch-size")


@rule
def increments_over_stages(case: Case, rng: Random) -> Promise:
    alone(case)
    stages = rng.choice([2, 4])
    micro = case["micro_batch_size"]
    case["num_layers"] = stages * 2
    case["pipeline_model_parallel_size"] = case.world = stages
    case["virtual_pipeline_model_parallel_size"] = 2
    case["global_batch_size"] = micro * stages * 2
    case["rampup_batch_size"] = (micro, micro * (stages * 2 - 1), 100)
    return promise("rampup_batch_size", "step of 1 micro-batches")


@rule
def increments_over_a_schedule(case: Case, rng: Random) -> Promise:
    alone(case)
    micro = case["micro_batch_size"]
    case["num_layers"], case["pipeline_model_parallel_size"], case.world = 4, 2, 2
    case["virtual_pipeline_model_parallel_size"], case["pipeline_schedule"] = 2, "dualpipev"
    case["global_batch_size"] = micro * 8
    case["rampup_batch_size"] = (micro, micro * 7, 100)
    return promise("rampup_batch_size", "step of 1 micro-batches")


@rule
def schedule_over_one_rank(case: Case, rng: Random) -> Promise:
    alone(case)
    case["pipeline_schedule"] = rng.choice(["zb_h1", "1f1b", "auto"])
    return promise("pipeline_schedule", f"is {case['pipeline_schedule']} with")


@rule
def schedule_over_chunks(case: Case, rng: Random) -> Promise:
    alone(case)
    case["num_layers"], case["pipeline_model_parallel_size"], case.world = 4, 2, 2
    case["pipeline_schedule"] = rng.choice(["interleaved", "zbv", "dualpipev", "hybrid"])
    return promise("pipeline_schedule", f"is {case['pipeline_schedule']}")


@rule
def transport_over_one_rank(case: Case, rng: Random) -> Promise:
    alone(case)
    case["p2p_transport"] = rng.choice(["shm", "rdma", "nixl"])
    return promise("p2p_transport", f"is {case['p2p_transport']} with pipeline_model_parallel_size 1")


@rule
def transport_beside_ring_exchange(case: Case, rng: Random) -> Promise:
    alone(case)
    case["num_layers"], case["pipeline_model_parallel_size"], case.world = 4, 2, 2
    case["use_ring_exchange_p2p"], case["p2p_transport"] = True, rng.choice(["shm", "rdma"])
    return promise("p2p_transport", "use_ring_exchange_p2p")
