"""SGHMC of the peers, the noise and the minibatches drawn by themselves: posteriors and BlackJAX.

Both are optional; :func:`missing` says which aren't there, and what needs them is left out. Their SGHMC is
the explicit Euler scheme, whose position moves with the momentum before the step. Step size and friction are
in each library's own units: those of posteriors belong to the log posterior divided by the number of rows
(``studies/pima.py`` has the change of units).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import torch
from torch import Tensor


def missing() -> list[str]:
    """The peers that aren't installed."""
    return [name for name in ("posteriors", "blackjax") if find_spec(name) is None]


def posteriors_steps(
    log_posterior: Callable[..., Any],
    params: dict[str, Tensor],
    x: Tensor,
    y: Tensor,
    *,
    batch: int | None,
    lr: float,
    inplace: bool = False,
) -> Callable[[], Any]:
    """A step of posteriors' SGHMC a call, for alpha = 1 and the log posterior divided by the rows.

    It starts at rest: the default, momenta N(0, 1), is hotter than their law N(0, 1 / rows).

    Args:
        log_posterior: from params and a batch to its value and a tensor.
        params: where to start.
        x: inputs.
        y: targets.
        batch: rows a step, drawn with replacement; all of them if None.
        lr: step size.
        inplace: whether to change the state in place.

    Returns:
        What takes a step and returns the parameters.
    """
    import posteriors

    method = posteriors.sgmcmc.sghmc.build(
        log_posterior, lr=lr, alpha=1.0, temperature=1 / len(x), momenta=0.0
    )
    state = method.init(params)

    def step() -> Any:
        nonlocal state
        rows = slice(None) if batch is None else torch.randint(len(x), (batch,))
        state, _ = method.update(state, (x[rows], y[rows]), inplace=inplace)
        return state.params

    return step


def blackjax_steps(
    log_prior: Any,
    log_likelihood: Any,
    start: Any,
    x: Any,
    y: Any,
    *,
    batch: int | None,
    step_size: float,
    friction: float,
    thinning: int,
    draws: int,
    num_chains: int = 1,
    seed: int = 0,
) -> Callable[[], Any]:
    """Many steps of BlackJAX's SGHMC a call, in one compiled scan.

    ``blackjax.sghmc`` keeps one minibatch for all steps between two momenta. This is its integrator with a
    minibatch a step, the momentum carried on; it starts at rest.

    Args:
        log_prior: of a position.
        log_likelihood: of a position and a row.
        start: a position.
        x: inputs.
        y: targets.
        batch: rows a step, drawn with replacement; all of them if None.
        step_size: of the undivided log posterior.
        friction: per unit of time.
        thinning: steps a draw.
        draws: draws a call.
        num_chains: chains side by side.
        seed: of the random keys.

    Returns:
        What takes the steps and returns the draws, chains in front if there are several.
    """
    import jax
    from blackjax.sgmcmc import diffusions, gradients

    gradient_of = gradients.grad_estimator(log_prior, log_likelihood, len(x))
    integrator = diffusions.sghmc(alpha=friction)

    def step(state: Any, key: Any) -> Any:
        for_rows, for_noise = jax.random.split(key)
        data = (x, y)
        if batch is not None:
            rows = jax.random.randint(for_rows, (batch,), 0, len(x))
            data = (x[rows], y[rows])
        gradient = gradient_of(state[0], data)
        return integrator(for_noise, *state, gradient, step_size, 1.0), None

    def draw(state: Any, key: Any) -> Any:
        state, _ = jax.lax.scan(step, state, jax.random.split(key, thinning))
        return state, state[0]

    def chain(state: Any, key: Any) -> Any:
        return jax.lax.scan(draw, state, jax.random.split(key, draws))

    run = jax.jit(chain if num_chains == 1 else jax.vmap(chain))
    state = (start, jax.tree.map(jax.numpy.zeros_like, start))
    if num_chains > 1:
        state = jax.tree.map(lambda value: jax.numpy.broadcast_to(value, (num_chains, *value.shape)), state)
    key = jax.random.key(seed)

    def go_on() -> Any:
        nonlocal state, key
        key, now = jax.random.split(key)
        state, kept = run(state, now if num_chains == 1 else jax.random.split(now, num_chains))
        return jax.block_until_ready(kept)

    return go_on
