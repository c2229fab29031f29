"""The errors that callers may want to catch apart from the built-in ones."""


class SymmetryError(ValueError):
    """A symmetry that a model does not have, or that can't act on the values at hand."""


class NoDensityError(ValueError):
    """A guide whose density at given points can't be evaluated, so that it can't be averaged over a group."""


class DivergenceError(RuntimeError):
    """A chain whose position, potential energy or gradient is no longer finite."""
