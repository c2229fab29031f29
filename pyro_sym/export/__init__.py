"""From draws to ArviZ, and what is computed from draws on the way: likelihoods, predictions, functions."""

from pyro_sym.export.allocations import allocation_probabilities
from pyro_sym.export.api import dataset, from_pyro, from_pyro_svi
from pyro_sym.export.likelihood import log_likelihood

__all__ = ["allocation_probabilities", "dataset", "from_pyro", "from_pyro_svi", "log_likelihood"]
