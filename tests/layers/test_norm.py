"""RMSNorm and LayerNorm: the formula in fp64, fp32 statistics, dtypes, names, sharding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mt_megatron.errors import ConfigError
from mt_megatron.layers.norm import LayerNorm, RMSNorm, _gain, norm_class

H = 24


def config(**overrides):
    values = {
        "layernorm_zero_centered_gamma": False,
        "params_dtype": torch.float32,
        "sequence_parallel": False,
        "normalization": "RMSNorm",
    }
    return SimpleNamespace(**{**values, **overrides})


def formula(module, x):
    x, weight = x.double(), module.weight.double()
    if module.zero_centered_gamma:
        weight = weight + 1.0
    if isinstance(module, LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + module.eps) * weight
    return y if module.bias is None else y + module.bias.double()


def randomized(cls, seed=0, **overrides):
    generator = torch.Generator().manual_seed(seed)
    module = cls(config(**overrides), H, eps=1e-5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(H, generator=generator).to(parameter.dtype) * 0.3)
    return module, torch.randn(5, 3, H, generator=generator)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm])
def test_forward_and_gradients_are_the_formulas(cls, zero_centered):
    module, x = randomized(cls, layernorm_zero_centered_gamma=zero_centered)
    x.requires_grad_()
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(module(x), [x, *module.parameters()], dy)
    expected = torch.autograd.grad(formula(module, x), [x, *module.parameters()], dy.double())
    torch.testing.assert_close(module(x).double(), formula(module, x), rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm])
def test_gradcheck(cls):
    module, x = randomized(cls, params_dtype=torch.float64)
    assert torch.autograd.gradcheck(module, x.double().requires_grad_())


def test_rms_gradients_nobody_needs_are_not_computed():
    module, x = randomized(RMSNorm)
    module(x).sum().backward()
    assert module.weight.grad is not None
    frozen, x = randomized(RMSNorm)
    frozen.weight.requires_grad_(False)
    frozen(x.requires_grad_()).sum().backward()
    assert x.grad is not None and frozen.weight.grad is None


@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm])
def test_statistics_are_fp32(cls):
    module, x = randomized(cls, params_dtype=torch.float16)
    x = x.half() * 400  # squares beyond fp16's range
    assert module(x).dtype is torch.float16
    torch.testing.assert_close(module(x).double(), formula(module, x), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("cls", [RMSNorm, LayerNorm])
@pytest.mark.parametrize(
    ("parameters", "given", "returned"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
    ],
)
def test_mixed_dtypes(cls, parameters, given, returned):
    module, x = randomized(cls, params_dtype=parameters)
    x = x.to(given).requires_grad_()
    y = module(x)
    assert y.dtype is returned
    torch.testing.assert_close(y.double(), formula(module, x), rtol=1e-2, atol=1e-2)
    y.sum().backward()
    assert x.grad.dtype is given and module.weight.grad.dtype is parameters


def test_small_zero_centred_gain_survives_bf16():
    module = RMSNorm(config(layernorm_zero_centered_gamma=True, params_dtype=torch.bfloat16), H)
    assert not module.weight.any()
    torch.nn.init.constant_(module.weight, 2.0**-10)  # 1 + 2**-10 rounds to 1 in bf16
    x = torch.ones(1, H)
    assert _gain(module.weight, True)[0].item() == 1 + 2.0**-10
    assert module(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parameters_are_named_and_marked_as_upstream_expects(sequence_parallel):
    rms, layer = (cls(config(sequence_parallel=sequence_parallel), H) for cls in (RMSNorm, LayerNorm))
    assert list(rms.state_dict()) == ["weight"] and list(layer.state_dict()) == ["weight", "bias"]
    for parameter in (*rms.parameters(), *layer.parameters()):
        assert parameter.sequence_parallel is sequence_parallel


def test_config_names_the_class_and_hints_are_understood():
    assert norm_class(config()) is RMSNorm
    assert norm_class(config(normalization="LayerNorm")) is LayerNorm
    with pytest.raises(ConfigError, match="'BatchNorm'.*RMSNorm, LayerNorm"):
        norm_class(config(normalization="BatchNorm"))
    RMSNorm(config(), hidden_size=H, eps=1e-6, persist_layer_norm=True, normalization="RMSNorm")
    with pytest.raises(TypeError, match="epsilon"):
        RMSNorm(config(), H, epsilon=1e-6)


def test_agrees_with_hugging_face():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module, x = randomized(RMSNorm)
    theirs = LlamaRMSNorm(H, eps=1e-5)
    theirs.load_state_dict(module.state_dict())
    torch.testing.assert_close(module(x), theirs(x), rtol=1e-6, atol=1e-6)


def test_memory_kept_for_backward_is_the_input_and_one_number_per_token():
    module, x = randomized(RMSNorm, params_dtype=torch.bfloat16)
    x = x.bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        module(x)
    assert sorted(map(tuple, kept)) == sorted([(H,), (5, 3, H), (5, 3, 1)])
