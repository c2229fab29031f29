"""Kernel Stein discrepancy: how far draws are from a density of which only the score is known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_sym.diagnostics.score import checked_pair

__all__ = ["SteinDiscrepancy", "kernel_stein_discrepancy", "stein_kernel"]

SEED = 0x57E1

TURNS, LOST = 0.1, 0.02  # sign flips within an autocorrelation time; the correlation that is taken for zero


class SteinDiscrepancy(NamedTuple):
    r"""A kernel Stein discrepancy, estimated from draws.

    Attributes:
        u_statistic: unbiased estimate of :math:`\mathrm{KSD}^2`; it may be negative.
        v_statistic: the squared discrepancy of the draws as a discrete measure; never negative.
        standard_error: of the U-statistic.
        p_value: the share of U-statistics bootstrapped under the target that are at least as large.
        num_draws: :math:`n`.
    """

    u_statistic: float
    v_statistic: float
    standard_error: float
    p_value: float
    num_draws: int


def stein_kernel(x: Tensor, score_x: Tensor, y: Tensor, score_y: Tensor, *, c: float, beta: float) -> Tensor:
    r"""The Langevin Stein kernel of the inverse multiquadric, for all pairs.

    With :math:`q = c^2 + \lVert x - y \rVert^2` and :math:`k = q^\beta`,

    .. math::

        k_p(x, y) &= s_x^\top s_y k + s_x^\top \nabla_y k + s_y^\top \nabla_x k + \nabla_x^\top \nabla_y k \\
        &= s_x^\top s_y\, q^\beta + 2 \beta\, (s_y - s_x)^\top (x - y)\, q^{\beta - 1}
           - 2 \beta d\, q^{\beta - 1} - 4 \beta (\beta - 1) \lVert x - y \rVert^2 q^{\beta - 2}.

    For points ``x`` of shape ``(n, d)`` and ``y`` of shape ``(m, d)`` the values have shape ``(n, m)``.
    """
    norm_x, norm_y = x.square().sum(-1, keepdim=True), y.square().sum(-1)
    square = (norm_x + norm_y - 2 * x @ y.T).clamp(min=0)
    along_x, along_y = (score_x * x).sum(-1, keepdim=True), (score_y * y).sum(-1)
    along = x @ score_y.T - along_y - along_x + score_x @ y.T
    q = c**2 + square
    slope = 2 * beta * (along - x.shape[-1]) - 4 * beta * (beta - 1) * square / q
    return (score_x @ score_y.T * q + slope) * q ** (beta - 1)


def kernel_stein_discrepancy(
    draws: Tensor,
    score: Tensor,
    *,
    scale: Tensor | float | None = None,
    c: float = 1.0,
    beta: float = -0.5,
    num_chains: int = 1,
    num_bootstraps: int = 500,
    batch_size: int = 512,
) -> SteinDiscrepancy:
    r"""How far draws are from their target, by the score of the target.

    For independent :math:`x, y` from the distribution :math:`r` of the draws and the target's score
    :math:`s = \nabla \log p`, which needs no normalising constant,

    .. math::

        \mathrm{KSD}^2(r, p) = \mathbb E\, k_p(x, y)
        = \mathbb E \left[ (s - s_r)(x)^\top (s - s_r)(y)\, k(x, y) \right], \qquad
        k(x, y) = \left( c^2 + \lVert x - y \rVert^2 \right)^\beta,

    with the Stein kernel :math:`k_p` of :func:`~pyro_sym.diagnostics.stein.stein_kernel`. It is zero only for
    :math:`r = p`, and with this kernel it does not tend to zero while draws escape to infinity.

    **What it detects**: a wrong temperature, step sizes that are too large, minibatch noise, chains that are
    not stationary yet: errors in the shape of the distribution *near the draws*.

    **What it misses**: how much mass each of several separated modes has. Where modes are far apart the score
    of a mixture is that of the nearest component, whatever its weight, so it can't tell draws from one of
    :math:`|G|` equivalent modes from draws from all of them; and it misses a mode that no chain has found.
    Its power falls with the dimension: test few sites at a time, or many draws.

    **Autocorrelated draws** need no thinning. The p-value comes from a wild bootstrap,
    :math:`\frac{1}{n (n - 1)} \sum_{i \ne j} w_i w_j k_p(x_i, x_j)` with signs :math:`w_i = \pm 1` that flip
    along a chain with probability :math:`0.1 / \tau`. Here :math:`\tau` is the autocorrelation time under the
    kernel: the mean of :math:`k_p(x_i, x_{i + k})` over that of :math:`k_p(x_i, x_i)`, summed over lags.
    Signs of different chains are independent, and so are those of uncorrelated draws. With few effective
    draws the test is valid, but has little power. The random state is not changed.

    Args:
        draws: unconstrained values, of shape ``(n, d)``. :func:`unconstrained_score` makes them, and the
            score.
        score: :math:`\nabla \log p` at the draws, of the same shape.
        scale: by coordinate, the unit of length: coordinates are divided by it. By default it is the standard
            deviation of the draws, so that units of measurement do not matter; with separated modes pass that
            of one mode, as their distance would make the kernel too wide.
        c: :math:`c`, in units of ``scale``.
        beta: :math:`\beta`, between -1 and 0.
        num_chains: :math:`C`; each has :math:`n / C` successive draws, one chain after the other.
        num_bootstraps: for the p-value.
        batch_size: how many rows of the :math:`n \times n` matrix are in memory at once.

    Returns:
        Its square, by U- and V-statistic, with standard error and p-value. Computed in float64.

    Raises:
        ValueError: if shapes disagree, there are fewer than two draws, something is not finite, chains have
            unequal numbers of draws, or an argument is out of range.

    Example:
        >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
        >>> right = kernel_stein_discrepancy(x, -x)  # the score of a standard normal
        >>> hot = kernel_stein_discrepancy(1.5 * x, -1.5 * x)
        >>> right.p_value > 0.01, hot.p_value < 0.01
        (True, True)

    References:
        Gorham and Mackey (2017), "Measuring sample quality with kernels" (arXiv 1703.01717), for the kernel.
        Liu, Lee and Jordan (2016, arXiv 1602.03253) and Chwialkowski, Strathmann and Gretton (2016, arXiv
        1602.02964), for U-statistic and bootstrap, with dependent signs in the latter.
        Wenliang and Kanagawa (2020, arXiv 2010.07064), for what scores can't detect.
    """
    x, s = _scaled(*checked_pair(draws, score, num_chains), scale)
    if not c > 0 or not -1 < beta < 0:
        raise ValueError(f"c={c} and beta={beta}; the kernel needs c > 0 and -1 < beta < 0")
    if num_bootstraps < 1 or batch_size < 1:
        raise ValueError(f"num_bootstraps={num_bootstraps} and batch_size={batch_size} must be positive")
    n = len(x)

    def blocks() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Blocks of rows of the kernel matrix with a zero diagonal, and the diagonal."""
        for rows in torch.arange(n, device=x.device).split(batch_size):
            kernel = stein_kernel(x[rows], s[rows], x, s, c=c, beta=beta)  # (rows, n)
            own = (torch.arange(len(rows), device=x.device), rows)
            diagonal = kernel[own].clone()
            kernel[own] = 0
            yield rows, kernel, diagonal

    diagonal, row_sums, squares = x.new_zeros(()), [], x.new_zeros(())
    lagged = x.new_zeros(n // num_chains)
    for rows, kernel, own in blocks():
        diagonal = diagonal + own.sum()
        row_sums.append(kernel.sum(-1))
        squares = squares + kernel.square().sum()
        lagged = lagged + _lagged(kernel, rows, len(lagged))
    total, pairs = torch.cat(row_sums), n * (n - 1)
    u = float(total.sum()) / pairs
    signs = _signs(num_chains, n, num_bootstraps, _time(lagged, num_chains, float(diagonal) / n, u)).to(x)
    flipped = x.new_zeros(num_bootstraps)
    for rows, kernel, _ in blocks():
        flipped = flipped + (signs[rows] * (kernel @ signs)).sum(0)
    # Hoeffding's decomposition: the spread of row means holds 1/n of that of single pairs.
    of_pairs = float(squares) / pairs
    of_rows = max(float((total / (n - 1)).var()) - of_pairs / n, 0.0)
    return SteinDiscrepancy(
        u_statistic=u,
        v_statistic=float(total.sum() + diagonal) / n**2,
        standard_error=math.sqrt(4 / n * of_rows + 2 / pairs * of_pairs),
        p_value=(1 + int((flipped / pairs >= u).sum())) / (1 + num_bootstraps),
        num_draws=n,
    )


def _lagged(kernel: Tensor, rows: Tensor, length: int) -> Tensor:
    """By lag k, sums over rows i of the kernel at (i, i + k), within chains of ``length`` draws."""
    lags = torch.arange(length, device=rows.device)
    later = rows.unsqueeze(-1) + lags  # (rows, length)
    within = rows.unsqueeze(-1) % length + lags < length
    return kernel.gather(1, later.clamp(max=kernel.shape[1] - 1)).mul(within).sum(0)


def _time(lagged: Tensor, num_chains: int, variance: float, mean: float) -> float:
    """Autocorrelation time 1 + 2 Σ ρ from sums by lag; the sum ends at the first small correlation."""
    length = len(lagged)
    numbers = num_chains * (length - torch.arange(length, device=lagged.device))
    correlation = ((lagged / numbers - mean) / max(variance - mean, 1e-300)).tolist()
    time = 1.0
    for rho in correlation[1 : max(2, length // 2)]:
        if not rho > LOST:
            break
        time += 2 * rho
    return time


def _signs(num_chains: int, n: int, num_bootstraps: int, time: float) -> Tensor:
    """Signs that flip along a chain, once in 10 autocorrelation times, of shape ``(n, num_bootstraps)``."""
    generator = torch.Generator().manual_seed(SEED)
    turn = torch.full((n // num_chains, 1), 0.5 if time == 1 else TURNS / time, dtype=torch.float64)
    turn[0] = 0.5
    numbers = torch.rand(num_chains, len(turn), num_bootstraps, generator=generator, dtype=torch.float64)
    return torch.where(numbers < turn, -1.0, 1.0).cumprod(1).flatten(0, 1)


def _scaled(x: Tensor, s: Tensor, scale: Tensor | float | None) -> tuple[Tensor, Tensor]:
    """Centred draws and their score in units of the scale."""
    x = x - x.mean(0)  # the kernel depends on differences only; centring keeps their digits
    spread = x.std(0)
    given = torch.where(spread > 0, spread, 1.0) if scale is None else scale
    unit = torch.as_tensor(given, dtype=x.dtype, device=x.device)
    if not bool((unit > 0).all()):
        raise ValueError(f"scale is {scale}; it must be positive in each coordinate")
    return x / unit, s * unit
