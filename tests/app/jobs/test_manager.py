"""Jobs: run, fail, die, are cancelled with all they started, and are remembered."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import workers_app
from tensoropt_app.jobs.manager import JobManager
from tensoropt_app.jobs.record import Job, read_job
from tensoropt_app.jobs.request import Request

from tensoropt.cluster import load_cluster
from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration import load_exploration
from tensoropt.question.question import Question

WAIT_S = 120.0


def asking(model: str) -> Request:
    return Request(Question(model=model, cluster="dgx-h100"), "mlp", "dgx-h100")


REQUEST = asking("zoo:mlp")


@pytest.fixture
def managed(tmp_path):
    made = []

    def make(target: Any) -> JobManager:
        made.append(JobManager(tmp_path / "home", target))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until(manager: JobManager, id: str, wanted: Callable[[Job], bool]) -> Job:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        job = next(j for j in manager.jobs() if j.id == id)
        if wanted(job):
            return job
        time.sleep(0.05)
    raise AssertionError(f"still {job}")


def ended(job: Job) -> bool:
    return not job.active


def test_a_job_leaves_its_result_and_its_history(managed):
    manager = managed(workers_app.quick)
    job = until(manager, manager.submit(REQUEST).id, ended)
    assert (job.state, job.error) == ("done", "")
    assert [(s.name, s.done, s.total) for s in job.stages] == [("capture", 1, 1)]
    (key, folder), *_ = manager.results()
    assert key == f"job-{job.id}"
    assert len(load_exploration(folder).points) == 8
    again = managed(workers_app.quick)  # a restart
    assert again.jobs() == [job]
    again.forget(job.id)
    assert not folder.exists()


def test_a_forgotten_job_can_be_brought_back(managed, monkeypatch):
    manager = managed(workers_app.quick)
    first, second = (until(manager, manager.submit(REQUEST).id, ended) for _ in range(2))
    (_, folder), *_ = manager.results()
    for job in (first, second):
        manager.forget(job.id)
    assert (manager.jobs(), manager.results()) == ([], [])
    assert manager.forgotten() == [second, first]
    for id in (second.id, "../jobs", second.id):
        manager.restore(id)
    assert manager.jobs() == [second]
    assert len(load_exploration(folder).points) == 8
    monkeypatch.setattr("tensoropt_app.jobs.manager.KEPT_S", 0.0)
    assert manager.forgotten() == []
    manager.restore(first.id)
    assert manager.jobs() == [second]
    assert not any(manager.forgotten_folder.iterdir())


def test_a_sign_says_whether_pages_have_something_to_ask(managed, monkeypatch):
    manager = managed(workers_app.quick)
    nothing = manager.sign()
    assert nothing == manager.sign()
    job = manager.submit(REQUEST)
    assert manager.sign() != nothing
    until(manager, job.id, ended)
    done = manager.sign()
    later = time.time() + 2
    monkeypatch.setattr(time, "time", lambda: later)
    assert manager.sign() == done != nothing
    manager.forget(job.id)
    assert manager.sign() not in (done, nothing)


@pytest.mark.parametrize(
    ("work", "said"), [(workers_app.failing, "zoo:mlp is not a model"), (workers_app.dying, "exit code 9")]
)
def test_a_job_that_fails_or_dies_says_why(managed, work, said):
    manager = managed(work)
    job = until(manager, manager.submit(REQUEST).id, ended)
    assert (job.state, manager.results()) == ("failed", [])
    assert said in job.error


def test_cancel_ends_everything_the_job_started(managed):
    manager = managed(workers_app.endless)
    id = manager.submit(REQUEST).id
    until(manager, id, lambda j: bool(j.stages))
    assert manager.first(id) == "DP 2"
    child = psutil.Process(int((manager.folder / id / workers_app.PIDS).read_text()))
    manager.cancel(id)
    assert until(manager, id, ended).state == "cancelled"
    assert manager.first(id) == ""
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_job_that_measures_runs_alone(managed):
    manager = managed(workers_app.endless)
    first = manager.submit(REQUEST)
    local = manager.submit(replace(asking("zoo:mlp?depth=2"), measures=True))
    later = manager.submit(asking("zoo:mlp?depth=3"))
    assert manager.submit(asking("zoo:mlp?depth=4")).state == "queued"
    assert (local.state, later.state) == ("queued", "queued")  # those behind it don't overtake
    manager.cancel(first.id)
    assert until(manager, local.id, lambda j: j.state != "queued").state == "running"
    manager.cancel(later.id)
    assert until(manager, later.id, ended).state == "cancelled"


def test_a_button_pressed_twice_starts_one_job(managed):
    manager = managed(workers_app.endless)
    first = manager.submit(REQUEST)
    assert manager.submit(REQUEST).id == first.id
    manager.cancel(first.id)
    until(manager, first.id, ended)
    assert manager.submit(REQUEST).id != first.id


def test_a_job_whose_dashboard_died_is_interrupted(managed):
    manager = managed(workers_app.quick)
    done = until(manager, manager.submit(REQUEST).id, ended)
    dead = replace(done, id="a" * 12, state="running", server=(done.server[0], 1.0))
    (manager.folder / dead.id).mkdir()
    dead.save(manager.folder / dead.id)
    seen = next(j for j in managed(workers_app.quick).jobs() if j.id == dead.id)
    assert (seen.state, seen.error) == ("interrupted", "the dashboard ended meanwhile")
    assert read_job(manager.folder / dead.id) == seen


def test_a_job_on_a_file_whose_name_is_not_utf8_is_read_again(tmp_path):
    job = Job(tmp_path.name, "caf\udce9.onnx", ("explore", "/data/caf\udce9.onnx"))
    job.save(tmp_path)
    assert read_job(tmp_path) == job


def test_the_server_takes_its_jobs_along(managed):
    manager = managed(workers_app.endless)
    id = manager.submit(REQUEST).id
    until(manager, id, lambda j: bool(j.stages))
    manager.close()
    assert until(manager, id, ended).state == "interrupted"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": "b", "state": "odd"}', '{"id": 3}'])
def test_a_damaged_record_is_left_out(managed, tmp_path, text):
    folder = tmp_path / "home" / "jobs" / "b"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(text)
    assert managed(workers_app.quick).jobs() == []


def test_the_folder_is_private(managed):
    manager = managed(workers_app.quick)
    assert manager.root.stat().st_mode & 0o077 == 0
    assert manager.uploads.folder.stat().st_mode & 0o077 == 0


def test_a_job_runs_again_in_a_folder_of_its_own(managed):
    manager = managed(workers_app.quick)
    described = load_cluster("dgx-h100[4]").to_dict() | {"name": "mine"}
    edited = replace(REQUEST, question=Question(model="zoo:mlp", cluster=described))
    first = until(manager, manager.submit(edited).id, ended)
    assert manager.took(first) is None
    second = until(manager, manager.again(first.id).id, ended)
    assert (second.title, second.state, second.question) == (first.title, "done", first.question)
    assert not any(first.id in word for word in second.arguments)
    assert Path(second.arguments[second.arguments.index("--cluster") + 1]).is_file()
    assert {key for key, _ in manager.results()} == {f"job-{first.id}", f"job-{second.id}"}
    assert manager.took(second) == first.ended - first.started
    assert manager.again("../jobs") is None


def test_jobs_of_an_earlier_version_are_listed_alone(managed):
    manager = managed(workers_app.quick)
    old = until(manager, manager.submit(REQUEST).id, ended)
    file = manager.folder / old.id / "job.json"
    data = json.loads(file.read_text())
    assert data.pop("question")["model"] == "zoo:mlp"
    file.write_text(json.dumps(data))
    later = managed(workers_app.quick)
    (job,) = later.jobs()
    assert (job.state, job.question) == ("done", {})
    with pytest.raises(TensorOptError, match="not written by this version"):
        later.again(job.id)
    assert later.estimate(REQUEST) is None
