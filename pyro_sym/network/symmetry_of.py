"""The symmetries of a neural network: read from its graph, verified on the network itself."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pyro_sym._private import tree_leaves, tree_map
from pyro_sym._random import fork_random_state
from pyro_sym.errors import SymmetryError
from pyro_sym.model.double_precision import all_in_double, default_dtype, to_double
from pyro_sym.network.outputs import described, how_to_wrap
from pyro_sym.network.read import Factors, Traced, trace
from pyro_sym.network.verify import Replay, tolerance
from pyro_sym.symmetry.base import Element, Symmetry
from pyro_sym.symmetry.elementary import Permutation, SignFlip
from pyro_sym.symmetry.product import Product
from pyro_sym.symmetry.viewed import Viewed

__all__ = ["NetworkSymmetry", "symmetry_of"]

MAX_LINES = 8  # lines of a table about axes that an operation pins
MAX_NAMES = 4  # axes named in such a line
PLAIN = (Tensor, str, int, float, complex, torch.dtype, torch.device, type(None))


class NetworkSymmetry(Viewed):
    r"""The group of a network's symmetries: permutations and sign flips of its hidden units.

    :func:`symmetry_of` returns it. It acts on parameters, and on buffers that have to move with them, as the
    running statistics of a batch norm in eval mode; all are sites, by name. ``print`` shows a table with one
    row per group: its size, :math:`\log |G|` in nats, and the axes that it moves. Where only a factor of an
    axis moves, that factor is in brackets: ``weight[1: (8)·7·7]``.

    Args:
        members: permutations and sign flips of the factors of axes, counted from the right.
        shapes: by site, a tuple for each axis with the sizes of its factors, the slowest first.
        buffers: names of buffers.
        dropped: further lines of the table: what was left out, and which operations pin axes.

    Attributes:
        symmetry: the product of the members, on factors of axes.
        shapes: as given.
        buffers: names of the buffers that the group moves.
        dropped: as given.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
        >>> print(symmetry_of(net, torch.randn(2, 3)))
        group  size  log|G|  moves
        S_4       4    3.18  0.weight[0], 0.bias[0], 2.weight[1]
        1 group, log|G| = 3.18
    """

    def __init__(
        self,
        members: Iterable[Permutation | SignFlip],
        shapes: Factors,
        buffers: Iterable[str] = (),
        dropped: Iterable[str] = (),
    ) -> None:
        super().__init__(Product(*members), shapes)
        self.buffers = tuple(name for name in buffers if name in self.axes)
        self.dropped = tuple(dropped)
        native = {site: [math.prod(axis) for axis in factors] for site, factors in self.shapes.items()}
        self._template = {site: torch.empty(shape, device="meta") for site, shape in native.items()}

    @property
    def members(self) -> list[Any]:
        """The permutations and sign flips, on factors of axes."""
        members: list[Any] = self.symmetry.members
        return members

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of units that each member permutes, or whose signs it flips."""
        viewed = self.view(self._template)
        return tuple(member.size(viewed) for member in self.members)

    def restrict(self, sites: Collection[str], *, ignore_buffers: bool = False) -> NetworkSymmetry:
        """The subgroup that moves some sites only.

        Buffers count as sites: in eval mode, a group that has to move running statistics is no symmetry of a
        network whose statistics are fixed. In train mode a batch norm uses the statistics of the batch; pass
        ``ignore_buffers=True`` there.

        Args:
            sites: names of parameters, and of buffers that may move. Other names are ignored, so a model's
                list of latent sites will do.
            ignore_buffers: keep groups that move buffers, but without the buffers.

        Returns:
            The members that move nothing else; lines below the table name those left out.

        Example:
            >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
            >>> print(symmetry_of(net, torch.randn(2, 3)).restrict(["0.weight", "0.bias"]))
            group  size  log|G|  moves
            0 groups, log|G| = 0.00
            left out: S_4 also moves 2.weight
            left out: {±1}^4 also moves 2.weight
        """
        kept, dropped = [], list(self.dropped)
        for member, size in zip(self.members, self.sizes, strict=True):
            axes = {
                site: several
                for site, several in member.axes.items()
                if not (ignore_buffers and site in self.buffers and site not in sites)
            }
            outside = [site for site in axes if site not in sites]
            if outside:
                dropped.append(f"left out: {_name(member, size)} also moves {', '.join(outside)}")
            else:
                kept.append(type(member)(axes))
        return self._subgroup(kept, dropped)

    def where(self, holds: Callable[[Symmetry], bool]) -> NetworkSymmetry:
        """The subgroup of the members for which a condition holds.

        Args:
            holds: a function of a member, passed as a symmetry of the parameters in their native shapes.

        Returns:
            The subgroup; lines below the table name the members left out.
        """
        kept, dropped = [], list(self.dropped)
        for member, size in zip(self.members, self.sizes, strict=True):
            if holds(Viewed(member, {site: self.shapes[site] for site in member.axes})):
                kept.append(member)
            else:
                dropped.append(f"left out: {_name(member, size)} of {', '.join(member.sites)}")
        return self._subgroup(kept, dropped)

    def _subgroup(self, kept: list[Permutation | SignFlip], dropped: list[str]) -> NetworkSymmetry:
        """The group of some of the members."""
        moved = {site for member in kept for site in member.axes}
        shapes = {site: shape for site, shape in self.shapes.items() if site in moved}
        return NetworkSymmetry(kept, shapes, self.buffers, dropped)

    def __repr__(self) -> str:
        groups = ", ".join(map(_name, self.members, self.sizes))
        return f"<NetworkSymmetry of {len(self.axes)} sites: {groups or 'trivial'}>"

    def __str__(self) -> str:
        logs = [member.log_order(self.view(self._template)) for member in self.members]
        rows = [("group", "size", "log|G|", "moves")]
        for member, size, log_order in zip(self.members, self.sizes, logs, strict=True):
            moves = [self._moved(site, axis) for site, several in member.axes.items() for axis in several]
            rows.append((_name(member, size), str(size), f"{log_order:.2f}", ", ".join(moves)))
        first, second, third = (max(len(row[k]) for row in rows) for k in range(3))
        lines = [f"{a:<{first}}  {b:>{second}}  {c:>{third}}  {d}" for a, b, c, d in rows]
        count = f"{len(logs)} group{'s' * (len(logs) != 1)}"
        return "\n".join([*lines, f"{count}, log|G| = {self.log_order(self._template):.2f}", *self.dropped])

    def _moved(self, site: str, axis: int) -> str:
        """A factor of an axis in the notation of the table."""
        where = [(k, i) for k, factors in enumerate(self.shapes[site]) for i in range(len(factors))]
        k, moved = where[axis]
        sizes = [f"({n})" if i == moved else str(n) for i, n in enumerate(self.shapes[site][k])]
        within = f": {'·'.join(sizes)}" if len(sizes) > 1 else ""
        return f"{site}[{k}{within}]{' (buffer)' * (site in self.buffers)}"


def symmetry_of(
    net: nn.Module, *example_args: Any, prefix: str = "", **example_kwargs: Any
) -> NetworkSymmetry:
    r"""Find the permutations and sign flips of hidden units under which a network computes the same function.

    For every element :math:`g` of the group, and all weights :math:`w`,

    .. math::

        f(g \cdot w) = f(w).

    The group is read from the graph of ATen operations that ``torch.export`` makes of the network. Each axis
    of each tensor is an ordered product of factors, and each operation determines which of them move
    together; axes that an operation treats by position, or whose operation is unknown, do not move. The sign
    of a hidden unit may flip if every function between its incoming and outgoing weights is odd. Each member
    of the group is then verified on a copy of the network: in float64, at random parameters, buffers and
    inputs, in eval mode and in train mode (without dropout). A member that fails is left out with a warning.

    Everything found is a symmetry, but not all symmetries are found. Known to be missed:

    * continuous ones, as scales of ReLU units and rotations of the inner dimensions of attention;
    * in grouped convolutions and attention, permutations and signs inside a single group or head;
    * permutations of parts of an axis that is sliced or concatenated, unless they are chunks of one size, all
      of which move alike: gates, skip connections, packed queries, keys and values;
    * where two sign flips share an axis, as those before and after the scale of a batch norm, the one that
      moves more; the sign of a unit alone in its layer; and signs of part of an axis, as of the cell of an
      LSTM, which flips one gate of four;
    * permutations that would move buffers other than the running statistics of batch norms.

    Args:
        net: the network; it is not changed.
        *example_args: inputs for the graph, with more than one row if there are batch norms.
        prefix: of the names of parameters, as ``"net."`` for a network that is the attribute ``net`` of a
            ``PyroModule``.
        **example_kwargs: inputs by name.

    Returns:
        A product of :class:`Permutation` and :class:`SignFlip` over factors of axes of the parameters, and of
        the buffers that move with them. For a model in which only some are random, see
        :meth:`NetworkSymmetry.restrict`.

    Raises:
        SymmetryError: if the network has no such graph, as with control flow that depends on data; if its
            output is not finite at random weights; if it can't be copied; or if its inputs or outputs are not
            tensors, or tuples, lists and dicts of them: the message shows how to wrap it.

    Warns:
        UserWarning: if nothing was found though the network has hidden units, with the operations that fix
            their order; if a rule failed, so that the axes of its operation are not moved; or if a member
            failed its verification.

    Example:
        >>> net = torch.nn.Sequential(
        ...     torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(72, 10)
        ... )
        >>> sym = symmetry_of(net, torch.randn(2, 1, 5, 5), prefix="net.")
        >>> print(sym)
        group  size  log|G|  moves
        S_8       8   10.60  net.0.weight[0], net.0.bias[0], net.3.weight[1: (8)·9]
        1 group, log|G| = 10.60

    References:
        S. K. Ainsworth, J. Hayase, S. Srinivasa, *Git Re-Basin: Merging Models modulo Permutation
        Symmetries*, ICLR 2023. J. G. Wiese et al., *Towards Efficient MCMC Sampling in Bayesian Neural
        Networks by Exploiting Symmetry*, ECML PKDD 2023.
    """
    with fork_random_state():
        twin, args, kwargs, dtype = _twin(net, example_args, example_kwargs)
        with default_dtype(dtype):
            traced = trace(twin, args, kwargs)
            verified = _verified(traced, twin, args, kwargs)
    lines = _lines(traced, prefix, every=not verified)
    if traced.pinned and not verified:
        warnings.warn(
            f"no permutation and no sign flip was found for {type(net).__name__}; " + "; ".join(lines),
            stacklevel=2,
        )
    return NetworkSymmetry(
        [type(member)({prefix + site: axes for site, axes in member.axes.items()}) for member in verified],
        {prefix + site: shape for site, shape in traced.shapes.items()},
        [prefix + name for name, _ in net.named_buffers()],
        lines,
    )


def _twin(
    net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], torch.dtype]:
    """A copy of a network on the CPU in eval mode, with its inputs, and their dtype.

    It is in double precision if it runs in that, and in its own precision otherwise.
    """
    if odd := [leaf for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, PLAIN)]:
        raise SymmetryError(
            f"an input of {type(net).__name__} is {described(odd[0])}; pass tensors, or tuples, lists and "
            "dicts of them; pass an object that behaves like a dict by name, as symmetry_of(net, **batch)"
        )
    try:
        copied = copy.deepcopy(net)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise SymmetryError(f"{type(net).__name__} can't be copied ({reason})") from error
    twin = all_in_double(copied).requires_grad_(True).eval()
    doubles = tree_map(_on_tensors(to_double), (args, kwargs))
    try:
        with default_dtype(torch.float64):
            output = twin(*doubles[0], **doubles[1])
        dtype = torch.float64
    except Exception:
        # The network runs in its own precision only. An error of another kind is raised again below.
        twin = copy.deepcopy(net).to("cpu").requires_grad_(True).eval()
        doubles = tree_map(_on_tensors(lambda tensor: tensor.detach().cpu()), (args, kwargs))
        output = twin(*doubles[0], **doubles[1])
        dtype = torch.get_default_dtype()
    leaves = tree_leaves(output)
    if not any(isinstance(x, Tensor) for x in leaves) or not all(isinstance(x, PLAIN) for x in leaves):
        raise SymmetryError("symmetry_of needs tensors, but " + how_to_wrap(net, output))
    return twin, *doubles, dtype


def _lines(traced: Traced, prefix: str, every: bool) -> list[str]:
    """The lines of the table that say which axes can't be moved, and why.

    Unless ``every``, only axes of hidden units are named, which have axes in two sites at least; not those of
    pixels behind a convolution, for example.
    """
    failed = [
        f"left out: the axes of {place}, as its rule failed ({type(error).__name__}: {error})"
        for place, error in traced.failed.items()
    ]
    pinned = []
    for (cause, size), named in traced.pinned.items():
        axes = [prefix + axis for axis in named]
        if not every and len({axis.partition("[")[0] for axis in axes}) < 2:
            continue
        more = f" and {len(axes) - MAX_NAMES} more" if len(axes) > MAX_NAMES else ""
        pinned.append(f"pinned by {cause}: {', '.join(axes[:MAX_NAMES])}{more} ({size} units)")
    more = f"pinned by other operations: {len(pinned) - MAX_LINES} more sets of axes"
    return [*failed, *pinned[:MAX_LINES], *([more] if len(pinned) > MAX_LINES else [])]


@torch.no_grad()
def _verified(
    traced: Traced, twin: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Permutation | SignFlip]:
    """The members under which the network does not change; warnings name the others."""
    for place, error in traced.failed.items():
        warnings.warn(
            f"the rule for {place} of {type(twin).__name__} failed ({type(error).__name__}: {error}); the "
            "axes that it touches are not moved. Please report this network to the authors of pyro_sym",
            stacklevel=3,
        )
    replay = Replay(twin, args, kwargs)
    allowed = tolerance(traced.dtypes)
    verified = []
    for member in traced.members:
        candidate = NetworkSymmetry([member], {site: traced.shapes[site] for site in member.axes})
        change = replay.change(candidate, _not_the_identity(candidate, replay.values))
        if change <= allowed:
            verified.append(member)
        else:
            warnings.warn(
                f"{_name(member, *candidate.sizes)} of {', '.join(member.sites)} was read from the graph of "
                f"{type(twin).__name__}, but changes its output by {change:.2g} of the largest entry, and is "
                "left out. Please report this network to the authors of pyro_sym",
                stacklevel=3,
            )
    return verified


def _not_the_identity(symmetry: Symmetry, values: dict[str, Tensor]) -> Element:
    element = (neutral,) = symmetry.identity(values)
    while torch.equal(element[0], neutral):
        element = symmetry.sample(values)
    return element


def _name(member: Symmetry, size: int) -> str:
    return f"S_{size}" if member.relabels else f"{{±1}}^{size}"


def _on_tensors(convert: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    return lambda leaf: convert(leaf) if isinstance(leaf, Tensor) else leaf
