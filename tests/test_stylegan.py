"""StyleGAN configurations a to d and progressive growing: networks at every level, the timetable, bad input."""
import json
import math
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from gan_course.checkpoint import load_checkpoint, save_checkpoint
from gan_course.core import UserError
from gan_course.growing import GrowingPoint, GrowingSchedule, adam_reset_due, fade_reals
from gan_course.losses import path_length_penalty, path_lengths, r1_penalty
from gan_course.stylegan import (AdaINLayer, StyleGANDiscriminator, StyleGANGenerator, adain, box_downsample, build_stylegan, nearest_upsample,
                                 split_level)
from gan_course.stylegan2 import Generator
from gan_course.training import mixed_ws, update_ema

FIXTURES = Path(__file__).parent/'fixtures'/'stylegan'
STYLES, BLURS = ['adain', 'modulated'], ['a', 'b-d']
TINY = dict(img_channels=3, channel_base=256, channel_max=8)
LODS32 = [0, 0.25, 0.5, 1, 1.75, 2, 2.5, 3]


def make_G(style='adain', res=32, **kw):
    torch.manual_seed(1)
    G = StyleGANGenerator(**{**dict(z_dim=8, c_dim=0, w_dim=8, img_resolution=res, style=style, mapping_kwargs=dict(num_layers=2)), **TINY, **kw})
    return stir(G)


def make_D(blur='a', res=32, **kw):
    torch.manual_seed(2)
    return stir(StyleGANDiscriminator(**{**dict(c_dim=0, img_resolution=res, blur=blur), **TINY, **kw}))


def stir(net):
    "Biases and noise strengths start at 0 and would hide faults: give every parameter a little of something."
    with torch.no_grad():
        for p in net.parameters(): p.add_(0.1*torch.randn_like(p))
    return net


def fails(make, *words):
    "`make` raises a UserError in which all words occur, and which says what to do next."
    with pytest.raises(UserError) as e: make()
    text = str(e.value)
    for word in words: assert word in text, text
    assert 'Next:' in text, text


def distance(a, b): return ((a-b).norm()/b.norm()).item()


def calls(net, *args, **kw):
    "Names of the submodules that one call of `net` calls."
    seen = set()
    hooks = [m.register_forward_hook(lambda m, a, o, n=n: seen.add(n)) for n, m in net.named_modules() if n]
    net(*args, **kw)
    for h in hooks: h.remove()
    return seen


def trained(net): return {n for n, p in net.named_parameters() if p.grad is not None}


# ---------------------------------------------------------------- shapes, levels, and what sleeps

@pytest.mark.parametrize('res', [8, 16, 32, 64])
@pytest.mark.parametrize('style,blur', list(zip(STYLES, BLURS)))
def test_shapes_at_all_levels(res, style, blur):
    G, D, top = make_G(style, res), make_D(blur, res), int(math.log2(res)) - 2
    assert G.num_ws == 2*int(math.log2(res)) - 2
    for lod in [i/2 for i in range(2*top + 1)]:
        img = G.set_lod(lod)(torch.randn(2, 8))
        assert img.shape == (2, 3, res, res) and img.dtype == torch.float32 and img.isfinite().all()
        logits = D.set_lod(lod)(img)
        assert logits.shape == (2, 1) and logits.isfinite().all()
        k = 2**int(lod)                                          # an image below its level is made of equal squares
        torch.testing.assert_close(nearest_upsample(box_downsample(img, k), k), img, rtol=1e-5, atol=1e-5)


def test_generator_of_4x4():
    for style in STYLES:
        G = make_G(style, 4)
        assert G.num_ws == 2 and G(torch.randn(2, 8)).shape == (2, 3, 4, 4)
        fails(lambda: G.set_lod(0.1), 'lod', '0.1')


@pytest.mark.parametrize('channels', [1, 4])
def test_other_channels(channels):
    img = make_G(img_channels=channels).set_lod(0.5)(torch.randn(2, 8))
    assert make_D(img_channels=channels).set_lod(0.5)(img).shape == (2, 1)


@pytest.mark.parametrize('style', STYLES)
@pytest.mark.parametrize('lod', [0, 0.5, 1, 1.5, 2, 3])
def test_generator_calls_only_what_is_awake(style, lod):
    G, side = make_G(style), 32 >> int(lod)
    seen = calls(G.set_lod(lod), torch.randn(2, 8))
    blocks = {n.split('.')[1] for n in seen if n.startswith('synthesis.b')}
    assert blocks == {f'b{r}' for r in (4, 8, 16, 32) if r <= side}
    rgbs = {n.split('.')[1] for n in seen if n.endswith('.torgb')}
    assert rgbs == ({f'b{side}', f'b{side//2}'} if lod % 1 else {f'b{side}'})
    G(torch.randn(2, 8)).square().sum().backward()
    assert {n.split('.')[1] for n in trained(G) if n.startswith('synthesis')} == blocks
    assert {n.split('.')[1] for n in trained(G) if '.torgb' in n} == rgbs
    assert G.num_ws_active == 2*int(math.log2(side)) - 2


@pytest.mark.parametrize('blur', BLURS)
@pytest.mark.parametrize('lod', [0, 0.5, 1, 1.5, 2, 3])
def test_discriminator_calls_only_what_is_awake(blur, lod):
    D, side = make_D(blur), 32 >> int(lod)
    seen = calls(D.set_lod(lod), torch.randn(2, 3, 32, 32))
    blocks = {f'b{r}' for r in (4, 8, 16, 32) if r <= side}
    assert {n.split('.')[0] for n in seen if n[0] == 'b'} == blocks
    rgbs = {str(side), str(side//2)} if lod % 1 else {str(side)}
    assert {n.split('.')[1] for n in seen if n.startswith('fromrgb.')} == rgbs
    D(torch.randn(2, 3, 32, 32)).sum().backward()
    assert {n.split('.')[0] for n in trained(D) if n[0] == 'b'} == blocks
    assert {n.split('.')[1] for n in trained(D) if n.startswith('fromrgb.')} == rgbs


@pytest.mark.parametrize('style', STYLES)
def test_rows_of_ws_that_sleep_do_not_matter(style):
    G, ws = make_G(style), torch.randn(2, 8, 8)
    for lod in (0, 1, 1.5, 3):
        n = G.set_lod(lod).num_ws_active
        base, other = G.synthesis(ws, 'const'), ws.clone()
        other[:, n:] = 7
        assert torch.equal(G.synthesis(other, 'const'), base)
        for row in range(n):                                     # and each one that is awake does
            other = ws.clone()
            other[:, row] = 7
            assert distance(G.synthesis(other, 'const'), base) > 1e-5, (lod, row)


# ---------------------------------------------------------------- continuity

@pytest.mark.parametrize('style,blur', list(zip(STYLES, BLURS)))
@pytest.mark.parametrize('lod', [1, 2])
def test_continuous_in_the_level(style, blur, lod):
    G, D, z, x = make_G(style), make_D(blur), torch.randn(4, 8), torch.randn(4, 3, 32, 32)
    img, logits = G.set_lod(lod)(z, noise_mode='const'), D.set_lod(lod)(x)
    for near in (lod - 1e-6, lod + 1e-6):
        assert distance(G.set_lod(near)(z, noise_mode='const'), img) < 1e-5
        assert distance(D.set_lod(near)(x), logits) < 1e-5
        assert distance(fade_reals(x, near), fade_reals(x, lod)) < 1e-5
    for far in (lod - 0.4, lod + 0.4):                           # and not because nothing ever changes
        assert distance(G.set_lod(far)(z, noise_mode='const'), img) > 1e-2
        assert distance(D.set_lod(far)(x), logits) > 1e-3


@pytest.mark.parametrize('style', STYLES)
def test_a_fade_of_the_generator_is_linear(style):
    G, z = make_G(style), torch.randn(2, 8)
    at = lambda lod: G.set_lod(lod)(z, noise_mode='const')
    fine, coarse = at(1), at(2)
    for t in (0.25, 0.5, 0.9): torch.testing.assert_close(at(1 + t), (1-t)*fine + t*coarse, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- against other implementations

def test_full_size_modulated_is_the_orig_generator():
    G = make_G('modulated')
    other = Generator(8, 0, 8, 32, architecture='orig', mapping_kwargs=dict(num_layers=2, w_avg_beta=0.995), **TINY)
    state, want = G.state_dict(), other.state_dict()
    other.load_state_dict({k: state.get(k, want[k]) for k in want})
    missing = [k for k in want if k not in state]
    assert all(k.endswith('resample_filter') for k in missing), missing    # filters only: they are no parameters
    z = torch.randn(3, 8)
    for net in (G, other): net.eval()
    assert distance(G(z, noise_mode='const'), other(z, noise_mode='const')) < 1e-6


def official_discriminator(dtype):
    "The numbers of the papers' PyTorch code for its `orig` discriminator, and our network with its weights."
    tensors = load_file(FIXTURES/'sg2_discriminator_orig.safetensors')
    weights = {k.removeprefix('weights.'): v for k, v in tensors.items() if k.startswith('weights.') and not k.endswith('resample_filter')}
    weights = {k.replace('b32.fromrgb.', 'fromrgb.32.'): v for k, v in weights.items()}
    D = StyleGANDiscriminator(0, 32, 3, blur='b-d', channel_base=512, channel_max=16)
    result = D.load_state_dict(weights, strict=False)
    assert not result.unexpected_keys
    assert all(k.startswith(('fromrgb.16.', 'fromrgb.8.', 'fromrgb.4.')) or k.endswith('resample_filter') or k == 'lod' for k in result.missing_keys)
    return tensors, D.to(dtype)


@pytest.mark.parametrize('dtype,limit', [(torch.float64, 1e-9), (torch.float32, 5e-6)])
def test_full_size_discriminator_gives_the_official_numbers(dtype, limit):
    t, D = official_discriminator(dtype)
    img = t['img'].to(dtype).requires_grad_()
    logits = D(img)
    grad, = torch.autograd.grad(logits.sum(), img, create_graph=True)
    penalty = grad.square().sum((1, 2, 3))
    for found, name in ((logits, 'logits'), (grad, 'r1_grad_img'), (penalty, 'r1_penalty')):
        assert distance(found.double(), t[f'{name}.f64']) < limit, name
    (5*penalty).mean().backward()                                # second order, gamma 10
    for ours, name in ((D.fromrgb['32'], 'b32.fromrgb'), (D.b8.conv1, 'b8.conv1'), (D.b4.fc, 'b4.fc')):
        assert distance(ours.weight.grad.double(), t[f'r1_grad.{name}.weight'].double()) < max(limit, 1e-7), name


def test_small_discriminator_is_a_part_of_the_large_one():
    large, x = make_D('b-d', 32), torch.randn(4, 3, 8, 8)
    small = StyleGANDiscriminator(0, 8, blur='b-d', **TINY)
    small.load_state_dict({k: v for k, v in large.state_dict().items() if k in small.state_dict()})
    torch.testing.assert_close(large.set_lod(2)(nearest_upsample(x, 4)), small(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(large.set_lod(2.5)(nearest_upsample(x, 4)), small.set_lod(0.5)(x), rtol=1e-5, atol=1e-5)


def test_adain_is_instance_norm_with_style():
    x, style = torch.randn(3, 5, 9, 7, dtype=torch.float64)*3 + 1, torch.randn(3, 10, dtype=torch.float64)
    for n in range(3):
        for c in range(5):
            v = x[n, c]
            want = (v - v.mean())/(((v - v.mean())**2).mean() + 1e-8)**.5*(1 + style[n, c]) + style[n, 5 + c]
            torch.testing.assert_close(adain(x, style)[n, c], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize('up', [1, 2])
def test_adain_layer_word_by_word(up):
    torch.manual_seed(0)
    L, x, w = stir(AdaINLayer(6, 4, 8, resolution=8*up, up=up)), torch.randn(2, 6, 8, 8), torch.randn(2, 8)
    y = x.repeat_interleave(up, 2).repeat_interleave(up, 3)
    y = F.conv2d(y, L.weight*(2/54)**.5, padding=1)
    if up == 2:
        blur = torch.tensor([[1., 2, 1], [2, 4, 2], [1, 2, 1]])/16
        y = F.conv2d(y, blur.expand(4, 1, 3, 3), padding=1, groups=4)
    y = F.leaky_relu(y + L.noise_const*L.noise_strength[:, None, None] + L.bias[:, None, None], 0.2)
    s, b = (F.linear(w, L.affine.weight/8**.5, L.affine.bias)[:, :, None, None]).chunk(2, 1)
    assert distance(L(x, w, 'const'), (s + 1)*F.instance_norm(y, eps=1e-8) + b) < 1e-5


def test_image_does_not_depend_on_its_batch():
    for style in STYLES:
        G, z = make_G(style).set_lod(0.5), torch.randn(4, 8)
        torch.testing.assert_close(G(z, noise_mode='const')[2:3], G(z[2:3], noise_mode='const'), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- gradients

def quotient(value, weight, step, h=1e-6):
    "Difference quotient of `value()` along `step`."
    with torch.no_grad(): weight.add_(h*step)
    up = value().item()
    with torch.no_grad(): weight.sub_(2*h*step)
    down = value().item()
    with torch.no_grad(): weight.add_(h*step)
    return (up - down)/(2*h)


@pytest.mark.parametrize('blur', BLURS)
@pytest.mark.parametrize('lod', [0, 0.5, 1, 1.25])
def test_r1_in_second_order(blur, lod):
    D, x = make_D(blur, 16).double().set_lod(lod), torch.randn(4, 3, 16, 16, dtype=torch.float64)

    def penalty():
        y = x.clone().requires_grad_()
        grad, = torch.autograd.grad(D(y).sum(), y, create_graph=True)
        return grad.square().sum((1, 2, 3)).mean()

    weights = [D.fromrgb[str(16 >> int(lod))].weight, getattr(D, f'b{16 >> int(lod)}').conv1.weight, D.b4.conv.weight]
    if lod % 1: weights.append(D.fromrgb[str(8 >> int(lod))].weight)
    for w, grad in zip(weights, torch.autograd.grad(penalty(), weights)):
        step = torch.randn_like(w)
        assert (grad*step).sum().item() == pytest.approx(quotient(penalty, w, step), rel=1e-4, abs=1e-10)


@pytest.mark.parametrize('style', STYLES)
@pytest.mark.parametrize('lod', [0, 0.5, 1])
def test_path_length_in_second_order(style, lod):
    G = make_G(style, 16).double().set_lod(lod)
    ws, y = torch.randn(2, 6, 8, dtype=torch.float64).requires_grad_(), torch.randn(2, 3, 16, 16, dtype=torch.float64)

    def penalty():
        grad, = torch.autograd.grad((G.synthesis(ws, 'const')*y).sum(), ws, create_graph=True)
        return (grad.square().sum(2).mean(1).sqrt() - 0.1).square().mean()

    weights = [getattr(G.synthesis, f'b{16 >> int(lod)}').conv0.weight, G.synthesis.b8.conv1.weight, G.synthesis.b8.conv1.affine.weight]
    for w, grad in zip(weights, torch.autograd.grad(penalty(), weights)):
        step = torch.randn_like(w)
        assert (grad*step).sum().item() == pytest.approx(quotient(penalty, w, step), rel=1e-4, abs=1e-8)
    img = G.synthesis(ws, 'const')
    by_ws, = torch.autograd.grad(img.square().sum(), ws)
    assert by_ws[:, G.num_ws_active:].eq(0).all() and all(by_ws[:, i].norm() > 0 for i in range(G.num_ws_active))


def test_path_length_penalty_as_training_uses_it():
    G = make_G('modulated', 16).set_lod(0.5)
    ws = G.mapping(torch.randn(4, 8))
    penalty, mean = path_length_penalty(path_lengths(G.synthesis(ws), ws), torch.zeros([]))
    penalty.mean().backward()
    assert G.mapping.fc0.weight.grad.norm() > 0 and G.synthesis.b16.conv0.weight.grad.norm() > 0


def test_r1_has_the_scale_of_full_size_pixels():
    D, x = make_D('b-d', 32), torch.randn(4, 3, 8, 8)
    small = StyleGANDiscriminator(0, 8, blur='b-d', **TINY)
    small.load_state_dict({k: v for k, v in D.state_dict().items() if k in small.state_dict()})
    full, part = nearest_upsample(x, 4).requires_grad_(), x.clone().requires_grad_()
    torch.testing.assert_close(r1_penalty(D.set_lod(2)(full), full)*16, r1_penalty(small(part), part), rtol=1e-4, atol=1e-7)


# ---------------------------------------------------------------- labels, truncation, the parts that training uses

@pytest.mark.parametrize('style,blur', list(zip(STYLES, BLURS)))
def test_conditional(style, blur):
    G, D = make_G(style, c_dim=3).set_lod(0.5), make_D(blur, c_dim=3).set_lod(0.5)
    z, c, x = torch.randn(4, 8), torch.eye(3)[[0, 1, 2, 0]], torch.randn(4, 3, 32, 32)
    assert distance(G(z, c.roll(1, 1), noise_mode='const'), G(z, c, noise_mode='const')) > 1e-3
    outputs = []
    hook = D.b4.out.register_forward_hook(lambda m, a, o: outputs.append(o))
    logits = D(x, c)
    hook.remove()
    torch.testing.assert_close(logits, (outputs[0]*c).sum(1, keepdim=True), rtol=1e-5, atol=1e-6)    # the label picks its output
    mixed = torch.rand(4, 3)
    parts = sum(D(x, torch.eye(3)[[k]*4])*mixed[:, k:k+1] for k in range(3))
    torch.testing.assert_close(D(x, mixed), parts, rtol=1e-4, atol=1e-5)   # linear in the label
    for bad in (None, torch.eye(3)[:2], torch.eye(4)):
        fails(lambda: G(z, bad), 'c: ')
        fails(lambda: D(x, bad), 'c: ')


@pytest.mark.parametrize('style', STYLES)
def test_mapping_interface(style):
    G, z = make_G(style).train(), torch.randn(5, 8)
    before = G.mapping.w_avg.clone()
    G(z)
    assert torch.equal(G.mapping.w_avg, before)
    G(z, update_emas=True)
    torch.testing.assert_close(G.mapping.w_avg, 0.005*G.mapping(z)[:, 0].mean(0))   # the TensorFlow code's 0.995
    flat = G(z, truncation_psi=0, noise_mode='none')
    torch.testing.assert_close(flat[0], flat[4], rtol=1e-4, atol=1e-5)
    ws, cut = G.mapping(z), G.mapping(z, truncation_psi=0.7, truncation_cutoff=2)
    assert torch.equal(cut[:, 2:], ws[:, 2:]) and not torch.equal(cut[:, :2], ws[:, :2])
    assert StyleGANGenerator(8, 0, 8, 8, style=style, mapping_kwargs=dict(w_avg_beta=0.9), **TINY).mapping.w_avg_beta == 0.9


@pytest.mark.parametrize('style', STYLES)
def test_noise_modes(style):
    G, z = make_G(style).set_lod(0.5), torch.randn(2, 8)
    const, none = (G(z, noise_mode=m) for m in ('const', 'none'))
    assert torch.equal(G(z, noise_mode='const'), const) and torch.equal(G(z, noise_mode='none'), none)
    assert distance(const, none) > 1e-3 and distance(G(z), G(z)) > 1e-3
    fails(lambda: G(z, noise_mode='constant'), 'noise_mode', 'const')


def test_parts_of_the_training_take_these_networks():
    G, D = make_G('modulated').set_lod(1.5), make_D('b-d').set_lod(1.5)
    ema = deepcopy(G)
    G.set_lod(1.25)
    update_ema(ema, G, 0.5)
    assert float(ema.lod) == 1.25 and ema.num_ws_active == 6                # the level is a buffer, and buffers are copied
    ws = mixed_ws(G, torch.randn(4, 8), None, prob=1.)
    assert D(G.synthesis(ws)).shape == (4, 1)


# ---------------------------------------------------------------- saving

@pytest.mark.parametrize('make', [lambda: make_G('adain'), lambda: make_G('modulated', c_dim=3), lambda: make_D('a'),
                                  lambda: make_D('b-d', c_dim=3, mbstd_group_size=2)], ids=['G a', 'G b-d', 'D a', 'D b-d'])
def test_round_trip(make, tmp_path):
    net = make().set_lod(1.375)
    save_checkpoint(tmp_path/'net.pt', {'net': net.state_dict()}, meta={'kwargs': net.init_kwargs})
    state, meta = load_checkpoint(tmp_path/'net.pt')
    other = build_stylegan(meta['kwargs'])
    other.load_state_dict(state['net'], strict=True)
    assert type(other) is type(net) and float(other.lod) == 1.375 and other.init_kwargs == net.init_kwargs
    c = torch.eye(3)[[0, 1, 2, 1]] if net.c_dim else None
    if isinstance(net, StyleGANGenerator):
        z = torch.randn(4, 8)
        assert torch.equal(other(z, c, noise_mode='const'), net(z, c, noise_mode='const'))
    else:
        x = torch.randn(4, 3, 32, 32)
        assert torch.equal(other(x, c), net(x, c))


def test_init_kwargs_are_a_copy():
    mapping = dict(num_layers=2)
    G = make_G(mapping_kwargs=mapping)
    mapping['num_layers'] = 9
    assert G.init_kwargs == dict(z_dim=8, c_dim=0, w_dim=8, img_resolution=32, img_channels=3, mapping_kwargs=dict(num_layers=2), style='adain',
                                 channel_base=256, channel_max=8)


# ---------------------------------------------------------------- bad input

@pytest.mark.parametrize('make', [make_G, make_D])
@pytest.mark.parametrize('side', [0, -8, 2, 48, 16.5, True, '64', None])
def test_resolution(make, side): fails(lambda: make(res=side), 'img_resolution', 'power of two', str(side))


@pytest.mark.parametrize('make', [make_G, make_D])
@pytest.mark.parametrize('lod', [-0.01, 3.01, 99, math.nan, math.inf, None, '1', True])
def test_level_out_of_range(make, lod):
    net = make().set_lod(0.5)
    fails(lambda: net.set_lod(lod), 'lod', str(lod), '0 (full size) to 3 (4x4)')
    assert float(net.lod) == 0.5                                 # and nothing has changed


@pytest.mark.parametrize('make,x', [(make_G, torch.zeros(2, 8)), (make_D, torch.zeros(2, 3, 32, 32))])
def test_level_out_of_range_in_a_loaded_state(make, x):
    net, other = make(), make()
    other.load_state_dict({k: torch.tensor(7.) if k.endswith('lod') else v for k, v in net.state_dict().items()})
    fails(lambda: other(x), 'lod', '7', '0 (full size) to 3 (4x4)')


@pytest.mark.parametrize('shape', [(4, 1, 32, 32), (4, 3, 16, 16), (4, 3, 32, 16), (3, 32, 32)])
def test_image_shape(shape):
    for lod in (0, 1): fails(lambda: make_D().set_lod(lod)(torch.randn(shape)), 'img: wrong shape', '[N, 3, 32, 32]', str(list(shape)))


def test_names_of_variants():
    fails(lambda: make_G('adian'), 'style', 'adain')
    fails(lambda: make_D('b'), 'blur', 'b-d')
    fails(lambda: make_G(channel_base=16), 'channel_base', '32')
    fails(lambda: make_G().synthesis(torch.randn(2, 7, 8)), 'ws: wrong shape', '[N, 8, 8]')
    fails(lambda: make_G()(torch.randn(2, 7)), 'z: wrong shape')
    fails(lambda: make_G(mapping_kwargs=dict(x=torch.ones(1))), 'plain values')
    fails(lambda: build_stylegan(dict(z_dim=8)), 'do not fit a StyleGANGenerator', 'init_kwargs')
    fails(lambda: build_stylegan(dict(c_dim=0, chanel_max=8)), 'do not fit a StyleGANDiscriminator', 'chanel_max')


# ---------------------------------------------------------------- real images

def test_fade_reals_by_hand():
    x = torch.arange(64.).reshape(1, 1, 8, 8)
    assert torch.equal(fade_reals(x, 0), x)
    assert fade_reals(x, 1)[0, 0, :2, :2].tolist() == [[4.5, 4.5], [4.5, 4.5]]               # mean of 0, 1, 8, 9
    assert fade_reals(x, 0.25)[0, 0, 0, 1].item() == pytest.approx(0.75*1 + 0.25*4.5)
    with pytest.raises(UserError): fade_reals(x, 2)
    y = torch.arange(256.).reshape(1, 1, 16, 16)
    want = 0.5*(0 + 1 + 16 + 17)/4 + 0.5*sum(16*i + j for i in range(4) for j in range(4))/16
    assert fade_reals(y, 1.5)[0, 0, 1, 1].item() == pytest.approx(want)
    assert fade_reals(x, 0.5).mean().item() == pytest.approx(x.mean().item())                # brightness stays


def test_discriminator_sees_faded_reals_as_the_generator_shows_its_own():
    "At level k + t, D reads exactly the pixels that fade_reals mixed: reducing its result gives the mixture back."
    x = torch.randn(2, 3, 32, 32)
    for lod in (0.5, 1.25, 2.75):
        k, t = split_level(lod, 3)
        fine, coarse = box_downsample(x, 2**k), nearest_upsample(box_downsample(x, 2**(k+1)), 2)
        torch.testing.assert_close(box_downsample(fade_reals(x, lod), 2**k), (1-t)*fine + t*coarse, rtol=1e-5, atol=1e-6)


def test_fade_reals_bad_input():
    x = torch.randn(2, 3, 16, 16)
    for lod in (-1, 2.5, math.nan, None): fails(lambda: fade_reals(x, lod), 'lod', str(lod))
    fails(lambda: fade_reals(torch.zeros(2, 3, 16, 16, dtype=torch.uint8), 1), 'img', 'uint8')
    fails(lambda: fade_reals(torch.randn(2, 3, 18, 18), 1.5), '18', 'power of two')
    for shape in ((3, 16, 16), (2, 3, 32, 16)): fails(lambda: fade_reals(torch.randn(shape), 1), 'img: wrong shape', str(list(shape)))


# ---------------------------------------------------------------- the timetable

TABLE = {8: (0.001, 256, 32, 28), 16: (0.001, 128, 16, 24), 32: (0.001, 64, 8, 20), 64: (0.001, 32, 4, 16),
         128: (0.0015, 32, 4, 12), 256: (0.002, 32, 4, 8), 512: (0.003, 32, 4, 6), 1024: (0.003, 32, 4, 4)}


@pytest.mark.parametrize('final', [256, 1024])
def test_timetable(final):
    plan, levels = GrowingSchedule(final), int(math.log2(final)) - 3
    for phase in range(levels + 1):
        side = 8 << phase
        for kimg in (0, 1, 300, 599.872, 600):                                    # stable at this side
            now = plan.at(int((1200*phase + kimg)*1000))
            assert now == GrowingPoint(levels - phase, side, *TABLE[side]), (phase, kimg)
        for kimg, t in ((750, 0.25), (900, 0.5), (1050, 0.75), (1194, 0.99)):     # fading in the next one, whose settings hold
            now = plan.at((1200*phase + kimg)*1000)
            if phase == levels: assert now == GrowingPoint(0, final, *TABLE[final])
            else:
                assert now.lod == pytest.approx(levels - phase - t, abs=1e-9)
                assert (now.resolution, now.lr, now.batch, now.batch_gpu, now.tick_kimg) == (2*side, *TABLE[2*side])
    assert plan.lod_at(1200*levels*1000) == 0 and plan.lod_at(1200*levels*1000 - 1000) > 0
    assert plan.at(25_000_000) == GrowingPoint(0, final, *TABLE[final])


def test_base_values_outside_the_tables():
    assert GrowingSchedule(2048).at(20_000_000) == GrowingPoint(0, 2048, 0.001, 32, 4, 4)
    assert GrowingSchedule(64, initial_resolution=4).at(0) == GrowingPoint(4, 4, 0.001, 32, 4, 4)


def test_levels_of_the_timetable_fit_the_networks():
    plan, G, D = GrowingSchedule(32, initial_resolution=4), make_G(), make_D()
    for kimg in range(0, 4000, 170):
        now = plan.at(kimg*1000)
        D.set_lod(now.lod)
        G.set_lod(now.lod)
        assert 32 >> int(now.lod) == now.resolution == G.synthesis.active_level()[2] == D.active_level()[2]


def test_phases_of_other_lengths():
    hard = GrowingSchedule(32, fade_kimg=0, stable_kimg=10)                       # no fades: jumps
    assert [hard.lod_at(n) for n in (0, 9999, 10_000, 20_000, 30_000)] == [2, 2, 1, 0, 0]
    soft = GrowingSchedule(32, fade_kimg=10, stable_kimg=0)                       # fades alone
    assert [soft.lod_at(n) for n in (0, 5000, 10_000, 15_000, 20_000)] == [2, 1.5, 1, 0.5, 0]


def test_adam_reset():
    assert [adam_reset_due(a, b) for a, b in ((5, 5), (5, 4.9), (4.9, 4.5), (4.1, 4), (4.1, 3.9), (0, 0), (0.1, 0))] == \
        [False, True, False, True, True, False, True]
    lods = [GrowingSchedule(1024).lod_at(n) for n in range(0, 9_000_000, 4096)]
    assert sum(adam_reset_due(a, b) for a, b in zip(lods, lods[1:])) == 14        # 7 fades


def test_timetable_round_trip(tmp_path):
    plan = GrowingSchedule(128, batch={8: 64}, lr={64: 0.5}, stable_kimg=3)
    plan.save(tmp_path/'plan.json')
    assert GrowingSchedule.load(tmp_path/'plan.json') == plan
    assert GrowingSchedule.load(tmp_path/'plan.json').at(0).batch == 64


@pytest.mark.parametrize('kw,words', [
    (dict(img_resolution=48), ['48', 'power of two']), (dict(img_resolution=64, initial_resolution=128), ['initial_resolution', '128']),
    (dict(img_resolution=64, stable_kimg=-1), ['stable_kimg', '-1']), (dict(img_resolution=64, stable_kimg=0, fade_kimg=0), ['fade_kimg']),
    (dict(img_resolution=64, lr={8: -1}), ['lr', '-1', '8']), (dict(img_resolution=64, batch_gpu_base=0), ['batch_gpu', '0 at base']),
    (dict(img_resolution=64, batch=[8, 256]), ['batch', 'table']), (dict(img_resolution=64, tick_kimg={'x': 1}), ['tick_kimg', 'table'])])
def test_timetable_bad_values(kw, words): fails(lambda: GrowingSchedule(**kw), *words)


def test_negative_images(): fails(lambda: GrowingSchedule(64).at(-1), 'nimg', '-1')


def test_cost_falls_with_the_level():
    for net, x in ((make_G('adain', 64), torch.randn(1, 8)), (make_G('modulated', 64), torch.randn(1, 8)), (make_D('a', 64), torch.randn(1, 3, 64, 64))):
        cost = []
        for lod in (0, 1, 2, 3):
            with FlopCounterMode(display=False) as count: net.set_lod(lod)(x)
            cost.append(count.get_total_flops())
        assert cost == sorted(cost, reverse=True) and cost[0] > 1.5*cost[1] > 2*cost[3], cost


def test_import_does_nothing():
    code = 'import gan_course.growing, gan_course.stylegan, torch, sys; assert not torch.cuda.is_initialized() and "matplotlib" not in sys.modules'
    subprocess.run([sys.executable, '-c', code], check=True)
