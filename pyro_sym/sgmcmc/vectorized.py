"""Many chains in one process: the driver for this package's kernels."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, Unpack

from pyro.infer.autoguide.initialization import init_to_sample
from torch import Tensor

from pyro_sym._random import random_state, set_random_state
from pyro_sym.draws.contract import Draws
from pyro_sym.draws.divergence import Divergence
from pyro_sym.draws.fingerprint import fingerprint
from pyro_sym.draws.identity import identify
from pyro_sym.draws.kernel_settings import kernel_settings
from pyro_sym.draws.memory import DrawsInMemory
from pyro_sym.draws.on_disk import DrawsOnDisk, block_of_draws
from pyro_sym.draws.readable import ReadableRun
from pyro_sym.draws.store import Store
from pyro_sym.sgmcmc.chains import Chains
from pyro_sym.sgmcmc.kernel import Options
from pyro_sym.sgmcmc.progress import Bar, Callback, Progress, asks_to_stop
from pyro_sym.sgmcmc.pyro_driver import StochasticGradientKernel
from pyro_sym.sgmcmc.start import refuse_copies
from pyro_sym.sgmcmc.statistics import Recorder
from pyro_sym.sgmcmc.underdamped import BAOA, SGHMC

__all__ = ["VectorizedMCMC", "deep_ensemble"]


class VectorizedMCMC(ReadableRun):
    r"""Run many chains of a kernel side by side, as one batched computation.

    It has the interface of ``pyro.infer.MCMC``, but chains are a dim of tensors and not processes, so a step
    of 64 chains costs little more than a step of one. Chains start, draw their noise and (unless the kernel
    shares them) their minibatches independently. ``pyro.set_rng_seed`` makes a run reproducible.

    Args:
        kernel: one of this package's kernels.
        num_samples: draws per chain, after the warm-up.
        warmup_steps: draws per chain that are discarded first, as in ``MCMC``; by default ``num_samples``.
        num_chains: :math:`C`.
        thinning: steps per draw, also in the warm-up; by default the kernel's.
        initial_params: unconstrained values by site to start from, with the chains in front: ``(C, *shape)``.
        initial_values: the same as constrained values, such as draws of a guide or an optimum. Without
            either, the kernel's ``init_strategy`` draws them for each chain.
        on_divergence: what to do if a chain's position, gradient or energy is not finite. ``"raise"`` an
            error that names chain, step and first site; earlier draws stay readable. ``"mask"`` the chain:
            its draws from there on are NaN, ``diverged`` says where and why, and the other chains continue.
        disable_progbar: whether to hide the progress bar. It counts steps if a draw takes several, and is
            redrawn five times a second.
        callback: is called between draws with a :class:`~pyro_sym.sgmcmc.progress.Progress`: the number of
            draws, energies, temperatures, and the draws so far. If it returns ``True`` or raises
            ``StopIteration``, the run ends there; any other error ends it and is raised. Either way the draws
            so far stay readable. Random numbers that it draws don't change the run.
        callback_every: draws between two calls, also in the warm-up.
        store: a local directory to write draws and statistics to, a block at a time, instead of keeping them
            in memory (:class:`~pyro_sym.draws.store.Store`). :func:`~pyro_sym.open_run` reads it, also
            during the run.
        resume: whether to continue the run in ``store`` from its last block; all later draws are, bit for
            bit, those of a run that was not interrupted. If there is no run, one is begun. A larger
            ``num_samples`` extends a run, also a finished one, without a new warm-up: momenta and learnt
            masses are kept. It has to be the same run: model and data
            (:func:`~pyro_sym.draws.fingerprint.fingerprint` says how they are compared), kernel, warm-up and
            number of chains; seed and starting values may differ. Batches must depend on torch's random state
            alone (:class:`~pyro_sym.model.minibatch.Loader`), and ``torch.get_num_threads()`` must be the
            same.
        store_every: draws a block, which is the most that a crash can lose; by default 1/20 of the run, and
            at most 64 MB.

    Attributes:
        diverged: by chain, a :class:`~pyro_sym.draws.divergence.Divergence` with step and reason.
        sampling_time: seconds that the draws took, warm-up and the time before a crash included.

    Raises:
        ValueError: if an argument is out of range.
        ImportError: if ``store`` is given and Zarr is not installed.

    Example:
        >>> def model(y):
        ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("rows", len(y), subsample_size=20) as rows:
        ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])
        >>> kernel = BAOA(model, step_size=0.02, friction=5.0)
        >>> mcmc = VectorizedMCMC(
        ...     kernel, num_samples=50, warmup_steps=20, num_chains=8, thinning=5, disable_progbar=True
        ... )
        >>> mcmc.run(torch.ones(100))
        >>> mcmc.get_samples(group_by_chain=True)["mean"].shape
        torch.Size([8, 50])
    """

    def __init__(
        self,
        kernel: StochasticGradientKernel,
        num_samples: int,
        warmup_steps: int | None = None,
        num_chains: int = 1,
        thinning: int | None = None,
        *,
        initial_params: Mapping[str, Tensor] | None = None,
        initial_values: Mapping[str, Tensor] | None = None,
        on_divergence: Literal["raise", "mask"] = "raise",
        disable_progbar: bool = False,
        store: str | os.PathLike[str] | None = None,
        resume: bool = False,
        store_every: int | None = None,
        callback: Callback | None = None,
        callback_every: int = 1,
    ) -> None:
        if not isinstance(kernel, StochasticGradientKernel):
            raise TypeError(
                f"kernel is {kernel!r}; pass one of pyro_sym's kernels. Others run in pyro.infer.MCMC"
            )
        self._warmup_given = warmup_steps is not None
        warmup_steps = num_samples if warmup_steps is None else warmup_steps
        thinning = kernel.thinning if thinning is None else thinning
        for name, value, least in (
            ("num_samples", num_samples, 1),
            ("warmup_steps", warmup_steps, 0),
            ("num_chains", num_chains, 1),
            ("thinning", thinning, 1),
            ("callback_every", callback_every, 1),
            *([] if store_every is None else [("store_every", store_every, 1)]),
        ):
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}; pass an integer >= {least}")
        if callback is not None and not callable(callback):
            raise TypeError(f"callback is {callback!r}; pass a function of a Progress")
        if on_divergence not in ("raise", "mask"):
            raise ValueError(f"on_divergence is {on_divergence!r}; pass 'raise' or 'mask'")
        if initial_params is not None and initial_values is not None:
            raise ValueError("both initial_params and initial_values are given; pass one of them")
        if store is None and (resume or store_every is not None):
            raise ValueError("resume and store_every need a store, but none is given; pass store=path")
        self.kernel = kernel
        self.num_samples = num_samples
        self.warmup_steps = warmup_steps
        self.num_chains = num_chains
        self.thinning = thinning
        self.initial_params = initial_params
        self.initial_values = initial_values
        self.on_divergence = on_divergence
        self.disable_progbar = disable_progbar
        self.store = None if store is None else Store(store)
        self.resume = resume
        self.store_every = store_every
        self.callback = callback
        self.callback_every = callback_every
        self.diverged: dict[int, Divergence] = {}
        self._ended = "call run() first"
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}
        self._chains: Chains | None = None
        self._draws: Draws | None = None

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Draw ``num_samples`` from each chain.

        An interrupt (Ctrl-C) or a divergence ends the run with an error, and a callback can stop it without
        one. Either way the draws so far stay readable.

        Args:
            *args: the model's positional arguments.
            **kwargs: the model's keyword arguments.

        Raises:
            ValueError: if the model can't be sampled, initial values don't fit it, chains would stay copies
                of each other, the number of temperatures is not that of the chains, or the store holds
                another run.
            DivergenceError: if a chain diverges, unless chains are masked.
            FileExistsError: if the store holds a run, and ``resume`` is not set.
            OSError: if the store can't be written, as when the disk is full.
        """
        self._args, self._kwargs = args, kwargs
        self._draws, self._ended = None, "the run ended before its first draw"
        try:
            self._take_draws()
        except BaseException as error:
            self._ended = f"the run was ended by {type(error).__name__}: {error}".rstrip(": ")
            raise

    def _take_draws(self) -> None:
        """Start or resume the chains, and take the remaining draws."""
        with ExitStack() as stack:
            if self.store is None:
                chains = self._start()
                draws: Draws = DrawsInMemory(chains, Recorder(chains), self.num_samples)
            else:
                stack.callback(self.store.close)
                chains, draws = self._start_with(self.store)
            self._chains, self.diverged = chains, chains.diverged
            self._draws = draws
            stack.callback(draws.close)
            began = time.perf_counter() - draws.sampling_time
            total = self.warmup_steps + self.num_samples
            bar = stack.enter_context(Bar(total, draws.done, self.thinning, disable=self.disable_progbar))
            for draw in range(draws.done, total):
                warming_up = draw < self.warmup_steps
                tick = partial(bar.tick, chains, warming_up=warming_up)
                chains.advance(self.thinning, warming_up=warming_up, tick=tick)
                if not warming_up:
                    draws.append()
                draws.proceed(time.perf_counter() - began)
                if self._stops(chains, draws):
                    break

    def _start(self) -> Chains:
        chains = self.kernel.start(
            self._args,
            self._kwargs,
            num_chains=self.num_chains,
            initial_params=self.initial_params,
            initial_values=self.initial_values,
            on_divergence=self.on_divergence,
        )
        given = self.initial_params is not None or self.initial_values is not None
        refuse_copies(chains, (self.warmup_steps + self.num_samples) * self.thinning, given=given)
        return chains

    def _start_with(self, store: Store) -> tuple[Chains, Draws]:
        """Start the chains; if the store holds a run, as it was started, then restore their state."""
        record = None
        if store.path.exists():
            if not self.resume:
                raise FileExistsError(
                    f"{store.path} already holds a run; pass resume=True to resume it, or another path"
                )
            store.lock()
            record = store.record()
            if not self._warmup_given:
                self.warmup_steps = int(record["identity"]["words"]["warmup_steps"])
            set_random_state(record["start"])
        start, roots = random_state(), self._roots()
        kernel = type(self.kernel).__name__
        numbers = {name: getattr(self, name) for name in ("warmup_steps", "num_chains", "thinning")}
        settings = {"on_divergence": self.on_divergence, "store_every": self.store_every, "kernel": kernel}
        before = fingerprint(roots)
        chains = self._start()
        draws = DrawsOnDisk(
            store,
            chains,
            Recorder(chains),
            self.num_samples,
            block=self.store_every or block_of_draws(chains, self.num_samples),
            identity=identify(roots, before, chains.potential.program, settings | numbers),
            start=start,
            attrs={
                "inference_library": "pyro",
                "kernel": kernel,
                "kernel_settings": kernel_settings(self.kernel),
                "run": numbers,
            },
            record=record,
        )
        return chains, draws

    def _roots(self) -> dict[str, Any]:
        """What the run depends on, by name: model, data and options of the kernel."""
        own = {name: value for name, value in vars(self.kernel).items() if not name.startswith("_")}
        for name in ("model", "transforms", "init_strategy", "thinning"):
            own.pop(name, None)
        kwargs = {f"kwargs[{name!r}]": self._kwargs[name] for name in sorted(self._kwargs)}
        return {"model": self.kernel.model, "args": self._args, **kwargs, **own}

    def _stops(self, chains: Chains, draws: Draws) -> bool:
        """Whether it is the callback's turn and it stops the run."""
        if self.callback is None or draws.done % self.callback_every:
            return False
        progress = Progress(self, chains, draws, self.num_samples, self.warmup_steps)
        self._ended = "the run is in its warm-up"
        stops = asks_to_stop(self.callback, progress)
        self._ended = f"the callback stopped the run after {draws.done} draws of the warm-up"
        return stops

    @property
    def sampling_time(self) -> float:
        """Seconds that the draws took, warm-up and the time before a crash included."""
        return 0.0 if self._draws is None else self._draws.sampling_time

    @property
    def _samples(self) -> Mapping[str, Tensor] | None:
        """Constrained values by site, ``(C, draws, *shape)``, under the name that Pyro's MCMC has."""
        return None if self._draws is None else self._draws.samples()

    def _drawn(self) -> Draws:
        if self._draws is None or self._draws.num_draws == 0:
            raise ValueError(f"there are no draws: {self._ended}")
        return self._draws


def deep_ensemble(
    model: Callable[..., Any],
    *args: Any,
    num_members: int,
    num_steps: int,
    lr: float,
    num_data: int,
    momentum: float = 0.9,
    kernel: type[BAOA] | type[SGHMC] = BAOA,
    model_kwargs: Mapping[str, Any] | None = None,
    initial_params: Mapping[str, Tensor] | None = None,
    initial_values: Mapping[str, Tensor] | None = None,
    **options: Unpack[Options],
) -> VectorizedMCMC:
    r"""Train a deep ensemble or, with another temperature, draw from the posterior.

    Each member is a chain with its own minibatches, started at a draw from the prior. At ``temperature=0``
    (the default) it is ``torch.optim.SGD(lr=lr, momentum=momentum)`` on the loss averaged over the data, and
    the last states are a deep ensemble. At ``temperature=1`` noise is added that turns it into a sampler, and
    the last states are draws from the posterior, if the chains have converged.

    Args:
        model: a Pyro model, with a subsampled plate for minibatches.
        *args: its positional arguments.
        num_members: chains.
        num_steps: steps of each.
        lr: the learning rate for the mean loss.
        num_data: :math:`N`, over which the loss is averaged.
        momentum: of SGD.
        kernel: :class:`~pyro_sym.BAOA` or :class:`~pyro_sym.SGHMC`.
        model_kwargs: the model's keyword arguments.
        initial_params: unconstrained values by site to start from, of shape ``(num_members, *shape)``.
        initial_values: the same as constrained values.
        temperature: 0 by default, which trains an ensemble; at 1 the members are draws.
        init_strategy: by default ``init_to_sample``, a draw from the prior. (Kernels start from
            ``init_to_uniform``, as Pyro's do, which makes weights so large that units saturate.)
        **options: the kernel's other options.

    Returns:
        The run, whose ``get_samples()`` are the members, one a chain.

    Raises:
        ValueError: if members would be copies of each other, as they start at the same point (as with
            ``init_to_pretrained``) and see the same data in each step (all of it, or batches of a loader).

    Example:
        >>> def model(x, y):
        ...     w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("rows", len(x), subsample_size=10) as rows:
        ...         pyro.sample("y", dist.Normal(w * x[rows], 1.0), obs=y[rows])
        >>> x = torch.linspace(-1, 1, 50)
        >>> cold = deep_ensemble(model, x, 2 * x, num_members=4, num_steps=100, lr=0.1, num_data=50)
        >>> warm = deep_ensemble(
        ...     model, x, 2 * x, num_members=4, num_steps=100, lr=0.1, num_data=50, temperature=1.0
        ... )
        >>> cold.get_samples()["w"].shape, bool(cold.get_samples()["w"].std() < warm.get_samples()["w"].std())
        (torch.Size([4]), True)

    References:
        Lakshminarayanan et al. 2017 (arXiv 1612.01474) for ensembles; Duffield et al. 2025 (arXiv
        2406.00104), section 4, for the effect of the noise.
    """
    options = {"temperature": 0.0, "init_strategy": init_to_sample, **options}
    run = VectorizedMCMC(
        kernel.from_sgd(model, lr=lr, momentum=momentum, num_data=num_data, **options),
        num_samples=1,
        warmup_steps=0,
        num_chains=num_members,
        thinning=num_steps,
        initial_params=initial_params,
        initial_values=initial_values,
        disable_progbar=True,
    )
    run.run(*args, **(model_kwargs or {}))
    return run
