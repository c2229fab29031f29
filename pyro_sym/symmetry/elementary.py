"""The two elementary groups: permutations of units, and sign flips."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod

import torch
from torch import Tensor

from pyro_sym.symmetry.base import FiniteGroup, OnAxes, Values, along, broadcast_batch
from pyro_sym.symmetry.order import Moves, log_order
from pyro_sym.symmetry.product import Product

__all__ = ["Permutation", "SignFlip"]


class _Elementary(OnAxes, FiniteGroup):
    """What permutations and sign flips share."""

    @abstractmethod
    def _log_count(self, size: int) -> float:
        """The logarithm of the number of elements, whether they act or not."""

    def _filled(self, values: Values) -> dict[str, int]:
        """Along how many axes each site moves that has any entries; 1 for a site as a whole."""
        return {site: max(1, len(several)) for site, several in self.axes.items() if values[site].numel()}

    def log_order(self, values: Values) -> float:
        return log_order(self._moves(values))

    def closest(self, draws: Values, mean: Values, variance: Values) -> Tensor:
        (part,) = Product(self).closest(draws, mean, variance)
        return part

    def margin(self, images: Values, mean: Values, variance: Values) -> Tensor:
        return Product(self).margin(images, mean, variance)


class Permutation(_Elementary):
    r"""The symmetric group :math:`S_n`, relabelling one axis (or several axes at once) of each named site.

    An element is an index tensor :math:`g` of shape ``(*batch, n)``; unit :math:`i` of the image is unit
    :math:`g_i` of the original, on every named axis:

    .. math::

        (g \cdot v)_{\dots i \dots} = v_{\dots g_i \dots}, \qquad (g h)_i = h_{g_i}, \qquad (g^{-1})_{g_i} =
        i.

    Args:
        axes: site name to axis, counted from the right (negative), or to a tuple of axes that move together,
            as both axes of a transition matrix do.

    Raises:
        SymmetryError: if an axis is not a negative int, or is named twice.

    Example:
        >>> sym = Permutation({"weights": -1, "locs": -2, "trans": (-2, -1)})
        >>> values = {
        ...     "weights": torch.tensor([0.3, 0.7]),
        ...     "locs": torch.tensor([[1.0], [2.0]]),
        ...     "trans": torch.tensor([[0.9, 0.1], [0.4, 0.6]]),
        ... }
        >>> sym.act(torch.tensor([1, 0]), values)["trans"]
        tensor([[0.6000, 0.4000],
                [0.1000, 0.9000]])
    """

    kind, relabels = "permutation", True

    def _act_along(self, axis: int, element: Tensor, value: Tensor) -> Tensor:
        if element.dim() == 1:
            return value.index_select(axis, element)
        value = broadcast_batch(value, element.shape[:-1])
        return value.gather(axis, along(element, value, axis).expand(value.shape))

    def inverse(self, element: Tensor) -> Tensor:
        return element.argsort(-1)

    def compose(self, first: Tensor, second: Tensor) -> Tensor:
        first, second = torch.broadcast_tensors(first, second)
        return second.gather(-1, first)

    def identity(self, values: Values, batch_shape: tuple[int, ...] = ()) -> Tensor:
        n = self.size(values)
        return torch.arange(n, device=self._device(values)).expand(*batch_shape, n)

    def sample(self, values: Values, batch_shape: tuple[int, ...] = ()) -> Tensor:
        return torch.rand(*batch_shape, self.size(values), device=self._device(values)).argsort(-1)

    def elements(self, values: Values) -> Tensor:
        self._refuse_to_list(self._log_count(self.size(values)))
        every = list(itertools.permutations(range(self.size(values))))
        return torch.tensor(every, dtype=torch.long, device=self._device(values))

    def generators(self, values: Values) -> list[tuple[str, Tensor]]:
        """The adjacent transpositions."""
        named = []
        for i in range(self.size(values) - 1):
            swap = self.identity(values).clone()
            swap[i], swap[i + 1] = i + 1, i
            named.append((f"swapping {i} and {i + 1} in {self}", swap))
        return named

    def _log_count(self, size: int) -> float:
        return math.lgamma(size + 1)

    def _moves(self, values: Values) -> list[Moves]:
        log_count = self._log_count(self.size(values))
        return [Moves(log_count if self._filled(values) else 0.0)]


class SignFlip(_Elementary):
    r"""The group :math:`\{\pm 1\}^n`, flipping signs along one axis (or several at once) of each named site.

    An element is a tensor :math:`s` of :math:`\pm 1` (int8) and shape ``(*batch, n)``:

    .. math::

        (s \cdot v)_{\dots i \dots} = s_i\, v_{\dots i \dots}, \qquad (s t)_i = s_i t_i, \qquad s^{-1} = s,

    and on a site with two named axes, :math:`s_i s_j v_{ij}`. If every site has two, :math:`s` and :math:`-s`
    act alike: ``elements`` lists both, and ``log_order`` counts them once.

    A site without axes, or one that has a single sign for all of its entries, is given as ``()``. Then
    :math:`n = 1`.

    Args:
        axes: site name to axis, counted from the right (negative), to a tuple of axes that flip together, or
            to ``()`` for one sign of the whole site.

    Raises:
        SymmetryError: if an axis is not a negative int, or is named twice.

    Example:
        >>> sym = SignFlip({"loadings": -1, "factors": -1})
        >>> values = {"loadings": torch.ones(3, 2), "factors": torch.ones(2)}
        >>> sym.act(torch.tensor([1, -1]), values)["factors"]
        tensor([ 1., -1.])
        >>> SignFlip({"a": ()}).act(torch.tensor([-1]), {"a": torch.tensor(3.0)})["a"]
        tensor(-3.)
    """

    kind, flips = "sign", True

    def _act_along(self, axis: int, element: Tensor, value: Tensor) -> Tensor:
        return value * along(element, value, axis)

    def _act_on_whole(self, element: Tensor, value: Tensor) -> Tensor:
        # The one unit is seen as an axis behind all others.
        return value * along(element, value.unsqueeze(-1), -1).squeeze(-1)

    def inverse(self, element: Tensor) -> Tensor:
        return element

    def compose(self, first: Tensor, second: Tensor) -> Tensor:
        return first * second

    def identity(self, values: Values, batch_shape: tuple[int, ...] = ()) -> Tensor:
        return torch.ones(*batch_shape, self.size(values), dtype=torch.int8, device=self._device(values))

    def sample(self, values: Values, batch_shape: tuple[int, ...] = ()) -> Tensor:
        coins = torch.randint(2, (*batch_shape, self.size(values)), device=self._device(values))
        return (1 - 2 * coins).to(torch.int8)

    def elements(self, values: Values) -> Tensor:
        self._refuse_to_list(self._log_count(self.size(values)))
        every = list(itertools.product((1, -1), repeat=self.size(values)))
        return torch.tensor(every, dtype=torch.int8, device=self._device(values))

    def generators(self, values: Values) -> list[tuple[str, Tensor]]:
        """The flips of one sign."""
        named = []
        for i in range(self.size(values)):
            flip = self.identity(values).clone()
            flip[i] = -1
            named.append((f"flipping the sign of {i} in {self}", flip))
        return named

    def _log_count(self, size: int) -> float:
        return size * math.log(2.0)

    def _moves(self, values: Values) -> list[Moves]:
        log_count, filled = self._log_count(self.size(values)), self._filled(values)
        return [Moves(log_count if filled else 0.0, filled)]
