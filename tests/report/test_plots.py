import json
import math
import sys

import pytest

from megaspan.human import UserError
from megaspan.report import plot_positions, plot_run, plots

matplotlib = pytest.importorskip("matplotlib")


def write_run(folder, steps, **more):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            entry = {"step": step, "loss": 4.0 / step, "grad_norm": 30.0 / step**3, "num_tokens": step * 100.0}
            entry |= {"tokens_per_second": 2759.0, "peak_device_bytes": 38.0 * 2**30, "peak_host_bytes": 200.0 * 2**30} | more
            file.write(json.dumps(entry) + "\n")
        file.write(json.dumps({"step": steps, "eval_loss": 3.0}) + "\n")


def drawn(monkeypatch):
    figures = []
    save = plots._save
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure) or save(figure, path))
    return figures


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def boxes_of(axes):
    return [text.get_window_extent() for text in axes.texts if hasattr(text, "xyann")]


@pytest.mark.parametrize("steps", [1, 12, 300])
def test_a_run_has_four_panels_with_direct_labels(tmp_path, monkeypatch, steps):
    figures = drawn(monkeypatch)
    write_run(tmp_path / "book", steps)
    path = plot_run(tmp_path / "book")
    assert path == tmp_path / "book" / "plots.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = figures
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Loss", "Gradient norm", "Speed", "Peak memory"]
    assert {"eval 3", "2,759", "GPU 38", "host 200"} <= set(texts(figure))
    assert not any(axes.get_legend() for axes in figure.axes)
    assert figure.axes[2].get_ylim()[0] == 0


def test_labels_lie_inside_the_picture_and_apart(tmp_path, monkeypatch):
    figures = drawn(monkeypatch)
    write_run(tmp_path / "book", 12, peak_host_bytes=38.1 * 2**30)
    plot_run(tmp_path / "book")
    curves = {"as published": [(k * 1024, 2.9) for k in range(16)], "YaRN × 4": [(k * 1024, 2.9001) for k in range(16)]}
    plot_positions(curves, tmp_path / "positions.png")
    for figure in figures:
        width, height = figure.canvas.get_width_height()
        for axes in figure.axes:
            boxes = boxes_of(axes)
            assert all(box.x1 <= width and box.y1 <= height for box in boxes)
            assert not any(one.overlaps(other) for one in boxes for other in boxes if one is not other)


@pytest.mark.parametrize(
    ("host", "device"), [(974_315_520.0, 0.0), (1.9 * 2**40, 139.8 * 2**30), (4e9, 139.8 * 2**30), (1234567 * 2**30, 2**30)]
)
def test_there_is_room_for_the_labels_of_every_panel(tmp_path, monkeypatch, host, device):
    """Labels of the left panels end before the numbers of the right ones, labels of the right ones in the picture."""
    figures = drawn(monkeypatch)
    write_run(tmp_path, 24, peak_host_bytes=host, peak_device_bytes=device, tokens_per_second=1_234_567.0, grad_norm=0.000123)
    plot_run(tmp_path)
    (figure,) = figures
    figure.draw_without_rendering()
    width, _ = figure.canvas.get_width_height()
    loss, norm, speed, memory = figure.axes
    numbers = [text.get_window_extent() for axes in (norm, memory) for text in axes.get_yticklabels()]
    first = min(box.x0 for box in numbers)
    assert all(box.x1 < first for axes in (loss, speed) for box in boxes_of(axes))
    assert all(box.x1 < width for axes in (norm, memory) for box in boxes_of(axes))
    assert min(text.get_window_extent().x0 for axes in (loss, speed) for text in axes.get_yticklabels()) > 0
    assert min(axes.get_position().width for axes in figure.axes) > 0.25


def test_a_long_name_of_a_model_has_room(tmp_path, monkeypatch):
    figures = drawn(monkeypatch)
    plot_positions({"HuggingFaceTB/SmolLM2-135M, YaRN × 4": [(0, 2.0), (1024, 2.1)]}, tmp_path / "positions.png")
    (axes,) = figures[0].axes
    assert all(box.x1 < figures[0].canvas.get_width_height()[0] for box in boxes_of(axes))


def test_a_run_is_called_by_its_name_or_by_where_it_is(tmp_path, monkeypatch):
    run = tmp_path / "moby" / "run"
    write_run(run, 2)
    figures = drawn(monkeypatch)
    for where in (tmp_path, run):
        monkeypatch.chdir(where)
        plot_run(run)
        assert figures[-1].texts[0].get_text() == "Run moby/run"
    monkeypatch.chdir(tmp_path.parent)
    assert plots.run_title(run) == f"{tmp_path.name}/moby/run"
    (run / "config.yaml").write_text("run_name: null\n")
    assert plots.run_title(run) == f"{tmp_path.name}/moby/run"
    (run / "config.yaml").write_text("run_name: whales at 1M\n")
    assert plots.run_title(run) == "whales at 1M"
    (run / "config.yaml").write_text(f"run_name: {'a' * 80}z\n")
    assert len(plots.run_title(run)) == 60
    assert plots.run_title(run).endswith("az")
    (run / "config.yaml").write_text("[]")
    assert plots.run_title(run).endswith("moby/run")


def test_a_run_on_a_cpu_and_with_a_loss_that_is_not_a_number(tmp_path, monkeypatch):
    figures = drawn(monkeypatch)
    write_run(tmp_path, 3, peak_device_bytes=0.0, loss=None)
    plot_run(tmp_path)
    assert "GPU" not in " ".join(texts(figures[0]))


def test_loss_by_position_is_drawn_as_perplexity_on_a_logarithmic_scale(tmp_path, monkeypatch):
    figures = drawn(monkeypatch)
    curves = {
        "as published": [(0, math.log(12)), (1024, math.log(335))],
        "YaRN × 4": [(0, math.log(12)), (1024, math.log(11.9))],
    }
    path = plot_positions(curves, tmp_path / "deep" / "positions.png", native_window=1024, unigram=6.45)
    assert path.read_bytes().startswith(b"\x89PNG")
    axes = figures[0].axes[0]
    assert axes.get_yscale() == "log"
    assert axes.lines[0].get_ydata() == pytest.approx([12, 335])
    assert list(axes.lines[0].get_xdata()) == [512, 1536]
    assert {"as published\n335", "YaRN × 4\n11.9", " trained window, 1,024 tokens", "word counts alone"} <= set(
        texts(figures[0])
    )
    assert axes.lines[0].get_color() != axes.lines[1].get_color()


@pytest.mark.parametrize(("low", "high"), [(11.0, 16.5), (2.0, 3.0), (10, 700), (3, 1e6), (1.01, 1.02)])
def test_there_are_ticks_at_round_numbers_whatever_the_range(tmp_path, monkeypatch, low, high):
    figures = drawn(monkeypatch)
    plot_positions({"x": [(0, math.log(low)), (64, math.log(high))]}, tmp_path / "x.png")
    axes = figures[0].axes[0]
    ticks = [tick for tick in axes.get_yticks() if axes.get_ylim()[0] <= tick <= axes.get_ylim()[1]]
    assert 3 <= len(ticks) <= 12
    assert len({text.get_text() for text in axes.get_yticklabels()}) == len(axes.get_yticks())


def test_nothing_to_plot_and_no_matplotlib_are_sentences(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl"):
        plot_run(tmp_path)
    with pytest.raises(UserError, match="no curve"):
        plot_positions({"x": []}, tmp_path / "x.png")
    write_run(tmp_path, 2)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'megaspan\[plots\]'"):
        plot_run(tmp_path)
