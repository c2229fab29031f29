"""From draws to ArviZ, and what is computed from draws on the way: likelihoods, predictions, functions."""

from pyro_sym.export.api import dataset, from_pyro, from_pyro_svi
from pyro_sym.export.likelihood import log_likelihood

__all__ = ["dataset", "from_pyro", "from_pyro_svi", "log_likelihood"]
