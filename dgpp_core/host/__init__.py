"""The plugin host: finds, checks and calls plugins; every process loads them through it."""
