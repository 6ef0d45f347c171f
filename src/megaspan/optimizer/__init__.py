"""AdamW over weights, masters, moments and gradients that lie where there is room for them.

`optimizer.py` is the face, `trained.py` what is known of one parameter, `adamw.py` and `eight_bit.py` the arithmetic,
`collect.py` gradients that wait on the host, `update.py` a parameter's update wherever its state lies, `conveyor.py` the copies
between host and device, `schedule.py` learning rate and decay.
"""

from megaspan.optimizer.eight_bit import check_optim
from megaspan.optimizer.optimizer import NonFiniteGradient, Optimizer
from megaspan.optimizer.schedule import decayed_names, warmup_steps

__all__ = ["NonFiniteGradient", "Optimizer", "check_optim", "decayed_names", "warmup_steps"]
