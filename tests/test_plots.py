"""Plots: what is drawn is what was passed, every axis has its name, and bad input is named."""
import io

import matplotlib
import numpy as np
import pytest
import torch

from gan_course import plots
from gan_course.core import UserError

matplotlib.use("agg")
ALL = {
    "grid": lambda: plots.plot_grid(torch.zeros(5, 3, 8, 8), title="Grey"),
    "curves": lambda: plots.plot_curves({"a": [1, 2], "b": [2, 3]}, "step", "loss", "Two losses"),
    "points": lambda: plots.plot_points({"a": torch.randn(9, 2)}, field=lambda p: p[:, :1], title="Points"),
    "spectrum": lambda: plots.plot_spectrum(torch.randn(2, 3, 16, 16), title="Noise"),
    "bars": lambda: plots.plot_bars({"a": 1., "b": 2.}, "MiB", "Two bars"),
    "stack": lambda: plots.plot_stack([0, 1], {"a": [1, 2], "b": [2, 1]}, title="Two bands"),
}


@pytest.mark.parametrize("name", list(ALL))
def test_returns_a_closed_figure_that_can_be_saved(name):
    import matplotlib.pyplot as plt

    plt.close("all")
    fig = ALL[name]()
    assert isinstance(fig, matplotlib.figure.Figure) and plt.get_fignums() == []
    assert fig.axes[0].get_title(loc="left")
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png")
    assert 1000 < len(buffer.getvalue()) < 60_000


@pytest.mark.parametrize("name", ["curves", "spectrum", "stack"])
def test_axes_have_names(name):
    ax = ALL[name]().axes[0]
    assert ax.get_xlabel() and ax.get_ylabel()


def test_importing_does_not_import_pyplot():
    import subprocess
    import sys

    code = "import sys, gan_course.plots; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_curves_draw_the_values():
    fig = plots.plot_curves({"pair": ([10, 20, 30], torch.tensor([1., 2., 3.], requires_grad=True)), "plain": np.array([4., 5.])})
    lines = fig.axes[0].lines
    assert lines[0].get_xdata().tolist() == [10, 20, 30] and lines[0].get_ydata().tolist() == [1, 2, 3]
    assert lines[1].get_xdata().tolist() == [0, 1] and lines[1].get_ydata().tolist() == [4, 5]
    assert [t.get_text() for t in fig.axes[0].get_legend().get_texts()] == ["pair", "plain"]


def test_a_single_curve_needs_no_legend():
    assert plots.plot_curves({"loss": [1, 2]}).axes[0].get_legend() is None


@pytest.mark.parametrize("values, logy, label", [
    ([1, float("nan"), float("inf")], False, "loss (2 of 3 not shown)"),
    ([1, 0, -1], True, "loss (2 of 3 not shown)"),
    ([1, 0, -1], False, "loss"),
])
def test_left_out_values_are_counted(values, logy, label):
    ax = plots.plot_curves({"loss": values}, logy=logy).axes[0]
    assert ax.lines[0].get_label() == label and ax.get_yscale() == ("log" if logy else "linear")


def test_many_series_stay_distinct():
    lines = plots.plot_curves({str(i): [i, i] for i in range(7)}).axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 7
    plots.plot_curves({str(i): [i, i] for i in range(20)})
    plots.plot_stack([0, 1], {str(i): [1, 1] for i in range(9)})


def simulate(rgb, matrix):
    return np.clip(np.asarray(matrix) @ rgb, 0, 1)


def test_first_four_colours_survive_colour_blindness():
    "Protanopia and deuteranopia as linear maps (Machado, Oliveira and Fernandes 2009, severity 1)."
    protan = [[.152286, 1.052583, -.204868], [.114503, .786281, .099216], [-.003882, -.048116, 1.051998]]
    deutan = [[.367322, .860646, -.227968], [.280085, .672501, .047413], [-.011820, .042940, .968881]]
    colours = [np.array([int(c[i:i + 2], 16) / 255 for i in (1, 3, 5)]) for c in plots.PALETTE[:4]]
    for matrix in (np.eye(3), protan, deutan):
        seen = [simulate(c, matrix) for c in colours]
        assert min(np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]) > .1


def test_grid_shows_pixels():
    batch = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    shown = np.asarray(plots.plot_grid(batch, cols=2).axes[0].images[0].get_array())
    assert shown.shape == (16, 16, 3) and np.array_equal(shown[8:, :8], batch[2].permute(1, 2, 0).numpy())
    wide = plots.plot_grid(torch.zeros(1, 3, 1024, 1024)).get_size_inches()
    assert wide[0] <= 12.9


def test_field_orientation():
    values = plots.field_values(lambda p: p[:, 1:], limit=1., n=5)
    assert values.shape == (5, 5) and np.allclose(values[:, 0], [-1, -.5, 0, .5, 1]) and np.ptp(values[2]) == 0


def test_spectrum_values():
    t = torch.arange(32.)
    for k in (2, 5, 16):
        freq, db = plots.radial_spectrum(torch.cos(2 * torch.pi * k * t / 32).repeat(1, 1, 32, 1))
        assert freq[db.argmax()] == k / 32
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    freq, one = plots.radial_spectrum(x)
    assert np.allclose(plots.radial_spectrum(10 * x)[1] - one, 20, atol=1e-6)
    assert np.allclose(plots.radial_spectrum(x.transpose(2, 3))[1], one)
    assert np.isfinite(plots.radial_spectrum(torch.zeros(1, 1, 8, 8))[1]).all()
    assert len(plots.radial_spectrum(x[..., :31, :31])[0]) == 16


def test_bars_carry_their_values_from_top_to_bottom():
    fig = plots.plot_bars({"small": .0123, "large": 12345., "negative": -2.}, "s")
    assert [t.get_text() for t in fig.axes[0].texts] == ["0.0123", "12,345", "-2"]
    low, high = fig.axes[0].get_ylim()
    assert low > high and fig.axes[0].get_xlabel() == "s"


def test_stack_piles_up():
    ax = plots.plot_stack([0, 1, 2], {"a": [1, 1, 1], "b": [0, 5, 0]}).axes[0]
    assert ax.dataLim.ymax == 6 and [t.get_text() for t in ax.get_legend().get_texts()] == ["a", "b"]


@pytest.mark.parametrize("call, words", [
    (lambda: plots.plot_curves({}), ["curves", "nothing to plot"]),
    (lambda: plots.plot_curves({"loss": []}), ["loss", "at least one"]),
    (lambda: plots.plot_curves({"loss": ([1, 2, 3], [1, 2])}), ["loss", "3 and 2"]),
    (lambda: plots.plot_grid(torch.zeros(3, 8, 8)), ["batch", "[3, 8, 8]", "x[None]"]),
    (lambda: plots.plot_grid(torch.zeros(0, 3, 8, 8)), ["batch", "N >= 1"]),
    (lambda: plots.plot_points({"p": torch.zeros(4, 3)}), ["p", "[4, 3]", "[N, 2]"]),
    (lambda: plots.radial_spectrum(torch.zeros(1, 3, 8, 6)), ["images", "[1, 3, 8, 6]"]),
    (lambda: plots.plot_bars({}), ["values", "nothing to plot"]),
    (lambda: plots.plot_bars({"a": float("inf")}), ["a", "inf"]),
    (lambda: plots.plot_stack([0, 1], {}), ["bands"]),
    (lambda: plots.plot_stack([0, 1], {"a": [1]}), ["a", "found 1", "expected 2"]),
])
def test_errors_name_the_fault(call, words):
    with pytest.raises(UserError) as e:
        call()
    assert all(w in str(e.value) for w in words), str(e.value)
