"""The widgets redraw when a knob moves, ask for a kernel where there is none, and have labelled axes."""

import pytest

from rlkit.study import widgets


@pytest.mark.parametrize(
    "make, knob, value",
    [(widgets.baseline_widget, 0, 0.8), (widgets.difficulty_widget, 0, 2), (widgets.clip_widget, 0, -1.0)],
)
def test_a_knob_changes_the_picture(make, knob, value):
    box = make()
    picture = box.children[-1]
    before = bytes(picture.value)
    assert before.startswith(b"\x89PNG") and "need a running kernel" in repr(box)
    box.children[knob].value = value
    assert bytes(picture.value) != before


@pytest.mark.parametrize("draw", [widgets.baseline_figure, widgets.difficulty_figure, widgets.clip_figure])
def test_static_pictures_have_labels(draw):
    for ax in draw().axes:
        assert ax.get_xlabel() and ax.get_ylabel()
