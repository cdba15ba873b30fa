import pandas as pd
import pytest

from fd_interp.report.shares import share_figure


def summary(**fields: list) -> pd.DataFrame:
    shares = [0.25, 0.5, 1.0, 0.0]
    measured = {"n": [4] * 4, "solved": [1, 2, 4, 0], "share": shares}
    return pd.DataFrame({**fields, **measured, "low": [0.2, 0.4, 0.6, 0.0], "high": [0.3, 0.7, 1.0, 0.4]})


def test_points_lie_over_the_first_field_with_a_line_for_each_value_of_the_second():
    figure = share_figure(summary(lr=[0.1, 0.1, 1, 1], width=[8, 16, 8, 16]), ["lr", "width"], "title")
    assert [line.name for line in figure.data] == ["width 8", "width 16"]
    assert [list(line.x) for line in figure.data] == [[0.1, 1], [0.1, 1]]
    assert [list(line.y) for line in figure.data] == [[0.25, 1], [0.5, 0]]
    assert len({line.line.color for line in figure.data}) == 2
    ends = figure.data[0].error_y
    assert list(ends.array) == pytest.approx([0.05, 0])
    assert list(ends.arrayminus) == pytest.approx([0.05, 0.4])


@pytest.mark.parametrize(
    ("values", "scale"),
    [([1, 2, 8, 4], "log"), ([5, 6, 7, 8], "linear"), ([0, 1, 10, 100], "linear"), (["a", "b", "c", "d"], "category")],
)
def test_an_axis_is_logarithmic_where_its_values_are_far_apart(values: list, scale: str):
    assert share_figure(summary(field=values), ["field"], "title").layout.xaxis.type == scale


def test_without_a_varied_field_there_is_one_place():
    (points,) = share_figure(summary(), [], "title").data
    assert list(points.y) == [0.25, 0.5, 1, 0]
    assert set(points.x) == {""}
