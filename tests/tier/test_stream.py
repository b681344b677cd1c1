"""Copies by the calling thread: any dtype, any strides, the same bytes."""

from __future__ import annotations

import pytest
import torch

from tieredkv.tier.copier import Copier, copy_alone
from tieredkv.tier.stream import HostStream

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_is_the_same_to_the_bit(dtype: torch.dtype) -> None:
    """Also of NaNs with a payload, which arithmetic would change."""
    bits = torch.randint(
        0, 2 if dtype is torch.bool else 256, (6, 4, 8, 16 * dtype.itemsize), dtype=torch.uint8
    )
    src = bits.view(dtype).transpose(0, 1)
    dst = torch.zeros(4, 9, 8, 16, dtype=dtype)[:, 2:8]
    HostStream(Copier()).copy(dst, src)
    assert torch.equal(dst.contiguous().view(torch.uint8), src.contiguous().view(torch.uint8))


def test_a_copy_takes_tensors_with_gradients_and_other_shapes_are_refused() -> None:
    src = torch.ones(3, 5, requires_grad=True)
    dst = torch.zeros(3, 5)
    copy_alone([(dst, src)])
    assert dst.sum() == 15
    with pytest.raises(ValueError, match="a copy of"):
        copy_alone([(torch.zeros(3, 4), src)])
