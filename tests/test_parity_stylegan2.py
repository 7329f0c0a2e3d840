"""StyleGAN2's networks against numbers from the paper's code (tests/fixtures/stylegan/README.md).

Each quantity of each fixture is a test case, in float64 and in float32. Both are compared with the float64 reference by
||a-b||/||b||, which is absolute where the reference is 0.
"""
import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import softplus

from gan_course.layers import Discriminator, build_discriminator
from gan_course.stylegan2 import Generator, build_generator

FIXTURES = Path(__file__).parent/'fixtures'/'stylegan'
SMALL = dict(img_resolution=32, img_channels=3, channel_base=512, conv_clamp=256)
MAPPING = dict(num_layers=2, lr_multiplier=0.01)
GENERATORS = dict(
    sg2_generator=dict(z_dim=32, c_dim=0, w_dim=32, channel_max=32, architecture='skip', mapping_kwargs=MAPPING, **SMALL),
    sg2_generator_resnet_cond=dict(z_dim=32, c_dim=4, w_dim=32, channel_max=16, architecture='resnet', mapping_kwargs=MAPPING, **SMALL))
DISCRIMINATORS = dict(
    sg2_discriminator=dict(c_dim=0, channel_max=16, **SMALL),
    sg2_discriminator_cond=dict(c_dim=4, channel_max=16, **SMALL),
    sg2_discriminator_skip=dict(c_dim=0, channel_max=16, architecture='skip', **SMALL),
    sg2_discriminator_orig=dict(c_dim=0, channel_max=16, architecture='orig', **SMALL))
DTYPES = {'f64': torch.float64, 'f32': torch.float32}
FIRST = {'f64': 1e-9, 'f32': 2e-6}            # values and first derivatives
STORED = {'f64': 1e-7, 'f32': 2e-6}           # references that are stored as float32, so exact to 6e-8 only
SECOND = {'f64': 1e-7, 'f32': 2e-6}           # norms of second derivatives
CANCELLING = 1e-5                             # float32 only, see `limit_for`


@functools.cache
def fixture(name):
    return load_file(FIXTURES/f'{name}.safetensors'), json.loads((FIXTURES/f'{name}.json').read_text())


def load(net, name, dtype):
    tensors, _ = fixture(name)
    state = {k.removeprefix('weights.'): v for k, v in tensors.items() if k.startswith('weights.')}
    net.load_state_dict(state, strict=True)
    return net.to(dtype)


def distance(a, b):
    a, b = torch.as_tensor(a, dtype=torch.float64).detach(), torch.as_tensor(b, dtype=torch.float64)
    assert a.shape == b.shape
    d, n = (a-b).norm().item(), b.norm().item()
    return d/n if n > 0 else d


def grads(value, net):
    named = dict(net.named_parameters())
    found = torch.autograd.grad(value, list(named.values()), allow_unused=True, retain_graph=True)
    return dict(zip(named, found))


@functools.cache
def run_generator(name, kind):
    "Every quantity of a generator fixture, as we compute it."
    t, _ = fixture(name)
    G = load(Generator(**GENERATORS[name]), name, DTYPES[kind]).eval()
    z, c, y = (t[k].to(DTYPES[kind]) if k in t else None for k in ('z', 'c', 'pl_noise'))
    ws = G.mapping(z, c)
    out = {'ws': ws, 'ws_psi0.7_cut4': G.mapping(z, c, truncation_psi=0.7, truncation_cutoff=4)}
    out['img'] = img = G.synthesis(ws, noise_mode='const')
    out['img_nonoise'] = G.synthesis(ws, noise_mode='none')
    out['img_unfused'] = G.synthesis(ws, noise_mode='const', fused_modconv=False)
    out['img_whole'] = G(z, c, noise_mode='const')
    out['norm'] = grads((img*y).sum(), G)
    out['pl_grads'] = torch.autograd.grad((img*y).sum()/32, ws, create_graph=True)[0]
    out['pl_lengths'] = out['pl_grads'].square().sum(2).mean(1).sqrt()
    penalty = 2*(out['pl_lengths']-0.37).square().mean()
    out['penalty'], out['pl_norm'] = penalty, grads(penalty, G)
    G.train().mapping(z, c, update_emas=True)
    out['after.w_avg'] = G.mapping.w_avg.clone()
    return out


@functools.cache
def run_discriminator(name, kind):
    "Every quantity of a discriminator fixture, as we compute it."
    t, _ = fixture(name)
    D = load(Discriminator(**DISCRIMINATORS[name]), name, DTYPES[kind])
    img = t['img'].to(DTYPES[kind]).requires_grad_()
    out = {'logits': D(img, t['c'].to(DTYPES[kind]) if D.c_dim else None)}
    out['r1_grad_img'] = torch.autograd.grad(out['logits'].sum(), img, create_graph=True)[0]
    out['r1_penalty'] = out['r1_grad_img'].square().sum(dim=(1, 2, 3))
    out['r1'] = grads((5*out['r1_penalty']).mean(), D)
    out['dreal'] = grads(softplus(-out['logits']).mean(), D)
    return out


def limit_for(table, kind, parameter='', second=False):
    """The limit for a parameter's gradient. Two kinds are sums of large terms that almost cancel, of which float32 keeps fewer digits:
    a noise strength (one number for a whole feature map) and a bias in R1 (100 times below the weights' gradients)."""
    cancels = parameter.endswith('noise_strength') or (second and parameter.endswith('.bias'))
    return max(table[kind], CANCELLING) if kind == 'f32' and cancels else table[kind]


def limit_for_value(tensors, quantity, kind):
    "The limit for a value: in float32 at least 1.5 times the distance of the reference's own float32 run (3.3e-6 at the most)."
    key = f'{quantity}.f32'
    return max(FIRST[kind], 1.5*distance(tensors[key], tensors[f'{quantity}.f64'])) if kind == 'f32' and key in tensors else FIRST[kind]


def cases(names, quantities):
    return [pytest.param(n, k, q, id=f'{n}-{k}-{q}') for n in names for k in DTYPES for q in quantities(n)]


def json_cases(names, key):
    return cases(names, lambda n: fixture(n)[1][key])


def full_cases(names, prefix):
    return cases(names, lambda n: [k for k in fixture(n)[0] if k.startswith(prefix)])


def check_norm(found, wanted, kind, limit, largest):
    "None: the value does not depend on the parameter. A norm that is 0 but for rounding is compared with the largest."
    if wanted is None:
        assert found is None or found.abs().max() == 0
    elif wanted < 1e-12*largest:
        assert found is None or found.norm().item() <= (1e-12 if kind == 'f64' else 1e-5)*largest
    else:
        assert distance(found.double().norm(), wanted) < limit


@pytest.mark.parametrize('name', [*GENERATORS, *DISCRIMINATORS])
def test_state_dict_keys(name):
    "Same keys and shapes as the reference, and the recorded arguments make the same network again."
    first, build = (Generator, build_generator) if name in GENERATORS else (Discriminator, build_discriminator)
    net = load(first(**{**GENERATORS, **DISCRIMINATORS}[name]), name, torch.float32)
    again = build(json.loads(json.dumps(net.init_kwargs)))
    again.load_state_dict(net.state_dict(), strict=True)
    assert again.init_kwargs == net.init_kwargs


@pytest.mark.parametrize('name', GENERATORS)
def test_num_ws(name):
    assert Generator(**GENERATORS[name]).num_ws == fixture(name)[1]['num_ws']


def test_full_size():
    "Config-f at 1024x1024 with 2 mapping layers: the totals and the precisions that the reference prints when training starts."
    G = Generator(512, 0, 512, 1024, 3, num_fp16_res=4, mapping_kwargs=dict(num_layers=2))
    D = Discriminator(0, 1024, 3, num_fp16_res=4)
    count = lambda tensors: sum(t.numel() for t in tensors)
    assert (count(G.parameters()), count(G.buffers()), G.num_ws) == (28794124, 2797104, 18)
    assert (count(D.parameters()), count(D.buffers())) == (29012513, 544)
    for net in (G.synthesis, D):
        assert [r for r in (8, 16, 32, 64, 128, 256, 512, 1024) if getattr(net, f'b{r}').use_fp16] == [128, 256, 512, 1024]


GENERATED = ['ws', 'ws_psi0.7_cut4', 'img', 'img_nonoise', 'img_unfused', 'pl_grads', 'pl_lengths', 'after.w_avg']


@pytest.mark.parametrize('name,kind,quantity', cases(GENERATORS, lambda n: GENERATED))
def test_generator(name, kind, quantity):
    t = fixture(name)[0]
    assert distance(run_generator(name, kind)[quantity], t[f'{quantity}.f64']) < limit_for_value(t, quantity, kind)


@pytest.mark.parametrize('name,kind', [(n, k) for n in GENERATORS for k in DTYPES])
def test_generator_whole(name, kind):
    "forward() is the mapping followed by the synthesis."
    assert distance(run_generator(name, kind)['img_whole'], fixture(name)[0]['img.f64']) < FIRST[kind]


@pytest.mark.parametrize('name,kind', [(n, k) for n in GENERATORS for k in DTYPES])
def test_path_length_value(name, kind):
    assert distance(run_generator(name, kind)['penalty'], fixture(name)[1]['pl_penalty_value']) < FIRST[kind]


@pytest.mark.parametrize('name,kind,parameter', json_cases(GENERATORS, 'img_dot_noise_grad_norms'))
def test_generator_gradient_norm(name, kind, parameter):
    wanted = fixture(name)[1]['img_dot_noise_grad_norms']
    check_norm(run_generator(name, kind)['norm'][parameter], wanted[parameter], kind, limit_for(FIRST, kind, parameter), max(wanted.values()))


@pytest.mark.parametrize('name,kind,parameter', json_cases(GENERATORS, 'pl_penalty_grad_norms'))
def test_path_length_gradient_norm(name, kind, parameter):
    wanted = fixture(name)[1]['pl_penalty_grad_norms']
    check_norm(run_generator(name, kind)['pl_norm'][parameter], wanted[parameter], kind, limit_for(SECOND, kind, parameter),
               max(v or 0 for v in wanted.values()))


@pytest.mark.parametrize('name,kind,key', full_cases(GENERATORS, 'grad.'))
def test_generator_gradient(name, kind, key):
    found = run_generator(name, kind)['norm'][key.removeprefix('grad.')]
    assert distance(found, fixture(name)[0][key]) < limit_for(STORED, kind, key)


@pytest.mark.parametrize('name,kind,quantity', cases(DISCRIMINATORS, lambda n: ['logits', 'r1_grad_img', 'r1_penalty']))
def test_discriminator(name, kind, quantity):
    t = fixture(name)[0]
    assert distance(run_discriminator(name, kind)[quantity], t[f'{quantity}.f64']) < limit_for_value(t, quantity, kind)


@pytest.mark.parametrize('name,kind,parameter', json_cases(DISCRIMINATORS, 'r1_gamma10_grad_norms'))
def test_r1_gradient_norm(name, kind, parameter):
    wanted = fixture(name)[1]['r1_gamma10_grad_norms']
    check_norm(run_discriminator(name, kind)['r1'][parameter], wanted[parameter], kind, limit_for(SECOND, kind, parameter, second=True),
               max(v or 0 for v in wanted.values()))


@pytest.mark.parametrize('name,kind,parameter', json_cases(DISCRIMINATORS, 'dreal_loss_grad_norms'))
def test_real_loss_gradient_norm(name, kind, parameter):
    wanted = fixture(name)[1]['dreal_loss_grad_norms']
    check_norm(run_discriminator(name, kind)['dreal'][parameter], wanted[parameter], kind, FIRST[kind], max(wanted.values()))


@pytest.mark.parametrize('name,kind,key', full_cases(DISCRIMINATORS, 'r1_grad.') + full_cases(DISCRIMINATORS, 'dreal_grad.'))
def test_discriminator_gradient(name, kind, key):
    which, _, parameter = key.partition('_grad.')
    assert distance(run_discriminator(name, kind)[which][parameter], fixture(name)[0][key]) < STORED[kind]
