"""Axes as products of atoms: joined, cut wherever they appear, and pinned where they can't be matched."""

from __future__ import annotations

from pyro_sym.network.atoms import Atoms, Axis, Factor
from pyro_sym.symmetry.order import null_space


def sizes(atoms: Atoms, axis: Axis) -> list[int]:
    return [atoms.sizes[factor.atom] for factor in atoms.expand(axis)]


def is_pinned(atoms: Atoms, axis: Axis) -> list[bool]:
    return [atoms.is_pinned(factor.atom) for factor in atoms.expand(axis)]


def test_a_late_cut_reaches_every_axis_of_the_class() -> None:
    atoms = Atoms()
    early, channels, rest = atoms.fresh(12), atoms.fresh(12), atoms.fresh(5)
    atoms.equal(early, channels)
    heads, inner, other = atoms.reshape([channels, rest], [3, 4, 5])
    assert sizes(atoms, early) == [3, 4] and atoms.expand(early) == heads + inner
    assert other == rest
    atoms.pin(heads)
    assert is_pinned(atoms, early) == [True, False]


def test_pinning_spreads_through_joints_made_before_and_after() -> None:
    atoms = Atoms()
    a, b, c = atoms.fresh(6), atoms.fresh(6), atoms.pinned(6)
    atoms.equal(a, b)
    assert is_pinned(atoms, a) == [False]
    atoms.equal(b, c)
    assert is_pinned(atoms, a) == [True]


def test_factors_that_cannot_be_matched_are_pinned() -> None:
    atoms = Atoms()
    (slow, fast), (other_slow, other_fast) = (
        atoms.reshape([atoms.fresh(24)], shape) for shape in ([6, 4], [4, 6])
    )
    result = atoms.equal(slow + fast, other_slow + other_fast)
    assert sizes(atoms, result) == [6, 4]
    assert all(all(is_pinned(atoms, axis)) for axis in (slow, fast, other_slow, other_fast))


def test_axes_of_size_one_have_no_factors() -> None:
    atoms = Atoms()
    axis = atoms.fresh(6)
    assert atoms.expand(atoms.fresh(1)) == ()
    assert atoms.reshape([axis], [1, 6, 1]) == [(), axis, ()]
    assert atoms.chunk(axis, 6, 1) == () and is_pinned(atoms, axis) == [True]


def test_chunks_keep_their_order_and_share_their_units() -> None:
    atoms = Atoms()
    gates = atoms.fresh(20)
    assert sizes(atoms, atoms.chunk(gates, 20, 5)) == [5]
    assert is_pinned(atoms, gates) == [True, False]


def test_signs_multiply_and_cancel() -> None:
    atoms = Atoms()
    x, y, z = (atoms.bit() for _ in range(3))
    (product,) = atoms.multiply(atoms.fresh(4, x), atoms.fresh(4, y))
    assert product.signs == x | y
    atoms.equal((product,), atoms.fresh(4, z))
    assert atoms.constraints() == {atoms.find(product.atom): [x | y | z]}
    assert atoms.forget_signs((product,)) == (Factor(product.atom),)


def test_null_space() -> None:
    # x + y = 0, y + z = 0, and w free: all of x, y, z together, or w.
    x, y, z, w = 1, 2, 4, 8
    assert sorted(null_space([x | y, y | z, x | z], [x, y, z, w])) == [x | y | z, w]
    assert null_space([x, x | y], [x, y]) == []
    assert sorted(null_space([], [x, y])) == [x, y]
