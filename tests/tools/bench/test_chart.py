"""The chart: a well-formed SVG without dependencies, a PNG with Pillow, and bars in proportion to their times."""

from __future__ import annotations

import struct
from xml.etree import ElementTree

import pytest

from hf_rocm.tools import drawing
from hf_rocm.tools.bench import chart
from hf_rocm.tools.bench.cases import Case
from hf_rocm.tools.bench.rates import Rates
from hf_rocm.tools.drawing import ChartError
from tests.tools.bench.conftest import result, segment

SVG = "{http://www.w3.org/2000/svg}"


def words_of(picture: drawing.Picture) -> list[drawing.Words]:
    return [part for part in picture.parts if isinstance(part, drawing.Words)]


def test_the_svg_is_well_formed_and_complete(tmp_path):
    (file,) = chart.save([segment()], tmp_path / "a.svg", title="A < B & C")
    root = ElementTree.parse(file).getroot()
    assert root.tag == f"{SVG}svg" and root.find(f"{SVG}title").text == "A < B & C"
    words = [element.text for element in root.iter(f"{SVG}text")]
    for expected in ("hf_rocm", "5.00 ms (3.20 ×)", "16.00 ms", "roofline 4.00", "stock + torch.compile"):
        assert expected in words, expected
    assert any("not an AMD GPU" in word for word in words) and any("4.25 TB/s" in word for word in words)
    width, height = (float(root.get(name)) for name in ("width", "height"))
    for entry in root.iter(f"{SVG}rect"):
        assert float(entry.get("x")) >= 0 and float(entry.get("x")) + float(entry.get("width")) <= width
        assert float(entry.get("y")) + float(entry.get("height")) <= height


def test_the_chart_of_several_segments_names_all_commits_and_rates():
    segments = [segment(), segment(commit="fedcba987654", rates=Rates(4.3e12, 0.8e12)), segment(commit=None)]
    text = " ".join(word.text for word in words_of(chart.draw("x", segments)))
    assert "commit 0123456789ab, fedcba987654, hf_rocm forced" in text
    assert "4.25–4.30 TB/s (copy) and 800 G–790 TFLOP/s" in text


def extent(part: drawing.Words) -> tuple[float, float]:
    """The left and the right end of a line of text."""
    width = chart.CHARACTER * part.size * len(part.text)
    left = part.x - {"start": 0, "middle": width / 2, "end": width}[part.anchor]
    return left, left + width


def test_no_word_is_cut_off_or_covers_another():
    cases = [result(Case("decode", 1, 8, 8), stock=stock) for stock in (16.0, 1600.0)]
    commits = [segment(f"{number}", *cases, commit=f"{number:012x}") for number in range(6)]
    words = words_of(chart.draw("the title of a chart, of the length that titles have", commits))
    assert {word.text for word in words} >= {"roofline 4.00", "16.00 ms"}
    lines: dict[float, list[tuple[float, float]]] = {}
    for part in words:
        left, right = extent(part)
        assert left >= chart.MARGIN - 1e-6 and right <= chart.WIDTH - chart.MARGIN + 1e-6, part.text
        lines.setdefault(part.y, []).append((left, right))
    for ends in lines.values():
        assert all(before[1] < after[0] for before, after in zip(sorted(ends), sorted(ends)[1:], strict=False)), ends


def test_the_picture_is_readable_on_a_phone():
    # A column of 360 pixels.
    scale = 360 / chart.WIDTH
    assert min(word.size for word in words_of(chart.draw("x", [segment()]))) * scale >= 8
    assert chart.LABEL * scale >= 9.5


def test_a_panel_names_its_own_unit():
    cases = [result(Case("decode", 1, 8, 8), stock=16.0), result(Case("prefill", 1, 8), stock=16.0)]
    texts = [word.text for word in words_of(chart.draw("x", [segment("both", *cases)]))]
    assert [text for text in texts if text.startswith("ms")] == ["ms per token, end to end through generate", "ms"]
    assert not any("token," in text for text in texts[:2]), "the subtitle does not apply to every panel"


def test_quartiles_are_drawn_over_the_bar():
    picture = chart.draw("x", [segment("one", result(Case("decode", 1, 8, 8), stock=16.0))])
    (spread,) = [part for part in picture.parts if isinstance(part, drawing.Line) and part.y == part.to_y]
    bar = next(part for part in picture.parts if isinstance(part, drawing.Box) and part.fill == chart.COLOURS["stock"])
    ends = [(x - chart.MARGIN) / bar.width for x in (spread.x, spread.to_x)]
    assert ends == pytest.approx([0.9, 1.2])
    (figure,) = [element for element in words_of(picture) if element.text == "16.00 ms"]
    assert figure.y < bar.y < spread.y, "the number is above the bar and its spread"
    assert "median and quartiles of 5 rounds" in words_of(picture)[1].text


def test_bars_are_proportional_to_their_times():
    picture = chart.draw("x", [segment()])
    bars = {part.fill: part.width for part in picture.parts if isinstance(part, drawing.Box)}
    stock, prepared = bars[chart.COLOURS["stock"]], bars[chart.COLOURS["hf_rocm"]]
    assert prepared / stock == pytest.approx(5 / 16)
    lines = [part for part in picture.parts if isinstance(part, drawing.Line) and part.dashed]
    assert len(lines) == 4, "one line for the roofline over every bar, not over the labels between them"
    assert [(line.x - chart.MARGIN) / stock for line in lines] == pytest.approx([4 / 16] * 4)


def test_panels_of_a_kind_share_a_scale_unless_a_bar_would_be_too_short():
    near = [chart.panel(result(Case("decode", 1, 8, 8), stock=milliseconds)) for milliseconds in (10.0, 20.0)]
    far = [chart.panel(result(Case("prefill", 1, 8), stock=milliseconds)) for milliseconds in (10.0, 99.0)]
    assert chart._scales([*near, *far]) == pytest.approx([24.0, 24.0, 12.0, 1.2 * 99.0])


def test_with_pillow_a_png_of_twice_the_size_is_written_too(tmp_path):
    if not drawing.can_png():
        pytest.skip("not run: needs Pillow")
    files = chart.save([segment()], tmp_path / "a")
    assert [file.suffix for file in files] == [".svg", ".png"]
    data = files[1].read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    picture = chart.draw("x", [segment()])
    assert struct.unpack(">II", data[16:24]) == (2 * picture.width, round(2 * picture.height))


def test_a_file_format_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ChartError, match=r"a\.pdf"):
        chart.check(tmp_path / "a.pdf")
    monkeypatch.setattr(drawing, "can_png", lambda: False)
    with pytest.raises(ChartError, match="Pillow is not installed"):
        chart.check(tmp_path / "a.png")
    chart.check(tmp_path / "a")
    assert [file.name for file in chart.save([segment()], tmp_path / "a")] == ["a.svg"]
