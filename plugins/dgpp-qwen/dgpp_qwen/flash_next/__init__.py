"""Qwen3.8-Flash-Next (``qwen4_exp``): gated delta rule, block-sparse attention, n-gram table, residual branches."""
