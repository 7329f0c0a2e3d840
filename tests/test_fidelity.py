"""PSNR and SSIM: equal to scikit-image and to the super-resolution protocol, and no choice is hidden or guessed."""
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import correlate
from skimage import data as photos
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from gan_course.core import UserError, load_json, save_json
from gan_course.fidelity import format_db, mean_protocol, psnr, sr_protocol, ssim, to_y

AS_PAPER = dict(gaussian_weights=True, sigma=1.5, use_sample_covariance=False)
BYTES = dict(space="rgb", border=0, range=255)


def pair(name, scale, size=160):
    "(enlarged, original) of a photograph, uint8 HWC."
    hr = np.ascontiguousarray(getattr(photos, name)()[40:40 + size, 100:100 + size])
    im = Image.fromarray(hr)
    return np.asarray(im.resize((size // scale,) * 2, Image.Resampling.BICUBIC).resize((size, size), Image.Resampling.BICUBIC)), hr


def papers_y(img):
    "Luma as the published test scripts compute it: uint8 to [0, 1], weights, times 255; no rounding."
    return np.dot(img.astype(np.float64) / 255, [65.481, 128.553, 24.966]) + 16


def papers_ssim(a, b):
    "One channel: filter the whole picture with an outer-product window, then keep [5:-5, 5:-5]."
    g = np.exp(-np.arange(-5, 6) ** 2 / 4.5)
    window = np.outer(g / g.sum(), g / g.sum())
    blur = lambda x: correlate(x, window)[5:-5, 5:-5]
    a, b, c1, c2 = a.astype(np.float64), b.astype(np.float64), (.01 * 255) ** 2, (.03 * 255) ** 2
    m, n = blur(a), blur(b)
    va, vb, cov = blur(a * a) - m * m, blur(b * b) - n * n, blur(a * b) - m * n
    return np.mean((2 * m * n + c1) * (2 * cov + c2) / ((m * m + n * n + c1) * (va + vb + c2)))


@pytest.mark.parametrize("name", ["astronaut", "chelsea", "coffee", "rocket"])
@pytest.mark.parametrize("scale", [2, 4])
def test_equals_scikit_image_and_the_papers_scripts(name, scale):
    sr, hr = pair(name, scale)
    cut = np.s_[scale:-scale, scale:-scale]
    r = sr_protocol(sr, hr, scale)
    assert r["psnr_rgb"] == pytest.approx(peak_signal_noise_ratio(hr[cut], sr[cut], data_range=255), abs=1e-9)
    assert r["ssim_rgb"] == pytest.approx(structural_similarity(hr[cut], sr[cut], channel_axis=2, data_range=255, **AS_PAPER), abs=1e-9)
    y, z = papers_y(sr)[cut], papers_y(hr)[cut]
    assert r["psnr_y"] == pytest.approx(20 * math.log10(255 / math.sqrt(np.mean((y - z) ** 2))), abs=1e-9)
    assert r["ssim_y"] == pytest.approx(structural_similarity(z, y, data_range=255, **AS_PAPER), abs=1e-9)
    assert r["ssim_y"] == pytest.approx(papers_ssim(y, z), abs=1e-9)
    assert r["ssim_rgb"] == pytest.approx(np.mean([papers_ssim(sr[cut][..., c], hr[cut][..., c]) for c in range(3)]), abs=1e-9)


def test_known_values():
    zero, ten = np.zeros((20, 20), np.uint8), np.full((20, 20), 10, np.uint8)
    say = dict(space="grey", border=0, range=255)
    assert psnr(zero, ten, **say) == pytest.approx(20 * math.log10(25.5))
    assert ssim(zero, ten, **say) == pytest.approx(6.5025 / (100 + 6.5025))                # flat: the luminance term alone
    assert to_y(np.array([[[255, 128, 0]]], np.uint8), range=255).item() == pytest.approx(16 + 65.481 + 128.553 * 128 / 255)


def test_luma_is_that_of_matlab():
    "Corners of the colour cube with the values that rgb2ycbcr documents for uint8."
    corners = {(0, 0, 0): 16, (255, 255, 255): 235, (255, 0, 0): 81, (0, 255, 0): 145, (0, 0, 255): 41, (255, 255, 0): 210, (0, 255, 255): 170, (255, 0, 255): 106}
    y = to_y(np.array([list(corners)], np.uint8), range=255)
    assert y.shape == (1, 1, 1, 8) and y.round().ravel().tolist() == list(corners.values())


def test_layouts_types_and_ranges_agree():
    sr, hr = pair("coffee", 2, 60)
    t, u = (torch.from_numpy(np.array(v)).permute(2, 0, 1) for v in (sr, hr))
    for f in (psnr, ssim):
        for space in ("rgb", "y"):
            want = f(sr, hr, space=space, border=3, range=255)
            assert f(t, u, space=space, border=3, range=255) == pytest.approx(want, abs=1e-9)
            for kind in (np.float32, np.float64):
                assert f(sr.astype(kind) / 255, hr.astype(kind) / 255, space=space, border=3, range=1) == pytest.approx(want, abs=1e-5)
            assert f(t.double() / 127.5 - 1, u.double() / 127.5 - 1, space=space, border=3, range=2) == pytest.approx(want, abs=1e-9)
            batch = f(torch.stack([t, u, t]), torch.stack([u, u, u]), space=space, border=3, range=255)
            assert batch.shape == (3,) and batch[0].item() == batch[2].item() == pytest.approx(want, abs=1e-9)
            assert batch[1].item() == pytest.approx(math.inf if f is psnr else 1)
    assert isinstance(psnr(sr, hr, **BYTES), float)
    assert psnr(sr[::-1], hr[::-1], **BYTES) == pytest.approx(psnr(sr, hr, **BYTES))        # a view with a negative stride
    assert psnr((t / 255.).requires_grad_(), u / 255., space="rgb", border=0, range=1) == pytest.approx(psnr(sr, hr, **BYTES), abs=1e-5)


def test_nothing_is_written_into_the_pictures():
    sr, hr = pair("coffee", 2, 60)
    x, y = sr / 255. * 1.1, hr / 255.
    before = x.copy(), y.copy()
    sr_protocol(x, y, 2, range=1)
    assert (x == before[0]).all() and (y == before[1]).all()


def test_identical_pictures():
    _, hr = pair("rocket", 2, 40)
    r = sr_protocol(hr, hr, 4)
    assert r["psnr_y"] == r["psnr_rgb"] == math.inf and r["ssim_y"] == pytest.approx(1) and r["ssim_rgb"] == pytest.approx(1)
    assert format_db(r["psnr_y"]) == "inf dB" and format_db(torch.tensor(30.301)) == "30.30 dB"
    assert mean_protocol([r, sr_protocol(hr[::-1], hr, 4)])["psnr_y"] == math.inf


def test_the_record_says_what_was_done_and_travels(tmp_path):
    sr, hr = pair("coffee", 3, 60)
    r = sr_protocol(sr, hr, 3)
    assert {k: r[k] for k in ("spaces", "scale", "border", "range", "rounding", "clamped", "pictures")} == {
        "spaces": ["y", "rgb"], "scale": 3, "border": 3, "range": 255, "rounding": "8 bits, half to even", "clamped": 0, "pictures": 1}
    assert "BT.601" in r["y"] and "not rounded" in r["y"] and "11x11" in r["ssim"]
    assert load_json(save_json(tmp_path / "r.json", r)) == r
    assert json.loads(json.dumps(sr_protocol(sr, hr, np.int64(3)))) == r


def test_clamping_and_rounding_are_part_of_the_protocol_and_counted():
    hr = np.full((24, 24, 3), .5)
    sr = hr.copy()
    sr[:12] = 1.2                                                                          # counts as 255
    r = sr_protocol(sr, hr, 1, border=0, range=1)
    assert r["clamped"] == .5 and r["psnr_rgb"] == pytest.approx(10 * math.log10(255 ** 2 / (127 ** 2 / 2)))   # 0.5 * 255 = 127.5 becomes 128
    with pytest.raises(UserError, match="hr: pixels out of range"):
        sr_protocol(hr, sr, 1, range=1)
    quarter = sr_protocol(hr + .25 / 255 - .5 / 255, hr - .5 / 255, 1, border=0, range=1)
    assert quarter["psnr_rgb"] == math.inf                                                 # 127.25 and 127


def test_grey_pictures_are_called_grey():
    sr, hr = (np.asarray(Image.fromarray(v).convert("L")) for v in pair("chelsea", 2, 60))
    r = sr_protocol(sr, hr, 2)
    assert r["spaces"] == ["grey"] and not {"psnr_y", "psnr_rgb"} & set(r)
    assert r["psnr_grey"] == pytest.approx(peak_signal_noise_ratio(hr[2:-2, 2:-2], sr[2:-2, 2:-2], data_range=255), abs=1e-9)
    assert r == sr_protocol(sr[..., None], hr[..., None], 2) == sr_protocol(torch.tensor(sr)[None, None], torch.tensor(hr)[None, None], 2)


OK8, OKF = np.zeros((30, 40, 3), np.uint8), np.zeros((30, 40, 3))
BAD = {
    "size": (OK8, OK8[:-1], BYTES, "a and b: the two pictures differ in shape"),
    "batch size": (torch.zeros(2, 3, 20, 20), torch.zeros(3, 3, 20, 20), {**BYTES, "range": 1}, "differ in shape"),
    "alpha": (np.zeros((30, 40, 4), np.uint8),) * 2 + (BYTES, r"a: wrong number of channels \(found 4"),
    "array CHW": (np.zeros((3, 30, 40), np.uint8),) * 2 + (BYTES, "wrong number of channels"),
    "tensor HWC": (torch.zeros(30, 40, 3),) * 2 + ({**BYTES, "range": 1}, "wrong number of channels"),
    "array NHWC": (OK8[None], OK8[None], BYTES, "not a picture"),
    "tensor HW": (torch.zeros(30, 40),) * 2 + ({**BYTES, "range": 1}, "not a picture"),
    "a list": ([[1, 2]], [[1, 2]], BYTES, "not a picture"),
    "a PIL picture": (Image.fromarray(OK8), OK8, BYTES, "not a picture .*np.asarray"),
    "empty": (OK8[:0], OK8[:0], BYTES, "an empty picture"),
    "int32": (OK8.astype(np.int32), OK8, BYTES, "no stated range"),
    "16 bits": (OK8.astype(np.uint16), OK8, BYTES, "no stated range"),
    "bool": (torch.zeros(3, 20, 20) > 0,) * 2 + (BYTES, "no stated range"),
    "complex": (OKF + 0j, OKF, {**BYTES, "range": 1}, "no stated range"),
    "floats said to be bytes": (OKF, OKF, BYTES, "type and range of the pixels do not fit .*range=255"),
    "bytes said to be floats": (OK8, OK8, {**BYTES, "range": 1}, "type and range"),
    "one of each": (OK8, OKF, BYTES, "b: type and range"),
    "unknown range": (OKF, OKF, {**BYTES, "range": 3}, "range: unknown value"),
    "range of another picture": (OKF, OKF - .5, {**BYTES, "range": 1}, r"b: pixels out of range \(found -0.5 to -0.5; expected 0 to 1\)"),
    "0 to 255 in floats": (OKF + 200, OKF, {**BYTES, "range": 1}, "a: pixels out of range"),
    "NaN": (OKF, np.where(np.arange(40)[:, None] == 7, np.nan, OKF), {**BYTES, "range": 2}, r"b: pixels that are not finite numbers \(found 90 of 3600"),
    "infinite": (OKF + np.inf, OKF, {**BYTES, "range": 1}, "a: pixels that are not finite"),
    "unknown space": (OK8, OK8, {**BYTES, "space": "lab"}, "space: unknown value"),
    "grey as rgb": (OK8[..., 0], OK8[..., 0], BYTES, "colour space and channels do not fit"),
    "grey as y": (OK8[..., 0], OK8[..., 0], {**BYTES, "space": "y"}, "colour space and channels do not fit"),
    "rgb as grey": (OK8, OK8, {**BYTES, "space": "grey"}, "colour space and channels do not fit"),
    "border": (OK8, OK8, {**BYTES, "border": 15}, r"border: .*\(found 15; expected a whole number from 0 to"),
    "negative border": (OK8, OK8, {**BYTES, "border": -1}, "border: this border cannot be cut off"),
    "border no integer": (OK8, OK8, {**BYTES, "border": 2.}, "border: this border cannot be cut off"),
}


@pytest.mark.parametrize("f", [psnr, ssim])
@pytest.mark.parametrize("case", list(BAD))
def test_bad_input_is_named(f, case):
    a, b, say, message = BAD[case]
    with pytest.raises(UserError, match=message):
        f(a, b, **say)


def test_limits_of_size():
    tiny = np.zeros((11, 12, 3), np.uint8)
    assert ssim(tiny, tiny, **BYTES) == pytest.approx(1)
    with pytest.raises(UserError, match="at least 11x11"):
        ssim(tiny[1:], tiny[1:], **BYTES)
    assert psnr(tiny[:1, :1], tiny[:1, :1] + 255, **BYTES) == 0
    assert psnr(tiny, tiny + 255, **{**BYTES, "border": 5}) == 0
    with pytest.raises(UserError, match="from 0 to 5"):
        psnr(tiny, tiny, **{**BYTES, "border": 6})
    with pytest.raises(UserError, match="from 0 to 2"):
        sr_protocol(np.zeros((16, 16, 3), np.uint8), np.zeros((16, 16, 3), np.uint8), 4)    # 8 pixels are left, SSIM needs 11


@pytest.mark.parametrize("f", [psnr, ssim])
def test_no_choice_has_a_default(f):
    for missing in BYTES:
        with pytest.raises(TypeError, match=missing):
            f(OK8, OK8, **{k: v for k, v in BYTES.items() if k != missing})
    with pytest.raises(TypeError):
        f(OK8, OK8, "rgb", 0, 255)                                                          # by position, a table would not show what is what


@pytest.mark.parametrize("scale", [0, -2, 1.5, True, None, "2"])
def test_bad_scale(scale):
    with pytest.raises(UserError, match="scale: not a scale"):
        sr_protocol(OK8, OK8, scale)


def test_protocol_names_sr_and_hr():
    for sr, hr, kw, message in (
            (OK8[:-1], OK8, {}, "sr: sr and hr differ in shape"), (OKF, OKF, {}, "sr: type and range"), (OKF, OK8, {"range": 1}, "hr: type and range"),
            (OKF + np.nan, OKF, {"range": 1}, "sr: pixels that are not finite"), (OKF, OKF + np.inf, {"range": 1}, "hr: pixels that are not finite"),
            (OKF - np.inf, OKF, {"range": 1}, "sr: pixels that are not finite"),
            (torch.zeros(2, 3, 20, 20), torch.zeros(2, 3, 20, 20), {"range": 1}, "one record is for one picture")):
        with pytest.raises(UserError, match=message):
            sr_protocol(sr, hr, 2, **kw)


def test_only_like_records_are_averaged():
    sr, hr = pair("coffee", 2, 60)
    r = sr_protocol(sr, hr, 2)
    three = [r, sr_protocol(hr[::-1], hr, 2), sr_protocol(sr[:, ::-1], hr, 2)]
    m = mean_protocol(three)
    assert m["psnr_y"] == pytest.approx(np.mean([x["psnr_y"] for x in three])) and m["pictures"] == 3 and m["border"] == 2
    for other, field in ((sr_protocol(sr, hr, 2, border=0), "border"), (sr_protocol(sr, hr, 3, border=2), "scale"), ({**r, "y": "full range"}, "y"),
                         ({k: v for k, v in r.items() if k != "rounding"}, "rounding"), ({**r, "extra": 1}, "extra")):
        with pytest.raises(UserError, match=f"{field}: these records were not measured alike"):
            mean_protocol([r, other])
    with pytest.raises(UserError, match="no mean of nothing"):
        mean_protocol([])
