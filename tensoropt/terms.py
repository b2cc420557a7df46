"""Terms shown on screens, each explained in one plain sentence, for the dashboard and the command line. The
code's terms are in the glossary of ``tensoropt/README.md``.
"""

from __future__ import annotations

_PROOF = (
    "That a plan is the best, or how much longer its step may be than the best one's, by the sums "
    "of costs in the search; it does not cover the simulated figures."
)
_RECOMPUTED = (
    "Blocks whose activations are not kept but computed a second time in backward: less memory for more time."
)
TERMS = {
    # the frontier
    "frontier": "All plans that no other plan beats in both memory per device and time per step.",
    "budget": "The memory that a plan may need of each device; the fastest plan within it is the answer.",
    "leanest": "The plan that needs the least memory of a device.",
    "knee": "The plan where the frontier bends most: leaner plans are much slower, faster ones much larger.",
    "fastest": "The plan with the shortest step.",
    "headroom": "The share of a device's memory that plans must leave free, as a reserve.",
    "proof": _PROOF,
    "proven": _PROOF,
    "certificate": _PROOF,
    "exact": "No searched plan is better, by the sums of costs in the search.",
    "baseline": "A usual strategy, or a published planner's plan, to compare the answer with.",
    "planner": "The method that found a plan: this search, or a published method that ran beside it.",
    # plans
    "DP": "Data parallelism: the devices share the samples of a batch, and add their gradients up.",
    "DDP": "PyTorch's data parallelism: each device keeps the whole model and computes a share of the batch.",
    "FSDP": "PyTorch's ZeRO-3: each device keeps a share of all parameters, gathered before each use.",
    "ZeRO": "Data parallelism in which a device keeps a share of parameters, gradients or optimizer state.",
    "ZeRO-1": "Each device keeps a share of the optimizer state; gradients are reduced once per step.",
    "ZeRO-2": "Each device keeps a share of optimizer state and gradients, reduced in each micro-batch.",
    "ZeRO-3": "Each device keeps a share of the parameters too, which are gathered before each use.",
    "TP": "Tensor parallelism: the devices share the weights and heads of each layer.",
    "SP": "Sequence parallelism: the devices share the positions of a sequence where weights are whole.",
    "CP": "Context parallelism: the devices share the positions of each sequence, in attention too.",
    "PP": "Pipeline parallelism: each device, or group of devices, computes some of the layers.",
    "EP": "Expert parallelism: the devices share the experts of a mixture of experts.",
    "placed": "Each operator runs on one device, which a planner chooses.",
    "mesh": "The devices as a grid, such as 2×4; each of its axes splits something, such as the batch.",
    "micro-batches": "The parts of a batch that are computed one after another, which takes less memory.",
    "blocks recomputed": _RECOMPUTED,
    "recompute": _RECOMPUTED,
    "stage": "The layers of a pipeline that one device, or group of devices, computes.",
    "schedule": "The order in which a pipeline's stages compute forward and backward of the micro-batches.",
    # memory
    "memory per device": "Memory needed on the fullest device: tensors, process, driver and allocator.",
    "on a device": "Whether it fits: tight if within the error of such predictions.",
    "optimizer state": "What the optimizer keeps for each parameter, such as Adam's two averages.",
    "kept activations": "Results of forward that are kept until backward reads them.",
    "buffers in flight": "Short-lived memory: workspaces, gathered parameters, messages.",
    # time
    "time per step": "How long forward, backward and the optimizer take for one batch, as simulated.",
    "compute": "How long a device computes in a step.",
    "communication": "How long a device's links are in use in a step; hidden: while it computes.",
    "network": "How long a device's links are in use in a step, while it computes or not.",
    "collective": "A message in which several devices take part, such as an all-reduce of gradients.",
    "idle": "How long a device waits for others or for its host.",
    "host": "How long the processor needs to issue a step to its device.",
    "throughput": "How many samples or tokens all devices read per second.",
    "MFU": "Model FLOPs utilisation: the share of the devices' peak speed that the model itself uses.",
    "device-hours": "Hours of the training times the number of devices.",
    "figures": "Where the seconds come from: timed on a device, fits of timings, or data sheets.",
    "sent": "The most bytes that a device sends in a step.",
}  # fmt: skip
"""Explanations by term, as screens write it."""
