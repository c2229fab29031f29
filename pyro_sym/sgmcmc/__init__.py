r"""Stochastic-gradient MCMC: kernels, and the chains that they drive.

A kernel is a value (:mod:`~pyro_sym.sgmcmc.kernel`); each family of them has a file with its formula.
Symbols, in all of them: position :math:`u`, momentum :math:`m`, gradient :math:`\nabla U` of the potential
energy, standard normal noise :math:`\xi`, step size :math:`h`, friction :math:`\gamma`, temperature
:math:`T`, inverse mass :math:`G`, and :math:`\hat B`, an estimate of the variance that minibatches give each
coordinate of the gradient. The target is :math:`\exp(-U(u) / T)`; momenta have the law :math:`N(0, T / G)`.

===================================== ======================= ====================== ====================
kernel                                order of the position's stable on curvature λ, temperature added by
                                      law in h                x = h²λ, G = 1         gradient noise V
===================================== ======================= ====================== ====================
:class:`~pyro_sym.SGLD`               1                       hλ < 2                 hV / 2
:class:`~pyro_sym.LeimkuhlerMatthews` 2, exact on Gaussians   hλ < 2                 hV / 2
:class:`~pyro_sym.SGHMC`              2                       x < 4 - 2γh            hV / 2γ
:class:`~pyro_sym.BAOA`               2, exact on Gaussians   x < 4                  hV / 2γ
:class:`~pyro_sym.SGNHT`              2                       x < 4 - 2ζh            none
===================================== ======================= ====================== ====================
"""
