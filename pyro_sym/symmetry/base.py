"""The contract of a symmetry: what may change in a model's latent values without changing the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_sym.errors import SymmetryError
from pyro_sym.symmetry.order import Moves

__all__ = ["Axes", "Element", "Symmetry", "Values", "map_element", "unmoved"]

Values = Mapping[str, Tensor]
Element = Any
"""A batched tensor of shape ``(*batch, n)``, or for a product a tuple of elements."""
Axes = dict[str, tuple[int, ...]]


class Symmetry(ABC):
    r"""A finite group :math:`G` acting on the values of a model's sites.

    The action is a left action by volume-preserving maps of constrained values,

    .. math::

        e \cdot v = v, \qquad (g h) \cdot v = g \cdot (h \cdot v).

    **Shapes.** Values are dicts of tensors. Axes are counted from the right, so any number of batch dims
    (chains, draws, particles) may stand in front. An element with batch shape ``B`` of ``b`` dims acts on
    values whose first ``b`` dims broadcast with ``B``; an element without batch dims acts alike on
    everything.

    **Sizes** are read from the values: methods that need the size of the group take ``values`` and look only
    at shapes, dtypes being free.

    To write a symmetry of your own, implement ``_act`` and the abstract methods; the public :meth:`act`
    checks sites and sizes first.

    Attributes:
        axes: which axes (negative, from the right) of which sites the group moves.
    """

    axes: Axes

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites that the group acts on."""
        return tuple(self.axes)

    def act(self, element: Element, values: Values) -> dict[str, Tensor]:
        r"""Apply group elements to values, :math:`g \cdot v`.

        Args:
            element: elements of batch shape ``B``, or without batch dims.
            values: a tensor a site, whose first ``len(B)`` dims broadcast with ``B``. Sites that the symmetry
                does not name are passed through.

        Returns:
            The images, by site; the inputs are not changed.

        Raises:
            SymmetryError: if a site is absent, an axis out of range, or sizes disagree.
        """
        self.check_values(values)
        return {**values, **self._act(element, values)}

    @abstractmethod
    def _act(self, element: Element, values: Values) -> dict[str, Tensor]:
        """The images of this symmetry's own sites; ``values`` have been checked."""

    @abstractmethod
    def check_values(self, values: Values) -> None:
        """Raise a :class:`~pyro_sym.SymmetryError` if the group can't act on values of these shapes."""

    @abstractmethod
    def inverse(self, element: Element) -> Element:
        """The inverse elements, batched alike."""

    @abstractmethod
    def compose(self, first: Element, second: Element) -> Element:
        """The products ``first · second``: ``act(compose(g, h), v) == act(g, act(h, v))``."""

    @abstractmethod
    def identity(self, values: Values, batch_shape: tuple[int, ...] = ()) -> Element:
        """The identity, repeated over ``batch_shape``."""

    @abstractmethod
    def sample(self, values: Values, batch_shape: tuple[int, ...] = ()) -> Element:
        """Independent uniform elements, from torch's global generator."""

    @abstractmethod
    def elements(self, values: Values) -> Element:
        """All elements along one batch dim, the identity first.

        If some elements act alike on all values of these shapes, every map is listed equally often.
        """

    @abstractmethod
    def generators(self, values: Values) -> list[tuple[str, Element]]:
        """Elements that generate the group, each with a name for messages."""

    @abstractmethod
    def log_order(self, values: Values) -> float:
        """``log |G|``, in nats, where elements that act alike on values of these shapes count once."""

    def _moves(self, values: Values) -> list[Moves]:
        """What the elementary symmetries in this one do to values of these shapes."""
        return [Moves(self.log_order(values))]


def unmoved(sites: Iterable[str], images: Values, values: Values, batch_dims: int = 0) -> Tensor:
    """Where images are exactly the values they are of.

    Args:
        sites: the sites to compare.
        images: by site, of shape ``(*batch, *native)``.
        values: the same, before an element acted; their batch dims broadcast with those of the images.
        batch_dims: the number of batch dims.

    Returns:
        A tensor of booleans of the batch's shape.
    """
    same = []
    for site in sites:
        equal = images[site] == values[site]
        same.append(equal.flatten(batch_dims).all(-1) if equal.dim() > batch_dims else equal)
    return torch.stack(torch.broadcast_tensors(*same)).all(0) if same else torch.ones((), dtype=torch.bool)


def map_element(function: Any, element: Element) -> Element:
    """Apply a tensor function to every tensor of an element."""
    if isinstance(element, tuple):
        return tuple(map_element(function, part) for part in element)
    return function(element)


def length(elements: Element) -> int:
    """The length of the batch dim of elements that have one; 1 for the empty tuple of the trivial group."""
    if not isinstance(elements, tuple):
        return len(elements)
    return next((length(part) for part in elements if part != ()), 1)


def normalise_axes(kind: str, axes: Mapping[str, int | tuple[int, ...]]) -> Axes:
    """Check a ``{site: axis or axes}`` table and turn every entry into a tuple of negative ints."""
    if not axes:
        raise SymmetryError(f"{kind} needs at least one site, as in {kind}({{'locs': -1}})")
    table: Axes = {}
    for site, entry in axes.items():
        several = entry if isinstance(entry, tuple) else (entry,)
        for axis in several:
            if type(axis) is not int:
                raise SymmetryError(f"{kind}: axis {axis!r} of site {site!r} is not an int")
            if axis >= 0:
                raise SymmetryError(
                    f"{kind}: axis {axis} of site {site!r} is not negative; axes are counted from the right, "
                    "so that batch dims may stand in front: the last axis is -1"
                )
        if not several or len(set(several)) < len(several):
            raise SymmetryError(
                f"{kind}: axes {several} of site {site!r} must be one or more, each named once"
            )
        table[site] = several
    return table


def common_size(kind: str, axes: Axes, values: Values) -> int:
    """The one length of all the named axes; an error that names the odd one out otherwise."""
    first: tuple[str, int, int] | None = None
    for site, several in axes.items():
        if site not in values:
            raise SymmetryError(
                f"{kind} acts on site {site!r}, which is not among the sites {sorted(values)}"
            )
        shape = tuple(values[site].shape)
        for axis in several:
            if -axis > len(shape):
                raise SymmetryError(
                    f"{kind}: axis {axis} of site {site!r} is out of range for its shape {shape}"
                )
            if first is None:
                first = (site, axis, shape[axis])
            elif shape[axis] != first[2]:
                raise SymmetryError(
                    f"{kind}: axis {axis} of site {site!r} has size {shape[axis]}, but axis {first[1]} of "
                    f"site {first[0]!r} has size {first[2]}; one group moves axes of one size"
                )
    assert first is not None
    return first[2]


def along(element: Tensor, value: Tensor, axis: int) -> Tensor:
    """Reshape an element of shape ``(*batch, n)`` to broadcast with ``value`` along ``axis``."""
    batch = element.shape[:-1]
    between = value.dim() + axis - len(batch)
    if between < 0:
        raise SymmetryError(
            f"elements of batch shape {tuple(batch)} do not fit in front of axis {axis} of a value of shape "
            f"{tuple(value.shape)}; their batch dims must be the value's first dims"
        )
    return element.reshape(*batch, *(1,) * between, element.shape[-1], *(1,) * (-axis - 1))


def broadcast_batch(value: Tensor, batch: torch.Size) -> Tensor:
    """Expand the first ``len(batch)`` dims of a value to the batch shape of elements."""
    lead = torch.broadcast_shapes(value.shape[: len(batch)], batch)
    return value.expand(*lead, *value.shape[len(batch) :])
