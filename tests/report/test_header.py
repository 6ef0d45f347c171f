import io

from megaspan.report import Line, print_header
from megaspan.report.header import render

LINES = [
    Line("model", "Qwen/Qwen3-8B", "36 layers"),
    Line("attention", "cuDNN", "flash-attn-4 is not installed: " + "a step takes longer " * 8, loud=True),
    Line("differs from TRL", "packing: true"),
    Line("differs from TRL", "logging_steps: 1", "10 there"),
]


def test_off_a_terminal_every_line_is_one_line_without_colour():
    out = io.StringIO()
    print_header(LINES, title="megaspan 1", file=out)
    lines = out.getvalue().splitlines()
    assert lines[0] == "megaspan 1"
    assert lines[1] == "  model             Qwen/Qwen3-8B     36 layers"
    assert lines[2].startswith("! attention")
    assert lines[2].rstrip().endswith("a step takes longer")
    assert [line.startswith("  differs from TRL") for line in lines[3:]] == [True, True]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_nothing_is_wider_than_it_and_a_repeated_label_is_left_out():
    for width in (60, 80, 120, 200):
        lines = "\n".join(text.plain for text in render(LINES, width)).splitlines()
        assert max(map(len, lines)) <= width
        assert sum("differs" in line for line in lines) == 1
    loud = render(LINES, 120)[1]
    assert any("red" in str(span.style) for span in loud.spans)
    assert not any("red" in str(span.style) for span in render(LINES, 120)[0].spans)


def test_by_default_it_goes_to_stderr(capsys):
    print_header(LINES)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Qwen/Qwen3-8B" in captured.err


def test_values_that_look_like_markup_are_printed_as_they_are():
    out = io.StringIO()
    print_header([Line("rope", "[0.5, 1]", "[bold]not markup[/bold]")], file=out)
    assert "[0.5, 1]" in out.getvalue()
    assert "[bold]not markup[/bold]" in out.getvalue()


def test_of_a_very_long_word_the_middle_is_left_out():
    """A path of a cluster pushed every reason off the screen, or was broken in the middle of a folder's name."""
    path = "/clusters/one/users/somebody/" + "experiment-of-a-long-name/" * 5 + "checkpoint-120"
    lines = [Line("model", path, "36 layers"), Line("resumed", "checkpoint-120", path), Line("text", "two\nlines", "a " * 60)]
    for width in (60, 80, 120, None):
        shown = "\n".join(text.plain for text in render(lines, width))
        assert shown.count("/clusters/one/") == 2
        assert shown.count("checkpoint-120") == 3
        assert "two lines" in shown
        assert width is None or max(map(len, shown.splitlines())) <= width
    model, resumed, _ = (text.plain for text in render(lines, None))
    assert len(model) < 80
    assert resumed.index("/clusters") == len("  resumed  ") + 34 + 2  # its column, though a value is longer than the column


def test_a_build_server_that_asks_for_colour_gets_whole_lines(monkeypatch):
    """rich takes FORCE_COLOR for a terminal of 80 columns, so the lines of a log were broken and grep found none."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    print_header(LINES, file=out)
    assert len(out.getvalue().splitlines()) == len(LINES)
