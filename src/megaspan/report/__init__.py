"""What people see of a run: header, progress, metrics, trackers, pictures. All of it on stderr or in the run folder."""

from megaspan.report.flops import flops_formula, heaviest_layer, model_flops
from megaspan.report.header import Line, print_header
from megaspan.report.metrics import Metrics, read_metrics
from megaspan.report.plots import plot_positions, plot_run
from megaspan.report.progress import Progress
from megaspan.report.trackers import check_run_name, check_trackers

__all__ = [
    "Line",
    "Metrics",
    "Progress",
    "check_run_name",
    "check_trackers",
    "flops_formula",
    "heaviest_layer",
    "model_flops",
    "plot_positions",
    "plot_run",
    "print_header",
    "read_metrics",
]
