"""Symmetries of a part of an axis: sites seen in another shape."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pyro_sym.errors import SymmetryError
from pyro_sym.symmetry.base import Axes, Element, FiniteGroup, Group, Values
from pyro_sym.symmetry.order import Moves

__all__ = ["Shape", "Viewed"]

Shape = Sequence[int | Sequence[int]]


class Viewed(FiniteGroup):
    r"""A group that acts on sites in a finer shape than their own: on factors of axes.

    The columns of a linear layer behind a flattened image are all triples (channel, row, column); relabelling
    channels moves blocks of them. With :math:`\phi` for the map to the finer shape (``Tensor.view``),

    .. math::

        g \cdot v = \phi^{-1}\bigl(g \cdot \phi(v)\bigr),

    which is a group action because :math:`\phi` is one-to-one. Symmetrised guides and :func:`align` treat a
    view of permutations and sign flips as they treat these. Name all factors in one view: a guide can only be
    averaged over a view of a view by enumeration or uniform elements.

    Args:
        symmetry: a group acting on the viewed values; its axes count the factors, from the right.
        shapes: for each site seen in another shape its native shape, in which an axis may be written as a
            tuple of factors, the slowest first: ``(10, (8, 7, 7))`` for 10 rows of 392 numbers. Sites that
            are not named are seen as they are.

    Attributes:
        symmetry: the group acting on the viewed values.
        shapes: the table given.
        axes: the native axes of which some factor moves.

    Raises:
        SymmetryError: if a shape is empty or holds sizes below one, or an axis of the symmetry is out of
            range for it.

    Example:
        >>> channels = Viewed(
        ...     Permutation({"conv.weight": -4, "conv.bias": -1, "linear.weight": -2}),
        ...     {"linear.weight": (1, (2, 3))},
        ... )
        >>> values = {
        ...     "conv.weight": torch.zeros(2, 1, 3, 3),
        ...     "conv.bias": torch.tensor([0.0, 1.0]),
        ...     "linear.weight": torch.arange(6.0).reshape(1, 6),
        ... }
        >>> channels.act(torch.tensor([1, 0]), values)["linear.weight"]
        tensor([[3., 4., 5., 0., 1., 2.]])
    """

    def __init__(self, symmetry: Group, shapes: Mapping[str, Shape]) -> None:
        self.symmetry: Any = symmetry
        self.shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
        for site, shape in shapes.items():
            factors = tuple((axis,) if isinstance(axis, int) else tuple(axis) for axis in shape)
            if not factors or any(size < 1 for axis in factors for size in axis):
                raise SymmetryError(f"Viewed: site {site!r} can't have the shape {tuple(shape)}")
            self.shapes[site] = factors
        self.axes: Axes = {site: self._native(site, several) for site, several in symmetry.axes.items()}

    def _native(self, site: str, several: tuple[int, ...]) -> tuple[int, ...]:
        """The native axes that hold the given factors."""
        if site not in self.shapes:
            return several
        owner = [k - len(self.shapes[site]) for k, axis in enumerate(self.shapes[site]) for _ in axis]
        if several and min(several) < -len(owner):
            raise SymmetryError(
                f"Viewed: axis {min(several)} of site {site!r} is out of range for the shape "
                f"{self.shapes[site]}, which has {len(owner)} factors"
            )
        return tuple(sorted({owner[axis] for axis in several}))

    def __repr__(self) -> str:
        shapes = {
            site: tuple(axis[0] if len(axis) == 1 else axis for axis in factors)
            for site, factors in self.shapes.items()
        }
        return f"Viewed({self.symmetry}, {shapes})"

    def view(self, values: Values) -> dict[str, Tensor]:
        """The values in the finer shape, batch dims kept in front.

        Args:
            values: values by site.

        Returns:
            All of them, the sites of ``shapes`` viewed.

        Raises:
            SymmetryError: if a site's native shape is not the product of its factors.
        """
        viewed = dict(values)
        for site, factors in self.shapes.items():
            if site not in values:
                continue
            shape, native = tuple(values[site].shape), tuple(math.prod(axis) for axis in factors)
            split = len(shape) - len(native)
            if split < 0 or shape[split:] != native:
                raise SymmetryError(
                    f"Viewed: site {site!r} of shape {shape} does not end in the shape {native} that its "
                    f"factors {factors} make"
                )
            finer = (size for axis in factors for size in axis)
            viewed[site] = values[site].reshape(*shape[:split], *finer)
        return viewed

    def unview(self, values: Values) -> dict[str, Tensor]:
        """The inverse of :meth:`view`."""
        native = dict(values)
        for site, factors in self.shapes.items():
            if site in values:
                split = values[site].dim() - sum(len(axis) for axis in factors)
                lead = values[site].shape[:split]
                native[site] = values[site].reshape(*lead, *(math.prod(axis) for axis in factors))
        return native

    @property
    def is_finite(self) -> bool:
        return bool(self.symmetry.is_finite)

    def check_values(self, values: Values) -> None:
        self.symmetry.check_values(self.view(values))

    def _act(self, element: Element, values: Values) -> dict[str, Tensor]:
        return self.unview(self.symmetry._act(element, self.view(values)))

    def inverse(self, element: Element) -> Element:
        return self.symmetry.inverse(element)

    def compose(self, first: Element, second: Element) -> Element:
        return self.symmetry.compose(first, second)

    def identity(self, values: Values, batch_shape: tuple[int, ...] = ()) -> Element:
        return self.symmetry.identity(self.view(values), batch_shape)

    def sample(self, values: Values, batch_shape: tuple[int, ...] = ()) -> Element:
        return self.symmetry.sample(self.view(values), batch_shape)

    def elements(self, values: Values) -> Element:
        return self.symmetry.elements(self.view(values))

    def generators(self, values: Values) -> list[tuple[str, Element]]:
        return self.symmetry.generators(self.view(values))

    def log_order(self, values: Values) -> float:
        return self.symmetry.log_order(self.view(values))

    def closest(self, draws: Values, mean: Values, variance: Values) -> Element:
        return self.symmetry.closest(self.view(draws), self.view(mean), self.view(variance))

    def margin(self, images: Values, mean: Values, variance: Values) -> Tensor:
        return self.symmetry.margin(self.view(images), self.view(mean), self.view(variance))

    def pool_variance(self, variance: Values) -> dict[str, Tensor]:
        return self.unview(self.symmetry.pool_variance(self.view(variance)))

    def _moves(self, values: Values) -> list[Moves]:
        return self.symmetry._moves(self.view(values))
