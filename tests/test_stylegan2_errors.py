"""Bad input to the networks: every fault is a UserError that names the argument, the value and the next step."""
import pytest
import torch

from gan_course import layers, stylegan2
from gan_course.core import UserError
from gan_course.layers import Discriminator, MappingNetwork, build_discriminator
from gan_course.stylegan2 import Generator, SynthesisLayer, build_generator

TINY = dict(img_resolution=16, img_channels=3, channel_base=128, channel_max=8)


def make_G(**kw): return Generator(**{**dict(z_dim=8, c_dim=0, w_dim=8, mapping_kwargs=dict(num_layers=2)), **TINY, **kw})
def make_D(**kw): return Discriminator(**{**dict(c_dim=0), **TINY, **kw})


def fails(make, *words):
    "`make` raises a UserError in which all words occur, and which says what to do next."
    with pytest.raises(UserError) as e: make()
    text = str(e.value)
    for word in words: assert word in text, text
    assert 'Next:' in text, text


@pytest.mark.parametrize('make', [make_G, make_D])
@pytest.mark.parametrize('side', [0, -8, 1, 2, 48, 100, 16.5, 64., True, '64', None])
def test_resolution(make, side):
    fails(lambda: make(img_resolution=side), 'img_resolution', 'power of two', str(side))


def test_discriminator_needs_a_block_before_the_last():
    fails(lambda: make_D(img_resolution=4), 'img_resolution', 'found 4', '8, 16')
    assert make_G(img_resolution=4)(torch.randn(2, 8)).shape == (2, 3, 4, 4)


@pytest.mark.parametrize('make', [make_G, make_D])
@pytest.mark.parametrize('name', ['resent', 'SKIP', '', None, 3])
def test_architecture(make, name):
    fails(lambda: make(architecture=name), 'architecture', repr(name), 'skip', 'resnet', 'orig')


@pytest.mark.parametrize('mode', ['zero', 'Const', '', None, True])
def test_noise_mode(mode):
    fails(lambda: make_G()(torch.randn(1, 8), noise_mode=mode), 'noise_mode', repr(mode), 'random', 'const', 'none')


def test_noise_mode_without_noise_is_still_checked():
    fails(lambda: SynthesisLayer(4, 4, 8, 8, use_noise=False)(torch.randn(1, 4, 8, 8), torch.randn(1, 8), noise_mode='x'), 'noise_mode')


@pytest.mark.parametrize('shape', [(4,), (4, 7), (4, 9), (4, 8, 1), (1, 4, 8), ()])
def test_z_shape(shape):
    fails(lambda: make_G()(torch.randn(shape)), 'z: wrong shape', '[N, 8]', str(list(shape)))


def test_z_missing():
    fails(lambda: make_G()(None), 'z: this input is missing')


@pytest.mark.parametrize('shape', [(4,), (4, 2), (4, 4), (2, 3), (4, 3, 1)])
def test_c_shape(shape):
    G, D = make_G(c_dim=3), make_D(c_dim=3)
    fails(lambda: G(torch.randn(4, 8), torch.zeros(shape)), 'c: wrong shape', '[4, 3]')
    fails(lambda: D(torch.randn(4, 3, 16, 16), torch.zeros(shape)), 'c: wrong shape', '[4, 3]')


def test_c_missing():
    fails(lambda: make_G(c_dim=3)(torch.randn(4, 8)), 'c: this input is missing')
    fails(lambda: make_D(c_dim=3)(torch.randn(4, 3, 16, 16)), 'c: this input is missing')


def test_c_not_wanted():
    c = torch.eye(4)
    fails(lambda: make_G()(torch.randn(4, 8), c), 'built without labels', 'c_dim=4')
    fails(lambda: make_D()(torch.randn(4, 3, 16, 16), c), 'built without labels', 'c_dim=4')


def test_empty_labels_are_no_labels():
    empty = torch.zeros(4, 0)
    assert make_G()(torch.randn(4, 8), empty).shape == (4, 3, 16, 16)
    assert make_D()(torch.randn(4, 3, 16, 16), empty).shape == (4, 1)


@pytest.mark.parametrize('shape', [(4, 1, 16, 16), (4, 3, 8, 8), (4, 3, 16, 32), (3, 16, 16), (4, 3, 256)])
def test_image_shape(shape):
    fails(lambda: make_D()(torch.randn(shape)), 'img: wrong shape', '[N, 3, 16, 16]', str(list(shape)))


@pytest.mark.parametrize('shape', [(4, 8), (4, 5, 8), (4, 6, 7)])
def test_ws_shape(shape):
    fails(lambda: make_G().synthesis(torch.randn(shape)), 'ws: wrong shape', '[N, 6, 8]')


@pytest.mark.parametrize('cutoff', [-1, 7, 100])
def test_truncation_cutoff(cutoff):
    fails(lambda: make_G()(torch.randn(1, 8), truncation_psi=0.5, truncation_cutoff=cutoff), 'truncation_cutoff', str(cutoff), '0 to 6')


def test_truncation_without_average():
    G = make_G(mapping_kwargs=dict(num_layers=2, w_avg_beta=None))
    fails(lambda: G(torch.randn(1, 8), truncation_psi=0.5), 'truncation_psi', 'w_avg_beta')
    assert G(torch.randn(1, 8)).shape == (1, 3, 16, 16)


def test_sizes_of_networks():
    fails(lambda: make_G(channel_base=8), 'channel_base', '16')
    fails(lambda: make_D(channel_max=0), 'channel_max')
    fails(lambda: MappingNetwork(0, 0, 8, num_ws=4), 'z_dim')
    fails(lambda: MappingNetwork(8, 0, 8, num_ws=4, num_layers=0), 'num_layers')
    fails(lambda: make_G(activation='leaky'), 'activation', 'lrelu')
    fails(lambda: make_G(fused_modconv_default='sometimes'), 'fused_modconv_default')


@pytest.mark.parametrize('build,kwargs', [(build_generator, dict(z_dim=8)), (build_discriminator, dict(size=8)),
                                          (build_generator, dict(z_dim=8, c_dim=0, w_dim=8, chanel_max=8, img_resolution=8, img_channels=3))])
def test_build_with_foreign_arguments(build, kwargs):
    fails(lambda: build(kwargs), 'do not fit', 'init_kwargs')


def test_arguments_must_be_plain():
    fails(lambda: make_G(resample_filter=torch.ones(4)), 'plain values')
    fails(lambda: make_D(block_kwargs=dict(resample_filter=torch.ones(4))), 'plain values')


def test_init_kwargs_are_a_copy():
    mapping = dict(num_layers=2)
    G = make_G(mapping_kwargs=mapping)
    mapping['num_layers'] = 9
    assert G.init_kwargs['mapping_kwargs'] == dict(num_layers=2)


def test_average_moves_only_when_asked_in_training():
    G, z = make_G(mapping_kwargs=dict(num_layers=2, w_avg_beta=0.995)), torch.randn(5, 8)
    G.train()(z)
    G.eval()(z, update_emas=True)
    assert G.mapping.w_avg.abs().sum() == 0
    G.train()(z, update_emas=True)
    torch.testing.assert_close(G.mapping.w_avg, 0.005*G.mapping(z)[:, 0].mean(0))


def half_on_cpu(monkeypatch):
    "Let blocks set to half precision use it on the CPU too, so that the half path is tested without a GPU."
    for module in (layers, stylegan2):
        monkeypatch.setattr(module, 'compute_dtype', lambda w, use_fp16=False, force_fp32=False: torch.float16 if use_fp16 and not force_fp32 else w.dtype)


@pytest.mark.parametrize('architecture', ['orig', 'skip', 'resnet'])
@pytest.mark.parametrize('fused', [True, False])
def test_half_precision_follows_full(monkeypatch, architecture, fused):
    half_on_cpu(monkeypatch)
    torch.manual_seed(0)
    G = make_G(architecture=architecture, num_fp16_res=4, conv_clamp=256).train()
    D = make_D(architecture=architecture, num_fp16_res=4, conv_clamp=256)
    z = torch.randn(4, 8)
    half, full = (G(z, noise_mode='const', fused_modconv=fused, force_fp32=f) for f in (False, True))
    assert half.dtype == torch.float32 and 0 < (half-full).norm()/full.norm() < 5e-3
    logits, exact = D(full), D(full, force_fp32=True)
    assert logits.dtype == torch.float32 and 0 < (logits-exact).norm()/exact.norm() < 2e-2
    D(half).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in G.synthesis.parameters())
    assert G.synthesis.b16.use_fp16 and G.synthesis.b8.use_fp16 and not G.synthesis.b4.use_fp16


def test_frozen_layers_stay_in_the_state():
    D = make_D(block_kwargs=dict(freeze_layers=4))
    assert set(D.state_dict()) == set(make_D().state_dict())
    trained = {n for n, _ in D.named_parameters()}
    assert not any(n.startswith('b16.') for n in trained) and 'b8.conv0.weight' in trained
    assert D.init_kwargs['block_kwargs'] == {'freeze_layers': 4}
