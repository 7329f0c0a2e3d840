"""Statistics of runs that were killed, went on, and were rolled back."""
import json

import pytest

from gan_course.core import UserError
from gan_course.report import read_stats, write_report


def tick(kimg, loss): return json.dumps({k: {"num": 1, "mean": v, "std": 0.0} for k, v in {"Progress/kimg": kimg, "Loss/G/loss": loss, "Loss/D/loss": 1.0, "Timing/sec_per_kimg": 8.0, "Timing/total_sec": 8 * kimg}.items()} | {"timestamp": 0.0})


def run(folder, *lines, end="\n"):
    (folder / "stats.jsonl").write_text("\n".join(lines) + end)
    return folder


@pytest.mark.parametrize("again, want", [
    ([(2, 7.0), (3, 8.0)], [(1, 1.0), (2, 7.0), (3, 8.0)]),                                   # the same ticks again
    ([(2, 7.0)], [(1, 1.0), (2, 7.0)]),                                                      # 3 and 4 are of a past that was given up
    ([(1.5, 7.0), (2.5, 8.0)], [(1, 1.0), (1.5, 7.0), (2.5, 8.0)]),                          # other ticks
    ([(0.5, 7.0)], [(0.5, 7.0)])])
def test_what_was_done_again_replaces_what_was_there(tmp_path, again, want):
    series, cut = read_stats(run(tmp_path, *(tick(k, float(k)) for k in (1, 2, 3, 4)), *(tick(*a) for a in again)))
    assert series["Loss/G/loss"] == want and cut == 0


def test_every_cut_of_a_line_is_counted_and_left_out_wherever_it_is(tmp_path):
    whole = tick(2, -1.5e-20)
    for n in range(1, len(whole)):
        series, cut = read_stats(run(tmp_path, tick(1, 1.0), whole[:n], tick(3, 3.0), whole[:n], end=""))
        assert (series["Loss/G/loss"], cut) == ([(1, 1.0), (3, 3.0)], 2), whole[:n]
    assert "are left out: 2." in write_report(tmp_path).read_text()


@pytest.mark.parametrize("rubbish", ["rubbish", "", "{broken}", '{"a": 1} {"b"', '{"a": oops}', '["a"', "\0\0\0", "3", "{}"])
def test_other_rubbish_is_named(tmp_path, rubbish):
    for lines in ((tick(1, 1.0), rubbish, tick(2, 2.0)), (tick(1, 1.0), tick(1.5, 1.0), rubbish)):
        with pytest.raises(UserError, match=f"stats.jsonl: .*line {lines.index(rubbish) + 1}"): read_stats(run(tmp_path, *lines))
