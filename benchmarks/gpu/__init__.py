"""A benchmark for machines with GPUs, run by `torchrun benchmarks/gpu`: models x plans x precisions."""
