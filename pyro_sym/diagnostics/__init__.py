"""Diagnostics that know of symmetries: a report, distances, temperatures, Stein discrepancy, two plots.

ArviZ, pandas and matplotlib (of the extra ``plots``) are imported when they are first needed.
"""

from pyro_sym.alignment.distance import distance_to_copy, distance_to_mode
from pyro_sym.diagnostics.directions import directional_temperatures
from pyro_sym.diagnostics.plots import plot_orbit, plot_temperatures
from pyro_sym.diagnostics.report import Report, report
from pyro_sym.diagnostics.score import unconstrained_score
from pyro_sym.diagnostics.stein import SteinDiscrepancy, kernel_stein_discrepancy

__all__ = [
    "Report",
    "SteinDiscrepancy",
    "directional_temperatures",
    "distance_to_copy",
    "distance_to_mode",
    "kernel_stein_discrepancy",
    "plot_orbit",
    "plot_temperatures",
    "report",
    "unconstrained_score",
]
