"""Functions that read training jobs from launchers' configs, and write jobs as configs."""

from tensoropt.launchers.job import JobError, LaunchedJob
from tensoropt.launchers.registry import LAUNCHERS, read_job, write_job

__all__ = ["LAUNCHERS", "JobError", "LaunchedJob", "read_job", "write_job"]
