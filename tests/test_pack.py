"""Audit and pack: the cases of real reports, the official layout, and packs that stop halfway."""
import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

import gan_course.pack as pack_module
from gan_course.core import UserError
from gan_course.data import ImageDataset
from gan_course.images import DecodePolicy, decode_image, encode_png
from gan_course.pack import audit, fit_square, pack


def saved(a, fmt="PNG", **kw):
    f = io.BytesIO()
    (a if isinstance(a, Image.Image) else Image.fromarray(a)).save(f, fmt, **kw)
    return f.getvalue()


def pixels(seed, h=32, w=32, c=3):
    return np.random.default_rng(seed).integers(0, 256, (h, w, c), np.uint8)


def png(seed, h=32, w=32, c=3):
    return encode_png(pixels(seed, h, w, c))


@pytest.fixture
def make(tmp_path):
    def write(name, files, labels=None):
        if labels is not None:
            files = {**files, "dataset.json": json.dumps({"labels": labels}).encode()}
        path = tmp_path / name
        if name.endswith(".zip"):
            with zipfile.ZipFile(path, "w") as z:
                for k, v in files.items():
                    z.writestr(k, v)
        else:
            for k, v in files.items():
                (path / k).parent.mkdir(parents=True, exist_ok=True)
                (path / k).write_bytes(v)
        return path
    return write


def read_pack(path):
    "Read a pack as the official loader is described to: sorted picture names, plain Pillow, labels by name. Returns (arrays, labels, members)."
    with zipfile.ZipFile(path) as z:
        infos = z.infolist()
        names = sorted(i.filename for i in infos if os.path.splitext(i.filename)[1].lower() in Image.registered_extensions())
        arrays = [np.array(Image.open(io.BytesIO(z.read(n)))) for n in names]
        labels = json.loads(z.read("dataset.json"))["labels"]
    return arrays, labels and [dict((n, v) for n, v in labels)[n] for n in names], infos


# ---- the cases of real reports -----------------------------------------------------------------------------------------------------

def test_case_1_sixteen_bit_grey(make, tmp_path):
    ramp = np.linspace(0, 65535, 64 * 64).round().astype(np.uint16).reshape(64, 64)
    src = make("in.zip", {"deep.png": saved(ramp), **{f"g{i}.png": png(i, 64, 64, 1) for i in range(3)}})
    report = audit(src)
    assert report.ok and report.counts["16-bit"] == 1 and any(r[0] == "deep.png" and "16 bits" in r[1] for r in report.warnings)
    record = pack(src, tmp_path / "out.zip", 64, fit="scale", policy=DecodePolicy(channels=1))
    assert record["policy"]["sixteen_bit"] == "scale" and record["counts"]["16-bit"] == 1
    got = read_pack(tmp_path / "out.zip")[0][record["files"].index("deep.png")]
    assert np.abs(got - ramp / 257).max() <= 0.5
    with pytest.raises(UserError, match="deep.png.*16"):
        pack(src, tmp_path / "no.zip", 64, policy=DecodePolicy(channels=1, sixteen_bit="refuse"))
    assert [r[0] for r in audit(src, DecodePolicy(sixteen_bit="refuse")).rows] == ["deep.png"]


def test_case_2_one_label_missing(make, tmp_path):
    src = make("in", {f"{i}.png": png(i) for i in range(4)}, [[f"{i}.png", i] for i in range(3)])
    report = audit(src)
    assert not report.ok and report.rows[0][0] == "dataset.json" and "3.png" in report.rows[0][1]
    assert audit(src, use_labels=False).ok
    with pytest.raises(UserError, match="3.png"):
        pack(src, tmp_path / "no.zip", 32)
    with pytest.warns(UserWarning, match="3 of 4"):
        record = pack(src, tmp_path / "out.zip", 32, missing="drop")
    assert record["count"] == 3 and record["dropped"] == ["3.png"] and record["labels"] == "3 classes"
    assert read_pack(tmp_path / "out.zip")[1] == [0, 1, 2]
    assert ImageDataset(tmp_path / "out.zip", use_labels=True).label_dim == 3


def test_case_3_mixed_modes(make, tmp_path):
    flat = np.repeat(np.repeat(np.array([[[200, 40, 40], [40, 160, 220]], [[20, 200, 90], [240, 240, 60]]], np.uint8), 16, 0), 16, 1)
    im = Image.fromarray(flat)
    files = {"1_rgb.png": saved(im), "2_grey.png": saved(im.convert("L")), "3_palette.png": saved(im.quantize(4)), "4_la.png": saved(im.convert("LA")),
             "5_cmyk.jpg": saved(im.convert("CMYK"), "JPEG", quality=100, subsampling=0)}
    report = audit(make("in", files))
    assert report.ok and any("modes differ" in r[1] for r in report.warnings) and report.counts["mode CMYK"] == 1
    pack(tmp_path / "in", tmp_path / "out.zip", 32, fit="scale")
    arrays = read_pack(tmp_path / "out.zip")[0]
    grey = np.repeat(np.asarray(im.convert("L"))[..., None], 3, 2)
    for got, want, tol in zip(arrays, (flat, grey, flat, grey, flat), (0, 0, 0, 0, 6)):
        assert got.shape == (32, 32, 3) and np.abs(got.astype(int) - want)[4:12, 4:12].max() <= tol


def test_case_4_rotation(make, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    im = Image.new("RGB", (40, 20), "black")
    im.paste("white", (0, 0, 10, 20))  # left of the stored picture is the top of the upright one
    src = make("in", {"phone.jpg": saved(im, "JPEG", quality=100, exif=exif)})
    report = audit(src)
    assert report.counts["rotated"] == 1 and "size 20x40" in report.rows[0][1]
    pack(src, tmp_path / "out.zip", 32, fit="pad")
    got = read_pack(tmp_path / "out.zip")[0][0]
    assert got[3, 16].min() > 200 and got[20, 16].max() < 50 and got[:, :8].max() < 20


def test_case_5_damaged_files(make, tmp_path):
    files = {f"{i}.png": png(i) for i in range(6)}
    files.update({"5.png": files["5.png"][: len(files["5.png"]) // 2], "empty.png": b"", "text.png": b"only words"})
    src = make("in", files)
    report = audit(src)
    assert not report.ok and [r[0] for r in report.rows] == ["5.png", "empty.png", "text.png"] and all(r[1] and r[2] for r in report.rows)
    text = report.to_text()
    assert all(n in text for n in ("5.png", "empty.png", "text.png")) and "3 errors" in text
    with pytest.raises(UserError, match="5.png.*3 bad files of 8"):
        pack(src, tmp_path / "out.zip", 32)
    assert not (tmp_path / "out.zip").exists()
    record = pack(src, tmp_path / "out.zip", 32, on_error="skip")
    assert record["count"] == 5 and [n for n, _ in record["skipped"]] == ["5.png", "empty.png", "text.png"]
    assert len([x for x, _ in ImageDataset(tmp_path / "out.zip")]) == 5 and audit(tmp_path / "out.zip").ok


def test_case_6_mac_zip(make, tmp_path):
    src = make("mac.zip", {"a.png": png(0), "B.JPG": saved(pixels(1), "JPEG"), "__MACOSX/._a.png": b"x", ".DS_Store": b"x", "empty/": b""})
    report = audit(src)
    assert report.ok and report.counts["pictures"] == 2 and report.counts["ignored"] == 2 and "__MACOSX/._a.png" in report.to_text()
    record = pack(src, tmp_path / "out.zip", 32)
    assert record["files"] == ["B.JPG", "a.png"] and len(record["ignored"]) == 2


# ---- audit ---------------------------------------------------------------------------------------------------------------------------

def test_sizes_and_copies(make):
    src = make("in", {"a.png": png(0), "b.png": png(0), "c.webp": saved(pixels(0), "WEBP", lossless=True), "big.png": png(1, 64, 64), "odd.png": png(2, 48, 48), "wide.png": png(3, 20, 30)})
    report = audit(src)
    assert {r[0] for r in report.rows} == {"big.png", "odd.png", "wide.png"} and report.counts["duplicates"] == 2
    assert [r[:2] for r in report.warnings[:2]] == [("b.png", "same pixels as a.png"), ("c.webp", "same pixels as a.png")]
    assert {r[0] for r in audit(src, resolution=64).rows} == {"a.png", "b.png", "c.webp", "odd.png", "wide.png"}
    assert audit(src, geometry=False).ok


def test_all_of_one_wrong_size(make):
    report = audit(make("in", {f"{i}.png": png(i, 48, 48) for i in range(3)}))
    assert len(report.rows) == 3 and "power of two" in report.rows[0][1] and "gan_pack" in report.rows[0][2]


def test_animation_and_gaps_are_remarks(make):
    film = saved(Image.new("RGB", (32, 32), "red"), "GIF", save_all=True, append_images=[Image.new("RGB", (32, 32), "blue")])
    report = audit(make("in", {"film.gif": film, "a.png": png(0)}, [["film.gif", 0], ["a.png", 2]]))
    assert report.ok and any("animated, 2 frames" in r[1] for r in report.warnings) and any("[1]" in r[1] for r in report.warnings)


def test_wanted_labels_that_are_not_there(make):
    src = make("in", {"a.png": png(0)})
    assert audit(src).ok and not audit(src, use_labels=True).ok


def test_long_reports_stay_short(make):
    report = audit(make("in", {f"{i:03d}.png": b"" for i in range(100)}))
    assert len(report.rows) == 100 and len(report.to_text().splitlines()) < 40 and "80 more" in report.to_text()


def test_damage_inside_a_zip(make):
    path = make("in.zip", {"a.png": png(0), "b.png": png(1)})
    hurt = bytearray(path.read_bytes())
    hurt[hurt.find(png(1)) + 300] ^= 255
    path.write_bytes(hurt)
    assert [r[0] for r in audit(path).rows] == ["b.png"]


# ---- pack ----------------------------------------------------------------------------------------------------------------------------

def test_official_layout(make, tmp_path):
    src = make("in", {f"{i}.png": png(i, 40, 50) for i in range(3)}, [["0.png", 1], ["1.png", 0], ["2.png", 1]])
    pack(src, tmp_path / "out.zip", 16)
    arrays, labels, infos = read_pack(tmp_path / "out.zip")
    assert [i.filename for i in infos] == ["00000/img00000000.png", "00000/img00000001.png", "00000/img00000002.png", "dataset.json", "pack.json"]
    assert all(i.compress_type == zipfile.ZIP_STORED for i in infos) and labels == [1, 0, 1]
    assert all(a.shape == (16, 16, 3) for a in arrays) and infos[0].file_size > 16 * 16 * 3  # the PNG is not compressed either


def test_every_thousand_pictures_have_a_folder(make, tmp_path):
    tiny = png(0, 4, 4)
    pack(make("in", {f"{i:04d}.png": tiny for i in range(1001)}), tmp_path / "out.zip", 4)
    names = [i.filename for i in read_pack(tmp_path / "out.zip")[2]]
    assert names[999:1001] == ["00000/img00000999.png", "00001/img00001000.png"]


@pytest.mark.parametrize("dest", ["out", "out.zip"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_read_again(make, tmp_path, dest, channels):
    src, policy = make("in", {f"{i}.png": png(i, c=4) for i in range(2)}), DecodePolicy(channels=channels)
    pack(src, tmp_path / dest, 32, fit="scale", policy=policy)
    a, b = ImageDataset(src, policy=policy), ImageDataset(tmp_path / dest, policy=policy)
    assert all(torch.equal(a[i][0], b[i][0]) for i in range(2))


def test_vector_labels_come_along(make, tmp_path):
    pack(make("in", {"a.png": png(0), "b.png": png(1)}, [["b.png", [1, 2.5]], ["a.png", [0.5, 3]]]), tmp_path / "out.zip", 32)
    assert read_pack(tmp_path / "out.zip")[1] == [[0.5, 3], [1, 2.5]]


def test_labels_follow_when_pictures_are_skipped(make, tmp_path):
    src = make("in", {"a.png": png(0), "b.png": b"", "c.png": png(2)}, [["a.png", 0], ["b.png", 1], ["c.png", 2]])
    pack(src, tmp_path / "out.zip", 32, on_error="skip")
    assert read_pack(tmp_path / "out.zip")[1] == [0, 2]


def test_same_pictures_same_bytes(make, tmp_path):
    files = {f"{i}.png": png(i, 40, 50) for i in range(5)}
    pack(make("in", files), tmp_path / "1.zip", 16)
    os.utime(tmp_path / "in" / "0.png", (1, 1))
    pack(tmp_path / "in", tmp_path / "2.zip", 16)
    assert (tmp_path / "1.zip").read_bytes() == (tmp_path / "2.zip").read_bytes()


@pytest.mark.parametrize("dest", ["out", "out.zip"])
def test_never_overwrites(make, tmp_path, dest):
    src = make("in", {"a.png": png(0)})
    pack(src, tmp_path / dest, 32)
    with pytest.raises(UserError, match="not overwritten"):
        pack(src, tmp_path / dest, 32)
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="not overwritten"):
        pack(src, tmp_path / "taken", 32)


@pytest.mark.parametrize("kw,why", [(dict(resolution=24), "24.*16 or 32"), (dict(resolution=2), "power of two"), (dict(resolution=0), "power of two"), (dict(resolution=32.0), "power of two"),
                                    (dict(fit="stretch"), "fit"), (dict(resize="nearest"), "resize"), (dict(missing="maybe"), "missing"), (dict(on_error="ignore"), "on_error")])
def test_bad_arguments(make, tmp_path, kw, why):
    with pytest.raises(UserError, match=why):
        pack(make("in", {"a.png": png(0)}), tmp_path / "out.zip", **{"resolution": 32, **kw})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_bad_targets(make, tmp_path):
    src = make("in", {"a.png": png(0)})
    for dest, why in ((src / "packed", "own source"), (tmp_path / "a.tar", "archive")):
        with pytest.raises(UserError, match=why):
            pack(src, dest, 32)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError):
        pack(src, tmp_path / "file" / "out.zip", 32)


@pytest.mark.parametrize("dest", ["out", "out.zip"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_interrupted_pack_leaves_nothing(make, tmp_path, monkeypatch, dest, error):
    src, calls = make("in", {f"{i}.png": png(i) for i in range(4)}), []

    def stop(*args, **kw):
        calls.append(1)
        if len(calls) == 3:
            raise error
        return encode_png(*args, **kw)

    monkeypatch.setattr(pack_module, "encode_png", stop)
    with pytest.raises(type(error)):
        pack(src, tmp_path / dest, 32)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize("dest", ["out", "out.zip"])
def test_full_disk_is_a_user_error(make, tmp_path, monkeypatch, dest):
    def full(*args, **kw):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full) if dest.endswith("zip") else None
    src = make("in", {"a.png": png(0)})
    if not dest.endswith("zip"):
        monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(UserError, match="No space left"):
        pack(src, tmp_path / dest, 32)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_forecast_of_space(make, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda p: type("U", (), dict(free=1000, total=1, used=1))())
    with pytest.raises(UserError):
        pack(make("in", {"a.png": png(0)}), tmp_path / "out.zip", 32)
    assert not (tmp_path / "out.zip").exists()


def test_kill_leaves_no_pack_under_the_name(make, tmp_path):
    make("in", {f"{i:03d}.png": png(i, 64, 64) for i in range(60)})
    code = f"""
import time, gan_course.pack as p
real = p.encode_png
def slow(*a, **k): print('writing', flush=True); time.sleep(.05); return real(*a, **k)
p.encode_png = slow
p.pack({str(tmp_path / 'in')!r}, {str(tmp_path / 'out.zip')!r}, 32)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "writing\n"
        time.sleep(0.2)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert not (tmp_path / "out.zip").exists()
    pack(tmp_path / "in", tmp_path / "out.zip", 32)
    assert len(ImageDataset(tmp_path / "out.zip")) == 60


# ---- fit -----------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("h,w", [(120, 180), (180, 120), (101, 57)])
@pytest.mark.parametrize("resize", ["lanczos", "box"])
def test_no_distortion(h, w, resize):
    y, x = np.mgrid[:h, :w]
    disc = np.repeat((((y - h / 2 + .5) ** 2 + (x - w / 2 + .5) ** 2 < (0.4 * min(h, w)) ** 2) * 255).astype(np.uint8)[..., None], 3, 2)
    for fit in ("crop", "pad"):
        on = fit_square(disc, 64, fit, resize)[..., 0] > 127
        assert abs(int(on.any(0).sum()) - int(on.any(1).sum())) <= 1, fit
    side = 0.8 * 64
    assert abs((fit_square(disc, 64, "crop", resize)[..., 0] > 127).any(0).sum() - side) <= 1.5


def test_extreme_shapes():
    assert fit_square(np.full((1, 1000, 3), 9, np.uint8), 8, "pad").shape == (8, 8, 3)
    assert fit_square(np.full((1000, 1, 3), 9, np.uint8), 8, "crop").min() == 9
    with pytest.raises(UserError, match="not square"):
        fit_square(np.zeros((3, 4, 3), np.uint8), 8, "scale")


def test_transparent_pixels_do_not_bleed():
    rgba = np.zeros((64, 64, 4), np.uint8)
    rgba[:, :32] = (255, 0, 0, 255)
    rgba[:, 32:] = (0, 255, 0, 0)  # hidden green
    out = fit_square(rgba, 16, "scale", "box")
    seen = out[out[..., 3] > 0]
    assert seen[:, 1].max() <= 1 and seen[:, 0].min() >= 254


def test_scale_refuses_what_is_not_square(make, tmp_path):
    with pytest.raises(UserError, match="wide.png.*not square"):
        pack(make("in", {"a.png": png(0), "wide.png": png(1, 20, 30)}), tmp_path / "out.zip", 32, fit="scale")


def test_record_counts_enlarged_pictures(make, tmp_path):
    record = pack(make("in", {"a.png": png(0, 16, 16), "b.png": png(1, 64, 64)}), tmp_path / "out.zip", 32, resize="box")
    assert record["upscaled"] == 1 and record["resize"] == "box"
    src = make("tall", {"a.png": png(0, 64, 16)})  # cropping enlarges a 16x16 part, padding scales 64 down
    assert pack(src, tmp_path / "crop.zip", 32)["upscaled"] == 1 and pack(src, tmp_path / "pad.zip", 32, fit="pad")["upscaled"] == 0
    with zipfile.ZipFile(tmp_path / "out.zip") as z:
        assert json.loads(z.read("pack.json")) == json.loads(json.dumps(record))
