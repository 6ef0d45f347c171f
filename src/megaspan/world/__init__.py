"""The process and its machine: device, memory limits, allocator, launcher, mesh of ranks. The only package that reads the
environment.

    ranks = world.join(config)          # place in the mesh, device, the watch over the other ranks
    …                                   # rows, plan: no collective yet
    axes = ranks.connect()              # process group and torch's meshes
    ranks.beat("forward layer 3")       # at every boundary
"""

from megaspan.world.agreement import agree as agree
from megaspan.world.agreement import largest as largest
from megaspan.world.agreement import same_everywhere as same_everywhere
from megaspan.world.agreement import summed as summed
from megaspan.world.axes import DeviceAxes as DeviceAxes
from megaspan.world.axes import Mesh as Mesh
from megaspan.world.axes import device_axes as device_axes
from megaspan.world.axes import mesh as mesh
from megaspan.world.devices import device as device
from megaspan.world.devices import machine as machine
from megaspan.world.failure import Failure as Failure
from megaspan.world.failure import exit_once as exit_once
from megaspan.world.failure import read_failure as read_failure
from megaspan.world.failure import report_failure as report_failure
from megaspan.world.gpu import ALLOCATOR_VARIABLES as ALLOCATOR_VARIABLES
from megaspan.world.gpu import Allocator as Allocator
from megaspan.world.gpu import Gpu as Gpu
from megaspan.world.gpu import allocator as allocator
from megaspan.world.gpu import gpus as gpus
from megaspan.world.gpu import set_allocator as set_allocator
from megaspan.world.heartbeat import Heartbeat as Heartbeat
from megaspan.world.heartbeat import Limits as Limits
from megaspan.world.host import cgroup_limit as cgroup_limit
from megaspan.world.host import cores as cores
from megaspan.world.host import host_limit as host_limit
from megaspan.world.host import memlock_limit as memlock_limit
from megaspan.world.host import peak_host_bytes as peak_host_bytes
from megaspan.world.kernelcache import keep_kernels as keep_kernels
from megaspan.world.launched import OWN_ROLE as OWN_ROLE
from megaspan.world.launched import Launch as Launch
from megaspan.world.launched import follow_parent as follow_parent
from megaspan.world.launched import launch as launch
from megaspan.world.launched import share_cores as share_cores
from megaspan.world.launchfile import launch_precision as launch_precision
from megaspan.world.launchfile import refuse_launch as refuse_launch
from megaspan.world.launchfile import refuse_wrapped as refuse_wrapped
from megaspan.world.ranks import Ranks as Ranks
from megaspan.world.ranks import join as join
from megaspan.world.reports import PACKAGES as PACKAGES
from megaspan.world.reports import environment_report as environment_report
from megaspan.world.reports import versions as versions
