"""Path length: known closed forms, the papers' choices, LPIPS from files that are opened safely, and the same numbers however the work is divided.

Not covered, because their files are too large to ship: the official weights of LPIPS. Files of the same names and shapes with random numbers stand in
for them, without the classifier of VGG16 (nine tenths of its file, unused), and LPIPS is compared with its formula written out in float64.
"""
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gan_course.core import UserError
from gan_course.faces import FacesDataset
from gan_course.path_length import (LPIPS_FILES, PATHS, PathDistance, PathPairs, drawn_noise, face_crop, fetch_weights, lpips_files,
                                    path_length, path_name, path_score, path_view, slerp)
from gan_course.samples import weights_digest
from gan_course.stylegan import StyleGANGenerator
from gan_course.stylegan2 import Generator

WIDTHS = (64, 128, 256, 512, 512)


def pixel(x, y):
    return (x - y).square().mean([1, 2, 3])


def generator(c_dim=0, z_dim=8, resolution=16, channels=3, **kwargs):
    torch.manual_seed(1)
    return Generator(z_dim=z_dim, c_dim=c_dim, w_dim=8, img_resolution=resolution, img_channels=channels, mapping_kwargs=dict(num_layers=2),
                     channel_base=128, channel_max=8, **kwargs).eval()


def loud(G, strength=3.):
    "Noise that changes the picture far more than a step does."
    for name, p in G.named_parameters():
        if name.endswith("noise_strength"):
            p.data.fill_(strength)
    return G


class Linear(nn.Module):
    "Identity for mapping, a matrix for synthesis; keeps what it was asked."
    num_ws, img_resolution = 1, 8

    def __init__(self, d=12, c_dim=0):
        super().__init__()
        self.z_dim, self.c_dim, self.asked = d, c_dim, []
        self.A = nn.Parameter(torch.randn(d, 192, generator=torch.Generator().manual_seed(2)).double() * .05)

    def mapping(self, z, c):
        self.asked.append(c)
        return z[:, None]

    def synthesis(self, ws, **kwargs):
        self.asked.append(kwargs)
        return (ws[:, 0] @ self.A).view(-1, 3, 8, 8)


def ends_of(pairs, count):
    "All w at both ends, each [count, d]."
    w0, w1 = zip(*(pairs.ends(first) for first in range(0, count, pairs.chunk)))
    return torch.cat(w0)[:count, 0], torch.cat(w1)[:count, 0]


# ---------------------------------------------------------------- known values

@pytest.mark.parametrize("sampling", ["end", "full"])
def test_linear_in_w_is_known(sampling):
    "Speed = 127.5 A (b - a) wherever the step is taken; its mean square has the expectation 127.5^2 * 2 |A|^2 / P."
    G = Linear()
    got = PathPairs(G, 4000, "w", sampling).distances(0, 4000, pixel)
    expected = 127.5 ** 2 * 2 * G.A.detach().square().sum().item() / 192
    assert abs(got.mean().item() - expected) < 4 * got.std().item() / 4000 ** .5
    at_start = PathPairs(G, 4000, "w", "end")
    a, step = ends_of(at_start, 4000)
    speed = (step - a) / 1e-4                                                       # b - a
    assert abs(a.var().item() - 1) < .03 and abs(speed.var().item() - 2) < .06      # two independent normal latents
    assert torch.allclose(at_start.distances(0, 4000, pixel), 127.5 ** 2 * (speed @ G.A.detach()).square().mean(1), rtol=1e-6)


def test_slerp_in_z_has_the_speed_of_the_angle():
    G = Linear(d=200)
    a, step = ends_of(PathPairs(G, 320, "z", "full"), 320)
    assert torch.allclose(a.norm(dim=1), torch.ones(320).double()) and torch.allclose(step.norm(dim=1), torch.ones(320).double())
    angle = 2 * torch.asin((a - step).norm(dim=1) / 2) / 1e-4                       # of independent directions in many dimensions: about a right one
    assert abs(angle.mean().item() - np.pi / 2) < .02 and .02 < angle.std().item() < .12


def test_slerp_by_trigonometry():
    a, b = torch.tensor([[3., 0., 0.], [1., 3 ** .5, 0.]], dtype=torch.float64).split(1)      # 60 degrees
    for t in (0, .25, 1, 1.5):
        angle = np.pi / 3 * t
        assert torch.allclose(slerp(a, b, t), torch.tensor([[np.cos(angle), np.sin(angle), 0]]))
    assert torch.equal(slerp(a, a, .5), torch.tensor([[1., 0., 0.]]).double())


def test_full_is_anywhere_and_end_is_the_start():
    G = Linear()
    start, _ = ends_of(PathPairs(G, 1600, "w", "end"), 1600)
    place, step = ends_of(PathPairs(G, 1600, "w", "full"), 1600)                    # the same latents
    way = (step - place) / 1e-4
    t = ((place - start) * way).sum(1) / way.square().sum(1)
    assert t.min() > -1e-6 and t.max() < 1 and abs(t.mean().item() - .5) < .03 and abs(t.std().item() - 12 ** -.5) < .02


def test_the_step_does_not_decide_the_number():
    G = generator().double()
    one, ten = (PathPairs(G, 200, "w", "end", eps=eps).distances(0, 100, pixel).mean().item() for eps in (1e-5, 1e-4))
    assert one == pytest.approx(ten, rel=.01)


def test_percentiles_are_values_that_occur():
    rng = np.random.RandomState(0)
    for n in (100, 101, 777, 1000):
        d = np.sort(rng.lognormal(sigma=2, size=n))
        low, high = d[int(np.floor((n - 1) * .01))], d[int(np.ceil((n - 1) * .99))]
        kept = [v for v in d if low <= v <= high]
        got = path_length(torch.from_numpy(rng.permutation(d)))
        assert (got["low"], got["high"], got["count"], got["kept"], got["rejected"]) == (low, high, n, len(kept), n - len(kept))
        assert got["value"] == pytest.approx(np.mean(kept)) and got["std"] == pytest.approx(np.std(kept))
        assert got["standard_error"] == pytest.approx(np.std(kept) / len(kept) ** .5)


def test_equal_values_are_all_kept():
    assert path_length(torch.full((150,), 3.))["kept"] == 150


def test_equals_torch_fidelity_where_the_definitions_coincide():
    import torch_fidelity
    from torch_fidelity.metric_ppl import calculate_ppl

    class Pixel(torch_fidelity.SampleSimilarityBase):
        def __init__(self, name, **_):
            super().__init__(name)

        def forward(self, x, y):
            return pixel(x, y)

    torch_fidelity.register_sample_similarity("pixel-of-test", Pixel)
    G = Linear()
    rng = np.random.RandomState(7)
    z = torch.from_numpy(rng.randn(2 * 160, 12)).float()                            # torch-fidelity draws all of the first, then all of the second
    got = calculate_ppl(1, input1=torch_fidelity.GenerativeModelModuleWrapper(DoubleDrawer(G), 12, "normal", 0), input1_model_num_samples=160, batch_size=32, cuda=False,
                        rng_seed=7, ppl_epsilon=1e-4, ppl_z_interp_mode="lerp", ppl_reduction="mean", ppl_sample_similarity="pixel-of-test",
                        ppl_sample_similarity_resize=None, ppl_sample_similarity_dtype=None, ppl_discard_percentile_lower=None,
                        ppl_discard_percentile_higher=None, verbose=False)["perceptual_path_length_mean"]
    pairs = PathPairs(G, 160, "w", "end")                                           # identity for mapping: w is z, and lerp is lerp
    with mock.patch("torch.randn", lambda *shape, generator=None: next(chunks)):
        chunks = iter([torch.stack([z[i:i + 16], z[160 + i:176 + i]]) for i in range(0, 160, 16)])
        ours = path_length(pairs.distances(0, 160, pixel), 0, 100)["value"]
    assert ours == pytest.approx(got, rel=1e-3)                                     # torch-fidelity rounds the step to float32


class DoubleDrawer(nn.Module):
    def __init__(self, G):
        super().__init__()
        self.G = G

    def forward(self, z):
        return (self.G.synthesis(z.double()[:, None]) + 1) * 127.5


# ---------------------------------------------------------------- the same numbers, however the work is divided

@pytest.mark.parametrize("space,sampling", [("z", "full"), ("w", "end")])
def test_any_range_any_order_any_count(space, sampling):
    G = loud(generator())
    whole = PathPairs(G, 130, space, sampling, seed=5).distances(0, 130, pixel)
    pairs = PathPairs(G, 100_000, space, sampling, seed=5)
    assert torch.equal(torch.cat([pairs.distances(a, b, pixel) for a, b in ((0, 7), (7, 8), (8, 64), (64, 130))]), whole)
    torch.manual_seed(99)                                                           # whatever else was drawn, in another order
    assert torch.equal(pairs.distances(100, 130, pixel), whole[100:]) and torch.equal(pairs.distances(3, 20, pixel), whole[3:20])
    assert len(whole.unique()) == 130 and not torch.equal(PathPairs(G, 130, space, sampling, seed=6).distances(0, 130, pixel), whole)


def test_noise_is_equal_at_both_ends_and_restored():
    G = loud(generator())
    before, state = {k: v.clone() for k, v in G.state_dict().items()}, torch.get_rng_state()
    pairs = PathPairs(G, 100)
    x, y = pairs.pictures(0)
    assert 0 < (x - y).abs().mean() < .1                                            # noise that differed would change whole levels
    assert not torch.allclose(x, path_view(G.synthesis(pairs.ends(0)[0].float(), noise_mode="const")), atol=1)   # and it is not the network's own
    with pytest.raises(RuntimeError), drawn_noise(G, 3):
        raise RuntimeError("interrupted")
    assert all(torch.equal(before[k], v) for k, v in G.state_dict().items()) and torch.equal(torch.get_rng_state(), state)


def test_stylegan_with_its_own_noise():
    torch.manual_seed(0)
    G = StyleGANGenerator(z_dim=8, c_dim=0, w_dim=8, img_resolution=16, img_channels=3).eval()
    digest = weights_digest(G)
    d = PathPairs(G, 100, "z", "full").distances(0, 20, pixel)
    assert d.isfinite().all() and (d > 0).all() and weights_digest(G) == digest


def test_full_precision_and_constant_noise_are_asked_for():
    G = Linear()
    PathPairs(G, 100).distances(0, 1, pixel)
    asked = [k for k in G.asked if isinstance(k, dict)]
    assert asked == [dict(noise_mode="const", force_fp32=True)] * 2


def test_grey_networks():
    x, _ = PathPairs(generator(channels=1), 100).pictures(0)
    assert x.shape == (16, 3, 16, 16) and torch.equal(x[:, 0], x[:, 2])


# ---------------------------------------------------------------- labels

def test_both_ends_have_one_label_with_the_shares_of_the_data():
    faces = FacesDataset(30, resolution=8, label="hair_style")
    G = Linear(c_dim=faces.label_dim)
    pairs = PathPairs(G, 480, "z", "end", labels=faces)
    pairs.distances(0, 480, pixel)
    c = [k for k in G.asked if isinstance(k, torch.Tensor)]
    assert len(c) == 60 and all(torch.equal(a, b) for a, b in zip(c[::2], c[1::2]))
    have, want = torch.cat(c[::2]).mean(0), torch.stack([torch.as_tensor(faces[i][1]) for i in range(30)]).float().mean(0)
    assert (have - want).abs().max() < .1 and have.sum().item() == pytest.approx(1)
    assert pairs.describe()["labels"] == faces.digest()
    assert np.array_equal(PathPairs(G, 5000, "z", "end", labels=faces).pick[:480], pairs.pick)


# ---------------------------------------------------------------- LPIPS

@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    "A folder with files of the right names and shapes; random numbers."
    import torchvision
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights")
    channels = {f"lin{i}.model.1.weight": torch.rand(1, n, 1, 1) for i, n in enumerate(WIDTHS)}
    cfg = torchvision.models.vgg.make_layers(torchvision.models.vgg.cfgs["D"])
    torch.save(channels, folder / "weights-vgg16-lpips.pth")
    torch.save({f"features.{k}": v for k, v in cfg.state_dict().items()}, folder / "vgg16-397923af.pth")
    return folder


def lpips_by_formula(folder, x, y):
    "Zhang et al. 2018, equation 1, in float64: VGG16 up to relu1_2, 2_2, 3_3, 4_3, 5_3."
    vgg, channels = (torch.load(folder / name, weights_only=True) for name in ("vgg16-397923af.pth", "weights-vgg16-lpips.pth"))
    shift, scale = (torch.tensor(v).double()[:, None, None] for v in ((-.030, -.088, -.188), (.458, .448, .450)))
    def maps(p):
        h, out, layer = (p.double() / 127.5 - 1 - shift) / scale, [], 0
        for i, n in enumerate((2, 2, 3, 3, 3)):
            if i:
                h, layer = F.max_pool2d(h, 2), layer + 1
            for _ in range(n):
                h, layer = F.conv2d(h, vgg[f"features.{layer}.weight"].double(), vgg[f"features.{layer}.bias"].double(), padding=1).relu(), layer + 2
            out.append(h / h.norm(dim=1, keepdim=True))
        return out
    return sum((channels[f"lin{i}.model.1.weight"].double()[0] * (a - b).square()).sum(1).mean([1, 2]) for i, (a, b) in enumerate(zip(maps(x), maps(y))))


def test_lpips_is_its_formula(weights):
    torch.manual_seed(3)
    distance = PathDistance("lpips", weights=weights)
    x = torch.rand(2, 3, 40, 40) * 300 - 20                                         # beyond 0..255 too: nothing is clamped
    for y in (torch.rand(2, 3, 40, 40) * 255, x + .01):                             # and nothing is rounded
        assert torch.allclose(distance(x, y).double(), lpips_by_formula(weights, x, y), rtol=2e-3)
    assert torch.equal(distance(x, x), torch.zeros(2))
    assert distance(x[..., :16, :16], y[..., :16, :16]).isfinite().all()
    with pytest.raises(UserError, match="16x16 or larger"):
        distance(x[..., :15], x[..., :15])
    assert not any(p.requires_grad for p in distance.module.parameters()) and not any(m.training for m in distance.module.modules())


def test_lpips_gives_the_papers_names_and_a_record(weights):
    distance = PathDistance("lpips", weights=str(weights))
    G = generator()
    record = path_score(PathPairs(G, 101, name="tiny"), distance)
    assert record["metric"] == "ppl2_wend" and record["distance"] == "lpips" and record["distance_digest"] == weights_digest(distance.module)
    assert record["network_digest"] == weights_digest(G) and record["value"] > 0 and (record["kept"], record["rejected"]) == (99, 2)
    assert json.loads(json.dumps(record)) == record
    assert [path_name(PathPairs(G, 100, **kw), distance) for kw in PATHS.values()] == list(PATHS)
    assert path_name(PathPairs(G, 100, "z", "end"), distance) == path_name(PathPairs(G, 100, eps=1e-3), distance) == "path length (lpips)"


def test_lpips_files_of_other_shapes(weights, tmp_path):
    link = tmp_path / "vgg16-397923af.pth"
    link.symlink_to(weights / link.name)
    torch.save({"lin0.model.1.weight": torch.ones(1, 64, 1, 1)}, tmp_path / "weights-vgg16-lpips.pth")
    with pytest.raises(UserError, match="do not fit LPIPS"):
        PathDistance("lpips", weights=tmp_path)
    link.unlink()
    torch.save(torch.load(weights / "weights-vgg16-lpips.pth", weights_only=True), tmp_path / "weights-vgg16-lpips.pth")
    torch.save({"features.0.weight": torch.ones(64, 3, 5, 5)}, link)
    with pytest.raises(UserError, match="do not fit LPIPS"):
        PathDistance("lpips", weights=tmp_path)


class Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", [e.file for e in LPIPS_FILES])
def test_lpips_files_never_run_code(weights, tmp_path, name):
    for e in LPIPS_FILES:
        (tmp_path / e.file).symlink_to(weights / e.file)
    (tmp_path / name).unlink()
    torch.save({"w": Harm(tmp_path / "ran")}, tmp_path / name)
    with pytest.raises(UserError, match="opened safely"):
        PathDistance("lpips", weights=tmp_path)
    assert not (tmp_path / "ran").exists()


def test_missing_weights_say_all_that_is_needed(tmp_path):
    no_web = mock.patch("torch.hub.download_url_to_file", side_effect=AssertionError("went to the web unasked"))
    with no_web, mock.patch("torch.hub.get_dir", lambda: str(tmp_path)), pytest.raises(UserError) as e:
        PathDistance("lpips")
    for words in (*(f.file for f in LPIPS_FILES), *(f.url for f in LPIPS_FILES), "527.8 MiB", "--weights", "--download", "efficientnet-lite0", "not PPL"):
        assert words in str(e.value)
    (tmp_path / LPIPS_FILES[0].file).write_bytes(b"x")
    with no_web, pytest.raises(UserError) as e:
        lpips_files(tmp_path, download=True)                                        # a folder that was named is never filled
    assert "no vgg16-397923af.pth" in str(e.value) and LPIPS_FILES[0].url not in str(e.value)
    with pytest.raises(UserError, match="takes a folder"):
        lpips_files(tmp_path / LPIPS_FILES[0].file)


def test_a_download_is_kept_only_if_whole(tmp_path):
    vgg = LPIPS_FILES[1]
    with mock.patch("torch.hub.download_url_to_file", lambda url, path, progress: Path(path).write_bytes(b"half")), pytest.raises(UserError, match="4 bytes"):
        fetch_weights(vgg, tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


# ---------------------------------------------------------------- the stand-in

def test_the_stand_in_is_never_called_ppl():
    distance = PathDistance("efficientnet-lite0")
    record = path_score(PathPairs(generator(resolution=32), 100), distance)
    assert record["metric"] == "path length (efficientnet-lite0)" and record["distance"] == "efficientnet-lite0 (not LPIPS)"
    assert "ppl" not in json.dumps(record).lower().replace("lpips", "")
    assert len(record["distance_digest"]) == 16 and record["value"] > 0


def test_the_stand_in_sees_what_rounding_hides():
    distance = PathDistance("efficientnet-lite0")
    x = torch.stack([FacesDataset(3, resolution=64)[i][0] for i in range(3)]).float()
    small, double = distance(x, x + .01), distance(x, x + .02)
    assert (small > 0).all() and torch.allclose(double / small, torch.full((3,), 4.), rtol=.15)    # a square
    assert (distance(x, x.round()) == 0).all()
    with pytest.raises(UserError, match="whole grey levels"):
        distance(x.byte(), x)


# ---------------------------------------------------------------- records and bad input

def test_the_record_says_what_decides_the_number():
    G = generator(resolution=32)
    said = PathPairs(G, 300, "w", "full", seed=4, crop=True, name="run").describe()
    assert {k: said[k] for k in ("network", "pairs", "seed", "space", "interpolation", "sampling", "eps", "resize", "range")} == dict(
        network="run", pairs=300, seed=4, space="w", interpolation="lerp", sampling="full", eps=1e-4, resize="none (16 px)", range="0 to 255, not rounded")
    base = PathPairs(G, 300).digest()
    for change in (dict(space="z"), dict(sampling="full"), dict(seed=1), dict(eps=1e-3), dict(crop=True)):
        assert PathPairs(G, 300, **change).digest() != base
    assert PathPairs(G, 500, name="other").digest() == base
    G.mapping.fc0.weight.data[0, 0] += 1
    assert PathPairs(G, 300).digest() != base


def test_resize_in_the_record_is_what_happens():
    for side, crop, words in ((1024, False, "mean of blocks, 1024 to 256 px"), (1024, True, "mean of blocks, 512 to 256 px"), (512, True, "none (256 px)"), (256, False, "none (256 px)")):
        G = Linear()
        G.img_resolution = side
        shape = path_view(torch.zeros(1, 3, side, side), crop).shape[2]
        assert PathPairs(G, 100, crop=crop).describe()["resize"] == words and words.endswith(f"{shape} px" if "to" in words else f"({shape} px)")


def test_face_crop_is_the_papers():
    x = torch.arange(64.).view(1, 1, 8, 8)
    assert torch.equal(face_crop(x)[0, 0], x[0, 0, 3:7, 2:6])


@pytest.mark.parametrize("change,words", [(dict(eps=0.), "1e-4"), (dict(eps=-1e-4), "1e-4"), (dict(eps=float("inf")), "1e-4"), (dict(space="W"), "space"),
                                          (dict(sampling="middle"), "sampling"), (dict(count=99), "100 or more"), (dict(count=0), "100 or more")])
def test_bad_settings(change, words):
    with pytest.raises(UserError, match=words):
        PathPairs(generator(), **(dict(count=100) | change))


def test_bad_networks_and_distances():
    with pytest.raises(UserError, match="needs labels"):
        PathPairs(generator(c_dim=3), 100)
    with pytest.raises(UserError, match="half precision"):
        PathPairs(generator().half(), 100)
    with pytest.raises(UserError, match="no path"):
        PathPairs(generator(z_dim=1), 100, "z")
    with pytest.raises(UserError, match="one number"):
        PathPairs(generator(), 100).distances(0, 1, lambda x, y: (x - y).square())
    with pytest.raises(UserError, match="multiple of 8"):
        face_crop(torch.zeros(1, 3, 4, 4))
    with pytest.raises(UserError, match="4 channels"):
        PathPairs(generator(channels=4), 100).pictures(0)
    with pytest.raises(UserError, match="32x32 or larger"):
        PathPairs(generator(resolution=32), 100, crop=True).distances(0, 1, PathDistance("efficientnet-lite0"))
    for start, stop in ((-1, 5), (5, 3), (0, 101)):
        with pytest.raises(UserError, match="no such pairs"):
            PathPairs(generator(), 100).distances(start, stop, pixel)


def test_bad_distances_are_not_averaged_away():
    for bad in (float("nan"), float("inf")):
        with pytest.raises(UserError, match="1 of 100"):
            path_length(torch.cat([torch.ones(99), torch.tensor([bad])]))
    for lower, higher in ((50, 50), (-1, 99), (1, 101), (float("nan"), 99)):
        with pytest.raises(UserError, match="percentiles"):
            path_length(torch.ones(100), lower, higher)
