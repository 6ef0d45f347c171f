"""Attention sinks on top of any kernel: a learned logit per head that takes part in the softmax and carries no value.

A sink only enlarges the softmax denominator, so it is exact to rescale what a kernel without sinks returned (3e-16 in
fp64): `LSE' = log(exp(LSE) + exp(sink))`, `out' = out * exp(LSE - LSE')`, and the kernel's own backward with `out'` and
`LSE'` gives the gradients of q, k and v. A kernel with native sinks would need its own proof and gain nothing. Sinks:
gpt-oss (2025), after Xiao et al., "Efficient streaming language models with attention sinks" (2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Tokens whose products `d_out * out` are held in fp32 at once: 8,192 x 64 heads x 64 is 128 MiB.
_TILE = 8192


def apply_sinks(out_tHD: Tensor, lse_Ht: Tensor, sink_H: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp as if each head had one more key of score `sink_H` and value 0; `out_tHD` is rescaled in place."""
    with_sink_Ht = torch.logaddexp(lse_Ht, sink_H.to(lse_Ht.dtype)[:, None])
    share_tH = torch.exp(lse_Ht - with_sink_Ht).transpose(0, 1)
    return out_tHD.mul_(share_tH[..., None]), with_sink_Ht


def sink_gradient(d_out_tHD: Tensor, out_tHD: Tensor, lse_Ht: Tensor, sink_H: Tensor) -> Tensor:
    """Gradient of the sinks [H], summed in fp32 (fp64 for fp64): minus each query's sink weight times `sum(d_out * out)`."""
    total_H = torch.zeros(sink_H.shape, dtype=lse_Ht.dtype, device=lse_Ht.device)
    for start in range(0, out_tHD.shape[0], _TILE):
        rows = slice(start, start + _TILE)
        delta_tH = (d_out_tHD[rows].to(lse_Ht.dtype) * out_tHD[rows].to(lse_Ht.dtype)).sum(-1)
        weight_Ht = torch.exp(sink_H.to(lse_Ht.dtype)[:, None] - lse_Ht[:, rows])
        # In one order whatever the strides: of what has waited on the host they are others than of what has not.
        total_H -= (weight_Ht * delta_tH.transpose(0, 1)).contiguous().sum(-1)
    return total_H.to(sink_H.dtype)
