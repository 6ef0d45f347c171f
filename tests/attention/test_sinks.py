"""The sinks' gradient."""

from __future__ import annotations

import torch

from megaspan.attention.sinks import sink_gradient


def test_the_gradient_has_the_same_bits_whatever_the_strides() -> None:
    """What has waited on the host comes back with other strides than what stayed on the device."""
    torch.manual_seed(0)
    d_out, out = torch.randn(2, 257, 8, 16)
    lse_Ht, sinks = torch.randn(8, 257), torch.randn(8)
    turned = lse_Ht.t().contiguous().t()
    assert torch.equal(sink_gradient(d_out, out, turned, sinks), sink_gradient(d_out, out, lse_Ht, sinks))
