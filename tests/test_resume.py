"""Exact resume of the trainer: a new process, kills, signals, damaged files and changed settings.

What counts as equal is every tensor and number that decides how training goes on, bit for bit, as SHA-256 of each part and of all parts together.
"""
import importlib.util
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from gan_course.checkpoint import DamagedCheckpoint, latest_checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from gan_course.core import UserError
from gan_course.faces import FacesDataset
from gan_course.gan_trainer import Trainer
from gan_course.losses import lazy_adam

JOB = textwrap.dedent('''
    """Used by the test process and, as a script, by new processes: resume OUT FOLDER | children OUT FOLDER."""
    import hashlib
    import json
    import multiprocessing
    import os
    import random
    import signal
    import sys
    import time
    from pathlib import Path

    import numpy as np
    import psutil
    import torch

    from gan_course.checkpoint import latest_checkpoint, load_checkpoint
    from gan_course.core import set_seed
    from gan_course.faces import FacesDataset
    from gan_course.gan_trainer import TrainConfig, Trainer
    from gan_course.growing import GrowingSchedule
    from gan_course.layers import Discriminator
    from gan_course.precision import NonFiniteError
    from gan_course.stylegan import StyleGANDiscriminator, StyleGANGenerator
    from gan_course.stylegan2 import Generator

    torch.set_num_threads(1)

    GROWING = dict(growing=True, pl_weight=0, g_lr=0.001, d_lr=0.001, batch=8)
    CASES = {                                                    # settings, iterations before the snapshot, iterations after it
        "plain": ({}, 3, 3),
        "ada": (dict(aug="ada", aug_kimg=0.1, aug_p=0.2), 3, 3),
        "labels": ({}, 3, 3),
        "accumulation": (dict(batch=8, batch_gpu=2), 3, 3),
        "workers": (dict(workers=2), 3, 3),
        "not lazy": (dict(r1_interval=None), 3, 3),
        "growing": (GROWING, 3, 3),                              # grows, with another batch and rate, after the snapshot
        "growing, in a fade": (GROWING, 5, 4),                   # grows before the snapshot, which falls into the fade
    }
    FACES = {label: FacesDataset(64, resolution=16, label=label) for label in (None, "hair_style")}


    def make(case, folder, build_seed=0, **more):
        "A trainer of tiny networks."
        settings, data = CASES[case][0], FACES["hair_style" if case == "labels" else None]
        set_seed(build_seed)
        grow, small = settings.get("growing"), dict(channel_base=128, channel_max=8)
        G = (StyleGANGenerator if grow else Generator)(8, data.label_dim, 8, 16, 3, mapping_kwargs=dict(num_layers=2), **small)
        D = (StyleGANDiscriminator if grow else Discriminator)(data.label_dim, 16, 3, **small)
        t = Trainer(G, D, data, TrainConfig(**{**dict(batch=4, grid=4, pl_interval=2, r1_interval=4), **settings, **more}), folder, "cpu")
        if grow: t.schedule = GrowingSchedule(16, stable_kimg=0.016, fade_kimg=0.032, batch={8: 8, 16: 4}, batch_gpu={8: 4, 16: 4}, lr={16: 0.002})
        if t.ada: t.ada.interval = 2
        return t


    def disturb():
        "Another place in every random row."
        torch.randn(100), np.random.rand(7), random.random()


    def leaves(x, where):
        "The values in nested containers, with their places, as bytes."
        if isinstance(x, torch.Tensor):
            x = x.detach().cpu().contiguous()
            yield f"{where} {x.dtype} {tuple(x.shape)}", x.reshape(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(x, dict):
            for k in sorted(x, key=str): yield from leaves(x[k], f"{where}.{k}")
        elif isinstance(x, (list, tuple)):
            for i, v in enumerate(x): yield from leaves(v, f"{where}[{i}]")
        else: yield where, repr(x).encode()


    def sha(x):
        h = hashlib.sha256()
        for where, data in leaves(x, ""): h.update(where.encode() + b"=" + data + b";")
        return h.hexdigest()


    def everything(t, leave_out=()):
        "SHA-256 of each part of a trainer, and of all of them; takes one batch from the data."
        parts = {k: v for k, v in t.state().items() if k not in ("seconds", *leave_out)}           # seconds are wall time
        parts |= {"augment": t.augment.state_dict() if t.augment is not None else None, "lod and batch": [t.lod, t.batch, t.batch_gpu],
                  "groups": [{k: v for k, v in g.items() if k != "params"} for p in t.phases for g in p.opt.param_groups]}
        parts["next reals and labels"] = t.next_batch()                                            # the sampler's place
        t.batches = None
        parts = {k: sha(v) for k, v in parts.items()}
        return {**parts, "all": sha(parts)}


    def iterate(t, n):
        for _ in range(n): t.train_iteration()
        return t


    def resume(out, folder):
        "Every case: other weights, other random numbers, the snapshot, the rest of the iterations."
        found = {}
        for case, (_, _, rest) in CASES.items():
            snapshot = latest_checkpoint(Path(folder) / case)
            if snapshot is None: continue
            t = make(case, Path(folder) / (case + " again"), build_seed=99)
            disturb()
            found[case] = everything(iterate(t.resume(snapshot), rest))
        Path(out).write_text(json.dumps(found))


    def train(folder, workers):
        "Until a signal comes."
        t = make("plain", folder, kimg=4, tick_kimg=0.016, image_ticks=1000, snapshot_ticks=1000, workers=workers)
        t.on_tick.append(lambda t, fields: print("tick", t.tick, flush=True))
        t.fit(progress=False)


    def members(group):
        "The living processes of a group."
        def alive(p):
            try: return os.getpgid(p.pid) == group and p.status() != psutil.STATUS_ZOMBIE
            except (ProcessLookupError, psutil.NoSuchProcess): return False
        return [p for p in psutil.process_iter() if alive(p)]


    def signalled(folder, name, wait, start_method=None):
        "A training process, with its loaders if it has any, gets a signal some time after its second tick; its exit status, once all its processes have ended."
        out, err = (Path(f"{folder}.{end}") for end in ("out", "err"))
        for path in (out, err): path.write_text("")
        pid = os.fork()
        if pid == 0:
            for path, fd in ((out, 1), (err, 2)): os.dup2(os.open(path, os.O_WRONLY), fd)
            os.setsid()
            if start_method: multiprocessing.set_start_method(start_method)
            train(folder, 2 if start_method else 0)              # its exception ends this process
        while "tick 2" not in out.read_text() and not err.read_text(): time.sleep(0.01)
        time.sleep(wait)
        assert bool(start_method) == (len(members(pid)) > 1)
        os.killpg(pid, getattr(signal, name))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        while members(pid): time.sleep(0.1)                      # a loader that never ends is met by the time limit of the test
        return status


    def killed(folder):
        "Three children save again and again; each is killed at a random moment. The last snapshot, and how many saves were cut off."
        rng, last, cut = random.Random(), 0, 0
        t = iterate(make("plain", folder, keep=2), 1)
        for kill in range(3):
            r, w = os.pipe()
            pid = os.fork()
            if pid == 0:
                for k in range(last + 1, last + 1000):
                    t.nimg = 1000 * k
                    for p in t.G.parameters(): p.data.fill_(k)
                    t.save()
                    os.write(w, b"%d\\n" % k)
            os.close(w)
            told = os.fdopen(r)
            said = [int(told.readline())]                        # one is saved
            time.sleep(rng.uniform(0, 0.2))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            said += [int(line) for line in told]
            cut += any(folder.glob(".*.tmp"))
            snapshot = latest_checkpoint(folder, quarantine=False)
            again = make("plain", folder / "again", build_seed=99).resume(snapshot)
            last = again.nimg // 1000
            assert last in (said[-1], said[-1] + 1), (last, said)                                  # none that was told is lost
            assert all((p == last).all() for p in again.G.parameters()), "a mixture of two snapshots"
            assert snapshot.name == f"network-snapshot-{last:06d}.pt" and not list(folder.glob("*.bad"))
        return last, cut


    def children(out, folder):
        "Processes that are told to stop, and some that are not asked."
        folder, found = Path(folder), {"waits": {name: random.uniform(0, 0.3) for name in ["SIGTERM", "SIGINT", *(f"{name} and {method}" for name in ("SIGTERM", "SIGINT") for method in multiprocessing.get_all_start_methods())]}}
        make("plain", folder / "first")                          # what is imported on first use is imported once
        for name, wait in found["waits"].items(): found[name] = signalled(folder / name, name.split()[0], wait, name.split(" and ")[1] if " and " in name else None)
        found["killed"] = killed(folder / "killed")
        Path(out).write_text(json.dumps(found))


    if __name__ == "__main__": globals()[sys.argv[1]](*sys.argv[2:])
''')

posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "resume_job.py"
    path.write_text(JOB, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def job(script):
    "The script as a module of this process; one thread, as in the script."
    threads = torch.get_num_threads()
    spec = importlib.util.spec_from_file_location("resume_job", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    torch.set_num_threads(threads)


def start(script, *args, **kw):
    return subprocess.Popen([sys.executable, str(script), *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}, **kw)


def finish(process):
    try: return process.communicate(timeout=120)
    finally: process.kill()


def differ(a, b):
    return [k for k in a.keys() | b.keys() if a.get(k) != b.get(k)]


@pytest.fixture(scope="module")
def runs(job, script, tmp_path_factory):
    "Each case: what the straight run, the first half and the new process were like."
    folder = tmp_path_factory.mktemp("runs")
    halves, out = {}, folder / "digests.json"
    for case, (_, first, _) in job.CASES.items():
        halves[case] = job.iterate(job.make(case, folder / case), first)
        halves[case].save()
    process = start(script, "resume", out, folder)                     # meanwhile, the straight runs
    straight, digests = {}, {}
    for case, (_, first, rest) in job.CASES.items():
        straight[case] = job.iterate(job.make(case, folder / "straight" / case), first + rest)
        digests[case] = job.everything(straight[case])
    _, errors = finish(process)
    assert process.returncode == 0, errors
    return straight, halves, digests, json.loads(out.read_text())


CASES = ["plain", "ada", "labels", "accumulation", "workers", "not lazy", "growing", "growing, in a fade"]


@pytest.mark.parametrize("case", CASES)
def test_a_new_process_goes_on_bit_for_bit(runs, case):
    _, _, straight, resumed = runs
    print(f"{case}: straight {straight[case]['all']}, resumed {resumed[case]['all']}")
    assert differ(straight[case], resumed[case]) == []
    assert {"G", "D", "G_ema", "opt_G", "opt_D", "pl_mean", "ada", "augment", "rng", "growth", "nimg", "iteration", "next reals and labels"} <= set(straight[case])


def test_the_cases_are_what_they_say(runs, job):
    straight, halves, digests, _ = runs
    assert CASES == list(job.CASES) and digests["workers"] == digests["plain"]                # loader processes change nothing
    assert len({d["all"] for d in digests.values()}) == len(CASES) - 1
    ps = 0.2, halves["ada"].ada.p, straight["ada"].ada.p
    assert ps[0] != ps[1] != ps[2] and halves["ada"].ada.count > 0                            # p moved on both sides, in the middle of a count
    assert torch.equal(straight["ada"].augment.p, torch.tensor(straight["ada"].ada.p))
    assert straight["labels"].G.c_dim == 7
    assert [p.name for p in straight["not lazy"].phases] == ["Gmain", "Greg", "Dboth"] and [p.name for p in straight["plain"].phases] == ["Gmain", "Greg", "Dmain", "Dreg"]
    assert float(straight["plain"].loss.pl_mean) > 0
    grown = [(t.lod, t.batch, t.phases[0].opt.param_groups[0]["lr"]) for t in (halves["growing"], straight["growing"], halves["growing, in a fade"], straight["growing, in a fade"])]
    assert grown == [(1.0, 8, 0.001), (0.5, 4, 0.002), (0.5, 4, 0.002), (0.0, 4, 0.002)]


def test_the_digest_sees_every_part(job, tmp_path):
    t = job.iterate(job.make("ada", tmp_path), 2)
    before = job.everything(t)
    assert job.everything(t) == before
    flip = lambda x: x.view(-1).view(torch.uint8)[-1:].bitwise_xor_(1)                        # one bit
    moment = lambda opt: flip(next(iter(opt.state.values()))["exp_avg_sq"])
    changes = {"G": lambda: flip(t.G.synthesis.b16.conv0.weight.data), "D": lambda: flip(t.D.b4.fc.weight.data), "G_ema": lambda: flip(t.G_ema.mapping.w_avg),
               "opt_G": lambda: moment(t.phases[0].opt), "opt_D": lambda: moment(t.phases[-1].opt), "pl_mean": lambda: flip(t.loss.pl_mean),
               "ada": lambda: setattr(t.ada, "count", t.ada.count + 1), "augment": lambda: flip(t.augment.p), "rng": lambda: torch.rand(1), "iteration": lambda: setattr(t, "iteration", 7)}
    for part, change in changes.items():
        change()
        after = job.everything(t)
        assert sorted(differ(before, after)) == sorted([part, "all"])
        before = after
    t.nimg += 1
    assert sorted(differ(before, job.everything(t))) == sorted(["nimg", "next reals and labels", "all"])


@pytest.mark.parametrize("left_out", ["opt_G", "opt_D", "rng", "G_ema", "pl_mean", "nimg"])
def test_each_part_of_the_state_is_needed(runs, job, tmp_path, left_out):
    "Resume with one part as a new run has it, and the weights after it differ."
    _, halves, straight, _ = runs
    snapshot = latest_checkpoint(halves["plain"].run_dir)
    t = job.make("plain", tmp_path)
    first = t.state()
    state, _ = load_checkpoint(snapshot)
    state[left_out] = first[left_out]
    t.resume(save_checkpoint(tmp_path / "part.pt", state))
    rest = job.everything(job.iterate(t, 3))
    wrong = set(differ(rest, straight["plain"]))
    assert wrong == {"G_ema", "all"} if left_out == "G_ema" else {"G", "D", "G_ema"} <= wrong, wrong


@pytest.fixture(scope="module")
def children(script, tmp_path_factory):
    "What became of the processes that got signals, and their folder."
    folder = tmp_path_factory.mktemp("children")
    process = start(script, "children", folder / "found.json", folder)
    _, errors = finish(process)
    assert process.returncode == 0, errors
    return json.loads((folder / "found.json").read_text()), folder


@posix
def test_killed_while_saving_the_latest_snapshot_is_whole(children):
    last, cut = children[0]["killed"]
    print(f"{last} snapshots, {cut} of 3 kills left a half-written file aside")
    assert last >= 3


@posix
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", *(f"{name} and {method}" for name in ("SIGTERM", "SIGINT") for method in multiprocessing.get_all_start_methods())])
def test_signals_save_stop_and_go_on_exactly(children, job, tmp_path, name):
    "A signal to the whole group, as Slurm, systemd and a terminal send it: alone, and with loader processes of every start method."
    status, words = (143, "") if name.startswith("SIGTERM") else (-signal.SIGINT, "KeyboardInterrupt\n")
    found, folder = children
    snapshot, errors = latest_checkpoint(folder / name), (folder / f"{name}.err").read_text()
    assert found[name] == status, errors
    assert errors.endswith(words) and bool(errors) == bool(words), errors
    assert f"stopped by {name.split()[0]}; saved {snapshot}" in (folder / f"{name}.out").read_text()
    t = job.make("plain", tmp_path / "again", build_seed=99).resume(snapshot)
    done = t.iteration
    assert done >= 8 and t.nimg == 4 * done
    ticks = ["tick", "tick_nimg", "tick_seconds", "stats"]                                    # only fit counts ticks
    resumed = job.everything(job.iterate(t, 3), leave_out=ticks)
    straight = job.everything(job.iterate(job.make("plain", tmp_path / "straight"), done + 3), leave_out=ticks)
    print(f"{name} {found['waits'][name]:.2f} s after tick 2, after {done} iterations: straight {straight['all']}, resumed {resumed['all']}")
    assert differ(straight, resumed) == []


def test_a_truncated_snapshot_falls_back_to_the_one_before(job, tmp_path):
    t = job.iterate(job.make("plain", tmp_path / "run", batch=500, batch_gpu=100, pl_weight=0, r1_gamma=0), 2)
    first = t.save()
    job.iterate(t, 2)
    second = t.save()
    assert [p for _, p in list_checkpoints(t.run_dir)] == [second, first]
    second.write_bytes(second.read_bytes()[:-200])
    again = job.make("plain", tmp_path / "again", build_seed=99, batch=500, batch_gpu=100, pl_weight=0, r1_gamma=0)
    before = job.everything(again)
    with pytest.raises(DamagedCheckpoint, match="000002.pt: damaged checkpoint"): again.resume(second)
    assert job.everything(again) == before                                                   # nothing was taken over
    with pytest.warns(UserWarning, match="000002.pt.*kept as network-snapshot-000002.pt.bad"): found = latest_checkpoint(t.run_dir)
    assert found == first
    assert differ(job.everything(job.iterate(again.resume(found), 2)), job.everything(t)) == []


def test_todays_learning_rate_wins(runs, job, tmp_path):
    _, halves, _, _ = runs
    snapshot = latest_checkpoint(halves["plain"].run_dir)
    slow = job.make("plain", tmp_path / "same").resume(snapshot)
    fast = job.make("plain", tmp_path / "fast", g_lr=0.005, d_lr=0.01, betas=(0.5, 0.9)).resume(snapshot)
    for phase, lr, interval in ((fast.phases[0], 0.005, 2), (fast.phases[-1], 0.01, 4)):
        now, want = phase.opt.param_groups[0], lazy_adam(lr, (0.5, 0.9), interval)
        assert now["lr"] == want["lr"] and now["betas"] == want["betas"]
    a, b = (job.everything(t) for t in (slow, fast))
    assert set(differ(a, b)) == {"opt_G", "opt_D", "groups", "all"}                           # the settings alone, before the first step
    assert all(torch.equal(slow.phases[0].opt.state_dict()["state"][i]["exp_avg_sq"], s["exp_avg_sq"]) for i, s in fast.phases[0].opt.state_dict()["state"].items())
    before = [p.clone() for p in slow.G.parameters()]
    for t in (slow, fast): t.train_iteration()
    steps = [sum(float((p - q).detach().square().sum()) for p, q in zip(t.G.parameters(), before)) ** 0.5 for t in (slow, fast)]
    assert steps[1] > 1.3 * steps[0], steps


def test_todays_learning_rate_wins_while_growing(runs, job, tmp_path):
    _, halves, _, _ = runs
    snapshot = latest_checkpoint(halves["growing, in a fade"].run_dir)
    t = job.make("growing, in a fade", tmp_path, g_lr=0.003).resume(snapshot)
    want = lazy_adam(0.003, (0.0, 0.99), None)["lr"] * 2                                      # the schedule doubles the rate at 16 px
    assert t.phases[0].opt.param_groups[0]["lr"] == pytest.approx(want, rel=1e-12)


def test_growth_is_in_the_state_before_the_first_iteration(job, tmp_path):
    t = job.make("growing", tmp_path / "run")
    snapshot, straight = t.save(), job.everything(job.iterate(t, 6))
    again = job.make("growing", tmp_path / "again", build_seed=99).resume(snapshot)
    assert differ(job.everything(job.iterate(again, 6)), straight) == []


@pytest.mark.parametrize("iterations, want", [(1, (1.0, 8, 0.001)), (3, (0.75, 4, 0.002)), (7, (0.0, 4, 0.002))])
def test_a_run_that_did_not_grow_goes_on_growing(job, tmp_path, iterations, want):
    full = job.make("growing", tmp_path / "full", growing=False)
    full.schedule = None
    snapshot = job.iterate(full, iterations).save()
    t = job.make("growing", tmp_path / "growing").resume(snapshot)
    assert (t.lod, t.batch, t.phases[0].opt.param_groups[0]["lr"]) == want                    # at once, not after up to three iterations
    saved, now = full.state(), t.state()
    assert differ({k: job.sha(v["state"]) for k, v in saved.items() if k.startswith("opt")}, {k: job.sha(v["state"]) for k, v in now.items() if k.startswith("opt")}) == []
    job.iterate(t, 1)
    assert t.nimg == full.nimg + t.batch
    assert {float(s["step"]) for s in t.phases[0].opt.state.values()} >= {iterations + 1.0}   # Adam went on, it did not start afresh


def other_of(job, folder):
    "A trained trainer of other networks."
    t = job.make("plain", folder)
    G = job.Generator(8, 0, 8, 16, 3, mapping_kwargs=dict(num_layers=3), channel_base=128, channel_max=8)
    return job.iterate(Trainer(G, job.Discriminator(0, 16, 3, channel_base=256, channel_max=16), t.dataset, t.cfg, folder, "cpu"), 1)


@pytest.mark.parametrize("part, words", [("G", "G: snapshot of another architecture"), ("D", "D: snapshot of another architecture"), ("G_ema", "G_ema: snapshot of another architecture"),
                                         ("opt_G", "opt_G: groups of other sizes"), ("opt_D", r"opt_D: exp_avg\w* of parameter 0 has another shape")])
def test_resume_is_all_or_nothing(job, tmp_path, part, words):
    t = job.iterate(job.make("plain", tmp_path / "run"), 2)
    state, _ = load_checkpoint(job.iterate(job.make("plain", tmp_path / "more"), 3).save())
    bad = save_checkpoint(tmp_path / "bad.pt", {**state, part: other_of(job, tmp_path / "other").state()[part]})
    before = job.everything(t)
    with pytest.raises(UserError, match=f"bad.pt: {words}"): t.resume(bad)
    assert differ(before, job.everything(t)) == []


@pytest.mark.parametrize("lacks", [["G"], ["opt_D", "rng"], ["nimg"], None])
def test_a_file_without_the_parts_of_a_training_is_named(job, tmp_path, lacks):
    t = job.iterate(job.make("plain", tmp_path), 1)
    state = {k: v for k, v in t.state().items() if lacks and k not in lacks}
    before = job.everything(t)
    with pytest.raises(UserError, match=rf"part.pt: .*found .*{', '.join(lacks or ['G', 'D', 'G_ema', 'opt_G'])}"): t.resume(save_checkpoint(tmp_path / "part.pt", state))
    assert differ(before, job.everything(t)) == []


def test_snapshots_from_before_the_running_tick_was_kept(job, tmp_path):
    t = job.iterate(job.make("plain", tmp_path / "run"), 3)
    old = {k: v for k, v in t.state().items() if k not in ("stats", "tick_nimg", "tick_seconds")}
    snapshot = save_checkpoint(tmp_path / "network-snapshot-000000.pt", old)
    straight = job.everything(job.iterate(t, 2), ["stats", "tick_nimg"])
    again = job.make("plain", tmp_path / "again", build_seed=99).resume(snapshot)
    assert (again.tick_nimg, again.stats.parts) == (12, {})                                   # a new tick begins
    assert differ(job.everything(job.iterate(again, 2), ["stats", "tick_nimg"]), straight) == []


def log(t):
    "The lines of the log without times and memory."
    lines = [json.loads(line) for line in (t.run_dir / "stats.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not re.match("Timing|Resources|timestamp", k)} for line in lines]


FIT = dict(kimg=0.08, tick_kimg=0.032, image_ticks=1, snapshot_ticks=1)


@pytest.mark.parametrize("at", [1, 7, 8, 9, 19])
def test_the_log_covers_every_image_once_after_a_signal(job, tmp_path, at):
    "Ticks, statistics and snapshots of a stopped run that goes on are those of a straight one, number by number."
    straight = job.make("plain", tmp_path / "straight", **FIT)
    straight.fit(progress=False)
    t, calls = job.make("plain", tmp_path / "run", **FIT), []
    def step(t=t, step=t.next_batch):
        calls.append(1)
        if len(calls) == at: signal.raise_signal(signal.SIGTERM)
        return step()
    t.next_batch = step
    with pytest.raises(SystemExit): t.fit(progress=False)
    assert t.nimg == 4 * at
    again = job.make("plain", tmp_path / "run", build_seed=99, **FIT).resume(latest_checkpoint(tmp_path / "run"))
    again.fit(progress=False)
    assert log(again) == log(straight)
    assert [line["Progress/kimg"]["mean"] for line in log(straight)] == [0.032, 0.064, 0.08] and sum(line["Loss/scores/real"]["num"] for line in log(again)) >= 80
    assert differ(job.everything(again, ["tick_seconds"]), job.everything(straight, ["tick_seconds"])) == []


def test_a_rolled_back_tick_begins_where_the_snapshot_left_it(job, tmp_path):
    t = job.iterate(job.make("plain", tmp_path, on_nonfinite="rollback"), 3)
    t.save()
    kept = job.sha(t.stats.state_dict())
    job.iterate(t, 2)
    assert job.sha(t.stats.state_dict()) != kept
    t.seconds = 5.0
    t.roll_back(job.NonFiniteError("training has diverged"))
    assert job.sha(t.stats.state_dict()) == kept and (t.seconds, t.tick_seconds, t.tick_nimg) == (5.0, 5.0, 0)


def test_a_cut_line_of_the_log_is_ended_before_the_next(job, tmp_path):
    t = job.make("plain", tmp_path, **FIT)
    (tmp_path / "stats.jsonl").write_text('{"Progress/ki')
    t.fit(progress=False)
    first, *lines = (tmp_path / "stats.jsonl").read_text().splitlines()
    assert first == '{"Progress/ki' and [json.loads(line)["Progress/kimg"]["mean"] for line in lines] == [0.032, 0.064, 0.08]


def test_fit_of_a_finished_run_returns_a_snapshot_that_is_there(job, tmp_path):
    t = job.make("plain", tmp_path / "run", **FIT)
    first = t.fit(progress=False)
    inode = first.stat().st_ino
    assert first.exists() and job.make("plain", tmp_path / "run", **FIT).resume(first).fit(progress=False) == first and first.stat().st_ino == inode
    second = job.make("plain", tmp_path / "new", **FIT).resume(first).fit(progress=False)
    assert second.parent == tmp_path / "new"
    before, after = load_checkpoint(first)[0], load_checkpoint(second)[0]
    assert differ({k: job.sha(v) for k, v in before.items()}, {k: job.sha(v) for k, v in after.items()}) == []


def test_other_data_of_the_same_shape_is_said_once(job, tmp_path, capsys):
    t = job.iterate(job.make("plain", tmp_path), 1)
    snapshot = t.save()
    job.make("plain", tmp_path / "same").resume(snapshot)
    assert capsys.readouterr().out == ""
    other = Trainer(t.G, t.D, FacesDataset(64, resolution=16, seed=5), t.cfg, tmp_path / "other", "cpu")
    for _ in range(2): other.resume(snapshot)
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and snapshot.name in out and t.dataset.digest() in out and other.dataset.digest() in out


def test_snapshots_within_one_thousand_images_do_not_replace_each_other(job, tmp_path):
    t, saved = job.make("plain", tmp_path, keep=3), []
    for _ in range(4): saved.append(job.iterate(t, 1).save())
    assert [p for _, p in list_checkpoints(tmp_path)] == saved[:0:-1]                         # keep=3
    assert [load_checkpoint(p)[0]["nimg"] for p in saved[1:]] == [8, 12, 16]


def test_a_snapshot_just_saved_is_not_dropped_for_newer_ones_of_another_past(job, tmp_path):
    t, saved = job.make("plain", tmp_path, keep=2), []
    for _ in range(2): saved.append(job.iterate(t, 1).save())
    first = tmp_path / "kept.pt"
    first.write_bytes(saved[0].read_bytes())
    for _ in range(2): job.iterate(t, 2).save()
    assert job.iterate(t.resume(first), 1).save().exists()
