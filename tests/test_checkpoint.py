"""Checkpoints: every byte accounted for, kills at random moments, full disks, read-only folders, foreign files."""
import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import warnings
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

import gan_course.checkpoint as ck
from gan_course.checkpoint import (DamagedCheckpoint, checkpoint_bytes, compare_state, cpu_state, latest_checkpoint,
                                   list_checkpoints, load_checkpoint, load_state, prune_checkpoints, read_meta,
                                   save_checkpoint, snapshot_name, verify_checkpoint)
from gan_course.core import UserError, rng_state

STATE = {"G": {"w": torch.arange(12.).view(3, 4)}, "n": 3, "big": 2 ** 80, "b": b"\x00\xff", "t": (1, [2., None, "ü"]), "e": torch.zeros(0)}


def same(a, b):
    if isinstance(a, torch.Tensor): return torch.equal(a, b)
    if isinstance(a, dict): return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)): return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = save_checkpoint(tmp_path_factory.mktemp("ck") / "small.pt", STATE, {"kimg": 7, "name": "ü"})
    return path, path.read_bytes()


def test_round_trip_also_through_plain_torch(small):
    path, _ = small
    state, meta = load_checkpoint(path)
    assert same(state, STATE) and meta == {"kimg": 7, "name": "ü"} == read_meta(path)
    assert same(torch.load(path, weights_only=True), STATE)
    assert same(torch.load(path, weights_only=True, mmap=True), STATE)
    assert [p.name for p in path.parent.iterdir()] == ["small.pt"]


def test_truncation_at_any_byte_is_named(small, tmp_path):
    _, whole = small
    cut = tmp_path / "cut.pt"
    for n in range(len(whole)):
        cut.write_bytes(whole[:n])
        with pytest.raises(DamagedCheckpoint, match="cut.pt: damaged checkpoint"): verify_checkpoint(cut)
    with pytest.raises(DamagedCheckpoint): load_checkpoint(cut)


def test_a_changed_byte_anywhere_is_named(small, tmp_path):
    _, whole = small
    bad, rng = tmp_path / "flip.pt", random.Random(0)
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 << rng.randrange(8)
        bad.write_bytes(data)
        with pytest.raises(UserError, match="flip.pt: (damaged|not a checkpoint)"): load_checkpoint(bad)


@pytest.mark.parametrize("change", [lambda d: d + b"\0", lambda d: b"\0" + d, lambda d: d[:300] + d[301:], lambda d: d + d, lambda d: b"", lambda d: b"hello"])
def test_other_damage(small, tmp_path, change):
    bad = tmp_path / "bad.pt"
    bad.write_bytes(change(small[1]))
    with pytest.raises(DamagedCheckpoint): load_checkpoint(bad)


def test_read_meta_reads_the_tail_only(small, tmp_path):
    bad = tmp_path / "head.pt"
    data = bytearray(small[1])
    data[200] ^= 1
    bad.write_bytes(data)
    assert read_meta(bad)["kimg"] == 7
    with pytest.raises(DamagedCheckpoint, match="tensors"): load_checkpoint(bad)


def test_foreign_and_missing_files_get_another_advice(tmp_path):
    torch.save(STATE, tmp_path / "plain.pt")
    with pytest.raises(UserError, match="not a checkpoint of this library") as e: load_checkpoint(tmp_path / "plain.pt")
    assert not isinstance(e.value, DamagedCheckpoint)
    with pytest.raises(UserError, match="no such checkpoint"): read_meta(tmp_path / "none.pt")
    with pytest.raises(UserError, match="cannot be read"): read_meta(tmp_path)


Point = namedtuple("Point", "x y")


class Sub(torch.Tensor): pass


@pytest.mark.parametrize("thing", [np.zeros(3), np.float64(1), np.int64(1), {1, 2}, torch.nn.Linear(1, 1), Point(1, 2), object(), open, torch.zeros(1, device="meta"), torch.zeros(1).as_subclass(Sub), {(1,): 2}],
                         ids=lambda x: type(x).__name__)
def test_what_weights_only_refuses_is_refused_at_save_time(tmp_path, thing):
    path = save_checkpoint(tmp_path / "a.pt", {"ok": 1})
    with pytest.raises(UserError, match=r"state\['deep'\]\[1\]"): save_checkpoint(path, {"deep": [0, thing]})
    assert load_checkpoint(path)[0] == {"ok": 1}


def test_every_admitted_type_loads_weights_only(tmp_path):
    od = OrderedDict(a=torch.ones(1))
    state = dict(none=None, b=True, i=-1, f=float("inf"), s="x", by=b"\x80", size=torch.Size([1, 2]), dt=torch.bfloat16, dev=torch.device("cpu"), od=od, li=[1], tu=(1,), k={1: 2},
                 half=torch.ones(2).half(), bf=torch.ones(2).bfloat16(), i64=torch.tensor(3), bo=torch.tensor([True]), c=torch.ones(1, dtype=torch.complex64), rng=rng_state())
    state, _ = load_checkpoint(save_checkpoint(tmp_path / "a.pt", state))
    assert state["size"] == torch.Size([1, 2]) and state["dt"] is torch.bfloat16 and type(state["od"]) is OrderedDict


def test_views_and_shared_storages(tmp_path):
    big = torch.zeros(100_000)
    assert save_checkpoint(tmp_path / "v.pt", {"row": big[5:9]}).stat().st_size < 8192
    twice = save_checkpoint(tmp_path / "s.pt", {"a": big, "b": big}).stat().st_size
    assert twice < 500_000
    assert cpu_state({"p": torch.nn.Parameter(big)})["p"].requires_grad is False


def test_size_forecast_is_close_and_not_below(tmp_path):
    net = torch.nn.Sequential(*[torch.nn.Linear(50, 50) for _ in range(40)])
    opt = torch.optim.Adam(net.parameters())
    net(torch.randn(2, 50)).sum().backward()
    opt.step()
    for state in (dict(net=net.state_dict(), opt=opt.state_dict(), rng=rng_state()), dict(x=torch.zeros(250_000)), {}, dict(x=list(range(5000)))):
        real = save_checkpoint(tmp_path / "x.pt", state).stat().st_size
        assert real <= checkpoint_bytes(state) <= 1.15 * real + 100_000


def test_optimiser_and_module_state_continue_exactly(tmp_path):
    def step(net, opt):
        for i in range(3):
            opt.zero_grad()
            net(torch.full((2, 3), 1. + i)).square().sum().backward()
            opt.step()

    def make(seed):
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        return net, torch.optim.Adam(net.parameters(), lr=.1, betas=(0., .99))
    net, opt = make(0)
    step(net, opt)
    save_checkpoint(tmp_path / "a.pt", dict(net=net.state_dict(), opt=opt.state_dict()))
    step(net, opt)
    other, opt2 = make(1)
    state, _ = load_checkpoint(tmp_path / "a.pt")
    load_state(other, state["net"])
    opt2.load_state_dict(state["opt"])
    step(other, opt2)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values()))


WORKER = textwrap.dedent("""
    import os, random, signal, sys, time, torch, warnings
    from pathlib import Path
    from gan_course.checkpoint import save_checkpoint, latest_checkpoint, load_checkpoint, snapshot_name
    torch.set_num_threads(1)
    folder, rng, in_flight = Path(sys.argv[1]), random.Random(3), 0
    last = -1
    for trial in range(60):
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            k = last + 1
            while True:
                save_checkpoint(folder / snapshot_name(k), {"k": k, "x": torch.full((300_000,), float(k))}, {"k": k})
                os.write(w, b"%d\\n" % k)
                k += 1
        time.sleep(rng.uniform(.0, .03))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(w)
        told = os.fdopen(r).read().split()
        in_flight += any(folder.glob(".*.tmp"))
        path = latest_checkpoint(folder)
        if told: assert path, "a finished save was lost"
        if path:
            state, meta = load_checkpoint(path)
            assert state["k"] == meta["k"] and (state["x"] == state["k"]).all() and path.name == snapshot_name(state["k"])
            assert not told or state["k"] >= int(told[-1])
            last = state["k"]
            for old in folder.glob("network-snapshot-*.pt"):
                if old != path: old.unlink()
    assert not list(folder.glob("*.bad"))
    print(last, in_flight)
""")


@pytest.mark.skipif(os.name != "posix", reason="fork and SIGKILL")
def test_kill_at_random_moments_leaves_a_loadable_latest(tmp_path):
    out = subprocess.run([sys.executable, "-W", "error", "-c", WORKER, str(tmp_path)], capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert out.returncode == 0, out.stderr
    last, in_flight = map(int, out.stdout.split())
    assert last > 5 and in_flight > 5, "too few kills hit a save in progress to prove anything"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_error_at_any_stage_keeps_the_old_file_and_leaves_no_rest(tmp_path, monkeypatch, call):
    path = save_checkpoint(tmp_path / "a.pt", {"k": 1})

    def fail(*a, **k): raise OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(ck.os, call, fail)
    with pytest.raises(UserError, match="a.pt.*older file is untouched"): save_checkpoint(path, {"k": 2})
    monkeypatch.undo()
    assert load_checkpoint(path)[0] == {"k": 1} and [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_keyboard_interrupt_leaves_no_rest(tmp_path, monkeypatch):
    def fail(*a, **k): raise KeyboardInterrupt
    monkeypatch.setattr(ck.os, "fsync", fail)
    with pytest.raises(KeyboardInterrupt): save_checkpoint(tmp_path / "a.pt", {"k": 2})
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="RLIMIT_FSIZE")
def test_a_disk_that_fills_up_while_writing(tmp_path):
    code = textwrap.dedent("""
        import resource, signal, sys, torch
        from gan_course.checkpoint import save_checkpoint, load_checkpoint
        from gan_course.core import UserError
        path = save_checkpoint(sys.argv[1] + "/a.pt", {"k": 1})
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        try: save_checkpoint(path, {"x": torch.zeros(1_000_000)})
        except UserError as e: print(e)
        assert load_checkpoint(path)[0] == {"k": 1}
    """)
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    assert "could not be written" in out.stdout and [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_space_is_checked_before_anything_is_written(tmp_path, monkeypatch):
    import shutil
    monkeypatch.setattr(shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(10 ** 9, 10 ** 9, 0))
    with pytest.raises(UserError, match="not enough free space"): save_checkpoint(tmp_path / "a.pt", {"x": torch.zeros(10)})
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="folder permissions of POSIX")
def test_read_only_folder():
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        root = os.geteuid() == 0
        if root: os.seteuid(65534)                                            # root may write everywhere; nobody may not
        try:
            with pytest.raises(UserError, match="cannot write into this folder: Permission denied"): save_checkpoint(os.path.join(folder, "a.pt"), {"k": 1})
        finally:
            if root: os.seteuid(0)
        assert os.listdir(folder) == []


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(UserError, match="cannot write into this folder"): save_checkpoint(tmp_path / "f" / "a.pt", {"k": 1})


def test_latest_falls_back_and_keeps_the_bad_one_aside(tmp_path):
    for k in (1, 2, 3): save_checkpoint(tmp_path / snapshot_name(k), {"k": k})
    newest = tmp_path / snapshot_name(3)
    newest.write_bytes(newest.read_bytes()[:-200])
    bad = newest.read_bytes()
    assert latest_checkpoint(tmp_path, quarantine=False).name == snapshot_name(2) and newest.exists()
    with pytest.warns(UserWarning, match="000003.pt.*kept as network-snapshot-000003.pt.bad"): assert latest_checkpoint(tmp_path).name == snapshot_name(2)
    assert (tmp_path / "network-snapshot-000003.pt.bad").read_bytes() == bad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest_checkpoint(tmp_path).name == snapshot_name(2)


def test_latest_orders_by_number_and_ignores_other_files(tmp_path):
    for name in ("network-snapshot-1000000.pt", "network-snapshot-999999.pt", "other.pt", ".network-snapshot-2000000.pt.tmp", "network-snapshot-x.pt"): save_checkpoint(tmp_path / name, {})
    assert latest_checkpoint(tmp_path).name == "network-snapshot-1000000.pt"
    assert [k for k, _ in list_checkpoints(tmp_path)] == [1000000, 999999]


def test_an_unreadable_file_is_not_called_damaged(tmp_path, monkeypatch):
    path = save_checkpoint(tmp_path / snapshot_name(1), {})

    def refuse(*a): raise PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(UserError, match="Permission denied"): latest_checkpoint(tmp_path)
    monkeypatch.undo()
    assert path.exists()


def test_prune_counts_good_ones_only(tmp_path):
    for k in range(1, 6): save_checkpoint(tmp_path / snapshot_name(k), {"k": k})
    for k in (3, 4, 5): (tmp_path / snapshot_name(k)).write_bytes(b"broken")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert prune_checkpoints(tmp_path, keep=3) == []                     # only two are good: all stay
        assert [p.name for p in prune_checkpoints(tmp_path, keep=1)] == [snapshot_name(1)]
    assert [k for k, _ in list_checkpoints(tmp_path)] == [2] and len(list(tmp_path.glob("*.bad"))) == 3


def test_prune_keeps_the_only_good_one_even_if_it_is_the_oldest(tmp_path):
    save_checkpoint(tmp_path / snapshot_name(0), {"k": 0})
    for k in range(1, 9): (tmp_path / snapshot_name(k)).write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for keep in (3, 1): assert prune_checkpoints(tmp_path, keep=keep) == []
    assert latest_checkpoint(tmp_path).name == snapshot_name(0)


def test_load_state_table_names_each_difference():
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    state = {**net.state_dict(), "2.weight": torch.zeros(1), "0.weight": torch.zeros(5, 2)}
    del state["1.bias"]
    assert [r[:2] for r in compare_state(net, state)] == [("missing", "1.bias"), ("unexpected", "2.weight"), ("shape", "0.weight")]
    before = [p.clone() for p in net.parameters()]
    with pytest.raises(UserError) as e: load_state(net, state, name="G_ema")
    for words in ("G_ema: snapshot of another architecture", "missing", "1.bias", "unexpected", "2.weight", "(3, 2)", "(5, 2)", "3 of 4"): assert words in str(e.value)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters()))
    many = {f"x{i}": torch.zeros(1) for i in range(50)}
    with pytest.raises(UserError, match="and 42 more"): load_state(net, many)
