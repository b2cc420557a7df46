SCHEDULES=("gpipe","1f1b","interleaved_1f1b","zero_bubble","zbv")
from tensoropt.errors import PlanError
def stages_per_rank(name): return 1 if name in SCHEDULES[:2] else 2
def check_schedule(name, ranks, per_rank, micro):
    if name=="1f1b" and micro<ranks: raise PlanError("few")
    if name=="interleaved_1f1b" and micro%ranks: raise PlanError("few")
    if name in("zero_bubble","zbv") and micro<2*ranks: raise PlanError("few")
    if name in("zero_bubble",) and micro%ranks: raise PlanError("few")
def stage_rank(name, ranks, stages, stage):
    return stage % ranks if name!="zbv" else (stage if stage<ranks else 2*ranks-1-stage)
