"""The contract of a group: what may change in a model's latent values without changing the model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_sym.errors import SymmetryError
from pyro_sym.symmetry.order import Moves

__all__ = [
    "Axes",
    "Element",
    "FiniteGroup",
    "Group",
    "Symmetry",
    "Values",
    "leaves",
    "map_element",
    "unmoved",
]

Values = Mapping[str, Tensor]
Element = Any
"""A batched tensor of shape ``(*batch, n)``, or for a product a tuple of elements."""
Axes = dict[str, tuple[int, ...]]

# FiniteGroup.closest compares all images of a group of up to this order, so many numbers at a time.
MAX_COMPARED = 5_040
COMPARED_NUMEL = 2**22
MAX_LISTED = 1_000_000


class Group(ABC):
    r"""A compact group :math:`G` acting on the values of a model's sites.

    The action is a left action by volume-preserving maps of constrained values,

    .. math::

        e \cdot v = v, \qquad (g h) \cdot v = g \cdot (h \cdot v).

    **Shapes.** Values are dicts of tensors. Axes are counted from the right, so any number of batch dims
    (chains, draws, particles) may stand in front. An element with batch shape ``B`` of ``b`` dims acts on
    values whose first ``b`` dims broadcast with ``B``; an element without batch dims acts alike on
    everything.

    **Sizes** are read from the values: methods that need the size of the group take ``values`` and use only
    their shapes and devices.

    To write a group of your own, implement ``_act`` and the abstract methods; the public
    :meth:`~pyro_sym.Group.act` checks sites and sizes first. :func:`~pyro_sym.align` and exports also need
    :meth:`~pyro_sym.Group.closest`, which a :class:`FiniteGroup` inherits.

    Attributes:
        axes: which axes (negative, from the right) of which sites the group moves; none for a site that it
            moves as a whole.
        kind: what exports call the elements.
        relabels: whether an element is an index tensor that permutes units, as of a :class:`Permutation`.
        flips: whether an element is a tensor of signs, as of a :class:`SignFlip`.
    """

    axes: Axes
    kind: ClassVar[str] = "element"
    relabels: ClassVar[bool] = False
    flips: ClassVar[bool] = False

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites that the group acts on."""
        return tuple(self.axes)

    @property
    def is_finite(self) -> bool:
        """Whether the group has finitely many elements."""
        return False

    def act(self, element: Element, values: Values) -> dict[str, Tensor]:
        r"""Apply group elements to values, :math:`g \cdot v`.

        Args:
            element: elements of batch shape ``B``, or without batch dims.
            values: a tensor a site, whose first ``len(B)`` dims broadcast with ``B``. Sites that the group
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
        """The images of this group's own sites; ``values`` have been checked."""

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
        """Independent elements from the uniform (Haar) distribution, by torch's global generator."""

    @abstractmethod
    def generators(self, values: Values) -> list[tuple[str, Element]]:
        """Elements whose products are the group, or dense in it, each with a name for messages."""

    def log_order(self, values: Values) -> float:
        """``log |G|`` in nats, counting elements that act alike on these shapes once; infinite by default."""
        return math.inf

    def closest(self, draws: Values, mean: Values, variance: Values) -> Element:
        r"""The elements that bring each draw closest to a point.

        .. math::

            g_m = \arg\min_{g \in G} d(g \cdot \theta_m), \qquad
            d(\theta) = \sum_c (\theta_c - \mu_c)^2 / \sigma_c^2 .

        Args:
            draws: by site, of shape ``(M, *shape)``; :func:`~pyro_sym.align` passes float64 on the CPU.
            mean: :math:`\mu` by site, of shape ``shape``.
            variance: :math:`\sigma^2`, shaped alike and as :meth:`pool_variance` leaves it; infinite at sites
                that should not count.

        Returns:
            Elements of batch shape ``(M,)``.

        Raises:
            SymmetryError: if the group can't tell.
        """
        raise SymmetryError(
            f"{self!r} can't be aligned, as {type(self).__name__} doesn't say which element brings a draw "
            "closest to a point; define closest() for it"
        )

    def margin(self, images: Values, mean: Values, variance: Values) -> Tensor:
        """By how many nats each draw, where ``closest`` has brought it, is closer than its best rival.

        Args:
            images: as the draws of :meth:`~pyro_sym.Group.closest`.
            mean: as for :meth:`~pyro_sym.Group.closest`.
            variance: as for :meth:`~pyro_sym.Group.closest`.

        Returns:
            Half the difference of the distances :math:`d`, of shape ``(M,)``; infinite where there is no
            rival, as by default.
        """
        return torch.full((len(next(iter(images.values()))),), math.inf, dtype=torch.float64)

    def pool_variance(self, variance: Values) -> dict[str, Tensor]:
        """The variances that ``closest`` can weigh by, equal where the group mixes coordinates.

        Args:
            variance: by site, with or without batch dims.

        Returns:
            All of them; unchanged by default.
        """
        return dict(variance)

    def _moves(self, values: Values) -> list[Moves]:
        """What the elementary groups in this one do to values of these shapes."""
        return [Moves(self.log_order(values))]


class FiniteGroup(Group):
    """A :class:`Group` with finitely many elements, which guides can be averaged over.

    :meth:`~pyro_sym.Group.closest` compares all elements, if there are at most 5,040; override it if you
    know better.

    Example:
        >>> draws, mean = {"x": torch.tensor([[2.0, 1.1]])}, {"x": torch.tensor([1.0, 2.0])}
        >>> Permutation({"x": -1}).closest(draws, mean, {"x": torch.ones(2)})
        tensor([[1, 0]])
    """

    @property
    def is_finite(self) -> bool:
        return True

    @abstractmethod
    def elements(self, values: Values) -> Element:
        """All elements along one batch dim, the identity first.

        If some elements act alike on all values of these shapes, every map is listed equally often.
        """

    @abstractmethod
    def log_order(self, values: Values) -> float:
        """``log |G|``, in nats, where elements that act alike on values of these shapes count once."""

    def closest(self, draws: Values, mean: Values, variance: Values) -> Element:
        elements = self._compared({site: value[0] for site, value in draws.items()})
        best = [d.argmin(0) for _, d in self._distances(elements, draws, mean, variance)]
        return map_element(lambda part: part[torch.cat(best)], elements)

    def margin(self, images: Values, mean: Values, variance: Values) -> Tensor:
        elements = self._compared({site: value[0] for site, value in images.items()})
        margins = []
        for idle, d in self._distances(elements, images, mean, variance):
            margins.append((d.masked_fill(idle, math.inf).amin(0) - d[0]) / 2)  # the identity is first
        return torch.cat(margins)

    def _refuse_to_list(self, log_count: float) -> None:
        """Raise if a group of this many elements is too large to be listed."""
        if log_count > math.log(MAX_LISTED):
            raise SymmetryError(
                f"{self} has exp({log_count:.1f}) elements, too many to list; sample them instead"
            )

    def _compared(self, values: Values) -> Element:
        """All elements, if they are few enough to be compared."""
        if self.log_order(values) > math.log(MAX_COMPARED) + 1e-9:
            raise SymmetryError(
                f"{self!r} can't be aligned: it has exp({self.log_order(values):.1f}) elements, more than "
                f"the {MAX_COMPARED:,} that are compared one by one; define {type(self).__name__}.closest()"
            )
        return self.elements(values)

    def _distances(
        self, elements: Element, draws: Values, mean: Values, variance: Values
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """By chunks of draws: which elements leave a draw as it is, and the distances of all images."""
        size = sum(draws[site][0].numel() for site in self.sites)
        order, count = length(elements), len(next(iter(draws.values())))
        columns = map_element(lambda part: part.unsqueeze(1), elements)  # (|G|, 1, n)
        for rows in torch.arange(count).split(max(1, COMPARED_NUMEL // max(1, size * order))):
            some = {site: draws[site][rows].unsqueeze(0) for site in self.sites}  # (1, m, *shape)
            idle, distances = [], []
            for part in torch.arange(order).split(max(1, COMPARED_NUMEL // max(1, size * len(rows)))):
                images = self.act(map_element(lambda column, p=part: column[p], columns), some)
                idle.append(unmoved(self.sites, images, some, 2))
                distances.append(distance(images, mean, variance, 2))
            yield torch.cat(idle), torch.cat(distances)  # (|G|, m)


class OnAxes(Group):
    """A group given by a table of axes that all have one size, or of sites that are moved as a whole."""

    def __init__(self, axes: Mapping[str, int | tuple[int, ...]]) -> None:
        self.axes: Axes = normalise_axes(type(self).__name__, axes, may_be_none=self.flips)

    def __repr__(self) -> str:
        table = {site: several[0] if len(several) == 1 else several for site, several in self.axes.items()}
        return f"{type(self).__name__}({table})"

    def size(self, values: Values) -> int:
        """The number of units: the common length of the named axes."""
        return common_size(type(self).__name__, self.axes, values)

    def check_values(self, values: Values) -> None:
        self.size(values)

    def _act(self, element: Element, values: Values) -> dict[str, Tensor]:
        images = {}
        for site, several in self.axes.items():
            image = values[site]
            for axis in several:
                image = self._act_along(axis, element, image)
            images[site] = image if several else self._act_on_whole(element, image)
        return images

    @abstractmethod
    def _act_along(self, axis: int, element: Tensor, value: Tensor) -> Tensor:
        """The image of a value, moved along one axis."""

    def _act_on_whole(self, element: Tensor, value: Tensor) -> Tensor:
        """The image of a value without a named axis."""
        raise NotImplementedError

    def _device(self, values: Values) -> torch.device:
        return values[self.sites[0]].device


Symmetry = FiniteGroup
"""The name that finite groups had before there were others."""


def distance(values: Values, mean: Values, variance: Values, batch_dims: int = 1) -> Tensor:
    """The squared distance from a mean weighted by inverse variances, summed over the sites of ``values``."""
    per_site = [
        ((value - mean[site]).square() / variance[site]).reshape(*value.shape[:batch_dims], -1).sum(-1)
        for site, value in values.items()
    ]
    return torch.stack(per_site).sum(0)


def unmoved(sites: Iterable[str], images: Values, values: Values, batch_dims: int = 0) -> Tensor:
    """Where images of shape ``(*batch, *native)`` equal their values, ``(*batch)``."""
    same = []
    for site in sites:
        equal = images[site] == values[site]
        same.append(equal.flatten(batch_dims).all(-1) if equal.dim() > batch_dims else equal)
    return torch.stack(torch.broadcast_tensors(*same)).all(0) if same else torch.ones((), dtype=torch.bool)


def map_element(function: Callable[..., Any], *elements: Element) -> Element:
    """Apply a function of tensors to every tensor of an element, or of several elements of one structure."""
    if isinstance(elements[0], tuple):
        return tuple(map_element(function, *parts) for parts in zip(*elements, strict=True))
    return function(*elements)


def leaves(element: Element) -> list[Any]:
    """The tensors of an element; more generally, what nested tuples hold."""
    if not isinstance(element, tuple):
        return [element]
    return [part for several in element for part in leaves(several)]


def length(elements: Element) -> int:
    """The length of the batch dim of elements that have one; 1 for the empty tuple of the trivial group."""
    return len(leaves(elements)[0]) if leaves(elements) else 1


def normalise_axes(
    kind: str, axes: Mapping[str, int | tuple[int, ...]], *, may_be_none: bool = False
) -> Axes:
    """Check a table ``{site: axis or axes}`` of the class ``kind``, and turn every entry into a tuple.

    An entry ``()`` stands for a site that is moved as a whole; only some classes allow it.
    """
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
        if not (several or may_be_none) or len(set(several)) < len(several):
            raise SymmetryError(
                f"{kind}: axes {several} of site {site!r} must be one or more, each named once"
            )
        table[site] = several
    return table


def common_size(kind: str, axes: Axes, values: Values) -> int:
    """The one length of all the named axes, 1 for a site as a whole; raise if two lengths differ."""
    found: list[tuple[int, str]] = []  # each size, and how messages say it
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
            found.append((shape[axis], f"axis {axis} of site {site!r} has size {shape[axis]}"))
        if not several:
            found.append((1, f"site {site!r} as a whole counts as one unit"))
    for size, words in found:
        if size != found[0][0]:
            raise SymmetryError(f"{kind}: {words}, but {found[0][1]}; one group moves axes of one size")
    return found[0][0]


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
