"""MiMo-V2.6 (``mimo_v2``): global and sliding-window attention with sinks, mixture of experts, three draft blocks."""
