"""Exact causal attention behind one signature: kernels, their choice, sinks, and the place in transformers where they go in."""

from megaspan.attention.attend import attend, attend_backward, attend_forward
from megaspan.attention.choose import KernelChoice, choose_kernel
from megaspan.attention.kernel import Kernel
from megaspan.attention.seam import AttentionCall, install

__all__ = ["AttentionCall", "Kernel", "KernelChoice", "attend", "attend_backward", "attend_forward", "choose_kernel", "install"]
