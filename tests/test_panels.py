"""Panels: what is planted is found, what is not there is not claimed, and every figure carries the numbers behind it."""
import io

import matplotlib
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from skimage import data as photos

from gan_course import panels
from gan_course.core import UserError
from gan_course.faces import FacesDataset
from gan_course.health import diversity
from gan_course.images import to_float
from gan_course.plots import radial_spectrum

matplotlib.use("agg")
PANELS = {name: getattr(panels, name) for name in ("diversity_panel", "nearest_panel", "cheat_panel", "spectrum_panel")}


class Pictures(torch.utils.data.Dataset):
    "A data set of pictures, with or without labels, that counts how often it is asked."
    def __init__(self, x, labels=True): self.x, self.labels, self.asked = x, labels, 0
    def __len__(self): return len(self.x)
    def __getitem__(self, i):
        self.asked += 1
        return (self.x[i], torch.zeros(0)) if self.labels else self.x[i]


def draw(n, size=32, seed=0):
    "Faces as a uint8 batch."
    faces = FacesDataset(n, size, seed=seed)
    return torch.stack([faces[i][0] for i in range(n)])


@pytest.fixture(scope="module")
def real(): return draw(150)


@pytest.fixture(scope="module")
def fake(): return draw(100, seed=1)                                    # samples of a perfect generator


def crops(size=64, n=120, offset=0):
    "Crops of photographs; with `offset` they do not begin at a multiple of 8."
    rng, out = np.random.RandomState(0), []
    pictures = [photos.astronaut(), photos.coffee(), photos.chelsea(), photos.rocket()]
    for i in range(n):
        p = pictures[i % 4]
        y, x = (8 * rng.randint(0, (s - size - 8) // 8) for s in p.shape[:2])
        out.append(p[y + offset:y + offset + size, x + offset:x + offset + size])
    return torch.from_numpy(np.stack(out)).permute(0, 3, 1, 2).contiguous()


def through_jpeg(x, quality):
    "Each picture encoded and decoded again."
    out = []
    for p in x:
        f = io.BytesIO()
        Image.fromarray(p.permute(1, 2, 0).numpy()).save(f, "JPEG", quality=quality)
        out.append(torch.from_numpy(np.array(Image.open(f))).permute(2, 0, 1))
    return torch.stack(out)


def verdicts(found): return {r["feature"]: r["verdict"] for r in found["rows"] if r["verdict"] != "fine"}


# ---------------------------------------------------------------- all panels

@pytest.mark.parametrize("name", list(PANELS))
def test_a_closed_figure_with_a_title_that_can_be_saved(name, fake, real):
    import matplotlib.pyplot as plt

    plt.close("all")
    fig, found = PANELS[name](fake, real)
    assert isinstance(fig, matplotlib.figure.Figure) and plt.get_fignums() == [] and fig.get_label()
    assert isinstance(found, dict) and len(found) > 3
    f = io.BytesIO()
    fig.savefig(f, format="png")
    assert 5_000 < len(f.getvalue()) < 120_000


@pytest.mark.parametrize("name", list(PANELS))
def test_bytes_floats_tensors_and_datasets_say_the_same(name, fake, real):
    def numbers(v):
        if isinstance(v, dict): return [n for x in v.values() for n in numbers(x)]
        if isinstance(v, (list, tuple)): return [n for x in v for n in numbers(x)]
        if isinstance(v, (torch.Tensor, np.ndarray)): return np.asarray(v, float).ravel().tolist()
        return [float(v)] if isinstance(v, (int, float)) else []
    want = numbers(PANELS[name](fake, real)[1])
    for f, r in ((to_float(fake), to_float(real)), (fake, Pictures(real)), (to_float(fake), Pictures(real, labels=False)), (fake, FacesDataset(150, 32))):
        np.testing.assert_allclose(numbers(PANELS[name](f, r)[1]), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(PANELS))
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_any_number_of_channels(name, channels):
    x = torch.randint(0, 256, (24, channels, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    fig, found = PANELS[name](x[:12], x[12:])
    fig.savefig(io.BytesIO(), format="png")
    assert found


GOOD = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
BAD = {
    "no samples": (GOOD[:0], GOOD, "fake: too few pictures"),
    "one sample": (GOOD[:1], GOOD, "fake: too few pictures .*found 1"),
    "no real picture": (GOOD, GOOD[:0], "real: too few pictures"),
    "one real picture": (GOOD, Pictures(GOOD[:1]), "real: too few pictures"),
    "other size": (GOOD, GOOD[..., :16, :16], r"differ in shape \(found \[3, 32, 32\] and \[3, 16, 16\]"),
    "other channels": (GOOD[:, :1], Pictures(GOOD), r"differ in shape \(found \[1, 32, 32\] and \[3, 32, 32\]"),
    "mixed sizes": (GOOD, Pictures([*GOOD[:4], GOOD[4, :, :16]]), r"real: a picture does not fit \(found torch.uint8 \[3, 16, 32\]"),
    "mixed channels": (GOOD, Pictures([*GOOD[:4], GOOD[4, :1]]), "real: a picture does not fit"),
    "no batch": (GOOD[0], GOOD, "fake: no set of pictures"),
    "channels last": (GOOD.permute(0, 2, 3, 1), GOOD, "fake: not pictures .*move the channels first"),
    "arrays": (GOOD, Pictures(GOOD.numpy()), "real: a picture does not fit"),
    "a path": (GOOD, "faces.zip", "real: a picture does not fit|real: not pictures"),
    "a number": (GOOD, 3, "real: no set of pictures"),
    "int64": (GOOD.long(), GOOD, "fake: a picture does not fit"),
    "0 to 255 in floats": (GOOD.float(), GOOD, "fake: floats far out of range"),
    "NaN": (to_float(GOOD) * torch.tensor([1, 1, 1, 1, 1, float("nan")])[:, None, None, None], GOOD, r"fake: pixels that are not finite numbers \(found 3072 of"),
    "infinite": (GOOD, to_float(GOOD) + float("inf"), "real: pixels that are not finite"),
}


@pytest.mark.parametrize("name", list(PANELS))
@pytest.mark.parametrize("case", list(BAD))
def test_bad_input_is_named(name, case):
    f, r, message = BAD[case]
    with pytest.raises(UserError, match=message):
        PANELS[name](f, r)


@pytest.mark.parametrize("name", ["diversity_panel", "cheat_panel", "spectrum_panel"])
def test_n_under_two_is_refused(name):
    with pytest.raises(UserError, match="too few pictures .*n=1"):
        PANELS[name](GOOD, GOOD, n=1)


def test_chunks_pass_over_each_picture_once_and_choose_without_repeats():
    d = Pictures(torch.arange(130, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 4, 4))
    values = torch.cat([x for _, x in panels.picture_chunks(d)])[:, 0, 0, 0]
    assert torch.equal(((values + 1) * 127.5).round(), torch.arange(130.)) and d.asked == 130
    index = torch.cat([i for i, _ in panels.picture_chunks(d, 50)])
    assert len(index.unique()) == 50 and index.max() > 100 and torch.equal(index, torch.cat([i for i, _ in panels.picture_chunks(d, 50)]))


# ---------------------------------------------------------------- diversity

def test_diversity_is_that_of_health_and_counts_what_it_saw(fake, real):
    _, found = panels.diversity_panel(fake, real)
    assert found["ratio"] == pytest.approx(diversity(to_float(fake)) / diversity(to_float(real)))
    assert found["real_distances"].mean().item() == pytest.approx(found["real"]) and len(found["fake_distances"]) == 100 * 99 / 2
    assert .9 < found["ratio"] < 1.1 and found["close"] < .03 and found["verdict"] == "samples differ as real pictures do"
    _, some = panels.diversity_panel(fake, real, n=40)
    assert (some["n_fake"], some["n_real"], some["of_real"]) == (40, 40, 150)


@pytest.mark.parametrize("size", [32, 64])
def test_planted_collapse(size):
    real, fake = to_float(draw(100, size)), to_float(draw(60, size, seed=1))
    noise = .05 * torch.randn(fake.shape, generator=torch.Generator().manual_seed(0))
    _, found = panels.diversity_panel(fake[:1] + noise, real)
    assert found["ratio"] < .15 and found["close"] == 1 and found["verdict"].startswith("samples repeat")
    part = fake.clone()
    part[:20] = fake[:1] + noise[:20]
    _, found = panels.diversity_panel(part, real)
    assert found["ratio"] > .7 and found["verdict"].startswith("a part of the samples repeats")
    assert found["close"] >= 190 / 1770                                 # the pairs among 20 of 60


def test_equal_real_pictures_are_no_yardstick(fake):
    with pytest.raises(UserError, match="real: the real pictures are all the same"):
        panels.diversity_panel(fake, fake[:1].expand(5, -1, -1, -1))


# ---------------------------------------------------------------- nearest

@pytest.mark.parametrize("size", [32, 64])
def test_planted_copies_are_found_and_nothing_else(size):
    real, fake = draw(150, size), to_float(draw(30, size, seed=1))
    fake[3], fake[17] = to_float(real[149]), to_float(real[70]) + .05 * torch.randn(3, size, size, generator=torch.Generator().manual_seed(0))
    fig, found = panels.nearest_panel(fake, real)
    assert found["index"][[3, 17]].tolist() == [149, 70] and found["distance"][3] == 0 and found["ratio"][17] < .3
    assert found["copies"] == 2 and found["searched"] == 150 and found["statement"].startswith("2 of 30 samples")
    shown = fig.axes[0].images[0].get_array()
    assert shown.shape == (2 * size, 8 * size, 3) and (shown[size:, :size] == real[149].permute(1, 2, 0).numpy()).all()      # the nearest first
    assert fig.axes[0].get_xticklabels()[0].get_text() == "0.00"


def test_distances_are_root_mean_squares_and_the_yardstick_leaves_itself_out():
    real = torch.tensor([-1., -.6, 0., 1.])[:, None, None, None].expand(4, 3, 8, 8)
    _, found = panels.nearest_panel(torch.tensor([-.9, .9])[:, None, None, None].expand(2, 3, 8, 8), real, limit=.25)
    torch.testing.assert_close(found["distance"], torch.tensor([.1, .1]))
    torch.testing.assert_close(found["real_distance"].sort().values, torch.tensor([.4, .4, .6, 1.]))
    assert found["index"].tolist() == [0, 3] and found["yardstick"] == pytest.approx(.4) and found["copies"] == 0
    torch.testing.assert_close(found["ratio"], torch.tensor([.25, .25]))


def test_search_equals_a_plain_loop_over_more_than_one_chunk(fake, real):
    _, found = panels.nearest_panel(fake, real, measure=8, yardstick=30)
    small = lambda x: F.avg_pool2d(to_float(x), 4).flatten(1).double()
    d = torch.stack([(small(real) - q).square().mean(1).sqrt() for q in small(fake)])
    torch.testing.assert_close(found["distance"].double(), d.min(1).values, rtol=1e-4, atol=1e-6)
    assert torch.equal(found["index"], d.argmin(1)) and len(found["real_distance"]) == 30 and found["measure"] == "pixels at 8 px"


def test_tiny_distances_survive():
    "A matrix product in float32 would lose a difference of 1e-4 against values of 1."
    base = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    _, found = panels.nearest_panel(base[:2] + 1e-4, base)
    torch.testing.assert_close(found["distance"], torch.full((2,), 1e-4), rtol=1e-2, atol=0)


def test_part_of_the_data_is_searched_and_said(fake, real):
    copy = to_float(real)
    _, found = panels.nearest_panel(copy, real, n=60)
    assert found["searched"] == 60 and int((found["distance"] == 0).sum()) == 60 and "60 of 150 training pictures searched" in found["statement"]
    assert (found["distance"] == 0).nonzero().flatten().tolist() == found["index"][found["distance"] == 0].tolist()


def test_a_measure_of_ones_own(real):
    mirrored = to_float(real[:10]).flip(3)
    mirrored = mirrored + .02
    assert panels.nearest_panel(mirrored, real)[1]["index"].tolist() != list(range(10))
    _, found = panels.nearest_panel(mirrored, real, measure=lambda x: x + x.flip(3))
    assert found["index"].tolist() == list(range(10)) and found["copies"] == 10 and found["measure"] == "the given features"
    for wrong in (lambda x: x[:1], lambda x: x * float("nan")):
        with pytest.raises(UserError, match="measure: features do not fit"):
            panels.nearest_panel(mirrored, real, measure=wrong)


def test_duplicates_in_the_data(fake, real):
    with pytest.raises(UserError, match="real: more than half of the real pictures stand there twice"):
        panels.nearest_panel(fake, torch.cat([real[:20], real[:20]]))


# ---------------------------------------------------------------- what D could cheat on

def test_nothing_is_claimed_about_good_samples(fake, real):
    fig, found = panels.cheat_panel(fake, real)
    assert verdicts(found) == {} and found["statement"] == "Nothing measured here tells real from made"
    assert all(r["next"] == "" for r in found["rows"]) and [r["feature"] for r in found["rows"]] == list(panels.CHEATS)
    assert found["real"]["pictures"] == found["fake"]["pictures"] == 100                       # as many of both


@pytest.mark.parametrize("side,where", [(0, np.s_[:, :, :3]), (1, np.s_[:, :, -3:]), (2, np.s_[..., :3]), (3, np.s_[..., -3:])])
@pytest.mark.parametrize("value", [0, 255, 130])
def test_planted_border(fake, real, side, where, value):
    framed = real.clone()
    framed[where] = value
    _, found = panels.cheat_panel(fake, framed)
    assert found["real"]["constant_lines"] == [3 if k == side else 0 for k in range(4)] and found["fake"]["constant_lines"] == [0] * 4
    seen = verdicts(found)
    assert {seen[k] for k in ("constant border lines", "pictures with a flat border", "variation at the border")} == {"D can see it"}
    assert "8x8 grid" not in seen                                                              # the bar's edge is no grid
    learnt = fake.clone()
    learnt[where] = value
    _, found = panels.cheat_panel(learnt, framed)
    assert verdicts(found) == {"constant border lines": "in the data", "pictures with a flat border": "in the data"}


def test_bars_of_different_widths(fake, real):
    "Every other picture is padded; no line is constant over all pictures."
    padded = real.clone()
    for i in range(0, len(padded), 2): padded[i, :, :2 + i % 5] = 255
    _, found = panels.cheat_panel(fake, padded)
    assert found["real"]["constant_lines"] == [0] * 4 and .4 < found["real"]["flat"][0] < .6
    assert verdicts(found)["pictures with a flat border"] == "D can see it" and "constant border lines" not in verdicts(found)


@pytest.mark.parametrize("offset", [0, 3])
def test_planted_compression_grid(offset):
    clean = crops()
    real, fake = clean[:60], clean[60:]
    assert "8x8 grid" not in verdicts(panels.cheat_panel(fake, real)[1])
    big = through_jpeg(crops(72, 60), 25)
    jpeg = big[:, :, offset:offset + 64, offset:offset + 64]                                   # cropped after the compression
    fig, found = panels.cheat_panel(fake, jpeg)
    grid = panels._grids(found["real"], found["fake"])[0]
    assert grid.argmax(1).tolist() == [(8 - offset) % 8] * 2 and grid.amax(1).min() > 1.2
    assert verdicts(found)["8x8 grid"] == "D can see it" and "originals" in next(r["next"] for r in found["rows"] if r["feature"] == "8x8 grid")
    assert verdicts(panels.cheat_panel(through_jpeg(fake, 25), through_jpeg(real, 25))[1]).get("8x8 grid") == "in the data"


@pytest.mark.parametrize("size,quality", [(32, 30), (64, 50), (128, 50)])
def test_grid_in_faces_that_all_have_their_edges_at_the_same_place(size, quality):
    real, fake = draw(100, size), draw(100, size, seed=1)
    found = panels.cheat_panel(fake, through_jpeg(real, quality))[1]
    assert verdicts(found)["8x8 grid"] == "D can see it"
    assert verdicts(panels.cheat_panel(fake, real)[1]) == {}


def test_blockiness_by_hand():
    ramp = torch.arange(32.).repeat(2, 1, 32, 1) / 32 - .5                                     # steps of 1/32 everywhere
    for k in (8, 16, 24): ramp[..., k:] += 1 / 32                                              # of 2/32 across the grid
    ramp[1] += .1                                                                              # or every line would be a constant border
    seen = panels.cheat_features(ramp / 2)
    torch.testing.assert_close(panels._grids(seen, seen)[1][1], torch.tensor([2., 2 / 3, 1, 1, 1, 1, 1, 2 / 3]).double(), rtol=1e-4, atol=0)


def test_range_and_levels(fake, real):
    dull = (real.float() * .6 + 50).to(torch.uint8)                                            # 50 to 203
    seen = verdicts(panels.cheat_panel(fake, dull)[1])
    assert {"darkest level", "brightest level", "levels in use"} <= set(seen)
    posterised = verdicts(panels.cheat_panel(fake, real // 16 * 17)[1])
    assert posterised["levels in use"] == "D can see it"
    clipped = ((real.float() - 128) * 3 + 128).clamp(0, 255).to(torch.uint8)
    _, found = panels.cheat_panel(fake, clipped)
    assert verdicts(found)["pixels at black or white"] == "D can see it" and found["real"]["at_limits"] == pytest.approx(((clipped == 0) | (clipped == 255)).float().mean().item(), abs=.05)
    _, found = panels.cheat_panel(to_float(fake) * 1.5, real)
    assert verdicts(found)["pixels beyond -1 to 1"] == "D can see it"
    assert found["fake"]["beyond"] == pytest.approx((to_float(fake).abs() * 1.5 > 1 + 1 / 255).float().mean().item()) and found["real"]["beyond"] == 0


def test_small_pictures_have_no_grid_and_say_so():
    rows = panels.cheat_panel(GOOD[..., :16, :16], GOOD[..., 16:, 16:])[1]["rows"]
    assert {r["feature"]: r["verdict"] for r in rows}["8x8 grid"] == "not measured"
    tiny = panels.cheat_panel(GOOD[..., :4, :4], GOOD[..., 4:8, 4:8])[1]["rows"]
    assert len(tiny) == len(panels.CHEATS)


def test_real_pictures_that_are_all_the_same(fake):
    "Every line is a constant border; there is no line left for a grid."
    _, found = panels.cheat_panel(fake, fake[:1].expand(9, -1, -1, -1))
    assert found["real"]["constant_lines"] == [32] * 4
    assert verdicts(found)["constant border lines"] == "D can see it" and verdicts(found)["8x8 grid"] == "not measured"


def test_the_table_has_every_row_and_the_next_step(fake, real):
    framed = real.clone()
    framed[:, :, :2] = 0
    rows = panels.cheat_panel(fake, framed)[1]["rows"]
    text = panels.cheat_table(rows)
    assert all(any(line.startswith(k) for line in text.splitlines()) for k in panels.CHEATS)
    assert text.count("next: ") == sum(r["verdict"] != "fine" for r in rows) == sum(bool(r["next"]) for r in rows) > 0


# ---------------------------------------------------------------- spectrum

def test_whitened_noise_lies_at_zero():
    noise = .2 * torch.randn(200, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    _, found = panels.spectrum_panel(noise[:100], noise[100:])
    assert np.abs(found["real"][2:]).max() < .5 and abs(found["gap"]) < .5 and found["std_real"] == pytest.approx(.2, abs=.002)
    assert found["verdict"] == "samples are within 3 dB of real pictures at every frequency"
    np.testing.assert_allclose(found["fake"], radial_spectrum(noise[:100])[1] - 20 * np.log10(found["std_real"]), atol=1e-6)
    assert found["real_map"].mean() == pytest.approx(0, abs=.5)


@pytest.mark.parametrize("kx,ky", [(16, 0), (0, 16), (16, 16), (6, 0), (4, 10)])
def test_planted_peak(kx, ky):
    g = torch.Generator().manual_seed(0)
    noise = .3 * torch.randn(120, 1, 32, 32, generator=g)
    t = torch.arange(32.)
    wave = torch.cos(2 * np.pi * (kx * t[None, :] + ky * t[:, None]) / 32)
    _, found = panels.spectrum_panel(noise[:60] + .1 * wave, noise[60:])
    x, y = found["peak_at"]
    assert {(abs(x), abs(y))} == {(kx / 32, ky / 32)} and x * y >= (0 if kx < 16 else -1) and found["peak"] > 8
    power = 1 if (kx % 16 == 0 and ky % 16 == 0) else .25                                     # of a cosine at one bin; at the limit both halves fall on it
    bin_power = .01 * power * 32 ** 2 * (1 / 1.5) ** 2                                        # Hann keeps (mean w)^2 / mean w^2 = 1 / 1.5 in each direction
    there = found["fake_map"][int(y * 32) + 16, int(x * 32) + 16] + 20 * np.log10(found["std_real"])
    assert there == pytest.approx(10 * np.log10(.09 + bin_power), abs=.7)


def test_blur_and_checkerboard(fake, real):
    _, found = panels.spectrum_panel(F.avg_pool2d(to_float(fake), 3, 1, 1), real)
    assert found["gap"] < -5 and found["gap_at"] > .2 and "too little" in found["verdict"]
    board = (-1.) ** (torch.arange(32)[:, None] + torch.arange(32))
    _, found = panels.spectrum_panel(to_float(fake) + .1 * board, real)
    assert tuple(map(abs, found["peak_at"])) == (.5, .5) and found["peak"] > 10


def test_spectra_need_squares_and_a_real_picture_with_something_on_it(fake):
    with pytest.raises(UserError, match="a spectrum needs square pictures"):
        panels.spectrum_panel(fake[..., :16], fake[..., :16])
    with pytest.raises(UserError, match="real: the real pictures are one flat colour"):
        panels.spectrum_panel(fake, torch.full((4, 3, 32, 32), 9, dtype=torch.uint8))


def test_maps_and_curves_agree(fake, real):
    _, found = panels.spectrum_panel(fake, real)
    k = np.hypot(*np.meshgrid(np.arange(-16, 16), np.arange(-16, 16))).round()
    rings = [10 * np.log10(np.mean(10 ** (found["real_map"][k == r] / 10))) for r in range(1, 17)]
    np.testing.assert_allclose(rings, found["real"][1:], atol=1e-6)
