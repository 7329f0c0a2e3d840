"""Sources, labels, the image data set and the sampler, with the bad input that people really have."""
import io
import json
import pickle
import struct
import warnings
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from gan_course.core import UserError
from gan_course.data import EndlessSampler, ImageDataset
from gan_course.images import DecodePolicy, encode_png
from gan_course.sources import open_source, read_labels


def png(seed, h=16, w=16, c=3):
    return encode_png(np.random.default_rng(seed).integers(0, 256, (h, w, c), np.uint8))


def jpeg(seed, size=(16, 16), **kw):
    f = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)).save(f, "JPEG", **kw)
    return f.getvalue()


@pytest.fixture
def make(tmp_path):
    "Write the same files as a folder or as a zip."
    def write(name, files, labels=None):
        if labels is not None:
            files = {**files, "dataset.json": labels if isinstance(labels, bytes) else json.dumps({"labels": labels}).encode()}
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


FOUR = {f"{i}.png": png(i) for i in range(4)}
BOTH = pytest.mark.parametrize("name", ["set", "set.zip"])


# ---- sources ---------------------------------------------------------------------------------------------------------------------

def test_case_6_mac_zip(make):
    files = {"a.png": png(0), "B.JPG": jpeg(1), "__MACOSX/._a.png": b"ghost", ".DS_Store": b"x", "empty/": b""}
    with open_source(make("mac.zip", files)) as s:
        assert s.names == ["B.JPG", "a.png"]
        assert [n for n, _ in s.ignored] == [".DS_Store", "__MACOSX/._a.png"] and all(r for _, r in s.ignored)
    assert len(ImageDataset(s.path)) == 2


@BOTH
def test_rules_of_skipping(make, name):
    files = {"b/2.PNG": png(0), "a/10.png": png(1), "a/2.png": png(2), "IMG_0001": png(3), "notes.txt": b"text of some length", "Thumbs.db": b"x",
             ".hidden/x.png": png(0), "a/._2.png": b"x", "a/dataset.json": b"{}", "fake.png": b"text of some length"}
    s = open_source(make(name, files))
    assert s.names == ["IMG_0001", "a/10.png", "a/2.png", "b/2.PNG", "fake.png"]
    assert len(s.ignored) == 5 and "top" in dict(s.ignored)["a/dataset.json"]
    with pytest.raises(UserError, match="fake.png"):
        ImageDataset(s.path)


def test_folder_and_zip_are_the_same_data(make):
    a, b = ImageDataset(make("set", FOUR)), ImageDataset(make("set.zip", FOUR))
    assert a.names == b.names and a.digest() == b.digest() and a.name == b.name == "set"
    assert all(torch.equal(a[i][0], b[i][0]) for i in range(4))


@pytest.mark.parametrize("bad", ["../a.png", "x/../../a.png", "/etc/a.png", "C:\\a.png", "..\\a.png"])
def test_zip_slip_is_refused(make, bad):
    with pytest.raises(UserError, match="leaves its folder"):
        open_source(make("slip.zip", {**FOUR, bad: png(0)}))


def test_zip_with_a_name_twice(make, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(tmp_path / "twice.zip", "w") as z:
            z.writestr("a.png", png(0))
            z.writestr("a.png", png(1))
    with pytest.raises(UserError, match="more than once.*a.png"):
        open_source(tmp_path / "twice.zip")


def patch_zip(path, offset_local, offset_central, value):
    "Change a 16-bit field in every local and central header."
    data = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\3\4", offset_local), (b"PK\1\2", offset_central)):
        pos = data.find(mark)
        while pos >= 0:
            struct.pack_into("<H", data, pos + offset, value)
            pos = data.find(mark, pos + 4)
    path.write_bytes(data)
    return path


def test_encrypted_zip(make):
    with pytest.raises(UserError, match="encrypted"):
        open_source(patch_zip(make("secret.zip", FOUR), 6, 8, 1))


def test_zip_with_unknown_compression(make):
    path = patch_zip(make("odd.zip", FOUR), 8, 10, 9)
    with pytest.raises(UserError, match="0.png.*unpacked"):
        open_source(path).read("0.png")
    with pytest.raises(UserError, match="0.png"):
        ImageDataset(path)


def test_damaged_zips(make):
    path = make("cut.zip", FOUR)
    whole = path.read_bytes()
    for n in (0, 10, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:n])
        with pytest.raises(UserError, match="cut.zip"):
            open_source(path)
    hurt = bytearray(whole)
    hurt[whole.find(FOUR["1.png"]) + 200] ^= 255
    path.write_bytes(hurt)
    with pytest.raises(UserError, match="1.png"):
        open_source(path).read("1.png")


def test_wrong_paths(make, tmp_path):
    (tmp_path / "none").mkdir()
    one = tmp_path / "one.png"
    one.write_bytes(png(0))
    for path, why in ((tmp_path / "nowhere", "no such"), (tmp_path / "none", "no picture"), (one, "neither a folder nor a zip")):
        with pytest.raises(UserError, match=why) as e:
            open_source(path)
        assert str(path) in str(e.value) and "Next:" in str(e.value)


def test_linked_folders_are_listed_not_followed(make):
    path = make("set", FOUR)
    (path / "loop").symlink_to(path)
    s = open_source(path)
    assert s.names == sorted(FOUR) and dict(s.ignored)["loop"].startswith("linked")


def test_dangling_link_is_named(make):
    path = make("set", FOUR)
    (path / "gone.png").symlink_to(path / "was.png")
    with pytest.raises(UserError, match="gone.png"):
        ImageDataset(path)


def test_file_that_vanishes_after_the_check(make):
    path = make("set", FOUR)
    ds = ImageDataset(path)
    (path / "2.png").unlink()
    with pytest.raises(UserError, match="2.png"):
        ds[2]
    (path / "1.png").write_bytes(png(0, 32, 32))
    with pytest.raises(UserError, match="1.png.*32x32, expected 16x16"):
        ds[1]


# ---- labels ----------------------------------------------------------------------------------------------------------------------

@BOTH
def test_case_2_one_label_missing(make, name):
    path = make(name, FOUR, [[f"{i}.png", i] for i in range(3)])
    with pytest.raises(UserError, match="1 picture without a label: 3.png"):
        ImageDataset(path, use_labels=True)
    with pytest.warns(UserWarning, match="3 of 4 pictures remain"):
        ds = ImageDataset(path, use_labels=True, missing="drop")
    assert len(ds) == 3 and "1 dropped" in repr(ds)
    assert torch.equal(torch.stack([c for _, c in ds]), torch.eye(3))


def test_unused_labels_are_announced(make):
    path = make("set", FOUR, [[n, 0] for n in FOUR])
    ds = ImageDataset(path)
    assert ds.has_labels and ds.label_dim == 0 and "NOT used" in repr(ds) and ds[0][1].shape == (0,)
    bare = ImageDataset(make("bare", FOUR))
    assert not bare.has_labels
    with pytest.raises(UserError, match="no labels"):
        ImageDataset(bare.path, use_labels=True)


def test_null_labels(make):
    path = make("set", FOUR, b'{"labels": null}')
    assert read_labels(open_source(path)).labels is None and not ImageDataset(path).has_labels


def test_vectors(make):
    path = make("set", FOUR, [[f"{i}.png", [i, 0.5]] for i in range(4)])
    ds = ImageDataset(path, use_labels=True)
    assert ds.label_dim == 2 and ds[3][1].tolist() == [3, 0.5] and ds[3][1].dtype == torch.float32


def test_gaps_and_counts(make):
    t = read_labels(open_source(make("set", FOUR, [["0.png", 1], ["1.png", 3], ["2.png", 3], ["3.png", 1]])))
    assert t.class_counts == {1: 2, 3: 2} and t.gaps == [0, 2] and t.labels.shape == (4, 4)


FULL = [[n, 0] for n in FOUR]


@pytest.mark.parametrize("labels,why", [
    (b"{broken", "line 1"), (b"", "JSON"), (b"[]", '"labels"'), (b'{"label": []}', '"labels"'), (b"\xff\xfe{", "UTF-8"), (b'{"labels": 3}', "list"),
    ([["0.png"]], "pair"), ([[0, 0]], "pair"), (FULL + [["0.png", 0]], "more than once: 0.png"), (FULL + [["ghost.png", 0]], "without a picture: ghost.png"),
    (FULL[:3] + [["3.png", [0.0]]], "mixes"), ([[n, [0.0] * (1 + (n == "3.png"))] for n in FOUR], "several lengths"), (FULL[:3] + [["3.png", -1]], "out of range"),
    (FULL[:3] + [["3.png", 10**9]], "out of range"), (FULL[:3] + [["3.png", True]], "3.png"), (FULL[:3] + [["3.png", None]], "3.png"), (FULL[:3] + [["3.png", "cat"]], "3.png"),
    (FULL[:3] + [["3.png", 1.5]], "3.png"), ([[n, []] for n in FOUR], "neither"), (b'{"labels": [["0.png", [NaN]], ["1.png", [1]], ["2.png", [1]], ["3.png", [1]]]}', "0.png")])
def test_bad_labels_are_named(make, labels, why):
    with pytest.raises(UserError, match=why) as e:
        read_labels(open_source(make("set", FOUR, labels)))
    assert "dataset.json" in str(e.value)


def test_drop_with_nothing_left(make):
    with pytest.raises(UserError, match="4 pictures without"):
        read_labels(open_source(make("set", FOUR, [["x.png", 0]])), "drop")


def test_many_missing_names_stay_readable(make):
    files = {f"{i:03d}.png": png(0) for i in range(50)}
    with pytest.raises(UserError, match="49 pictures.*and 44 more") as e:
        read_labels(open_source(make("set", files, [["000.png", 0]])))
    assert len(str(e.value)) < 400


# ---- ImageDataset ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change,why", [
    ({"2.png": png(2, 32, 32)}, "2.png: size 32x32, expected 16x16; 1 bad file of 4"), ({"2.png": png(2, 16, 32)}, "2.png: size 32x16"), ({"2.png": b""}, "2.png: .*empty"),
    ({"2.png": b"text"}, "2.png: .*not a picture"), ({"1.png": b"", "3.png": b"x"}, "1.png: .*2 bad files of 4")])
def test_headers_are_checked_at_the_start(make, change, why):
    with pytest.raises(UserError, match=why) as e:
        ImageDataset(make("set", {**FOUR, **change}))
    assert "gan_audit" in str(e.value)


@pytest.mark.parametrize("size", [2, 24, 48])
def test_power_of_two(make, size):
    with pytest.raises(UserError, match="power of two"):
        ImageDataset(make("set", {"a.png": png(0, size, size)}))


def test_policy_in_the_header_check(make):
    deep = io.BytesIO()
    Image.fromarray(np.zeros((16, 16), np.uint16)).save(deep, "PNG")
    path = make("set", {**FOUR, "deep.png": deep.getvalue()})
    assert len(ImageDataset(path)) == 5
    with pytest.raises(UserError, match="deep.png.*16"):
        ImageDataset(path, policy=DecodePolicy(sixteen_bit="refuse"))


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_channels_and_shapes(make, channels):
    ds = ImageDataset(make("set", FOUR), policy=DecodePolicy(channels=channels))
    x, c = ds[0]
    assert x.shape == (channels, 16, 16) and x.dtype == torch.uint8 and x.is_contiguous() and c.dtype == torch.float32
    assert ds.image_shape == [channels, 16, 16] and ds.raw_shape == [4, channels, 16, 16] and ds.num_channels == channels and ds.resolution == 16


def test_mirror_and_choice(make):
    path = make("set", FOUR)
    ds = ImageDataset(path, mirror=True, max_images=3, seed=1)
    assert len(ds) == 6 and all(torch.equal(ds[i + 3][0], ds[i][0].flip(2)) for i in range(3))
    assert ImageDataset(path, max_images=99).raw_shape[0] == 4
    with pytest.raises(IndexError):
        ds[6]
    with pytest.raises(UserError, match="max_images"):
        ImageDataset(path, max_images=0)
    assert len(list(ds)) == 6


def test_digest_tells_data_apart(make):
    base = ImageDataset(make("a.zip", FOUR)).digest()
    seen = {base, ImageDataset(make("b.zip", {**FOUR, "3.png": png(99)})).digest(), ImageDataset(make("a.zip", FOUR), mirror=True).digest(),
            ImageDataset(make("a.zip", FOUR), policy=DecodePolicy(channels=1)).digest(), ImageDataset(make("a.zip", FOUR), max_images=2).digest(),
            ImageDataset(make("c.zip", FOUR, FULL), use_labels=True).digest()}
    assert len(seen) == 6 and ImageDataset(make("d", FOUR)).digest() == base


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_zip_in_worker_processes(make, start):
    files = {f"{i:02d}.png": png(i) for i in range(24)}
    ds = ImageDataset(make("many.zip", files))
    ds[0]  # the parent's handle is open when the workers start
    want = torch.stack([ds[i][0] for i in range(24)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(ds, batch_size=3, num_workers=2, multiprocessing_context=start)
        for _ in range(2):
            assert torch.equal(torch.cat([x for x, _ in loader]), want)


def test_pickle_holds_no_open_file(make):
    ds = ImageDataset(make("set.zip", FOUR))
    ds[0]
    again = pickle.loads(pickle.dumps(ds))
    assert torch.equal(again[1][0], ds[1][0])


# ---- EndlessSampler ----------------------------------------------------------------------------------------------------------------

def take(sampler, k):
    it = iter(sampler)
    return [next(it) for _ in range(k)]


def stream(size, seed, k):
    "The endless row, by its definition."
    out, epoch = [], 0
    while len(out) < k:
        out += np.random.RandomState(seed + epoch).permutation(size).tolist()
        epoch += 1
    return out[:k]


@pytest.mark.parametrize("size", [1, 2, 5, 12])
@pytest.mark.parametrize("world", [1, 2, 3, 5, 16])
def test_shards_together_are_the_row(size, world):
    parts = [take(EndlessSampler(size, r, world, seed=4), 9) for r in range(world)]
    assert [p[k] for k in range(9) for p in parts] == stream(size, 4, 9 * world)


def test_shards_are_disjoint_within_an_epoch():
    for world in (2, 3, 4, 6):
        parts = [take(EndlessSampler(24, r, world), 24 // world) for r in range(world)]
        assert sorted(i for p in parts for i in p) == list(range(24))


@pytest.mark.parametrize("drawn", [0, 1, 6, 7, 8, 40])
def test_exact_continuation(drawn):
    a = EndlessSampler(7, seed=2)
    take(a, drawn)
    state = json.loads(json.dumps(a.state_dict()))
    b = EndlessSampler(7, seed=2)
    b.load_state_dict(state)
    assert take(b, 20) == stream(7, 2, drawn + 20)[drawn:] and state["position"] == drawn


def test_resume_with_another_world_size():
    first = [EndlessSampler(10, r, 2, seed=5) for r in range(2)]
    for s in first:
        take(s, 9)
    assert first[0].state_dict() == first[1].state_dict() and first[0].position == 18
    then = [EndlessSampler(10, r, 3, seed=5) for r in range(3)]
    for s in then:
        s.load_state_dict(first[0].state_dict())
    rows = [take(s, 4) for s in then]
    assert [i for k in range(4) for i in (r[k] for r in rows)] == stream(10, 5, 30)[18:]


def test_iterating_again_goes_on():
    s = EndlessSampler(6, seed=1)
    assert take(s, 4) + take(s, 4) == stream(6, 1, 8)


def test_with_a_loader(make):
    ds = ImageDataset(make("set", FOUR))
    it = iter(DataLoader(ds, batch_size=8, sampler=EndlessSampler(4, seed=3)))  # a batch larger than the data set
    x, _ = next(it)
    assert torch.equal(x, torch.stack([ds[i][0] for i in stream(4, 3, 8)]))


@pytest.mark.parametrize("kw", [dict(size=0), dict(size=3, rank=2, world_size=2), dict(size=3, rank=-1), dict(size=3, world_size=0)])
def test_bad_sampler_arguments(kw):
    with pytest.raises(UserError):
        EndlessSampler(**kw)


@pytest.mark.parametrize("key,value", [("size", 9), ("seed", 9), ("shuffle", False)])
def test_foreign_state_is_refused(key, value):
    s = EndlessSampler(5)
    with pytest.raises(UserError, match=f"another {key}"):
        s.load_state_dict({**s.state_dict(), key: value})
