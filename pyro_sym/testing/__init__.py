"""Checks that a symmetry, a kernel or an orbit average of your own keeps its contract.

Each check is a function that returns nothing, or raises an ``AssertionError`` that says which law is broken,
where, and by how much; call them from a test of any framework, or from none. They draw random numbers under a
seed of their own, so that results are reproducible, and leave torch's random state unchanged. A random
comparison fails by chance for one seed in 50,000 (2e-5).
"""

from pyro_sym.testing.estimators import check_estimator_contract
from pyro_sym.testing.kernels import check_kernel_contract
from pyro_sym.testing.symmetries import check_symmetry_contract

__all__ = ["check_estimator_contract", "check_kernel_contract", "check_symmetry_contract"]
