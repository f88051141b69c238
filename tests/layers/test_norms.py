"""`RMSNorm` and `LayerNorm` beside PyTorch's modules."""

import torch

from quire.layers.norms import LayerNorm, RMSNorm


def test_rms_norm() -> None:
    ours, theirs = RMSNorm(16, 1e-3), torch.nn.RMSNorm(16, eps=1e-3)
    ours.weight.data.normal_()
    theirs.weight.data = ours.weight.data
    x = torch.randn(5, 16)
    torch.testing.assert_close(ours(x), theirs(x))


def test_layer_norm() -> None:
    ours, theirs = LayerNorm(16, 1e-3), torch.nn.LayerNorm(16, eps=1e-3)
    ours.weight.data.normal_()
    ours.bias.data.normal_()
    theirs.weight.data, theirs.bias.data = ours.weight.data, ours.bias.data
    x = torch.randn(5, 16)
    torch.testing.assert_close(ours(x), theirs(x))


def test_layer_norm_without_weights_has_no_parameters() -> None:
    layer = LayerNorm(16, 1e-5, affine=False)
    assert list(layer.parameters()) == []
    out = layer(torch.randn(5, 16) * 3 + 1)
    torch.testing.assert_close(out.mean(-1), torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.var(-1, unbiased=False), torch.ones(5), atol=1e-4, rtol=0)
