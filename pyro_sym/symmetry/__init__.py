"""What may change without changing the model."""

from pyro_sym.symmetry.align import Alignment, align
from pyro_sym.symmetry.base import Symmetry
from pyro_sym.symmetry.elementary import Permutation, SignFlip
from pyro_sym.symmetry.model import check_symmetry
from pyro_sym.symmetry.product import Product

__all__ = ["Alignment", "Permutation", "Product", "SignFlip", "Symmetry", "align", "check_symmetry"]
