"Videos: formats, times, and ffmpeg with a stand-in (a real one is not on every machine)."
import shutil
import stat

import numpy as np
import pytest
from PIL import Image

from gan_course import cli
from gan_course.core import UserError
from gan_course.generate import frame_times, save_video

FRAMES = [np.full((6, 10, 3), 20 * i, np.uint8) for i in range(5)]


def stand_in(tmp_path, monkeypatch, body):
    tool = tmp_path / "bin" / "ffmpeg"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n" + body)
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")


def test_ffmpeg_gets_every_frame_and_its_size(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/args\nfor last; do :; done\ncat > "$last"\n')
    out = save_video(tmp_path / "v" / "walk.mp4", iter(FRAMES), fps=30)
    assert out.read_bytes() == b"".join(f.tobytes() for f in FRAMES)
    args = (tmp_path / "args").read_text()
    assert "-s 10x6 -r 30" in args and "rgb24" in args and "yuv420p" in args
    assert [p.name for p in out.parent.iterdir()] == ["walk.mp4"]


def test_grey_frames(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/args\nfor last; do :; done\ncat > "$last"\n')
    save_video(tmp_path / "walk.mp4", [f[..., :1] for f in FRAMES])
    assert "-pix_fmt gray" in (tmp_path / "args").read_text()
    with Image.open(save_video(tmp_path / "walk.gif", [f[..., :1] for f in FRAMES])) as gif: assert gif.n_frames == 5


def test_a_failing_ffmpeg_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "echo no such codec >&2\nexit 1\n")
    (tmp_path / "v").mkdir()
    with pytest.raises(UserError, match="no such codec"): save_video(tmp_path / "v" / "walk.mp4", FRAMES * 5000)
    assert list((tmp_path / "v").iterdir()) == []


def test_without_ffmpeg(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="needs the program ffmpeg"): save_video(tmp_path / "walk.mp4", FRAMES)


@pytest.mark.parametrize("fps, unit", [(60, 1), (24, 1), (7, 10), (50, 10)])
def test_times_add_up(fps, unit):
    times = frame_times(500, fps, unit)
    assert abs(sum(times) - 500_000 / fps) <= unit / 2 and all(t % unit == 0 for t in times)


def test_length_of_a_written_animation(tmp_path):
    for ext in ("webp", "gif"):
        with Image.open(save_video(tmp_path / f"walk.{ext}", FRAMES, fps=20)) as video:
            total = 0
            for i in range(video.n_frames):
                video.seek(i)
                video.load()
                total += video.info["duration"]
        assert total == 250


def refused(*words, **args):
    with pytest.raises(UserError) as e: cli.gan_generate("faces64", seeds="0-1", device="cpu", **args)
    assert all(w in str(e.value) for w in words), str(e.value)


def test_bad_options(tmp_path):
    refused("StyleGAN3", translate="0.1,0")
    refused("translate", "'1'", translate="1")
    refused("grid", "4x2", video=str(tmp_path / "a.gif"), grid="2")
    refused("fill the grid", video=str(tmp_path / "a.gif"), grid="2x2")
    refused("at most 50", video=str(tmp_path / "a.gif"), w_frames=1, fps=60)
    refused(".webp", video=str(tmp_path / "a.avi"), w_frames=1)
