"""Adaptive discriminator augmentation: statistics of the draws, derivatives, channels, resume, controller and bad input."""
import copy
import json
import math
import pytest
import torch
from gan_course.augment import AUG_GROUPS, AUGPIPES, LEAK_LIMIT, AdaController, AugmentPipe, Draws, build_augment
from gan_course.core import UserError
from gan_course.layers import Discriminator
from gan_course.ops import setup_filter
from gan_course.transforms import SYM6, rotate2d, scale2d, translate2d, warp

OPS = [op for group in AUG_GROUPS.values() for op in group]
COLOUR = ('brightness', 'contrast', 'lumaflip', 'hue', 'saturation', 'imgfilter', 'noise')


def seeded(pipe, images, seed=0):
    torch.manual_seed(seed)
    return pipe(images)


def after(pipe, images):
    "The next random number after a call: tells how much of the stream it took."
    seeded(pipe, images)
    return torch.rand(())


# ---------------------------------------------------------------- statistics

def quadrant(n, size=16):
    "n pictures whose upper left quarter is white."
    x = torch.full([n, 1, size, size], -1.)
    x[:, :, :size//2, :size//2] = 1
    return x


def places(y):
    "Which quarter is brightest: 0 upper left, 1 upper right, 2 lower left, 3 lower right."
    h = y.shape[2]//2
    return torch.stack([y[:, 0, i:i+h, j:j+h].mean((1, 2)) for i in (0, h) for j in (0, h)], 1).argmax(1)


@pytest.mark.parametrize('p', [0., 0.3, 1.])
def test_share_of_flips(p):
    place = places(seeded(AugmentPipe(xflip=1).set_p(p), quadrant(4000)))
    assert set(place.tolist()) <= {0, 1}
    assert abs((place == 1).float().mean().item() - p/2) < 0.025


def test_strength_multiplies_p():
    place = places(seeded(AugmentPipe(xflip=0.5).set_p(0.8), quadrant(4000)))
    assert abs((place == 1).float().mean().item() - 0.5*0.8/2) < 0.025


@pytest.mark.parametrize('p', [0.4, 1.])
def test_quarter_turns_are_uniform(p):
    share = places(seeded(AugmentPipe(rotate90=1).set_p(p), quadrant(4000))).bincount(minlength=4)/4000
    want = torch.tensor([1 - 0.75*p] + [p/4]*3)
    assert (share - want).abs().max() < 0.025


@pytest.mark.parametrize('p', [0., 0.36, 1.])
def test_share_of_rotated_pictures(p):
    torch.manual_seed(0)
    G = AugmentPipe(rotate=1).draw_geometry(Draws(6000, torch.tensor(p)), 16, 16)
    turned = (G - torch.eye(3)).abs().amax((1, 2)) > 0
    assert abs(turned.float().mean().item() - p) < 0.025
    if p:
        angle = torch.atan2(G[turned, 1, 0], G[turned, 0, 0])
        share = torch.histc(angle, 12, -math.pi, math.pi)/len(angle)
        assert (share - 1/12).abs().max() < 0.02


@pytest.mark.parametrize('op', ['xint', 'scale', 'aniso', 'xfrac', 'brightness', 'contrast', 'hue', 'saturation', 'imgfilter', 'noise', 'cutout'])
def test_share_of_changed_pictures(op):
    "Each operation changes a share p of the pictures; the draws that change nothing by chance are rare."
    torch.manual_seed(1)
    x = torch.randn(1, 3, 24, 24).expand(1500, -1, -1, -1)
    pipe = AugmentPipe(**{op: 1}).set_p(0.5)
    if op == 'xint': pipe.xint_max = 0.5             # at 1/8 of 24 pixels, one draw in 36 rounds to no shift at all
    if op == 'imgfilter': pipe.imgfilter_bands = [1, 0, 0, 0]
    changed = (pipe(x) - x).abs().amax((1, 2, 3)) > 1e-4
    assert abs(changed.float().mean().item() - 0.5) < 0.05


def test_pictures_are_drawn_independently():
    y = seeded(build_augment('bgc', 1.), quadrant(1).expand(16, 3, -1, -1))
    assert len({tuple(v.flatten().tolist()) for v in y}) == 16


# ---------------------------------------------------------------- identity, determinism, resume

@pytest.mark.parametrize('name', list(AUGPIPES))
def test_strength_zero_changes_nothing(name):
    x = torch.rand(4, 3, 24, 24)*2 - 1
    assert torch.equal(seeded(build_augment(name, 0.), x), x)


@pytest.mark.parametrize('name', list(AUGPIPES))
@pytest.mark.parametrize('channels', [1, 3, 4])
def test_stream_does_not_depend_on_p(name, channels):
    x = torch.rand(4, channels, 24, 24)
    pipe = build_augment(name)
    one, two, three = (after(pipe.set_p(p), x) for p in (0., 0.5, 1.))
    assert one == two == three


def test_seed_decides():
    x, pipe = torch.rand(4, 3, 24, 24), build_augment('bgcfnc', 0.7)
    a, b, c = seeded(pipe, x), seeded(pipe, x), seeded(pipe, x, 1)
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_resume_is_exact():
    "State of the pipe, of torch's generator and of the controller: two rounds in one go equal one round, a restart, one round."
    x, states = torch.rand(4, 3, 16, 16), []

    def round_of(pipe, controller):
        y = pipe(x)
        controller.observe(y.mean((1, 2, 3)) + 0.5)
        pipe.set_p(controller.step(4))
        return y

    torch.manual_seed(0)
    pipe, controller = build_augment('bgc', 0.3), AdaController(interval=2, kimg=0.1, p=0.3)
    for _ in range(3): round_of(pipe, controller)
    states = copy.deepcopy(pipe.state_dict()), json.loads(json.dumps(controller.state_dict())), torch.get_rng_state()
    want = [round_of(pipe, controller) for _ in range(3)]
    pipe2, controller2 = build_augment('bgc'), AdaController(interval=2, kimg=0.1)
    pipe2.load_state_dict(states[0]); controller2.load_state_dict(states[1]); torch.set_rng_state(states[2])
    got = [round_of(pipe2, controller2) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(want, got))
    assert controller2.p == controller.p != 0.3


def test_float64_has_the_same_draws():
    x = torch.rand(4, 3, 24, 24)
    pipe = build_augment('bgcfnc', 0.8)
    a, b = seeded(pipe, x), seeded(pipe, x.double())
    assert b.dtype == torch.float64 and (a - b).abs().max() < 1e-3


def test_inference_mode_leaves_nothing_behind():
    "Matrices made first in inference mode must still serve a training."
    pipe, x = build_augment('bgcf', 1.), torch.rand(2, 3, 37, 37)
    with torch.inference_mode(): pipe(x, 0.3)
    x.requires_grad_()
    pipe(x, 0.3).square().sum().backward()
    assert x.grad.isfinite().all()


def test_autocast_does_not_lower_the_precision():
    pipe, x = build_augment('bgcf', 1.), torch.rand(2, 3, 24, 24)
    with torch.autocast('cpu', dtype=torch.bfloat16): y = pipe(x, 0.3)
    assert y.dtype == torch.float32 and torch.equal(y, pipe(x, 0.3))


# ---------------------------------------------------------------- derivatives

@pytest.mark.parametrize('op', [*OPS, 'all'])
@pytest.mark.parametrize('channels', [1, 4])
def test_twice_differentiable(op, channels):
    torch.manual_seed(0)
    x = torch.randn(2, channels, 5, 6, dtype=torch.float64, requires_grad=True)
    pipe = AugmentPipe(**{k: 1 for k in OPS} if op == 'all' else {op: 1})
    f = lambda x: seeded(pipe, x).square()                        # square: the second derivative is not zero
    assert torch.autograd.gradcheck(f, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, x, fast_mode=True)


def test_r1_through_the_pipe():
    "The gradient of R1 with respect to a weight of D, against finite differences in float64."
    torch.manual_seed(0)
    D = Discriminator(0, 16, 3, channel_base=64, channel_max=4).double()
    pipe, x = build_augment('bgcfnc', 1.), torch.randn(4, 3, 16, 16, dtype=torch.float64)

    def r1():
        img = x.clone().requires_grad_()
        grad, = torch.autograd.grad(D(seeded(pipe, img)).sum(), img, create_graph=True)
        return grad.square().sum((1, 2, 3)).mean()

    weight = D.b16.conv0.weight
    got, = torch.autograd.grad(r1(), weight)
    with torch.no_grad():
        direction = torch.randn_like(weight)
        values = []
        for sign in (1, -1):
            weight += sign*1e-6*direction
            with torch.enable_grad(): values.append(r1().item())
            weight -= sign*1e-6*direction
    slope = (values[0] - values[1])/2e-6
    assert abs((got*direction).sum().item() - slope) < 1e-5*abs(slope) + 1e-9


def test_pipe_keeps_no_enlarged_picture():
    "What autograd keeps for the backward pass does not hold the enlarged picture, up to 36 times the size."
    sizes = []
    x = torch.randn(2, 3, 32, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(tuple(t.shape)) or t, lambda t: t): build_augment('geom')(x, 0.3)
    assert sizes and not [s for s in sizes if len(s) == 4 and s[1] == 3]


# ---------------------------------------------------------------- channels and sizes

@pytest.mark.parametrize('channels', [1, 2, 3, 4])
@pytest.mark.parametrize('size', [(24, 24), (16, 40), (70, 68), (4, 4), (2, 3), (1, 1)])
def test_shapes(channels, size):
    y = seeded(build_augment('bgcfnc', 1.), torch.rand(2, channels, *size))
    assert y.shape == (2, channels, *size) and y.isfinite().all()


@pytest.mark.parametrize('channels', [2, 4])
@pytest.mark.parametrize('op', COLOUR)
def test_colour_leaves_alpha(op, channels):
    x = torch.rand(4, channels, 24, 24)*2 - 1
    y = seeded(AugmentPipe(**{op: 1}), x)
    assert torch.equal(y[:, -1], x[:, -1])
    if not (channels == 2 and op in ('hue', 'saturation')): assert not torch.equal(y[:, :-1], x[:, :-1])


@pytest.mark.parametrize('op', ['rotate', 'xfrac', 'rotate90', 'cutout'])
def test_places_move_with_alpha(op):
    x = torch.rand(4, 1, 24, 24).expand(-1, 4, -1, -1)            # alpha equals red
    y = seeded(AugmentPipe(**{op: 1}), x)
    assert torch.allclose(y[:, 0], y[:, 3], atol=1e-6) and not torch.allclose(y, x, atol=1e-3)


def test_grey_equals_mean_of_colour():
    grey = torch.rand(4, 1, 24, 24)
    pipe = AugmentPipe(brightness=1, contrast=1, lumaflip=1)
    a, b = seeded(pipe, grey), seeded(pipe, grey.expand(-1, 3, -1, -1))
    assert torch.allclose(a, b.mean(1, keepdim=True), atol=1e-5)


# ---------------------------------------------------------------- bad input

@pytest.mark.parametrize('shape', [(3, 16, 16), (1, 0, 16, 16), (1, 5, 16, 16), (0, 3, 16, 16), (2, 3, 0, 16)])
def test_wrong_channels(shape):
    with pytest.raises(UserError, match=r'images: no batch of pictures \(found \[.*Next'): build_augment()(torch.rand(shape))


@pytest.mark.parametrize('dtype', [torch.uint8, torch.float16, torch.bfloat16])
def test_wrong_precision(dtype):
    with pytest.raises(UserError, match='float32 or float64.*Next: convert'): build_augment()(torch.zeros(1, 3, 16, 16, dtype=dtype))


@pytest.mark.parametrize('p', [-0.01, 1.01, math.nan, math.inf])
def test_p_outside_its_range(p):
    for call in (lambda: AugmentPipe().set_p(p), lambda: build_augment('bgc', p), lambda: AdaController(p=p)):
        with pytest.raises(UserError, match='^p: not .*0 to 1'): call()


@pytest.mark.parametrize('name,near', [('bcg', "'bg"), ('blitt', "'blit'"), ('colour', "'color'")])
def test_unknown_preset_names_near_ones(name, near):
    with pytest.raises(UserError, match='augpipe: unknown value') as e: build_augment(name)
    assert f'did you mean {near}' in str(e.value) and all(k in str(e.value) for k in AUGPIPES)


@pytest.mark.parametrize('kw', [dict(hue=-1), dict(scale_std=math.nan), dict(xflip='yes'), dict(imgfilter_bands=[1, 1, 1]), dict(imgfilter_bands=1)])
def test_bad_settings(kw):
    with pytest.raises(UserError, match=f'{list(kw)[0]}: not an augmentation setting'): AugmentPipe(**kw)


# ---------------------------------------------------------------- presets

def test_presets_are_sums_of_groups():
    for name, groups in AUGPIPES.items():
        pipe = build_augment(name)
        assert [op for op in OPS if getattr(pipe, op)] == [op for g in AUG_GROUPS if g in groups for op in AUG_GROUPS[g]]
    assert list(AUGPIPES) == 'blit geom color filter noise cutout bg bgc bgcf bgcfn bgcfnc'.split()


def test_init_kwargs_rebuild_the_pipe():
    a = AugmentPipe(xflip=1, hue=0.5, imgfilter=1, imgfilter_bands=[1, 0, 0, 1]).set_p(0.4)
    b = AugmentPipe(**json.loads(json.dumps(a.init_kwargs)))
    b.load_state_dict(a.state_dict())
    x = torch.rand(2, 3, 24, 24)
    assert torch.equal(seeded(a, x), seeded(b, x))


# ---------------------------------------------------------------- controller

def test_controller_follows_the_official_rule():
    c, want = AdaController(), 0.
    for mean in (0.9, 0.7, 0.6, 0.2, 1., -1., -1., 0.61):
        want = max(0., want + ((mean > 0.6) - (mean < 0.6))*4*64/500_000)
        assert c.update(mean, 64) == pytest.approx(want, abs=1e-12)


def test_step_waits_for_its_interval_and_averages_by_count():
    c = AdaController(interval=4, kimg=1)
    ps = []
    for i in range(8):
        c.observe(torch.ones(6) if i % 4 else -torch.ones(2))      # (3*6 - 2)/20 = 0.8 over each round
        ps.append(c.step(10))
    assert ps == pytest.approx([0, 0, 0, .04, .04, .04, .04, .08])
    assert all(isinstance(v, (int, float, bool)) for v in c.state_dict().values())


def test_step_without_observation_keeps_p():
    c = AdaController(p=0.5, interval=1)
    assert c.step(8) == 0.5


def test_fixed_strength():
    c = AdaController(target=None, p=0.2, interval=1)
    c.observe(torch.ones(4))
    assert c.step(32) == 0.2 and c.update(1., 32) == 0.2


def test_leak_warning_once():
    c = AdaController(p=LEAK_LIMIT, interval=1, kimg=1)
    assert c.leak_warning() is None
    c.update(1., 10)
    again = AdaController()
    text = c.leak_warning()
    assert 'p = 0.81' in text and 'Next:' in text and c.leak_warning() is None
    again.load_state_dict(c.state_dict())
    assert again.leak_warning() is None                            # not again after a resume


@pytest.mark.parametrize('kw', [dict(target=2), dict(interval=0), dict(kimg=0), dict(kimg=-1), dict(target=math.nan)])
def test_bad_controller(kw):
    with pytest.raises(UserError, match=f'^{list(kw)[0]}: not a setting'): AdaController(**kw)


@pytest.mark.parametrize('mean', [math.nan, 1.5, -2])
def test_bad_mean_of_signs(mean):
    with pytest.raises(UserError, match='signs_mean'): AdaController().update(mean, 8)


@pytest.mark.parametrize('state', [{}, {'p': 0.5}, {**AdaController().state_dict(), 'more': 1}, {**AdaController().state_dict(), 'p': 3}])
def test_bad_state(state):
    with pytest.raises(UserError, match='^state'): AdaController().load_state_dict(state)


# ---------------------------------------------------------------- GPU

@pytest.mark.gpu
def test_gpu_warps_as_cpu():
    "The same matrices, in float64: white noise, the hardest picture, is read alike."
    x, angle = torch.rand(4, 3, 64, 64, dtype=torch.float64), torch.tensor([0.1, 0.8, 2.0, 3.0], dtype=torch.float64)
    G_inv = rotate2d(angle) @ scale2d(1.3, 0.8).double() @ translate2d(3.7, -2.2).double()
    f = setup_filter(SYM6).double()
    a, b = warp(x, G_inv, f), warp(x.cuda(), G_inv.cuda(), f.cuda())
    assert (a - b.cpu()).abs().max() < 1e-10


@pytest.mark.gpu
@pytest.mark.parametrize('name', [n for n in AUGPIPES if n not in ('noise', 'bgcfn', 'bgcfnc')])          # the noise itself is random
def test_gpu_equals_cpu(name):
    "Drawn parameters are float32, so that sines and powers differ by its rounding: 64 px * 2**-23 is 8e-6 px, times a slope of at most 0.4 per px in these pictures."
    t = torch.linspace(0, 6.28, 64, dtype=torch.float64)
    x = (torch.sin(3*t)[:, None]*torch.cos(2*t) + torch.linspace(-.3, .3, 12, dtype=torch.float64).reshape(4, 3, 1, 1)).contiguous()
    a, b = build_augment(name)(x, 0.3), build_augment(name).cuda()(x.cuda(), 0.3)
    assert (a - b.cpu()).abs().max() < 1e-5


@pytest.mark.gpu
def test_gpu_second_derivative():
    small = torch.randn(2, 3, 6, 6, dtype=torch.float64, device='cuda', requires_grad=True)
    pipe = build_augment('bgcf').cuda()
    assert torch.autograd.gradgradcheck(lambda x: pipe(x, 0.3).square(), small, fast_mode=True, nondet_tol=1e-9)
