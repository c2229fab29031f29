"""Labels by allocation probabilities: which data belong to which component, draw by draw."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Literal, get_args

import torch
from torch import Tensor

from pyro_sym.alignment.descent import evenly_spread, lower
from pyro_sym.alignment.result import Alignment, Draws
from pyro_sym.errors import SymmetryError
from pyro_sym.symmetry.assignment import assign, second_best
from pyro_sym.symmetry.base import Group
from pyro_sym.symmetry.nearest import LEAST_GAIN

__all__ = ["align_allocations"]

Method = Literal["kl", "ecr"]
Probabilities = Callable[[dict[str, Tensor]], Tensor]

# Probabilities are clamped from below, so that one datum can't veto a labelling.
LEAST_PROBABILITY = 1e-6
# How many probabilities a chunk has by default.
CHUNK_NUMEL = 2**20


def align_allocations(
    samples: Mapping[str, Tensor],
    symmetry: Group,
    probabilities: Probabilities | Tensor,
    *,
    method: Method = "kl",
    group_by_chain: bool = False,
    reference: Mapping[str, Tensor] | None = None,
    num_references: int = 4,
    max_sweeps: int = 100,
    chunk_size: int | None = None,
) -> Alignment:
    r"""Label the components of every draw by the data they explain, not by their parameters.

    Let :math:`p_{mij}` be the probability, at draw :math:`m`, that component :math:`j` made datum :math:`i`,
    and :math:`q_{il} = \frac{1}{M} \sum_m p_{m,i,\pi_m(l)}` their mean over draws as they are labelled.
    Permutations :math:`\pi_m` and means are chosen in turn. By ``"kl"`` they descend (Stephens)

    .. math::

        J = \frac{1}{M} \sum_{m=1}^{M} \sum_{i=1}^{N} \sum_{l=1}^{K} p_{m,i,\pi_m(l)}
            \log \frac{p_{m,i,\pi_m(l)}}{q_{il}},

    and by ``"ecr"`` the mean number of data that a draw allocates otherwise than the majority does
    (Papastamoulis and Iliopoulos, their second iterative algorithm, with the allocations summed out instead
    of drawn),

    .. math::

        J = \frac{1}{M} \sum_{m=1}^{M} \sum_{i=1}^{N} \bigl(1 - p_{m,i,\pi_m(z_i)}\bigr),
        \qquad z_i = \arg\max_l q_{il}.

    Both are sums over draws of one linear assignment each, and the sum over all draws decides when to stop.
    Probabilities are recomputed chunk by chunk in each sweep, so memory is that of one chunk and of
    :math:`q`. The descent starts from the labels as they are and from the probabilities of
    ``num_references`` draws, side by side in the same sweeps; the lowest :math:`J` wins, the earlier start if
    they tie. Nothing is random.

    The ``margin`` is, with either method, how much the best other labelling :math:`\rho` of the draw adds to
    Stephens' divergence,

    .. math::

        \Delta_m = \min_{\rho \ne \pi_m} \sum_{il} \bigl(p_{m,i,\pi_m(l)} - p_{m,i,\rho(l)}\bigr) \log q_{il}.

    That counts the data as independent evidence and :math:`q` as known. With many data it is sharper than the
    margin of :func:`align`: near 1/2 the labels are open, but 1 says that allocations agree, not that
    parameters do.

    Args:
        samples: draws by site, of shape ``(num_samples, *shape)``, or ``(num_chains, num_samples, *shape)``
            with ``group_by_chain``.
        symmetry: one :class:`Permutation` of the components, by itself or in a :class:`Viewed`.
        probabilities: a function from some draws, a dict of tensors ``(m, *shape)``, to their allocation
            probabilities ``(m, N, K)``, as :func:`allocation_probabilities` makes from a model; or these for
            all draws, ``(num_samples, N, K)`` or ``(num_chains, num_samples, N, K)``. Rows are normalised.
        method: ``"kl"`` or ``"ecr"``.
        group_by_chain: whether a chain dim stands in front.
        reference: values of the symmetry's sites, each of the shape of one draw, to take the labels from, as
            in :func:`align`.
        num_references: how many draws, evenly spread, serve as first mean in turn.
        max_sweeps: the most sweeps; a warning says if they did not suffice.
        chunk_size: how many draws a call of ``probabilities`` is for; by default as many as make about a
            million of them.

    Returns:
        The aligned draws, with the permutations applied.

    Raises:
        SymmetryError: if the symmetry has other members than one permutation: allocations say nothing of
            these, and :func:`align` does.
        ValueError: if the probabilities have another shape, are negative or not finite, or ``method`` is
            unknown; or as for :func:`align`.

    Example:
        >>> locs = torch.tensor([[0.0, 5.0], [5.1, 0.1], [0.2, 4.9]])
        >>> y = torch.tensor([0.1, 0.3, 4.8])
        >>> def responsibilities(draws):
        ...     return (-(draws["locs"].unsqueeze(-2) - y.unsqueeze(-1)) ** 2 / 2).softmax(-1)
        >>> align_allocations({"locs": locs}, Permutation({"locs": -1}), responsibilities).elements
        tensor([[0, 1],
                [1, 0],
                [0, 1]])

    References:
        Stephens (2000), "Dealing with label switching in mixture models". Papastamoulis and Iliopoulos
        (2010), "An artificial allocations based solution to the label switching problem in Bayesian analysis
        of mixtures of distributions".
    """
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}; pass one of {', '.join(map(repr, get_args(Method)))}")
    draws = Draws(samples, symmetry, group_by_chain)
    if len(draws.flat.members) != 1 or not draws.flat.members[0].relabels:
        raise SymmetryError(
            f"allocations tell the labels of one Permutation, and nothing of the other members of "
            f"{symmetry!r}; pass that permutation alone, or use align"
        )
    stream = _Stream(draws, probabilities, chunk_size)
    starts = [_Labelling(stream, method, None)]
    for first in evenly_spread(stream.num_draws, num_references):
        starts.append(_Labelling(stream, method, stream.chunk(slice(first, first + 1))[0]))
    entropy = 0.0  # of all probabilities; labels do not change it
    for sweep in range(max_sweeps + 1):  # the first computes the objective of the starts
        active = [start for start in starts if not start.converged]
        if not active:
            break
        for rows, p in stream:
            if sweep == 0:
                entropy += float(torch.special.entr(p).sum())
            for start in active:
                start.visit(rows, p)
        for start in active:
            start.finish(entropy)
    best = reduce(lower, starts)
    if not best.converged:
        warnings.warn(
            f"align_allocations still moved draws after {max_sweeps} sweeps; its labels are not at a fixed "
            "point. Raise max_sweeps, or ask whether the components can be told apart at all",
            stacklevel=2,
        )
    margin = torch.cat([best.margin(rows, p) for rows, p in stream])
    state = draws.descent().at((best.labels,))
    if reference is not None:
        state = draws.moved_to(state, reference)
    return draws.aligned(state.elements, best.objective, converged=best.converged, margin=margin)


class _Stream:
    """Allocation probabilities of all draws, chunk by chunk, in float64 and clamped from below."""

    def __init__(self, draws: Draws, probabilities: Probabilities | Tensor, chunk_size: int | None) -> None:
        last = draws.batch_ndim - 1
        self.num_draws = math.prod(draws.batch_shape)
        self.size = draws.flat.members[0].size(draws.descent().draws)
        self._probabilities = probabilities
        self._samples: dict[str, Tensor] = {}
        if isinstance(probabilities, Tensor):
            lead = tuple(probabilities.shape[: draws.batch_ndim])
            if lead != draws.batch_shape:
                raise ValueError(f"there are probabilities for {lead} draws, but {draws.batch_shape} draws")
            self._probabilities = probabilities.flatten(0, last)  # (M, N, K)
        else:
            self._samples = {site: value.detach().flatten(0, last) for site, value in draws.samples.items()}
        self.num_data = self.chunk(slice(0, 1)).shape[1]
        self._chunk_size = chunk_size or max(1, CHUNK_NUMEL // (self.num_data * self.size))

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for first in range(0, self.num_draws, self._chunk_size):
            rows = slice(first, min(first + self._chunk_size, self.num_draws))
            yield rows, self.chunk(rows)

    @torch.no_grad()
    def chunk(self, rows: slice) -> Tensor:
        """The probabilities of some draws, ``(m, N, K)``."""
        if isinstance(self._probabilities, Tensor):
            p = self._probabilities[rows]
        else:
            p = self._probabilities({site: value[rows] for site, value in self._samples.items()})
        p = p.detach().to("cpu", torch.float64)
        if p.dim() != 3 or (p.shape[0], p.shape[2]) != (rows.stop - rows.start, self.size):
            expected = f"({rows.stop - rows.start}, N, {self.size})"
            raise ValueError(f"probabilities have shape {tuple(p.shape)}, expected {expected}")
        if not (p.isfinite().all() and (p >= 0).all()):
            raise ValueError(
                f"some allocation probabilities of the draws {rows.start} to {rows.stop - 1} are negative or "
                "not finite"
            )
        return (p / p.sum(-1, keepdim=True)).clamp_(min=LEAST_PROBABILITY)


class _Labelling:
    """Labels of all draws and the mean probabilities under them, descending from one start.

    In a sweep, draws are visited chunk by chunk and labelled by the mean of the sweep before.
    """

    def __init__(self, stream: _Stream, method: Method, first: Tensor | None) -> None:
        self.labels = torch.arange(stream.size).repeat(stream.num_draws, 1)
        self.objective: list[float] = []
        self.converged = False
        self._method = method
        self._mean = first  # None to keep the labels of the draws in the first sweep
        self._total = torch.zeros(stream.num_data, stream.size, dtype=torch.float64)  # (N, K)
        self._moved = False

    def visit(self, rows: slice, p: Tensor) -> None:
        """Label some draws, ``p`` of shape ``(m, N, K)``, and add them to the next mean."""
        labels = self.labels[rows]
        if self._mean is not None:
            cost = -(self._scores(self._mean).T @ p)  # of component in slot, (m, K, K)
            new = assign(cost)
            now, then = _price(cost, labels), _price(cost, new)
            better = then < now - LEAST_GAIN * (1 + now.abs())
            labels = torch.where(better.unsqueeze(-1), new, labels)
            self.labels[rows] = labels
            self._moved |= bool(better.any())
        self._total += _labelled(p, labels).sum(0)

    def finish(self, entropy: float) -> None:
        """Update the mean and the objective after a sweep; ``entropy`` is that of all probabilities."""
        if self.objective and not self._moved:
            self.converged = True
            return
        count = len(self.labels)
        self._mean = self._total / count
        if self._method == "kl":
            value = float(torch.special.entr(self._mean).sum()) - entropy / count
        else:
            value = float((1 - self._mean.amax(-1)).sum())
        if self.objective and value >= self.objective[-1]:  # by rounding
            self.converged = True
            value = self.objective[-1]
        self.objective.append(value)
        self._total, self._moved = torch.zeros_like(self._mean), False

    def margin(self, rows: slice, p: Tensor) -> Tensor:
        """By how much the second best labels of some draws raise the divergence, ``(m,)``."""
        assert self._mean is not None
        cost = -(self._mean.log().T @ _labelled(p, self.labels[rows]))  # (m, K, K)
        return second_best(cost).clamp(min=0)

    def _scores(self, mean: Tensor) -> Tensor:
        """The objective of datum i in slot l, up to sign and constants, ``(N, K)``."""
        if self._method == "kl":
            return mean.log()
        return torch.nn.functional.one_hot(mean.argmax(-1), mean.shape[-1]).to(mean)


def _labelled(p: Tensor, labels: Tensor) -> Tensor:
    return p.gather(-1, labels.unsqueeze(1).expand(p.shape))


def _price(cost: Tensor, labels: Tensor) -> Tensor:
    return cost.gather(-1, labels.unsqueeze(-1)).squeeze(-1).sum(-1)
