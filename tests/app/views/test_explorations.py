"""Explorations side by side."""

from samples_app import GIB, exploration, of_model, point
from tensoropt_app.library import Library
from tensoropt_app.state import View
from tensoropt_app.views.explorations import compared, named


def test_a_model_is_called_as_people_write_it():
    assert named("llama3-8b?sequence=2048&layers=4") == "llama3-8b, sequence 2048, layers 4"
    assert named("mine.onnx") == "mine.onnx"


def test_each_has_its_recommended_plan_within_what_it_was_made_for(tmp_path):
    exploration(settings={**exploration().settings, "memory_bytes": 25 * GIB}).save(tmp_path / "a")
    exploration([point(10 * GIB, 1.0), point(20 * GIB, 0.4)]).save(tmp_path / "b")
    found = compared(Library(tmp_path), View("opened-a", beside=("opened-b", "opened-a")))
    assert [title for title, _ in found.frontiers] == [row.title for row in found.rows]
    wanted = [("20.0 GiB of 25 GiB", "700 ms", "fits"), ("20.0 GiB of 76 GiB", "400 ms", "fits")]
    assert [(row.needs, row.time, row.mark) for row in found.rows] == wanted
    assert [row.link for row in found.rows] == ["/result?x=opened-a", "/result?x=opened-b"]
    assert (found.said, found.per_sample) == ([], False)


def test_what_is_not_the_same_work_is_said(tmp_path):
    of_model(exploration(), batch=8).save(tmp_path / "a")
    of_model(exploration(), batch=16).save(tmp_path / "b")
    of_model(exploration(), source="zoo:mlp", batch=16).save(tmp_path / "c")
    library = Library(tmp_path)
    batches = compared(library, View("opened-a", beside=("opened-b",)))
    assert batches.per_sample
    assert batches.said == ["Batches differ: the plot shows the time per sample."]
    assert (
        "The models differ: a step is not the same work."
        in compared(library, View("opened-a", beside=("opened-c",))).said
    )


def test_one_that_cannot_be_opened_is_said_and_the_others_stay(tmp_path):
    exploration().save(tmp_path / "a")
    found = compared(Library(tmp_path), View("opened-a", beside=("gone",)))
    assert len(found.rows) == 1
    assert "'gone'" in found.said[0]
