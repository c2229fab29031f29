"""Kernels in Pyro's own drivers: the protocol of ``pyro.infer.MCMC``, one chain at a time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch import Tensor
from torch.distributions.transforms import Transform

from pyro_sym.sgmcmc.chains import Chains
from pyro_sym.sgmcmc.kernel import Kernel, Options, Schedule
from pyro_sym.sgmcmc.start import start_chains
from pyro_sym.sgmcmc.statistics import Recorder

__all__ = ["StochasticGradientKernel"]


@dataclass
class _Run:
    """A run of one chain in Pyro's drivers."""

    chains: Chains
    recorder: Recorder
    start: dict[str, Tensor]
    params: dict[str, Tensor]
    warmup_draws_left: int


class StochasticGradientKernel(Kernel, MCMCKernel):
    r"""What all stochastic-gradient kernels share; a kernel adds its dynamics by implementing ``step``.

    The potential energy :math:`U` is the full negative log joint in unconstrained space
    (:class:`~pyro_sym.model.potential.Potential`), the target

    .. math::

        \pi_T(u) \propto \exp(-U(u) / T) = \left( p(\theta, D) \, |\det \partial \theta / \partial u|
        \right)^{1/T}:

    as a density of :math:`\theta` it carries the Jacobian to the power :math:`1/T - 1`. Each step draws a
    fresh minibatch for every subsampled plate of the model and takes one gradient. Momenta start at
    :math:`N(0, T / G)`. At :math:`T = 0` the dynamics is deterministic and consumes no random numbers. The
    kernel runs in ``pyro.infer.MCMC`` and ``StreamingMCMC``, and many chains at once in
    :class:`~pyro_sym.VectorizedMCMC`; it draws from torch's global generator (``pyro.set_rng_seed``).

    Args:
        model: a Pyro model. Its arguments are those of ``MCMC.run``.
        step_size: positive; a number, or a function of the step.
        **options: any of the following. ``temperature``: :math:`T \ge 0`; a number, a ladder of one for each
            chain (a list or tensor of shape ``(C,)``, for :class:`~pyro_sym.VectorizedMCMC`), or a function
            of the step that returns either (:mod:`pyro_sym.sgmcmc.schedules`).
            ``thinning``: steps per draw, in warm-up as well.
            ``init_strategy``: a per-site function, as in Pyro's autoguides, that gives the initial values.
            ``batches``: a ``DataLoader`` or another iterable that can be run through again; its batches
            become the model's positional arguments, one a step (:class:`~pyro_sym.model.minibatch.Loader`),
            and ``MCMC.run`` takes keyword arguments only.
            ``shared_minibatch``: whether chains that run side by side see the same minibatch.
            ``gradient``: ``"control_variate"`` centres the minibatch gradient
            (:class:`~pyro_sym.sgmcmc.control_variate.ControlVariate`), at twice the price of a step.
            ``center``: unconstrained values by site to centre it at; by default a mode, found first.
            ``preconditioner``: gives the inverse mass :math:`G`; by default the identity
            (:mod:`pyro_sym.sgmcmc.preconditioners`).
            ``jit``: ``"eager"`` runs the model at each step; ``"trace"`` runs its operations, recorded once;
            ``"compile"`` compiles several steps into one call, which takes some ten seconds the first time
            and needs a C++ compiler (with batches, control variates or a preconditioner that goes on learning
            it compiles the gradient alone); ``"auto"`` traces where that can be done and shown to be right.

    Attributes:
        needs: what the dynamics needs (:class:`~pyro_sym.sgmcmc.kernel.Needs`).
        initial_params: unconstrained values by site that chains start from. Set them before the run (``MCMC``
            does so with its own ``initial_params``), or ``init_strategy`` draws them for each chain.
        transforms: by site, from constrained to unconstrained values; known once a run has started.
    """

    def __init__(self, model: Callable[..., Any], *, step_size: Schedule, **options: Unpack[Options]) -> None:
        super().__init__(model, step_size=step_size, **options)
        self.transforms: dict[str, Transform] | None = None
        self._given: list[dict[str, Tensor]] = []
        self._run: _Run | None = None

    @property
    def initial_params(self) -> Mapping[str, Tensor] | None:
        """Unconstrained values by site that the chain starts from."""
        return self._own_params() if self._run is None else self._run.start

    @initial_params.setter
    def initial_params(self, params: Mapping[str, Tensor] | None) -> None:
        given = [] if params is None else [{name: value.detach() for name, value in params.items()}]
        # Pyro's MCMC, if it runs chains in processes, sets the values of all chains on one and the same
        # kernel before it starts the first process, so that the last chain's would win. They are rows of one
        # tensor.
        self._given = self._given + given if given and _share_storage(self._given[-1:] + given) else given

    def _own_params(self) -> dict[str, Tensor] | None:
        """The values given for this chain. MCMC names its processes by chain."""
        chain = multiprocessing.current_process().name
        if chain.isdigit() and int(chain) < len(self._given):
            return self._given[int(chain)]
        return self._given[-1] if self._given else None

    def start(
        self,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Chains:
        """Start chains side by side, with the options of :func:`~pyro_sym.sgmcmc.start.start_chains`."""
        chains = start_chains(self, args, kwargs, **options)
        self.transforms = chains.potential.transforms
        return chains

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Start a chain whose first ``warmup_steps`` draws keep no statistics; ``MCMC`` calls this.

        Raises a ``ValueError`` if the model can't be sampled, or no starting point has a finite potential
        energy.
        """
        if isinstance(self.temperature_at(0), tuple):
            raise ValueError(
                f"temperature is {self.temperature!r}, but Pyro's drivers run one chain of a kernel at a "
                "time; pass a number, or run the chains in VectorizedMCMC"
            )
        given = self._own_params()
        rows = None if given is None else {name: value.unsqueeze(0) for name, value in given.items()}
        chains = self.start(args, kwargs, initial_params=rows)
        start = chains.potential.unflatten(chains.position[0])
        self._given = [] if given is None else [start]
        self._run = _Run(chains, Recorder(chains), start, start, warmup_steps)

    def sample(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take ``thinning`` steps from unconstrained values by site, and return those after the steps.

        Raises a ``DivergenceError``, which names the step and the first site, if a position, gradient or
        potential energy is not finite.
        """
        run = self._running()
        chains = run.chains
        if params is not run.params:
            chains.move_to(chains.potential.flatten(params).unsqueeze(0))
        chains.advance(self.thinning, warming_up=run.warmup_draws_left > 0)
        run.params = chains.potential.unflatten(chains.position[0])
        if run.warmup_draws_left > 0:
            run.warmup_draws_left -= 1
        else:
            run.recorder.append()
        return run.params

    def _running(self) -> _Run:
        if self._run is None:
            raise RuntimeError("the kernel has no chain; call setup(warmup_steps, *args, **kwargs) first")
        return self._run

    def end_warmup(self) -> None:
        """End the warm-up: statistics are kept from the next draw on."""
        self._running().warmup_draws_left = 0

    def logging(self) -> dict[str, str]:
        """What the progress bar shows: step size, temperature, potential energy and kinetic temperature."""
        return self._running().chains.report()

    def diagnostics(self) -> dict[str, dict[str, Tensor]]:
        r"""Statistics of the draws after warm-up, each at the position and momentum of the draw itself.

        ``potential_energy`` is :math:`U`, the negative log joint in unconstrained space (with its Jacobian);
        with subsampled plates it is the unbiased estimate on a minibatch that is independent of the draw.
        ``lp`` is :math:`-U`, the unnormalised log posterior density, as ArviZ has it, not divided by the
        temperature. ``energy`` is :math:`U + \tfrac12 m^\top G m`. ``gradient_norm``,
        ``kinetic_temperature`` and ``configurational_temperature`` are those of
        :mod:`pyro_sym.sgmcmc.thermometers`, which says what each can and can't see, overall and (as
        ``site_…``, with the sites along the last dim) by site. ``step_size`` and ``temperature`` are those
        of the last step of the draw; ``temperature`` is NaN while a chain relaxes after a
        :class:`~pyro_sym.Cyclical` left temperature 0. A kernel may add its own, as :class:`~pyro_sym.SGNHT`
        its ``thermostat``.

        Returns:
            ``{"sample_stats": {name: tensor}}``, each tensor in float64 and of shape ``(draws,)`` or
            ``(draws, sites)``. ``MCMC.diagnostics()["sample_stats"]`` holds one such dict for each of
            ``"chain 0"``, ``"chain 1"``, …
        """
        stats = self._running().recorder.statistics()
        return {"sample_stats": {name: values[:, 0] for name, values in stats.items()}}

    def cleanup(self) -> None:
        """Forget the chain, and the data with it; ``transforms`` stay."""
        self._run = None

    def __getstate__(self) -> dict[str, Any]:
        """A pickled kernel (``MCMC`` sends one to each process) is one before its run."""
        return {**self.__dict__, "_run": None, "transforms": None}


def _share_storage(several: list[dict[str, Tensor]]) -> bool:
    def addresses(params: dict[str, Tensor]) -> dict[str, int]:
        return {name: value.untyped_storage().data_ptr() for name, value in params.items()}

    return all(addresses(params) == addresses(several[0]) for params in several)
