"""What may change without changing the model."""

from pyro_sym.symmetry.align import align
from pyro_sym.symmetry.alignment import Alignment
from pyro_sym.symmetry.allocations import align_allocations
from pyro_sym.symmetry.base import Symmetry
from pyro_sym.symmetry.elementary import Permutation, SignFlip
from pyro_sym.symmetry.find import find_symmetry
from pyro_sym.symmetry.model import check_symmetry
from pyro_sym.symmetry.network import NetworkSymmetry, symmetry_of
from pyro_sym.symmetry.ordering import align_by_order
from pyro_sym.symmetry.product import Product
from pyro_sym.symmetry.scales import normalise_scales
from pyro_sym.symmetry.viewed import Viewed

__all__ = [
    "Alignment",
    "NetworkSymmetry",
    "Permutation",
    "Product",
    "SignFlip",
    "Symmetry",
    "Viewed",
    "align",
    "align_allocations",
    "align_by_order",
    "check_symmetry",
    "find_symmetry",
    "normalise_scales",
    "symmetry_of",
]
