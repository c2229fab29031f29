"""Which labels and signs are exchangeable? Read networks, search other sites, and check the result."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_sym.errors import SymmetryError
from pyro_sym.model.program import Program
from pyro_sym.network.symmetry_of import NetworkSymmetry, symmetry_of
from pyro_sym.search.candidates import Candidate, Kind, candidates, whole_sites
from pyro_sym.search.check import at_best_precision
from pyro_sym.search.evidence import Evidence, unbroken
from pyro_sym.search.minimal_sets import MinimalSets
from pyro_sym.search.networks_in_model import networks
from pyro_sym.symmetry.base import Symmetry
from pyro_sym.symmetry.elementary import Permutation, SignFlip
from pyro_sym.symmetry.product import Product

__all__ = ["find", "find_symmetry"]

# Each search starts with the points at which the result of the one before has failed.
MAX_SEARCHES = 5


def find_symmetry(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Symmetry:
    r"""Find the exchangeable labels and the sign flips of a model's sites.

    A set :math:`S` of axes of one size :math:`n` is symmetric if moving exactly these axes leaves the log
    joint unchanged, at draws from the prior and from unconstrained space near the origin,

    .. math::

        \log p(g_S \cdot \theta, D) = \log p(\theta, D) \qquad \text{for all } g \in S_n
        \text{ (or } \{\pm 1\}^n \text{)},

    and minimal if no proper subset of it is symmetric. The search grows minimal sets; how is said in
    ``pyro_sym.search.minimal_sets``. The result is checked as by :func:`~pyro_sym.check_symmetry`, on all
    rows of the data. If it fails at a point, the search is repeated with that point added. A member that
    still fails is left out, and a warning says where it failed.

    Candidates are the axes of continuous latent sites. Excluded are axes of plates that hold observed sites
    or are subsampled, and axes along which a support is not exchangeable (ordered vectors, Cholesky factors).
    Both axes of a covariance move together. Sign flips are sought on real sites and covariances, also on axes
    of size one, as that of a single factor. Where signs along axes are not free, one sign common to several
    sites as a whole is sought last, as that of the loadings and scores of a single factor. Sites in
    subsampled plates and scalar ones are excluded there; write ``SignFlip({"site": ()})`` yourself.

    Networks that the model calls, and whose parameters are sites by name (:class:`~pyro_sym.BayesianModule`),
    are read first by :func:`~pyro_sym.symmetry_of`, which also moves factors of axes; members that the priors
    break are removed.

    A group may move local latent sites, which lie in subsampled plates, such as the weights of documents in a
    topic model. It is a symmetry of the model and is returned; draws can be aligned by it. But
    :class:`~pyro_sym.AutoSymmetrized` refuses it, because a minibatch does not show all that moves. Write the
    model with the local site in a full plate and subsample a second plate of the observations, or integrate
    the local site out; the group without that site is no symmetry.

    Not found are continuous symmetries, as rotations of factors; the exchange of sites with names of their
    own (components drawn in a loop), or of only some units of an axis; a relabelling inside each block
    separately (one common to all blocks is found); and all but one of several minimal sets that overlap, as
    the signs of :math:`\sum_k a_k b_k c_k` do.

    The model runs in float64 where it can, and in its own precision otherwise. Enumerable discrete sites are
    summed out. Torch's global random state is left as it was.

    Args:
        model: a Pyro model; a ``poutine.block`` around it is ignored.
        *args: the model's positional arguments.
        **kwargs: the model's keyword arguments.

    Returns:
        A :class:`~pyro_sym.Permutation` or :class:`~pyro_sym.SignFlip` if there is one only, and a
        :class:`~pyro_sym.Product` otherwise; ``Product()`` is the trivial group. The group of a network is a
        :class:`~pyro_sym.NetworkSymmetry`.

    Raises:
        SymmetryError: if the log joint is random at fixed values of the latent sites.
        ValueError: if the model has no continuous latent sites, a latent site is discrete and can't be summed
            out, or no prior draw has a finite log joint.

    Warns:
        UserWarning: if the search stops after 5000 evaluations of the log joint; the warning names the axes
            that are left. If the graph of a network can't be read. If a member that the search found is left
            out, because it fails at other values. If not all rows were checked.

    Example:
        >>> def mixture(y):
        ...     weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
        ...     with pyro.plate("components", 3):
        ...         locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
        ...     with pyro.plate("data", len(y)):
        ...         z = pyro.sample("z", dist.Categorical(weights))
        ...         pyro.sample("y", dist.Normal(locs[z], 1.0), obs=y)
        >>> find_symmetry(mixture, torch.tensor([-1.0, 0.3, 4.0]))
        Permutation({'weights': -1, 'locs': -1})
    """
    return at_best_precision(find, model, args, kwargs)


def find(program: Program, dtype: torch.dtype) -> Symmetry:
    """The group of a program whose values have this dtype; see :func:`find_symmetry`."""
    axes = candidates(program)
    evidence = Evidence(program, dtype)
    read = list(_read_off_networks(program, evidence))
    axes = [axis for axis in axes if not any(axis.is_moved_by(group) for group in read)]
    sets = MinimalSets(evidence)
    values = sets.points[0].values
    idle = [axis for axis in axes if axis.may_be_moved_by(Permutation) and sets.is_idle(axis)]
    free: dict[Kind, list[Candidate]] = {
        Permutation: [axis for axis in axes if axis.may_be_moved_by(Permutation) and axis not in idle],
        SignFlip: [axis for axis in axes if axis.may_be_moved_by(SignFlip)],
    }
    one_sign = [axis for axis in whole_sites(program) if not any(axis.site in group.axes for group in read)]
    members: list[Symmetry] = []
    for _ in range(MAX_SEARCHES):
        before, members = members, []
        for kind in free:
            for group in sets.groups(kind, free[kind]):
                members = _joined(members, group, idle, values)
        # Sites whose signs along axes are free need no sign in common.
        signed = {site for member in members if member.flips for site in member.axes}
        whole = [axis for axis in one_sign if axis.site not in signed] if sets.budget else []
        for group in sets.groups(SignFlip, whole):
            members = _joined(members, group, idle, values)
        order = list(program.latents)
        members.sort(key=lambda member: order.index(member.sites[0]))
        refutation = evidence.refute(Product(*members)) if members else None
        if refutation is None or not sets.budget or repr(members) == repr(before):
            break
        # The search compares few rows at few points. Repeat it with the point that it missed.
        sets.points.append(refutation.point)
    members, broken = unbroken(evidence, members, Product)
    for member, why in broken:
        message = f"{member} left the log joint unchanged at all points of the search, but is left out: {why}"
        warnings.warn(message, stacklevel=4)
    members = [*read, *members]
    if members and evidence.unseen:
        warnings.warn(f"{Product(*members)} was not checked on all rows: {evidence.unseen}", stacklevel=4)
    return members[0] if len(members) == 1 else Product(*members)


def _joined(
    members: list[Symmetry], group: Symmetry, idle: list[Candidate], values: dict[str, Tensor]
) -> list[Symmetry]:
    """The members with one more, unless it repeats one of them or can't be in a product with them."""
    if group.flips:
        if _repeats(group, members, values):
            return members
        carriers = _carrying(group, members, idle)
    else:
        carriers = members
    try:
        return Product(*carriers, group).members
    except SymmetryError:  # only some axes of a flip are permuted
        return members


def _read_off_networks(program: Program, evidence: Evidence) -> Iterator[NetworkSymmetry]:
    """The groups of networks that the model calls, without the members that its priors break."""
    for network in networks(program):
        try:
            whole = symmetry_of(network.module, *network.args, prefix=network.prefix, **network.kwargs)
        except (SymmetryError, RuntimeError) as error:
            warnings.warn(
                f"the graph of the network {type(network.module).__name__} can't be read ({error}); its "
                "parameters are searched like other sites, whole axes only",
                stacklevel=5,
            )
            continue
        own = whole.restrict(program.latents)

        def subgroup(*numbers: int, group: NetworkSymmetry = own) -> NetworkSymmetry:
            counter = itertools.count()
            return group.where(lambda _: next(counter) in numbers)

        if kept := unbroken(evidence, range(len(own.members)), subgroup)[0]:
            yield subgroup(*kept)


def _carrying(flip: Symmetry, members: list[Symmetry], idle: list[Candidate]) -> list[Symmetry]:
    """The members, where the one permutation on whose axes the flip acts gets the idle axes of the flip."""
    axes = {axis.site: axis.axes for axis in idle if axis.is_moved_by(flip)}
    rides = [
        member.relabels
        and any(set(several) & set(flip.axes.get(site, ())) for site, several in member.axes.items())
        for member in members
    ]
    if not axes or sum(rides) != 1:
        return members
    return [
        Permutation({**member.axes, **axes}) if carries else member
        for member, carries in zip(members, rides, strict=True)
    ]


def _repeats(flip: Symmetry, members: list[Symmetry], values: dict[str, Tensor]) -> bool:
    """Whether the flip is a single sign, and equal to flipping all signs of another member."""

    def negated(symmetry: Symmetry) -> dict[str, Tensor]:
        return symmetry.act(-symmetry.identity(values), values)

    if len(flip.identity(values)) > 1:
        return False
    return any(
        all(torch.equal(negated(flip)[site], negated(member)[site]) for site in values)
        for member in members
        if member.flips
    )
