"""Bring draws to one representative of their orbits, so that their means and R-hat have a meaning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_sym.alignment.descent import Run
from pyro_sym.alignment.result import Alignment, Draws
from pyro_sym.symmetry.base import Group

__all__ = ["align"]


def align(
    samples: Mapping[str, Tensor],
    symmetry: Group,
    *,
    group_by_chain: bool = False,
    reference: Mapping[str, Tensor] | None = None,
    pivot: Mapping[str, Tensor] | None = None,
    num_references: int = 4,
    num_restarts: int = 6,
    max_sweeps: int = 100,
) -> Alignment:
    r"""Choose a group element for every draw, so that all draws use the same labels and signs.

    Over elements :math:`g_m`, means :math:`\mu` and variances :math:`\sigma^2 \ge \sigma^2_{\min}` this
    descends

    .. math::

        J = \frac{1}{2M} \sum_{m=1}^{M} \sum_c \frac{\bigl((g_m \cdot \theta_m)_c - \mu_c\bigr)^2}{\sigma_c^2}
            + \frac12 \sum_c \log \sigma_c^2,

    the negative log likelihood of independent normals, over all coordinates :math:`c` of the symmetry's
    sites (scaled to unit variance first, alike for all units). A sweep first chooses elements at fixed
    moments, then moments at fixed elements, so :math:`J` never rises. All chains share the moments, so they
    end with the same labels.

    For one :class:`Permutation` the choice is one linear assignment per draw, of units :math:`i` to slots
    :math:`j`; signs that ride on the units are folded into its costs,

    .. math::

        C_{ji} = \min_{s = \pm 1} \sum_c (s\,\theta_{ic} - \mu_{jc})^2 / \sigma_{jc}^2,

    and are read off afterwards. Several members of a :class:`Product` are taken in turn, each with the
    others held; a group of another kind is asked for its :meth:`~Group.closest`. A site with two axes of one
    permutation makes the problem quadratic: there the linearised assignment, the assignment by the diagonal,
    and swaps of two labels are tried, and kept for draws that they improve.

    The descent starts from the draws as they are and from ``num_references`` of the draws as first mean; the
    lowest :math:`J` wins, the earlier start if they tie. For one permutation, or one set of signs, on one
    axis a site the choice at fixed moments is the best there is. For all other groups draws may be caught in
    local optima, alone or together: at the moments that were found, every draw is placed from scratch, block
    by block in another order of the blocks, and moved where that brings it closer; the descent goes on until
    none of ``num_restarts`` orders moves a draw. Nothing is random.

    Labels that all draws share are arbitrary. With a ``reference``, one element :math:`h` for all draws is
    chosen after that, with :math:`h^{-1}` bringing the reference closest to the mean,

    .. math::

        h^{-1} = \arg\min_{g} \sum_c \bigl((g \cdot r)_c - \mu_c\bigr)^2 / \sigma_c^2,

    so that runs aligned to one reference have the same labels.

    With a ``pivot`` nothing is iterated: every draw is brought closest to that one point, all coordinates
    weighing alike once each site has unit variance over draws and units. (The pivot of Marin, Mengersen and
    Robert is the draw of highest posterior density.)

    How sure a draw's element is follows from the normals at the end: the ``margin`` is the difference in
    their log density between the draw as it is aligned and as its best rival :math:`h` would have it,

    .. math::

        \Delta_m = \min_{h \ne g_m} \sum_c \frac{\bigl((h \cdot \theta_m)_c - \mu_c\bigr)^2
                   - \bigl((g_m \cdot \theta_m)_c - \mu_c\bigr)^2}{2 \sigma_c^2}.

    For one permutation, with signs or without, on one axis a site all rivals are compared, as for a finite
    group of your own; for all other groups those that differ in one member and its signs, or by one swap or
    flip. The rival of a rotation has the other orientation. The moments are those of draws whose labels are
    taken for certain, so where units overlap much they are too sharp, and so is the confidence.

    Args:
        samples: draws by site, of shape ``(num_samples, *shape)``, or ``(num_chains, num_samples, *shape)``
            with ``group_by_chain``. Any device and any real dtype will do; costs are computed in float64.
        symmetry: any :class:`Group` with a :meth:`~Group.closest`: the package's own, every
            :class:`FiniteGroup` of up to 5,040 elements, and products and views of them, nested or not. The
            trivial group, ``Product()``, leaves the draws as they are.
        group_by_chain: whether a chain dim stands in front, as in :meth:`pyro.infer.MCMC.get_samples`.
        reference: values of the symmetry's sites, each of the shape of one draw, to take the labels from: a
            draw, or the mean of another run's aligned draws.
        pivot: values like those of a reference, to which every draw is matched, without iteration.
        num_references: how many draws, evenly spread, serve as first mean in turn.
        num_restarts: how many orders of the blocks are tried at the end; 0 for none.
        max_sweeps: the most sweeps from one start or restart; a warning says if they did not suffice.

    Returns:
        The aligned draws, with the elements applied.

    Raises:
        SymmetryError: if the symmetry can't act on the draws, or does not say which element is closest.
        ValueError: if there are no draws, sites disagree on their number, or a draw is not finite; if the
            reference or pivot lacks a site, has it in another shape, or is not finite.

    Example:
        >>> locs = torch.tensor([[0.0, 5.0], [5.1, 0.1], [0.2, 4.9]])
        >>> aligned = align({"locs": locs}, Permutation({"locs": -1}))
        >>> aligned.samples["locs"]
        tensor([[0.0000, 5.0000],
                [0.1000, 5.1000],
                [0.2000, 4.9000]])
        >>> aligned.elements
        tensor([[0, 1],
                [1, 0],
                [0, 1]])
        >>> aligned.confidence
        tensor([1., 1., 1.], dtype=torch.float64)

    References:
        Stephens (2000), "Dealing with label switching in mixture models", for relabelling by alternating
        between assignments and estimates. Marin, Mengersen and Robert (2005), "Bayesian modelling and
        inference on mixtures of distributions", for the pivot. Ainsworth, Hayase and Srinivasa (2023), "Git
        re-basin", for the descent over the layers of a network.
    """
    draws = Draws(samples, symmetry, group_by_chain)
    if not draws.flat.members:
        sure = torch.full(draws.batch_shape, torch.inf, dtype=torch.float64)
        unmoved = torch.zeros(1, dtype=torch.float64)
        return Alignment(dict(samples), symmetry.identity({}), unmoved, True, sure)
    descent = draws.descent()
    if pivot is not None:  # all coordinates weigh alike once they are scaled
        state = descent.closest(descent.at_point(draws.point("pivot", pivot)), num_restarts)
        run = Run(state, [descent.objective(state.images, descent.moments(state.images))], True)
    else:
        run = descent.best_run(num_references, num_restarts, max_sweeps)
    state = run.state
    margin = descent.margin(state.images, descent.moments(state.images))
    if reference is not None:
        state = draws.moved_to(state, reference, num_restarts)
    if not run.converged:
        warnings.warn(
            f"align still moved draws after {max_sweeps} sweeps; its labels are not at a fixed point. "
            "Raise max_sweeps, or ask whether the units can be told apart at all",
            stacklevel=2,
        )
    return draws.aligned(state.elements, run.objective, converged=run.converged, margin=margin)
