"""One command for machines with GPUs, `torchrun benchmarks/gpu`: models x plans x precisions."""
