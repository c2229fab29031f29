"""What may change without changing the model."""

from pyro_sym.symmetry.align import align
from pyro_sym.symmetry.base import Symmetry
from pyro_sym.symmetry.elementary import Permutation, SignFlip
from pyro_sym.symmetry.model import check_symmetry
from pyro_sym.symmetry.product import Product
from pyro_sym.symmetry.scales import normalise_scales
from pyro_sym.symmetry.viewed import Viewed

__all__ = [
    "Alignment",
    "Permutation",
    "Product",
    "SignFlip",
    "Symmetry",
    "Viewed",
    "align",
    "check_symmetry",
    "normalise_scales",
]
