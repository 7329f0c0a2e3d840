"""StyleGAN3's generator against numbers from the paper's code (tests/fixtures/stylegan/README.md), as test_parity_stylegan2 does."""
import functools
import json
import math

import pytest
import torch
from test_parity_stylegan2 import DTYPES, FIRST, FIXTURES, SECOND, STORED, check_norm, distance, fixture, grads, json_cases, limit_for_value, load

from gan_course.core import UserError
from gan_course.stylegan3 import StyleGAN3Generator, build_stylegan3, layer_specs, user_transform

SMALL = dict(z_dim=32, c_dim=0, w_dim=32, img_resolution=32, img_channels=3, num_layers=6, margin_size=4, channel_max=24, mapping_kwargs=dict(num_layers=2))
RADIAL = dict(conv_kernel=1, use_radial_filters=True)
GENERATORS = dict(sg3t_generator=dict(**SMALL, channel_base=512), sg3r_generator=dict(**SMALL, channel_base=1024, **RADIAL))
CASES = [(n, k) for n in GENERATORS for k in DTYPES]


@functools.cache
def run(name, kind):
    "Every quantity of a fixture, as we compute it."
    t, _ = fixture(name)
    G = load(StyleGAN3Generator(**GENERATORS[name]), name, DTYPES[kind]).eval()
    z, y = t['z'].to(DTYPES[kind]), t['pl_noise'].to(DTYPES[kind])
    ws = G.mapping(z, None)
    out = {'ws': ws, 'ws_psi0.7_cut4': G.mapping(z, None, truncation_psi=0.7, truncation_cutoff=4), 'fourier_input': G.synthesis.input(ws[:, 0])}
    out['img'] = img = G.synthesis(ws)
    out['norm'] = grads((img*y).sum(), G)
    out['pl_grads'] = torch.autograd.grad((img*y).sum()/32, ws, create_graph=True)[0]
    out['pl_lengths'] = out['pl_grads'].square().sum(2).mean(1).sqrt()
    penalty = 2*(out['pl_lengths']-0.37).square().mean()
    out['penalty'], out['pl_norm'] = penalty, grads(penalty, G)
    G.synthesis.input.transform.copy_(t[f'transform.{kind}'])
    out['img_transformed'] = G(z)
    G.synthesis.input.transform.copy_(torch.eye(3))
    G.train()(z, update_emas=True)
    out['after.w_avg'] = G.mapping.w_avg.clone()
    out['after.magnitude_ema'] = torch.stack([getattr(G.synthesis, n).magnitude_ema for n in G.synthesis.layer_names])
    return out


def limit(tensors, quantity, kind):
    "StyleGAN3's path-length gradients in float32 differ by up to 2e-4, where a leaky ReLU's sign flips at a pixel near 0 (README of the fixtures)."
    if kind == 'f32' and quantity in ('pl_grads', 'pl_lengths'): return 2e-4
    return limit_for_value(tensors, quantity, kind)


@pytest.mark.parametrize('name,kind', CASES)
@pytest.mark.parametrize('quantity', ['ws', 'ws_psi0.7_cut4', 'fourier_input', 'img', 'img_transformed', 'pl_grads', 'pl_lengths', 'after.w_avg', 'after.magnitude_ema'])
def test_value(name, kind, quantity):
    t = fixture(name)[0]
    assert distance(run(name, kind)[quantity], t[f'{quantity}.f64']) < limit(t, quantity, kind)


@pytest.mark.parametrize('name,kind', CASES)
def test_path_length_value(name, kind):
    assert distance(run(name, kind)['penalty'], fixture(name)[1]['pl_penalty_value']) < (FIRST[kind] if kind == 'f64' else 2e-4)


@pytest.mark.parametrize('name,kind,parameter', json_cases(GENERATORS, 'img_dot_noise_grad_norms'))
def test_gradient_norm(name, kind, parameter):
    wanted = fixture(name)[1]['img_dot_noise_grad_norms']
    check_norm(run(name, kind)['norm'][parameter], wanted[parameter], kind, FIRST[kind] if kind == 'f64' else 2e-5, max(wanted.values()))


@pytest.mark.parametrize('name,kind,parameter', json_cases(GENERATORS, 'pl_penalty_grad_norms'))
def test_path_length_gradient_norm(name, kind, parameter):
    wanted = fixture(name)[1]['pl_penalty_grad_norms']
    check_norm(run(name, kind)['pl_norm'][parameter], wanted[parameter], kind, SECOND[kind] if kind == 'f64' else 2e-4, max(v or 0 for v in wanted.values()))


@pytest.mark.parametrize('name,kind', CASES)
@pytest.mark.parametrize('key', ['grad.mapping.fc0.weight', 'grad.synthesis.input.affine.weight', 'grad.synthesis.input.weight'])
def test_gradient(name, kind, key):
    found = run(name, kind)['norm'][key.removeprefix('grad.')]
    assert distance(found, fixture(name)[0][key]) < (STORED[kind] if kind == 'f64' else 2e-5)


@pytest.mark.parametrize('name', GENERATORS)
def test_specs_of_the_fixture_and_keys(name):
    spec = fixture(name)[1]['spec']
    G = load(StyleGAN3Generator(**GENERATORS[name]), name, torch.float32)
    assert G.num_ws == spec['num_ws'] and json.loads(json.dumps(G.synthesis.specs)) == spec['layers']
    again = build_stylegan3(json.loads(json.dumps(G.init_kwargs)))
    again.load_state_dict(G.state_dict(), strict=True)
    assert again.init_kwargs == G.init_kwargs


SPECS = json.loads((FIXTURES/'sg3_layer_specs.json').read_text())


@pytest.mark.parametrize('name', SPECS)
def test_layer_specs(name):
    "Sizes, rates, cut-offs, half-widths, factors, taps, padding, channels and precision of every layer."
    kind, resolution = name.split('-')[1:]
    wide = dict(channel_base=65536, channel_max=1024, **RADIAL) if kind == 'r' else {}
    found = layer_specs(int(resolution), **wide)
    for ours, theirs in zip(found, SPECS[name]['layers'], strict=True):
        assert set(ours) == set(theirs)
        for key, value in theirs.items():
            assert math.isclose(ours[key], value, rel_tol=1e-12) if isinstance(value, float) else ours[key] == value, (theirs['name'], key)
    first, spec = found[0], SPECS[name]['input']
    assert (first['in_channels'], first['in_size'], first['in_rate'], first['in_cutoff'], len(found)+1) == (spec['channels'], spec['size'], spec['rate'], spec['bandwidth'], SPECS[name]['num_ws'])


@pytest.mark.parametrize('matrix', [torch.zeros(3, 3), torch.ones(3, 3), torch.full((3, 3), float('nan')), torch.eye(4)])
def test_a_transform_without_inverse_is_refused_and_changes_nothing(matrix):
    G = StyleGAN3Generator(**GENERATORS['sg3t_generator'])
    G.set_transform(user_transform((.1, 0), 20))
    before = G.synthesis.input.transform.clone()
    with pytest.raises(UserError, match='transform'): G.set_transform(matrix)
    assert torch.equal(G.synthesis.input.transform, before)
