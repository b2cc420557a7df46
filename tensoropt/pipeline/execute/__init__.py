"""Running pipelined strategies, through ``torch.distributed.pipelining``."""
