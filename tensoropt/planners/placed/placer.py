"""TensorFlow's Placer: no costs, only rules about what belongs where.

M. Abadi et al., *TensorFlow: A System for Large-Scale Machine Learning*, OSDI 2016, section 3.3, and the
source, tensorflow/core/common_runtime/placer.cc and colocation_graph.cc:

1. operators joined by reference edges (``problem.references``) or colocation constraints
   (``problem.together``) form one group. Its devices are those that its constraints (``problem.pinned``)
   and kernels (finite times) leave. So a variable lies with the operators that read and update it
   (heuristic C); a variable whose readers are pinned to different devices is refused;
2. a group goes to the first of these devices in order of priority: the order of its constraints, otherwise
   the devices' own (GPUs before CPU ranks, by default device 0); orders of constraints that contradict each
   other do not count (``MergeSupportedDevices``);
3. heuristic B: an operator on metadata alone goes to the device of its input;
4. heuristic A: a generator (no input, one output, no state) waits for a second pass, and goes to the device
   of its consumers if all are on one.

If the default device cannot run an operator, the next one is taken, as under soft placement. The notes count
such operators.
"""

from __future__ import annotations

from dataclasses import replace

from tensoropt.errors import InfeasibleError
from tensoropt.placement import Placement, PlacementProblem, simulate_placement
from tensoropt.planners.placed.common.units import PlacedAnswer, units_of
from tensoropt.units import format_bytes


def place(problem: PlacementProblem, memory_limit_bytes: float | None, seed: int) -> PlacedAnswer:
    """Apply the rules to all operators in the model's order.

    Raises:
        InfeasibleError: constraints contradict each other, or a device is too small.
    """
    units = units_of(replace(problem, together=(*problem.together, *problem.references)))
    referring = {operator for operators in problem.references for operator in operators}
    device_of = [-1] * len(units.members)
    later: list[int] = []
    for operator, unit in enumerate(units.of):
        if device_of[unit] >= 0:
            continue
        # A reader of a variable has an input.
        if operator not in referring and _is_generator(problem, operator):
            later.append(operator)
            continue
        choices = units.by_priority[unit]
        device_of[unit] = choices[0]
        # Heuristic B; the input has its device already, as operators come in the model's order.
        if _is_metadata(problem, operator):
            source = problem.tensors[problem.read[operator][0]].producer
            input_device = device_of[units.of[source]]
            if input_device in choices:
                device_of[unit] = input_device
    # Heuristic A, after all others, as it looks at the devices of consumers.
    for operator in later:
        unit = units.of[operator]
        if device_of[unit] >= 0:
            continue
        choices = units.by_priority[unit]
        device_of[unit] = choices[0]
        readers = problem.tensors[problem.made[operator][0]].readers
        beside_all = {device_of[units.of[r]] for r in readers}
        if len(beside_all) == 1 and beside_all <= set(choices):
            device_of[unit] = beside_all.pop()
    placement = Placement.in_order([device_of[u] for u in units.of], problem.devices.count)
    _check_memory(problem, placement, memory_limit_bytes)
    pinned, default = {units.of[o] for o, _ in problem.pinned}, problem.devices.best_first[0]
    passed = sum(not units.allowed[u, default] and u not in pinned for u in units.of)
    if not passed:
        return PlacedAnswer(placement)
    note = f"{passed} operators cannot run on device {default} and lie on the next device that can"
    return PlacedAnswer(placement, (note,))


def _is_generator(problem: PlacementProblem, operator: int) -> bool:
    """Return whether an operator that reads no variable is a generator, as IsGeneratorNode of placer.cc: it
    has no input, one output and no state."""
    return (
        not problem.read[operator]
        and len(problem.made[operator]) == 1
        and bool(problem.tensors[problem.made[operator][0]].readers)
        and not problem.stored_bytes[operator]
    )


def _is_metadata(problem: PlacementProblem, operator: int) -> bool:
    """Return whether an operator only handles metadata: it takes no time and holds no data."""
    return (
        bool(problem.read[operator])
        and not problem.forward_s[operator].any()
        and not problem.backward_s[operator].any()
        and not problem.stored_bytes[operator]
    )


def _check_memory(problem: PlacementProblem, placement: Placement, limit: float | None) -> None:
    most = problem.devices.within(limit)
    peaks, in_all = simulate_placement(problem, placement).peak_bytes, problem.devices.in_all
    for device, (peak, room) in enumerate(zip(peaks, most, strict=True)):
        if peak > room:
            raise InfeasibleError(
                f"placer finds no plan within {format_bytes(in_all(room))}: device {device} reaches "
                f"{format_bytes(in_all(peak))}, as its rules ignore memory; pin operators to other "
                "devices, or use a planner that counts memory (m_topo, m_etf, dpos)"
            )
