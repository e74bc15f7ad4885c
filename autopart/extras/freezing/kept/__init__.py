"""Activations at the end of the frozen layers, kept by sample, so that a step begins behind them (AutoCache).

Enters: where they are kept (`store`), what computes those that are missing (`code`), and what joins both to a batch
(`activations`).  Which values these are is a pass (`passes.graph.prefixes`); the program without the frozen layers is
made in `capture.shortened`, and everything else sees a batch with further inputs."""
