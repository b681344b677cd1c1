"""Columns: what is kept when they grow, and what new elements hold."""

from __future__ import annotations

import numpy as np
import pytest

from tieredkv.table.column import Column


@pytest.mark.parametrize(
    ("shape", "axis", "empty"), [((4,), 0, -1), ((4, 32), 0, 0), ((2, 4), 1, 0), ((3, 2, 4), 2, -1)]
)
def test_growing_keeps_every_value_and_blanks_the_rest(shape: tuple[int, ...], axis: int, empty: int) -> None:
    column = Column(shape, axis, "i4", empty)
    written = column.values.copy()
    for num_rows in (5, 6, 40, 41, 1000):
        value = np.random.default_rng(num_rows).integers(1, 100, column.values.shape)
        column.values[...] = written = value.astype("i4")
        column.grow(num_rows)
        had, new = np.split(column.values, [written.shape[axis]], axis=axis)
        assert column.values.shape[axis] == num_rows
        assert (had == written).all()
        assert (new == empty).all()


def test_growing_within_what_is_set_aside_copies_nothing() -> None:
    column = Column((4,), 0, "i4", -1)
    column.grow(100)
    before = column.values
    column.grow(400)
    before[7] = 7
    assert column.values[7] == 7


def test_a_large_column_is_copied_once_on_its_way_to_a_million_rows() -> None:
    column = Column((1024,), 0, "u1", 0)
    column.grow(20_000)
    before = column.values
    for num_rows in (30_000, 300_000, 1_300_000):
        column.grow(num_rows)
    before[7] = 7
    assert column.values[7] == 7
    assert not column.values[8:].any()


def test_widening_keeps_every_value_and_later_growth_too() -> None:
    column = Column((3, 1, 4), 2, "i4", -1)
    column.values[...] = np.arange(12).reshape(3, 1, 4)
    column.widen(2)
    column.grow(50)
    assert (column.values[:, :1, :4] == np.arange(12).reshape(3, 1, 4)).all()
    assert (column.values[:, 1] == -1).all()
    assert (column.values[:, :, 4:] == -1).all()
