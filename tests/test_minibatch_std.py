"""Minibatch standard deviation on batches that the group does not divide, and on the values of a known pattern."""
import pytest
import torch

from gan_course.core import UserError
from gan_course.layers import Discriminator, MinibatchStdLayer, minibatch_std


def test_each_sample_carries_the_value_of_its_own_group():
    "12 samples, groups of 4: the groups are samples 0 3 6 9, 1 4 7 10 and 2 5 8 11; group k holds 0, 0, 2(k+1), 2(k+1), so its deviation is k+1."
    x = torch.tensor([[0., 0, 0, 0, 0, 0, 2, 4, 6, 2, 4, 6]]).T.reshape(12, 1, 1, 1).expand(12, 3, 2, 2)
    extra = minibatch_std(x, 4)[:, 3]
    for sample in range(12): torch.testing.assert_close(extra[sample], torch.full((2, 2), sample % 3 + 1.0))


@pytest.mark.parametrize("batch,group", [(1, 1), (2, 2), (3, 3), (4, 4), (5, 1), (6, 3), (7, 1), (8, 4), (9, 3), (10, 2)])
def test_the_group_is_the_largest_that_divides_the_batch(batch, group):
    x = torch.randn(batch, 4, 2, 2, generator=torch.Generator().manual_seed(batch))
    assert torch.equal(MinibatchStdLayer(4)(x), minibatch_std(x, group))


def test_a_short_last_batch_goes_through_the_discriminator():
    D = Discriminator(0, 8, 3, channel_base=64, channel_max=8)
    for batch in (1, 5, 6): assert D(torch.randn(batch, 3, 8, 8), torch.zeros(batch, 0)).shape == (batch, 1)


@pytest.mark.parametrize("kwargs", [dict(group_size=0), dict(num_channels=0), dict(num_channels=3)])
def test_impossible_groups_are_refused(kwargs):
    with pytest.raises(UserError, match="group_size|num_channels"): minibatch_std(torch.randn(4, 4, 2, 2), **kwargs)
