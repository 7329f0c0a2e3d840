"""TFRecords of the TensorFlow StyleGAN code: the wire format by hand, every truncation, every flipped byte, odd folders and labels."""
import multiprocessing
import pickle
import random
import shutil
import struct

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from gan_course.core import UserError
from gan_course.data import EndlessSampler, ImageDataset
from gan_course.images import encode_png
from gan_course.records import TFRecordFile, crc32c, encode_example, frame_record, index_records, masked_crc32c, parse_example
from gan_course.tfrecord import TFRecordDataset, box_levels, decode_record, find_tfrecords, write_tfrecords


def slow_crc(data):
    "CRC-32C from its definition, bit by bit."
    s = 0xffffffff
    for byte in data:
        s ^= byte
        for _ in range(8):
            s = s >> 1 ^ (0x82f63b78 if s & 1 else 0)
    return s ^ 0xffffffff


def pictures(n, size=8, c=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, c, size, size), np.uint8)


LABELS = np.eye(3, dtype=np.float32)[[2, 0, 1, 1]]


@pytest.fixture
def folder(tmp_path):
    write_tfrecords(tmp_path / "set", pictures(4), LABELS)
    return tmp_path / "set"


# ---------------------------------------------------------------- checksums

@pytest.mark.parametrize("data, crc", [(b"", 0), (b"a", 0xc1d04330), (b"123456789", 0xe3069283), (bytes(32), 0x8a9136aa), (b"\xff" * 32, 0x62a8ab43),
                                       (bytes(range(32)), 0x46dd794e), (bytes(range(31, -1, -1)), 0x113fdb5c)])
def test_published_checksums(data, crc):
    assert crc32c(data) == crc == slow_crc(data)


def test_every_length_up_to_300_and_some_beyond():
    rng = np.random.default_rng(1)
    for n in (*range(300), 1023, 1024, 1025, 4099):
        data = rng.bytes(n)
        assert crc32c(data) == crc32c(memoryview(data)) == slow_crc(data), n


def test_a_record_by_hand():
    "The first record of a known file: length 5, its checksum, 'hello', its checksum; the masks are worked out here in plain integers."
    def mask(crc): return ((crc // 2**15 + crc % 2**15 * 2**17) + 0xa282ead8) % 2**32
    length = b"\x05\0\0\0\0\0\0\0"
    want = length + mask(slow_crc(length)).to_bytes(4, "little") + b"hello" + mask(slow_crc(b"hello")).to_bytes(4, "little")
    assert frame_record(b"hello") == want
    assert masked_crc32c(b"123456789") == mask(0xe3069283)


# ---------------------------------------------------------------- protocol buffers

BY_HAND = bytes.fromhex(
    "0a 1c"                                      # Example, field 1 (Features), 28 bytes
    "0a 0f" "0a 04 64617461" "12 07"             # entry of 15 bytes: field 1 'data'; field 2 (Feature), 7 bytes
    "0a 05" "0a 03 010203"                       #   field 1 (BytesList), 5 bytes: field 1, 3 bytes
    "0a 09" "0a 01 73" "12 04"                   # entry of 9 bytes: 's'; Feature, 4 bytes
    "1a 02" "08 07")                             #   field 3 (Int64List), 2 bytes: field 1, varint 7


def test_an_example_by_hand():
    assert parse_example(BY_HAND) == {"data": [b"\1\2\3"], "s": [7]}


def test_packed_and_single_numbers_large_and_negative_ones():
    def example(numbers): return b"\x0a" + bytes([len(numbers) + 9]) + b"\x0a" + bytes([len(numbers) + 7]) + b"\x0a\x01n\x12" + bytes([len(numbers) + 2]) + b"\x1a" + bytes([len(numbers)]) + numbers
    assert parse_example(example(b"\x08\x80\x08\x08\x01")) == {"n": [1024, 1]}
    assert parse_example(example(b"\x0a\x03\x80\x08\x01")) == {"n": [1024, 1]}
    assert parse_example(example(b"\x08" + b"\xff" * 9 + b"\x01")) == {"n": [2**64 - 1]}     # -1 on the wire; no shape holds it


def test_the_order_of_features_does_not_matter():
    image = pictures(1)[0]
    f = lambda key, content: bytes([key * 8 + 2]) + (bytes([len(content)]) if len(content) < 128 else bytes([len(content) & 127 | 128, len(content) >> 7])) + content
    shape = f(1, b"shape") + f(2, f(3, f(1, b"\3\x08\x08")))
    data = f(1, b"data") + f(2, f(1, f(1, image.tobytes())))
    for pair in ((shape, data), (data, shape)):
        assert (decode_record(f(1, f(1, pair[0]) + f(1, pair[1])), "x") == image).all()


def test_a_changed_or_cut_example_is_read_or_refused_but_never_fails_obscurely():
    whole, rng = encode_example(pictures(1, 4)[0]), random.Random(0)
    for n in range(len(whole)):
        with pytest.raises(UserError, match="x: (is no picture|shape and data)"): decode_record(whole[:n], "x")
    for _ in range(2000):
        data = bytearray(whole)
        data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            assert decode_record(bytes(data), "x").dtype == np.uint8
        except UserError as e:
            assert str(e).startswith("x: ") and "Next:" in str(e)


@pytest.mark.parametrize("data, message", [
    (b"\x12\x00", "an Example with a field of number 2, wire type 2"), (b"\x0a\x02\x10\x01", "Features with a field of number 2, wire type 0"),
    (BY_HAND.replace(b"\x0a\x05\x0a\x03", b"\x12\x05\x0a\x03"), "feature 'data' with a field of number 2"),      # a list of floats
    (b"\x0a\xff\xff\xff\xff\x7f", "longer than the message"), (b"\x80" * 3, "does not end"), (BY_HAND + b"\x0d1234", "wire type 5"),
    (BY_HAND.replace(b"data", b"\xff\xfe\xfd\xfc"), "is no picture"), (BY_HAND + BY_HAND, "twice"), (BY_HAND, "no picture"), (b"", "no picture")])
def test_what_is_no_example_is_refused_by_name(data, message):
    with pytest.raises(UserError, match=message): decode_record(data, "x")


# ---------------------------------------------------------------- files

def test_truncation_at_any_byte(folder, tmp_path):
    whole = (folder / "set-r02.tfrecords").read_bytes()
    records = [0, *(np.cumsum([n + 16 for n in index_records(folder / "set-r02.tfrecords")[:, 1]]).tolist())]
    cut = tmp_path / "cut-r02.tfrecords"
    for n in range(len(whole)):
        cut.write_bytes(whole[:n])
        if n == 0:
            with pytest.raises(UserError, match="cut-r02.tfrecords: is empty"): TFRecordDataset(cut)
        elif n in records:                       # a whole number of records cannot be told from a shorter file, except by its labels
            assert len(TFRecordDataset(cut)) == records.index(n)
        else:
            start = max(r for r in records if r < n)
            with pytest.raises(UserError, match=f"cut-r02.tfrecords: record {records.index(start)} at byte {start}: the file is cut short"): TFRecordDataset(cut)
    cut.write_bytes(whole[:records[3]])
    shutil.copy(folder / "set-rxx.labels", tmp_path / "cut-rxx.labels")
    with pytest.raises(UserError, match=r"cut-rxx.labels: labels of another count than the pictures \(found 4; expected 3\)"): TFRecordDataset(cut, use_labels=True)


def test_a_flipped_bit_in_any_byte(folder, tmp_path):
    whole, bad = (folder / "set-r02.tfrecords").read_bytes(), tmp_path / "bad-r02.tfrecords"
    size = len(whole) // 4
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        bad.write_bytes(data)
        with pytest.raises(UserError) as e:
            list(TFRecordDataset(bad))
        where = f"bad-r02.tfrecords: record {at // size} at byte {at // size * size}: "
        assert where in str(e.value) and ("crc" in str(e.value) or "cut short" in str(e.value)), at


def test_the_expected_checksum_is_named(folder):
    path = folder / "set-r03.tfrecords"
    data = bytearray(path.read_bytes())
    stored, = struct.unpack("<I", data[-4:])
    data[-10] ^= 255
    path.write_bytes(data)
    ds = TFRecordDataset(folder)
    with pytest.raises(UserError, match=rf"crc {stored:08x} in the file; expected crc {masked_crc32c(bytes(data[-4 - index_records(path)[3, 1]:-4])):08x}"): ds[3]
    assert ds[2][0].shape == (3, 8, 8)            # the others are untouched


@pytest.mark.parametrize("head, kind", [(b"\x1f\x8b\x08\0" * 9, "a gzip file"), (b"PK\3\4" * 9, "a zip file"), (encode_png(np.zeros((4, 4, 3), np.uint8)), "a PNG picture"),
                                        (b"\x93NUMPY\1\0" * 4, "a NumPy array"), (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
                                        (b"just some text that is long enough", "or this is no TFRecord file"), (b"short", "cut short")])
def test_files_of_other_kinds(tmp_path, head, kind):
    (tmp_path / "x-r03.tfrecords").write_bytes(head)
    with pytest.raises(UserError, match=f"x-r03.tfrecords: .*{kind}"): TFRecordDataset(tmp_path)


def test_a_huge_length_with_a_right_checksum_allocates_nothing(tmp_path):
    length = struct.pack("<Q", 2**62)
    (tmp_path / "x-r03.tfrecords").write_bytes(length + struct.pack("<I", masked_crc32c(length)) + b"tiny")
    with pytest.raises(UserError, match="cut short"): TFRecordDataset(tmp_path)


# ---------------------------------------------------------------- the data set

def test_all_resolutions_and_the_interface_of_an_image_dataset(folder):
    full = pictures(4)
    assert list(find_tfrecords(folder)) == [4, 8]
    for resolution in (None, 8, 4):
        ds, size = TFRecordDataset(folder, resolution, use_labels=True, mirror=True), resolution or 8
        assert isinstance(ds, ImageDataset) and len(ds) == 8
        assert (ds.resolution, ds.num_channels, ds.label_dim, ds.name, ds.image_shape, ds.raw_shape) == (size, 3, 3, "set", [3, size, size], [4, 3, size, size])
        for i in range(8):
            x, c = ds[i]
            want = box_levels(full[i % 4])[size]
            assert x.dtype == torch.uint8 and (x.numpy() == (want[:, :, ::-1] if i >= 4 else want)).all()
            assert c.dtype == torch.float32 and (c.numpy() == LABELS[i % 4]).all()
    plain = TFRecordDataset(folder)
    assert plain[0][1].shape == (0,) and plain.label_dim == 0 and plain.has_labels and "NOT used" in repr(plain)


def test_digest_depends_on_what_is_read(folder, tmp_path):
    digests = [TFRecordDataset(folder, **kw).digest() for kw in ({}, {}, {"mirror": True}, {"use_labels": True}, {"resolution": 4}, {"max_images": 2})]
    assert digests[0] == digests[1] and len(set(digests)) == 5
    other = pictures(4)
    other[2, 0, 0, 0] ^= 1
    write_tfrecords(tmp_path / "b" / "set", other)
    assert TFRecordDataset(tmp_path / "b" / "set").digest() != digests[0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_the_same(folder, method):
    ds = TFRecordDataset(folder, use_labels=True)
    ds[0]                                         # the file is open before the workers start
    loader = DataLoader(ds, batch_size=2, sampler=EndlessSampler(len(ds), shuffle=False), num_workers=2, multiprocessing_context=multiprocessing.get_context(method))
    it = iter(loader)
    for k in range(6):
        x, c = next(it)
        assert (x.numpy() == pictures(4)[[2 * k % 4, 2 * k % 4 + 1]]).all() and (c.numpy() == LABELS[[2 * k % 4, 2 * k % 4 + 1]]).all()
    assert (pickle.loads(pickle.dumps(ds))[3][0] == ds[3][0]).all()


def test_shapes_that_differ(tmp_path):
    a, b = frame_record(encode_example(pictures(1, 8)[0])), frame_record(encode_example(pictures(1, 4)[0]))
    (tmp_path / "x-r03.tfrecords").write_bytes(a + a + b)
    with pytest.raises(UserError, match=r"x-r03.tfrecords, record 2: pictures of several shapes \(found \[3, 4, 4\]; expected \[3, 8, 8\], as record 0"): TFRecordDataset(tmp_path)
    turned = frame_record(encode_example(pictures(1, 8)[0].reshape(8, 3, 8)))     # as long as the others
    (tmp_path / "x-r03.tfrecords").write_bytes(a + turned)
    ds = TFRecordDataset(tmp_path)
    with pytest.raises(UserError, match=r"record 1: a picture of another shape \(found \[8, 3, 8\]; expected \[3, 8, 8\]"): ds[1]


@pytest.mark.parametrize("shape, message", [((3, 8, 4), "4x8 is not square"), ((3, 6, 6), "not a power of two"), ((3, 2, 2), "power of two from 4"), ((5, 8, 8), "channels"), ((8, 8, 3), "not square")])
def test_pictures_that_cannot_be_trained_on(tmp_path, shape, message):
    (tmp_path / "x-r03.tfrecords").write_bytes(frame_record(encode_example(np.zeros(shape, np.uint8))))
    with pytest.raises(UserError, match=f"record 0: .*{message}"): TFRecordDataset(tmp_path)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_channels(tmp_path, channels):
    write_tfrecords(tmp_path / "c", pictures(2, 4, channels))
    assert TFRecordDataset(tmp_path / "c").num_channels == channels and (TFRecordDataset(tmp_path / "c")[1][0].numpy() == pictures(2, 4, channels)[1]).all()


class Canary:
    def __reduce__(self): return (open, (self.path, "w"))


def test_labels_never_run_code(folder, tmp_path):
    canary = Canary()
    canary.path = str(tmp_path / "ran")
    with open(folder / "set-rxx.labels", "wb") as f: np.save(f, np.array([[canary]] * 4), allow_pickle=True)
    with pytest.raises(UserError, match="set-rxx.labels: is no readable NumPy array"): TFRecordDataset(folder, use_labels=True)
    (folder / "set-rxx.labels").write_bytes(pickle.dumps(canary))
    with pytest.raises(UserError, match="set-rxx.labels: is no readable NumPy array"): TFRecordDataset(folder, use_labels=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("labels, message", [(LABELS[:3], "found 3; expected 4"), (LABELS[0], "float32"), (np.where(LABELS, np.nan, 0), "not finite"), (LABELS.astype("U8"), "wrong form")])
def test_labels_that_do_not_fit(folder, labels, message):
    with open(folder / "set-rxx.labels", "wb") as f: np.save(f, labels)
    with pytest.raises(UserError, match=message): TFRecordDataset(folder, use_labels=True)


def test_labels_missing_cut_or_an_archive(folder):
    path = folder / "set-rxx.labels"
    whole = path.read_bytes()
    for n in (0, 5, 60, len(whole) - 1):
        path.write_bytes(whole[:n])
        with pytest.raises(UserError, match="set-rxx.labels"): TFRecordDataset(folder, use_labels=True)
    with open(path, "wb") as f: np.savez(f, a=LABELS)
    with pytest.raises(UserError, match="an archive of arrays"): TFRecordDataset(folder, use_labels=True)
    path.unlink()
    with pytest.raises(UserError, match="has no labels"): TFRecordDataset(folder, use_labels=True)
    assert not TFRecordDataset(folder).has_labels


def test_a_single_file_finds_its_labels(folder):
    ds = TFRecordDataset(folder / "set-r02.tfrecords", use_labels=True)
    assert ds.name == "set-r02" and ds.resolution == 4 and ds.label_dim == 3
    with pytest.raises(UserError, match="size 4x4, expected 8x8"): TFRecordDataset(folder / "set-r02.tfrecords", 8)


def test_folders_that_are_none(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no file NAME-rNN.tfrecords"): TFRecordDataset(tmp_path / "empty")
    with pytest.raises(UserError, match="nowhere: cannot be read"): TFRecordDataset(tmp_path / "nowhere")
    shutil.copy(folder / "set-r02.tfrecords", folder / "other-r02.tfrecords")
    with pytest.raises(UserError, match="several data sets .found other, set"): TFRecordDataset(folder)
    with pytest.raises(UserError, match="max_images"): TFRecordDataset(folder / "set-r02.tfrecords", max_images=0)


def test_a_failed_write_leaves_no_files(tmp_path):
    for bad in ([*pictures(2), pictures(1, 4)[0]], [*pictures(2), None], [p.astype(float) for p in pictures(2)], [np.zeros((3, 6, 6), np.uint8)], []):
        with pytest.raises(UserError): write_tfrecords(tmp_path / "w", bad)
        assert list((tmp_path / "w").iterdir()) == []
    def breaks():
        yield pictures(1)[0]
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): write_tfrecords(tmp_path / "w", breaks())
    assert list((tmp_path / "w").iterdir()) == []


def test_from_a_folder_of_pictures_and_back(tmp_path):
    (tmp_path / "png").mkdir()
    for i, p in enumerate(pictures(3, 16)): (tmp_path / "png" / f"{i}.png").write_bytes(encode_png(p.transpose(1, 2, 0)))
    write_tfrecords(tmp_path / "out", (x for x, _ in ImageDataset(tmp_path / "png")))
    ds = TFRecordDataset(tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["out-r02.tfrecords", "out-r03.tfrecords", "out-r04.tfrecords"]
    assert all((ds[i][0].numpy() == p).all() for i, p in enumerate(pictures(3, 16)))
    assert TFRecordFile(tmp_path / "out" / "out-r03.tfrecords").fingerprint(1)[0] == len(encode_example(pictures(1)[0]))
