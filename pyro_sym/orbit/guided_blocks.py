r"""The log orbit average under several permutations and signs at once, by elements proposed block by block.

Everything here works with a surrogate that factorises over coordinates,

.. math::

    \log \tilde q(g \cdot \omega) = \sum_{\text{sites}} \sum_{i k r}
        \log \mathcal N\bigl(s_i t_k\, \omega_{\pi(i) \rho(k) r};\ m_{ikr}, \sigma_{ikr}^2\bigr),

with an index and a sign for every axis that a block moves (:class:`~pyro_sym.orbit.coupling.Coupling`). With
:math:`P_{ij} = [\pi(i) = j]` and :math:`D_{ij} = s_i P_{ij}` that is, but for a constant, linear in each
block's :math:`P` and :math:`D`. So its average over *beliefs*, independent from block to block, has the same
formula: a belief is a doubly stochastic :math:`P` with the mean signs :math:`D`, and an element is a belief
that is certain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_sym.orbit.coupling import Coupling, Factor
from pyro_sym.orbit.guided_permutations import UNIFORM, propose, sinkhorn
from pyro_sym.orbit.permanent import log_permanent
from pyro_sym.symmetry.base import Element, Symmetry

__all__ = ["Belief", "Proposal", "Surrogate", "draw_elements"]

# Rounds of beliefs, and Sinkhorn sweeps in each.
ROUNDS = 3
SWEEPS = 4
# Share of uniform draws in a block that is coupled to itself: it bounds the weights in small groups.
DEFENCE = 0.1
# Above this many entries, uncertain beliefs use one precision for all slots.
MAX_ENTRIES = 2**22
TINY = 1e-280


class Belief(NamedTuple):
    """Which units are in the slots of a block, and with what signs; of shape ``(P, K or 1, n, n)``.

    ``place`` is the probability that slot i holds unit j; ``signed`` is, by flip of the block, that
    probability times the mean sign. An element is ``certain``.
    """

    place: Tensor
    signed: tuple[Tensor, ...]
    certain: bool = False


class _Pairs(NamedTuple):
    """Log density of unit j in slot i: ``even`` plus, for each flip, its sign times its ``odd``."""

    even: Tensor
    odd: tuple[Tensor, ...]

    @property
    def folded(self) -> Tensor:
        """The logarithm of the sum over all signs."""
        total = self.even
        for odd in self.odd:
            total = total + torch.logaddexp(odd, -odd)
        return total


@dataclass(frozen=True)
class _Term:
    """A site that blocks move: x of shape (P, 1, *moved, r), mean and precision of shape (*moved, r)."""

    blocks: tuple[int, ...]
    flips: tuple[int | None, ...]
    x: Tensor
    mean: Tensor
    precision: Tensor

    def image(self, beliefs: Sequence[Belief], keep: Iterable[int] = ()) -> tuple[Tensor, Tensor]:
        """Means of x and x^2 at the images, with the dims in ``keep`` not moved."""
        x, x2 = self.x, self.x.square()
        for dim in set(range(len(self.blocks))) - set(keep):
            belief, flip = beliefs[self.blocks[dim]], self.flips[dim]
            x = _along(belief.place if flip is None else belief.signed[flip], x, dim)
            x2 = _along(belief.place, x2, dim)
        return x, x2


class Surrogate:
    """The log density of independent normals at all images of draws, up to what no element changes.

    ``sizes`` has the number of units by block; ``points`` are the draws' coordinates by site, of shape ``(P,
    *native)``, and ``moments`` the mean and standard deviation in every slot, of shape ``native``.
    """

    def __init__(
        self,
        coupling: Coupling,
        sizes: Sequence[int],
        points: Mapping[str, Tensor],
        moments: Mapping[str, tuple[Tensor, Tensor]],
    ) -> None:
        self.coupling = coupling
        self.sizes = sizes
        self.coupled: list[_Term] = []
        self.alone = []  # log densities of each block's units that no other block enters
        first = next(iter(points.values()))
        self.num_draws, self.device = len(first), first.device
        for block, n in zip(coupling.blocks, sizes, strict=True):
            nothing = torch.zeros(self.num_draws, 1, n, n, dtype=torch.double, device=self.device)
            self.alone.append(_Pairs(nothing, (nothing,) * len(block.flips)))
        for factor in coupling.factors:
            loc, scale = moments[factor.site]
            precision = scale.double().square().reciprocal()
            self._add(
                _Term(
                    factor.blocks,
                    factor.flips,
                    _moved_first(points[factor.site].double(), factor, 1).unsqueeze(1),
                    _moved_first(loc.double(), factor),
                    _moved_first(precision, factor),
                )
            )

    def _add(self, term: _Term) -> None:
        if len(term.blocks) == 1:
            (block,) = term.blocks
            self.alone[block] = self._plus(self.alone[block], term, 0, ())
            return
        if len(set(term.blocks)) == 1 and len({f for f in term.flips if f is not None}) < 2:
            # Two axes of one block: the diagonal terms need no beliefs about other units.
            flips = [f for f in term.flips if f is not None]
            odd = flips[0] if len(flips) % 2 else None
            m = len(term.blocks)
            diagonal = [_diagonal(t, m, at) for t, at in ((term.x, 2), (term.mean, 0), (term.precision, 0))]
            self._add(_Term(term.blocks[:1], (odd,), *diagonal))
            term = replace(term, precision=_without_diagonal(term.precision, m))
        self.coupled.append(term)

    @staticmethod
    def _plus(pairs: _Pairs, term: _Term, dim: int, beliefs: Sequence[Belief]) -> _Pairs:
        """Add a site's log densities of pairs along one of its dims, given beliefs about the others."""
        x, x2 = term.image(beliefs, keep=(dim,))
        certain = all(beliefs[b].certain for d, b in enumerate(term.blocks) if d != dim)
        even, linear = _log_normals(term, x, x2, dim, certain)
        even, flip = pairs.even + even, term.flips[dim]
        if flip is None:
            return _Pairs(even + linear, pairs.odd)
        return _Pairs(even, tuple(o + linear if f == flip else o for f, o in enumerate(pairs.odd)))

    def pairs(self, block: int, beliefs: Sequence[Belief], *, with_itself: bool = True) -> _Pairs:
        """Log densities of units in slots of a block, averaged over beliefs about the other blocks."""
        pairs = self.alone[block]
        for term in self.coupled:
            if with_itself or term.blocks.count(block) == 1:
                for dim, b in enumerate(term.blocks):
                    if b == block:
                        pairs = self._plus(pairs, term, dim, beliefs)
        return pairs

    def log_sum(self, elements: Sequence[Belief], summed: frozenset[int]) -> Tensor:
        """The log density at images, ``(P, K)``, summed exactly over the uncoupled blocks ``summed``.

        ``elements`` has one entry a block; those of summed blocks are not used.
        """
        total = torch.zeros(self.num_draws, 1, dtype=torch.double, device=self.device)
        for b, alone in enumerate(self.alone):
            if b not in summed:
                total = total + _inner(elements[b].place, alone.even)
                for signed, odd in zip(elements[b].signed, alone.odd, strict=True):
                    total = total + _inner(signed, odd)
                continue
            folded = self.pairs(b, elements).folded
            if self.coupling.blocks[b].permutation is None:
                total = total + folded.diagonal(dim1=-2, dim2=-1).sum(-1)
            else:
                total = total + log_permanent(folded)
        for term in self.coupled:
            if not summed & set(term.blocks):
                x, x2 = term.image(elements)
                total = total + (term.precision * (x * term.mean - 0.5 * x2)).flatten(2).sum(-1)
        return total

    def identity(self) -> list[Belief]:
        """The identity, of shape ``(1, 1, n, n)`` a block."""
        eyes = [torch.eye(n, dtype=torch.double, device=self.device)[None, None] for n in self.sizes]
        return [
            Belief(eye, (eye,) * len(block.flips), certain=True)
            for eye, block in zip(eyes, self.coupling.blocks, strict=True)
        ]

    def beliefs(self, rounds: int = ROUNDS) -> list[Belief]:
        """Mean-field beliefs: each block's given the others', in turn, from uniform ones."""
        beliefs = []
        for block, one in zip(self.coupling.blocks, self.identity(), strict=True):
            n = one.place.shape[-1]
            place = one.place if block.permutation is None else torch.full_like(one.place, 1 / n)
            beliefs.append(Belief(place, tuple(torch.zeros_like(place) for _ in block.flips)))
        for _ in range(rounds):
            for b, block in enumerate(self.coupling.blocks):
                pairs, place = self.pairs(b, beliefs), beliefs[b].place
                if block.permutation is not None:
                    place = sinkhorn(pairs.folded, SWEEPS).exp()
                beliefs[b] = Belief(place, tuple(place * odd.tanh() for odd in pairs.odd))
        return beliefs


class Proposal(NamedTuple):
    r"""Elements, and the log probabilities with which they were proposed.

    ``elements`` are beliefs by block, of shape ``(P, K, n, n)``, uncertain for blocks that were summed over;
    ``log_probs`` is :math:`\log \tau(g_k \mid \omega)`, of shape ``(P, K)``.
    """

    elements: list[Belief]
    log_probs: Tensor

    def group_elements(self, coupling: Coupling, symmetry: Symmetry) -> Element:
        """The elements as the symmetry has them, of batch shape ``(K, P)``."""
        parts: dict[int, Tensor] = {}
        for block, element in zip(coupling.blocks, self.elements, strict=True):
            if block.permutation is not None:
                parts[block.permutation] = element.place.argmax(-1).transpose(0, 1)
            for flip, signed in zip(block.flips, element.signed, strict=True):
                parts[flip] = signed.sum(-1).transpose(0, 1).to(torch.int8)
        return coupling.element(symmetry, parts)


@torch.no_grad()
def draw_elements(
    surrogate: Surrogate, num_elements: int, *, with_identity: bool, summed: frozenset[int] = frozenset()
) -> Proposal:
    r"""Draw elements block by block, each given those already drawn and beliefs about the rest.

    Blocks that are not yet drawn enter by the mean and variance of a belief; the variance is added to the
    slot's, so that a site between two layers has little weight for one of them while the other is uncertain.
    Within a block the units are paired with slots as in
    :func:`~pyro_sym.orbit.guided_permutations.importance`, by the matrix of log densities summed over signs;
    then each sign is drawn given the unit. A block that moves two axes of one site is filled slot by slot,
    given the slots filled so far.

    **Why a bound with the identity keeps its direction.** Everything here is computed by sums, products and
    Sinkhorn scalings over unit indices, and by choices that depend on the results; the order of slots and
    blocks depends on no unit's index or sign. So relabelling the units by :math:`h` relabels the proposed
    elements,

    .. math::

        \tau(g \mid h \cdot \omega) = \tau(g h \mid \omega).

    Let :math:`\omega \sim q` and let :math:`\omega_*` be its orbit's representative,
    :math:`\omega = g_0 \cdot \omega_*`. Given the orbit, :math:`g_0` has the posterior
    :math:`p(g_0) \propto q(g_0 \cdot \omega_*)`, and by the identity above :math:`g_k g_0`, with :math:`g_k
    \sim \tau(\cdot \mid \omega)`, has the law :math:`\tau(\cdot \mid \omega_*)`, whatever :math:`g_0` was.
    So the identity among the :math:`g_k` has the law of a draw from the posterior beside independent
    proposals, as IWHVI requires. If some blocks are summed over, the same holds for the cosets of their
    subgroup :math:`H`: :math:`q(H g \cdot \omega) = \sum_{h \in H} q(h g \cdot \omega)`, the remaining blocks
    name the coset, and beliefs about the summed blocks do not depend on the representative. Only equivariance
    is needed, so any surrogate will do that is not fitted to :math:`\omega`.

    Args:
        surrogate: the normals that guide the choice.
        num_elements: :math:`K`.
        with_identity: whether the first element is the identity, rather than drawn.
        summed: blocks that need no element.
    """
    coupling, draws = surrogate.coupling, surrogate.num_draws
    beliefs = surrogate.beliefs() if len(summed) < len(coupling.blocks) else surrogate.identity()
    identity = torch.zeros(draws, num_elements, dtype=torch.bool, device=surrogate.device)
    identity[:, 0] = with_identity
    log_probs = torch.zeros(draws, num_elements, dtype=torch.double, device=surrogate.device)
    for b in range(len(coupling.blocks)):
        if b in summed:
            continue
        draw = _by_slots if coupling.is_self_coupled(b) else _at_once
        beliefs[b], log_prob = draw(surrogate, b, beliefs, identity)
        log_probs = log_probs + log_prob
    return Proposal(beliefs, log_probs)


def _at_once(
    surrogate: Surrogate, block: int, beliefs: list[Belief], identity: Tensor
) -> tuple[Belief, Tensor]:
    """Draw a block whose units do not interact: a permutation, then its signs."""
    pairs, (draws, count) = surrogate.pairs(block, beliefs), identity.shape
    folded, n = pairs.folded, surrogate.sizes[block]
    if surrogate.coupling.blocks[block].permutation is None:
        units = torch.arange(n, device=identity.device).expand(draws, count, n)
        log_prob = torch.zeros(draws, count, dtype=torch.double, device=identity.device)
    elif folded.shape[1] == 1:
        units, log_prob = propose(folded.squeeze(1), count, identity)
    else:
        units, log_prob = propose(folded.flatten(0, 1), 1, identity.reshape(-1, 1))
        units, log_prob = units.reshape(draws, count, n), log_prob.reshape(draws, count)
    place = one_hot(units, n).double()
    signed = []
    for odd in pairs.odd:
        sign, log_sign = _draw_signs((place * odd).sum(-1), identity.unsqueeze(-1), n)
        signed.append(sign.unsqueeze(-1) * place)
        log_prob = log_prob + log_sign.sum(-1)
    return Belief(place, tuple(signed), certain=True), log_prob


def _by_slots(
    surrogate: Surrogate, block: int, beliefs: list[Belief], identity: Tensor
) -> tuple[Belief, Tensor]:
    """Draw a block coupled to itself: slot by slot, given the filled slots and beliefs about others."""
    (draws, count), n = identity.shape, surrogate.sizes[block]
    permuted = surrogate.coupling.blocks[block].permutation is not None
    prior = surrogate.pairs(block, beliefs)
    if permuted:
        scaled = sinkhorn(prior.folded)
        potential = (scaled - prior.folded).mean(-2)  # shape: (P, K or 1, n), of the units
        confident = scaled.amax(-1)
    else:
        confident = torch.stack(prior.odd).diagonal(dim1=-2, dim2=-1).abs().amax(0)
    blind = (torch.rand(draws, count, device=identity.device) < DEFENCE) & ~identity
    order = confident.argsort(-1, descending=True).expand(draws, count, n)
    known = surrogate.pairs(block, beliefs, with_itself=False)
    own = [
        (term, *term.image(beliefs, keep=[d for d, b in enumerate(term.blocks) if b == block]))
        for term in surrogate.coupled
        if term.blocks.count(block) > 1
    ]
    place = beliefs[block].place.expand(draws, count, n, n).clone()
    signed = [s.expand(draws, count, n, n).clone() for s in beliefs[block].signed]
    free = place.new_ones(draws, count, n)  # units
    empty = place.new_ones(draws, count, n)  # slots
    log_prob = place.new_zeros(draws, count)
    for step in range(n):
        slot = order[..., step]
        row = _Pairs(_row(known.even, slot), tuple(_row(odd, slot) for odd in known.odd))
        for term, x, x2 in own:
            row = _plus_row(row, term, x, x2, block, slot, Belief(place, tuple(signed)))
        unit = slot
        if permuted:
            weights = (row.folded + potential).masked_fill(free == 0, -math.inf).softmax(-1)
            weights = (1 - UNIFORM / n) * weights + UNIFORM / n / (n - step) * free
            chances = torch.where(blind.unsqueeze(-1), free, weights)
            unit = torch.multinomial(chances.flatten(0, 1), 1).reshape(draws, count)
            unit = torch.where(identity, slot, unit)
            log_prob = log_prob + weights.gather(-1, unit.unsqueeze(-1)).squeeze(-1).log()
        hit = one_hot(unit, n).double()
        free, empty = free - hit, empty * (1 - one_hot(slot, n))
        if permuted:
            # Renormalise the beliefs about empty slots over the units that are left.
            left = torch.where(empty.unsqueeze(-1) > 0, place * free.unsqueeze(-2), place)
            scale = left.sum(-1, keepdim=True).clamp_min(TINY)
            signed = [s * (left > 0) / scale for s in signed]
            place = left / scale
        here = one_hot(slot, n).unsqueeze(-1).bool()
        place = torch.where(here, hit.unsqueeze(-2), place)
        for f, odd in enumerate(row.odd):
            sign, log_sign = _draw_signs((hit * odd).sum(-1), identity, n, blind)
            signed[f] = torch.where(here, (sign.unsqueeze(-1) * hit).unsqueeze(-2), signed[f])
            log_prob = log_prob + log_sign
    log_order = (math.lgamma(n + 1) if permuted else 0.0) + n * len(signed) * math.log(2.0)
    either = torch.logaddexp(
        log_prob + math.log(1 - DEFENCE), torch.full_like(log_prob, math.log(DEFENCE) - log_order)
    )
    return Belief(place, tuple(signed), certain=True), either


def _plus_row(
    row: _Pairs, term: _Term, x: Tensor, x2: Tensor, block: int, slot: Tensor, current: Belief
) -> _Pairs:
    """Add the log densities of units in one slot, given the block's other slots; of shape (P, K, n)."""
    even, odd = row.even, list(row.odd)
    dims = [d for d, b in enumerate(term.blocks) if b == block]
    for dim in dims:
        y, y2 = x, x2
        for other in dims:
            if other != dim:
                flip = term.flips[other]
                y = _along(current.place if flip is None else current.signed[flip], y, other)
                y2 = _along(current.place, y2, other)
        y, y2 = (t.movedim(dim + 2, 2).flatten(3) for t in (y, y2))
        mean, precision = (t.movedim(dim, 0).flatten(1) for t in (term.mean, term.precision))
        more, linear = _blurred(mean[slot].unsqueeze(-2), precision[slot].unsqueeze(-2), y, y2)
        even = even + more
        flip = term.flips[dim]
        if flip is None:
            even = even + linear
        else:
            odd[flip] = odd[flip] + linear
    return _Pairs(even, tuple(odd))


def _draw_signs(odd: Tensor, identity: Tensor, n: int, blind: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draw signs whose log density is sign times ``odd``; the signs, and their log probabilities."""
    positive = (1 - UNIFORM / n) * torch.sigmoid(2 * odd) + 0.5 * UNIFORM / n
    chance = positive if blind is None else torch.where(blind, 0.5, positive)
    plus = (torch.rand_like(positive) < chance) | identity
    return torch.where(plus, 1.0, -1.0).to(odd), torch.where(plus, positive, 1 - positive).log()


def _moved_first(tensor: Tensor, factor: Factor, batch: int = 0) -> Tensor:
    """Moved axes in front, all others flat behind them: of shape ``(*batch, *moved, r)``."""
    m = len(factor.axes)
    moved = tensor.movedim(factor.axes, tuple(range(batch, batch + m)))
    return moved.flatten(batch + m) if moved.dim() > batch + m else moved.unsqueeze(-1)


def _along(matrix: Tensor, x: Tensor, dim: int) -> Tensor:
    """Multiply matrices of shape (P, K, n, n) into a dim, counted behind (P, K); x has one more dim last."""
    lead = matrix.reshape(*matrix.shape[:2], *(1,) * (x.dim() - 4), *matrix.shape[-2:])
    return (lead @ x.movedim(dim + 2, -2)).movedim(-2, dim + 2)


def _log_normals(term: _Term, x: Tensor, x2: Tensor, dim: int, certain: bool) -> tuple[Tensor, Tensor]:
    """Even and odd log density of units in slots along one dim, of shape (P, K, n, n)."""
    mean, precision = (t.movedim(dim, 0).flatten(1) for t in (term.mean, term.precision))
    x, x2 = (t.movedim(dim + 2, 2).flatten(3) for t in (x, x2))
    if certain:
        return -0.5 * precision @ x2.mT, (mean * precision) @ x.mT
    if x[..., 0].numel() * mean.numel() <= MAX_ENTRIES:
        return _blurred(mean.unsqueeze(1), precision.unsqueeze(1), x.unsqueeze(2), x2.unsqueeze(2))
    # With one precision for all slots, these are matrix products again.
    common = precision.mean(0)
    common = common / (1 + common * (x2 - x.square()).clamp_min(0))
    of_unit = (common.clamp_min(TINY).log() - common * x.square()).sum(-1).unsqueeze(-2)
    return 0.5 * (of_unit - mean.square() @ common.mT), mean @ (common * x).mT


def _blurred(mean: Tensor, precision: Tensor, x: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    """Even and odd log density of a value with uncertain beliefs, whose variance adds to the slot's."""
    precision = precision / (1 + precision * (x2 - x.square()).clamp_min(0))
    even = precision.clamp_min(TINY).log() - precision * (mean.square() + x.square())
    return 0.5 * even.sum(-1), (precision * mean * x).sum(-1)


def _row(matrix: Tensor, slot: Tensor) -> Tensor:
    """Rows of matrices (P, K or 1, n, n) at slots (P, K)."""
    n = matrix.shape[-1]
    index = slot[..., None, None].expand(*slot.shape, 1, n)
    return matrix.expand(*slot.shape, n, n).gather(-2, index).squeeze(-2)


def _inner(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum((-2, -1))


def _diagonal(tensor: Tensor, dims: int, at: int) -> Tensor:
    """The entries of one index on ``dims`` dims, the first of them ``at``."""
    index = torch.arange(tensor.shape[at], device=tensor.device)
    return tensor[(slice(None),) * at + (index,) * dims]


def _without_diagonal(tensor: Tensor, dims: int) -> Tensor:
    mask = torch.ones_like(tensor)
    index = torch.arange(tensor.shape[0], device=tensor.device)
    mask[(index,) * dims] = 0.0
    return tensor * mask
