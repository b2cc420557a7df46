"""Jobs as launchers are told of them: what a job runs is read from its config, and written as one."""

from tensoropt.launchers.job import JobError, LaunchedJob
from tensoropt.launchers.registry import LAUNCHERS, read_job, write_job

__all__ = ["LAUNCHERS", "JobError", "LaunchedJob", "read_job", "write_job"]
