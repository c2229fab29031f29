"""Labels by an order that the user names."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from pyro_sym.alignment.result import Alignment, Draws
from pyro_sym.errors import SymmetryError
from pyro_sym.symmetry.base import Group

__all__ = ["align_by_order"]


def align_by_order(
    samples: Mapping[str, Tensor],
    symmetry: Group,
    site: str,
    index: tuple[int, ...] = (),
    *,
    group_by_chain: bool = False,
) -> Alignment:
    r"""Label the units of every draw so that one of their coordinates ascends.

    The element :math:`\pi_m` of draw :math:`m` is that with

    .. math::

        \theta_{m, \pi_m(1)} \le \theta_{m, \pi_m(2)} \le \dots \le \theta_{m, \pi_m(n)}.

    An order is a choice of labels that needs no other draw. It tells units apart only if their coordinates do
    not overlap; the confidence shows where they do. It is that of :func:`align`: under normals fitted to the
    draws in this order, the order against the likeliest other labelling, with 1/2 where that is likelier.

    Args:
        samples: draws by site, of shape ``(num_samples, *shape)``, or ``(num_chains, num_samples, *shape)``
            with ``group_by_chain``.
        symmetry: a :class:`Permutation`, or a product or view in which one permutation moves ``site``; all
            other members stay at the identity.
        site: the site to order by, which the permutation moves along one axis.
        index: where to look in the site's other axes, one index an axis, as in ``("locs", (0,))`` for the
            first coordinate of locations of shape ``(K, d)``. Of a :class:`Viewed` site, those of the view.
        group_by_chain: whether a chain dim stands in front.

    Returns:
        The ordered draws. The objective is that of :func:`align` at its end.

    Raises:
        SymmetryError: if not exactly one permutation moves the site, or along several axes.
        ValueError: if the index does not fit the site's other axes; or as for :func:`align`.

    Example:
        >>> locs = torch.tensor([[0.0, 5.0], [5.1, 0.1], [0.2, 4.9]])
        >>> align_by_order({"locs": locs}, Permutation({"locs": -1}), "locs").elements
        tensor([[0, 1],
                [1, 0],
                [0, 1]])
    """
    draws = Draws(samples, symmetry, group_by_chain)
    descent = draws.descent()
    members = enumerate(draws.flat.members)
    movers = [(i, member.axes[site]) for i, member in members if member.relabels and site in member.axes]
    if len(movers) != 1 or len(movers[0][1]) != 1:
        raise SymmetryError(
            f"{symmetry!r} moves site {site!r} by {len(movers)} permutations along axes "
            f"{[axes for _, axes in movers]}; an order needs one permutation along one axis"
        )
    member, (axis,) = movers[0]
    coordinates = descent.draws[site].movedim(axis, -1)  # scaled by a positive number, alike for all units
    others = tuple(coordinates.shape[1:-1])
    if len(index) != len(others) or any(not -n <= i < n for i, n in zip(index, others, strict=True)):
        raise ValueError(
            f"index {index} does not fit site {site!r}, whose axes but for {axis} have sizes {others}; give "
            "one index for each"
        )
    elements = list(descent.start().elements)
    where: tuple[slice | int, ...] = (slice(None), *index)
    elements[member] = coordinates[where].argsort(dim=-1, stable=True)
    state = descent.at(tuple(elements))
    moments = descent.moments(state.images)
    margin = descent.margin(state.images, moments)
    objective = [descent.objective(state.images, moments)]
    return draws.aligned(state.elements, objective, converged=True, margin=margin)
