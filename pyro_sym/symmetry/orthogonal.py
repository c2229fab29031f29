"""The orthogonal group: rotations and reflections of latent factors."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from pyro_sym.errors import SymmetryError
from pyro_sym.symmetry.base import OnAxes, Values

__all__ = ["Orthogonal"]


class Orthogonal(OnAxes):
    r"""The orthogonal group :math:`O(k)`, rotating one axis (or several axes at once) of each named site.

    An element is an orthogonal matrix :math:`Q` in float64, of shape ``(*batch, k, k)``:

    .. math::

        (Q \cdot v)_{\dots i \dots} = \sum_j Q_{ij}\, v_{\dots j \dots}, \qquad Q^{-1} = Q^\top,

    on every named axis. A factor model has this symmetry if its factors and loadings have isotropic priors:
    :math:`z` of shape ``(n, k)`` and :math:`W` of shape ``(d, k)`` go to :math:`z Q^\top` and
    :math:`W Q^\top`, and :math:`z W^\top` stays.

    The group is not finite, so guides can't be averaged over it. Draws are aligned by Procrustes rotations:
    with one axis a site and variances that are constant along it,

    .. math::

        \arg\min_{Q \in O(k)} \sum_r \lVert Q \theta_r - \mu_r \rVert^2 / \sigma_r^2 = U V^\top,
        \qquad \sum_r \mu_r \theta_r^\top / \sigma_r^2 = U S V^\top,

    over all rows :math:`r` of all sites, and :func:`align` estimates such variances, one a row. The margin is
    that to the best element of the other orientation (a rotation's rival is a rotation and a reflection),
    :math:`2 S_{kk}` nats.

    Args:
        axes: site name to axis, counted from the right (negative), or to a tuple of axes that rotate
            together, as both axes of a precision matrix do.

    Raises:
        SymmetryError: if an axis is not a negative int, or is named twice.

    Example:
        >>> group = Orthogonal({"loadings": -1, "factors": -1})
        >>> values = {"loadings": torch.eye(2), "factors": torch.tensor([[3.0, 4.0]])}
        >>> quarter_turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        >>> group.act(quarter_turn, values)["factors"]
        tensor([[-4.,  3.]])

    References:
        Schönemann (1966), "A generalized solution of the orthogonal Procrustes problem". Papastamoulis and
        Ntzoufras (2022), "On the identifiability of Bayesian factor analytic models", for its use on draws.
    """

    kind = "rotation"

    def _act_along(self, axis: int, element: Tensor, value: Tensor) -> Tensor:
        batch = element.shape[:-2]
        if value.dim() + axis < len(batch):
            raise SymmetryError(
                f"elements of batch shape {tuple(batch)} do not fit in front of axis {axis} of a value of "
                f"shape {tuple(value.shape)}; their batch dims must be the value's first dims"
            )
        rows = value.movedim(axis, -1)  # (*batch, *rest, k)
        rest = rows.shape[len(batch) : -1]
        rotated = rows.reshape(*rows.shape[: len(batch)], rest.numel(), rows.shape[-1])
        rotated = rotated @ element.to(value.dtype).mT
        return rotated.reshape(*rotated.shape[: len(batch)], *rest, rows.shape[-1]).movedim(-1, axis)

    def inverse(self, element: Tensor) -> Tensor:
        return element.mT

    def compose(self, first: Tensor, second: Tensor) -> Tensor:
        return first @ second

    def identity(self, values: Values, batch_shape: tuple[int, ...] = ()) -> Tensor:
        k = self.size(values)
        return torch.eye(k, dtype=torch.float64, device=self._device(values)).expand(*batch_shape, k, k)

    def sample(self, values: Values, batch_shape: tuple[int, ...] = ()) -> Tensor:
        """From the Haar measure: the orthogonal factor of a normal matrix, with its signs made unique."""
        k = self.size(values)
        normal = torch.randn(*batch_shape, k, k, dtype=torch.float64, device=self._device(values))
        q, r = torch.linalg.qr(normal)
        return q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)

    def generators(self, values: Values) -> list[tuple[str, Tensor]]:
        """A reflection, and turns by 1 radian in the planes of neighbours; their products are dense."""
        neutral = self.identity(values)
        mirror = neutral.clone()
        mirror[0, 0] = -1
        named = [(f"reflecting 0 in {self}", mirror)]
        for i, j in itertools.pairwise(range(len(neutral))):
            turn = neutral.clone()
            turn[i, i] = turn[j, j] = math.cos(1.0)
            turn[j, i] = math.sin(1.0)
            turn[i, j] = -turn[j, i]
            named.append((f"turning {i} towards {j} in {self}", turn))
        return named

    def closest(self, draws: Values, mean: Values, variance: Values) -> Tensor:
        u, _, vh = torch.linalg.svd(self._cross_products(draws, mean, variance))
        return u @ vh

    def margin(self, images: Values, mean: Values, variance: Values) -> Tensor:
        return 2 * torch.linalg.svdvals(self._cross_products(images, mean, variance))[:, -1]

    def pool_variance(self, variance: Values) -> dict[str, Tensor]:
        pooled = dict(variance)
        for site, several in self.axes.items():
            pooled[site] = variance[site].mean(several, keepdim=True).expand_as(variance[site])
        return pooled

    def _cross_products(self, draws: Values, mean: Values, variance: Values) -> Tensor:
        """The sum over rows of mean times draw, weighted, ``(M, k, k)``."""
        total = torch.zeros(())
        for site, several in self.axes.items():
            if len(several) > 1:
                raise SymmetryError(
                    f"{self} can't be aligned: it rotates axes {several} of site {site!r} together, and "
                    "Procrustes rotations are for one axis a site; align by the other sites alone"
                )
            draw = draws[site].movedim(several[0], -1)
            draw = draw.reshape(len(draw), -1, draw.shape[-1])  # (M, R, k)
            target = (mean[site] / variance[site]).movedim(several[0], -1)
            target = target.reshape(-1, draw.shape[-1])  # (R, k)
            total = total + torch.einsum("ri,mrj->mij", target, draw)
        return total
