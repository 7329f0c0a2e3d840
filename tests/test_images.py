"""Decoding: every mode against a reference made by hand, every cut refused, and no error but UserError."""
import io
import struct
import subprocess
import sys
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from gan_course.core import UserError
from gan_course.images import DecodePolicy, decode_image, encode_png, image_grid, probe_image, save_image, to_float, to_uint8

RNG = np.random.default_rng(7)
SMALL = RNG.integers(0, 256, (20, 40, 3), np.uint8)  # 40 wide, 20 high


def saved(im, fmt, **kw):
    f = io.BytesIO()
    (im if isinstance(im, Image.Image) else Image.fromarray(im)).save(f, fmt, **kw)
    return f.getvalue()


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_bytes(rows, width, bits, colour, before=b"", after=b""):
    "A PNG from raw rows, written by hand: Pillow cannot write all of these kinds."
    body = zlib.compress(b"".join(b"\0" + r for r in rows))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, len(rows), bits, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + before + chunk(b"IDAT", body) + after + chunk(b"IEND", b"")


def png16(a, colour, **kw):
    return png_bytes([r.astype(">u2").tobytes() for r in a], a.shape[1], 16, colour, **kw)


# ---- modes ----------------------------------------------------------------------------------------------------------------------

def test_rgb_and_grey():
    assert np.array_equal(decode_image(saved(SMALL, "PNG")), SMALL)
    grey = SMALL[..., 0]
    assert np.array_equal(decode_image(saved(grey, "PNG")), np.repeat(grey[..., None], 3, 2))
    assert np.array_equal(decode_image(saved(grey, "PNG"), DecodePolicy(channels=1)), grey[..., None])


def test_palette_gives_colours_not_indices():
    colours = RNG.integers(0, 256, (16, 3), np.uint8)
    index = RNG.integers(0, 16, (32, 32), np.uint8)
    im = Image.frombytes("P", (32, 32), index.tobytes())
    im.putpalette(colours.tobytes())
    assert np.array_equal(decode_image(saved(im, "PNG")), colours[index])


@pytest.mark.parametrize("alpha,back", [("white", 255), ("black", 0)])
def test_palette_with_transparency(alpha, back):
    colours = RNG.integers(0, 256, (4, 3), np.uint8)
    index = RNG.integers(0, 4, (8, 8), np.uint8)
    im = Image.frombytes("P", (8, 8), index.tobytes())
    im.putpalette(colours.tobytes())
    want = colours[index].copy()
    want[index == 2] = back
    assert np.array_equal(decode_image(saved(im, "PNG", transparency=2), DecodePolicy(alpha=alpha)), want)


def test_alpha_over_white_black_and_kept():
    rgba = RNG.integers(0, 256, (9, 7, 4), np.uint8)
    data, a = saved(rgba, "PNG"), rgba[..., 3:].astype(float) / 255
    for name, back in (("white", 255), ("black", 0)):
        want = a * rgba[..., :3] + (1 - a) * back
        assert np.abs(decode_image(data, DecodePolicy(alpha=name)) - want).max() <= 0.5
    assert np.array_equal(decode_image(data, DecodePolicy(channels=4)), rgba)
    with pytest.raises(UserError, match="cat.png.*transparent"):
        decode_image(data, DecodePolicy(alpha="refuse"), "cat.png")


def test_grey_alpha():
    la = RNG.integers(0, 256, (9, 7, 2), np.uint8)
    data, a = saved(la, "PNG"), la[..., 1].astype(float) / 255
    got = decode_image(data)
    assert np.abs(got[..., 0] - (a * la[..., 0] + (1 - a) * 255)).max() <= 0.5
    assert np.array_equal(got[..., 0], got[..., 2])
    assert np.array_equal(decode_image(data, DecodePolicy(channels=2)), la)


def test_transparent_colour_of_rgb_and_grey():
    rgb = np.zeros((4, 4, 3), np.uint8) + 90
    rgb[1, 2] = (9, 8, 7)
    got = decode_image(saved(rgb, "PNG", transparency=(9, 8, 7)))
    assert got[1, 2].tolist() == [255] * 3 and got[0, 0].tolist() == [90] * 3
    grey = np.zeros((4, 4), np.uint8) + 90
    grey[1, 2] = 7
    assert decode_image(saved(grey, "PNG", transparency=7))[1, 2].tolist() == [255] * 3


def test_one_bit():
    bits = RNG.integers(0, 2, (10, 11)).astype(bool)
    want = np.repeat((bits * 255).astype(np.uint8)[..., None], 3, 2)
    for fmt in ("PNG", "TIFF", "BMP"):
        assert np.array_equal(decode_image(saved(Image.fromarray(bits), fmt)), want), fmt
    assert probe_image(saved(Image.fromarray(bits), "PNG")).bits == 1


def test_cmyk_is_ink_not_rgba():
    cmyk = np.zeros((16, 16, 4), np.uint8)
    cmyk[:, 8:] = (200, 0, 0, 50)
    for fmt, kw, tol in (("TIFF", {}, 1), ("JPEG", dict(quality=100, subsampling=0), 4)):
        got = decode_image(saved(Image.frombytes("CMYK", (16, 16), cmyk.tobytes()), fmt, **kw))
        ink = cmyk.astype(float) / 255
        want = 255 * (1 - ink[..., :3]) * (1 - ink[..., 3:])
        assert got.shape == (16, 16, 3) and np.abs(got[:, [2, 13]] - want[:, [2, 13]]).max() <= tol


# ---- sixteen bits ----------------------------------------------------------------------------------------------------------------

RAMP = np.linspace(0, 65535, 64 * 64).round().astype(np.uint16).reshape(64, 64)


@pytest.mark.parametrize("data", [
    png16(RAMP, 0), saved(RAMP, "PNG"), saved(RAMP, "TIFF"), saved(Image.frombytes("I;16B", (64, 64), RAMP.astype(">u2").tobytes()), "TIFF"),
    b"P5 64 64 65535\n" + RAMP.astype(">u2").tobytes()], ids=["png", "pillow png", "tiff", "tiff big endian", "pgm"])
def test_grey16_is_scaled_by_257(data):
    got = decode_image(data, DecodePolicy(channels=1))[..., 0]
    assert np.abs(got - RAMP / 257).max() <= 0.5
    assert (got == 255).mean() < 0.01 and probe_image(data).bits == 16
    with pytest.raises(UserError, match="ramp.*16"):
        decode_image(data, DecodePolicy(sixteen_bit="refuse"), "ramp")


@pytest.mark.parametrize("colour,channels", [(2, 3), (6, 4), (4, 2)])
def test_colour16_is_within_one_level_and_can_be_refused(colour, channels):
    a = RNG.integers(0, 65536, (16, 16, channels)).astype(np.uint16)
    data = png16(a, colour)
    assert probe_image(data).bits == 16
    assert np.abs(decode_image(data, DecodePolicy(channels=channels)) - a / 257).max() <= 1
    with pytest.raises(UserError, match="16-bit"):
        decode_image(data, DecodePolicy(sixteen_bit="refuse", channels=channels))


def test_depths_without_a_white_are_refused():
    with pytest.raises(UserError, match="no defined white"):
        decode_image(saved(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), name="float.tif")
    with pytest.raises(UserError, match="outside 16 bits"):
        decode_image(saved(Image.fromarray(np.full((4, 4), 10**6, np.int32)), "TIFF"))


# ---- orientation -----------------------------------------------------------------------------------------------------------------

# where the stored pixel (row 0, column 0) is shown, for a picture shown with H rows and W columns (EXIF 2.32, tag 274)
CORNER = {1: "top left", 2: "top right", 3: "bottom right", 4: "bottom left", 5: "top left", 6: "top right", 7: "bottom right", 8: "bottom left"}


@pytest.mark.parametrize("fmt", ["PNG", "TIFF", "JPEG", "WEBP"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_orientation_is_applied_once(fmt, turn, tmp_path):
    im = Image.new("RGB", (40, 20), "black")
    im.paste("white", (0, 0, 10, 5))
    exif = Image.Exif()
    exif[0x0112] = turn
    data = saved(im, fmt, exif=exif)
    got, info = decode_image(data), probe_image(data)
    h, w = (40, 20) if turn >= 5 else (20, 40)
    assert got.shape == (h, w, 3) and (info.width, info.height) == (w, h)
    row, col = CORNER[turn].split()
    assert got[2 if row == "top" else -3, 2 if col == "left" else -3, 0] > 200
    assert got.mean() < 60
    save_image(tmp_path / "again.png", got)
    assert np.array_equal(decode_image(tmp_path / "again.png"), got)
    if fmt != "TIFF":
        assert decode_image(data, DecodePolicy(exif=False)).shape == (20, 40, 3)


def test_png_with_exif_after_the_pixels():
    exif = Image.Exif()
    exif[0x0112] = 6
    late = chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))
    data = png_bytes([r.tobytes() for r in SMALL], 40, 8, 2, after=late)
    assert decode_image(data).shape == (40, 20, 3)


# ---- damage ----------------------------------------------------------------------------------------------------------------------

SAMPLES = {fmt: saved(SMALL, fmt, **kw) for fmt, kw in dict(PNG={}, JPEG={}, BMP={}, WEBP=dict(lossless=True), TIFF={}, PPM={}).items()}
SAMPLES["JPEG progressive"] = saved(SMALL, "JPEG", progressive=True)
SAMPLES["GIF"] = saved(Image.fromarray(SMALL).quantize(8), "GIF")
SAMPLES["PNG palette"] = saved(Image.fromarray(SMALL).quantize(8), "PNG")


@pytest.mark.parametrize("fmt", SAMPLES)
def test_no_cut_is_accepted(fmt):
    data = SAMPLES[fmt]
    assert decode_image(data).shape == (20, 40, 3)
    for n in sorted({0, 1, 2, *range(3, len(data), max(1, len(data) // 60)), *range(len(data) - 14, len(data))}):
        try:
            decode_image(data[:n], name="cut")
        except UserError as e:
            assert e.path == "cut"
        else:  # only metadata may be missing (TIFF keeps its directory last or first; every pixel must still be right)
            assert fmt == "TIFF" and np.array_equal(decode_image(data[:n]), SMALL), (fmt, n)


@pytest.mark.parametrize("fmt", SAMPLES)
def test_damage_gives_a_user_error_or_a_picture(fmt):
    rng = np.random.default_rng(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(150):
            data = bytearray(SAMPLES[fmt])
            for _ in range(rng.integers(1, 4)):
                data[rng.integers(len(data))] = rng.integers(256)
            for work in (decode_image, probe_image):
                try:
                    work(bytes(data), name="hurt")
                except UserError as e:
                    assert "hurt" in str(e)


def test_png_bit_flips_are_always_found():
    data = SAMPLES["PNG"]
    for n in range(8, len(data), 7):
        hurt = bytearray(data)
        hurt[n] ^= 16
        with pytest.raises(UserError):
            decode_image(bytes(hurt))


@pytest.mark.parametrize("data", [b"", b"\0" * 100, b"I am a text called photo.png", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"<svg></svg>"])
def test_no_picture_names_the_file(data):
    with pytest.raises(UserError, match="photo.png"):
        decode_image(data, name="photo.png")


def test_jpeg_with_a_thumbnail_does_not_hide_a_cut():
    thumb = saved(SMALL[:8, :8], "JPEG")
    app1 = b"\xff\xe1" + struct.pack(">H", len(thumb) + 8) + b"Exif\0\0" + thumb
    data = SAMPLES["JPEG"][:2] + app1 + SAMPLES["JPEG"][2:]
    assert decode_image(data).shape == (20, 40, 3)
    with pytest.raises(UserError, match="truncated"):
        decode_image(data[:-2])


def test_decompression_bomb():
    body = struct.pack(">IIBBBBB", 30000, 30000, 8, 0, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", body) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    medium = bomb.replace(chunk(b"IHDR", body), chunk(b"IHDR", struct.pack(">IIBBBBB", 10000, 10000, 8, 0, 0, 0, 0)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for data in (bomb, medium):
            with pytest.raises(UserError, match="bomb.png.*too large"):
                decode_image(data, name="bomb.png")


def test_missing_file():
    with pytest.raises(UserError, match="/nowhere/a.png"):
        decode_image("/nowhere/a.png")


def test_animation_gives_the_first_frame():
    frames = [Image.new("RGB", (8, 8), c) for c in ("red", "lime", "blue")]
    for fmt in ("GIF", "WEBP", "PNG"):
        kw = dict(lossless=True) if fmt == "WEBP" else {}
        data = saved(frames[0], fmt, save_all=True, append_images=frames[1:], **kw)
        assert probe_image(data).frames == 3
        assert decode_image(data)[4, 4].tolist() == [255, 0, 0], fmt


# ---- policy, saving, floats --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("bad", [dict(channels=0), dict(channels=5), dict(sixteen_bit="clip"), dict(alpha="pink"), dict(exif="yes")])
def test_policy_refuses(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        DecodePolicy(**bad)


def test_policy_json(tmp_path):
    p = DecodePolicy(channels=4, sixteen_bit="refuse", exif=False)
    p.save(tmp_path / "p.json")
    assert DecodePolicy.load(tmp_path / "p.json") == p
    with pytest.raises(UserError, match="channel"):
        DecodePolicy.from_dict({"chanels": 3})


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_png_round_trip_and_bytes_are_stable(channels):
    a = RNG.integers(0, 256, (6, 5, channels), np.uint8)
    for level in (0, 6):
        assert encode_png(a, level) == encode_png(a, level)
        assert np.array_equal(decode_image(encode_png(a, level), DecodePolicy(channels=channels)), a)
    assert len(encode_png(a, 0)) >= a.size


def test_float_round_trip_and_grid():
    levels = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(to_uint8(to_float(levels)), levels)
    assert to_uint8(torch.tensor([-5.0, 5.0, float("nan")])).tolist() == [0, 255, 0]
    grid = image_grid(levels.repeat(3, 1, 1, 1), cols=2)
    assert grid.shape == (32, 32, 1) and (grid[16:, 16:] == 255).all() and np.array_equal(grid[:16, :16, 0], levels[0, 0].numpy())
    with pytest.raises(UserError):
        image_grid(torch.zeros(0, 3, 4, 4))


def test_import_touches_neither_pyplot_nor_cuda():
    code = "import sys, torch, gan_course.images, gan_course.data, gan_course.pack; assert 'matplotlib.pyplot' not in sys.modules; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)
