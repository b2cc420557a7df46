"""The rank pool: results, errors, deaths, hangs, and that nothing is left running."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tensoropt.cluster import available_cores
from tensoropt.errors import MeasurementError
from tensoropt.ranks import pool as pool_module
from tensoropt.ranks.pool import RankPool
from tensoropt.ranks.worker import tell
from tensoropt.ranks.worker_process import RankError

pytestmark = pytest.mark.distributed


def add_ranks(rank, world_size, value):
    tensor = torch.full((3,), value + rank)
    dist.all_reduce(tensor)
    return tensor


def doubled(rank, world_size, other_groups):
    for _ in range(other_groups):
        dist.new_group()
    mesh = init_device_mesh("cpu", (2, 2))
    shards = DTensor.from_local(torch.ones(1), mesh, [Replicate(), Shard(0)])
    return float((shards * 2).full_tensor().sum())


def describe(rank, world_size):
    scheduling = os.sched_getscheduler(0)
    return rank, world_size, os.getpid(), torch.get_num_threads(), sorted(os.sched_getaffinity(0)), scheduling


def echo(rank, world_size, *args):
    return args


def fail_on(rank, world_size, failing):
    if rank == failing:
        raise ValueError(f"bad luck on {rank}")
    dist.barrier()  # the others wait for a rank that never comes


def fail_alone(rank, world_size, failing):
    if rank == failing:
        raise MeasurementError("refused")
    return rank


def die_on(rank, world_size, dying):
    if rank == dying:
        print("last words\nExtension modules: " + "a.b, " * 4000, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(rank, world_size, hanging):
    if rank == hanging:
        time.sleep(600)


def unpicklable(rank, world_size):
    return lambda: rank


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture(scope="module")
def pool():
    with RankPool(2, timeout_s=600) as shared:
        yield shared


def test_runs_on_all_ranks_again_and_again(pool):
    for value in (1.0, 2.0):
        results = pool.run(add_ranks, value)
        assert [r.tolist() for r in results] == [[2 * value + 1] * 3] * 2


def test_ranks_have_one_thread_and_a_core_of_their_own(pool):
    described = pool.run(describe)
    assert [(rank, world, threads) for rank, world, _, threads, *_ in described] == [(0, 2, 1), (1, 2, 1)]
    assert tuple(pid for _, _, pid, *_ in described) == pool.process_ids
    assert os.getpid() not in pool.process_ids
    if len(available_cores()) >= 2:
        cores = [tuple(affinity) for *_, affinity, _ in described]
        assert cores[0] != cores[1]
        assert all(len(affinity) == 1 for affinity in cores)
    assert {scheduling for *_, scheduling in described} == {os.SCHED_BATCH}


def test_a_pool_of_which_nothing_is_asked_starts_nothing():
    with RankPool(2) as idle:
        assert idle.process_ids == ()
        idle.close()
        with pytest.raises(MeasurementError, match="closed"):
            idle.run(echo)


def test_ranks_that_do_not_start_are_no_failed_run():
    """What a run's failure leads to (another try, a note on a workload) would be done for each workload."""
    dying = ["sh", "-c", "echo no memory; exit 1"]
    for prefix, words in ((["false"], "during start"), (dying, "(no memory)")):
        with (
            RankPool(1, prefixes=[prefix]) as pool,
            pytest.raises(MeasurementError, match="do not start") as caught,
        ):
            pool.run(echo)
        assert not isinstance(caught.value, RankError)
        assert f"rank 0 died with exit code 1 {words}" in str(caught.value).split("\n\n")[0]
        assert pool.process_ids == ()


def test_a_rank_that_raises_keeps_the_processes(pool):
    pool.start()
    before = pool.process_ids
    with pytest.raises(RankError, match=r"rank 1 failed in fail_alone: .*refused") as caught:
        pool.run(fail_alone, 1)
    assert caught.value.rank == 1
    assert caught.value.kind == "raised"
    assert isinstance(caught.value.__cause__, MeasurementError)
    assert "in fail_alone" in str(caught.value)  # its traceback
    assert pool.process_ids == before
    assert pool.run(add_ranks, 0.0)[0].tolist() == [1.0] * 3


@pytest.mark.slow
def test_a_rank_that_raises_while_others_wait(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "_GRACE_S", 0.2)
    with pytest.raises(RankError, match="bad luck on 0") as caught:
        pool.run(fail_on, 0)
    assert caught.value.rank == 0
    assert pool.run(add_ranks, 0.0)[1].tolist() == [1.0] * 3


def test_a_rank_that_dies(pool):
    before = pool.process_ids
    with pytest.raises(RankError, match="rank 1 died by signal SIGKILL") as caught:
        pool.run(die_on, 1)
    assert caught.value.kind == "died"
    assert "last words" in str(caught.value)
    assert all(gone(pid) for pid in before)
    assert pool.run(add_ranks, 0.0)[1].tolist() == [1.0] * 3


def die_late(rank, world_size, dying):
    if rank != dying:
        raise RuntimeError("Connection reset by peer")
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_death_counts_before_what_others_say_of_it(pool):
    with pytest.raises(RankError, match="rank 1 died by signal SIGKILL"):
        pool.run(die_late, 1)


def test_a_rank_that_hangs_shows_where(pool):
    pool.run(echo)  # so that this module is imported there
    with pytest.raises(RankError, match=r"rank 1 did not finish hang_on within 2 s; rank 1 is in ") as caught:
        pool.run(hang_on, 1, timeout_s=2.0)
    assert caught.value.kind == "hung"
    assert "in hang_on" in str(caught.value)


def cross(rank, world_size):
    if rank:
        dist.recv(torch.ones(1), 0)
    else:
        dist.all_reduce(torch.ones(1))


def test_ranks_that_wait_for_one_another_are_said_with_their_places(pool):
    pool.run(echo)
    told = "rank 0 is in all_reduce, called from .*; rank 1 is in recv, called from"
    with pytest.raises(RankError, match=told) as caught:
        pool.run(cross, timeout_s=1.0)
    assert caught.value.kind == "hung"


@pytest.mark.slow
def test_a_run_of_another_thread_can_be_ended(pool):
    pool.run(echo)
    failed = []

    def hang() -> None:
        with pytest.raises(RankError, match="died") as caught:
            pool.run(hang_on, 1)
        failed.append(caught.value.kind)

    thread = threading.Thread(target=hang)
    thread.start()
    while not thread.is_alive() or pool._lock.acquire(blocking=False):
        pool._lock.release()  # until the run has begun
    pool.interrupt()
    thread.join(timeout=30)
    assert failed == ["died"]
    assert pool.run(echo)


def tell_twice(rank, world_size):
    tell("first")
    tell((rank, "second"))
    return rank


def test_what_ranks_tell_before_they_end_is_heard(pool):
    heard = []
    assert pool.run(tell_twice, on_message=lambda rank, content: heard.append((rank, content))) == [0, 1]
    for rank in (0, 1):
        assert [content for teller, content in heard if teller == rank] == ["first", (rank, "second")]


@pytest.mark.slow
def test_restarted_ranks_are_others(pool):
    pool.start()
    before = pool.process_ids
    pool.restart()
    assert pool.process_ids == ()
    assert all(gone(pid) for pid in before)
    assert pool.run(echo) == [(), ()]


def test_what_cannot_be_sent_is_refused(pool):
    with pytest.raises(MeasurementError, match="top level of a module"):
        pool.run(lambda rank, world_size: rank)
    with pytest.raises(MeasurementError, match="cannot be sent"):
        pool.run(echo, lambda: None)
    with pytest.raises(RankError, match=r"rank [01] failed in unpicklable"):
        pool.run(unpicklable)
    assert pool.run(echo, 1) == [(1,), (1,)]


def test_reset_gives_a_new_group_in_the_same_processes(pool):
    pool.run(echo)
    before = pool.process_ids
    pool.reset()
    assert pool.process_ids == before
    assert pool.run(add_ranks, 0.0)[0].tolist() == [1.0] * 3


def test_a_new_group_has_nothing_of_an_old_mesh(four_ranks):
    """DTensor remembers for a mesh what it computed on an equal one, whose groups are gone."""
    for other_groups in (3, 0):
        four_ranks.reset()
        assert four_ranks.run(doubled, other_groups) == [4.0] * 4


@pytest.mark.parametrize("arguments", [(0,), (2, 0.0)])
def test_impossible_pools_are_refused(arguments):
    with pytest.raises(MeasurementError, match="impossible"):
        RankPool(*arguments)


SCRIPT = """
    import signal, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may ignore it
    from tensoropt.ranks.pool import RankPool
    from tests_pool_helper import answer
    print("started", flush=True)            # would show up again if a worker imported this script
    pool = RankPool(1)
    print(pool.run(answer), pool.process_ids[0], flush=True)
    try:
        pool.run(lambda rank, world_size: 0)
    except Exception as error:
        print(type(error).__name__, flush=True)
    {ending}
"""


def run_script(tmp_path, ending: str) -> subprocess.Popen[str]:
    (tmp_path / "tests_pool_helper.py").write_text("def answer(rank, world_size):\n    return 42\n")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(ending=ending))
    return subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, cwd="/")


def wait_until_gone(pid: int) -> bool:
    for _ in range(600):
        if gone(pid):
            return True
        time.sleep(0.1)
    return False


def test_works_from_a_script_without_a_guard_and_leaves_nothing(tmp_path):
    script = run_script(tmp_path, "pass  # neither closed nor collected by hand")
    output, _ = script.communicate()
    lines = output.split("\n")
    assert script.returncode == 0
    assert [line.split(" ")[0] for line in lines[:3]] == ["started", "[42]", "MeasurementError"]
    assert wait_until_gone(int(lines[1].split(" ")[1]))


@pytest.mark.sweep
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_an_interrupted_or_killed_parent(tmp_path, sent):
    script = run_script(tmp_path, "time.sleep(600)")
    assert script.stdout is not None
    lines = [script.stdout.readline() for _ in range(3)]
    script.send_signal(sent)
    script.wait()
    assert wait_until_gone(int(lines[1].split(" ")[1]))
