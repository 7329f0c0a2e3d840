"""Losses against arithmetic done by hand, in float64, and their behaviour at the edges."""
import math
import pytest
import torch

from gan_course.core import UserError
from gan_course.losses import (d_logistic_fake, d_logistic_real, g_nonsaturating, lazy_adam, path_length_penalty,
                               path_lengths, r1_penalty)


def mlp(n_in, n_out):
    return torch.nn.Sequential(torch.nn.Linear(n_in, 7), torch.nn.Softplus(), torch.nn.Linear(7, n_out)).double()


@pytest.mark.parametrize("loss, sign", [(d_logistic_real, -1), (g_nonsaturating, -1), (d_logistic_fake, 1)])
def test_logistic_losses_are_softplus_per_sample_and_finite(loss, sign):
    t = torch.tensor([[-1e4], [-3.], [0.], [3.], [1e4]], requires_grad=True)
    out = loss(t)
    assert out.shape == t.shape and torch.isfinite(out).all()
    mid = torch.log1p(torch.exp(sign * t[1:4].detach()))
    torch.testing.assert_close(out[1:4].detach(), mid)
    grad, = torch.autograd.grad(out.sum(), t)
    torch.testing.assert_close(grad, sign * torch.sigmoid(sign * t.detach()))


def test_r1_value_is_the_squared_norm_of_each_pictures_gradient():
    torch.manual_seed(0)
    D, x = torch.nn.Sequential(torch.nn.Flatten(), mlp(2 * 9, 1)), torch.randn(4, 2, 3, 3, dtype=torch.double)
    img = x.clone().requires_grad_()
    got = r1_penalty(D(img), img)
    J = torch.autograd.functional.jacobian(lambda i: D(i).squeeze(1), x)
    want = torch.stack([J[i, i].square().sum() for i in range(4)])
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)


def test_r1_second_derivative_matches_finite_differences():
    torch.manual_seed(1)
    x, a = torch.randn(2, 1, 2, 2), torch.tensor(.8, requires_grad=True)

    def penalty(a):
        img = x.clone().requires_grad_()
        return r1_penalty((a * img.pow(3)).flatten(1).sum(1), img).sum()
    got, = torch.autograd.grad(penalty(a), a)
    torch.testing.assert_close(got, 2 * a.detach() * (3 * x ** 2).square().sum(), rtol=1e-4, atol=1e-4)


def test_r1_does_not_depend_on_a_loss_scaler():
    torch.manual_seed(0)
    D = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    img = torch.randn(3, 3, 2, 2, requires_grad=True)
    want = r1_penalty(D(img), img)
    for scale in (2. ** 8, 2. ** 16):
        torch.testing.assert_close(r1_penalty(D(img), img, scale=scale), want)
        p = D[1].weight
        scaled, = torch.autograd.grad(scale * r1_penalty(D(img), img).sum(), p)
        plain, = torch.autograd.grad(r1_penalty(D(img), img).sum(), p)
        torch.testing.assert_close(scaled / scale, plain)


def test_r1_is_float32_for_half_precision_pictures():
    img = torch.full((1, 3, 64, 64), 1., dtype=torch.bfloat16, requires_grad=True)
    out = r1_penalty((img * 40).sum((1, 2, 3)), img)
    assert out.dtype == torch.float32 and out.item() == 3 * 64 * 64 * 1600


def test_path_lengths_equal_the_full_jacobian():
    torch.manual_seed(0)
    net, w = mlp(6, 2 * 16), torch.randn(3, 4, 6, dtype=torch.double)
    mix = torch.tensor([.1, .2, .3, .9], dtype=torch.double)[None, :, None]
    G = lambda ws: net((ws * mix).sum(1)).view(-1, 2, 4, 4)
    y, ws = torch.randn(3, 2, 4, 4, dtype=torch.double), w.clone().requires_grad_()
    got = path_lengths(G(ws), ws, noise=y)
    J = torch.autograd.functional.jacobian(G, w)
    want = torch.stack([torch.einsum("chw,chwlk->lk", y[i] / 4, J[i, :, :, :, i]).square().sum(1).mean().sqrt() for i in range(3)])
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)


def test_path_lengths_draw_fresh_noise_and_reach_the_weights():
    torch.manual_seed(0)
    net = mlp(6, 16).float()
    ws = torch.randn(2, 3, 6, requires_grad=True)
    img = net(ws.mean(1)).view(2, 1, 4, 4)
    a, b = path_lengths(img, ws), path_lengths(img, ws)
    assert not torch.equal(a, b)
    a.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters() if p.grad is not None)
    assert net[0].weight.grad.abs().sum() > 0


def test_mean_inside_the_path_penalty_is_not_detached_but_the_stored_one_is():
    ell = torch.tensor([1., 5., 9., 2.], dtype=torch.double, requires_grad=True)
    old = torch.tensor(3., dtype=torch.double)
    for decay in (.01, .5):
        penalty, mean = path_length_penalty(ell, old, decay=decay)
        assert not mean.requires_grad
        torch.testing.assert_close(mean, old + decay * (ell.detach().mean() - old))
        got, = torch.autograd.grad(penalty.mean(), ell)
        off = ell.detach() - mean
        torch.testing.assert_close(got, 2 / 4 * (off - decay / 4 * off.sum()))


@pytest.mark.parametrize("k", [1, 4, 16])
def test_lazy_adam_keeps_the_sum_of_steps_and_the_memory(k):
    s = lazy_adam(.002, betas=(.5, .99), interval=k)
    assert math.isclose(s["lr"] * (k + 1), .002 * k)
    assert math.isclose(s["betas"][0] ** (k + 1), .5 ** k) and math.isclose(s["betas"][1] ** (k + 1), .99 ** k)
    assert all(type(v) is float for v in (s["lr"], s["eps"], *s["betas"]))


def test_lazy_adam_without_a_regulariser_changes_nothing():
    assert lazy_adam(1e-3, betas=(0, .9)) == dict(lr=1e-3, betas=(0., .9), eps=1e-8)


@pytest.mark.parametrize("call, words", [
    (lambda: r1_penalty(torch.zeros(1), torch.zeros(1, 3, 2, 2)), "requires_grad_"),
    (lambda: path_lengths(torch.zeros(1, 3, 2, 2), torch.zeros(1, 5)), "L, w_dim"),
    (lambda: path_lengths(torch.zeros(1, 3, 2, 2), torch.zeros(1, 2, 5)), "G.synthesis"),
    (lambda: lazy_adam(.1, interval=0), "at least 1")])
def test_errors_name_the_next_step(call, words):
    with pytest.raises(UserError, match=words): call()
